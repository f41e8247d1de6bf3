"""Maps of images with known poses: pycolmap triangulates merged matches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.collection.keypoints import MergedMatches
from dualrc.collection.progress import Progress
from dualrc.collection.store import Names
from dualrc.colmap import colmap_points, import_pycolmap, posed_reconstruction, quiet_colmap, writing_database
from dualrc.errors import DataError
from dualrc.files import one_line
from dualrc.geometry import Camera, cam1_from_cam0, pose_distance_px
from dualrc.localize import Correspondences
from dualrc.types import FloatArray, IntArray

# Maximum epipolar error of a match, as in COLMAP's verification.
_MAX_ERROR_PX = 4.0
# Minimum number of matches of a pair, as in COLMAP; fewer may agree by chance.
_MIN_MATCHES = 15


@dataclass(frozen=True, kw_only=True, eq=False)
class PosedMap:
    """3D points, and the point of each keypoint."""

    # (m, 3).
    xyz: FloatArray
    # By image, for each keypoint a row of xyz, or -1.
    rows: dict[str, IntArray]
    # Mean number of images per point.
    track_length: float
    # Mean reprojection error.
    error_px: float

    def correspond(self, merged: MergedMatches, pair: Names, query: str) -> Correspondences:
        """Return the correspondences of a query with the map image of a pair."""
        found, side = merged.indexed(*pair), pair.index(query)
        name, mine, theirs = pair[1 - side], found.indices[:, side], found.indices[:, 1 - side]
        rows = self.rows[name][theirs] if name in self.rows else np.full(len(theirs), -1)
        seen = rows >= 0
        points = merged.keypoints[query].points[mine[seen]]
        return Correspondences.of(points, self.xyz[rows[seen]], found.scores[seen], rows[seen])


def triangulate(cameras: Mapping[str, Camera], merged: MergedMatches, work: Path, progress: Progress) -> PosedMap:
    """Triangulate matches between images whose cameras have poses; `work` is an empty folder for COLMAP."""
    pycolmap = import_pycolmap()
    names = sorted(name for name in cameras if name in merged.keypoints)
    model = posed_reconstruction({name: cameras[name] for name in names})
    numbers = {image.name: number for number, image in model.images.items()}
    with quiet_colmap(pycolmap):
        path = work / "database.db"
        with writing_database(path, path), pycolmap.Database.open(path) as database:
            _write_images(database, model, merged)
            verified = _write_matches(database, cameras, merged, numbers, progress)
        progress("Triangulating", 0, 1)
        if verified:
            model = _triangulate_points(model, work)
        progress("Triangulating", 1, 1)
    point_ids = sorted(model.points3D)
    rows = {name: np.full(len(merged.keypoints[name]), -1, np.int64) for name in names}
    by_number = {number: rows[name] for name, number in numbers.items()}
    for row, point_id in enumerate(point_ids):
        for element in model.points3D[point_id].track.elements:
            by_number[element.image_id][element.point2D_idx] = row
    return PosedMap(
        xyz=np.array([model.points3D[point_id].xyz for point_id in point_ids]).reshape(-1, 3),
        rows=rows,
        track_length=model.compute_mean_track_length() if point_ids else 0.0,
        error_px=model.compute_mean_reprojection_error() if point_ids else 0.0,
    )


def _write_images(database: Any, model: Any, merged: MergedMatches) -> None:
    """Write cameras, images and keypoints, with the ids of the reconstruction."""
    for camera in model.cameras.values():
        database.write_camera(camera, use_camera_id=True)
    for rig in model.rigs.values():
        database.write_rig(rig, use_rig_id=True)
    for frame in model.frames.values():
        database.write_frame(frame, use_frame_id=True)
    for number, image in model.images.items():
        database.write_image(image, use_image_id=True)
        database.write_keypoints(number, colmap_points(merged.keypoints[image.name].points).astype(np.float32))


def _write_matches(
    database: Any, cameras: Mapping[str, Camera], merged: MergedMatches, numbers: Mapping[str, int], progress: Progress
) -> int:
    """Write the matches that agree with the poses, and return the number of pairs with enough of them."""
    pycolmap = import_pycolmap()
    pairs = [pair for pair in merged.pairs if pair[0] in numbers and pair[1] in numbers]
    verified = 0
    for count, (name0, name1) in enumerate(pairs, start=1):
        camera0, camera1 = cameras[name0], cameras[name1]
        # `posed_reconstruction` checks this.
        assert camera0.cam_from_world is not None and camera1.cam_from_world is not None
        pose = cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world)
        indices = merged.indexed(name0, name1).indices
        points0, points1 = (merged.keypoints[name].points[indices[:, side]] for side, name in enumerate((name0, name1)))
        agree = pose_distance_px(pose, camera0, camera1, points0, points1) <= _MAX_ERROR_PX
        geometry = pycolmap.TwoViewGeometry()
        geometry.config = pycolmap.TwoViewGeometryConfiguration.CALIBRATED
        geometry.inlier_matches = indices[agree].astype(np.uint32)
        database.write_two_view_geometry(numbers[name0], numbers[name1], geometry)
        verified += int(agree.sum() >= _MIN_MATCHES)
        progress("Verifying pairs", count, len(pairs))
    return verified


def _triangulate_points(model: Any, work: Path) -> Any:
    pycolmap = import_pycolmap()
    options = pycolmap.IncrementalPipelineOptions()
    options.min_num_matches = _MIN_MATCHES
    options.extract_colors = False
    options.random_seed = 0
    (work / "model").mkdir()
    try:
        return pycolmap.triangulate_points(model, work / "database.db", work, work / "model", options=options)
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"COLMAP cannot triangulate the matches ({one_line(error)}); check the reference model."
        ) from error
