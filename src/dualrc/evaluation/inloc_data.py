"""InLoc's files as published: cutouts and scans with 3D points, alignments, lists of candidates and of poses."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.data.arrays import MOST_DATASET_BYTES, read_dataset
from dualrc.errors import DataError
from dualrc.evaluation.benchmark import folder_hint
from dualrc.evaluation.data_files import as_pose, check_folder, reading
from dualrc.extras import require
from dualrc.files import read_lines, replacing
from dualrc.geometry import Camera, read_cameras_json
from dualrc.types import FloatArray, Size

# Relative focal length of the iPhone 7, 28 mm for a film of 36 mm; InLoc publishes nothing else about the camera.
_FOCAL = 28 / 36
# A loose tolerance, because alignments are text files with few digits.
_checked_pose = partial(as_pose, tolerance=0.05)
_NO_POSE = np.full((3, 4), np.nan)
Points = npt.NDArray[np.float32]
Colors = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class CandidatePose:
    """A candidate of a query, and the pose from their matches."""

    # FLOOR/SCAN/PREFIX_cutout_SCAN_YAW_PITCH.jpg.
    candidate: str
    inliers: int = 0
    # Number of matches with a 3D point.
    correspondences: int = 0
    # (3, 4).
    cam_from_world: tuple[tuple[float, ...], ...] | None = None
    # Reason why there is no pose.
    reason: str | None = None
    # Similarity of the photo and the scan rendered from the pose.
    verified: float | None = None

    @property
    def pose(self) -> FloatArray | None:
        """cam_from_world (3, 4)."""
        return None if self.cam_from_world is None else np.array(self.cam_from_world)


def pose_rows(pose: FloatArray) -> tuple[tuple[float, ...], ...]:
    """Convert a pose (3, 4) to plain numbers."""
    return tuple(map(tuple, pose.tolist()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Folders:
    """Folders of images and points of a dataset."""

    queries: Path
    cutouts: Path
    alignments: Path
    # May not exist.
    scans: Path
    # Cameras of queries that were not taken with InLoc's phone.
    cameras: Mapping[str, Camera] = field(default_factory=dict)

    def camera(self, query: str, size: Size) -> Camera:
        """Return the camera of a query of that size; by default only its focal length is known."""
        known = self.cameras.get(query)
        return Camera.from_focal(size, _FOCAL * max(size)) if known is None else known.resized(size)

    def alignment(self, cutout: str) -> Path:
        """Return the file that aligns the points of a cutout with the frame of its floor."""
        floor, prefix, scan = _parts(cutout)
        return self.alignments / floor / "transformations" / f"{prefix}_trans_{scan}.txt"

    def points(self, cutout: str) -> Path:
        """Return the file with the 3D points of a cutout."""
        return self.cutouts / f"{cutout}.mat"

    def scan(self, cutout: str) -> Path:
        """Return the file with all points of the scan that a cutout was made from."""
        floor, prefix, scan = _parts(cutout)
        return self.scans / floor / f"{prefix}_scan_{scan}.ptx.mat"


def find_folders(root: Path) -> Folders:
    """Find the folders under a root, as published or without the folders query and database."""
    check_folder(root)
    base = root / "database" if (root / "database").is_dir() else root
    places = [root / name for name in ("query/iphone7", "iphone7", "query")]
    queries = next((place for place in places if place.is_dir()), places[0])
    needed = {f"database/{name}": base / name for name in ("cutouts", "alignments")}
    missing = [name for name, folder in {"query/iphone7": queries, **needed}.items() if not folder.is_dir()]
    if len(missing) == 3:
        raise DataError(f"{root} has none of {', '.join(missing)}: it is not InLoc; {folder_hint(root, 'inloc')}.")
    if missing:
        raise DataError(f"{root} is incomplete: {', '.join(missing)} is missing; copy the published folders there.")
    cameras = queries / "cameras.json"
    return Folders(
        queries=queries,
        cutouts=base / "cutouts",
        alignments=base / "alignments",
        scans=base / "scans",
        cameras=read_cameras_json(cameras) if cameras.is_file() else {},
    )


def find_list(root: Path, patterns: Sequence[str]) -> Path | None:
    """Return the only file of these names in a folder or its subfolders, or None."""
    found = sorted({path for pattern in patterns for level in ("", "*/") for path in root.glob(level + pattern)})
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(root)) for path in found[:4])
        raise DataError(f"{root} has several lists ({names}); pass one of them.")
    return found[0] if found else None


def read_candidates(path: Path) -> dict[str, list[str]]:
    """Read candidates by query: a published list (.mat), or text with a query and a cutout per line, best first."""
    if path.suffix.lower() == ".mat":
        return {query: [one.candidate for one in found] for query, found in read_result_list(path).items()}
    candidates: dict[str, list[str]] = {}
    for number, line in read_lines(path):
        fields = [PurePosixPath(name) for name in line.split()]
        if len(fields) != 2 or len(fields[1].parts) < 3:
            remedy = "write a query and FLOOR/SCAN/CUTOUT.jpg per line"
            raise DataError(f"{path}, line {number}: not a query and a cutout; {remedy}.")
        # Lists of other tools include the folders query/iphone7/... and database/cutouts/...
        cutout = _check_name("/".join(fields[1].parts[-3:]), path)
        candidates.setdefault(fields[0].name, []).append(cutout)
    if not candidates:
        raise DataError(f"{path} has no candidates; write a query and a cutout per line.")
    return {query: list(dict.fromkeys(names)) for query, names in candidates.items()}


def read_result_list(path: Path, *, need_poses: bool = False) -> dict[str, tuple[CandidatePose, ...]]:
    """Read a published list ImgList: candidates by query, best first, and their poses."""
    with reading(path, "a list of candidates (ImgList)"):
        entries = _read_mat(path, "ImgList")["ImgList"].ravel()
        if need_poses and "P" not in (entries.dtype.names or ()):
            raise DataError(f"{path} is a list of candidates without poses; pass a list of results.")
        return {str(entry["queryname"].item()): _read_entry(entry, path) for entry in entries}


def _read_entry(entry: Any, path: Path) -> tuple[CandidatePose, ...]:
    names = [_check_name(str(name.item()), path) for name in entry["topNname"].ravel()]
    values = [np.asarray(value, dtype=np.float64) for value in entry["P"].ravel()] if "P" in entry.dtype.names else []
    if len(values) > len(names):
        raise ValueError(f"{len(names)} candidates have {len(values)} poses")
    poses = [pose_rows(_checked_pose(p)) if p.shape == (3, 4) and np.isfinite(p).all() else None for p in values]
    # A list may have poses for the first candidates only.
    pairs = zip_longest(names, poses)
    return tuple(CandidatePose(candidate=name, cam_from_world=pose) for name, pose in pairs)


def write_result_list(path: Path, results: Mapping[str, Sequence[CandidatePose]]) -> None:
    """Write a list in the published format that `read_result_list` reads."""
    columns = [(name, object) for name in ("queryname", "topNname", "topNscore", "P")]
    entries = np.empty((1, len(results)), dtype=columns)
    for index, (query, found) in enumerate(results.items()):
        names, poses = np.empty((1, len(found)), dtype=object), np.empty((1, len(found)), dtype=object)
        names[0] = [one.candidate for one in found]
        poses[0] = [_NO_POSE if one.pose is None else one.pose for one in found]
        scores = [float(one.inliers if one.verified is None else one.verified) for one in found]
        entries[0, index] = (query, names, np.array([scores]), poses)
    with replacing(path) as temporary:
        _scipy_io().savemat(temporary, {"ImgList": entries}, do_compression=True)


def read_references(path: Path) -> dict[str, dict[str, FloatArray]]:
    """Read reference poses cam_from_world (3, 4) by floor and query: FLOOR_RefList in a .mat file."""
    with reading(path, "a file of reference poses"):
        lists = {name: value for name, value in _read_mat(path).items() if name.endswith("_RefList")}
        if not lists:
            raise ValueError("it has no FLOOR_RefList")
        return {
            name.removesuffix("_RefList"): {
                str(entry["queryname"].item()): _checked_pose(entry["P"]) for entry in entries.ravel()
            }
            for name, entries in lists.items()
        }


def read_alignment(path: Path) -> FloatArray:
    """Read floor_from_scan (3, 4): the second of the two matrices in the file, which is the refined one."""
    with reading(path, "an alignment"):
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            # Skip text between the matrices.
            with suppress(ValueError):
                values = [float(value) for value in line.split()]
                rows += [values] if len(values) == 4 else []
        if len(rows) < 8:
            raise ValueError(f"it has {len(rows)} of 8 rows of 4 numbers")
        if not np.allclose(rows[7], [0, 0, 0, 1]):
            raise ValueError("its last row is not 0 0 0 1")
        return _checked_pose(np.array(rows[4:7]))


def read_cutout(path: Path) -> Points:
    """Read the 3D points of a cutout in the scanner's frame (h, w, 3), NaN where there is none."""
    with reading(path, "a cutout with points (XYZcut)"):
        return _points(_read_mat(path, "XYZcut")["XYZcut"])


