"""pycolmap, pictures as they are stored and upright, and what COLMAP wants to know of the stored ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.errors import DataError
from dualrc.extras import require
from dualrc.geometry import Camera
from dualrc.image import read_header
from dualrc.machine import keep_signals
from dualrc.pixels import from_colmap, to_colmap
from dualrc.types import FloatArray, Size

# By EXIF orientation, how x and y of the stored picture's camera become those of the upright one's: rotated by 180
# degrees, by 90 clockwise and by 90 counterclockwise.
_ROTATIONS = {1: ((1, 0), (0, 1)), 3: ((-1, 0), (0, -1)), 6: ((0, -1), (1, 0)), 8: ((0, 1), (-1, 0))}


def import_pycolmap() -> Any:
    """The module pycolmap, or an error that says how to get it."""
    # Pillow's library must come first: the other way round writing a PNG ends the process.
    import_module("PIL.Image")
    with keep_signals():
        return require("pycolmap", "colmap", "COLMAP's models")


@contextmanager
def quiet_colmap(pycolmap: Any) -> Iterator[None]:
    """Keep COLMAP from writing its log to the screen; errors come as exceptions."""
    before = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = int(pycolmap.logging.FATAL.value)
    try:
        yield
    finally:
        pycolmap.logging.minloglevel = before


@dataclass(frozen=True, kw_only=True, eq=False)
class UprightRotation:
    """How a stored picture becomes the upright one: by quarter turns about its center."""

    pixels: FloatArray  # (3, 3), upright from stored
    camera: FloatArray  # (3, 3), upright from stored
    size: Size  # of the upright picture

    def rotate_camera(self, stored: Camera) -> Camera:
        """The camera of the upright picture."""
        return replace(
            stored,
            width=self.size[0],
            height=self.size[1],
            K=self.pixels @ stored.K @ self.camera.T,
            lens=stored.lens.turned(self.camera[:2, :2]),
            cam_from_world=None if stored.cam_from_world is None else self.camera @ stored.cam_from_world,
        )

    def stored_camera(self, upright: Camera) -> Camera:
        """The camera of the stored picture, without a pose."""
        # The matrix that rotates places rotates a size too, but for signs; the inverse of a rotation is its transpose.
        width, height = (int(abs(side)) for side in self.pixels[:2, :2].T @ upright.size)
        return replace(
            upright,
            width=width,
            height=height,
            K=np.linalg.inv(self.pixels) @ upright.K @ self.camera,
            lens=upright.lens.turned(self.camera[:2, :2].T),
            cam_from_world=None,
        )

    def rotate_points(self, stored: FloatArray) -> FloatArray:
        """Points (n, 2) of the upright picture."""
        return stored @ self.pixels[:2, :2].T + self.pixels[:2, 2]


def find_rotation(path: str | Path, size: Size | None = None) -> UprightRotation:
    """How a picture file with a camera for `size`, without it for the stored one, is rotated upright.

    A file that can't be read is taken as upright.
    """
    header = read_header(path)
    orientation, stored = (1, size or (1, 1)) if header is None else (header.orientation, header.stored_size)
    if orientation not in _ROTATIONS:
        remedy = "save it upright, without that tag, and run COLMAP on it again"
        raise DataError(f"{path} is mirrored by its EXIF orientation {orientation}, as no camera is; {remedy}.")
    width, height = size = size or stored
    sideways = orientation in (6, 8)
    if sideways and (width - height) * (stored[0] - stored[1]) < 0:
        # The camera is one of the upright picture: some versions of COLMAP rotated pictures themselves.
        orientation, sideways = 1, False
    camera = np.eye(3)
    camera[:2, :2] = rotation = np.array(_ROTATIONS[orientation])
    pixels = camera.copy()
    # A rotation about the first pixel, then a shift so that the picture begins at (0, 0) again.
    pixels[:2, 2] = -np.minimum(rotation @ (width - 1, height - 1), 0)
    return UprightRotation(pixels=pixels, camera=camera, size=(height, width) if sideways else size)


def stored_points(points: npt.ArrayLike, path: str | Path) -> FloatArray:
    """Upright points (n, 2) of a picture file in its pixels as they are stored, still in our convention."""
    upright, rotation = np.asarray(points, dtype=np.float64).reshape(-1, 2), find_rotation(path)
    # The inverse of a rotation is its transpose.
    return (upright - rotation.pixels[:2, 2]) @ rotation.pixels[:2, :2]


def colmap_points(points: npt.ArrayLike, path: str | Path | None = None) -> FloatArray:
    """Upright points (n, 2) of a picture file as COLMAP counts its pixels; without a file they are not rotated."""
    places = np.asarray(points, dtype=np.float64).reshape(-1, 2) if path is None else stored_points(points, path)
    return to_colmap(places)


def from_colmap_points(points: npt.ArrayLike, path: str | Path) -> FloatArray:
    """The inverse of `colmap_points`: keypoints (n, 2) of a stored picture file as upright points."""
    return find_rotation(path).rotate_points(from_colmap(np.asarray(points, dtype=np.float64).reshape(-1, 2)))


def colmap_camera(camera: Camera, path: str | Path, *, known: bool) -> Any:
    """pycolmap's Camera of a picture file: as it is if it is known, else one focal length and one distortion."""
    stored = find_rotation(path).stored_camera(camera)
    model, params = stored.to_colmap()
    if not known:
        model, params = "SIMPLE_RADIAL", [camera.focal_px, *to_colmap(stored.K[:2, 2]), 0.0]
    made = import_pycolmap().Camera(model=model, width=stored.width, height=stored.height, params=params)
    made.has_prior_focal_length = camera.source in ("file", "exif")
    return made


def upright_from_stored(path: str | Path) -> FloatArray:
    """The rotation (3, 3) from the camera of a picture file as it is stored to that of the upright picture."""
    return find_rotation(path).camera


def refuse_mirrored(path: str | Path) -> None:
    """Raise DataError if a picture file is mirrored by its EXIF orientation."""
    find_rotation(path)
