"""Dense warps: the position in another image for every pixel of an image."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.errors import DataError
from dualrc.geometry.homography import apply_homography
from dualrc.pixels import image_center, pixel_grid, resize_points
from dualrc.types import FloatArray, ImageArray, Size


def homography_grid(H: npt.ArrayLike, size0: Size, size1: Size, shown: Size | None = None) -> FloatArray:
    """Return positions in image 0 of the pixels of image 1 at size `shown`: (h, w, 2); NaN beyond the horizon."""
    H = np.asarray(H, dtype=np.float64)
    try:
        inverse = np.linalg.inv(H)
    except np.linalg.LinAlgError as error:
        raise DataError("The homography is singular and cannot warp an image; estimate another one.") from error
    shown = shown or size1
    grid = resize_points(pixel_grid(shown).astype(np.float64), shown, size1)
    pixels = grid.reshape(-1, 2)
    # Visible points lie on the same side of the horizon as the center of image 0.
    center = np.array([*image_center(size0), 1.0])
    depth = (pixels @ inverse[2, :2] + inverse[2, 2]) * (H[2] @ center)
    return np.where(depth[:, None] > 0, apply_homography(inverse, pixels), np.nan).reshape(grid.shape)


def bilinear_corners(points: FloatArray, size: Size) -> tuple[Any, Any, FloatArray]:
    """Return rows, columns and weights, (4, ...) each, of the pixels around points (..., 2) in an image of `size`.

    A pixel with weight 0 repeats the pixel of the point, so that the value at a pixel center is exact.
    """
    clipped = np.clip(points, 0, (size[0] - 1, size[1] - 1))
    left, top = np.moveaxis(clipped.astype(np.int64), -1, 0)
    x, y = np.moveaxis(clipped, -1, 0) - (left, top)
    right, below = left + (x > 0), top + (y > 0)
    weights = np.stack([v * h for v in (1 - y, y) for h in (1 - x, x)])
    return np.stack([top, top, below, below]), np.stack([left, right, left, right]), weights


def sample_bilinear(image: ImageArray, points: FloatArray) -> FloatArray:
    """Sample an image (h, w, c) at points (..., 2), clamped at the border; NaN gives zero: (..., c)."""
    finite = np.all(np.isfinite(points), axis=-1, keepdims=True)
    rows, columns, weights = bilinear_corners(np.where(finite, points, 0), (image.shape[1], image.shape[0]))
    # One corner at a time, to save memory.
    corners = zip(rows, columns, weights, strict=True)
    values: FloatArray = sum(image[row, column] * weight[..., None] for row, column, weight in corners)
    return np.where(finite, values, 0.0)
