"""The pixel convention: the one home of its conversions, for numpy arrays and torch tensors alike.

Coordinates are (x, y), and the center of the first pixel is (0, 0). Cell i of a map with stride s is centered at
(i + 0.5) s - 0.5. Resizing by a ratio r maps x to (x + 0.5) r - 0.5, each axis with its own ratio. COLMAP puts the
center of the first pixel at (0.5, 0.5).
"""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualrc.types import Size

if TYPE_CHECKING:
    from torch import Tensor

STRIDE = 16  # pixels of a network input along each side of a coarse cell
FINE_STRIDE = 4  # and of a fine cell
RATIO = STRIDE // FINE_STRIDE  # fine cells along each side of a coarse cell

Points = TypeVar("Points", npt.NDArray[Any], "Tensor")
Cells = TypeVar("Cells", npt.NDArray[Any], "Tensor", float)


def cell_to_pixel(cells: Cells, stride: float) -> Cells:
    """Centers of cells, by their column and row, in pixels; fractions of cells are fine."""
    return (cells + 0.5) * stride - 0.5


def pixel_to_cell(points: Cells, stride: float) -> Cells:
    """The inverse of `cell_to_pixel`: round it for the cell that holds a pixel."""
    return (points + 0.5) / stride - 0.5


def resize_points(points: Points, from_size: tuple[float, float], to_size: tuple[float, float]) -> Points:
    """Points (..., 2) of an image of one size (width, height) in the same image resized to another."""
    ratio = [to / own for own, to in zip(from_size, to_size, strict=True)]
    if isinstance(points, np.ndarray):
        return (points + 0.5) * np.array(ratio) - 0.5
    import torch

    # By numbers rather than a tensor of ratios, whose way to a GPU a CUDA graph can't record.
    return torch.stack([(points[..., axis] + 0.5) * ratio[axis] - 0.5 for axis in (0, 1)], dim=-1)


def to_colmap(points: Points) -> Points:
    """Points (..., 2), or a principal point, as COLMAP counts pixels."""
    return points + 0.5


def from_colmap(points: Points) -> Points:
    """The inverse of `to_colmap`."""
    return points - 0.5


def pixel_to_unit(points: "Tensor", size: Size) -> "Tensor":
    """Points (..., 2) as `grid_sample` takes them, corners not aligned: -1 and 1 are the outer edges of the image."""
    import torch

    return torch.stack([(points[..., axis] + 0.5) / size[axis] * 2 - 1 for axis in (0, 1)], dim=-1)


def pixel_grid(size: Size) -> npt.NDArray[np.float32]:
    """The coordinates of every pixel: (height, width, 2)."""
    grid = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    return np.stack(grid, axis=-1).astype(np.float32)


def on_picture(points: Points, size: Size) -> Points:
    """Which points (..., 2) lie on an image of `size`, its outer edges included: booleans (...); NaN does not."""
    x, y = points[..., 0], points[..., 1]
    return (x >= -0.5) & (x <= size[0] - 0.5) & (y >= -0.5) & (y <= size[1] - 0.5)
