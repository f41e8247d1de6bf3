"""Datasets for two-view pose: MegaDepth-1500 and ScanNet-1500 as published with LoFTR, and cameras.json folders."""

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.data.arrays import MOST_BYTES, ArrayUnpickler, read_array
from dualrc.errors import DataError
from dualrc.evaluation.data_files import as_pose, check_folder, read_name_pairs, reading
from dualrc.evaluation.export import Pair
from dualrc.files import inside, limit_zip
from dualrc.geometry import PINHOLE, Camera, Lens, cam1_from_cam0, read_cameras_json
from dualrc.image import read_header
from dualrc.types import FloatArray, Size

# Image size to which the intrinsics of ScanNet-1500 apply.
_SCANNET_SIZE = (640, 480)
# Keys of the indexes of MegaDepth-1500 and of ScanNet-1500.
_INDEX_KEYS = ("pair_infos", "name")
# ScanNet's original images of 1296 x 968 are stretched by 0.4 % to 640 x 480.
_MAX_STRETCH = 0.02
# Loose, because indexes store rotations as float32 or text.
_ROTATION_TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True, eq=False)
class PoseTruth:
    """Intrinsics and relative pose of a pair."""

    # (3, 3), for images of these sizes; None means the actual sizes.
    K: tuple[FloatArray, FloatArray]
    sizes: tuple[Size, Size] | None = None
    lenses: tuple[Lens, Lens] = (PINHOLE, PINHOLE)
    # (3, 4).
    cam1_from_cam0: FloatArray

    def __post_init__(self) -> None:
        pose = as_pose(self.cam1_from_cam0, tolerance=_ROTATION_TOLERANCE)
        if not pose[:, 3].any():
            raise ValueError("the relative pose has no translation, so its direction cannot be scored")

    def cameras(self, size0: Size, size1: Size) -> tuple[Camera, Camera]:
        """Return the cameras of the two images at their actual sizes."""
        actual = (size0, size1)
        one, other = map(_camera, self.K, self.lenses, self.sizes or actual, actual)
        return one, other


Index = dict[str, Any]


class PoseData:
    """The usable pairs of a dataset; notes list the others."""

    def __init__(self, layout: str, notes: list[str]) -> None:
        self.layout, self.notes = layout, notes
        self.pairs: dict[Pair, PoseTruth] = {}
        self._size = cache(_upright_size)

    @contextmanager
    def entry(self, name: str) -> Iterator[None]:
        """Note any error that makes an entry of an index unusable."""
        try:
            yield
        except (OSError, IndexError, TypeError, ValueError, DataError) as error:
            self.notes.append(f"{name} is not scored: {str(error).rstrip('.')}.")

    def add(self, folder: Path, names: Sequence[str], group: str, truth: PoseTruth, *, prefix: str = "") -> None:
        """Add a pair of images in a folder if its cameras fit them; `prefix` makes their names unique."""
        (name0, name1), (path0, path1) = names, (inside(folder, name) for name in names)
        # The matcher reports images that cannot be read.
        stated = truth.sizes or ((1, 1), (1, 1))
        truth.cameras(self._size(path0) or stated[0], self._size(path1) or stated[1])
        pair = Pair(name0=prefix + name0, name1=prefix + name1, path0=path0, path1=path1, group=group)
        self.pairs[pair] = truth


def _upright_size(path: Path) -> Size | None:
    header = read_header(path)
    return None if header is None else header.upright_size


def read_pose_data(root: Path) -> PoseData:
    """Recognize a dataset by its index files, and read it."""
    check_folder(root)
    notes: list[str] = []
    indexes = _read_indexes(root, notes)
    for layout, read in (("scannet", _read_scannet), ("megadepth", _read_megadepth), ("cameras.json", _read_cameras)):
        data = PoseData(layout, notes)
        read(root, indexes, data)
        paths = [path for pair in data.pairs for path in (pair.path0, pair.path1)]
        if paths and not any(path.is_file() for path in paths):
            raise DataError(f"{root} has an index but no images, such as {paths[0]}; copy them there.")
        if paths:
            return data
    if notes:
        raise DataError(f"{root} has no pair that can be scored. {notes[0]}")
    raise DataError(
        f"{root} is not a dataset for poses: neither it nor its folders have an index of MegaDepth-1500 or "
        "ScanNet-1500 (*.npz) or a cameras.json; pass another folder."
    )


def read_index(path: Path) -> Index:
    """Read the dictionary in an .npz file or bare pickle; only arrays and plain values are unpickled."""
    with reading(path, "an index"):
        if path.stat().st_size > MOST_BYTES:
            raise ValueError("it is too large")
        data = path.read_bytes()
        if zipfile.is_zipfile(io.BytesIO(data)):
            limit_zip(io.BytesIO(data), MOST_BYTES)
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                names = archive.namelist()
                return {name.removesuffix(".npy"): read_array(io.BytesIO(archive.read(name))) for name in names}
        content = ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
    if not isinstance(content, dict):
        raise DataError(f"{path} does not contain a dictionary; download the published file.")
    return content


def _read_indexes(root: Path, notes: list[str]) -> dict[Path, Index]:
    """Read the index files in a folder or its subfolders."""
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


