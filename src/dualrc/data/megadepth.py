"""MegaDepth by the recipe of the paper, from D2-Net's scene_info files and the undistorted depth maps."""

import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from dualrc.colmap import from_colmap_pixels
from dualrc.config import check_bounds
from dualrc.data.arrays import read_arrays, read_dataset
from dualrc.data.depth import DepthView, correspond_by_depth
from dualrc.data.pairs import LazyPair, PairSample
from dualrc.data.pairsfile import TooFewPointsError, line_of, write_pairs
from dualrc.data.views import CutConfig
from dualrc.errors import ConfigError, DataError
from dualrc.extras import require
from dualrc.files import inside, make_folder, read_text, replacing, write_text
from dualrc.geometry import Camera
from dualrc.machine import end_with_parent
from dualrc.toml import to_toml

Split = Literal["training", "validation"]
_ARRAYS = ("image_paths", "depth_paths", "intrinsics", "poses", "overlap_matrix")


@dataclass(frozen=True, kw_only=True)
class MegaDepthRecipe:
    """Selection of pairs of MegaDepth; the defaults are those of the paper."""

    # Share of the sparse points of image 0 that image 1 observes; pairs must exceed it.
    min_overlap: float = 0.5
    # Scenes with more valid pairs are for training, the others for validation.
    scene_pairs: int = 500
    # Number of pairs of a training scene; validation scenes use all pairs.
    pairs_per_scene: int = 110
    # Number of correspondences per pair in the pairs files.
    points: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_bounds(self, "min_overlap", at_least=0, below=1)
        check_bounds(self, "pairs_per_scene", "points", at_least=1)


@dataclass(frozen=True, kw_only=True)
class MegaDepthConfig(CutConfig):
    """Pairs directly from MegaDepth, with new correspondences every time; needs no pairs file."""

    # Folder of MegaDepth with `scene_info/`, images and depth maps.
    root: str
    # Scenes to use: those of the training or of the validation pairs of the paper's recipe.
    split: Split = "training"
    # Seed of the selection of pairs.
    seed: int = 0
    # Selects this source.
    kind: Literal["megadepth"] = "megadepth"


class MegaDepthScene:
    """A scene and its valid pairs, in an order that depends only on the seed and on the name of the scene."""

    def __init__(self, root: str | Path, path: Path, recipe: MegaDepthRecipe) -> None:
        self.root, self.path, self.name = Path(root), path, path.stem
        info = read_arrays(path, _ARRAYS)
        *entries, overlap = (info[name] for name in _ARRAYS)
        self._images, self._depths, self._intrinsics, self._poses = entries
        count = len(self._images)
        if any(len(values) != count for values in entries) or np.shape(overlap) != (count, count):
            raise DataError(f"{path} has lists of different lengths; download the published file again.")
        whole = np.array([all(x is not None for x in row) for row in zip(*entries, strict=True)])
        valid = (np.asarray(overlap) > recipe.min_overlap) & whole[:, None] & whole & ~np.eye(count, dtype=bool)
        pairs = np.argwhere(valid)
        rng = np.random.default_rng([recipe.seed, zlib.crc32(self.name.encode())])
        # Directed, as in the published matrix: (i, j) and (j, i) are different pairs.
        self.pairs: list[tuple[int, int]] = [(int(i), int(j)) for i, j in rng.permutation(pairs)]
        self.split: Split = "training" if len(pairs) > recipe.scene_pairs else "validation"
        self._seed = recipe.seed

    def pair_name(self, pair: tuple[int, int]) -> str:
        """Return the names of both images."""
        return f"{self._images[pair[0]]} {self._images[pair[1]]}"

    def load(self, pair: tuple[int, int]) -> PairSample:
        """Load a pair and find its correspondences."""
        seed = [self._seed, zlib.crc32(self.name.encode()), *pair]
        return correspond_by_depth(self._view(pair[0]), self._view(pair[1]), seed)

    def _view(self, number: int) -> DepthView:
        depth = read_depth_h5(inside(self.root, str(self._depths[number])))
        height, width = depth.shape
        try:
            K = from_colmap_pixels(np.asarray(self._intrinsics[number], dtype=np.float64))
            pose = np.asarray(self._poses[number], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.path}: image {number} has no camera ({error}); download the file again.") from error
        camera = Camera(width=width, height=height, K=K, source="file", cam_from_world=pose)
        return DepthView(image=inside(self.root, str(self._images[number])), depth=depth, camera=camera)


