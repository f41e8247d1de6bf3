"""The direction between two cameras whose rotation is known."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.types import FloatArray

# Fewest matches for a direction, and number of matches that score the samples.
_FEWEST, _SAMPLE = 5, 1500


def estimate_direction(
    rays0: npt.ArrayLike, rays1: npt.ArrayLike, rotation: npt.ArrayLike, threshold: float, *, draws: int = 500
) -> FloatArray | None:
    """Estimate the direction t (3,) for a known rotation cam1_from_cam0 (3, 3); None if there are too few rays.

    Rays (n, 3) have depth 1, best first. The threshold on the Sampson distance is in units of rays, pixels divided by
    the focal length. Two matches determine a direction. The one with the most inliers is refined on them.
    """
    R = np.asarray(rotation, dtype=np.float64)
    x0, x1 = np.asarray(rays0, dtype=np.float64), np.asarray(rays1, dtype=np.float64)
    if len(x0) < _FEWEST:
        return None
    y0 = x0 @ R.T
    # x1' [t]x R x0 and the epipolar lines are linear in t; the residual is t . normals.
    normals = np.cross(y0, x1)
    # (n, 2, 3) each
    lines1 = np.cross(y0[:, None], np.eye(3)[:2]), np.cross(x1[:, None], R[:, :2].T)

    def distances(directions: FloatArray, rows: Any) -> FloatArray:
        """Return Sampson distances (m, n) for directions (m, 3)."""
        squares = sum((directions @ lines[rows, i].T) ** 2 for lines in lines1 for i in range(2))
        return np.abs(directions @ normals[rows].T) / np.sqrt(squares + 1e-30)

    rows = np.arange(min(len(x0), _SAMPLE))
    first, second = np.random.default_rng(0).integers(0, len(rows), (2, draws))
    candidates = np.cross(normals[first], normals[second])
    lengths = np.linalg.norm(candidates, axis=1)
    candidates = candidates[lengths > 1e-15] / lengths[lengths > 1e-15, None]
    if not len(candidates):
        return None
    costs = np.minimum((distances(candidates, rows) / threshold) ** 2, 1).sum(1)
    best: FloatArray = candidates[costs.argmin()]
    for _ in range(5):
        off = distances(best[None], slice(None))[0]
        near = off <= threshold
        if near.sum() < _FEWEST:
            return None
        scale = np.abs(normals[near] @ best) / np.maximum(off[near], 1e-15)
        rows_scaled = normals[near] / np.maximum(scale, 1e-15)[:, None]
        best = np.linalg.svd(rows_scaled.T @ rows_scaled)[0][:, -1]
    # Choose the sign with more points in front of both cameras.
    across = np.cross(x1[near], y0[near])
    depth0 = np.sum(np.cross(np.broadcast_to(best, across.shape), x1[near]) * across, axis=1)
    return best if np.mean(depth0 > 0) > 0.5 else -best
