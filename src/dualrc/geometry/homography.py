"""Homographies: 3x3 matrices with x1 ~ H x0, in pixels; the center of the first pixel is (0, 0)."""

import numpy as np
import numpy.typing as npt

from dualrc.types import FloatArray, Size


def apply_homography(H: npt.ArrayLike, points: npt.ArrayLike) -> FloatArray:
    """Map points (n, 2) -> (n, 2); points at infinity become inf or NaN."""
    homogeneous = to_homogeneous(points) @ np.asarray(H, dtype=np.float64).T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return homogeneous[:, :2] / homogeneous[:, 2:]


def resize_homography(size: Size, new_size: Size) -> FloatArray:
    """Return the map from pixels of an image of `size` (width, height) to the image resized to `new_size`."""
    ratio_x, ratio_y = new_size[0] / size[0], new_size[1] / size[1]
    return np.array([[ratio_x, 0, (ratio_x - 1) / 2], [0, ratio_y, (ratio_y - 1) / 2], [0, 0, 1]])


def crop_homography(left: float, top: float) -> FloatArray:
    """Return the map from pixels of an image to its crop whose first pixel is (left, top)."""
    return np.array([[1.0, 0, -left], [0, 1, -top], [0, 0, 1]])


def corner_error_px(H_a: npt.ArrayLike, H_b: npt.ArrayLike, size: Size) -> float:
    """Return the mean distance between the corners of an image mapped by two homographies; inf if undefined."""
    right, bottom = size[0] - 1, size[1] - 1
    corners = np.array([[0, 0], [right, 0], [right, bottom], [0, bottom]], dtype=np.float64)
    # inf - inf is NaN.
    with np.errstate(invalid="ignore"):
        offsets = apply_homography(H_a, corners) - apply_homography(H_b, corners)
    error = float(np.linalg.norm(offsets, axis=1).mean())
    return error if np.isfinite(error) else float("inf")


def to_homogeneous(points: npt.ArrayLike) -> FloatArray:
    """Append a 1 to every point: (n, 2) -> (n, 3)."""
    array = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    return np.concatenate([array, np.ones((len(array), 1))], axis=1)
