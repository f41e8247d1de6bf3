"""What an exported model says about itself; models keep it as text by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from dualrc.calibration import Calibration
from dualrc.config import from_dict, to_dict
from dualrc.errors import ConfigError, WeightsError

Part = Literal["features", "pair"]
FORMAT = 1  # of the inputs, the outputs and this information
_KEY = "dualrc"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a runtime must know to use a model; both models of a pair have the same but for `part`."""

    part: Part
    preset: str
    weights: str  # the first digits of the SHA-256 of the weights file
    precision: str
    max_size: int  # longest side that the network sees, where the model takes any size
    antialias: bool  # whether images are smoothed before they are made smaller
    top: int  # rows of the pair model's outputs
    dualrc: str  # version that exported the model
    calibration: Calibration | None = None
    format: int = FORMAT

    def to_metadata(self) -> dict[str, str]:
        """As a model stores it."""
        return {_KEY: json.dumps(to_dict(self))}

    @classmethod
    def from_metadata(cls, values: Mapping[str, str], path: str) -> Self:
        """What a model at this path stores."""
        remedy = "export it again with `dualrc export onnx`"
        if _KEY not in values:
            raise WeightsError(f"{path} was not exported by dualrc; {remedy}.")
        try:
            plain = json.loads(values[_KEY])
            if plain.get("format") != FORMAT:
                raise WeightsError(f"{path} has the format {plain.get('format')}, not {FORMAT}; {remedy}.")
            return from_dict(cls, plain)
        except (ConfigError, ValueError, AttributeError, TypeError) as error:
            raise WeightsError(f"{path}: its metadata can't be used ({error}); {remedy}.") from error
