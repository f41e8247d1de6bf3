"""What scores mean: probabilities, fitted to matches and pairs that are known to be right or wrong.

A calibration belongs to a weights file and lies beside it, as NAME.calibration.json; `benchmarks/calibrate.py` makes
it.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.config import to_dict
from dualrc.errors import ConfigError
from dualrc.evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A rising map from a network's scores to probabilities, linear between its knots."""

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.probabilities) or len(self.scores) < 2:
            raise ConfigError("A curve of scores needs as many scores as probabilities, two or more.")
        for name in ("scores", "probabilities"):
            values = getattr(self, name)
            if not all(low < high < math.inf for low, high in itertools.pairwise(values)):
                raise ConfigError(f"The {name} of a curve must be numbers that rise.")
        if self.scores[0] != 0 or self.probabilities[0] < 0 or self.probabilities[-1] > 1:
            raise ConfigError("A curve must start at the score 0, and its probabilities must lie in 0 to 1.")

    def __call__(self, scores: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Probabilities of scores of any shape; the order of the scores is kept."""
        values = np.interp(np.asarray(scores, dtype=np.float64), self.scores, self.probabilities)
        return values.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class PairModel:
    """Logistic regression: how likely two pictures show some part in common, given the evidence in their matches."""

    bias: float
    strength: float
    motion: float
    epipolar: float

    def __call__(self, evidence: Evidence) -> float:
        """The probability, 0 to 1."""
        terms = zip(evidence, (self.strength, self.motion, self.epipolar), strict=True)
        odds = self.bias + sum(value * weight for value, weight in terms)
        return 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0)))

    @staticmethod
    def from_info(values: Mapping[str, Any]) -> "PairModel":
        """The model that `asdict` made plain values of."""
        return PairModel(**{name: float(value) for name, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a weights file's scores mean."""

    # The first digits of the weights' SHA-256: a calibration of other weights is not used.
    weights: str
    # Scores to the probability that a match is within 3 px of the truth, in pixels that the network sees: of `match`,
    # and of `match_points` and `warp`.
    matches: Curve
    points: Curve
    pairs: PairModel

    @property
    def hash(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of its values."""
        return hashlib.sha256(json.dumps(to_dict(self), sort_keys=True).encode()).hexdigest()[:16]

    def pair_info(self) -> dict[str, float]:
        """The model of pairs as plain values."""
        return asdict(self.pairs)
