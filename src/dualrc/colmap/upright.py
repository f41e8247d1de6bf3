"""Import of pycolmap, and conversion between stored and upright images."""

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

# Rotation of the camera's x and y from the stored to the upright image, by EXIF orientation: none, 180 degrees,
# 90 degrees clockwise, 90 degrees counterclockwise.
_ROTATIONS = {1: ((1, 0), (0, 1)), 3: ((-1, 0), (0, -1)), 6: ((0, -1), (1, 0)), 8: ((0, 1), (-1, 0))}


def import_pycolmap() -> Any:
    """Import pycolmap, or raise an error that names the extra to install."""
    # Pillow's library must be loaded first; in the other order, writing a PNG crashes the process.
    import_module("PIL.Image")
    with keep_signals():
        return require("pycolmap", "colmap", "COLMAP's models")


@contextmanager
def quiet_colmap(pycolmap: Any) -> Iterator[None]:
    """Keep COLMAP from logging to the terminal; its errors are raised as exceptions."""
    before = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = int(pycolmap.logging.FATAL.value)
    try:
        yield
    finally:
        pycolmap.logging.minloglevel = before


@dataclass(frozen=True, kw_only=True, eq=False)
class UprightRotation:
    """Rotation of a stored image to the upright image, by quarter turns."""

    # (3, 3), upright from stored.
    pixels: FloatArray
    # (3, 3), upright from stored.
    camera: FloatArray

    def inverse(self) -> "UprightRotation":
        """Return the rotation of the upright image to the stored image."""
        return UprightRotation(pixels=np.linalg.inv(self.pixels), camera=self.camera.T)

    def rotate_size(self, stored: Size) -> Size:
        """Return the size of the upright image."""
        # Up to signs, the matrix that rotates points also rotates a size.
        width, height = np.abs(self.pixels[:2, :2] @ stored)
        return int(width), int(height)

    def rotate_camera(self, stored: Camera) -> Camera:
        """Return the camera of the upright image."""
        width, height = self.rotate_size(stored.size)
        return replace(
            stored,
            width=width,
            height=height,
            K=self.pixels @ stored.K @ self.camera.T,
            lens=stored.lens.rotated(self.camera[:2, :2]),
            cam_from_world=None if stored.cam_from_world is None else self.camera @ stored.cam_from_world,
        )

    def rotate_points(self, stored: FloatArray) -> FloatArray:
        """Rotate points (n, 2) to the upright image."""
        return stored @ self.pixels[:2, :2].T + self.pixels[:2, 2]


def find_rotation(path: str | Path, size: Size | None = None) -> UprightRotation:
    """Return the rotation of an image file to upright, for a camera of `size`; default is the stored size.

    A file that cannot be read counts as upright.
    """
    header = read_header(path)
    orientation, stored = (1, size or (1, 1)) if header is None else (header.orientation, header.stored_size)
    if orientation not in _ROTATIONS:
        remedy = "save it upright without that tag, and run COLMAP on it again"
        raise DataError(f"{path} is mirrored by its EXIF orientation {orientation}, unlike any camera; {remedy}.")
    width, height = size or stored
    if orientation in (6, 8) and (width - height) * (stored[0] - stored[1]) < 0:
        # The camera is that of the upright image; some versions of COLMAP rotate images when they read them.
        orientation = 1
    camera = np.eye(3)
    camera[:2, :2] = rotation = np.array(_ROTATIONS[orientation])
    pixels = camera.copy()
    # A rotation about the first pixel, then a shift so that the image starts at (0, 0) again.
    pixels[:2, 2] = -np.minimum(rotation @ (width - 1, height - 1), 0)
    return UprightRotation(pixels=pixels, camera=camera)


def stored_points(points: npt.ArrayLike, path: str | Path) -> FloatArray:
    """Convert upright points (n, 2) of an image file to its stored pixels, in our convention."""
    return find_rotation(path).inverse().rotate_points(np.asarray(points, dtype=np.float64).reshape(-1, 2))


def colmap_points(points: npt.ArrayLike, path: str | Path | None = None) -> FloatArray:
    """Convert upright points (n, 2) of an image file to COLMAP's pixels; without a file they are not rotated."""
    places = np.asarray(points, dtype=np.float64).reshape(-1, 2) if path is None else stored_points(points, path)
    return to_colmap(places)


def from_colmap_points(points: npt.ArrayLike, path: str | Path) -> FloatArray:
    """Convert COLMAP's keypoints (n, 2) of a stored image file to upright points; the inverse of `colmap_points`."""
    return find_rotation(path).rotate_points(from_colmap(np.asarray(points, dtype=np.float64).reshape(-1, 2)))


def colmap_camera(camera: Camera, path: str | Path, *, known: bool) -> Any:
    """Return the pycolmap Camera of an image file: unchanged if known, else one focal length and one distortion."""
    stored = find_rotation(path).inverse().rotate_camera(camera)
    model, params = stored.to_colmap()
    if not known:
        model, params = "SIMPLE_RADIAL", [camera.focal_px, *to_colmap(stored.K[:2, 2]), 0.0]
    made = import_pycolmap().Camera(model=model, width=stored.width, height=stored.height, params=params)
    made.has_prior_focal_length = camera.source in ("file", "exif")
    return made


def upright_from_stored(path: str | Path) -> FloatArray:
    """Return the rotation (3, 3) from the camera of the stored image to that of the upright image."""
    return find_rotation(path).camera


def refuse_mirrored(path: str | Path) -> None:
    """Raise DataError if an image file is mirrored by its EXIF orientation."""
    find_rotation(path)
