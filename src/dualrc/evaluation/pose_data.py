"""Data sets for two-view pose: MegaDepth-1500 and ScanNet-1500 as LoFTR published them, and cameras.json folders."""

import io
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.colmap import read_header
from dualrc.data.npz import BROKEN, ArrayUnpickler, read_array
from dualrc.errors import DataError
from dualrc.evaluation.data_files import as_pose, check_folder, read_name_pairs
from dualrc.evaluation.export import Pair
from dualrc.geometry import Camera, cam1_from_cam0, read_cameras_json
from dualrc.types import FloatArray, Size

_SCANNET_SIZE = (640, 480)  # of the pictures for which ScanNet-1500's intrinsics are given
_INDEX_KEYS = ("pair_infos", "name")  # MegaDepth-1500's and ScanNet-1500's
_MAX_STRETCH = 0.02  # ScanNet's own pictures of 1296 x 968 are stretched by 0.4 % to 640 x 480
_ROTATION_TOLERANCE = 1e-2  # indexes hold rotations in float32 and in text


@dataclass(frozen=True, kw_only=True, eq=False)
class PoseTruth:
    """A pair's intrinsics and relative pose."""

    K0: FloatArray  # (3, 3), for a picture of size0, or for the picture as it is where that is None
    K1: FloatArray
    size0: Size | None
    size1: Size | None
    cam1_from_cam0: FloatArray  # (3, 4)

    def __post_init__(self) -> None:
        pose = as_pose(self.cam1_from_cam0, tolerance=_ROTATION_TOLERANCE)
        if not pose[:, 3].any():
            raise ValueError("the relative pose has no translation, so its direction can't be scored")

    def cameras(self, size0: Size, size1: Size) -> tuple[Camera, Camera]:
        """The cameras of the two pictures as they are."""
        return _camera(self.K0, self.size0, size0), _camera(self.K1, self.size1, size1)


@dataclass(frozen=True, kw_only=True)
class PoseData:
    """The pairs of a data set; those without ground truth are named in the notes."""

    layout: str
    pairs: dict[Pair, PoseTruth]
    notes: tuple[str, ...]


Index = dict[str, Any]
# What a layout's reader yields for each pair: how notes call it, and a function that reads it or raises.
Entry = tuple[str, Callable[[], tuple[Pair, PoseTruth]]]


def read_pose_data(root: Path) -> PoseData:
    """Recognize a data set by its index files, and read it."""
    check_folder(root)
    notes: list[str] = []
    indexes = _read_indexes(root, notes)
    for layout, entries in (
        ("scannet", _scannet(root, indexes)),
        ("megadepth", _megadepth(root, indexes)),
        ("cameras.json", _cameras_json(root, notes)),
    ):
        pairs = _usable(entries, notes)
        paths = [path for pair in pairs for path in (pair.path0, pair.path1)]
        if paths and not any(path.is_file() for path in paths):
            raise DataError(f"{root} has an index but no pictures, such as {paths[0]}; put them there.")
        if pairs:
            return PoseData(layout=layout, pairs=pairs, notes=tuple(notes))
    if notes:
        raise DataError(f"{root} has no pair that can be scored. {notes[0]}")
    raise DataError(
        f"{root} is not a data set for poses: no MegaDepth-1500 or ScanNet-1500 index (*.npz) and no cameras.json "
        "in it or in its folders; give another one."
    )


def _usable(entries: Iterable[Entry], notes: list[str]) -> dict[Pair, PoseTruth]:
    """The pairs whose poses can be poses and whose cameras can be those of their pictures."""

    @cache
    def size(path: Path) -> Size | None:
        header = read_header(path)
        return None if header is None else header.upright_size

    pairs = {}
    for name, read_pair in entries:
        try:
            pair, truth = read_pair()
            # A picture that can't be read is left to the matcher to report.
            truth.cameras(size(pair.path0) or truth.size0 or (1, 1), size(pair.path1) or truth.size1 or (1, 1))
            pairs[pair] = truth
        except (OSError, IndexError, TypeError, ValueError, DataError) as error:
            notes.append(f"{name} is not scored: {str(error).rstrip('.')}.")
    return pairs


