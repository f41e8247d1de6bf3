"""Cameras of a collection: from a file, else from EXIF, else one unknown focal length per image size."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dualrc.colmap import read_cameras, refuse_mirrored
from dualrc.errors import DataError
from dualrc.geometry import Camera, camera_from_exif, lacks_sensor_size
from dualrc.image import read_header

_EXIF, _GUESS, _NO_SENSOR = "exif", "guess", "guess, without EXIF's sensor size"


def choose_cameras(images: str | Path, names: Sequence[str], file: str | Path | None = None) -> dict[str, Camera]:
    """Return the cameras of the upright images of a folder, by name; unreadable images have none.

    The `source` of each camera names its origin.
    """
    images = Path(images)
    sizes = {name: header.upright_size for name in names if (header := read_header(images / name)) is not None}
    given = {} if file is None else read_cameras(file, list(sizes), images)
    cameras = {}
    for name, size in sizes.items():
        refuse_mirrored(images / name)
        if name in given:
            if given[name].size != size:
                there, here = ("{}x{}".format(*pixels) for pixels in (given[name].size, size))
                raise DataError(f"{file}: the camera of {name} is for {there} pixels, not {here}; correct the file.")
            cameras[name] = given[name]
        else:
            source = _NO_SENSOR if lacks_sensor_size(images / name) else _GUESS
            cameras[name] = camera_from_exif(images / name) or replace(Camera.guessed(size), source=source)
    return cameras


def is_known(camera: Camera) -> bool:
    """Return whether the calibration of a camera is kept fixed; other cameras are refined."""
    return camera.source not in (_EXIF, _GUESS, _NO_SENSOR)


def describe_cameras(cameras: Mapping[str, Camera]) -> str:
    """Describe the origin of the cameras in words."""
    words = {
        _EXIF: "focal length from EXIF, refined",
        _GUESS: "unknown focal length, one per image size, refined",
        _NO_SENSOR: "guessed focal length (EXIF has no sensor size), one per image size, refined",
    }
    counts = Counter(camera.source for camera in cameras.values())
    return "; ".join(f"{count} {words.get(source, f'from the {source}')}" for source, count in counts.items())
