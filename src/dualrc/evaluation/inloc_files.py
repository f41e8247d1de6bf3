"""InLoc's files as published: cut-outs and scans with 3D points, alignments, lists of candidates and of poses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualrc.errors import ConfigError, DataError, DualRCError
from dualrc.evaluation.hpatches import looks_like_hpatches
from dualrc.files import replacing
from dualrc.geometry import Camera, read_cameras_json
from dualrc.types import FloatArray, Size

# Of iPhone 7's lens, which is all that InLoc knows of it: 28 mm for a film of 36 mm.
_FOCAL = 28 / 36
_MAX_SKEW = 0.05  # of a rotation matrix; alignments are text
T = TypeVar("T")
Poses = dict[str, FloatArray]  # cam_from_world (3, 4) by query


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranked:
    """A query's candidates, best first, and perhaps the pose that each gave."""

    candidates: tuple[str, ...]  # FLOOR/SCAN/PREFIX_cutout_SCAN_YAW_PITCH.jpg
    scores: tuple[float, ...] = ()
    poses: tuple[FloatArray, ...] = ()  # cam_from_world (3, 4), NaN where there is none


@dataclass(frozen=True, kw_only=True, eq=False)
class Folders:
    """Where a data set's pictures and points are."""

    queries: Path
    cutouts: Path
    alignments: Path
    scans: Path  # need not be there
    cameras: Mapping[str, Camera] = field(default_factory=dict)  # of queries that were not taken with InLoc's phone

    def camera(self, query: str, size: Size) -> Camera:
        """The camera of a query of that size; all that InLoc knows is its focal length."""
        known = self.cameras.get(query)
        return Camera.from_focal(size, _FOCAL * max(size)) if known is None else known.resized(size)

    def alignment(self, cutout: str) -> Path:
        """The file that takes a cut-out's points to its floor's frame."""
        floor, prefix, scan = _parts(cutout)
        return self.alignments / floor / "transformations" / f"{prefix}_trans_{scan}.txt"

    def points(self, cutout: str) -> Path:
        """The file with a cut-out's 3D points."""
        return self.cutouts / f"{cutout}.mat"

    def scan(self, cutout: str) -> Path:
        """The file with all points of the scan from which a cut-out was made."""
        floor, prefix, scan = _parts(cutout)
        return self.scans / floor / f"{prefix}_scan_{scan}.ptx.mat"


def find_folders(root: Path) -> Folders:
    """The folders under a root, as InLoc publishes them or without the folders query and database."""
    if not root.is_dir():
        raise DataError(f"The folder {root} does not exist; check the path.")
    base = root / "database" if (root / "database").is_dir() else root
    names = [name for name in ("query/iphone7", "iphone7", "query") if (root / name).is_dir()]
    wanted = {"query/iphone7": bool(names)}
    wanted |= {f"database/{name}": (base / name).is_dir() for name in ("cutouts", "alignments")}
    missing = [name for name, there in wanted.items() if not there]
    if len(missing) == len(wanted):
        hint = "give another one"
        if looks_like_hpatches(root):
            hint = "it holds HPatches sequences: run `dualrc evaluate hpatches` on it"
        elif any((root / name).exists() for name in ("3D-models", "queries", "images/images_upright")):
            hint = "it looks like Aachen Day-Night: run `dualrc evaluate aachen` on it"
        raise DataError(f"{root} has none of {', '.join(missing)}: it is not InLoc; {hint}.")
    if missing:
        raise DataError(f"{root} is not complete: {', '.join(missing)} is missing; copy the published folders there.")
    queries = root / names[0]
    cameras = queries / "cameras.json"
    return Folders(
        queries=queries,
        cutouts=base / "cutouts",
        alignments=base / "alignments",
        scans=base / "scans",
        cameras=read_cameras_json(cameras) if cameras.is_file() else {},
    )


def find_list(root: Path, patterns: Sequence[str]) -> Path | None:
    """The one file of these names in a folder or one below; None if there is none."""
    found = sorted({path for pattern in patterns for level in ("", "*/") for path in root.glob(level + pattern)})
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(root)) for path in found[:4])
        raise DataError(f"{root} has several lists ({names}); say which one is meant.")
    return found[0] if found else None