def read_scan(scan: Path, cutouts: Path) -> tuple[Points, Colors]:
    """Read the points (n, 3) of a scan, in the scanner's frame, and their colors (n, 3).

    Without the scan's file, return the points in the folder of its cutouts, which come from the same scan.
    """
    if scan.is_file():
        with reading(scan, "a scan (A)"):
            # Columns of a .ptx file: x, y, z, intensity, red, green, blue.
            cells = np.asarray(_read_mat(scan, "A")["A"], dtype=object).ravel()
            x, y, z, _, red, green, blue = (np.asarray(cell).ravel() for cell in cells)
            xyz, rgb = _points(np.stack([x, y, z], axis=1)), np.stack([red, green, blue], axis=1).astype(np.uint8)
    else:
        files = sorted(cutouts.glob("*.mat"))
        if not files:
            raise DataError(f"{cutouts} has no points; copy the published files there.")
        parts = [_read_colored(path) for path in files]
        xyz, rgb = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    known = np.isfinite(xyz).all(axis=1)
    return xyz[known], rgb[known]


def _read_colored(path: Path) -> tuple[Points, Colors]:
    """Read the points (n, 3) of a cutout and their colors (n, 3)."""
    with reading(path, "a cutout"):
        content = _read_mat(path, "XYZcut", "RGBcut")
        xyz, rgb = _points(content["XYZcut"]), np.asarray(content["RGBcut"], dtype=np.uint8)
        if xyz.shape != rgb.shape:
            raise ValueError(f"points have the shape {xyz.shape} and colors {rgb.shape}")
        return xyz.reshape(-1, 3), rgb.reshape(-1, 3)


