"""Trusted pairs, which judge other pairs: they transfer points and poses over third images."""

from collections import defaultdict
from functools import lru_cache
from typing import Any

import numpy as np

from dualrc import geometry
from dualrc.collection.store import Names
from dualrc.collection.two_view_geometry import CACHED, PairCheck, TwoViews, cell_px
from dualrc.types import FloatArray

# Maximum number of third images per pair.
_BETWEEN = 6
# Maximum distance between a point and the match that transfers it, in fine cells.
_REACH = 1.0
# Minimum number of points for the pose over a third image.
_CHAINED = 20
# Minimum sine of a triangulation angle for the relative scale of two pairs.
_LEAST_SINE = 0.01


class TrustedPairs:
    """Pairs with a geometry that others are compared with."""

    def __init__(self, views: TwoViews) -> None:
        self._views = views
        # Pairs by image and partner.
        self._pairs: dict[str, dict[str, PairCheck]] = defaultdict(dict)
        # Those of recent pairs stay in memory.
        self._inliers = lru_cache(2 * CACHED)(self._find_inliers)

    def add(self, check: PairCheck) -> None:
        """Trust a pair, with its present pose and inliers."""
        name0, name1 = check.names
        self._pairs[name0][name1] = self._pairs[name1][name0] = check

    def remove(self, names: Names) -> None:
        """Stop trusting a pair; this does nothing if it is not trusted."""
        name0, name1 = names
        self._pairs[name0].pop(name1, None)
        self._pairs[name1].pop(name0, None)

    def third_images(self, names: Names) -> list[str]:
        """Return the images that have trusted pairs with both, best first."""
        name0, name1 = names
        between = self._pairs[name0].keys() & self._pairs[name1].keys()
        weight = {name: min(self._pairs[end][name].inliers for end in names) for name in between}
        return sorted(between, key=lambda name: (-weight[name], name))[:_BETWEEN]

    def carry(self, points: FloatArray, start: str, end: str) -> FloatArray:
        """Transfer points (n, 2) to another image along a trusted pair; NaN where no match is near."""
        tree, here, there, reach = self._inliers(self._pairs[start][end], start)
        known = np.isfinite(points).all(1)
        result = np.full(points.shape, np.nan)
        distance, index = tree.query(points[known], distance_upper_bound=reach)
        near = np.isfinite(distance)
        rows = np.flatnonzero(known)[near]
        result[rows] = there[index[near]] + (points[rows] - here[index[near]])
        return result

    def _find_inliers(self, check: PairCheck, start: str) -> tuple[Any, FloatArray, FloatArray, float]:
        """Return the inliers of a pair: a search tree and points in image `start`, points in the other, the reach."""
        from scipy.spatial import cKDTree

        side, kept = check.names.index(start), self._views.load(check.names)[check.inlier_flags()]
        here, there = (kept.points0, kept.points1)[:: 1 - 2 * side]
        return cKDTree(here), here, there, _REACH * cell_px(kept, side)

    def poses_over(self, names: Names) -> list[FloatArray]:
        """Return the pose cam1_from_cam0 (3, 4) that follows from each third image."""
        name0, name1 = names
        points0, poses = self._views.load(names).points0.astype(np.float64), []
        for name in self.third_images(names):
            between = self.carry(points0, name0, name)
            points1 = self.carry(between, name, name1)
            known = np.isfinite(points1).all(1)
            rays = [
                self._views.cameras[image].rays(points[known])
                for image, points in ((name0, points0), (name, between), (name1, points1))
            ]
            pose = chained_pose(self._pose(name0, name), self._pose(name, name1), *rays)
            if pose is not None:
                poses.append(pose)
        return poses

    def _pose(self, start: str, end: str) -> FloatArray:
        """Return the pose end_from_start (3, 4) of a trusted pair."""
        check = self._pairs[start][end]
        assert check.pose is not None
        return check.pose if check.names[0] == start else geometry.cam1_from_cam0(check.pose, np.eye(3, 4))


def chained_pose(
    pose0: FloatArray, pose1: FloatArray, rays0: FloatArray, rays: FloatArray, rays1: FloatArray
) -> FloatArray | None:
    """Return the pose from image 0 to image 1 over a third image; None if the relative scale is unknown.

    `pose0`: third image from image 0. `pose1`: image 1 from the third image. Rays (n, 3) of points that are known in
    all images give the scale between the two translations: their depths in the third image must be the same.
    """
    _, depths0, sines0 = geometry.ray_depths(pose0, rays0, rays)
    depths1, _, sines1 = geometry.ray_depths(pose1, rays, rays1)
    sure = (depths0 > 0) & (depths1 > 0) & (np.minimum(sines0, sines1) > _LEAST_SINE)
    if sure.sum() < _CHAINED:
        return None
    scale = np.median(depths0[sure] / depths1[sure])
    translation = pose1[:, :3] @ pose0[:, 3] + scale * pose1[:, 3]
    return np.column_stack([pose1[:, :3] @ pose0[:, :3], translation / max(float(np.linalg.norm(translation)), 1e-12)])
