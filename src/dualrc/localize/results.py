"""Results of localization: a JSON file that is saved after every query, and a text file of poses."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.errors import DataError, OutputError
from dualrc.files import check_writable, parse_json, read_text, to_json, write_json, write_text
from dualrc.geometry import pose_from_quaternion, quaternion_from_rotation
from dualrc.geometry.camera import camera_from_json
from dualrc.localize.localizer import Localization
from dualrc.toml import first_difference
from dualrc.types import FloatArray

_FORMAT = "dualrc-localization-1"
# Keys of an entry, which are also attributes of a Localization.
_KEYS = (
    *("cam_from_world", "reason", "inliers", "correspondences", "confidence", "position_deviation"),
    *("rotation_deviation_deg", "covariance", "camera", "candidates", "seconds"),
)


class ResultsFile:
    """Localizations by query name in FILE.json, saved after every query, and their poses in FILE.txt."""

    def __init__(self, path: str | Path, config: Mapping[str, Any], *, info: Mapping[str, Any] | None = None) -> None:
        """Open the file if it exists and was made with the same config, else start a new one.

        `config`: everything that the results depend on; `info`: further entries of the file. Both are plain JSON
        values.
        """
        self.path = Path(path)
        if self.path.suffix.lower() != ".json":
            raise OutputError(f"{self.path} is not a .json file; pass a name that ends in .json.")
        check_writable(self.path)
        # Converted to JSON and back, which turns tuples into lists.
        self._config = json.loads(json.dumps(dict(config)))
        self._info = dict(info or {})
        self._entries: dict[str, Any] = {}
        self.load()

    def load(self) -> None:
        """Read the file if it exists."""
        if self.path.is_file():
            content = _read(self.path)
            if (difference := first_difference(content["config"], self._config)) is not None:
                remedy = "write to another file, or delete this one to start over"
                raise DataError(f"{self.path} was made with another config ({difference}); {remedy}.")
            self._entries = content["queries"]
        elif self.poses_path.exists():
            raise OutputError(f"{self.poses_path} exists and does not belong to {self.path}; write elsewhere.")

    @property
    def poses_path(self) -> Path:
        """Path of the text file of poses, FILE.txt."""
        return self.path.with_suffix(".txt")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Localization:
        return _from_entry(self._entries[name], f"{self.path}, {name}")

    def put(self, name: str, found: Localization, *, content: str = "") -> None:
        """Save the result of a query to disk.

        `content`: hash of the images that the result depends on.
        """
        self._entries[name] = {**_to_entry(found), "content": content}
        self.save()

    def content(self, name: str) -> str:
        """Return the hash that was saved with a result; empty without one."""
        return str(self._entries[name].get("content", ""))

    def save(self) -> None:
        """Write both files."""
        content = {"format": _FORMAT, "config": self._config, "info": self._info, "queries": self._entries}
        write_json(self.path, content)
        entries = self._entries.items()
        poses = {name: np.array(entry["cam_from_world"]) for name, entry in entries if entry["cam_from_world"]}
        write_poses(self.poses_path, poses)


def write_poses(path: str | Path, poses: Mapping[str, FloatArray]) -> None:
    """Write cam_from_world (3, 4) by name in the format of visuallocalization.net: name qw qx qy qz tx ty tz."""
    lines = []
    for name, pose in poses.items():
        values = [*quaternion_from_rotation(np.asarray(pose)[:, :3]), *np.asarray(pose)[:, 3]]
        lines.append(" ".join([name, *(f"{value:.12g}" for value in values)]))
    write_text(path, "".join(line + "\n" for line in lines))


def read_poses(path: str | Path) -> dict[str, FloatArray]:
    """Read cam_from_world (3, 4) by name, as `write_poses` writes them."""
    poses = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        fields = line.rsplit(maxsplit=7)
        if not fields:
            continue
        try:
            poses[fields[0]] = pose_from_quaternion([float(value) for value in fields[1:]])
        except (ValueError, IndexError) as error:
            raise DataError(f"{path}, line {number}: not a pose; write name qw qx qy qz tx ty tz.") from error
    return poses


def _to_entry(found: Localization) -> Any:
    entry = {key: getattr(found, key) for key in _KEYS}
    entry |= {"confidence": round(found.confidence, 6), "seconds": round(found.seconds, 3)}
    if (camera := found.camera) is not None:
        lens = {"model": camera.lens.model, "distortion": camera.lens.distortion, "source": camera.source}
        entry["camera"] = {"width": camera.width, "height": camera.height, "K": camera.K, **lens}
    return to_json(entry)


def _from_entry(entry: Mapping[str, Any], where: str) -> Localization:
    def array(key: str) -> FloatArray | None:
        return None if entry[key] is None else np.array(entry[key], dtype=np.float64)

    plain = ("reason", "candidates", "correspondences", "inliers", "confidence", "seconds")
    try:
        camera = entry["camera"]
        return Localization(
            cam_from_world=array("cam_from_world"),
            camera=replace(camera_from_json(camera, "camera"), source=camera["source"]) if camera else None,
            covariance=array("covariance"),
            **{key: entry[key] for key in plain},
        )
    except (DataError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: not a result ({error}); delete the file and localize again.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_text(path))
        if content["format"] != _FORMAT or not isinstance(content["queries"] | content["config"], dict):
            raise ValueError("unknown format")
    except (DataError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a file of localizations ({error}); write to another file.") from error
    return dict(content)
