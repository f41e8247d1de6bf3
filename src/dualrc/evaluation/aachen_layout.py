"""Aachen Day-Night as it is published, v1.0 and v1.1: the reference model, the queries and the pairs to match."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.colmap import from_colmap_pixels, import_pycolmap, stored_points
from dualrc.colmap.records import read_cameras_bin, read_images_bin
from dualrc.errors import DataError
from dualrc.evaluation.export import Pair
from dualrc.evaluation.hpatches import looks_like_hpatches
from dualrc.geometry import Camera, rotation_from_quaternion
from dualrc.image import read_header
from dualrc.types import FloatArray

_MODEL_1_1 = "3D-models/aachen_v_1_1"
_MODELS_1_0 = ("3D-models", "3D-models/aachen_v_1")
_NVM_1_0, _NVM_1_1 = "aachen_cvpr2018_db.nvm", "aachen_v_1_1.nvm"
_INTRINSICS_1_0, _INTRINSICS_1_1 = "database_intrinsics.txt", "database_intrinsics_v1_1.txt"
_IMAGES = ("images/images_upright", "images_upright")
_QUERIES = {condition: f"queries/{condition}_time_queries_with_intrinsics.txt" for condition in ("day", "night")}
_PAIRS = {"v1.0": "image_pairs_to_match.txt", "v1.1": "image_pairs_to_match_v1_1.txt"}
# More lists of pairs, such as candidates for the day-time queries, which the published ones lack.
_MORE_PAIRS = "pairs*.txt"
_WHERE_PAIRS = "the local features part of the benchmark's code has it"


@dataclass(frozen=True, kw_only=True, eq=False)
class Lens:
    """The camera of a picture as it is stored, and the pinhole that it is when its distortion is undone."""

    camera: Camera  # the pinhole, with the pose where that is known
    distorted: Any  # pycolmap's Camera, but in our pixels

    @staticmethod
    def of(model: str, width: int, height: int, params: list[float]) -> "Lens":
        """The lens of COLMAP's camera."""
        pycolmap = import_pycolmap()
        try:
            made = pycolmap.Camera(model=model, width=width, height=height, params=params)
        except (ValueError, RuntimeError, KeyError) as error:
            raise DataError(f"{model} with {len(params)} parameters is not a camera of COLMAP's; mend it.") from error
        if not made.verify_params() or not np.isfinite(params).all():
            raise DataError(f"{model} has not {len(params)} numbers as parameters; mend the line.")
        K = from_colmap_pixels(made.calibration_matrix())
        made.principal_point_x, made.principal_point_y = K[0, 2], K[1, 2]
        return Lens(camera=Camera(width=width, height=height, K=K, source="file"), distorted=made)

    @staticmethod
    def pinhole(camera: Camera) -> "Lens":
        """A lens without distortion."""
        K = camera.K
        params = [K[0, 0], K[1, 1], K[0, 2], K[1, 2]]
        made = import_pycolmap().Camera(model="PINHOLE", width=camera.width, height=camera.height, params=params)
        return Lens(camera=camera, distorted=made)

    def undistorted(self, points: FloatArray, path: Path) -> FloatArray:
        """Upright points (n, 2) of the picture file as the pinhole sees them; NaN where the lens sees nothing."""
        stored = stored_points(points, path)
        rays = np.asarray(self.distorted.cam_from_img(stored), dtype=np.float64).reshape(-1, 2)
        return rays @ self.camera.K[:2, :2].T + self.camera.K[:2, 2]


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """A picture to be localized."""

    condition: str  # day or night
    path: Path
    lens: Lens | None  # None where there is none, and then `reason` says why
    reason: str | None = None  # why it can't be localized, whatever the matches
    candidates: tuple[str, ...] = ()  # pictures of the database to match it with


