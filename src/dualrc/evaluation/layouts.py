"""Data sets for two-view pose: MegaDepth-1500 and ScanNet-1500 as LoFTR published them, and cameras.json folders."""

import io
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.data.npz import BROKEN, ArrayUnpickler, read_array
from dualrc.errors import DataError
from dualrc.evaluation.export import Pair
from dualrc.geometry import Camera, cam1_from_cam0, read_cameras_json
from dualrc.image import read_header
from dualrc.types import FloatArray, Size

_SCANNET_SIZE = (640, 480)  # of the pictures for which ScanNet-1500's intrinsics are given
_INDEX_KEYS = ("pair_infos", "name")  # MegaDepth-1500's and ScanNet-1500's
_MAX_STRETCH = 0.02  # ScanNet's own pictures of 1296 x 968 are stretched by 0.4 % to 640 x 480
_MAX_SKEW = 1e-2  # of a rotation matrix; indexes hold them in float32 and in text


@dataclass(frozen=True, kw_only=True, eq=False)
class PoseTruth:
    """A pair's intrinsics and relative pose."""

    K0: FloatArray  # (3, 3), for a picture of size0, or for the picture as it is where that is None
    K1: FloatArray
    size0: Size | None
    size1: Size | None
    cam1_from_cam0: FloatArray  # (3, 4)

    def __post_init__(self) -> None:
        for K, size in ((self.K0, self.size0), (self.K1, self.size1)):
            _camera(K, size, size or (1, 1))
        if not np.isfinite(self.cam1_from_cam0).all():
            raise DataError("The relative pose has values that are not numbers; mend the index.")
        R, t = self.cam1_from_cam0[:, :3], self.cam1_from_cam0[:, 3]
        if np.abs(R @ R.T - np.eye(3)).max() > _MAX_SKEW or np.linalg.det(R) < 0:
            raise DataError("The relative pose has no rotation; mend the index.")
        if not t.any():
            raise DataError("The relative pose has no translation, so its direction can't be scored; leave it out.")

    def cameras(self, size0: Size, size1: Size) -> tuple[Camera, Camera]:
        """The cameras of the two pictures as they are."""
        return _camera(self.K0, self.size0, size0), _camera(self.K1, self.size1, size1)


@dataclass(frozen=True, kw_only=True)
class PoseData:
    """The pairs of a data set, those without ground truth named in the notes."""

    layout: str
    pairs: dict[Pair, PoseTruth]
    notes: tuple[str, ...]


def read_pose_data(root: Path) -> PoseData:
    """Recognize a data set by its index files, and read it."""
    if not root.is_dir():
        raise DataError(f"The folder {root} does not exist; check the path.")
    indexes, unreadable = _read_indexes(root)
    notes = [f"Not used: {reason}" for reason in unreadable]
    readers: dict[str, Callable[[], Iterable[tuple[Pair, PoseTruth]]]] = {
        "scannet": lambda: _scannet(root, indexes, notes),
        "megadepth": lambda: _megadepth(root, indexes, notes),
        "cameras.json": lambda: _cameras_json(root, notes),
    }
    for layout, reader in readers.items():
        pairs = dict(reader())
        if pairs:
            missing = [p for pair in pairs for p in (pair.path0, pair.path1) if not p.is_file()]
            if len(missing) == 2 * len(pairs):
                raise DataError(f"{root} has an index but no pictures, such as {missing[0]}; put them there.")
            pairs = _without_stretched(pairs, notes)
        if pairs:
            return PoseData(layout=layout, pairs=pairs, notes=tuple(notes))
    if notes:
        raise DataError(f"{root} has no pair that can be scored. {notes[0]}")
    raise DataError(
        f"{root} is not a data set for poses: no MegaDepth-1500 or ScanNet-1500 index (*.npz) and no cameras.json "
        "in it or in its folders; give another one."
    )


def read_index(path: Path) -> dict[str, Any]:
    """The dictionary in an .npz file, which may be a bare pickle; nothing but arrays and plain values is let in."""
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


def _read_indexes(root: Path) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """Index files in a folder or one below, and why others could not be read."""
    indexes, unreadable = {}, []
    for path in (*sorted(root.glob("*.npz")), *sorted(root.glob("*/*.npz"))):
        try:
            content = read_index(path)
        except DataError as error:
            unreadable.append(str(error))
            continue
        if not content.keys().isdisjoint(_INDEX_KEYS):
            indexes[path] = content
    return indexes, unreadable


def _not_scored(what: str, why: object) -> str:
    """What a reader of the results is told of a pair without usable truth."""
    return f"{what} is not scored: {str(why).rstrip('.')}."


def _without_stretched(pairs: Mapping[Pair, PoseTruth], notes: list[str]) -> dict[Pair, PoseTruth]:
    """The pairs whose cameras can be those of their pictures; what can't be read is left to the matcher to report."""
    sizes: dict[Path, Size | None] = {}
    kept = {}
    for pair, truth in pairs.items():
        for path in (pair.path0, pair.path1):
            if path not in sizes:
                header = read_header(path)
                sizes[path] = None if header is None else header.upright_size
        try:
            truth.cameras(sizes[pair.path0] or truth.size0 or (1, 1), sizes[pair.path1] or truth.size1 or (1, 1))
        except DataError as error:
            notes.append(_not_scored(f"{pair.name0} {pair.name1}", error))
            continue
        kept[pair] = truth
    return kept


