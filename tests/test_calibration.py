"""Tests of calibration: scores are probabilities on one scale, and the pair score reflects the evidence."""

import json
import shutil
import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from conftest import tiny_network
from PIL import Image, ImageDraw, ImageFont

import dualrc
from dualrc import scenes
from dualrc.calibration import Calibration, Curve, PairModel
from dualrc.config import MatcherConfig
from dualrc.errors import ConfigError, WeightsError
from dualrc.evidence import collect
from dualrc.matcher import Matcher
from dualrc.matches import Matches
from dualrc.model.checkpoint import (
    bundled,
    calibration_path,
    file_hash,
    read_calibration,
    save_calibration,
    save_weights,
)

CURVE = Curve(scores=(0.0, 0.1, 1.0), probabilities=(0.05, 0.8, 0.99))
MODEL = PairModel(bias=-8.0, strength=1.0, motion=6.0, epipolar=7.0)
SIZE = (640, 480)


def made(points0, points1, scores, size=SIZE, **info) -> Matches:
    scores = np.broadcast_to(np.asarray(scores, np.float32), len(points0))
    info = {"pair_model": vars(MODEL)} | info
    return Matches(points0=points0, points1=points1, scores=scores, size0=size, size1=size, info=info).top(10**6)


def scattered(count: int, seed: int = 0, low=(0, 0), high=SIZE) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, (count, 2))


def moved(points: np.ndarray) -> np.ndarray:
    """Return points rotated, scaled and shifted."""
    return (points - 320) @ np.array([[0.9, 0.35], [-0.35, 0.9]]) + (310, 250)


def joined(*parts: Matches) -> Matches:
    names = ("points0", "points1", "scores")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **arrays, whole=None)


TRUE = made(scattered(600), moved(scattered(600)), 0.9)
FALSE = made(scattered(600), scattered(600, seed=1), 0.3)
STAMP = made(scattered(300, 2, (440, 440), (620, 465)), scattered(300, 2, (440, 440), (620, 465)), 0.98)


def test_a_curve_keeps_the_order_of_scores():
    scores = np.sort(np.random.default_rng(0).uniform(0, 1, 1000)).astype(np.float32)
    found = CURVE(scores)
    assert found.dtype == np.float32 and (np.diff(found) >= 0).all() and found.min() >= 0.05 and found.max() <= 0.99
    assert CURVE([0.0, 0.1, 1.0, 7.0]).tolist() == pytest.approx([0.05, 0.8, 0.99, 0.99])
    assert CURVE(np.zeros((2, 3))).shape == (2, 3)


@pytest.mark.parametrize(
    ("scores", "probabilities"),
    [
        ((0.0,), (0.1,)),
        ((0.0, 1.0), (0.1,)),
        ((0.1, 1.0), (0.1, 0.2)),
        ((0.0, 1.0), (0.2, 0.1)),
        ((0.0, 1.0), (0.2, 1.1)),
    ],
)
def test_curves_that_are_none(scores, probabilities):
    with pytest.raises(ConfigError, match="curve"):
        Curve(scores=scores, probabilities=probabilities)


def test_related_pairs_are_told_from_others():
    assert TRUE.pair_score > 0.99
    assert FALSE.pair_score < 0.05
    assert Matches.none({"pair_model": vars(MODEL)}).pair_score < 0.01
    assert made(scattered(5), moved(scattered(5)), 0.9).pair_score < 0.05


def test_good_scores_without_agreement_are_doubted():
    """A look-alike has good scores, but its parts move differently."""
    where, score = scattered(600), 0.8
    parts = (np.floor(where / (160, 120)) @ (1, 4)).astype(int)
    shifts = np.random.default_rng(3).uniform(-250, 250, (16, 2))
    alike = made(where, np.clip(where + shifts[parts], 0, (639, 479)), score)
    assert alike.pair_score < 0.7 < made(where, moved(where), score).pair_score


@pytest.mark.parametrize("pair", [TRUE, FALSE], ids=["true", "false"])
def test_a_stamp_has_no_vote(pair):
    stamped = joined(pair, STAMP)
    assert stamped.pair_score == pytest.approx(pair.pair_score, abs=0.02)


