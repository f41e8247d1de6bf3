"""Tests of the scene renderer: its ground truth is exact, and its images agree with it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dualrc.errors import ConfigError, DataError
from dualrc.scenes import Light, correspond, look_at, make_pair, make_scene, render
from dualrc.scenes.world import Builder

SMALL = {"size": (160, 120), "texture_size": 128}


@pytest.fixture(scope="module")
def pair():
    return make_pair(3, light_change=0.0, **SMALL)


@pytest.fixture(scope="module")
def scene():
    return make_scene(0, texture_size=64)


def grid_points(size, step=3.0):
    x, y = np.meshgrid(np.arange(0.3, size[0] - 1, step), np.arange(0.6, size[1] - 1, step))
    return np.stack([x, y], axis=-1).reshape(-1, 2)


def sample(image, points):
    """Return bilinear colors (n, 3) at points inside of the image."""
    x, y = points.T
    column, row = np.clip(np.floor(x), 0, image.shape[1] - 2), np.clip(np.floor(y), 0, image.shape[0] - 2)
    right, down = (x - column)[:, None], (y - row)[:, None]
    column, row, image = column.astype(int), row.astype(int), image.astype(float)
    above = image[row, column] * (1 - right) + image[row, column + 1] * right
    below = image[row + 1, column] * (1 - right) + image[row + 1, column + 1] * right
    return above * (1 - down) + below * down


def wall_scene(scene, *boxes):
    """Return a scene of boxes (center, half sizes) with the textures of another scene."""
    builder = Builder(np.random.default_rng(0))
    for center, half in boxes:
        builder.add(("wall", "box", center, half, "bricks", "", 2.0), np.zeros(3), np.ones(3), 0.0)
    return replace(scene, solids=tuple(builder.solids))


def test_same_seed_same_images():
    first, second, other = (make_pair(seed, size=(64, 48), texture_size=64) for seed in (5, 5, 6))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.image, b.image)
        assert torch.equal(a.depth, b.depth)
        assert np.array_equal(a.view.cam_from_world, b.view.cam_from_world)
    assert not torch.equal(first.rendering0.image, other.rendering0.image)


def test_image_and_depth_have_the_promised_types(pair):
    image, depth = pair.rendering0.image, pair.rendering0.depth
    assert image.shape == (120, 160, 3)
    assert image.dtype == torch.uint8
    assert depth.shape == (120, 160)
    assert depth.dtype == torch.float32
    assert depth.isfinite().all()
    assert float(image.float().std()) > 20


def test_depth_of_a_wall_is_its_distance(scene):
    walls = wall_scene(scene, ((0, 8, 0), (50, 1, 50)))
    image = render(walls, look_at((0, 0, 0), (0, 1, 0), size=(40, 30)), supersample=1)
    assert torch.allclose(image.depth, torch.full((30, 40), 7.0), atol=1e-4)


def test_depth_of_a_sphere_is_analytic(scene):
    builder = Builder(np.random.default_rng(0))
    builder.add(("ball", "sphere", (0, 5, 0), (1, 1, 1), "bricks", "", 2.0), np.zeros(3), np.ones(3), 0.0)
    view = look_at((0, 0, 0), (0, 5, 0), size=(41, 31), fov_deg=40)
    depth = render(replace(scene, solids=tuple(builder.solids)), view, supersample=1).depth.numpy()
    x, y = np.meshgrid(np.arange(41), np.arange(31))
    rays = np.stack([x - 20, y - 15, np.full_like(x, view.K[0, 0], dtype=float)], axis=-1) / view.K[0, 0]
    a, b = (rays**2).sum(axis=-1), 5 * rays[..., 2]
    square = b**2 - a * 24
    expected = np.where(square > 0, (b - np.sqrt(np.maximum(square, 0))) / a, 0)
    rim = np.abs(square) < 1e-3
    np.testing.assert_allclose(depth[~rim], expected[~rim], atol=1e-4)


def test_depth_agrees_with_correspondence(pair):
    """A pixel unprojected with its depth and projected to the other camera agrees with `correspond`."""
    first, second = pair
    y, x = np.nonzero(first.depth.numpy() > 0)
    points1 = correspond(first, second, np.stack([x, y], axis=-1)).points1.numpy()
    rays = np.linalg.inv(first.view.K) @ np.stack([x, y, np.ones_like(x)])
    pose0, pose1 = first.view.cam_from_world, second.view.cam_from_world
    world = pose0[:, :3].T @ (rays * first.depth.numpy()[y, x] - pose0[:, 3:])
    cam1 = second.view.K @ (pose1[:, :3] @ world + pose1[:, 3:])
    error = np.abs((cam1[:2] / cam1[2]).T - points1).max(axis=1)
    # A pixel center may fall on an edge, where rounding decides between two surfaces.
    assert np.quantile(error[cam1[2] > 1], 0.999) < 1e-2


def test_correspondences_lie_on_epipolar_lines(pair):
    points0 = grid_points(pair.rendering0.view.size)
    points1, _ = correspond(*pair, points0)
    keep = points1.isfinite().all(dim=1).numpy()
    (R0, t0), (R1, t1) = (np.split(r.view.cam_from_world, [3], axis=1) for r in pair)
    R, t = R1 @ R0.T, (t1 - R1 @ R0.T @ t0)[:, 0]
    skew = np.array([[0, -t[2], t[1]], [t[2], 0, -t[0]], [-t[1], t[0], 0]])
    F = np.linalg.inv(pair.rendering1.view.K).T @ skew @ R @ np.linalg.inv(pair.rendering0.view.K)
    ones = np.ones((keep.sum(), 1))
    lines = np.c_[points0[keep], ones] @ F.T
    distance = (np.c_[points1.numpy()[keep], ones] * lines).sum(axis=1) / np.hypot(lines[:, 0], lines[:, 1])
    assert keep.sum() > 500
    assert np.abs(distance).max() < 1e-3


def test_there_and_back(pair):
    points0 = torch.as_tensor(grid_points(pair.rendering0.view.size))
    points1, visible = correspond(*pair, points0)
    back, visible_back = correspond(pair.rendering1, pair.rendering0, points1[visible])
    assert int(visible.sum()) > 500
    assert visible_back.double().mean() > 0.999
    assert (back - points0[visible])[visible_back].abs().max() < 1e-3


def test_a_box_hides_what_is_behind_it(scene):
    boxes = wall_scene(scene, ((0, 10, 0), (20, 1, 20)), ((2, 5, 0), (0.5, 0.5, 0.5)))
    views = look_at((0, 0, 0), (0, 10, 0), size=(101, 101)), look_at((4, 0, 0), (0, 9, 0), size=(101, 101))
    first, second = (render(boxes, view, supersample=1) for view in views)
    middle = [[50.0, 50.0]]  # at (0, 9, 0), straight ahead of both; the box stands at x = 2, between camera 1 and it
    points1, visible = correspond(first, second, middle)
    np.testing.assert_allclose(points1, middle, atol=1e-9)
    assert not visible.any()
    upper = [[50.0, 20.0]]  # higher up on the wall, above the box
    assert correspond(first, second, upper).visible.all()


def test_plane_has_its_homography():
    pair = make_pair(2, kind="plane", angle_deg=30, **SMALL)
    points0 = grid_points(pair.rendering0.view.size)
    points1, visible = correspond(*pair, points0)
    view0, view1 = (rendering.view for rendering in pair)
    # The face toward the cameras, with normal (0, -1, 0).
    plane = pair.rendering0.scene.solids[0].planes[2]
    (R0, t0), (R1, t1) = ((v.cam_from_world[:, :3], v.cam_from_world[:, 3]) for v in (view0, view1))
    normal, rotation = R0 @ plane[:3], R1 @ R0.T
    H = rotation + np.outer(t1 - rotation @ t0, normal) / (plane[3] + normal @ t0)
    mapped = np.c_[points0, np.ones(len(points0))] @ (view1.K @ H @ np.linalg.inv(view0.K)).T
    mapped = mapped[:, :2] / mapped[:, 2:]
    assert visible.double().mean() > 0.4
    np.testing.assert_allclose(mapped[visible], points1[visible], atol=1e-6)


def test_colours_agree_at_corresponding_points_and_only_there():
    """This holds only if the center of the first pixel is at (0, 0), for images and for points."""
    pair = make_pair(4, size=(320, 240), light_change=0.0, texture_size=256)
    first, second = (rendering.image.numpy() for rendering in pair)
    points0 = grid_points((320, 240), step=2.0)
    points1, visible = (t.numpy() for t in correspond(*pair, points0))
    inside = visible & (points1 > 2).all(axis=1) & (points1 < (317, 237)).all(axis=1)

    def difference(dx, dy):
        return np.abs(sample(first, points0[inside]) - sample(second, points1[inside] + (dx, dy))).mean(axis=1)

    exact = np.median(difference(0, 0))
    assert exact < 4
    for shift in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        assert np.median(difference(*shift)) > 1.5 * exact
    # A shift by half a pixel in either direction is worse, by about the same amount.
    assert np.mean(difference(0, 0)) < min(np.mean(difference(d, d)) for d in (0.5, -0.5))


def test_light_changes_the_image_and_nothing_else(scene):
    view = look_at((0, -11, 4), (0, 3, 1), size=(64, 48))
    day = render(scene, view)
    night = render(scene, view, Light(sun=(0.1, 0.1, 0.2), sky=(0.05, 0.07, 0.1), windows=1.0, noise=3.0))
    assert torch.equal(day.depth, night.depth)
    assert night.image.float().mean() < 0.6 * day.image.float().mean()
    assert torch.equal(night.image, render(scene, view, night.light).image)


def test_a_camera_that_sees_nothing(scene):
    up, square = (render(scene, look_at((0, 0, 9), t, size=(32, 32), fov_deg=20)) for t in ((0, 0, 20), (0, 0, 0)))
    assert not up.depth.any()
    points1, visible = correspond(up, square, grid_points((32, 32), step=1.0))
    assert points1.isnan().all()
    assert not visible.any()


def test_points_behind_the_other_camera_are_nowhere(scene):
    ahead = render(scene, look_at((0, -11, 4), (0, 3, 1), size=(32, 32)))
    away = render(scene, look_at((0, -11, 4), (0, -25, 4), size=(32, 32)))
    points1, visible = correspond(ahead, away, [[16.0, 16.0]])
    assert points1.isnan().all()
    assert not visible.any()


def test_tiny_images_and_no_points():
    pair = make_pair(1, size=(32, 32), texture_size=32, supersample=1)
    assert pair.rendering0.image.shape == (32, 32, 3)
    points1, visible = correspond(*pair, np.zeros((0, 2)))
    assert points1.shape == (0, 2)
    assert visible.shape == (0,)
    assert render(pair.rendering0.scene, look_at((0, -9, 2), (0, 0, 1), size=(1, 1))).image.shape == (1, 1, 3)


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda scene: make_scene(0, kind="moon"), ConfigError, "choose one of square, courtyard, plane"),
        (lambda scene: make_scene(0, texture_size=500), ConfigError, "power of two"),
        (lambda scene: make_scene(-1), ConfigError, "0 or more"),
        (lambda scene: look_at((0, 0, 0), (0, 0, 0), size=(8, 8)), ConfigError, "target different from the eye"),
        (lambda scene: look_at((0, 0, 0), (0, 1, 0), size=(0, 8)), ConfigError, "size of at least 1 x 1"),
        (lambda scene: look_at((0, 0, 0), (0, 1, 0), size=(8, 8), fov_deg=180), ConfigError, "fov_deg < 180"),
        (lambda scene: render(scene, look_at((0, 0, 0), (0, 1, 0), size=(8, 8)), supersample=0), ConfigError, "1 or"),
        (lambda scene: make_pair(0, zoom=0.5), ConfigError, "zoom >= 1"),
        (lambda scene: make_pair(0, min_overlap=0.999, **SMALL), ConfigError, "lower min_overlap"),
    ],
)
def test_mistakes_name_their_remedy(scene, call, error, remedy):
    with pytest.raises(error, match=remedy):
        call(scene)


def test_a_courtyard_has_the_same_houses_on_each_side_in_another_order():
    solids = make_scene(3, kind="courtyard", texture_size=32).solids
    walls = solids[1:61]  # after the ground: four sides of five houses of three parts each
    sides = [walls[start : start + 15 : 3] for start in range(0, 60, 15)]
    looks = [[(house.textures, tuple(house.tint.round(9))) for house in side] for side in sides]
    assert all(sorted(look) == sorted(looks[0]) for look in looks) and len(set(looks[0])) == 5
    assert len({tuple(look) for look in looks}) > 1
    # They stand around an open middle.
    assert all(np.abs(house.corners[:, :2]).max(axis=1).min() > 11 for side in sides for house in side)


def test_mistaken_correspondences_name_their_remedy(scene, pair):
    other = render(scene, look_at((0, -11, 4), (0, 3, 1), size=(8, 8)))
    with pytest.raises(DataError, match="last axis"):
        correspond(*pair, np.zeros((4, 3)))
    with pytest.raises(DataError, match="from one Scene"):
        correspond(pair.rendering0, other, [[0.0, 0.0]])