@dataclass(frozen=True, kw_only=True, eq=False)
class AachenData:
    """A database of pictures with poses, queries, and which pictures are matched."""

    version: str
    database: dict[str, Lens]
    queries: dict[str, Query]  # those of a condition that has candidates
    pairs: list[Pair]
    notes: list[str]


def read_aachen(root: Path) -> AachenData:
    """Find and check the data set; what is wrong with single pictures stands in the notes."""
    if not root.is_dir():
        raise DataError(f"The folder {root} does not exist; check the path.")
    notes: list[str] = []
    version, database = _read_database(root, notes)
    folders = [root / folder for folder in _IMAGES if (root / folder).is_dir()]
    if not folders:
        raise DataError(f"{root} has no pictures in {_IMAGES[0]}; unpack them there.")
    queries = _read_queries(root, folders, notes)
    names = _read_pairs(root, version)
    _add_unlisted(queries, names, folders)
    paths = {name: _find(name, folders) for name in (*database, *queries)}
    if not any(path.is_file() for path in paths.values()):
        raise DataError(f"{folders[0]} has none of the pictures, such as {next(iter(paths))}; unpack them there.")
    usable = _without_misfits(database, paths, notes)
    for name, query in queries.items():
        if query.lens is not None and (wrong := _misfit(query.lens, query.path)) is not None:
            queries[name] = replace(query, reason=wrong)
    candidates, pairs = _pairs(names, usable, queries, paths, notes)
    for name, query in queries.items():
        found = tuple(candidates.get(name, ()))
        alone = None if found else "No pair of the lists has it with a picture of the database; add candidates."
        queries[name] = replace(query, candidates=found, reason=query.reason or alone)
    return AachenData(
        version=version, database=usable, queries=_with_candidates(queries, version, notes), pairs=pairs, notes=notes
    )


def _read_database(root: Path, notes: list[str]) -> tuple[str, dict[str, Lens]]:
    """The newest version that is there, with the lenses and poses of its reference model."""
    folder = root / _MODEL_1_1
    old = [root / model for model in _MODELS_1_0 if (root / model / _NVM_1_0).is_file()]
    if (folder / "images.bin").is_file() or (folder / _NVM_1_1).is_file():
        if old:
            notes.append(f"v1.1 is used; to use v1.0, move {_MODEL_1_1} away.")
        if (folder / "images.bin").is_file():
            return "v1.1", dict(_read_model(folder))
        return "v1.1", _read_nvm(folder / _NVM_1_1, _first(folder / _INTRINSICS_1_1), notes)
    if old:
        beside = (old[0] / _INTRINSICS_1_0, root / "3D-models" / _INTRINSICS_1_0, root / _INTRINSICS_1_0)
        return "v1.0", _read_nvm(old[0] / _NVM_1_0, _first(*beside), notes)
    other = _other_benchmark(root)
    hint = f"it looks like {other}; run `dualrc evaluate {other}` on it" if other else "give another folder"
    raise DataError(f"{root} is not Aachen Day-Night: no 3D-models/{_NVM_1_0} and no {_MODEL_1_1}/images.bin; {hint}.")


def _other_benchmark(root: Path) -> str | None:
    """Which benchmark a folder is of, as far as that is plain to see."""
    if looks_like_hpatches(root):
        return "hpatches"
    if any(root.glob("cameras.json")) or any(root.glob("*/cameras.json")):
        return "pose"
    inloc = ("cutouts", "cutouts_imageonly", "database/cutouts", "iphone7", "query/iphone7")
    return "inloc" if any((root / folder).is_dir() for folder in inloc) else None


