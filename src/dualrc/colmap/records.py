"""COLMAP's camera and image files, text and binary, record by record in COLMAP's own convention."""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dualrc.colmap.upright import import_pycolmap
from dualrc.errors import DataError
from dualrc.files import read_lines
from dualrc.geometry import pose_from_quaternion
from dualrc.types import FloatArray

T = TypeVar("T")
_REMEDY = "export it from COLMAP as text"


@dataclass(frozen=True, kw_only=True)
class CameraRecord:
    """A camera of cameras.bin or cameras.txt."""

    camera_id: int
    model: str
    width: int
    height: int
    params: Sequence[float]


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageRecord:
    """An image of images.bin or images.txt, without its points."""

    name: str
    camera_id: int
    # (3, 4).
    cam_from_world: FloatArray


def read_cameras_bin(path: Path) -> dict[int, CameraRecord]:
    """Read cameras.bin; return the cameras by id."""
    pycolmap = import_pycolmap()

    def read(data: bytes, at: int) -> tuple[CameraRecord, int]:
        number, model, width, height = struct.unpack_from("<IiQQ", data, at)
        kind = pycolmap.CameraModelId(model)
        count = len(pycolmap.Camera.create_from_model_id(1, kind, 1.0, 1, 1).params)
        params = struct.unpack_from(f"<{count}d", data, at + 24)
        camera = CameraRecord(camera_id=number, model=kind.name, width=width, height=height, params=params)
        return camera, at + 24 + 8 * count

    return {camera.camera_id: camera for camera in _binary_records(path, read)}


def read_images_bin(path: Path) -> Iterator[ImageRecord]:
    """Read the images of images.bin."""

    def read(data: bytes, at: int) -> tuple[ImageRecord, int]:
        values, camera_id = struct.unpack_from("<7d", data, at + 4), struct.unpack_from("<I", data, at + 60)[0]
        name_end = data.index(b"\0", at + 64)
        name, pose = data[at + 64 : name_end].decode(), pose_from_quaternion(values)
        image = ImageRecord(name=name, camera_id=camera_id, cam_from_world=pose)
        return image, name_end + 9 + 24 * int(struct.unpack_from("<Q", data, name_end + 1)[0])

    return _binary_records(path, read)


def refuse_damaged(folder: Path) -> None:
    """Raise DataError if a binary file is truncated; pycolmap could otherwise read forever."""
    for name, read in (("cameras.bin", read_cameras_bin), ("images.bin", read_images_bin), ("points3D.bin", _points)):
        if (folder / name).is_file():
            for _ in read(folder / name):
                pass


def read_cameras_txt(path: Path) -> dict[int, CameraRecord]:
    """Read cameras.txt; return the cameras by id."""
    form = "CAMERA_ID MODEL WIDTH HEIGHT PARAMS"

    def parse(line: str) -> CameraRecord:
        number, model, width, height, *params = line.split()
        values = [float(value) for value in params]
        return CameraRecord(camera_id=int(number), model=model, width=int(width), height=int(height), params=values)

    cameras = _text_records(path, read_lines(path, _REMEDY), parse, f"a camera; write {form}")
    if not cameras:
        raise DataError(f"{path} has no camera; write {form}.")
    return {camera.camera_id: camera for camera in cameras}


def read_images_txt(path: Path) -> dict[str, ImageRecord]:
    """Read images.txt; return the images by name.

    Every second line is an image: IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME. The other lines are its points.
    """

    def parse(line: str) -> ImageRecord:
        fields = line.split(maxsplit=9)
        pose = pose_from_quaternion([float(value) for value in fields[1:8]])
        return ImageRecord(name=fields[9], camera_id=int(fields[8]), cam_from_world=pose)

    lines = read_lines(path, _REMEDY, empty=True)
    # An image without points is followed by an empty line, so empty lines count, except at the start of the file.
    while lines and not lines[0][1]:
        del lines[0]
    images = [entry for entry in lines[::2] if entry[1]]
    found = _text_records(path, images, parse, "an image; export the model from COLMAP again")
    return {image.name: image for image in found}


def _points(path: Path) -> Iterator[None]:
    """Yield None for each 3D point of points3D.bin; this checks only that all points are present."""
    return _binary_records(path, lambda data, at: (None, at + 51 + 8 * int(struct.unpack_from("<Q", data, at + 43)[0])))


def _binary_records(path: Path, read: Callable[[bytes, int], tuple[T, int]]) -> Iterator[T]:
    """Yield the records of a file that starts with their number; `read` returns a record and the next position."""
    try:
        data, at = path.read_bytes(), 8
        for _ in range(struct.unpack_from("<Q", data)[0]):
            record, at = read(data, at)
            if at > len(data):
                raise ValueError("it ends too early")
            yield record
    except (OSError, struct.error, ValueError) as error:
        raise DataError(f"{path} is truncated or damaged ({error}); copy or export the model again.") from error


def _text_records(path: Path, lines: list[tuple[int, str]], parse: Callable[[str], T], expected: str) -> list[T]:
    records = []
    for number, line in lines:
        try:
            records.append(parse(line))
        except (ValueError, IndexError) as error:
            raise DataError(f"{path}, line {number}: not {expected}.") from error
    return records