@pytest.mark.parametrize(
    ("low", "high"),
    [((0, 400), (640, 480)), ((0, 0), (640, 90)), ((0, 0), (40, 480)), ((200, 210), (440, 250))],
    ids=["caption", "bar", "frame", "watermark"],
)
def test_what_both_images_carry_has_no_vote(low, high):
    where = scattered(1500, 4, low, high)
    assert joined(FALSE, made(where, where, 0.97)).pair_score < 0.05
    slid = where + np.array([30.0, 0]) * (high[0] - low[0] > 300) + np.array([0, 30.0]) * (high[1] - low[1] > 300)
    if low != (200, 210):  # along an edge, features can't tell places apart
        assert joined(FALSE, made(where, np.clip(slid, 0, (639, 479)), 0.9)).pair_score < 0.05


def test_stamps_at_the_corner_of_images_of_two_sizes():
    corner = scattered(300, 5, (440, 440), (620, 465))
    other = replace(made(corner, corner + np.array([160, 120]), 0.98), size1=(800, 600))
    plain = replace(FALSE, size1=(800, 600), points1=FALSE.points1 * 1.25, whole=None)
    assert joined(plain, replace(other, whole=None)).pair_score < 0.05


def test_a_still_camera_is_evidence():
    """If the centers of the images do not move either, the camera is still."""
    assert made(scattered(600), scattered(600), 0.9).pair_score > 0.99
    pan = scattered(600)
    assert made(pan, pan + np.array([80, 0]), 0.9).pair_score > 0.9


def test_exchanging_the_images_changes_no_verdict():
    for pair in (TRUE, FALSE, joined(TRUE, FALSE)):
        assert pair.swapped().pair_score == pytest.approx(pair.pair_score, abs=1e-6)


def test_points_that_are_not_there_are_no_evidence():
    points1 = TRUE.points1.copy()
    points1[::3] = np.nan
    assert replace(TRUE, points1=points1, whole=None).pair_score > 0.99
    assert collect(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(0), (0, 0), (0, 0)).epipolar == 0


def test_a_selection_has_the_score_of_its_pair(tmp_path):
    few = TRUE[:20]
    assert len(few) == 20 and few.pair_score == TRUE.pair_score == few[:3].above(0.5).pair_score
    assert few.swapped().pair_score == pytest.approx(TRUE.pair_score)
    for name in ("few.npz", "few.json", "few.csv"):
        few.save(tmp_path / name)
        assert Matches.load(tmp_path / name).pair_score == pytest.approx(TRUE.pair_score)
    with dualrc.MatchStore(tmp_path / "matches.sqlite", {"made": "up"}) as store:
        store.put("a", "b", few)
        assert store.get("a", "b").pair_score == pytest.approx(TRUE.pair_score)


def test_a_calibration_lies_beside_its_weights(tmp_path):
    weights = tmp_path / "mine.safetensors"
    save_weights(tiny_network(), weights)
    assert read_calibration(weights) is None and dualrc.load(weights=weights, device="cpu").calibration is None
    calibration = Calibration(weights=file_hash(weights), matches=CURVE, points=CURVE, pairs=MODEL)
    save_calibration(calibration, weights)
    assert read_calibration(weights) == calibration
    matcher = dualrc.load(weights=weights, device="cpu")
    assert matcher.calibration == calibration and matcher.info["calibration"] == calibration.hash
    other = tmp_path / "other.safetensors"
    save_weights(tiny_network(seed=1), other)
    shutil.copy(calibration_path(weights), calibration_path(other))
    with pytest.warns(UserWarning, match="other weights"):
        assert read_calibration(other) is None
    for text in ("{", "[]", '{"weights": 3}', json.dumps(json.loads(calibration_path(other).read_text()) | {"x": 1})):
        calibration_path(other).write_text(text)
        with pytest.raises(WeightsError, match=r"calibrate\.py"):
            read_calibration(other)


def test_calibration_keeps_the_order_and_selects_on_its_scale():
    network = tiny_network()
    calibration = Calibration(weights="", matches=CURVE, points=CURVE, pairs=MODEL)
    plain = Matcher(network, MatcherConfig(), device="cpu")
    matcher = Matcher(network, MatcherConfig(), device="cpu", calibration=calibration)
    pair = images()[0][:, :, :][::2, ::2], images()[1][::2, ::2]
    before, after = plain.match(*pair), matcher.match(*pair)
    # A matcher with a calibration leaves out what has no texture.
    kept = {*map(tuple, after.points0)}
    before = before[np.array([tuple(point) in kept for point in before.points0])]
    assert len(after) > 50
    assert np.array_equal(before.points0, after.points0) and np.array_equal(before.points1, after.points1)
    assert np.allclose(after.scores, CURVE(before.scores))
    middle = float(np.median(after.scores))
    chosen = matcher.match(*pair, min_score=middle, top=7)
    assert len(chosen) <= 7 and (chosen.scores >= middle).all() and chosen.pair_score == after.pair_score
    points = [[20.0, 30.0], [200.0, 100.0]]
    asked = plain.match_points(*pair, points), matcher.match_points(*pair, points)
    known = asked[0].scores > 0
    assert np.allclose(asked[1].scores, np.where(known, CURVE(asked[0].scores), 0))
    warps = plain.warp(*pair), matcher.warp(*pair, min_score=0.5)
    assert not ((warps[1].certainty > 0) & (warps[1].certainty < 0.5)).any()
    assert (np.isnan(warps[1].points1) == (warps[1].certainty == 0)[:, :, None]).all()
    assert (warps[1].certainty > 0).sum() <= (warps[0].certainty > 0).sum()


