"""Common parts of the robust estimators."""

from importlib import import_module
from typing import Any

import numpy as np

from dualrc.errors import ConfigError
from dualrc.types import BoolArray, FloatArray, IntArray


def import_poselib() -> Any:
    """Import PoseLib on first use, because PyPI has no wheels of it for Linux on aarch64."""
    try:
        return import_module("poselib")
    except ImportError as error:
        raise ConfigError(
            f"Estimation of models and poses needs PoseLib ({error}): pip install poselib. PyPI does not have it for "
            "every platform; to compile it, pip install git+https://github.com/PoseLib/PoseLib."
        ) from error


def ransac_options(threshold_px: float, max_iterations: int, seed: int) -> dict[str, Any]:
    """Return the options of PoseLib."""
    return {
        "max_reproj_error": threshold_px,
        "max_epipolar_error": threshold_px,
        "max_iterations": max_iterations,
        "min_iterations": min(1000, max_iterations),
        "seed": seed,
        # PROSAC samples the best matches first. With 90 % outliers it needs a tenth of the samples.
        # It costs nothing if the scores carry no information.
        "progressive_sampling": True,
    }


def best_first(scores: FloatArray, *coordinates: FloatArray) -> IntArray:
    """Return rows by descending score, without rows that have a non-finite coordinate (n, k)."""
    order = np.argsort(-scores, kind="stable")
    finite: BoolArray = np.all(np.isfinite(np.hstack(coordinates)), axis=1)
    return order[finite[order]]


def scattered(flags: BoolArray, rows: IntArray, count: int) -> BoolArray:
    """Expand flags of some rows to all `count` rows; the others are False."""
    result = np.zeros(count, dtype=np.bool_)
    result[rows] = flags
    return result
