"""Metrics: accuracy, recall, area under a curve, and coverage, as pure functions of errors and points."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dualrc.geometry import apply_homography, direction_error_deg, homography_grid, rotation_error_deg
from dualrc.matches import Matches
from dualrc.pixels import in_image, resize_points
from dualrc.types import BoolArray, FloatArray, Size

# Samples per axis for the overlap of two images: ten in every cell of the usual grid.
_OVERLAP_SAMPLES = 100


def match_errors_px(matches: Matches, H: npt.ArrayLike) -> FloatArray:
    """Return the distance of each point of image 1 to its point of image 0 mapped by the true homography: (n,)."""
    # inf - inf is NaN.
    with np.errstate(invalid="ignore"):
        offsets = apply_homography(H, matches.points0) - matches.points1
    errors: FloatArray = np.linalg.norm(offsets, axis=1)
    return np.where(np.isnan(errors), np.inf, errors)


def share_within(errors: npt.ArrayLike, thresholds: Sequence[float]) -> FloatArray:
    """Return the share of errors within each threshold, 0 if there are no errors: (k,).

    For the matches of a pair this is the matching accuracy, whose mean over pairs is the MMA. For pairs it is the
    recall. Failures have infinite or NaN errors.
    """
    values = np.asarray(errors, dtype=np.float64).ravel()
    if not len(values):
        return np.zeros(len(thresholds))
    return (values[:, None] <= np.asarray(thresholds)).mean(axis=0)


def area_under_curve(errors: npt.ArrayLike, thresholds: Sequence[float]) -> FloatArray:
    """Return the area under the curve of recall over error up to each threshold, normalized to 1: (k,).

    The curve is linear from (0, 0) through every sorted error, as in published evaluations. It is constant after the
    last error below the threshold. Failures have infinite or NaN errors.
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
    """Return the larger of the rotation error and the translation direction error, poses (3, 4); inf if undefined.

    t and -t count as the same direction, as in published evaluations.
    """
    pose, truth = np.asarray(cam1_from_cam0, dtype=np.float64), np.asarray(true_cam1_from_cam0, dtype=np.float64)
    rotation = rotation_error_deg(pose[:3, :3], truth[:3, :3])
    direction = direction_error_deg(pose[:3, 3], truth[:3, 3], either_sign=True)
    error = max(rotation, direction) if np.isfinite(direction) else float("inf")
    return error if np.isfinite(error) else float("inf")


def coverage(points0: npt.ArrayLike, H: npt.ArrayLike, size0: Size, size1: Size, *, cells: int = 10) -> float:
    """Return the share of the overlap's cells that contain a point of image 0; 0 without overlap.

    The grid of cells x cells covers the part of image 0 that is visible in image 1; cells outside it do not count.
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
    """Return which samples of a regular grid over image 0 are visible in image 1, (rows, columns)."""
    if 0 in (*size0, *size1):
        return np.zeros((0, 0), dtype=bool)
    # homography_grid with the inverse maps image 0 to image 1 and handles the horizon.
    grid = homography_grid(np.linalg.inv(np.asarray(H)), size1, size0, (_OVERLAP_SAMPLES, _OVERLAP_SAMPLES))
    return in_image(grid, size1)