def _first(*paths: Path) -> Path:
    """The first file that is there."""
    for path in paths:
        if path.is_file():
            return path
    raise DataError(f"{paths[0]} does not exist; get the published file.")


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a text file that are not empty, with their numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read ({error}); get the published file.") from error
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _read_intrinsics(path: Path) -> Iterator[tuple[str, Lens | str]]:
    """Names with their lenses, or with what is wrong with the line: NAME MODEL WIDTH HEIGHT PARAMS."""
    for number, line in _lines(path):
        if line.startswith("#"):
            continue
        name, *fields = line.split()
        try:
            yield name, Lens.of(fields[0], int(fields[1]), int(fields[2]), [float(value) for value in fields[3:]])
        except (ValueError, IndexError):
            yield name, f"{path}, line {number}: not a camera; write NAME MODEL WIDTH HEIGHT PARAMS."
        except DataError as error:
            yield name, f"{path}, line {number}: {error}"


def _read_nvm(path: Path, intrinsics: Path, notes: list[str]) -> dict[str, Lens]:
    """VisualSFM's model: after a header and a count, NAME FOCAL QW QX QY QZ CX CY CZ DISTORTION 0, a line a picture."""
    lenses, database = dict(_read_intrinsics(intrinsics)), {}
    lines = [(number, line) for number, line in _lines(path) if not line.startswith("NVM_V3")]
    try:
        count = int(lines[0][1])
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} has no number of pictures after its header; get the published file.") from error
    if len(lines) < count + 1:
        raise DataError(f"{path} is cut off: it has fewer than its {count} pictures; get it again.")
    for number, line in lines[1 : count + 1]:
        name, *fields = line.rsplit(maxsplit=10)
        try:
            values = [float(value) for value in fields[1:8]]
            R = rotation_from_quaternion(values[:4])
            pose = np.column_stack([R, -R @ np.array(values[4:7])])  # the file has the camera's place
        except (ValueError, IndexError) as error:
            raise DataError(f"{path}, line {number}: not a picture with its pose; get the published file.") from error
        lens = lenses.get(name, f"{intrinsics} has no camera for it.")
        if isinstance(lens, str):
            notes.append(f"The database picture {name} is not used: {lens}")
        else:
            database[name] = replace(lens, camera=replace(lens.camera, cam_from_world=pose))
    return database


def _read_model(folder: Path) -> Iterator[tuple[str, Lens]]:
    """Names and lenses with poses from COLMAP's cameras.bin and images.bin, without the points, which are many."""
    try:
        cameras = read_cameras_bin(_first(folder / "cameras.bin"))
        lenses = {number: Lens.of(c.model, c.width, c.height, list(c.params)) for number, c in cameras.items()}
        for image in read_images_bin(folder / "images.bin"):
            lens = lenses[image.camera_id]
            yield image.name, replace(lens, camera=replace(lens.camera, cam_from_world=image.cam_from_world))
    except (DataError, KeyError) as error:
        raise DataError(f"{folder} holds no COLMAP model, or a broken one ({error}); get it again.") from error


def _read_queries(root: Path, folders: list[Path], notes: list[str]) -> dict[str, Query]:
    queries: dict[str, Query] = {}
    for condition, file in _QUERIES.items():
        if not (root / file).is_file():
            continue
        for name, lens in _read_intrinsics(root / file):
            wrong = lens if isinstance(lens, str) else None
            found = None if isinstance(lens, str) else lens
            queries[name] = Query(condition=condition, path=_find(name, folders), lens=found, reason=wrong)
    if not queries:
        raise DataError(f"{root} has no queries: neither {' nor '.join(_QUERIES.values())}; get the published files.")
    by_file_name = Counter(Path(name).name for name in queries)
    for name in [name for name in queries if by_file_name[Path(name).name] > 1]:
        notes.append(f"Several queries are called {Path(name).name}, and the benchmark takes no folders.")
    return queries


def _read_pairs(root: Path, version: str) -> list[tuple[str, str]]:
    """The lines of all lists of pairs."""
    more = [*sorted(root.glob(_MORE_PAIRS)), *sorted(root.glob(f"pairs/{_MORE_PAIRS}"))]
    files = [path for path in (root / _PAIRS[version], *more) if path.is_file()]
    if not files:
        raise DataError(f"{root / _PAIRS[version]}, the list of pairs, does not exist; {_WHERE_PAIRS}.")
    pairs = []
    for path in files:
        for number, line in _lines(path):
            words = line.split()
            if len(words) != 2:
                raise DataError(f"{path}, line {number}: {line!r} is not two pictures; write NAME0 NAME1.")
            pairs.append((words[0], words[1]))
    return pairs


