"""Cameras from COLMAP's text files or from cameras.json."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualrc.colmap.records import CameraRecord, read_cameras_txt, read_images_txt
from dualrc.colmap.upright import find_rotation
from dualrc.errors import DataError
from dualrc.geometry import Camera, read_cameras_json
from dualrc.pixels import from_colmap
from dualrc.types import FloatArray


def read_cameras(path: str | Path, names: Sequence[str], root: str | Path = "") -> dict[str, Camera]:
    """Read the cameras of the named images from our cameras.json or COLMAP's cameras.txt.

    An images.txt beside cameras.txt assigns cameras to images. Without it, one camera applies to all images, and two
    cameras apply to two images in the order of their ids. Names match with or without their folders. If a name is that
    of an image file under `root`, COLMAP's camera is rotated upright with it.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        cameras = read_cameras_json(path)
        return {name: cameras[_find(name, list(cameras), path)] for name in names}
    if path.suffix.lower() != ".txt":
        raise DataError(f"{path} is not a camera file; pass cameras.json or COLMAP's cameras.txt.")
    stored = _read_colmap(path, names)
    return {name: find_rotation(Path(root, name), camera.size).rotate_camera(camera) for name, camera in stored.items()}


def _read_colmap(path: Path, names: Sequence[str]) -> dict[str, Camera]:
    """Read the cameras of the named images, for their stored orientation."""
    records = read_cameras_txt(path)
    by_id = {number: camera_of(record, f"{path}, camera {number}") for number, record in records.items()}
    images_path = path.with_name("images.txt")
    if images_path.is_file():
        entries = read_images_txt(images_path)
        found = {name: entries[_find(name, list(entries), images_path)] for name in names}
        missing = {entry.camera_id for entry in found.values()} - set(by_id)
        if missing:
            raise DataError(f"{path} has no camera {min(missing)}, which {images_path} uses; export both files again.")
        return {
            name: replace(by_id[entry.camera_id], cam_from_world=entry.cam_from_world) for name, entry in found.items()
        }
    cameras_in_order = [by_id[camera_id] for camera_id in sorted(by_id)]
    if len(cameras_in_order) == 1:
        return dict.fromkeys(names, cameras_in_order[0])
    if len(cameras_in_order) == len(names) == 2:
        return dict(zip(names, cameras_in_order, strict=True))
    raise DataError(
        f"{path} has {len(by_id)} cameras for {len(names)} images; "
        "put COLMAP's images.txt beside it, or keep one camera."
    )


def from_colmap_pixels(K: npt.ArrayLike) -> FloatArray:
    """Convert COLMAP's K (3, 3) to our pixel convention."""
    shifted = np.array(K, dtype=np.float64)
    shifted[:2, 2] = from_colmap(shifted[:2, 2])
    return shifted


def _find(name: str, known: Sequence[str], path: Path) -> str:
    """Return the known name that equals `name`, else the only one with the same file name."""
    if name in known:
        return name
    candidates = [other for other in known if Path(other).name == Path(name).name]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise DataError(f"{path} has several images called {Path(name).name}; write {name} as in that file.")
    raise DataError(f"{path} has no camera for {name}; add it, or omit the camera file.")


def camera_of(record: CameraRecord, where: str) -> Camera:
    """Return the camera of a record, for the stored image, in our pixel convention."""
    try:
        return Camera.from_colmap(record.model, (record.width, record.height), record.params, source="file")
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
