"""Tests of quality "high" for rotated and zoomed images, and of scenes with two motions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import View as SceneView
from conftest import oracle_matcher, same_matches, texture

import dualrc
from dualrc.errors import ConfigError
from dualrc.geometry import apply_homography
from dualrc.matcher import rematch
from dualrc.matcher.views import View, see
from dualrc.matches import Matches
from dualrc.pixels import in_image
from dualrc.scenes import Light, look_at, make_scene, render


def similarity(center, degrees: float, scale: float, to) -> np.ndarray:
    """Return the homography that rotates and scales about `center` and moves it to `to`."""
    angle = np.radians(degrees)
    H = np.eye(3)
    H[:2, :2] = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    H[:2, 2] = np.array(to) - H[:2, :2] @ center
    return H


def brought(image, image_from_frame, size, shrinks):
    """Return an image in a frame, and where it is visible."""
    view = View(image_from_view=image_from_frame, size=size, shrinks=shrinks)
    seen, places = see(torch.from_numpy(np.array(image)), image.shape[1::-1], [view])
    return seen[0].numpy(), in_image(places[0], image.shape[1::-1]).numpy()


def made_matches(H, size=(300, 200), outliers: float = 0.5, count: int = 800) -> Matches:
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, size, (count, 2))
    points1 = np.asarray(apply_homography(H, points0))
    wrong = rng.uniform(size=count) < outliers
    points1[wrong] = rng.uniform(0, size, (int(wrong.sum()), 2))
    scores = np.where(wrong, 0.3, 0.6) * rng.uniform(0.5, 1.5, count)
    return Matches(points0=points0, points1=points1, scores=scores, size0=size, size1=size)


def test_the_motion_that_matches_share():
    H = similarity((150, 100), 40, 0.5, (140, 90))
    motion = rematch.shared_motion(made_matches(H))
    assert motion.enlarges == pytest.approx(0.5, rel=1e-3)
    assert np.allclose(motion.frame1_from_0 / motion.frame1_from_0[2, 2], H, atol=1e-2)


def test_matches_that_share_no_motion():
    assert rematch.shared_motion(made_matches(np.eye(3), outliers=1.0)) is None
    assert rematch.shared_motion(made_matches(np.eye(3), count=20)) is None
    assert rematch.shared_motion(Matches.none({})) is None
    mirror = np.array([[-1.0, 0, 300], [0, 1, 0], [0, 0, 1]])
    assert rematch.shared_motion(made_matches(mirror, outliers=0.0)) is None


@pytest.mark.parametrize("scale", [0.6, 1.0, 2.5])
def test_an_image_is_brought_into_a_frame(scale):
    x, y = np.meshgrid(np.arange(240), np.arange(180))
    image = np.stack([x, y, 100 + 0 * x], axis=-1).astype(np.uint8)  # colours tell the place
    image_from_frame = similarity((50, 40), 30, scale, (120, 90))
    seen, where = brought(image, image_from_frame, (100, 80), scale)
    assert seen.shape == (80, 100, 3) and where.shape == (80, 100)
    frame = np.stack(np.meshgrid(np.arange(100), np.arange(80)), axis=-1)
    places = apply_homography(image_from_frame, frame.reshape(-1, 2)).reshape(80, 100, 2)
    inner = np.all((places > 5) & (places < (234, 174)), axis=2)
    assert inner.sum() > 500 and where[inner].all()
    assert np.abs(seen[inner][:, :2] - places[inner]).max() < 1.5
    assert not where[np.any((places < -3) | (places > (243, 183)), axis=2)].any()


def test_each_square_has_the_matches_of_the_pass_with_higher_scores():
    def at(points, score):
        points = np.array(points, dtype=np.float32).reshape(-1, 2)
        return Matches(
            points0=points, points1=points, scores=np.full(len(points), score), size0=(500, 400), size1=(500, 400)
        )

    second, first = at([[3, 3], [5, 5], [200, 200], [405, 5]], 0.5), at([[4, 4], [300, 50], [406, 6]], 0.7)
    # Two matches of the second pass weigh more than one of the first; elsewhere a single match decides.
    assert rematch.joined(second, first).points0.tolist() == [[300, 50], [406, 6], [3, 3], [5, 5], [200, 200]]
    # The second pass is kept if both are equal.
    assert rematch.joined(at([[3, 3]], 0.5), at([[4, 4]], 0.5)).points0.tolist() == [[3, 3]]
    assert (
        len(rematch.joined(at([], 0.5), at([[11, 11]], 0.7)))
        == len(rematch.joined(at([[9, 9]], 0.5), at([], 0.7)))
        == 1
    )
    assert len(rematch.joined(at([], 0.5), at([], 0.7))) == 0


def test_a_second_look_keeps_pixels_masks_and_limits():
    view0, view1 = SceneView(203, 150, (60, 80)), SceneView(300, 260, (60, 80), (0.7, 0.6))
    matcher, images = oracle_matcher(), (view0.image(1), view1.image(2))
    found = matcher.match(*images, quality="high")
    error = np.linalg.norm(view1.from_scene(view0.to_scene(found.points0)) - found.points1, axis=1)
    assert len(found) > 500 and np.median(error) < 0.7
    assert (np.diff(found.scores) <= 0).all() and found.size1 == (300, 260)
    assert len(matcher.match(*images, quality="high", top=50)) == 50
    mask0, mask1 = np.zeros((150, 203), bool), np.ones((260, 300), bool)
    mask0[:, :100], mask1[:130] = True, False
    inside = matcher.match(*images, quality="high", mask0=mask0, mask1=mask1)
    assert len(inside) > 20
    assert (inside.points0[:, 0] < 100.5).all() and (inside.points1[:, 1] > 129.5).all()
    pairs = [images, ("missing.jpg", images[1])]
    assert same_matches(next(matcher.match_many([images], quality="high")), found)
    many = list(oracle_matcher(quality="high").match_many(pairs, errors="empty"))
    assert np.array_equal(many[0].points0, found.points0) and "missing.jpg" in many[1].info["error"]


def test_a_second_look_needs_images():
    matcher, image = oracle_matcher(), SceneView(64, 64).image()
    with pytest.raises(ConfigError, match="pass images instead of features"):
        matcher.match(matcher.features(image), image, quality="high")
    with pytest.raises(ConfigError, match="choose standard, high, search"):
        matcher.match(image, image, quality="best")


@pytest.fixture(scope="module")
def photograph():
    """Render an image of a synthetic town."""
    view = look_at((4.0, -9.0, 3.0), (0.0, 2.5, 1.8), size=(480, 360), fov_deg=50)
    return np.asarray(render(make_scene(3, texture_size=256), view, Light(), supersample=1).image)


@pytest.fixture(scope="module")
def shipped():
    return dualrc.load(device="cpu")


def share_right(matches, H, px: float = 3.0) -> float:
    return float(np.mean(np.linalg.norm(apply_homography(H, matches.points0) - matches.points1, axis=1) < px))


def test_a_second_look_at_a_turned_and_zoomed_image(photograph, shipped):
    there = similarity((240, 180), 35, 0.5, (130, 100))
    small, _ = brought(photograph, np.linalg.inv(there), (260, 200), 2.0)
    standard = shipped.match(photograph, small)
    high = shipped.match(photograph, small, quality="high")
    right = [share_right(found, there, px=1.0) * len(found) for found in (standard, high)]
    assert share_right(high[:300], there) > 0.9 and right[1] >= right[0]


@pytest.mark.parametrize("quality", ["standard", "high"])
def test_two_motions_at_once(photograph, shipped, quality):
    """The matcher fits no single motion: both halves keep their matches."""
    shifts = np.array([(14.0, 9.0), (-17.0, -6.0)])
    moved = texture(1, 480, 360)
    for half, (x, y) in zip((slice(30, 210), slice(270, 450)), shifts.astype(int), strict=True):
        moved[30 + y : 330 + y, half.start + x : half.stop + x] = photograph[30:330, half]
    # Matches with the dominant motion rank first; the others follow.
    found = shipped.match(photograph, moved, top=1000 if quality == "standard" else 4000, quality=quality)
    for half, shift in ((found.points0[:, 0] < 240, shifts[0]), (found.points0[:, 0] >= 240, shifts[1])):
        error = np.linalg.norm(found.points0 + shift - found.points1, axis=1)[half]
        assert half.sum() > 50
        assert np.mean(error < 2) > 0.8


@pytest.mark.parametrize(
    ("width", "settings", "seen"),
    [
        # To 1024 px, but at most by a factor of three.
        (512, {}, (1024, 768)),
        (160, {}, (480, 352)),
        # A given size and a smaller limit hold.
        (512, {"size": 320}, (320, 240)),
        (512, {"max_size": 640}, (640, 480)),
    ],
)
def test_the_higher_qualities_enlarge_small_images(width, settings, seen):
    image = texture(1, width, width * 3 // 4)
    matcher = oracle_matcher(**settings)
    assert matcher.match(image, image, quality="high", top=10).info["network_size0"] == seen
    assert max(matcher.match(image, image, top=10).info["network_size0"]) <= width


def test_a_warning_is_dropped_where_the_pair_score_contradicts_it(photograph, shipped):
    """The higher qualities can find matches after the first pass warned that there are none."""

    def selected(image0, image1):
        pair = shipped.features(image0), shipped.features(image1)
        raw = next(shipped.match_uncalibrated([pair], shipped.config))
        return shipped.selected(
            replace(raw, info={**raw.info, "warning": "The first pass found nothing."}), shipped.config
        )

    found = selected(photograph[:, :400], photograph[:, 80:])
    assert found.pair_score > 0.9 and "warning" not in found.info
    found = selected(texture(5, 400, 300), photograph)
    assert found.pair_score < 0.05 and "warning" in found.info
