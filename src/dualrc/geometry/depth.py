"""Depth maps: RGB-D folders, and reprojection of points with known depth."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dualrc.errors import DataError
from dualrc.files import inside, is_file, read_lines, read_text
from dualrc.formats import open_image
from dualrc.geometry.camera import Camera, transform_points
from dualrc.geometry.dense import bilinear_corners
from dualrc.geometry.lens import PINHOLE
from dualrc.image import read_header
from dualrc.pixels import in_image, resize_points
from dualrc.types import BoolArray, FloatArray, Size

# Largest relative difference of neighboring depths on one surface. Beyond it, interpolation is undefined.
_EDGE = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class RgbdFrame:
    """An image with an aligned depth map, a camera and a pose."""

    # Name of the frame, relative to the folder.
    name: str
    # Color image.
    image: Path
    # Depth map of the same view: 16-bit PNG in millimeters; 0 is unknown.
    depth: Path
    # Camera with its pose, `cam_from_world`.
    camera: Camera


class Reprojection(NamedTuple):
    """Reprojection of points from image 0 to image 1; a point that is neither seen nor hidden is unknown."""

    # (n, 2) NaN without depth, or behind camera 1.
    points1: FloatArray
    # (n,) Both depth maps agree.
    seen: BoolArray
    # (n,) Outside image 1, or occluded there.
    hidden: BoolArray


def read_rgbd(root: str | Path) -> list[RgbdFrame]:
    """Read the frames of a folder with images/NAME, depth/NAME.png, K.txt and world_from_cam.txt (name, 16 values).

    COLMAP's cameras.txt with one camera can replace K.txt; its lens then distorts the depth maps too. Images and depth
    maps are opened later, because a folder may be copied incompletely.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"The folder {root} does not exist; check the path.")
    colmap = None if (root / "K.txt").exists() else _read_colmap_camera(root / "cameras.txt")
    K = _numbers(root / "K.txt", 9).reshape(3, 3) if colmap is None else colmap.K
    poses = dict(_read_poses(root / "world_from_cam.txt"))
    if not poses:
        raise DataError(f"{root / 'world_from_cam.txt'} is empty; write a name and 16 numbers per line.")
    # All images share one K, so they have one size, and any readable image gives it.
    images = {name: inside(root / "images", name) for name in poses}
    headers = (header for path in images.values() if (header := read_header(path)) is not None)
    header = next(headers, None)
    if header is None:
        raise DataError(f"Cannot read any of the images in {root / 'images'}; copy the folder again.")
    width, height = header.stored_size
    if colmap is not None and colmap.size != (width, height):
        there, here = f"{colmap.width}x{colmap.height}", f"{width}x{height}"
        raise DataError(f"{root / 'cameras.txt'} is for {there} pixels, but the images have {here}; correct it.")
    lens = PINHOLE if colmap is None else colmap.lens
    return [
        RgbdFrame(
            name=name,
            image=images[name],
            depth=(root / "depth" / name).with_suffix(".png"),
            camera=Camera(width=width, height=height, K=K, lens=lens, source="file", cam_from_world=pose),
        )
        for name, pose in poses.items()
    ]


def read_depth_m(path: str | Path, *, unit_m: float = 0.001) -> npt.NDArray[np.float32]:
    """Read a depth map (h, w) in meters from a 16-bit PNG, 0 where unknown; `unit_m` is the unit in meters."""
    if not is_file(path):
        raise DataError(f"The depth map {path} does not exist; check the path.")
    try:
        with open_image(path, str(path), only=("PNG", "TIFF")) as image:
            values = np.asarray(image)
    except Exception as error:
        # Reading a damaged file can raise any exception.
        raise DataError(f"Cannot read the depth map {path} ({error}); copy it again.") from error
    if values.ndim != 2 or values.dtype == np.uint8:
        raise DataError(f"{path} is not a depth map; give a PNG with one 16-bit channel.")
    return (values * unit_m).astype(np.float32)


def sample_depth(depth: npt.ArrayLike, points: npt.ArrayLike, size: Size) -> FloatArray:
    """Interpolate depths (n,) at points (n, 2) of an image of `size`; NaN where unknown and between two surfaces."""
    values = np.asarray(depth)
    height, width = values.shape
    places = resize_points(np.asarray(points, dtype=np.float64).reshape(-1, 2), size, (width, height))
    inside = in_image(places, (width, height))
    rows, columns, weights = bilinear_corners(np.where(inside[:, None], places, 0), (width, height))
    # (4, n) Converted after indexing, because maps are large.
    near = values[rows, columns].astype(np.float64)
    known = inside & np.all(np.isfinite(near) & (near > 0), axis=0)
    near = np.where(known, near, 1.0)
    known &= near.max(axis=0) <= (1 + _EDGE) * near.min(axis=0)
    # Inverse depth of a plane is linear in the image; depth is not.
    return np.where(known, 1 / (weights / near).sum(axis=0), np.nan)