def read_index(path: Path) -> Index:
    """The dictionary in an .npz file, which may be a bare pickle; only arrays and plain values are unpickled."""
    try:
        data = path.read_bytes()
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                names = archive.namelist()
                return {name.removesuffix(".npy"): read_array(io.BytesIO(archive.read(name))) for name in names}
        content = ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
    except BROKEN as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is not an index, or broken ({reason}); get the published file.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a dictionary; get the published file.")
    return content


def _read_indexes(root: Path, notes: list[str]) -> dict[Path, Index]:
    """The index files in a folder or one below."""
    indexes = {}
    for path in (*sorted(root.glob("*.npz")), *sorted(root.glob("*/*.npz"))):
        try:
            content = read_index(path)
        except DataError as error:
            notes.append(f"Not used: {error}")
            continue
        if not content.keys().isdisjoint(_INDEX_KEYS):
            indexes[path] = content
    return indexes


def _megadepth(root: Path, indexes: Mapping[Path, Index]) -> Iterator[Entry]:
    """Each index file has pairs of numbers into its lists of pictures, intrinsics and poses (cam_from_world)."""
    for path, index in indexes.items():
        if "pair_infos" not in index:
            continue
        try:
            numbers = [tuple(int(number) for number in info[0]) for info in index["pair_infos"]]
            pictures, intrinsics, poses = (index[key] for key in ("image_paths", "intrinsics", "poses"))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{path} is not an index of MegaDepth-1500 ({error}); get the published file.") from error
        for number0, number1 in numbers:
            read_pair = partial(_megadepth_pair, root, path.stem, pictures, intrinsics, poses, (number0, number1))
            yield f"{path.name}, pair {number0} {number1}", read_pair


def _megadepth_pair(
    root: Path, scene: str, pictures: Any, intrinsics: Any, poses: Any, numbers: tuple[int, int]
) -> tuple[Pair, PoseTruth]:
    name0, name1 = (pictures[number] for number in numbers)
    if not isinstance(name0, str) or not isinstance(name1, str):
        raise ValueError("it has no picture")
    # As published and as others evaluate; COLMAP's half pixel in it turns a ray by 0.03 degrees or less.
    K0, K1 = (np.array(intrinsics[number], dtype=np.float64).reshape(3, 3) for number in numbers)
    pose = cam1_from_cam0(*(np.array(poses[number], dtype=np.float64) for number in numbers))
    truth = PoseTruth(K0=K0, K1=K1, size0=None, size1=None, cam1_from_cam0=pose)
    return Pair(name0=name0, name1=name1, path0=root / name0, path1=root / name1, group=scene), truth


def _scannet(root: Path, indexes: Mapping[Path, Index]) -> Iterator[Entry]:
    """test.npz has rows (scene, sub-scene, frame 0, frame 1) and poses, intrinsics.npz a matrix by scene."""
    for path, index in indexes.items():
        if "name" not in index:
            continue
        if not (path.parent / "intrinsics.npz").is_file():
            raise DataError(f"{path.parent} has {path.name} but no intrinsics.npz beside it; get the published file.")
        intrinsics = read_index(path.parent / "intrinsics.npz")
        rows = np.asarray(index["name"])
        poses = np.asarray(index["rel_pose"]) if "rel_pose" in index else None
        if rows.ndim != 2 or rows.shape[1] != 4 or (poses is not None and poses.shape != (len(rows), 12)):
            shapes = f"name {rows.shape}, rel_pose {poses.shape if poses is not None else 'none'}"
            raise DataError(f"{path} is not ScanNet-1500's ({shapes}); name has 4 columns, rel_pose 12.")
        for number, (major, minor, *frames) in enumerate(rows.tolist()):
            scene = f"scene{major:04d}_{minor:02d}"
            folder = next((f for f in (root, path.parent, *sorted(root.iterdir())) if (f / scene).is_dir()), root)
            pose = None if poses is None else poses[number]
            read_pair = partial(_scannet_pair, folder, path.stem, scene, frames, intrinsics, pose)
            yield " ".join(f"{scene}/color/{frame}.jpg" for frame in frames), read_pair


