"""Accuracy and recall, areas under curves, and coverage: pure functions of errors and points."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dualrc.geometry import apply_homography, direction_error_deg, homography_grid, rotation_error_deg
from dualrc.matches import Matches
from dualrc.pixels import on_picture, resize_points
from dualrc.types import BoolArray, FloatArray, Size

# Places per axis at which the overlap of two pictures is looked at: ten in every cell of the usual grid.
_OVERLAP_SAMPLES = 100


def match_errors_px(matches: Matches, H: npt.ArrayLike) -> FloatArray:
    """How far each point of picture 1 is from where the true homography sends its point of picture 0: (n,)."""
    with np.errstate(invalid="ignore"):  # inf - inf
        offsets = apply_homography(H, matches.points0) - matches.points1
    errors: FloatArray = np.linalg.norm(offsets, axis=1)
    return np.where(np.isnan(errors), np.inf, errors)


def share_within(errors: npt.ArrayLike, thresholds: Sequence[float]) -> FloatArray:
    """The share of errors within each threshold, 0 where there are none: (k,).

    Of a pair's matches it is the matching accuracy, whose mean over pairs is the MMA; of pairs it is the recall.
    Failures are infinite or NaN errors.
    """
    values = np.asarray(errors, dtype=np.float64).ravel()
    if not len(values):
        return np.zeros(len(thresholds))
    shares: FloatArray = (values[:, None] <= np.asarray(thresholds)).mean(axis=0)
    return shares


def area_under_curve(errors: npt.ArrayLike, thresholds: Sequence[float]) -> FloatArray:
    """The area under the curve of recall over the error up to each threshold, as a share of the whole: (k,).

    The curve runs straight from (0, 0) through every sorted error, as published evaluations draw it, and stays level
    from the last error below the threshold on. Failures are infinite or NaN errors.
    """
    values = np.asarray(errors, dtype=np.float64).ravel()
    values = np.sort(np.where(np.isnan(values), np.inf, values))
    if not len(values):
        return np.zeros(len(thresholds))
    places = np.concatenate([[0.0], values])
    heights = np.arange(len(places)) / len(values)
    areas = []
    for threshold in thresholds:
        count = int(np.searchsorted(places, threshold, side="right"))
        x = np.append(places[:count], threshold)
        y = np.append(heights[:count], heights[count - 1])
        areas.append(float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2)) / threshold)
    return np.array(areas)


def pose_error_deg(cam1_from_cam0: npt.ArrayLike, true_cam1_from_cam0: npt.ArrayLike) -> float:
    """The larger of the errors of rotation and of translation direction, poses (3, 4); inf if undefined.

    t and -t count as the same direction, as in published evaluations.
    """
    pose, truth = np.asarray(cam1_from_cam0, dtype=np.float64), np.asarray(true_cam1_from_cam0, dtype=np.float64)
    rotation = rotation_error_deg(pose[:3, :3], truth[:3, :3])
    direction = direction_error_deg(pose[:3, 3], truth[:3, 3], either_sign=True)
    error = max(rotation, direction) if np.isfinite(direction) else float("inf")
    return error if np.isfinite(error) else float("inf")


def coverage(points0: npt.ArrayLike, H: npt.ArrayLike, size0: Size, size1: Size, *, cells: int = 10) -> float:
    """The share of the overlap's cells that hold a point of picture 0; 0 where the pictures don't overlap.

    The grid of cells x cells lies over the part of picture 0 that picture 1 shows; cells outside of it don't count.
    """
    inside = _overlap(H, size0, size1)
    if not inside.any():
        return 0.0
    step = np.array(size0) / _OVERLAP_SAMPLES
    row, column = np.nonzero(inside)
    corner = np.array([column.min(), row.min()]) * step - 0.5
    extent = np.array([np.ptp(column) + 1, np.ptp(row) + 1]) * step

    def occupied(points: FloatArray) -> set[tuple[int, int]]:
        places = np.floor((points - corner) / extent * cells)
        return {(int(x), int(y)) for x, y in places[np.all((places >= 0) & (places < cells), axis=1)]}

    samples = resize_points(np.stack([column, row], axis=1), (_OVERLAP_SAMPLES, _OVERLAP_SAMPLES), size0)
    points = np.asarray(points0, dtype=np.float64).reshape(-1, 2)
    shown = occupied(samples)
    return len(occupied(points) & shown) / len(shown)


def _overlap(H: npt.ArrayLike, size0: Size, size1: Size) -> BoolArray:
    """Which places of a regular grid over picture 0 are shown by picture 1, (rows, columns)."""
    if 0 in (*size0, *size1):
        return np.zeros((0, 0), dtype=bool)
    # The inverse homography sends pixels of picture 0 to picture 1, and knows of the horizon.
    grid = homography_grid(np.linalg.inv(np.asarray(H)), size1, size0, (_OVERLAP_SAMPLES, _OVERLAP_SAMPLES))
    return on_picture(grid, size1)