def unproject(camera: Camera, points: npt.ArrayLike, depths: npt.ArrayLike) -> FloatArray:
    """Map points (n, 2) with depths (n,) along the optical axis to world coordinates (n, 3)."""
    pose = _pose(camera)
    places = camera.rays(points) * np.asarray(depths, dtype=np.float64)[:, None]
    return (places - pose[:, 3]) @ pose[:, :3]


def reproject(
    points0: npt.ArrayLike,
    depth0: npt.ArrayLike,
    camera0: Camera,
    depth1: npt.ArrayLike,
    camera1: Camera,
    *,
    tolerance: float = 0.05,
    max_error_px: float = 2.0,
) -> Reprojection:
    """Reproject points (n, 2) of image 0 to image 1, checked with both depth maps.

    A point is seen if the measured depth in image 1 agrees with its own within the relative `tolerance`, and if the
    reprojection back with that depth ends within `max_error_px` of the start.
    """
    points0 = np.asarray(points0, dtype=np.float64).reshape(-1, 2)
    world = unproject(camera0, points0, sample_depth(depth0, points0, camera0.size))
    places1 = transform_points(_pose(camera1), world)
    with np.errstate(invalid="ignore"):
        points1, expected = camera1.project(places1), places1[:, 2]
        measured = sample_depth(depth1, points1, camera1.size)
        back = camera0.project(transform_points(_pose(camera0), unproject(camera1, points1, measured)))
        agrees = np.abs(measured - expected) <= tolerance * expected
        seen = agrees & (np.linalg.norm(back - points0, axis=1) <= max_error_px)
        outside = np.isfinite(expected) & ~in_image(points1, camera1.size)
        hidden = outside | (measured < (1 - tolerance) * expected)
    return Reprojection(points1, seen, hidden)


def _pose(camera: Camera) -> FloatArray:
    if camera.cam_from_world is None:
        raise DataError("The camera has no pose; give its cam_from_world.")
    return camera.cam_from_world


def _read_poses(path: Path) -> Iterator[tuple[str, FloatArray]]:
    """Yield names and cam_from_world (3, 4), from lines with a name and world_from_cam, row by row."""
    for number, line in read_lines(path):
        name, *fields = line.rsplit(maxsplit=16)
        try:
            values = [float(field) for field in fields]
            world_from_cam = np.array(values).reshape(4, 4)
            R = world_from_cam[:3, :3]
            if not np.abs(R @ R.T - np.eye(3)).max() < 0.01 or np.linalg.det(R) < 0:
                raise ValueError("its first three columns are not a rotation")
            cam_from_world = np.linalg.inv(world_from_cam)[:3]
            if not np.isfinite(cam_from_world).all():
                raise ValueError("it is not finite")
        except (ValueError, np.linalg.LinAlgError) as error:
            raise DataError(
                f"{path}, line {number}: not a pose ({error}); write a name and 16 numbers, world_from_cam by rows."
            ) from error
        yield name, cam_from_world


def _read_colmap_camera(path: Path) -> Camera | None:
    """Read the single camera of COLMAP's cameras.txt; None if there is no such file."""
    if not path.exists():
        return None
    lines = [line.split() for _, line in read_lines(path)]
    if len(lines) != 1:
        raise DataError(f"{path} has {len(lines)} cameras; all frames share one, so write exactly one line.")
    try:
        _, model, width, height, *params = lines[0]
        return Camera.from_colmap(model, (int(width), int(height)), [float(value) for value in params], source="file")
    except ValueError as error:
        raise DataError(f"{path}: not a camera; write CAMERA_ID MODEL WIDTH HEIGHT PARAMS.") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _numbers(path: Path, count: int) -> FloatArray:
    try:
        values = np.array([float(field) for field in read_text(path).split()])
    except ValueError as error:
        raise DataError(f"{path} contains something other than numbers ({error}); write {count} numbers.") from error
    if len(values) != count:
        raise DataError(f"{path} has {len(values)} numbers; write {count} numbers.")
    return values
