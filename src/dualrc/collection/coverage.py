"""Coverage of a pair: in which share of the area that both images should show the pair has inliers.

Different places that look alike differ in what is next to them. Matches of such a pair stop in the middle of both
images, although other pairs match what is there. Matches of a true pair stop where one of the images ends.
"""

from typing import NamedTuple

import numpy as np

from dualrc import geometry
from dualrc.geometry import Camera
from dualrc.matches import Matches
from dualrc.pixels import cell_to_pixel, pixel_to_cell
from dualrc.types import BoolArray, FloatArray, IntArray

# Number of cells along the long side of an image.
_CELLS = 32
# Number of inliers from which the depth of a cell is estimated.
_DEPTHS = 9


def cells_of(points: FloatArray, size: tuple[int, int]) -> IntArray:
    """Return the cells (rows, columns) of an image with points (n, 2), as 0 and 1."""
    cell = _cell_px(size)
    found = np.zeros((int(np.ceil(size[1] / cell)), int(np.ceil(size[0] / cell))), np.int64)
    found[_cell(points, size, found.shape)] = 1
    return found


class _View(NamedTuple):
    """Inliers, camera and matched cells of one image of a pair."""

    points: FloatArray
    camera: Camera
    cells: BoolArray


def cover(
    inliers: Matches, pose: FloatArray, camera0: Camera, camera1: Camera, cells0: BoolArray, cells1: BoolArray
) -> float:
    """Return the coverage of a pair with this pose, the lower one of both images; 1 if nothing is expected.

    `cells0` and `cells1`: the cells of the images that other pairs match. The depth of a cell is that of the inliers
    around it. If this places the cell on a cell of the other image that other pairs match too, inliers are expected.
    """
    view0 = _View(inliers.points0.astype(np.float64), camera0, cells0)
    view1 = _View(inliers.points1.astype(np.float64), camera1, cells1)
    back = geometry.cam1_from_cam0(pose, np.eye(3, 4))
    return min(_share(pose, view0, view1), _share(back, view1, view0))


def _share(pose: FloatArray, view0: _View, view1: _View) -> float:
    """Return the share of image 0's expected cells with inliers in them or next to them."""
    from scipy.ndimage import maximum_filter

    size0, size1 = view0.camera.size, view1.camera.size
    row, column = np.nonzero(view0.cells)
    places = _predict(pose, view0, view1, cell_to_pixel(np.stack([column, row], axis=1), _cell_px(size0)))
    # The prediction is about as exact as a cell.
    margin = _cell_px(size1)
    inside = ((places > margin) & (places < np.array(size1) - 1 - margin)).all(axis=1)
    expected = inside & view1.cells[_cell(places, size1, view1.cells.shape)]
    found = maximum_filter(cells_of(view0.points, size0), 3, mode="constant")[row, column] > 0
    return float((expected & found).sum() / expected.sum()) if expected.any() else 1.0


def _predict(pose: FloatArray, view0: _View, view1: _View, places: FloatArray) -> FloatArray:
    """Return the positions in image 1 of points (n, 2) of image 0 that are as deep as the inliers around them."""
    from scipy.spatial import cKDTree

    points0, camera0, camera1 = view0.points, view0.camera, view1.camera
    rays0, rays1 = camera0.rays(points0) @ pose[:, :3].T, camera1.rays(view1.points)
    # Inverse depths are defined without parallax too.
    across, along = np.cross(rays1, rays0), np.cross(rays1, pose[:, 3])
    inverse_depths = np.clip(-(across * along).sum(1) / np.maximum((along**2).sum(1), 1e-12), 0, None)
    count = min(_DEPTHS, len(points0))
    near = cKDTree(points0).query(places, k=count)[1].reshape(len(places), count)
    rays = camera0.rays(places) @ pose[:, :3].T + np.median(inverse_depths[near], axis=1)[:, None] * pose[:, 3]
    return np.where(rays[:, 2:] > 0, np.nan_to_num(camera1.project(rays), nan=-1e9), -1e9)


def _cell_px(size: tuple[int, int]) -> float:
    return max(size) / _CELLS


def _cell(points: FloatArray, size: tuple[int, int], shape: tuple[int, ...]) -> tuple[IntArray, IntArray]:
    """Return the rows and columns of the cells of points (n, 2), the nearest ones outside the image."""
    nearest = np.rint(pixel_to_cell(points, _cell_px(size)))
    column, row = np.clip(nearest, 0, (shape[1] - 1, shape[0] - 1)).astype(np.int64).T
    return row, column
