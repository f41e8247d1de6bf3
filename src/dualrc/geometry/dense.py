"""Dense warps: for every pixel of one picture its place in another one."""

import numpy as np
import numpy.typing as npt

from dualrc.errors import DataError
from dualrc.geometry.homography import apply_homography
from dualrc.pixels import pixel_grid, resize_points
from dualrc.types import FloatArray, ImageArray, Size


def homography_grid(H: npt.ArrayLike, size0: Size, size1: Size, shown: Size | None = None) -> FloatArray:
    """For the pixels of picture 1, at `shown` size, their places in picture 0: (h, w, 2); NaN beyond the horizon."""
    H = np.asarray(H, dtype=np.float64)
    try:
        inverse = np.linalg.inv(H)
    except np.linalg.LinAlgError as error:
        raise DataError("The homography is singular, so nothing can be warped by it; estimate another one.") from error
    shown = shown or size1
    grid = resize_points(pixel_grid(shown).astype(np.float64), shown, size1)
    pixels = grid.reshape(-1, 2)
    # What is seen lies on the same side of the horizon as the centre of picture 0 does.
    center = np.array([(size0[0] - 1) / 2, (size0[1] - 1) / 2, 1.0])
    depth = (pixels @ inverse[2, :2] + inverse[2, 2]) * (H[2] @ center)
    return np.where(depth[:, None] > 0, apply_homography(inverse, pixels), np.nan).reshape(grid.shape)


def sample_bilinear(picture: ImageArray, points: FloatArray) -> FloatArray:
    """Values of a picture (h, w, c) at points (..., 2), those of its border beyond it, and zero for NaN: (..., c)."""
    height, width = picture.shape[:2]
    finite = np.all(np.isfinite(points), axis=-1, keepdims=True)
    clipped = np.clip(np.where(finite, points, 0), 0, (width - 1, height - 1))
    left_top = clipped.astype(np.int64)
    column, row = left_top[..., 0], left_top[..., 1]
    right, below = np.minimum(column + 1, width - 1), np.minimum(row + 1, height - 1)
    part = clipped - left_top
    part_x, part_y = part[..., :1], part[..., 1:]
    upper = picture[row, column] * (1 - part_x) + picture[row, right] * part_x
    lower = picture[below, column] * (1 - part_x) + picture[below, right] * part_x
    return np.where(finite, upper * (1 - part_y) + lower * part_y, 0.0)
