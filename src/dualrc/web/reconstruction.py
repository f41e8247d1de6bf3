"""Finished reconstruction, written by `dualrc reconstruct --out DIR`, for the 3D view."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.colmap import ModelImage, import_pycolmap, read_model
from dualrc.errors import DataError
from dualrc.files import inside, parse_json, read_text
from dualrc.image import read
from dualrc.web.cache import Cache
from dualrc.web.problems import Problem, unknown
from dualrc.web.settings import MIB
from dualrc.web.uploads import to_jpeg

_VIEW_BYTES = 64 * MIB


class Reconstruction:
    """Images, cameras, points and tracks of a COLMAP model; images are identified by index."""

    def __init__(self, folder: Path, images: Path | None = None) -> None:
        self.name = folder.resolve().name
        model_folder = folder / "model" if (folder / "model").is_dir() else folder
        if images is not None and not images.is_dir():
            raise DataError(f"{images} is not a folder; give the one that the reconstruction was made from.")
        # Folder of the images, or None if it is unknown.
        self.folder = images = images or _find_images(folder)
        model = read_model(model_folder, images)
        if not model.images:
            raise DataError(f"The model in {model_folder} has no images; reconstruct again.")
        self.names = list(model.images)
        self.xyz = model.xyz.astype(np.float32).reshape(-1, 3)
        self._images = list(model.images.values())
        # Observations of all images, sorted by point: index of the image (k,) and position in the upright image (k, 2).
        points = np.concatenate([np.searchsorted(model.point_ids, image.point_ids) for image in self._images])
        order = np.argsort(points, kind="stable")
        self._observers = np.repeat(np.arange(len(self._images)), [len(image.points) for image in self._images])[order]
        self._places = np.concatenate([image.points for image in self._images])[order]
        # First observation of each point, and the total: (m + 1,).
        self._starts = np.searchsorted(points[order], np.arange(len(model.point_ids) + 1))
        stored = import_pycolmap().Reconstruction(str(model_folder)).points3D
        kept = [stored[number] for number in model.point_ids.tolist()]
        self.rgb = np.array([point.color for point in kept], dtype=np.uint8).reshape(-1, 3)
        self.errors = np.array([point.error for point in kept], dtype=np.float64)
        self._views: Cache[tuple[int, int], bytes] = Cache(_VIEW_BYTES, len)
        self._reading = threading.Lock()

    def summary(self) -> dict[str, Any]:
        """Return the summary that /v1/info contains."""
        return {"name": self.name, "images": len(self.names), "points": len(self.xyz)}

    def describe(self) -> dict[str, Any]:
        """Return the images with poses and cameras, all relative to the upright images."""
        return {
            "name": self.name,
            "images": [_describe(number, name, self._images[number]) for number, name in enumerate(self.names)],
            "points_url": "/v1/reconstruction/points",
            "count": len(self.xyz),
            "views": self.folder is not None,
        }

    def packed(self) -> bytes:
        """Return all points in little-endian order: uint32 count, float32 xyz, uint8 rgb, uint32 track lengths."""
        lengths = np.diff(self._starts)
        count = np.array([len(self.xyz)], dtype="<u4")
        return b"".join(part.tobytes() for part in (count, self.xyz.astype("<f4"), self.rgb, lengths.astype("<u4")))

    def point(self, index: int) -> dict[str, Any]:
        """Return a point and its observations."""
        if not 0 <= index < len(self.xyz):
            raise unknown("point")
        rows = slice(*self._starts[index : index + 2].tolist())
        observed = zip(self._observers[rows].tolist(), self._places[rows].tolist(), strict=True)
        error = float(self.errors[index])
        return {
            "xyz": self.xyz[index].tolist(),
            "rgb": self.rgb[index].tolist(),
            "error": error if error >= 0 else None,
            "track": [
                {"image": str(image), "name": self.names[image], "x": round(x, 3), "y": round(y, 3)}
                for image, (x, y) in observed
            ],
        }

    def view(self, number: int, max_side: int) -> bytes:
        """Return an image as JPEG."""
        if not 0 <= number < len(self.names):
            raise unknown("image")
        if self.folder is None:
            message = "The server has no image folder; start it with dualrc serve DIR --images FOLDER."
            raise Problem(404, "no_images", message)
        path = inside(self.folder, self.names[number])
        with self._reading:
            return self._views.make((number, max_side), lambda: to_jpeg(read(path), max_side))


def _find_images(folder: Path) -> Path | None:
    """Return the folder `images` of a reconstruction, or the folder that its summary.json names."""
    candidates = [folder / "images"]
    with suppress(DataError, ValueError, KeyError, TypeError):
        named = parse_json(read_text(folder / "summary.json"))["image_folder"]
        candidates.append((folder / named).resolve())
    return next((path for path in candidates if path.is_dir()), None)


def _describe(number: int, name: str, image: ModelImage) -> dict[str, Any]:
    camera = None
    if image.camera is not None:
        kind, params = image.camera.to_colmap()
        camera = {
            "model": kind,
            "width": image.size[0],
            "height": image.size[1],
            "params": [float(value) for value in params],
            "K": image.camera.K.tolist(),
        }
    return {
        "id": str(number),
        "name": name,
        "width": image.size[0],
        "height": image.size[1],
        "cam_from_world": image.cam_from_world.tolist(),
        "camera": camera,
        "observations": len(image.point_ids),
    }