def _megadepth(
    root: Path, indexes: Mapping[Path, dict[str, Any]], notes: list[str]
) -> Iterator[tuple[Pair, PoseTruth]]:
    """Each index file has pairs of numbers into its lists of pictures, intrinsics and poses (cam_from_world)."""
    for path, index in indexes.items():
        if "pair_infos" not in index:
            continue
        try:
            pictures, intrinsics, poses = (index[key] for key in ("image_paths", "intrinsics", "poses"))
            numbers = [tuple(int(number) for number in info[0]) for info in index["pair_infos"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{path} is not an index of MegaDepth-1500 ({error}); get the published file.") from error
        for number0, number1 in numbers:
            try:
                name0, name1 = _picture_name(pictures[number0]), _picture_name(pictures[number1])
                # As published and as others evaluate; COLMAP's half pixel in it turns a ray by 0.03 degrees or less.
                K0, K1 = (np.array(intrinsics[n], dtype=np.float64).reshape(3, 3) for n in (number0, number1))
                pose = cam1_from_cam0(
                    np.array(poses[number0], dtype=np.float64), np.array(poses[number1], dtype=np.float64)
                )
                truth = PoseTruth(K0=K0, K1=K1, size0=None, size1=None, cam1_from_cam0=pose)
            except (IndexError, TypeError, ValueError, DataError) as error:
                notes.append(_not_scored(f"{path.name}, pair {number0} {number1}", error))
                continue
            pair = Pair(name0=name0, name1=name1, path0=root / name0, path1=root / name1, group=path.stem)
            yield pair, truth


def _picture_name(entry: Any) -> str:
    if not isinstance(entry, str):
        raise ValueError("it has no picture")
    return entry


def _scannet(root: Path, indexes: Mapping[Path, dict[str, Any]], notes: list[str]) -> Iterator[tuple[Pair, PoseTruth]]:
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
        for number, row in enumerate(rows.tolist()):
            scene = f"scene{row[0]:04d}_{row[1]:02d}"
            folder = next((f for f in (root, path.parent, *sorted(root.iterdir())) if (f / scene).is_dir()), root)
            names = [f"{scene}/color/{frame}.jpg" for frame in row[2:]]
            try:
                K = np.array(intrinsics[scene], dtype=np.float64).reshape(3, 3)
                pose = (
                    _relative_from_files(folder / scene / "pose", row[2], row[3])
                    if poses is None
                    else np.array(poses[number], dtype=np.float64).reshape(3, 4)
                )
                truth = PoseTruth(K0=K, K1=K, size0=_SCANNET_SIZE, size1=_SCANNET_SIZE, cam1_from_cam0=pose)
            except KeyError:
                notes.append(_not_scored(f"{names[0]} {names[1]}", f"intrinsics.npz has no {scene}"))
                continue
            except (OSError, ValueError, DataError) as error:
                notes.append(_not_scored(f"{names[0]} {names[1]}", error))
                continue
            pair = Pair(
                name0=names[0], name1=names[1], path0=folder / names[0], path1=folder / names[1], group=path.stem
            )
            yield pair, truth


def _relative_from_files(folder: Path, frame0: int, frame1: int) -> FloatArray:
    """ScanNet's pose files hold world_from_cam (4, 4)."""
    cams = [np.linalg.inv(np.loadtxt(folder / f"{frame}.txt").reshape(4, 4)) for frame in (frame0, frame1)]
    return cam1_from_cam0(cams[0], cams[1])


def _cameras_json(root: Path, notes: list[str]) -> Iterator[tuple[Pair, PoseTruth]]:
    """Every pair of pictures of a scene, or those that its pairs.txt names, two a line."""
    for path in (*sorted(root.glob("cameras.json")), *sorted(root.glob("*/cameras.json"))):
        folder = path.parent
        try:
            cameras = read_cameras_json(path)
        except DataError as error:  # one scene's mistake is not the others'
            notes.append(_not_scored(folder.name, error))
            continue
        names = sorted(name for name, camera in cameras.items() if camera.cam_from_world is not None)
        if unposed := sorted(cameras.keys() - set(names)):
            notes.append(f"{path}: {len(unposed)} pictures without cam_from_world are not used, such as {unposed[0]}.")
        chosen = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        if (folder / "pairs.txt").is_file():
            chosen = _read_pairs(folder / "pairs.txt", set(names))
        for name0, name1 in chosen:
            try:
                found = _posed_pair(folder, cameras, name0, name1)
            except DataError as error:
                notes.append(_not_scored(f"{folder.name}/{name0} {folder.name}/{name1}", error))
                continue
            yield found


def _posed_pair(folder: Path, cameras: Mapping[str, Camera], name0: str, name1: str) -> tuple[Pair, PoseTruth]:
    camera0, camera1 = cameras[name0], cameras[name1]
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


def _read_pairs(path: Path, known: set[str]) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if words and (len(words) != 2 or not known.issuperset(words)):
            raise DataError(f"{path}, line {number}: {line!r} is not two pictures with poses; write NAME0 NAME1.")
        if words:
            pairs.append((words[0], words[1]))
    return pairs


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
