"""COLMAP's text files of cameras and poses, and our cameras.json."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualrc.colmap.upright import HALF_PX, find_rotation
from dualrc.errors import DataError
from dualrc.files import read_text
from dualrc.geometry import Camera, read_cameras_json, refuse_distortion
from dualrc.types import FloatArray

# Per model, how many focal lengths precede cx and cy, and how many distortion coefficients follow. Fisheye models are
# missing because they are not pinholes even when their coefficients are zero.
_MODELS = {
    "SIMPLE_PINHOLE": (1, 0),
    "PINHOLE": (2, 0),
    "SIMPLE_RADIAL": (1, 1),
    "RADIAL": (1, 2),
    "OPENCV": (2, 4),
    "FULL_OPENCV": (2, 8),
}


@dataclass(frozen=True, kw_only=True)
class _ImageEntry:
    """A picture of images.txt."""

    camera_id: int
    cam_from_world: FloatArray  # (3, 4)


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
    by_id = _read_cameras_txt(path)
    images_path = path.with_name("images.txt")
    if images_path.is_file():
        entries = _read_images_txt(images_path)
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
    shifted[:2, 2] -= HALF_PX
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


def _read_cameras_txt(path: Path) -> dict[int, Camera]:
    cameras = {}
    for number, line in _lines(path):
        if not line:
            continue
        fields = line.split()
        try:
            cameras[int(fields[0])] = parse_camera(fields, f"{path}, line {number}")
        except (ValueError, IndexError) as error:
            raise DataError(
                f"{path}, line {number}: not a camera; write CAMERA_ID MODEL WIDTH HEIGHT PARAMS."
            ) from error
    if not cameras:
        raise DataError(f"{path} holds no camera; write CAMERA_ID MODEL WIDTH HEIGHT PARAMS.")
    return cameras


def parse_camera(fields: Sequence[str], where: str) -> Camera:
    """A camera from CAMERA_ID MODEL WIDTH HEIGHT PARAMS."""
    model, width, height = fields[1], int(fields[2]), int(fields[3])
    params = [float(value) for value in fields[4:]]
    if model not in _MODELS:
        raise DataError(f"{where}: the camera model {model} is not supported; undistort the pictures first.")
    focals, distortions = _MODELS[model]
    if len(params) != focals + 2 + distortions:
        raise DataError(
            f"{where}: {model} has {focals + 2 + distortions} parameters, not {len(params)}; mend the line."
        )
    refuse_distortion(params[focals + 2 :], where)
    fx, fy = params[0], params[focals - 1]
    cx, cy = params[focals] - HALF_PX, params[focals + 1] - HALF_PX
    return Camera(width=width, height=height, K=np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]]), source="file")


def _read_images_txt(path: Path) -> dict[str, _ImageEntry]:
    """Every second line is a picture: IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME; the others are its points."""
    entries = {}
    lines = list(_lines(path))
    # A picture without points is followed by an empty line, so empty lines count, but not at the very start.
    while lines and not lines[0][1]:
        del lines[0]
    for number, line in lines[::2]:
        if not line:
            continue
        fields = line.split(maxsplit=9)
        try:
            pose = np.column_stack(
                [rotation_from_quaternion([float(v) for v in fields[1:5]]), [float(v) for v in fields[5:8]]]
            )
            entries[fields[9]] = _ImageEntry(camera_id=int(fields[8]), cam_from_world=pose)
        except (ValueError, IndexError) as error:
            raise DataError(f"{path}, line {number}: not a picture; export the model from COLMAP again.") from error
    return entries


def _lines(path: Path) -> list[tuple[int, str]]:
    """The stripped lines of a text file with their numbers, without comments."""
    lines = read_text(path, "export it from COLMAP as text").splitlines()
    numbered = enumerate((line.strip() for line in lines), start=1)
    return [(number, line) for number, line in numbered if not line.startswith("#")]


def rotation_from_quaternion(quaternion: Sequence[float]) -> FloatArray:
    """The rotation (3, 3) of a quaternion (w, x, y, z)."""
    norm = np.linalg.norm(quaternion)
    if not norm > 0:
        raise ValueError("a quaternion of length 0")
    w, x, y, z = np.asarray(quaternion) / norm
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