def read_candidates(path: Path) -> dict[str, Ranked]:
    """Candidates by query: a published list (.mat), or text with a query and a cut-out in each line, best first."""
    if path.suffix.lower() == ".mat":
        return read_result_list(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text ({error}); check the path.") from error
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.split()
        if not fields or line.startswith("#"):
            continue
        if len(fields) != 2 or len(PurePosixPath(fields[1]).parts) < 3:
            remedy = "write a query and FLOOR/SCAN/CUTOUT.jpg in each line"
            raise DataError(f"{path}, line {number}: not a query and a cut-out; {remedy}.")
        # Lists of other tools have the folders in front: query/iphone7/..., database/cutouts/...
        cutout = "/".join(PurePosixPath(fields[1]).parts[-3:])
        found.setdefault(PurePosixPath(fields[0]).name, []).append(_checked(cutout, path))
    if not found:
        raise DataError(f"{path} names no candidates; write a query and a cut-out in each line.")
    return {query: Ranked(candidates=tuple(dict.fromkeys(names))) for query, names in found.items()}


def read_result_list(path: Path) -> dict[str, Ranked]:
    """A published list ImgList: candidates by query, their scores, and the poses that they gave."""

    def read() -> dict[str, Ranked]:
        entries = _read_mat(path, "ImgList")["ImgList"].ravel()
        return {str(entry["queryname"].item()): _ranked(entry, path) for entry in entries}

    return _reading(path, "a list of candidates (ImgList)", read)


def write_result_list(path: Path, results: Mapping[str, Ranked]) -> None:
    """Write what `read_result_list` reads, as published."""
    columns = [(name, object) for name in ("queryname", "topNname", "topNscore", "P")]
    entries = np.empty((1, len(results)), dtype=columns)
    for index, (query, ranked) in enumerate(results.items()):
        count = len(ranked.candidates)
        names, poses = np.empty((1, count), dtype=object), np.empty((1, count), dtype=object)
        names[0], poses[0] = ranked.candidates, ranked.poses
        entries[0, index] = (query, names, np.array([ranked.scores]), poses)
    with replacing(path) as temporary:
        scipy_io().savemat(temporary, {"ImgList": entries}, do_compression=True)


def read_references(path: Path) -> dict[str, Poses]:
    """Reference poses of each floor: FLOOR_RefList in a .mat file."""

    def read() -> dict[str, Poses]:
        lists = {name: value for name, value in _read_mat(path).items() if name.endswith("_RefList")}
        if not lists:
            raise ValueError("it has no FLOOR_RefList")
        return {
            name.removesuffix("_RefList"): {
                str(entry["queryname"].item()): _as_pose(entry["P"], may_fail=False) for entry in entries.ravel()
            }
            for name, entries in lists.items()
        }

    return _reading(path, "a file of reference poses", read)


def read_alignment(path: Path) -> FloatArray:
    """floor_from_scan (3, 4): the second of the two matrices in the file, the one after refinement."""

    def read() -> FloatArray:
        rows = list(_rows(path.read_text(encoding="utf-8")))
        if len(rows) < 8:
            raise ValueError(f"it has {len(rows)} of 8 rows of 4 numbers")
        if not np.allclose(rows[7], [0, 0, 0, 1]):
            raise ValueError("its last row is not 0 0 0 1")
        return _as_pose(np.array(rows[4:7]), may_fail=False)

    return _reading(path, "an alignment", read)


def read_cutout(path: Path) -> npt.NDArray[np.float32]:
    """A cut-out's 3D points in the scanner's frame (h, w, 3), NaN where there is none."""

    def read() -> npt.NDArray[np.float32]:
        return _points(_read_mat(path, "XYZcut")["XYZcut"])

    return _reading(path, "a cut-out's points (XYZcut)", read)


def read_scan(folders: Folders, cutout: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """The points (n, 3) of a cut-out's scan, in the scanner's frame, and their colours (n, 3).

    Without the scan itself they are those of all its cut-outs, which are made of the same points.
    """
    scan = folders.scan(cutout)
    if scan.is_file():
        xyz, rgb = _reading(scan, "a scan (A)", lambda: _scan_columns(_read_mat(scan, "A")["A"]))
    else:
        parts = [_reading(path, "a cut-out", partial(_colored, path)) for path in _siblings(folders, cutout)]
        xyz, rgb = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    known = np.isfinite(xyz).all(axis=1)
    return xyz[known], rgb[known]


def scipy_io() -> ModuleType:
    """The module scipy.io."""
    try:
        import scipy.io
    except ImportError as error:
        raise ConfigError("SciPy is not installed, and .mat files need it; pip install 'dualrc[colmap]'.") from error
    return scipy.io


def _parts(cutout: str) -> tuple[str, str, str]:
    """Floor, prefix and scan of FLOOR/SCAN/PREFIX_cutout_SCAN_YAW_PITCH.jpg."""
    floor, _, name = cutout.split("/")
    prefix, _, scan, *_ = name.split("_")
    return floor, prefix, scan


def _checked(cutout: str, path: Path) -> str:
    try:
        parts = _parts(cutout)
    except ValueError as error:
        name = "FLOOR/SCAN/PREFIX_cutout_SCAN_YAW_PITCH.jpg"
        raise DataError(f"{path}: {cutout} is not a cut-out's name; names are {name}.") from error
    if ".." in (*cutout.split("/"), *parts):
        raise DataError(f"{path}: {cutout} leaves the folder of the cut-outs; get the published list.")
    return cutout


def _siblings(folders: Folders, cutout: str) -> list[Path]:
    found = sorted(folders.points(cutout).parent.glob("*.mat"))
    if not found:
        raise DataError(f"{folders.points(cutout).parent} has no points; copy the published files there.")
    return found


def _ranked(entry: Any, path: Path) -> Ranked:
    names = [_checked(str(name.item()), path) for name in entry["topNname"].ravel()]
    fields = entry.dtype.names or ()
    scores = [float(score) for score in entry["topNscore"].ravel()] if "topNscore" in fields else []
    poses = [_as_pose(pose, may_fail=True) for pose in entry["P"].ravel()] if "P" in fields else []
    if (scores and len(scores) < len(names)) or (poses and len(poses) > len(names)):
        raise ValueError(f"{len(names)} candidates have {len(scores)} scores and {len(poses)} poses")
    return Ranked(candidates=tuple(names), scores=tuple(scores), poses=tuple(poses))


def _as_pose(value: Any, *, may_fail: bool) -> FloatArray:
    """A pose (3, 4); where there may be none, NaN stands for whatever is not one."""
    pose = np.asarray(value, dtype=np.float64)
    if may_fail and (pose.shape != (3, 4) or not np.isfinite(pose).all()):
        return np.full((3, 4), np.nan)
    if pose.shape != (3, 4):
        raise ValueError(f"a pose has the shape {pose.shape}")
    R = pose[:, :3]
    if not np.abs(R @ R.T - np.eye(3)).max() < _MAX_SKEW or not np.isfinite(pose).all() or np.linalg.det(R) < 0:
        raise ValueError("a pose has no rotation")
    return pose


def _rows(text: str) -> Iterator[list[float]]:
    """The lines of four numbers."""
    for line in text.splitlines():
        try:
            values = [float(value) for value in line.split()]
        except ValueError:
            continue
        if len(values) == 4:
            yield values


def _points(values: Any) -> npt.NDArray[np.float32]:
    """3D points (..., 3) with NaN where the scanner, which writes zeros then, saw nothing."""
    xyz = np.array(values, dtype=np.float32)
    if xyz.shape[-1:] != (3,) or not xyz.size:
        raise ValueError(f"points have the shape {xyz.shape}")
    xyz[~np.any(xyz != 0, axis=-1) | ~np.isfinite(xyz).all(axis=-1)] = np.nan
    return xyz


def _colored(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    content = _read_mat(path, "XYZcut", "RGBcut")
    xyz, rgb = _points(content["XYZcut"]), np.asarray(content["RGBcut"], dtype=np.uint8)
    if xyz.shape != rgb.shape:
        raise ValueError(f"points have the shape {xyz.shape} and colours {rgb.shape}")
    return xyz.reshape(-1, 3), rgb.reshape(-1, 3)


def _scan_columns(cells: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Of a .ptx file: x, y, z, intensity, red, green, blue."""
    x, y, z, _, red, green, blue = (np.asarray(cell).ravel() for cell in np.asarray(cells, dtype=object).ravel())
    return _points(np.stack([x, y, z], axis=1)), np.stack([red, green, blue], axis=1).astype(np.uint8)


def _read_mat(path: Path, *names: str) -> dict[str, Any]:
    """Variables of a .mat file; those of version 7.3 are HDF5."""
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        content: dict[str, Any] = scipy_io().loadmat(path, appendmat=False, variable_names=names or None)
    except NotImplementedError:
        content = _read_hdf5(path, names)
    for name in names:
        if name not in content:
            raise ValueError(f"it has no {name}")
    return content


def _read_hdf5(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Arrays, and cells of arrays; HDF5 has MATLAB's axes in reverse."""
    try:
        import h5py
    except ImportError as error:
        remedy = "pip install 'dualrc[colmap]'"
        raise ConfigError(f"h5py is not installed, and {path} (MATLAB 7.3) needs it; {remedy}.") from error
    content: dict[str, Any] = {}
    with h5py.File(path, "r") as file:
        for name in names:
            if name not in file:
                continue
            values = file[name][()].T
            if values.dtype == object:
                cells = np.empty(values.size, dtype=object)
                cells[:] = [file[reference][()].T for reference in values.ravel()]
                values = cells
            content[name] = values
    return content


def _reading(path: Path, what: str, read: Callable[[], T]) -> T:
    """What `read` returns; what it can't read is named."""
    try:
        return read()
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; copy the published file there.") from error
    except DualRCError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is not {what}, or broken ({reason}); get the published file.") from error