def _parts(cutout: str) -> tuple[str, str, str]:
    """Return floor, prefix and scan of FLOOR/SCAN/PREFIX_cutout_SCAN_YAW_PITCH.jpg."""
    floor, _, name = cutout.split("/")
    prefix, _, scan, *_ = name.split("_")
    return floor, prefix, scan


def _check_name(cutout: str, path: Path) -> str:
    try:
        parts = _parts(cutout)
    except ValueError as error:
        name = "FLOOR/SCAN/PREFIX_cutout_SCAN_YAW_PITCH.jpg"
        raise DataError(f"{path}: {cutout} is not the name of a cutout; names are {name}.") from error
    if ".." in (*cutout.split("/"), *parts):
        raise DataError(f"{path}: {cutout} is outside of the folder of cutouts; download the published list.")
    return cutout


def _points(values: Any) -> Points:
    """Return 3D points (..., 3) with NaN instead of the zeros that the scanner writes for missing points."""
    xyz = np.array(values, dtype=np.float32)
    if xyz.shape[-1:] != (3,) or not xyz.size:
        raise ValueError(f"points have the shape {xyz.shape}")
    xyz[~np.any(xyz != 0, axis=-1) | ~np.isfinite(xyz).all(axis=-1)] = np.nan
    return xyz


def _scipy_io() -> Any:
    return require("scipy.io", "colmap", ".mat files")


def _read_mat(path: Path, *names: str) -> dict[str, Any]:
    """Read variables of a .mat file (version 7.3 is HDF5); variables that claim more than 1 GiB are rejected."""
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        for name, shape, _ in _scipy_io().whosmat(path, appendmat=False):
            if (not names or name in names) and 8 * math.prod(shape) > MOST_DATASET_BYTES:
                raise ValueError(f"{name} has the shape {shape}")
        content: dict[str, Any] = _scipy_io().loadmat(path, appendmat=False, variable_names=names or None)
    except NotImplementedError:
        content = _read_hdf5(path, names)
    for name in names:
        if name not in content:
            raise ValueError(f"it has no {name}")
    return content


def _read_hdf5(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read arrays and cells of arrays; HDF5 reverses MATLAB's axes."""
    h5py = require("h5py", "colmap", ".mat files of MATLAB 7.3")
    content: dict[str, Any] = {}
    with h5py.File(path, "r") as file:
        for name in names:
            if name not in file:
                continue
            values = read_dataset(file, name).T
            if values.dtype == object:
                cells = np.empty(values.size, dtype=object)
                cells[:] = [read_dataset(file, reference).T for reference in values.ravel()]
                values = cells
            content[name] = values
    return content
