"""What the robust estimators share."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.types import BoolArray, FloatArray


def ransac_options(threshold_px: float, max_iterations: int, seed: int) -> dict[str, Any]:
    """PoseLib's options."""
    return {
        "max_reproj_error": threshold_px,
        "max_epipolar_error": threshold_px,
        "max_iterations": max_iterations,
        "min_iterations": min(1000, max_iterations),
        "seed": seed,
        # Samples come from the best matches first (PROSAC): with nine in ten matches wrong it finds a model in a tenth
        # of the draws if the scores tell anything, and loses nothing if they don't.
        "progressive_sampling": True,
    }


def best_first(scores: FloatArray, *coordinates: FloatArray) -> npt.NDArray[np.int64]:
    """Rows by falling score, without those that have a coordinate (n, k) that is not finite."""
    order = np.argsort(-scores, kind="stable")
    finite: BoolArray = np.all(np.isfinite(np.hstack(coordinates)), axis=1)
    return order[finite[order]]


def scattered(flags: BoolArray, rows: npt.NDArray[np.int64], count: int) -> BoolArray:
    """Flags of some rows as flags of all `count`, false for the others."""
    result = np.zeros(count, dtype=np.bool_)
    result[rows] = flags
    return result
