"""COLMAP's binary files, record by record, in COLMAP's own convention."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from dualrc.colmap.cameras import rotation_from_quaternion
from dualrc.colmap.library import import_pycolmap
from dualrc.errors import DataError
from dualrc.types import FloatArray

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class BinaryCamera:
    """A camera of cameras.bin."""

    camera_id: int
    model: str
    width: int
    height: int
    params: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryImage:
    """A picture of images.bin, without its points."""

    name: str
    camera_id: int
    cam_from_world: FloatArray  # (3, 4)


def read_cameras_bin(path: Path) -> dict[int, BinaryCamera]:
    """The cameras of cameras.bin by their ids."""
    pycolmap = import_pycolmap()

    def read(data: bytes, at: int) -> tuple[BinaryCamera, int]:
        number, model, width, height = struct.unpack_from("<IiQQ", data, at)
        kind = pycolmap.CameraModelId(model)
        count = len(pycolmap.Camera.create_from_model_id(1, kind, 1.0, 1, 1).params)
        params = struct.unpack_from(f"<{count}d", data, at + 24)
        camera = BinaryCamera(camera_id=number, model=kind.name, width=width, height=height, params=params)
        return camera, at + 24 + 8 * count

    return {camera.camera_id: camera for camera in _records(path, read)}


def read_images_bin(path: Path) -> Iterator[BinaryImage]:
    """The pictures of images.bin."""

    def read(data: bytes, at: int) -> tuple[BinaryImage, int]:
        values, camera_id = struct.unpack_from("<7d", data, at + 4), struct.unpack_from("<I", data, at + 60)[0]
        name_end = data.index(b"\0", at + 64)
        pose = np.column_stack([rotation_from_quaternion(values[:4]), values[4:]])
        image = BinaryImage(name=data[at + 64 : name_end].decode(), camera_id=camera_id, cam_from_world=pose)
        return image, name_end + 9 + 24 * int(struct.unpack_from("<Q", data, name_end + 1)[0])

    return _records(path, read)


def refuse_damaged(folder: Path) -> None:
    """Raise DataError if a binary file ends too early, as when a copy broke off; pycolmap may then read forever."""
    for name, read in (("cameras.bin", read_cameras_bin), ("images.bin", read_images_bin), ("points3D.bin", _points)):
        if (folder / name).is_file():
            for _ in read(folder / name):
                pass


def _points(path: Path) -> Iterator[None]:
    """Nothing of each 3D point of points3D.bin, which only shows that it is there."""
    return _records(path, lambda data, at: (None, at + 51 + 8 * int(struct.unpack_from("<Q", data, at + 43)[0])))


def _records(path: Path, read: Callable[[bytes, int], tuple[Record, int]]) -> Iterator[Record]:
    """The records of a file that begins with their number; `read` gives one and where the next begins."""
    try:
        data, at = path.read_bytes(), 8
        for _ in range(struct.unpack_from("<Q", data)[0]):
            record, at = read(data, at)
            if at > len(data):
                raise ValueError("it ends too early")
            yield record
    except (OSError, struct.error, ValueError) as error:
        raise DataError(f"{path} is cut off or damaged ({error}); copy or export the model again.") from error