# The tests below run the bundled weights.

needs_weights = pytest.mark.skipif(bundled("default") is None, reason="the package carries no weights")


@cache
def scene_pair() -> scenes.ScenePair:
    return scenes.make_pair(3, size=(480, 368), angle_deg=15, supersample=1, texture_size=256)


def images() -> tuple[np.ndarray, np.ndarray]:
    return scene_pair().rendering0.image.numpy(), scene_pair().rendering1.image.numpy()


@cache
def matcher() -> Matcher:
    return dualrc.load(device="cpu")


@needs_weights
def test_the_bundled_weights_are_calibrated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration = read_calibration(bundled("default"))
    assert calibration is not None
    assert min(calibration.pairs.strength, calibration.pairs.motion, calibration.pairs.epipolar) > 0


@needs_weights
def test_all_calls_share_one_scale():
    """Scores of matches, of requested points and of a dense warp have the same meaning."""
    pair = scene_pair()
    found = matcher().match(*images())
    grid = np.stack(np.meshgrid(np.arange(4, 480, 12), np.arange(4, 368, 12)), axis=-1).reshape(-1, 2)
    asked = matcher().match_points(*images(), grid)
    warp = matcher().warp(*images())
    dense = warp.points1[grid[:, 1], grid[:, 0]], warp.certainty[grid[:, 1], grid[:, 0]]
    for points0, points1, scores in (
        (found.points0, found.points1, found.scores),
        (grid, asked.points1, asked.scores),
        (grid, *dense),
    ):
        there = scenes.correspond(pair.rendering0, pair.rendering1, points0)
        true = np.where(there.visible.numpy()[:, None], there.points1.numpy(), np.inf)
        right = np.linalg.norm(true - np.nan_to_num(points1, nan=-1e6), axis=1) < 3
        known = scores > 0
        assert abs(right[known].mean() - scores[known].mean()) < 0.1
        assert right[scores >= 0.9].mean() > 0.85 and right[known & (scores < 0.3)].mean() < 0.5
        assert 0.3 < (scores > 0.5).mean() < 0.97


@needs_weights
def test_nothing_is_known_of_what_is_not_to_be_seen():
    first, second = images()
    second = second.copy()
    second[:, 240:] = 128
    warp = matcher().warp(first, second)
    unknown = np.isnan(warp.points1).all(axis=2)
    assert (unknown == (warp.certainty == 0)).all() and 0.1 < unknown.mean() < 0.95


@needs_weights
@pytest.mark.parametrize("kind", ["plain", "stamp", "bars", "sky"])
def test_pairs_of_images(kind):
    """Two views of a square, and the square with an unrelated wall of posters."""
    first, second = (Image.fromarray(pixels) for pixels in images())
    posters = scenes.make_pair(4, kind="plane", size=(480, 368), supersample=1, texture_size=256)
    other = Image.fromarray(posters.rendering0.image.numpy())
    for image in (first, second, other):
        pen, font = ImageDraw.Draw(image), ImageFont.load_default(22)
        if kind == "stamp":
            pen.text((260, 335), "16.11.2026 19:12", (255, 170, 40), font)
        elif kind == "bars":
            pen.rectangle((0, 0, 480, 45), fill=0)
            pen.rectangle((0, 322, 480, 368), fill=0)
            pen.text((30, 332), "The old town, part two", (255, 255, 255), font)
        elif kind == "sky":
            for row in range(150):
                pen.line((0, row, 480, row), fill=(120 + row // 3, 160 + row // 3, 230))
    assert matcher().match(first, second).pair_score > 0.9
    assert matcher().match(first, other).pair_score < 0.1
