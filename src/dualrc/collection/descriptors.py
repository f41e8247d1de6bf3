"""A file of global descriptors, so that a second run need not make them again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.files import replacing
from dualrc.types import FloatArray


def read_descriptors(path: Path, config: Mapping[str, Any]) -> dict[str, FloatArray]:
    """Descriptors by picture name; none if the file is absent, broken, or made with another config."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if json.loads(str(arrays["config"])) != json.loads(json.dumps(config)):
                return {}
            return dict(zip(arrays["names"].tolist(), arrays["vectors"], strict=True))
    except Exception:  # it is only a cache, and a damaged file can fail in any way
        return {}


def write_descriptors(path: Path, config: Mapping[str, Any], descriptors: Mapping[str, FloatArray]) -> None:
    """Write them all, whole or not at all."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        vectors = np.stack([*descriptors.values()]) if descriptors else np.zeros((0, 0), np.float32)
        np.savez(file, names=np.array([*descriptors], dtype=str), vectors=vectors, config=np.array(json.dumps(config)))