def _add_unlisted(queries: dict[str, Query], pairs: list[tuple[str, str]], folders: list[Path]) -> None:
    """Queries that are in the pairs but have no intrinsics: they can't be localized, and that counts."""
    for name in dict.fromkeys(name for pair in pairs for name in pair if name.startswith("query/")):
        if name not in queries:
            condition = name.split("/")[1] if name.split("/")[1] in _QUERIES else "night"
            reason = f"It has no intrinsics in {_QUERIES[condition]}; add its line."
            queries[name] = Query(condition=condition, path=_find(name, folders), lens=None, reason=reason)


def _find(name: str, folders: list[Path]) -> Path:
    """A picture's file; v1.1 may be unpacked beside v1.0's pictures."""
    return next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)


def _misfit(lens: Lens, path: Path) -> str | None:
    """What is wrong with a lens for a picture; one that can't be read is left to the matcher to report."""
    header, camera = read_header(path), lens.camera
    if header is None or header.stored_size == camera.size:
        return None
    there, here = f"{camera.width}x{camera.height}", "{}x{}".format(*header.stored_size)
    return f"The intrinsics are for {there} pixels and {path} has {here}; get the published files."


def _without_misfits(database: Mapping[str, Lens], paths: Mapping[str, Path], notes: list[str]) -> dict[str, Lens]:
    usable = {}
    for name, lens in database.items():
        if (wrong := _misfit(lens, paths[name])) is None:
            usable[name] = lens
        else:
            notes.append(f"The database picture {name} is not used: {wrong}")
    return usable


def _pairs(
    names: list[tuple[str, str]],
    database: Mapping[str, Lens],
    queries: Mapping[str, Query],
    paths: Mapping[str, Path],
    notes: list[str],
) -> tuple[dict[str, list[str]], list[Pair]]:
    """The candidates of each query, and every pair to match once; lists have many pairs both ways round."""
    candidates: dict[str, list[str]] = {}
    pairs, strange = [], []
    for pair in dict.fromkeys((min(pair), max(pair)) for pair in names):
        asked = [name for name in pair if name in queries]
        if any(name not in database and name not in queries for name in pair) or len(asked) == 2 or pair[0] == pair[1]:
            strange.append(pair)
            continue
        name0, name1 = (asked[0], pair[pair[0] == asked[0]]) if asked else pair
        if asked:
            candidates.setdefault(name0, []).append(name1)
            if queries[name0].reason is not None:
                continue  # it would be matched in vain
        group = queries[name0].condition if asked else "database"
        pairs.append(Pair(name0=name0, name1=name1, path0=paths[name0], path1=paths[name1], group=group))
    if strange:
        example = " ".join(strange[0])
        notes.append(f"{len(strange)} pairs of the lists have no two usable pictures with poses, such as {example}.")
    if not candidates:
        raise DataError("The lists of pairs have no candidates for any query; give those of this version.")
    return candidates, sorted(pairs, key=lambda pair: (pair.group, pair.name0))


def _with_candidates(queries: Mapping[str, Query], version: str, notes: list[str]) -> dict[str, Query]:
    """The queries of those conditions for which there are candidates at all; the others are not evaluated."""
    kept: dict[str, Query] = {}
    for condition in _QUERIES:
        group = {name: query for name, query in queries.items() if query.condition == condition}
        if any(query.candidates for query in group.values()):
            kept |= group
        elif group:
            notes.append(
                f"The {len(group)} {condition}-time queries are not evaluated: {_PAIRS[version]} has no candidates for "
                f"them; add a list of them ({_MORE_PAIRS})."
            )
    return kept
