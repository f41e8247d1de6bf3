"""Absolute pose of a camera from 2D-3D correspondences."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.errors import DataError
from dualrc.geometry.camera import Camera, cross_matrix, transform_points
from dualrc.geometry.ransac import best_first, import_poselib, ransac_options, scattered
from dualrc.types import BoolArray, FloatArray, Size

# A focal length outside this range, in units of the long side, is an artifact of coplanar points.
_PLAUSIBLE_FOCAL = (0.2, 10.0)
_REFINEMENTS = 50
# Iterations until samples are drawn uniformly from all correspondences.
_BEST_FIRST = 500
# Probability of drawing at least one sample without an outlier.
_NEVER_MISS = 0.9999
# Largest standard deviation of the center, relative to the distance to the points, for a determined pose.
_LARGEST_DEVIATION = 0.5
# Errors of correspondences in one patch, of this share of their total extent, are correlated.
_PATCH_SHARE = 1 / 16
_ESTIMATED = "focal length estimated with the pose"


@dataclass(frozen=True, kw_only=True, eq=False)
class AbsolutePose:
    """Pose of a camera, and the correspondences that support it."""

    # (n,) Whether each correspondence agrees with the pose.
    inliers: BoolArray
    # (3, 4) None if there is no pose; then `reason` explains why.
    cam_from_world: FloatArray | None = None
    # Why there is no pose.
    reason: str | None = None
    # The camera that was used, with the estimated focal length if it was unknown.
    camera: Camera | None = None
    # (6, 6) Covariance of a small rotation in radians about the camera axes and of the center in the world.
    # It excludes errors that all correspondences share, such as errors of the poses in the map.
    covariance: FloatArray | None = None

    @property
    def center(self) -> FloatArray | None:
        """Position of the camera in the world (3,)."""
        pose = self.cam_from_world
        return None if pose is None else -pose[:, :3].T @ pose[:, 3]


@dataclass(frozen=True, kw_only=True, eq=False)
class _State:
    """A pose and a camera during the optimization."""

    # (3, 4)
    pose: FloatArray
    camera: Camera

    def project(self, xyz: FloatArray) -> FloatArray:
        """Project points to pixels (n, 2); points behind the camera or outside its view get far-away pixels."""
        pixels = self.camera.project(transform_points(self.pose, xyz))
        return np.where(np.isfinite(pixels), pixels, 1e12)

    def residuals(self, points: FloatArray, xyz: FloatArray) -> FloatArray:
        """Return the reprojection errors of points (n, 2) in pixels: (n,)."""
        return np.linalg.norm(self.project(xyz) - points, axis=1)


def absolute_pose(
    points: npt.ArrayLike,
    xyz: npt.ArrayLike,
    *,
    camera: Camera | None = None,
    size: Size | None = None,
    scores: npt.ArrayLike | None = None,
    threshold_px: float = 4.0,
    min_inliers: int = 12,
    max_iterations: int = 20_000,
    seed: int = 0,
) -> AbsolutePose:
    """Estimate the pose of a camera that sees 3D points (n, 3) at pixels (n, 2), by LO-RANSAC and refinement.

    Without a camera, the focal length of an image of `size` is estimated together with the pose. Higher scores are
    sampled first.
    """
    points, xyz = np.asarray(points, np.float64).reshape(-1, 2), np.asarray(xyz, np.float64).reshape(-1, 3)
    if len(points) != len(xyz):
        raise DataError(f"There are {len(points)} pixels but {len(xyz)} points; give one pixel per point.")
    if camera is None and size is None:
        raise DataError("The camera and the size of its image are both unknown; give one of them.")
    count = len(points)
    # Pixels outside the range of the lens have no ray.
    seen = points if camera is None else camera.rays(points)
    used = best_first(np.zeros(count) if scores is None else np.asarray(scores), points, xyz, seen)

    def failed(reason: str) -> AbsolutePose:
        return AbsolutePose(inliers=np.zeros(count, dtype=np.bool_), reason=reason)

    fewest = max(min_inliers, 4 if camera is not None else 5)
    if len(used) < fewest:
        return failed(f"{len(used)} correspondences are too few: a pose needs {fewest}")
    # Center the world, because double precision is limited far from the origin.
    middle = np.median(xyz[used], axis=0)
    ours, theirs = points[used], xyz[used] - middle
    if camera is not None:
        state = _with_camera(ours, theirs, camera, ransac_options(threshold_px, max_iterations, seed))
    else:
        state = _with_focal(ours, theirs, size or (0, 0), threshold_px, max_iterations, seed)
    if state is None or np.sum(state.residuals(ours, theirs) <= threshold_px) < fewest:
        return failed(f"no pose agrees with {fewest} of {len(used)} correspondences")
    state, covariance = _refine(state, ours, theirs, threshold_px, focal=camera is None)
    near = state.residuals(ours, theirs) <= threshold_px
    if near.sum() < fewest:
        return failed(f"no pose agrees with {fewest} of {len(used)} correspondences")
    distance = float(np.median(np.linalg.norm(transform_points(state.pose, theirs[near]), axis=1)))
    deviation = np.sqrt(np.trace(covariance[3:6, 3:6])) if np.isfinite(covariance).all() else np.inf
    if not deviation <= _LARGEST_DEVIATION * distance:
        return failed("the correspondences do not determine the pose: they lie on a line or in a point")
    pose = np.column_stack([state.pose[:, :3], state.pose[:, 3] - state.pose[:, :3] @ middle])
    return AbsolutePose(
        cam_from_world=pose,
        inliers=scattered(near, used, count),
        camera=replace(state.camera, cam_from_world=pose),
        covariance=covariance[:6, :6],
    )


def _with_camera(points: FloatArray, xyz: FloatArray, camera: Camera, options: dict[str, Any]) -> _State | None:
    pose, _ = import_poselib().estimate_absolute_pose(
        camera.rays(points)[:, :2] * camera.focal_px,
        xyz,
        camera.centered_pinhole(),
        # Best scores first, but only briefly: misleading scores would give no good sample.
        {**options, "max_prosac_iterations": _BEST_FIRST},
        {},
    )
    matrix = np.array(pose.Rt, dtype=np.float64)
    return _State(pose=matrix, camera=camera) if np.isfinite(matrix).all() else None


def _with_focal(
    points: FloatArray, xyz: FloatArray, size: Size, threshold_px: float, max_iterations: int, seed: int
) -> _State | None:
    """Estimate pose and focal length by LO-RANSAC; PoseLib has only the minimal solver."""
    center = Camera.from_focal(size, 1.0).K[:2, 2]
    random = np.random.default_rng(seed)
    best, best_cost, needed, tried = None, np.inf, float(max_iterations), 0
    while tried < min(needed, max_iterations):
        tried += 1
        head = max(4, min(len(points), 20 + len(points) * tried // _BEST_FIRST))
        sample = random.choice(head, 4, replace=False)
        for state in _solutions(points[sample], xyz[sample], size, center):
            cost = _cost(state, points, xyz, threshold_px)
            if cost >= best_cost:
                continue
            refined, _ = _refine(state, points, xyz, threshold_px, focal=True, steps=10)
            polished = _cost(refined, points, xyz, threshold_px)
            best, best_cost = (refined, polished) if polished < cost else (state, cost)
            share = np.clip(np.mean(best.residuals(points, xyz) <= threshold_px), 0.01, 0.99)
            needed = max(100.0, np.log(1 - _NEVER_MISS) / np.log1p(-(share**4)))
    return best


def _solutions(points: FloatArray, xyz: FloatArray, size: Size, center: FloatArray) -> Iterator[_State]:
    poses, focals = import_poselib().p4pf(list(points - center), list(xyz), True)
    low, high = _PLAUSIBLE_FOCAL
    for pose, focal in zip(poses, focals, strict=True):
        matrix = np.array(pose.Rt, dtype=np.float64)
        if low <= focal / max(size) <= high and np.isfinite(matrix).all():
            yield _State(pose=matrix, camera=Camera.from_focal(size, focal, source=_ESTIMATED))


def _cost(state: _State, points: FloatArray, xyz: FloatArray, threshold_px: float) -> float:
    """Return the sum of squared residuals, each truncated at the threshold."""
    return float(np.minimum(state.residuals(points, xyz) ** 2, threshold_px**2).sum())


def _refine(
    state: _State, points: FloatArray, xyz: FloatArray, threshold_px: float, *, focal: bool, steps: int = _REFINEMENTS
) -> tuple[_State, FloatArray]:
    """Minimize the Cauchy loss of the inliers by Levenberg-Marquardt; return the state and its covariance.

    The scale of the loss is the spread of the inliers, so precise inliers count more than those near the threshold.
    """
    near = state.residuals(points, xyz) <= threshold_px
    points, xyz = points[near], xyz[near]
    unknown = 7 if focal else 6
    if 2 * len(points) <= unknown:
        return state, np.full((unknown, unknown), np.nan)
    spread = max(float(np.median(state.residuals(points, xyz))), 1e-6)
    loss, damping = _loss(state, points, xyz, spread), 1e-4
    for _ in range(steps):
        J, residuals, weights = _linearize(state, points, xyz, spread, unknown)
        normal, gradient = _normal(J, weights), np.tensordot(J, weights[:, None] * residuals, axes=((0, 1), (0, 1)))
        try:
            step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), gradient)
        except np.linalg.LinAlgError:
            break
        trial = _moved(state, step)
        lower = _loss(trial, points, xyz, spread)
        if not lower < loss:
            damping *= 10
            if damping > 1e8:
                break
            continue
        small = loss - lower < 1e-10 * loss
        state, loss, damping = trial, lower, max(damping / 10, 1e-12)
        if small:
            break
    return state, _covariance(*_linearize(state, points, xyz, spread, unknown), points)


def _covariance(J: FloatArray, residuals: FloatArray, weights: FloatArray, points: FloatArray) -> FloatArray:
    """Return the covariance (unknown, unknown); NaN if the pose is not determined.

    Errors of neighboring correspondences are correlated. All of a patch count as one observation, as far as their
    errors have the same direction (the sandwich estimator with clusters).
    """
    unknown = J.shape[2]
    cell = _PATCH_SHARE * max(float(np.ptp(points, axis=0).max()), 1e-9)
    _, patch = np.unique(np.floor(points / cell), axis=0, return_inverse=True)
    count = int(patch.max()) + 1
    gradients = (J * (weights[:, None] * residuals)[:, :, None]).sum(axis=1)
    sums = np.stack([np.bincount(patch.ravel(), column, minlength=count) for column in gradients.T], axis=1)
    # The mean curvature of the Cauchy loss over the directions of a residual is the square of its weight.
    normal = _normal(J, weights**2)
    # Scale the diagonal to one, because radians and meters are not comparable.
    scale = np.sqrt(np.diag(normal))
    if count <= unknown or not np.all(scale > 0) or np.linalg.cond(normal / np.outer(scale, scale)) > 1e12:
        return np.full((unknown, unknown), np.nan)
    inverse = np.linalg.inv(normal / np.outer(scale, scale)) / np.outer(scale, scale)
    return inverse @ (sums.T @ sums) @ inverse * count / (count - unknown)


def _normal(J: FloatArray, weights: FloatArray) -> FloatArray:
    unknown = J.shape[2]
    return (J * weights[:, None, None]).reshape(-1, unknown).T @ J.reshape(-1, unknown)


def _loss(state: _State, points: FloatArray, xyz: FloatArray, spread: float) -> float:
    return float(np.log1p((state.residuals(points, xyz) / spread) ** 2).sum())


def _linearize(
    state: _State, points: FloatArray, xyz: FloatArray, spread: float, unknown: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return derivatives of the pixels (n, 2, unknown), residuals (n, 2), and weights (n,) of the Cauchy loss.

    The unknowns are a rotation about the camera axes, the center, and optionally the logarithm of the focal length.
    """
    places = transform_points(state.pose, xyz)
    x, y, z = places.T
    z = np.maximum(z, 1e-9)
    pixels = state.project(xyz)
    rays = places[:, :2] / z[:, None]
    # Derivatives of pixels by camera coordinates, (n, 2, 3): through rays of depth 1, the lens, and K.
    by_place = np.zeros((len(xyz), 2, 3))
    by_place[:, :, :2] = state.camera.pixels_by_rays(rays) / z[:, None, None]
    by_place[:, :, 2] = -(by_place[:, :, :2] @ rays[:, :, None])[:, :, 0]
    zero = np.zeros_like(x)
    # -[X]x for each point X in camera coordinates.
    by_rotation = np.stack([[zero, z, -y], [-z, zero, x], [y, -x, zero]]).transpose(2, 0, 1)
    J = np.zeros((len(xyz), 2, unknown))
    J[:, :, :3] = by_place @ by_rotation
    J[:, :, 3:6] = -by_place @ state.pose[:, :3]
    if unknown == 7:
        J[:, :, 6] = pixels - state.camera.K[:2, 2]
    residuals = pixels - points
    weights = 1 / (1 + (np.linalg.norm(residuals, axis=1) / spread) ** 2)
    return J, residuals, weights


def _moved(state: _State, step: FloatArray) -> _State:
    R, t = state.pose[:, :3], state.pose[:, 3]
    center = -R.T @ t + step[3:6]
    rotated, camera = _rotation(step[:3]) @ R, state.camera
    if len(step) == 7:
        focal_px = camera.focal_px * float(np.exp(np.clip(step[6], -1, 1)))
        camera = Camera.from_focal(camera.size, focal_px, source=_ESTIMATED)
    return _State(pose=np.column_stack([rotated, -rotated @ center]), camera=camera)


def _rotation(vector: FloatArray) -> FloatArray:
    """Return the rotation (3, 3) by |vector| radians about the vector."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3)
    cross = cross_matrix(vector / angle)
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
