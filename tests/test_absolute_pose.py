"""Tests of absolute poses from 2D-3D correspondences."""

import numpy as np
import pytest

from dualrc.errors import DataError
from dualrc.geometry import Camera, absolute_pose

CAMERA = Camera(width=640, height=480, K=np.array([[500.0, 0, 310], [0, 520, 235], [0, 0, 1]]))
POSE = np.array([[0.6, -0.8, 0, 0.1], [0.8, 0.6, 0, 0.2], [0, 0, 1, 6]])


def sample(seed, *, count=300, noise_px=0.0, wrong=0.0, camera=CAMERA, offset=0.0):
    random = np.random.default_rng(seed)
    xyz = random.uniform(-2, 2, (count, 3))
    points = camera.project(xyz @ POSE[:, :3].T + POSE[:, 3]) + random.normal(0, noise_px, (count, 2))
    is_wrong = np.arange(count) < wrong * count
    points[is_wrong] = random.uniform(0, 480, (is_wrong.sum(), 2))
    return points, xyz + offset, ~is_wrong


@pytest.mark.parametrize("known", [True, False])
def test_absolute_pose_among_outliers(known):
    camera = CAMERA if known else Camera.from_focal((640, 480), 700)
    points, xyz, right = sample(1, wrong=0.6, camera=camera)
    found = absolute_pose(points, xyz, camera=camera if known else None, size=(640, 480))
    assert np.allclose(found.cam_from_world, POSE, atol=1e-6)
    assert np.all(found.inliers[right]) and found.inliers.sum() < right.sum() + 10
    assert found.camera.focal_px == pytest.approx(camera.focal_px)
    assert np.allclose(found.center, -POSE[:, :3].T @ POSE[:, 3], atol=1e-6)
    again = absolute_pose(points, xyz, camera=camera if known else None, size=(640, 480))
    assert np.array_equal(again.cam_from_world, found.cam_from_world)


def test_absolute_pose_far_from_the_origin():
    points, xyz, _ = sample(2, offset=1e6)
    found = absolute_pose(points, xyz, camera=CAMERA)
    assert np.allclose(found.center, -POSE[:, :3].T @ POSE[:, 3] + 1e6, atol=1e-6)


def test_the_covariance_says_how_far_poses_are_off():
    squared = []
    for seed in range(30):
        points, xyz, _ = sample(seed, noise_px=0.7, wrong=0.2)
        found = absolute_pose(points, xyz, camera=CAMERA)
        off = found.center + POSE[:, :3].T @ POSE[:, 3]
        squared.append(off @ off / np.trace(found.covariance[3:, 3:]))
        assert np.linalg.eigvalsh(found.covariance).min() > 0
    assert 0.7 < np.sqrt(np.mean(squared)) < 1.4


def test_poses_that_are_open():
    points, xyz, _ = sample(3)
    line = np.linspace(-1, 1, 50)[:, None] * [1.0, 0.5, 0.2]
    on_line = CAMERA.project(line @ POSE[:, :3].T + POSE[:, 3])
    assert absolute_pose(on_line, line, camera=CAMERA).cam_from_world is None
    repeated = absolute_pose(np.repeat(points[:2], 50, axis=0), np.repeat(xyz[:2], 50, axis=0), camera=CAMERA)
    assert repeated.cam_from_world is None and repeated.reason
    random = np.random.default_rng(0).uniform(0, 480, points.shape)
    for camera in (CAMERA, None):
        found = absolute_pose(random, xyz, camera=camera, size=(640, 480), max_iterations=300)
        assert "no pose agrees with 12 of 300" in found.reason and not found.inliers.any()
    assert "0 correspondences are too few" in absolute_pose([], [], camera=CAMERA).reason
    points[:295] = np.nan
    assert "5 correspondences are too few" in absolute_pose(points, xyz, camera=CAMERA).reason
    with pytest.raises(DataError, match="give one pixel per point"):
        absolute_pose(points, xyz[:3], camera=CAMERA)
    with pytest.raises(DataError, match="The camera and the size of its image are both unknown"):
        absolute_pose(points, xyz)
