"""Export of the matches of a pair: npz, CSV and COLMAP database."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.colmap import colmap_camera, colmap_points, import_pycolmap, quiet_colmap, writing_database
from dualrc.geometry import Camera, camera_from_exif
from dualrc.matches import Matches
from dualrc.web.pairs import Pair

MEDIA = {"npz": "application/octet-stream", "csv": "text/csv; charset=utf-8", "colmap": "application/vnd.sqlite3"}
FILES = {"npz": "matches.npz", "csv": "matches.csv", "colmap": "database.db"}


def export(pair: Pair, form: str) -> bytes:
    """Return the matches of a pair as the content of a file; `form` is npz, csv or colmap."""
    with tempfile.TemporaryDirectory(prefix="dualrc-export-") as folder:
        path = Path(folder) / FILES[form]
        if form == "colmap":
            _write_database(pair, path)
        else:
            pair.matches.save(path)
        return path.read_bytes()


def _write_database(pair: Pair, path: Path) -> None:
    """Write a COLMAP database with the cameras, keypoints and matches of a pair, and the inliers of its estimate."""
    pycolmap = import_pycolmap()
    names = [image.name for image in pair.images]
    if names[0] == names[1]:
        names = [f"0-{names[0]}", f"1-{names[1]}"]
    with quiet_colmap(pycolmap), writing_database(path, path), pycolmap.Database.open(path) as database:
        numbers, columns = [], []
        points = pair.matches.points0, pair.matches.points1
        for name, image, places in zip(names, pair.images, points, strict=True):
            camera = camera_from_exif(image.path) or replace(Camera.guessed(image.size), source="guess")
            number = database.write_camera(colmap_camera(camera, image.path, known=False))
            numbers.append(database.write_image(pycolmap.Image(name=name, camera_id=number)))
            # Matches that share a point share its keypoint.
            keypoints, rows = np.unique(places, axis=0, return_inverse=True)
            database.write_keypoints(numbers[-1], colmap_points(keypoints, image.path).astype(np.float32))
            columns.append(rows.reshape(-1))
        indices = np.stack(columns, axis=1).astype(np.uint32).reshape(-1, 2)
        if len(indices):
            database.write_matches(*numbers, indices)
            if (made := _geometry(pair.matches, indices, pycolmap)) is not None:
                database.write_two_view_geometry(*numbers, made)


def _geometry(matches: Matches, indices: Any, pycolmap: Any) -> Any:
    """Return the inliers of an estimate as a COLMAP two-view geometry, or None without an estimate.

    The matrix is left out: COLMAP estimates it again, and it would not apply to images that are stored rotated.
    """
    model = matches.estimate
    if model is None or model.matrix is None:
        return None
    made, kinds = pycolmap.TwoViewGeometry(), pycolmap.TwoViewGeometryConfiguration
    configs = {"homography": kinds.PLANAR, "fundamental": kinds.UNCALIBRATED, "essential": kinds.CALIBRATED}
    made.config = configs[model.kind]
    made.inlier_matches = indices[model.inliers]
    return made
