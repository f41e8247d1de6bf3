"""Epipolar geometry: matrices of a pose, distances of matches to them, and depths."""

import numpy as np
import numpy.typing as npt

from dualrc.geometry.camera import Camera, cross_matrix
from dualrc.geometry.homography import to_homogeneous
from dualrc.geometry.lens import solve
from dualrc.types import FloatArray


def essential_from_pose(cam1_from_cam0: npt.ArrayLike) -> FloatArray:
    """Return E = [t]x R, with x1' E x0 = 0 for rays: (3, 4) -> (3, 3)."""
    pose = np.asarray(cam1_from_cam0, dtype=np.float64)
    return cross_matrix(pose[:, 3]) @ pose[:, :3]


def ray_depths(
    cam1_from_cam0: npt.ArrayLike, rays0: npt.ArrayLike, rays1: npt.ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Triangulate matches: return the depths (n,) along rays (n, 3) of both cameras, and the sines of their angles.

    A depth is negative behind a camera. The depths of parallel rays mean nothing.
    """
    pose, rays = np.asarray(cam1_from_cam0, dtype=np.float64), np.asarray(rays1, dtype=np.float64)
    rotated = np.asarray(rays0, dtype=np.float64) @ pose[:, :3].T
    across = np.cross(rotated, rays)
    squares = np.sum(across**2, axis=1) + 1e-30
    depths0 = -np.sum(np.cross(pose[:, 3], rays) * across, axis=1) / squares
    depths1 = -np.sum(np.cross(pose[:, 3], rotated) * across, axis=1) / squares
    return depths0, depths1, np.sqrt(squares) / np.linalg.norm(rotated, axis=1) / np.linalg.norm(rays, axis=1)


def fundamental_from_pose(cam1_from_cam0: npt.ArrayLike, camera0: Camera, camera1: Camera) -> FloatArray:
    """Return F of norm 1, with x1' F x0 = 0 for undistorted pixels; zero if the cameras share one center."""
    F = np.linalg.inv(camera1.K).T @ essential_from_pose(cam1_from_cam0) @ np.linalg.inv(camera0.K)
    return F / (np.linalg.norm(F) or 1.0)


def sampson_distance_px(F: npt.ArrayLike, points0: npt.ArrayLike, points1: npt.ArrayLike) -> FloatArray:
    """Return the Sampson distance, the first-order distance of both points (n, 2) to agreement with F: (n,)."""
    lines1, lines0 = _epipolar_lines(F, points0), _epipolar_lines(np.asarray(F).T, points1)
    residuals = np.abs(np.sum(to_homogeneous(points1) * lines1, axis=1))
    return _ratio(residuals, np.sqrt(np.sum(lines1[:, :2] ** 2, axis=1) + np.sum(lines0[:, :2] ** 2, axis=1)))


def epipolar_distance_px(F: npt.ArrayLike, points0: npt.ArrayLike, points1: npt.ArrayLike) -> FloatArray:
    """Return the distance of each point of image 1 to the epipolar line of its point in image 0: (n,)."""
    lines1 = _epipolar_lines(F, points0)
    residuals = np.abs(np.sum(to_homogeneous(points1) * lines1, axis=1))
    return _ratio(residuals, np.linalg.norm(lines1[:, :2], axis=1))


def pose_distance_px(
    cam1_from_cam0: npt.ArrayLike,
    camera0: Camera,
    camera1: Camera,
    points0: npt.ArrayLike,
    points1: npt.ArrayLike,
    *,
    in_image1: bool = False,
) -> FloatArray:
    """Return the first-order distance of both points (n, 2) to agreement with a pose, in distorted pixels: (n,).

    This is the Sampson distance through both lenses. `in_image1` moves the point of image 1 only, which gives the
    distance to the epipolar curve there. Pixels outside the range of a lens give NaN.
    """
    E = essential_from_pose(cam1_from_cam0)
    rays0, rays1 = camera0.rays(points0), camera1.rays(points1)
    residuals = np.abs(np.sum(rays1 @ E * rays0, axis=1))
    # Derivatives of the residual by pixels: the derivatives by rays times the inverse of d pixels / d rays.
    slopes1 = solve(camera1.pixels_by_rays(rays1).swapaxes(1, 2), (rays0 @ E.T)[:, :2])
    squares = np.sum(slopes1**2, axis=1)
    if not in_image1:
        slopes0 = solve(camera0.pixels_by_rays(rays0).swapaxes(1, 2), (rays1 @ E)[:, :2])
        squares = squares + np.sum(slopes0**2, axis=1)
    return _ratio(residuals, np.sqrt(squares))


def _epipolar_lines(F: npt.ArrayLike, points: npt.ArrayLike) -> FloatArray:
    """Return lines (a, b, c) in the other image with a x + b y + c = 0: (n, 2) -> (n, 3)."""
    return to_homogeneous(points) @ np.asarray(F, dtype=np.float64).T


def _ratio(numerators: FloatArray, denominators: FloatArray) -> FloatArray:
    """Return quotients; NaN where undefined."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return numerators / denominators
