"""Data sets for two-view pose: MegaDepth-1500 and ScanNet-1500 as LoFTR published them, and cameras.json folders."""

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.errors import DataError
from dualrc.evaluation.export import Pair
from dualrc.geometry import Camera, cam1_from_cam0, read_cameras_json
from dualrc.matches import FloatArray, Size

_SCANNET_SIZE = (640, 480)  # of the pictures for which ScanNet-1500's intrinsics are given


@dataclass(frozen=True, kw_only=True, eq=False)
class PoseTruth:
    """A pair's intrinsics and relative pose."""

    K0: FloatArray  # (3, 3), for a picture of size0, or for the picture as it is where that is None
    K1: FloatArray
    size0: Size | None
    size1: Size | None
    cam1_from_cam0: FloatArray  # (3, 4)

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
    for layout, reader in (("scannet", _scannet), ("megadepth", _megadepth), ("cameras.json", _cameras_json)):
        notes: list[str] = []
        pairs = dict(reader(root, notes))
        if pairs:
            missing = [p for pair in pairs for p in (pair.path0, pair.path1) if not p.is_file()]
            if len(missing) == 2 * len(pairs):
                raise DataError(f"{root} has an index but no pictures, such as {missing[0]}; put them there.")
            return PoseData(layout=layout, pairs=pairs, notes=tuple(notes))
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
                return {name.removesuffix(".npy"): _read_npy(archive.read(name)) for name in archive.namelist()}
        content = _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} can't be read ({error}); get the published file.") from error
    except (OSError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError, ImportError) as error:
        raise DataError(f"{path} is not an index, or broken ({error}); get the published file.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a dictionary; get the published file.")
    return content


class _Unpickler(pickle.Unpickler):
    """Reads pickles of numpy arrays in dictionaries and lists, and refuses everything else by its name."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _allowed().get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed here")
        return allowed


def _allowed() -> dict[tuple[str, str], Any]:
    # The functions that numpy's own pickles name, whose places differ between its versions.
    array: Any = np.zeros(1).__reduce__()
    array_from_5: Any = np.zeros(1).__reduce_ex__(5)  # how pickles of protocol 5 store it
    scalar: Any = np.float64(0).__reduce__()
    return {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): array[0],
        ("numpy.core.multiarray", "scalar"): scalar[0],
        ("numpy.core.numeric", "_frombuffer"): array_from_5[0],
        ("_codecs", "encode"): _latin1,
        ("builtins", "bytes"): _no_bytes,
        ("__builtin__", "bytes"): _no_bytes,
    }


def _no_bytes() -> bytes:
    """How old pickles store no bytes at all; with an argument it could be asked for terabytes."""
    return b""


def _latin1(text: str, encoding: str) -> bytes:
    """How old pickles store bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, which is not allowed here")
    return text.encode("latin1")


def _read_npy(data: bytes) -> Any:
    """One array of an .npz file; objects in it go through the same door as bare pickles."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header: Any = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        read_header = np.lib.format.read_array_header_2_0
    _, _, dtype = read_header(file)
    if dtype.hasobject:
        return _Unpickler(file, encoding="latin1").load()
    return np.load(io.BytesIO(data), allow_pickle=False)


def _indexes(root: Path, wanted: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Index files in a folder or one below that have a key."""
    for path in (*sorted(root.glob("*.npz")), *sorted(root.glob("*/*.npz"))):
        index = read_index(path)
        if wanted in index:
            yield path, index


def _megadepth(root: Path, notes: list[str]) -> Iterator[tuple[Pair, PoseTruth]]:
    """Each index file has pairs of numbers into its lists of pictures, intrinsics and poses (cam_from_world)."""
    for path, index in _indexes(root, "pair_infos"):
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
            except (IndexError, TypeError, ValueError, DataError) as error:
                notes.append(f"{path.name}, pair {number0} {number1} is not scored: {error}.")
                continue
            pair = Pair(name0=name0, name1=name1, path0=root / name0, path1=root / name1, group=path.stem)
            yield pair, PoseTruth(K0=K0, K1=K1, size0=None, size1=None, cam1_from_cam0=pose)


def _picture_name(entry: Any) -> str:
    if not isinstance(entry, str):
        raise ValueError("it has no picture")
    return entry


def _scannet(root: Path, notes: list[str]) -> Iterator[tuple[Pair, PoseTruth]]:
    """test.npz has rows (scene, sub-scene, frame 0, frame 1) and poses, intrinsics.npz a matrix by scene."""
    for path, index in _indexes(root, "name"):
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
            except (KeyError, OSError, ValueError, DataError, np.linalg.LinAlgError) as error:
                notes.append(f"{names[0]} {names[1]} is not scored: no intrinsics or pose ({error}).")
                continue
            pair = Pair(
                name0=names[0], name1=names[1], path0=folder / names[0], path1=folder / names[1], group=path.stem
            )
            yield pair, PoseTruth(K0=K, K1=K, size0=_SCANNET_SIZE, size1=_SCANNET_SIZE, cam1_from_cam0=pose)


def _relative_from_files(folder: Path, frame0: int, frame1: int) -> FloatArray:
    """ScanNet's pose files hold world_from_cam (4, 4)."""
    cams = [np.linalg.inv(np.loadtxt(folder / f"{frame}.txt").reshape(4, 4)) for frame in (frame0, frame1)]
    return cam1_from_cam0(cams[0], cams[1])


def _cameras_json(root: Path, notes: list[str]) -> Iterator[tuple[Pair, PoseTruth]]:
    """Every pair of pictures of a scene, or those that its pairs.txt names, two a line."""
    for path in (*sorted(root.glob("cameras.json")), *sorted(root.glob("*/cameras.json"))):
        folder, cameras = path.parent, read_cameras_json(path)
        names = sorted(name for name, camera in cameras.items() if camera.cam_from_world is not None)
        if unposed := sorted(cameras.keys() - set(names)):
            notes.append(f"{path}: {len(unposed)} pictures without cam_from_world are not used, such as {unposed[0]}.")
        chosen = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        if (folder / "pairs.txt").is_file():
            chosen = _read_pairs(folder / "pairs.txt", set(names))
        for name0, name1 in chosen:
            yield _posed_pair(folder, cameras, name0, name1)


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
    width, height = stated or size
    camera = Camera(width=width, height=height, K=K, source="data set")
    return camera if camera.size == size else camera.resized(size)
