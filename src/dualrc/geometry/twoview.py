"""Two-view models from matches, estimated robustly with PoseLib."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np

from dualrc.errors import ConfigError, DataError
from dualrc.geometry.camera import Camera
from dualrc.geometry.epipolar import essential_from_pose, pose_distance_px
from dualrc.geometry.ransac import best_first, import_poselib, ransac_options, scattered
from dualrc.matches import Estimate, EstimateKind, Matches, RelativePose
from dualrc.types import BoolArray, FloatArray

# Fewest matches that determine a unique model. Minimal solvers need fewer but return several solutions.
_FEWEST = {"homography": 4, "fundamental": 8, "essential": 6}
_FEWEST_SHARED_FOCAL = 7
# An estimated focal length outside this range, in units of the long side, is an artifact of degenerate motion.
_PLAUSIBLE_FOCAL = (0.3, 5.0)
# Largest condition number of a homography between images, in normalized coordinates.
_LARGEST_CONDITION = 1e7
# Smaller parallax is rounding of coordinates, for example of an image matched with itself.
_SMALLEST_PARALLAX_PX = 0.01
# A rotation explains a match if its residual is within the threshold or this number of noise deviations.
# It explains the motion if a smaller share of inliers remains, about the chance level for epipolar lines.
_DEVIATIONS, _UNEXPLAINED = 4.5, 0.05
_ROTATION_SWEEPS = 20


def estimate(
    matches: Matches,
    kind: EstimateKind,
    *,
    camera0: Camera | None = None,
    camera1: Camera | None = None,
    threshold_px: float = 2.0,
    min_inliers: int | None = None,
    max_iterations: int = 20_000,
    seed: int = 0,
) -> Estimate:
    """Fit a model with LO-RANSAC; on failure the matrix is None and `info["reason"]` explains why.

    `threshold_px` bounds the transfer error in image 1 for a homography, otherwise the Sampson distance, in pixels of
    the original images. Cameras are used for an essential matrix only, where points are undistorted. If they are not
    given, `info["cameras"]` reports the cameras that were used. `warnings` report a guessed focal length and missing
    parallax.
    """
    if kind not in get_args(EstimateKind):
        raise ConfigError(f"Unknown model {kind!r}; choose one of {', '.join(get_args(EstimateKind))}.")
    if not threshold_px > 0:
        raise ConfigError(f"threshold_px is {threshold_px}; give a positive number of pixels.")
    fewest = _FEWEST[kind] if min_inliers is None else max(min_inliers, _FEWEST[kind])
    options = ransac_options(threshold_px, max_iterations, seed)
    info: dict[str, Any] = {"threshold_px": threshold_px, "seed": seed}
    used = best_first(matches.scores, matches.points0, matches.points1)

    def failed(reason: str) -> Estimate:
        nothing = np.zeros(len(matches), dtype=bool)
        return Estimate(kind=kind, matrix=None, inliers=nothing, info={**info, "reason": reason})

    if kind == "essential":
        images = (camera0, matches.size0, matches.points0), (camera1, matches.size1, matches.points1)
        for number, (camera, size, points) in enumerate(images):
            _check_size(number, camera, size)
            # Some pixels lie outside the range of a lens.
            if camera is not None and camera.lens.distorts:
                used = used[np.isfinite(camera.rays(points[used])).all(axis=1)]
    points0, points1 = matches.points0[used].astype(np.float64), matches.points1[used].astype(np.float64)
    if len(points0) < fewest:
        return failed(f"{len(points0)} matches are too few: a model needs {fewest}")
    if kind == "essential":
        cameras = _known_cameras(matches, camera0, camera1)
        fit = _fit_essential(points0, points1, cameras, matches, options)
    else:
        fit = _fit_matrix(points0, points1, kind, options)
    assert fit.matrix is not None
    if fit.inliers.sum() < fewest or not np.isfinite(fit.matrix).all():
        return failed(f"no model fits {fewest} matches or more")
    if (reason := _degenerate(fit, fit.matrix, points0[fit.inliers], points1[fit.inliers], threshold_px)) is not None:
        return failed(reason)
    return replace(fit, inliers=scattered(fit.inliers, used, len(matches)), info={**info, **fit.info})


def _degenerate(
    fit: Estimate, matrix: FloatArray, points0: FloatArray, points1: FloatArray, threshold_px: float
) -> str | None:
    """Return the reason if the inlier points (n, 2) do not determine the model, else None."""
    if min(_distance_from_line_px(points0), _distance_from_line_px(points1)) <= threshold_px:
        return "the matches lie on a line or in a point"
    if fit.kind == "homography" and _condition(matrix, points0, points1) > _LARGEST_CONDITION:
        return "the best homography is degenerate"
    if fit.info.get("parallax_px", np.inf) < _SMALLEST_PARALLAX_PX:
        return "the cameras share one center, so there is no direction between them"
    return None


def relative_pose(
    matches: Matches, camera0: Camera, camera1: Camera, *, threshold_px: float = 2.0, seed: int = 0
) -> RelativePose | None:
    """Estimate the relative pose of two calibrated cameras; None on failure."""
    return estimate(matches, "essential", camera0=camera0, camera1=camera1, threshold_px=threshold_px, seed=seed).pose


def _fit_matrix(points0: FloatArray, points1: FloatArray, kind: EstimateKind, options: dict[str, Any]) -> Estimate:
    """Estimate a homography or a fundamental matrix, with one inlier flag per given point."""
    matrix, stats = getattr(import_poselib(), f"estimate_{kind}")(points0, points1, options, {})
    matrix = np.array(matrix, dtype=np.float64)
    # The usual scale of a homography is H[2, 2] = 1, unless the first pixel maps (nearly) to infinity.
    scale = matrix[2, 2] if kind == "homography" else 0.0
    norm = np.linalg.norm(matrix)
    if np.isfinite(norm) and norm > 0:
        matrix = matrix / (scale if abs(scale) > 1e-9 * norm else norm)
    info = {"iterations": int(stats["iterations"])}
    return Estimate(kind=kind, matrix=matrix, inliers=_flags(stats, len(points0)), info=info)


def _fit_essential(
    points0: FloatArray,
    points1: FloatArray,
    cameras: tuple[Camera, Camera] | None,
    matches: Matches,
    options: dict[str, Any],
) -> Estimate:
    """Estimate an essential matrix, with one inlier flag per given point."""
    if cameras is None:
        cameras = _shared_focal_cameras(points0, points1, matches, options)
    camera0, camera1 = cameras
    rays0, rays1 = camera0.rays(points0)[:, :2], camera1.rays(points1)[:, :2]
    pinholes = camera0.centered_pinhole(), camera1.centered_pinhole()
    pose, stats = import_poselib().estimate_relative_pose(
        rays0 * camera0.focal_px, rays1 * camera1.focal_px, *pinholes, options, {}
    )
    R, t = np.array(pose.R), np.array(pose.t).ravel()
    # PoseLib's t has length 1 only up to the steps of its refinement.
    t = t / (np.linalg.norm(t) or 1.0)
    pose = np.column_stack([R, t])
    inliers = _flags(stats, len(points0))
    threshold_px = options["max_epipolar_error"]
    if camera0.lens.distorts or camera1.lens.distorts:
        pose, inliers = _refit(pose, inliers, points0, points1, cameras, threshold_px)
    sources = (camera0.source, camera1.source)
    left_px = _left_by_rotation_px(points0[inliers], points1[inliers], cameras)
    rotation_only = _explained(left_px, pose, points0[inliers], points1[inliers], cameras, threshold_px)
    info = {
        "iterations": int(stats["iterations"]),
        "cameras": sources[0] if sources[0] == sources[1] else f"image 0: {sources[0]}, image 1: {sources[1]}",
        **{f"K{number}": camera.K.tolist() for number, camera in enumerate(cameras)},
        **{
            f"lens{number}": {"model": camera.lens.model, "distortion": list(camera.lens.distortion)}
            for number, camera in enumerate(cameras)
            if camera.lens.distorts
        },
        # Median residual of the best rotation. If it is not larger than the noise, t is arbitrary.
        "parallax_px": float(np.median(left_px)) if len(left_px) else 0.0,
        "rotation_only": rotation_only,
    }
    warnings = []
    if guessed := [number for number, camera in enumerate(cameras) if camera.is_guessed]:
        which = "both images" if len(guessed) == 2 else f"image {guessed[0]}"
        warnings.append(f"The focal length of {which} is a guess, and the pose depends on it; give the cameras.")
    if rotation_only:
        warnings.append(
            "There is hardly any parallax: the camera rotated but moved little, so the direction of the motion is "
            "arbitrary; a homography describes this pair."
        )
    return Estimate(
        kind="essential",
        matrix=essential_from_pose(pose),
        inliers=inliers,
        info=info,
        pose=RelativePose(cam1_from_cam0=pose),
        rotation_only=rotation_only,
        warnings=tuple(warnings),
    )


def _refit(
    pose: FloatArray,
    inliers: BoolArray,
    points0: FloatArray,
    points1: FloatArray,
    cameras: tuple[Camera, Camera],
    threshold_px: float,
) -> tuple[FloatArray, BoolArray]:
    """Refine pose and inliers in pixels of the original images; PoseLib measures undistorted pixels.

    The two differ most at the edges, where undistortion stretches the image.
    """
    rays = [camera.rays(points)[:, :2] for camera, points in zip(cameras, (points0, points1), strict=True)]
    places = [at * camera.focal_px for at, camera in zip(rays, cameras, strict=True)]
    pinholes = [camera.centered_pinhole() for camera in cameras]
    for _ in range(2):
        near = pose_distance_px(pose, *cameras, points0, points1) <= threshold_px
        if near.sum() < _FEWEST["essential"]:
            break
        start = import_poselib().CameraPose()
        start.R, start.t = pose[:, :3], pose[:, 3]
        options = {"loss_type": "CAUCHY", "loss_scale": threshold_px / 2}
        refined, _ = import_poselib().refine_relative_pose(places[0][near], places[1][near], start, *pinholes, options)
        R, t = np.array(refined.R), np.array(refined.t).ravel()
        pose, inliers = np.column_stack([R, t / (np.linalg.norm(t) or 1.0)]), near
    return pose, pose_distance_px(pose, *cameras, points0, points1) <= threshold_px if inliers.any() else inliers


def _check_size(number: int, camera: Camera | None, size: tuple[int, int]) -> None:
    if camera is None and 0 in size:
        raise DataError(
            f"The size of image {number} is unknown, so its camera cannot be guessed; give cameras or match again."
        )
    if camera is not None and 0 not in size and camera.size != size:
        raise DataError(
            f"The camera of image {number} is for {camera.width} x {camera.height} pixels but the image has "
            f"{size[0]} x {size[1]}; give the camera of this image, or use Camera.resized."
        )


def _known_cameras(matches: Matches, camera0: Camera | None, camera1: Camera | None) -> tuple[Camera, Camera] | None:
    """Return the cameras to use; None if both are unknown and may share a focal length."""
    size0, size1 = matches.size0, matches.size1
    if camera0 is None and camera1 is None and sorted(size0) == sorted(size1):
        return None
    # Images of equal size are assumed to share one camera.
    if camera0 is None and camera1 is not None and camera1.size == size0:
        camera0 = replace(camera1, source="that of image 1", cam_from_world=None)
    if camera1 is None and camera0 is not None and camera0.size == size1:
        camera1 = replace(camera0, source="that of image 0", cam_from_world=None)
    return camera0 or Camera.guessed(size0), camera1 or Camera.guessed(size1)


def _shared_focal_cameras(
    points0: FloatArray, points1: FloatArray, matches: Matches, options: dict[str, Any]
) -> tuple[Camera, Camera]:
    """Return cameras with one estimated focal length, or with a guessed one if the estimation fails."""
    guessed0, guessed1 = Camera.guessed(matches.size0), Camera.guessed(matches.size1)
    if len(points0) < _FEWEST_SHARED_FOCAL:
        return guessed0, guessed1
    pair, stats = import_poselib().estimate_shared_focal_relative_pose(
        # Centered here, because PoseLib takes a single principal point, and a rotated image has a different one.
        points0 - guessed0.K[:2, 2],
        points1 - guessed1.K[:2, 2],
        np.zeros(2),
        options,
        {},
    )
    if _flags(stats, len(points0)).sum() < _FEWEST_SHARED_FOCAL:
        return guessed0, guessed1
    focal_px = float(pair.camera1.focal())
    low, high = _PLAUSIBLE_FOCAL
    if not low <= focal_px / max(matches.size0) <= high:
        return guessed0, guessed1
    source = f"estimated focal length {focal_px:.0f} px"
    return (
        Camera.from_focal(matches.size0, focal_px, source=source),
        Camera.from_focal(matches.size1, focal_px, source=source),
    )


def _flags(stats: dict[str, Any], count: int) -> BoolArray:
    """Return inlier flags; PoseLib returns an empty list if it did not start."""
    flags = np.array(stats["inliers"], dtype=bool)
    return flags if len(flags) == count else np.zeros(count, dtype=bool)


def _left_by_rotation_px(points0: FloatArray, points1: FloatArray, cameras: tuple[Camera, Camera]) -> FloatArray:
    """Return the angles (n,) between rays that the best rotation leaves, in pixels at the center of image 1.

    The rotation minimizes the sum of angles. The rotation of the pose is not suitable, because without parallax it
    divides the motion between R and t arbitrarily.
    """
    rays = [camera.rays(points) for camera, points in zip(cameras, (points0, points1), strict=True)]
    rays0, rays1 = (at / np.linalg.norm(at, axis=1, keepdims=True) for at in rays)
    weights, angles = np.ones(len(rays0)), np.zeros(len(rays0))
    for _ in range(_ROTATION_SWEEPS if len(rays0) else 0):
        U, _, Vt = np.linalg.svd((rays1 * weights[:, None]).T @ rays0)
        R = U @ np.diag([1, 1, np.linalg.det(U @ Vt)]) @ Vt
        angles = 2 * np.arcsin(np.clip(np.linalg.norm(rays0 @ R.T - rays1, axis=1) / 2, 0, 1))
        weights = 1 / np.maximum(angles, 1e-9 + 1e-2 * np.median(angles))
    return angles * cameras[1].focal_px


def _explained(
    left_px: FloatArray,
    pose: FloatArray,
    points0: FloatArray,
    points1: FloatArray,
    cameras: tuple[Camera, Camera],
    threshold_px: float,
) -> bool:
    """Return whether a rotation with residuals `left_px` (n,) explains the motion of the inliers."""
    if not len(left_px):
        return False
    rms_px = float(np.sqrt(np.nanmean(pose_distance_px(pose, *cameras, points0, points1) ** 2)))
    # The threshold truncates the noise; in the limit of a wide distribution the inliers are uniform.
    cut = min(rms_px / (threshold_px / np.sqrt(3)), 0.99)
    deviation_px = rms_px / np.sqrt(1 - cut**4)
    return float(np.mean(left_px > max(threshold_px, _DEVIATIONS * deviation_px))) < _UNEXPLAINED


def _distance_from_line_px(points: FloatArray) -> float:
    """Return the largest distance of points (n, 2) from their best-fitting line."""
    centered = points - points.mean(axis=0)
    normal = np.linalg.svd(centered.T @ centered)[0][:, 1]
    return float(np.abs(centered @ normal).max())


def _condition(H: FloatArray, points0: FloatArray, points1: FloatArray) -> float:
    """Return the condition number of H in coordinates where the points are centered with unit spread."""
    normalizing0, normalizing1 = _normalizing(points0), _normalizing(points1)
    return float(np.linalg.cond(normalizing1 @ H @ np.linalg.inv(normalizing0)))


def _normalizing(points: FloatArray) -> FloatArray:
    scale = 1 / points.std()
    x, y = points.mean(axis=0)
    return np.array([[scale, 0, -scale * x], [0, scale, -scale * y], [0, 0, 1]])
