"""Files of Aachen Day-Night as published, v1.0 and v1.1: the reference model, the queries and the pairs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dualrc.colmap.cameras import camera_of
from dualrc.colmap.records import read_cameras_bin, read_images_bin
from dualrc.errors import DataError
from dualrc.evaluation.benchmark import folder_hint
from dualrc.evaluation.data_files import check_folder, read_name_pairs
from dualrc.evaluation.export import Pair
from dualrc.files import inside, read_lines
from dualrc.geometry import Camera, rotation_from_quaternion
from dualrc.image import read_header

_MODEL_1_1 = "3D-models/aachen_v_1_1"
_MODELS_1_0 = ("3D-models", "3D-models/aachen_v_1")
_NVM_1_0, _NVM_1_1 = "aachen_cvpr2018_db.nvm", "aachen_v_1_1.nvm"
_INTRINSICS_1_0, _INTRINSICS_1_1 = "database_intrinsics.txt", "database_intrinsics_v1_1.txt"
_IMAGES = ("images/images_upright", "images_upright", "database_and_query/images_upright")
_QUERIES = {condition: f"queries/{condition}_time_queries_with_intrinsics.txt" for condition in ("day", "night")}
_PAIRS = {"v1.0": "image_pairs_to_match.txt", "v1.1": "image_pairs_to_match_v1_1.txt"}
# Additional lists of pairs, for example candidates of the day queries, which the published lists lack.
_MORE_PAIRS = "pairs*.txt"


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """An image to localize."""

    # "day" or "night".
    condition: str
    # Camera of the stored image; None if there is none, with the reason in `reason`.
    camera: Camera | None = None
    # Reason why no matches can localize it.
    reason: str | None = None
    # Database images to match it with.
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class AachenData:
    """Database images with poses, queries, and the pairs to match."""

    version: str
    # Cameras with poses of the stored images, by name.
    database: dict[str, Camera]
    # Queries of the conditions that have candidates.
    queries: dict[str, Query]
    pairs: list[Pair]
    notes: list[str]


def read_aachen(root: Path) -> AachenData:
    """Find and check the dataset; notes list problems of single images."""
    check_folder(root)
    notes: list[str] = []
    version, database = _read_database(root, notes)
    folders = [root / folder for folder in _IMAGES if (root / folder).is_dir()]
    if not folders:
        raise DataError(f"{root} has no images in {_IMAGES[0]}; unpack them there.")
    listed = _read_pairs(root, version)
    queries = _read_queries(root, listed, notes)
    for name in (*database, *queries):
        inside(root, name)
    # v1.1 may be unpacked beside the images of v1.0.
    paths = {
        name: next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)
        for name in (*database, *queries)
    }
    if not any(path.is_file() for path in paths.values()):
        raise DataError(f"{folders[0]} has none of the images, such as {next(iter(paths))}; unpack them there.")
    for name, camera in list(database.items()):
        if wrong := _mismatch(camera, paths[name]):
            notes.append(f"The database image {name} is not used: {wrong}")
            del database[name]
    for name, query in queries.items():
        if query.camera is not None and (wrong := _mismatch(query.camera, paths[name])):
            queries[name] = replace(query, reason=wrong)
    data = AachenData(version=version, database=database, queries=queries, pairs=[], notes=notes)
    _add_candidates(data, listed, paths)
    return _with_candidates(data)


def _mismatch(camera: Camera, path: Path) -> str | None:
    """Return why a camera does not fit an image file; the matcher reports files that cannot be read."""
    header = read_header(path)
    if header is None or header.stored_size == camera.size:
        return None
    there, here = f"{camera.width}x{camera.height}", "{}x{}".format(*header.stored_size)
    return f"The intrinsics are for {there} pixels and {path} has {here}; use the published files."


def _read_database(root: Path, notes: list[str]) -> tuple[str, dict[str, Camera]]:
    """Return the newest version in the folder, and the cameras and poses of its reference model."""
    folder = root / _MODEL_1_1
    old = [root / model for model in _MODELS_1_0 if (root / model / _NVM_1_0).is_file()]
    if (folder / "images.bin").is_file() or (folder / _NVM_1_1).is_file():
        if old:
            notes.append(f"v1.1 is used; move {_MODEL_1_1} away to use v1.0.")
        if (folder / "images.bin").is_file():
            return "v1.1", dict(_read_model(folder))
        return "v1.1", _read_nvm(folder / _NVM_1_1, [folder / _INTRINSICS_1_1], notes)
    if old:
        intrinsics = [place / _INTRINSICS_1_0 for place in (old[0], root / "3D-models", root)]
        return "v1.0", _read_nvm(old[0] / _NVM_1_0, intrinsics, notes)
    missing = f"no 3D-models/{_NVM_1_0} and no {_MODEL_1_1}/images.bin"
    raise DataError(f"{root} is not Aachen Day-Night: {missing}; {folder_hint(root, 'aachen')}.")


def _read_intrinsics(path: Path) -> Iterator[tuple[str, Camera | str]]:
    """Yield names with their cameras, or with the error in the line: NAME MODEL WIDTH HEIGHT PARAMS."""
    for number, line in read_lines(path):
        name, *fields = line.split()
        try:
            params = [float(value) for value in fields[3:]]
            yield name, Camera.from_colmap(fields[0], (int(fields[1]), int(fields[2])), params, source="file")
        except (ValueError, IndexError):
            yield name, f"{path}, line {number}: not a camera; write NAME MODEL WIDTH HEIGHT PARAMS."
        except DataError as error:
            yield name, f"{path}, line {number}: {error}"


def _read_nvm(path: Path, intrinsics_paths: list[Path], notes: list[str]) -> dict[str, Camera]:
    """Read VisualSFM's model: a header, a count, and NAME FOCAL QW QX QY QZ CX CY CZ DISTORTION 0 per line."""
    intrinsics = next((file for file in intrinsics_paths if file.is_file()), None)
    if intrinsics is None:
        raise DataError(f"{intrinsics_paths[0]} does not exist; download the published file.")
    cameras, database = dict(_read_intrinsics(intrinsics)), {}
    lines = [(number, line) for number, line in read_lines(path) if not line.startswith("NVM_V3")]
    try:
        count = int(lines[0][1])
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} has no number of images after its header; download it again.") from error
    if len(lines) < count + 1:
        raise DataError(f"{path} is truncated: it has fewer than its {count} images; download it again.")
    for number, line in lines[1 : count + 1]:
        name, *fields = line.rsplit(maxsplit=10)
        try:
            values = [float(value) for value in fields[1:8]]
            R = rotation_from_quaternion(values[:4])
            # The file stores the camera position.
            pose = np.column_stack([R, -R @ np.array(values[4:7])])
        except (ValueError, IndexError) as error:
            raise DataError(f"{path}, line {number}: not an image with its pose; download the file again.") from error
        camera = cameras.get(name, f"{intrinsics} has no camera for it.")
        if isinstance(camera, str):
            notes.append(f"The database image {name} is not used: {camera}")
        else:
            database[name] = replace(camera, cam_from_world=pose)
    return database


