"""Metadata of exported models, stored in the model files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from dualrc.calibration import Calibration
from dualrc.errors import ConfigError, WeightsError
from dualrc.toml import from_dict, to_dict

Part = Literal["features", "pair"]
# Version of the inputs, the outputs and the metadata.
FORMAT = 1
# Key of the metadata in a model file.
_KEY = "dualrc"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Information needed to run a model; it is the same for both models except for `part`."""

    part: Part
    preset: str
    # First digits of the SHA-256 of the weights file.
    weights: str
    precision: str
    # Maximum long side of the network input, for models that accept any size.
    max_size: int
    # Whether images are smoothed when they are scaled down.
    antialias: bool
    # Number of rows of the outputs of the pair model.
    top: int
    # Version of dualrc that exported the model.
    dualrc: str
    calibration: Calibration | None = None
    format: int = FORMAT

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata entries of a model file."""
        return {_KEY: json.dumps(to_dict(self))}

    @classmethod
    def from_metadata(cls, values: Mapping[str, str], path: str) -> Self:
        """Return the information in the metadata entries of the model at `path`."""
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