def _read_megadepth(root: Path, indexes: Mapping[Path, Index], data: PoseData) -> None:
    """Read index files with pairs of indices into lists of images, intrinsics and poses (cam_from_world)."""
    for path, index in indexes.items():
        if "pair_infos" not in index:
            continue
        try:
            images, intrinsics, poses = (index[key] for key in ("image_paths", "intrinsics", "poses"))
            numbers = [tuple(int(number) for number in info[0]) for info in index["pair_infos"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{path} is not an index of MegaDepth-1500 ({error}); download it again.") from error
        for both in numbers:
            with data.entry(f"{path.name}, pair {both[0]} {both[1]}"):
                names = [images[number] for number in both]
                if not all(isinstance(name, str) for name in names):
                    raise ValueError("it has no image")
                # K as published, like other evaluations use it; its half-pixel offset turns rays by at most 0.03
                # degrees.
                K0, K1 = (np.array(intrinsics[number], dtype=np.float64).reshape(3, 3) for number in both)
                pose = cam1_from_cam0(*(np.array(poses[number], dtype=np.float64) for number in both))
                data.add(root, names, path.stem, PoseTruth(K=(K0, K1), cam1_from_cam0=pose))


def _read_scannet(root: Path, indexes: Mapping[Path, Index], data: PoseData) -> None:
    """Read test.npz, with rows (scene, sub-scene, frame 0, frame 1) and poses, and intrinsics.npz, K by scene."""
    for path, index in indexes.items():
        if "name" not in index:
            continue
        if not (path.parent / "intrinsics.npz").is_file():
            raise DataError(f"{path.parent} has {path.name} but no intrinsics.npz; download the published file.")
        intrinsics = read_index(path.parent / "intrinsics.npz")
        rows = np.asarray(index["name"])
        poses = np.asarray(index["rel_pose"]) if "rel_pose" in index else None
        if rows.ndim != 2 or rows.shape[1] != 4 or (poses is not None and poses.shape != (len(rows), 12)):
            shapes = f"name {rows.shape}, rel_pose {poses.shape if poses is not None else 'none'}"
            raise DataError(f"{path} is not the index of ScanNet-1500 ({shapes}); name has 4 columns, rel_pose 12.")
        for number, (major, minor, *frames) in enumerate(rows.tolist()):
            scene = f"scene{major:04d}_{minor:02d}"
            folder = next((f for f in (root, path.parent, *sorted(root.iterdir())) if (f / scene).is_dir()), root)
            names = [f"{scene}/color/{frame}.jpg" for frame in frames]
            with data.entry(" ".join(names)):
                if scene not in intrinsics:
                    raise ValueError(f"intrinsics.npz has no {scene}")
                K = np.array(intrinsics[scene], dtype=np.float64).reshape(3, 3)
                # The files store world_from_cam (4, 4).
                if poses is None:
                    files = [folder / scene / "pose" / f"{frame}.txt" for frame in frames]
                    pose = cam1_from_cam0(*(np.linalg.inv(np.loadtxt(file).reshape(4, 4)) for file in files))
                else:
                    pose = np.asarray(poses[number], dtype=np.float64).reshape(3, 4)
                truth = PoseTruth(K=(K, K), sizes=(_SCANNET_SIZE, _SCANNET_SIZE), cam1_from_cam0=pose)
                data.add(folder, names, path.stem, truth)


def _read_cameras(root: Path, _: Mapping[Path, Index], data: PoseData) -> None:
    """Read every pair of images of a scene, or the pairs of its pairs.txt, two names per line."""
    for path in (*sorted(root.glob("cameras.json")), *sorted(root.glob("*/cameras.json"))):
        folder, scene = path.parent / "images", path.parent.name
        cameras: dict[str, Camera] = {}
        # An error in one scene must not affect the others.
        with data.entry(scene):
            cameras = read_cameras_json(path)
        poses = {name: camera.cam_from_world for name, camera in sorted(cameras.items())}
        posed = [name for name, pose in poses.items() if pose is not None]
        if unposed := [name for name, pose in poses.items() if pose is None]:
            words = f"{len(unposed)} images without cam_from_world are not used, such as {unposed[0]}"
            data.notes.append(f"{path}: {words}.")
        chosen = list(combinations(posed, 2))
        if (path.parent / "pairs.txt").is_file():
            chosen = read_name_pairs(path.parent / "pairs.txt", posed, what="two images with poses")
        for names in chosen:
            with data.entry(" ".join(f"{scene}/{name}" for name in names)):
                camera0, camera1 = (cameras[name] for name in names)
                truth = PoseTruth(
                    K=(camera0.K, camera1.K),
                    sizes=(camera0.size, camera1.size),
                    lenses=(camera0.lens, camera1.lens),
                    cam1_from_cam0=cam1_from_cam0(*(poses[name] for name in names)),  # type: ignore[arg-type]
                )
                data.add(folder, names, scene, truth, prefix=f"{scene}/")


def _camera(K: FloatArray, lens: Lens, stated: Size, size: Size) -> Camera:
    """Return the camera at the actual size of an image, which must be a resized version of the stated size."""
    width, height = stated
    camera = Camera(width=width, height=height, K=K, lens=lens, source="data set")
    if camera.size == size:
        return camera
    stretch = (size[0] / width) / (size[1] / height)
    if not abs(np.log(stretch)) <= np.log1p(_MAX_STRETCH):
        there, here = f"{width}x{height}", f"{size[0]}x{size[1]}"
        raise DataError(f"K is for an image of {there}, but the aspect ratio of {here} differs; use its own K.")
    return camera.resized(size)
