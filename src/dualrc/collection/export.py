"""Export of merged keypoints: COLMAP's database and hloc's HDF5 files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.collection.cameras import is_known
from dualrc.collection.keypoints import MergedMatches, merge
from dualrc.collection.matching import CollectionResult
from dualrc.collection.pairs import write_pairs
from dualrc.collection.progress import Progress, no_progress
from dualrc.collection.store import MatchStore, Names
from dualrc.colmap import (
    colmap_camera,
    colmap_points,
    import_pycolmap,
    quiet_colmap,
    remove_leftovers,
    stored_points,
    upright_from_stored,
    writing_database,
)
from dualrc.errors import DataError
from dualrc.extras import require
from dualrc.files import replacing
from dualrc.geometry import Camera, essential_from_pose, sampson_distance_px
from dualrc.image import read_header
from dualrc.types import FloatArray, IntArray

# Maximum epipolar error of an inlier, as in COLMAP's verification.
_MAX_ERROR_PX = 4.0


def write_database(
    path: str | Path,
    merged: MergedMatches,
    images: str | Path,
    cameras: Mapping[str, Camera],
    poses: Mapping[Names, FloatArray],
    progress: Progress = no_progress,
) -> None:
    """Write a COLMAP database: cameras, images, keypoints, matches and two-view geometries.

    `poses`: cam1_from_cam0 (3, 4) of each pair, as returned by `verify_pairs`.
    """
    pycolmap = import_pycolmap()
    images = Path(images)
    # Files that SQLite left beside the database of a killed process would corrupt the new database.
    remove_leftovers(path)
    # Without a transaction, because pycolmap aborts the process if it cannot commit one, as on a full disk.
    with (
        replacing(path) as temporary,
        quiet_colmap(pycolmap),
        writing_database(path, temporary),
        pycolmap.Database.open(temporary) as database,
    ):
        numbers = _write_images(database, merged, images, cameras, pycolmap)
        for count, pair in enumerate(merged.pairs, start=1):
            indices, ids = merged.indexed(*pair).indices, [numbers[name] for name in pair]
            if len(indices):
                database.write_matches(*ids, indices.astype(np.uint32))
                made = _two_view_geometry(pair, indices, poses[pair], merged, images, cameras, pycolmap)
                database.write_two_view_geometry(*ids, made)
            progress("Writing matches", count, len(merged.pairs))


def _two_view_geometry(
    names: Names,
    indices: IntArray,
    pose: FloatArray,
    merged: MergedMatches,
    images: Path,
    cameras: Mapping[str, Camera],
    pycolmap: Any,
) -> Any:
    """Return COLMAP's two-view geometry of a pair, for the stored orientation of the images, with its inliers."""
    upright = [cameras[name] for name in names]
    rays = [
        camera.rays(merged.keypoints[name].points[indices[:, side]])[:, :2]
        for side, (name, camera) in enumerate(zip(names, upright, strict=True))
    ]
    distance = sampson_distance_px(essential_from_pose(pose), *rays) * sum(camera.focal_px for camera in upright) / 2
    turns = [upright_from_stored(images / name) for name in names]
    R, t = turns[1].T @ pose[:, :3] @ turns[0], turns[1].T @ pose[:, 3]
    stored = [
        colmap_camera(camera, images / name, known=is_known(camera)).calibration_matrix()
        for name, camera in zip(names, upright, strict=True)
    ]
    made = pycolmap.TwoViewGeometry()
    made.config = pycolmap.TwoViewGeometryConfiguration.CALIBRATED
    made.E = essential_from_pose(np.column_stack([R, t]))
    made.F = np.linalg.inv(stored[1]).T @ made.E @ np.linalg.inv(stored[0])
    made.cam2_from_cam1 = pycolmap.Rigid3d(np.column_stack([R, t]))
    made.inlier_matches = indices[distance <= _MAX_ERROR_PX].astype(np.uint32)
    return made


def _write_images(
    database: Any, merged: MergedMatches, images: Path, cameras: Mapping[str, Camera], pycolmap: Any
) -> dict[str, int]:
    """Write cameras, images and keypoints; return the image ids by name."""
    shared: dict[tuple[Any, ...], int] = {}
    numbers = {}
    for name in sorted(merged.keypoints):
        known = is_known(cameras[name])
        camera = colmap_camera(cameras[name], images / name, known=known)
        # Images of the same size and focal length share a camera.
        key = (known, camera.model_name, camera.width, camera.height, *camera.params)
        if key not in shared:
            shared[key] = database.write_camera(camera)
        numbers[name] = database.write_image(pycolmap.Image(name=name, camera_id=shared[key]))
        places = colmap_points(merged.keypoints[name].points, images / name)
        database.write_keypoints(numbers[name], places.astype(np.float32))
    return numbers


def write_hloc(folder: str | Path, merged: MergedMatches, images: str | Path, progress: Progress = no_progress) -> None:
    """Write hloc's features.h5, matches.h5 and pairs.txt, in stored pixels with the first pixel center at (0, 0)."""
    h5py = require("h5py", "colmap", "hloc's files")
    folder, images = Path(folder), Path(images)
    keys = _pair_keys(merged.keypoints)
    with replacing(folder / "features.h5") as temporary, h5py.File(temporary, "w") as file:
        for name, keypoints in merged.keypoints.items():
            header = read_header(images / name)
            group = file.create_group(name)
            group["keypoints"] = stored_points(keypoints.points, images / name).astype(np.float32)
            group["scores"] = keypoints.scores
            group["image_size"] = np.array(keypoints.size if header is None else header.stored_size)
    with replacing(folder / "matches.h5") as temporary, h5py.File(temporary, "w") as file:
        for count, (name0, name1) in enumerate(merged.pairs, start=1):
            found = merged.indexed(name0, name1)
            # int32, because an image may have more than 32,767 keypoints.
            matches0 = np.full(len(merged.keypoints[name0]), -1, np.int32)
            scores0 = np.zeros(len(matches0), np.float32)
            matches0[found.indices[:, 0]] = found.indices[:, 1]
            scores0[found.indices[:, 0]] = found.scores
            group = file.create_group(f"{keys[name0]}/{keys[name1]}")
            group.create_dataset("matches0", data=matches0, compression="gzip", compression_opts=1)
            group.create_dataset("matching_scores0", data=scores0, compression="gzip", compression_opts=1)
            progress("Writing matches", count, len(merged.pairs))
    write_pairs(folder / "pairs.txt", merged.pairs)


def export_hloc(
    folder: Path, images: Path, matched: CollectionResult, progress: Progress = no_progress
) -> tuple[Path, Path, Path]:
    """Merge the keypoints of a matched collection and write them with `write_hloc`; returns the files.

    For hloc's own mapping and localization: queries and map may be in one collection.
    """
    with MatchStore(matched.store) as store:
        write_hloc(folder, merge(store, progress=progress, pairs=matched.pairs), images, progress)
    return folder / "features.h5", folder / "matches.h5", folder / "pairs.txt"


def _pair_keys(names: Iterable[str]) -> dict[str, str]:
    """Return the keys of images in hloc's matches.h5; raise DataError if two images have the same."""
    owners: dict[str, str] = {}
    for name in names:
        if (other := owners.setdefault(name.replace("/", "-"), name)) != name:
            message = f"{other} and {name} have the same key in hloc's matches.h5, where / becomes -; rename one."
            raise DataError(message)
    return {name: key for key, name in owners.items()}