def _scannet_pair(
    folder: Path, group: str, scene: str, frames: list[int], intrinsics: Index, pose: Any
) -> tuple[Pair, PoseTruth]:
    if scene not in intrinsics:
        raise DataError(f"intrinsics.npz has no {scene}")
    K = np.array(intrinsics[scene], dtype=np.float64).reshape(3, 3)
    if pose is None:  # the files hold world_from_cam (4, 4)
        files = [folder / scene / "pose" / f"{frame}.txt" for frame in frames]
        pose = cam1_from_cam0(*(np.linalg.inv(np.loadtxt(file).reshape(4, 4)) for file in files))
    pose = np.array(pose, dtype=np.float64).reshape(3, 4)
    truth = PoseTruth(K0=K, K1=K, size0=_SCANNET_SIZE, size1=_SCANNET_SIZE, cam1_from_cam0=pose)
    name0, name1 = (f"{scene}/color/{frame}.jpg" for frame in frames)
    return Pair(name0=name0, name1=name1, path0=folder / name0, path1=folder / name1, group=group), truth


def _cameras_json(root: Path, notes: list[str]) -> Iterator[Entry]:
    """Every pair of pictures of a scene, or those that its pairs.txt names, two a line."""
    for path in (*sorted(root.glob("cameras.json")), *sorted(root.glob("*/cameras.json"))):
        folder = path.parent
        try:
            cameras = read_cameras_json(path)
        except DataError as error:  # one scene's mistake is not the others'
            notes.append(f"{folder.name} is not scored: {error}")
            continue
        names = sorted(name for name, camera in cameras.items() if camera.cam_from_world is not None)
        if unposed := sorted(cameras.keys() - set(names)):
            notes.append(f"{path}: {len(unposed)} pictures without cam_from_world are not used, such as {unposed[0]}.")
        chosen = list(combinations(names, 2))
        if (folder / "pairs.txt").is_file():
            chosen = read_name_pairs(folder / "pairs.txt", names, what="two pictures with poses")
        for name0, name1 in chosen:
            read_pair = partial(_posed_pair, folder, name0, name1, cameras[name0], cameras[name1])
            yield f"{folder.name}/{name0} {folder.name}/{name1}", read_pair


def _posed_pair(folder: Path, name0: str, name1: str, camera0: Camera, camera1: Camera) -> tuple[Pair, PoseTruth]:
    assert camera0.cam_from_world is not None and camera1.cam_from_world is not None
    pair = Pair(
        name0=f"{folder.name}/{name0}",
        name1=f"{folder.name}/{name1}",
        path0=folder / "images" / name0,
        path1=folder / "images" / name1,
        group=folder.name,
    )
    pose = cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world)
    return pair, PoseTruth(K0=camera0.K, K1=camera1.K, size0=camera0.size, size1=camera1.size, cam1_from_cam0=pose)


def _camera(K: FloatArray, stated: Size | None, size: Size) -> Camera:
    """The camera of a picture as it is, which may only be a resized one of the stated size."""
    width, height = stated or size
    camera = Camera(width=width, height=height, K=K, source="data set")
    if camera.size == size:
        return camera
    stretch = (size[0] / width) / (size[1] / height)
    if not abs(np.log(stretch)) <= np.log1p(_MAX_STRETCH):
        there, here = f"{width}x{height}", f"{size[0]}x{size[1]}"
        raise DataError(f"K is for a picture of {there}, and this one of {here} has another shape; get its own K.")
    return camera.resized(size)
