"""Cameras from COLMAP's text files or our cameras.json."""

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
    """The cameras of the named pictures, from our cameras.json or COLMAP's cameras.txt.

    An images.txt beside cameras.txt says which picture has which camera; without it one camera serves all pictures,
    and two cameras serve two pictures in the order of their ids. A name is found with or without its folders. Where a
    name is that of a picture file under `root`, COLMAP's camera is rotated upright with it.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        cameras = read_cameras_json(path)
        return {name: cameras[_find(name, list(cameras), path)] for name in names}
    if path.suffix.lower() != ".txt":
        raise DataError(f"{path}: cameras are read from cameras.json or COLMAP's cameras.txt; give one of these.")
    stored = _read_colmap(path, names)
    return {name: find_rotation(Path(root, name), camera.size).rotate_camera(camera) for name, camera in stored.items()}


def _read_colmap(path: Path, names: Sequence[str]) -> dict[str, Camera]:
    """The cameras of the named pictures as they are stored."""
    records = read_cameras_txt(path)
    by_id = {number: camera_of(record, f"{path}, camera {number}") for number, record in records.items()}
    images_path = path.with_name("images.txt")
    if images_path.is_file():
        entries = read_images_txt(images_path)
        found = {name: entries[_find(name, list(entries), images_path)] for name in names}
        missing = {entry.camera_id for entry in found.values()} - set(by_id)
        if missing:
            raise DataError(f"{path} has no camera {min(missing)}, which {images_path} names; export both again.")
        return {
            name: replace(by_id[entry.camera_id], cam_from_world=entry.cam_from_world) for name, entry in found.items()
        }
    cameras_in_order = [by_id[camera_id] for camera_id in sorted(by_id)]
    if len(cameras_in_order) == 1:
        return dict.fromkeys(names, cameras_in_order[0])
    if len(cameras_in_order) == len(names) == 2:
        return dict(zip(names, cameras_in_order, strict=True))
    raise DataError(
        f"{path} has {len(by_id)} cameras for {len(names)} pictures; "
        "put COLMAP's images.txt beside it, or keep one camera."
    )


def from_colmap_pixels(K: npt.ArrayLike) -> FloatArray:
    """COLMAP's K (3, 3) in our pixels."""
    shifted = np.array(K, dtype=np.float64)
    shifted[:2, 2] = from_colmap(shifted[:2, 2])
    return shifted


def _find(name: str, known: Sequence[str], path: Path) -> str:
    """The known name that is `name`, else the only one with the same last part."""
    if name in known:
        return name
    candidates = [other for other in known if Path(other).name == Path(name).name]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise DataError(f"{path} has several pictures called {Path(name).name}; name {name} as it is there.")
    raise DataError(f"{path} has no camera for {name}; add it, or leave the cameras file out.")


def camera_of(record: CameraRecord, where: str) -> Camera:
    """The camera of the stored picture that a record tells, in our pixels."""
    try:
        return Camera.from_colmap(record.model, (record.width, record.height), record.params, source="file")
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
