"""Stored results of other methods: matches of pairs, or keypoints and descriptors of images.

File names are those of the images, relative to the folder; "-" may replace "/".
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.colmap.upright import find_rotation
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation.baselines import Described, mutual_nearest
from dualrc.extras import require
from dualrc.files import BROKEN, one_line
from dualrc.formats import SUFFIXES
from dualrc.image import read, read_header
from dualrc.matches import Matches
from dualrc.types import FloatArray, Size

# Maximum number of path components in a file name.
_PARTS = 5
_CACHED_IMAGES = 32
_HDF5 = (".h5", ".hdf5")
# Arrays in the file of a pair: points of both images, scores, and the position of the first pixel's center.
_FORMS = (
    # Written by Matches.save.
    ("points0", "points1", ("scores",), 0.0),
    # NCNet, Sparse-NCNet and DualRC-Net put the corner of the first pixel at (0, 0).
    ("keypoints_A", "keypoints_B", ("scores",), 0.5),
    ("keypoints0", "keypoints1", ("confidence", "scores", "match_confidence"), 0.0),
)

Arrays = Mapping[str, Any]


class Stored:
    """Matches that a method wrote to a folder or an HDF5 file, or mutual nearest neighbors of its descriptors."""

    def __init__(self, place: str) -> None:
        """`place`: FOLDER, FOLDER:ENDING if it has files of several methods, or FILE.h5."""
        path, ending = Path(place), ""
        if not path.exists() and ":" in place:
            folder, _, ending = place.rpartition(":")
            path = Path(folder)
        if not path.exists():
            raise ConfigError(f"The stored results {path} do not exist; pass stored:FOLDER or stored:FOLDER:ENDING.")
        self._path, self.name = path, ending or path.resolve().stem
        in_folder = sorted(path.iterdir()) if path.is_dir() else [path]
        hdf5 = [file for file in in_folder if file.suffix.lower() in _HDF5 and not ending]
        if not path.is_dir() and not hdf5:
            raise ConfigError(f"{path} is neither a folder nor an .h5 file; pass stored:FOLDER.")
        self._hdf5 = [_open_hdf5(file) for file in hdf5]
        self._files = _index(path, ending) if path.is_dir() else {}
        if not self._files and not self._hdf5:
            what = f"that end with .{ending}" if ending else "(.npz, .h5)"
            raise ConfigError(f"{path} has no stored results {what}; pass the folder that a method wrote.")
        self._used: dict[Path, tuple[Path, ...]] = {}
        self._describe = lru_cache(_CACHED_IMAGES)(self._read_features)
        files = sorted({*self._files.values(), *hdf5})
        stats = [(file.name, file.stat()) for file in files]
        listing = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
        self.config: dict[str, Any] = {"matcher": "stored", "name": self.name, "files": len(files), "digest": digest}

    def match(self, path0: Path, path1: Path) -> Matches:
        """Return the stored matches of a pair, or the mutual nearest neighbors of the stored descriptors."""
        sizes = _size(path0), _size(path1)
        found = self._pair(path0, path1, sizes)
        if found is None:
            swapped = self._pair(path1, path0, (sizes[1], sizes[0]))
            found = None if swapped is None else swapped.swapped()
        if found is None:
            one, other = self._describe(path0), self._describe(path1)
            if one is None or other is None:
                names = f"{path0.stem}_{path1.stem}.npz, nor keypoints and descriptors of {path0.name} and {path1.name}"
                raise DataError(f"{self._path} has no matches of {path0} and {path1}: neither {names}; add them.")
            index0, index1, cosines = mutual_nearest(one.descriptors, other.descriptors)
            found = _matches(one.points[index0], other.points[index1], cosines[:, 0], sizes)
        finite = np.isfinite(found.points0).all(1) & np.isfinite(found.points1).all(1) & np.isfinite(found.scores)
        found = found[finite]
        return found.top(len(found))

    def _pair(self, path0: Path, path1: Path, sizes: tuple[Size, Size]) -> Matches | None:
        """Return the stored matches of two images, in this order."""
        for name in _pair_names(path0, path1):
            if name in self._files:
                file = self._own(self._files[name], path0, path1)
                with _checked(file):
                    return self._from_file(_arrays(file), path0, path1, sizes)
        for hdf5, (name0, name1) in itertools.product(self._hdf5, itertools.product(_names(path0), _names(path1))):
            flat0, flat1 = name0.replace("/", "-"), name1.replace("/", "-")
            for key in (f"{flat0}/{flat1}", f"{flat0}_{flat1}"):
                if key in hdf5:
                    with _checked(f"{hdf5.filename}, {key},"):
                        return self._from_hdf5(hdf5[key], path0, path1, sizes)
        return None

    def _from_file(self, arrays: Arrays, path0: Path, path1: Path, sizes: tuple[Size, Size]) -> Matches:
        if set(arrays) != {"matches"}:
            return _from_pair(arrays, sizes)
        # As Sparse-NCNet and DualRC-Net write for Aachen: indices of keypoints, whose files lie beside the images.
        indices = arrays["matches"][:, :2].astype(np.int64).T
        grids = [_arrays(Path(f"{path}.{self.name}"))["keypoints"] - 0.5 for path in (path0, path1)]
        points = [grid[index] for grid, index in zip(grids, indices, strict=True)]
        return _matches(points[0], points[1], arrays["matches"][:, 2], sizes)

    def _from_hdf5(self, group: Any, path0: Path, path1: Path, sizes: tuple[Size, Size]) -> Matches:
        arrays = {name: group[name][()] for name in group}
        if "matches0" not in arrays:
            found = _from_pair(arrays, sizes)
            return _matches(_upright(found.points0, path0), _upright(found.points1, path1), found.scores, sizes)
        points = [self._keypoints(path) for path in (path0, path1)]
        chosen = np.flatnonzero(arrays["matches0"] >= 0)
        scores = arrays.get("matching_scores0", np.ones(len(arrays["matches0"])))[chosen]
        return _matches(points[0][chosen], points[1][arrays["matches0"][chosen]], scores, sizes)

    def _keypoints(self, path: Path) -> FloatArray:
        group = self._features(path)
        if group is None:
            raise ValueError(f"there are no keypoints of {path.name}")
        return _upright(np.asarray(group["keypoints"][()], np.float64)[:, :2], path)

    def _features(self, path: Path) -> Any:
        """Return the HDF5 group with the keypoints of an image."""
        for hdf5, name in itertools.product(self._hdf5, _names(path)):
            if name in hdf5 and "keypoints" in hdf5[name]:
                return hdf5[name]
        return None

    def _read_features(self, path: Path) -> Described | None:
        """Return the stored keypoints and descriptors of an image, or None."""
        for name in _names(path):
            flat = name.replace("/", "-")
            if flat in self._files:
                file = self._own(self._files[flat], path)
                with _checked(file):
                    return _described(_arrays(file))
        group = self._features(path)
        if group is None or "descriptors" not in group:
            return None
        # hloc stores descriptors as (c, n).
        arrays = {"keypoints": self._keypoints(path), "descriptors": group["descriptors"][()].T}
        with _checked(f"{group.file.filename}, {path.name},"):
            return _described(arrays)

    def _own(self, file: Path, *paths: Path) -> Path:
        """Return the file, unless it was used for other images before."""
        others = self._used.setdefault(file, paths)
        if others != paths:
            remedy = "store results in folders with the names of the image folders"
            raise DataError(f"{file} could belong to {paths[-1]} and to {others[-1]}; {remedy}.")
        return file


def _index(folder: Path, ending: str) -> dict[str, Path]:
    """Return the .npz files in a folder and its subfolders by name, without extensions and with "-" for "/"."""
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        name = file.name
        if file.suffix.lower() in (*SUFFIXES, *_HDF5) or not file.is_file() or not _is_archive(file):
            continue
        if ending:
            stem = name.removesuffix(".npz").removesuffix(f".{ending}")
            if stem == name.removesuffix(".npz"):
                continue
            stem = stem.removesuffix(".npz")
        else:
            stem = name.partition(".npz")[0] if ".npz" in name else name.rpartition(".")[0] or name
        key = str((file.relative_to(folder).parent / stem.removesuffix("_matches")).as_posix()).replace("/", "-")
        if key in found:
            other = found[key].relative_to(folder)
            remedy = "pass the ending of one method, as in stored:FOLDER:d2-net"
            raise ConfigError(f"{folder} has several results of {key}: {other} and {file.name}; {remedy}.")
        found[key] = file
    return found


def _is_archive(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(2) == b"PK"
    except OSError:
        # An error is reported when the file is read.
        return file.suffix == ".npz"


def _names(path: Path) -> Iterator[str]:
    """Yield names that stored results may use for an image, the longest first: with folders, with extension."""
    parts = path.parts[-_PARTS:]
    for start in range(len(parts)):
        name = "/".join(parts[start:])
        yield name
        yield name[: -len(path.suffix)] if path.suffix else name


def _pair_names(path0: Path, path1: Path) -> Iterator[str]:
    """Yield names that the file of a pair may have: FOLDER-1_2, or both names joined by "_" or "--"."""
    if path0.parent == path1.parent:
        for name in _names(path0):
            yield f"{name.replace('/', '-')}_{path1.stem}"
            yield f"{name.replace('/', '-')}_{path1.name}"
    for name0, name1 in itertools.product(_names(path0), _names(path1)):
        for between in ("_", "--"):
            yield f"{name0}{between}{name1}".replace("/", "-")


def _size(path: Path) -> Size:
    """Return (width, height) of an image."""
    header = read_header(path)
    # Reading the image raises an error with the reason.
    return read(path).shape[1::-1] if header is None else header.upright_size


def _upright(points: FloatArray, path: Path) -> FloatArray:
    """Convert points of hloc, which refer to the stored image, to the upright image."""
    return find_rotation(path).rotate_points(points)


def _arrays(file: Path) -> Arrays:
    with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        return dict(arrays)


@contextmanager
def _checked(what: object) -> Iterator[None]:
    """Convert any error of a damaged file to a DataError that names it."""
    try:
        yield
    except (*BROKEN, DataError) as error:
        raise DataError(f"{what} is damaged or has other content ({one_line(error)}); write it again.") from error


def _from_pair(arrays: Arrays, sizes: tuple[Size, Size]) -> Matches:
    for name0, name1, score_names, center in _FORMS:
        if name0 in arrays and name1 in arrays:
            points = [np.asarray(arrays[name], np.float64).reshape(-1, 2) - center for name in (name0, name1)]
            scores = next((np.asarray(arrays[name]).reshape(-1) for name in score_names if name in arrays), None)
            if scores is None:
                raise ValueError(f"it has no {score_names[0]}")
            # SuperGlue's format: for each keypoint of image 0 the index of one in image 1, or -1.
            if "matches" in arrays:
                index = np.asarray(arrays["matches"])
                points, scores = [points[0][index >= 0], points[1][index[index >= 0]]], scores[index >= 0]
            return _matches(points[0], points[1], scores, sizes)
    raise ValueError(f"it has {', '.join(arrays)} instead of keypoints_A, keypoints_B and scores")


def _matches(points0: FloatArray, points1: FloatArray, scores: FloatArray, sizes: tuple[Size, Size]) -> Matches:
    return Matches(points0=points0, points1=points1, scores=scores, size0=sizes[0], size1=sizes[1])


def _described(arrays: Arrays) -> Described:
    """Return keypoints (n, 2 or more: x, y, scale) with descriptors (n, c)."""
    points = np.asarray(arrays["keypoints"], np.float64)
    descriptors = np.asarray(arrays["descriptors"], np.float32)
    if points.ndim != 2 or points.shape[1] < 2 or descriptors.ndim != 2 or len(descriptors) != len(points):
        raise ValueError(f"keypoints {points.shape} and descriptors {descriptors.shape} do not fit together")
    norms = np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Described(points=points[:, :2], descriptors=descriptors / np.maximum(norms, 1e-12))


def _open_hdf5(file: Path) -> Any:
    h5py = require("h5py", "colmap", "hloc's .h5 files")
    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise DataError(f"{file} cannot be read as HDF5 ({error}); write it again.") from error