def _read_model(folder: Path) -> Iterator[tuple[str, Camera]]:
    """Read names and cameras with poses from COLMAP's cameras.bin and images.bin, without the many points."""
    try:
        records = read_cameras_bin(folder / "cameras.bin")
        cameras = {number: camera_of(record, f"camera {number}") for number, record in records.items()}
        for image in read_images_bin(folder / "images.bin"):
            yield image.name, replace(cameras[image.camera_id], cam_from_world=image.cam_from_world)
    except (OSError, DataError, KeyError) as error:
        raise DataError(f"{folder} has no COLMAP model, or a damaged one ({error}); download it again.") from error


def _read_queries(root: Path, listed: list[tuple[str, str]], notes: list[str]) -> dict[str, Query]:
    """Read the queries with intrinsics, and add queries from the pairs without intrinsics, which count as failures."""
    queries: dict[str, Query] = {}
    for condition, file in _QUERIES.items():
        for name, camera in _read_intrinsics(root / file) if (root / file).is_file() else ():
            found = {"reason": camera} if isinstance(camera, str) else {"camera": camera}
            queries[name] = Query(condition=condition, **found)
    if not queries:
        raise DataError(f"{root} has no queries: neither {' nor '.join(_QUERIES.values())}; download these files.")
    for file_name, count in Counter(Path(name).name for name in queries).items():
        if count > 1:
            notes.append(f"Several queries are called {file_name}, but the evaluation service ignores folders.")
    for name in dict.fromkeys(name for pair in listed for name in pair if name.startswith("query/")):
        if name not in queries:
            condition = name.split("/")[1] if name.split("/")[1] in _QUERIES else "night"
            reason = f"It has no intrinsics in {_QUERIES[condition]}; add a line for it."
            queries[name] = Query(condition=condition, reason=reason)
    return queries