def megadepth_pairs(root: str | Path, split: Split, recipe: MegaDepthRecipe) -> tuple[list[LazyPair], dict[str, str]]:
    """Return the pairs of one split, and the reasons why scenes cannot be read, by name."""
    pairs, broken = [], {}
    for path in scene_files(root):
        try:
            scene = MegaDepthScene(root, path, recipe)
        except DataError as error:
            broken[path.stem] = str(error)
            continue
        if scene.split == split:
            limit = recipe.pairs_per_scene if split == "training" else None
            pairs += [
                LazyPair(name=scene.pair_name(pair), load=partial(scene.load, pair)) for pair in scene.pairs[:limit]
            ]
    if not pairs:
        reason = next(iter(broken.values()), "")
        raise DataError(f"{root} has no pairs for {split}; download more scenes. {reason}".strip())
    return pairs, broken


def scene_files(root: str | Path) -> list[Path]:
    """Return the scene_info files of a MegaDepth folder."""
    folder = Path(root) / "scene_info"
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; copy the scene_info files of D2-Net's preprocessing there.")
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise DataError(f"{folder} has no .npz file; copy the scene_info files of D2-Net's preprocessing there.")
    return files


def read_depth_h5(path: Path) -> npt.NDArray[np.float32]:
    """Read the depth map (h, w) of an HDF5 file, 0 where there is none; at most 1 GiB, without external data."""
    h5py = require("h5py", "colmap", "MegaDepth's depth maps")
    try:
        with h5py.File(path, "r") as file:
            depth = read_dataset(file, "depth").astype(np.float32)
    except FileNotFoundError as error:
        raise DataError(f"The depth map {path} does not exist; download it again.") from error
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise DataError(f"The depth map {path} is damaged ({error}); download it again.") from error
    if depth.ndim != 2 or 0 in depth.shape:
        raise DataError(f"{path} has an array of shape {depth.shape} instead of a depth map; download it again.")
    # In some of these files, negative values mark order instead of depth.
    return np.where(np.isfinite(depth) & (depth > 0), depth, np.float32(0))


@dataclass(frozen=True, kw_only=True)
class SceneResult:
    """Contribution of a scene to the pairs files."""

    name: str
    split: Split | None = None
    pairs: int = 0
    # Files that could not be read.
    broken: tuple[str, ...] = ()
    # File with the lines of the scene.
    part: Path | None = None


def write_scenes(
    root: str | Path, out: str | Path, recipe: MegaDepthRecipe, *, workers: int = 1
) -> Iterator[SceneResult]:
    """Write the lines of each scene to a file in `out`/scenes; complete files from earlier runs are kept."""
    files, parts = scene_files(root), Path(out) / "scenes"
    note, text = parts / "recipe.toml", to_toml(recipe)
    make_folder(parts)
    if note.exists() and read_text(note) != text:
        raise ConfigError(f"{parts} has pairs of another recipe; choose another folder, or delete it.")
    write_text(note, text)
    write = partial(_write_scene, Path(root), parts, recipe)
    if workers == 1:
        yield from map(write, files)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent) as pool:
        yield from pool.map(write, files)


def join_scenes(out: str | Path, results: Iterable[SceneResult]) -> dict[Split, int]:
    """Join the scenes to training_pairs.txt and validation_pairs.txt, and return their numbers of pairs."""
    parts, counts = list(results), {}
    for split in get_args(Split):
        chosen = [result for result in parts if result.split == split and result.part is not None]
        with replacing(Path(out) / f"{split}_pairs.txt") as temporary, temporary.open("wb") as file:
            for result in chosen:
                assert result.part is not None
                file.write(result.part.read_bytes())
        counts[split] = sum(result.pairs for result in chosen)
    return counts


def _write_scene(root: Path, parts: Path, recipe: MegaDepthRecipe, path: Path) -> SceneResult:
    for split in get_args(Split):
        part = parts / f"{path.stem}-{split}.txt"
        if part.is_file():
            with part.open("rb") as file:
                return SceneResult(name=path.stem, split=split, pairs=sum(1 for _ in file), part=part)
    try:
        scene = MegaDepthScene(root, path, recipe)
    except DataError as error:
        return SceneResult(name=path.stem, broken=(str(error),))
    wanted = recipe.pairs_per_scene if scene.split == "training" else len(scene.pairs)
    lines, broken = list[str](), dict[str, None]()
    for pair in scene.pairs:
        if len(lines) == wanted:
            break
        try:
            lines.append(line_of(scene.load(pair), root, points=recipe.points, seed=[recipe.seed, *pair]))
        except TooFewPointsError:
            # Another pair replaces one whose depth maps agree on too few points.
            continue
        except DataError as error:
            broken[str(error)] = None
    # A scene with missing files is repeated in the next run, when they may exist.
    part = parts / f"{scene.name}-{scene.split}.{'partial' if broken else 'txt'}"
    write_pairs(part, lines)
    return SceneResult(name=scene.name, split=scene.split, pairs=len(lines), broken=tuple(broken), part=part)
