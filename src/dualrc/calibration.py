"""Calibration of scores: probabilities, fitted to matches and pairs that are known to be correct or wrong.

A calibration belongs to a weights file and lies next to it, as NAME.calibration.json; `benchmarks/calibrate.py` creates
it.
"""

import hashlib
import itertools
import json
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualrc.errors import ConfigError
from dualrc.evidence import Evidence
from dualrc.toml import to_dict


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Increasing, piecewise linear map from network scores to probabilities."""

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.probabilities) or len(self.scores) < 2:
            raise ConfigError(
                "A calibration curve needs as many scores as probabilities, at least two; add the missing ones."
            )
        for name in ("scores", "probabilities"):
            values = getattr(self, name)
            if not all(low < high < math.inf for low, high in itertools.pairwise(values)):
                raise ConfigError(f"The {name} of a calibration curve must be increasing numbers; correct them.")
        if self.scores[0] != 0 or self.probabilities[0] < 0 or self.probabilities[-1] > 1:
            raise ConfigError("A calibration curve must start at score 0 with probabilities from 0 to 1; correct it.")

    def __call__(self, scores: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Convert scores of any shape to probabilities; their order does not change."""
        values = np.interp(np.asarray(scores, dtype=np.float64), self.scores, self.probabilities)
        return values.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class PairModel:
    """Logistic regression of the probability that two images overlap, given the evidence in their matches."""

    bias: float
    strength: float
    motion: float
    epipolar: float

    def __call__(self, evidence: Evidence) -> float:
        """Return the probability, 0 to 1."""
        terms = zip(evidence, (self.strength, self.motion, self.epipolar), strict=True)
        odds = self.bias + sum(value * weight for value, weight in terms)
        return 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0)))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration of the scores of a weights file."""

    # First digits of the SHA-256 of the weights. A calibration of other weights is not used.
    weights: str
    # Maps scores of `match` to the probability that a match is correct within 3 px of the network input.
    matches: Curve
    # The same for scores of `match_points` and `warp`.
    points: Curve
    # Maps the evidence of a pair to the probability that its images overlap.
    pairs: PairModel

    @property
    def hash(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the values."""
        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()[:16]