def _read_pairs(root: Path, version: str) -> list[tuple[str, str]]:
    """Read all lists of pairs."""
    main = root / _PAIRS[version]
    files = [main, *sorted(root.glob(_MORE_PAIRS)), *sorted(root.glob(f"pairs/{_MORE_PAIRS}"))]
    files = [path for path in files if path.is_file()]
    if not files:
        remedy = "it is part of the benchmark's code for local features"
        raise DataError(f"The list of pairs {main} does not exist; {remedy}.")
    return [pair for path in files for pair in read_name_pairs(path, what="two images")]


def _add_candidates(data: AachenData, listed: list[tuple[str, str]], paths: Mapping[str, Path]) -> None:
    """Assign candidates to the queries, and add every pair to match once; lists have many in both orders."""
    candidates: dict[str, list[str]] = {name: [] for name in data.queries}
    unusable = []
    for pair in dict.fromkeys((min(pair), max(pair)) for pair in listed):
        asked = [name for name in pair if name in data.queries]
        known = all(name in data.database or name in data.queries for name in pair)
        if not known or len(asked) == 2 or pair[0] == pair[1]:
            unusable.append(pair)
            continue
        name0, name1 = (asked[0], pair[pair[0] == asked[0]]) if asked else pair
        if asked:
            candidates[name0].append(name1)
            if data.queries[name0].reason is not None:
                # Its matches would not be used.
                continue
        group = data.queries[name0].condition if asked else "database"
        data.pairs.append(Pair(name0=name0, name1=name1, path0=paths[name0], path1=paths[name1], group=group))
    data.pairs.sort(key=lambda pair: (pair.group, pair.name0))
    if unusable:
        example = " ".join(unusable[0])
        data.notes.append(f"{len(unusable)} listed pairs have no two usable images with poses, such as {example}.")
    if not any(candidates.values()):
        raise DataError("The lists of pairs have no candidates for any query; pass the lists of this version.")
    for name, query in data.queries.items():
        alone = "No listed pair has it with a database image; add candidates."
        reason = query.reason or (None if candidates[name] else alone)
        data.queries[name] = replace(query, candidates=tuple(candidates[name]), reason=reason)


def _with_candidates(data: AachenData) -> AachenData:
    """Return the dataset with the conditions whose queries have candidates; the others are not evaluated."""
    evaluated: dict[str, Query] = {}
    for condition in _QUERIES:
        group = {name: query for name, query in data.queries.items() if query.condition == condition}
        if any(query.candidates for query in group.values()):
            evaluated |= group
        elif group:
            data.notes.append(
                f"The {len(group)} {condition} queries are not evaluated: {_PAIRS[data.version]} has no candidates for "
                f"them; add a list of candidates ({_MORE_PAIRS})."
            )
    return replace(data, queries=evaluated)
