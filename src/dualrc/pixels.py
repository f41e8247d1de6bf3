"""The pixel convention and all its conversions, for numpy arrays and torch tensors.

Coordinates are (x, y), and the center of the first pixel is (0, 0). Cell i of a map with stride s has its center at
(i + 0.5) s - 0.5. Resizing by a ratio r maps x to (x + 0.5) r - 0.5, with a separate ratio for each axis. COLMAP
places the center of the first pixel at (0.5, 0.5).
"""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualrc.types import Size

if TYPE_CHECKING:
    from torch import Tensor

# Stride of the coarse map, in pixels of the network input.
STRIDE = 16
# Stride of the fine map, in pixels of the network input.
FINE_STRIDE = 4
# The paper's r: fine cells along each side of a coarse cell.
RATIO = STRIDE // FINE_STRIDE

Points = TypeVar("Points", npt.NDArray[Any], "Tensor")
Cells = TypeVar("Cells", npt.NDArray[Any], "Tensor", float)


def cell_to_pixel(cells: Cells, stride: float) -> Cells:
    """Map columns and rows of cells to the pixels of their centers; fractions are allowed."""
    return (cells + 0.5) * stride - 0.5


def pixel_to_cell(points: Cells, stride: float) -> Cells:
    """Invert `cell_to_pixel`; rounding gives the cell that contains a pixel."""
    return (points + 0.5) / stride - 0.5


def resize_points(points: Points, from_size: tuple[float, float], to_size: tuple[float, float]) -> Points:
    """Map points (..., 2) of an image of one size (width, height) to the same image resized to another."""
    ratio = [to / own for own, to in zip(from_size, to_size, strict=True)]
    if isinstance(points, np.ndarray):
        resized = np.empty(points.shape)
        # Twice as fast as all coordinates at once. With `dtype`, all versions of numpy compute float64.
        for axis in (0, 1):
            np.multiply(points[..., axis] + 0.5, ratio[axis], out=resized[..., axis], dtype=np.float64)
        return resized - 0.5
    import torch

    # Scalars instead of a tensor, because a CUDA graph cannot capture the copy of a tensor to the GPU.
    return torch.stack([(points[..., axis] + 0.5) * ratio[axis] - 0.5 for axis in (0, 1)], dim=-1)


def to_colmap(points: Points) -> Points:
    """Convert points (..., 2), or a principal point, to COLMAP's convention."""
    return points + 0.5


def from_colmap(points: Points) -> Points:
    """Invert `to_colmap`."""
    return points - 0.5


def image_center(size: Size) -> tuple[float, float]:
    """Return the center of an image of `size`."""
    return (size[0] - 1) / 2, (size[1] - 1) / 2


def pixel_to_unit(points: "Tensor", size: Size) -> "Tensor":
    """Convert points (..., 2) for `grid_sample` with align_corners=False: -1 and 1 are the outer edges of the image."""
    import torch

    return torch.stack([(points[..., axis] + 0.5) / size[axis] * 2 - 1 for axis in (0, 1)], dim=-1)


def unit_to_pixel(points: "Tensor", size: Size) -> "Tensor":
    """Invert `pixel_to_unit`."""
    import torch

    return torch.stack([(points[..., axis] + 1) / 2 * size[axis] - 0.5 for axis in (0, 1)], dim=-1)


def pixel_grid(size: Size) -> npt.NDArray[np.float32]:
    """Return the coordinates of every pixel: (height, width, 2)."""
    grid = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    return np.stack(grid, axis=-1).astype(np.float32)


def in_image(points: Points, size: Size) -> Points:
    """Return whether points (..., 2) lie on an image of `size`, including its outer edges: (...); NaN gives False."""
    x, y = points[..., 0], points[..., 1]
    return (x >= -0.5) & (x <= size[0] - 0.5) & (y >= -0.5) & (y <= size[1] - 0.5)
