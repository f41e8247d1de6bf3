"""Tests of the search for another scale, for matches that do not agree with each other."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import SHARED, same_matches, texture
from PIL import Image

import dualrc
from dualrc import agreement
from dualrc.geometry import apply_homography, crop_homography, resize_homography
from dualrc.image import Scale, read
from dualrc.matcher.views import View, extract_shown, match_views, restricted, scale_views, show
from dualrc.matches import Matches
from dualrc.scenes import Light, look_at, make_scene, render
from dualrc.texture import is_suspicious


@pytest.fixture(scope="module")
def shipped():
    return dualrc.load(device="cpu")


@pytest.fixture(scope="module")
def photograph():
    view = look_at((4.0, -9.0, 3.0), (0.0, 2.5, 1.8), size=(640, 480), fov_deg=50)
    return np.asarray(render(make_scene(3, texture_size=256), view, Light(), supersample=1).image)


def resized(image, size):
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))


@pytest.fixture(scope="module")
def shrunk(photograph):
    return resized(photograph, (213, 160))


def share_right(matches, H, px=1.0):
    error = np.linalg.norm(apply_homography(H, matches.points0) - matches.points1, axis=1)[:500]
    return float(np.mean(error < px)) if len(error) else 0.0


def made(points0, points1, size=(640, 480)):
    info = {"network_size0": size, "network_size1": size}
    scores = np.linspace(1, 0, len(points0))
    return Matches(points0=points0, points1=points1, scores=scores, size0=size, size1=size, info=info)


def similar(scale, degrees, wrong, seed=0, count=800):
    rng = np.random.default_rng(seed)
    points0 = rng.uniform(0, (640, 480), (count, 2))
    turn = np.exp(1j * np.radians(degrees)) * scale
    moved = (points0 @ [1, 1j]) * turn
    points1 = np.stack([moved.real, moved.imag], axis=1)
    lost = rng.random(count) < wrong
    points1[lost] = rng.uniform(0, (640, 480), (int(lost.sum()), 2))
    return made(points0, points1)


@pytest.mark.parametrize(("scale", "degrees"), [(1.0, 0), (0.33, 10), (3.0, 178), (0.7, -179)])
def test_matches_vote_for_scale_and_rotation(scale, degrees):
    for wrong, least in ((0.0, 0.95), (0.4, 0.18)):
        found = agreement.measure_agreement(similar(scale, degrees, wrong))
        assert found.share > least and found.scale == pytest.approx(scale, rel=0.06)
        assert found.firm and found.same_scale == (1 / agreement.SAME <= scale <= agreement.SAME)
        back = agreement.measure_agreement(similar(scale, degrees, wrong).swapped())
        assert back.share == pytest.approx(found.share) and back.scale == pytest.approx(1 / found.scale)


def test_matches_by_chance_do_not_agree():
    for seed in range(20):
        assert agreement.measure_agreement(similar(1.0, 0, 1.0, seed)).share < agreement.ENOUGH / 2
    assert not agreement.measure_agreement(similar(1, 0, 0, count=10)).firm
    nowhere = np.zeros((50, 2))
    assert not agreement.measure_agreement(made(nowhere, nowhere)).firm


def sizes_at(sizes, scale, **options):
    """Return the sizes of the views for a scale."""
    own = [Scale(image_size=size, input_size=size) for size in sizes]
    views = scale_views((own[0], own[1]), scale, **options)
    return views and tuple(size if view is None else view.size for size, view in zip(sizes, views, strict=True))


def test_sizes_for_a_scale():
    sizes = ((640, 480), (1024, 768))
    assert sizes_at(sizes, 2.0) == ((640, 480), (512, 384))
    assert sizes_at(sizes[::-1], 0.5) == ((512, 384), (640, 480))
    assert sizes_at(sizes, 0.5) == ((320, 240), (1024, 768))
    assert sizes_at(sizes, 16.0) is None
    assert sizes_at(((320, 240), (960, 720)), 3.0, longest=640) == ((640, 480), (640, 480))
    assert sizes_at(((128, 128), (128, 128)), 1.0, longest=640) == ((256, 256), (256, 256))  # at most twice
    boxes = (160, 120, 320, 240), None
    assert sizes_at(((960, 720), (960, 720)), 3.0, boxes=boxes, longest=640) == ((640, 480), (640, 480))


def test_a_view_of_a_part():
    own = Scale(image_size=(1200, 900), input_size=(400, 304))
    view = View.part(own, (100, 80, 120, 96), (240, 192))
    corners = apply_homography(view.image_from_view, [[-0.5, -0.5], [239.5, 191.5]])
    expected = own.to_image(np.array([[99.5, 79.5], [219.5, 175.5]]))
    assert np.allclose(corners, expected) and view.shrinks == pytest.approx(1.5)


def test_an_enlarged_part_is_found(photograph, shipped):
    part = resized(photograph[180:330, 240:440], (600, 450))
    H = resize_homography((200, 150), (600, 450)) @ crop_homography(240, 180)
    found = shipped.match(photograph, part)
    assert found.info["zoom"] == pytest.approx(3, rel=0.1) and len(found) > 500
    alone = dualrc.load(device="cpu", max_zoom=1).match(photograph, part)
    assert share_right(found, H, px=3.0) > max(0.9, share_right(alone, H, px=3.0))


def test_a_shrunk_image_is_found(photograph, shrunk, shipped):
    H = resize_homography((640, 480), (213, 160))
    found = shipped.match(photograph, shrunk)
    assert len(found) > 500 and share_right(found, H) > 0.9
    assert found.info["zoom"] == pytest.approx(1 / 3, rel=0.1) and "warning" not in found.info
    assert found.size0 == (640, 480) and found.size1 == (213, 160)
    assert (np.diff(found.scores) <= 0).all()
    json.dumps(dict(found.info))
    alone = dualrc.load(device="cpu", max_zoom=1).match(photograph, shrunk)
    assert share_right(alone, H) < 0.5 and "zoom" not in alone.info
    # All calls find the same matches.
    assert same_matches(shipped.match(photograph, shrunk, top=20), found[:20])
    assert same_matches(shipped.match(photograph, shrunk, min_score=0.3), found.above(0.3))
    high = shipped.match(photograph, shrunk, quality="high")
    assert share_right(high, H) > 0.9


def test_agreement_by_chance_does_not_end_the_search(photograph, monkeypatch):
    """Some of the wrong matches at the wrong scale agree with each other: other scales are tried nevertheless."""
    measure, calls = agreement.measure_agreement, []

    def by_chance(matches):
        calls.append(matches)
        return measure(matches) if len(calls) > 2 else agreement.Agreement(0.2, 1.0)

    monkeypatch.setattr(agreement, "measure_agreement", by_chance)
    found = dualrc.load(device="cpu").match(photograph, resized(photograph, (160, 120)))
    assert found.info["zoom"] == pytest.approx(0.25, rel=0.05) and "warning" not in found.info
    assert share_right(found, resize_homography((640, 480), (160, 120))) > 0.9


def test_the_search_is_symmetric(photograph, shrunk, shipped):
    one, other = shipped.match(photograph, shrunk), shipped.match(shrunk, photograph).swapped()
    assert other.info["zoom"] == pytest.approx(one.info["zoom"], rel=0.01)
    assert other.info["network_size0"] == one.info["network_size0"]

    def rows(matches):
        columns = np.concatenate([matches.points0, matches.points1], axis=1)
        return set(map(tuple, np.round(columns / 0.02).astype(int).tolist()))

    assert len(rows(one) & rows(other)) > 0.97 * len(one)  # of some, rounding changes the last digit


def test_every_way_to_match_searches(photograph, shrunk, shipped, tmp_path):
    found = shipped.match(photograph, shrunk)
    features = shipped.features(photograph), shipped.features(shrunk)
    assert same_matches(shipped.match_features(*features), found)
    assert same_matches(shipped.match(features[0], shrunk), found)
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path, image in zip(paths, (photograph, shrunk), strict=True):
        Image.fromarray(image).save(path)
    assert same_matches(next(shipped.match_many([paths])), found)


def test_masks_hold_in_the_search(photograph, shrunk, shipped):
    mask0, mask1 = np.zeros((480, 640), bool), np.ones((160, 213), bool)
    mask0[:, :400], mask1[:40] = True, False
    found = shipped.match(photograph, shrunk, mask0=mask0, mask1=mask1)
    assert len(found) > 200 and "zoom" in found.info
    assert (found.points0[:, 0] < 400).all() and (found.points1[:, 1] > 39.4).all()
    assert share_right(found, resize_homography((640, 480), (213, 160))) > 0.9


def test_an_ordinary_pair_is_as_it_was(photograph, shipped):
    other = resized(photograph[20:460, 30:600], (600, 460))
    found, alone = shipped.match(photograph, other), dualrc.load(device="cpu", max_zoom=1).match(photograph, other)
    assert same_matches(found, alone) and "zoom" not in found.info and "warning" not in found.info


def test_images_that_do_not_belong_together(photograph, shipped):
    photograph = photograph[::2, ::2]
    other = np.repeat(np.repeat(texture(7, 80, 60), 4, axis=0), 4, axis=1)
    found = shipped.match(photograph, other)
    assert "may not show the same scene" in found.info["warning"] and "zoom" not in found.info
    assert found.pair_score < 0.01
    many = next(shipped.match_many([(photograph, other)]))
    assert same_matches(many, found) and many.info["warning"] == found.info["warning"]
    nothing = shipped.match(photograph, np.full((240, 320, 3), 128, np.uint8))
    assert "warning" in nothing.info
    # The same bars and caption agree with each other in both images.
    framed = [image.copy() for image in (photograph, other)]
    for image in framed:
        image[:30] = image[-30:] = 0
        image[-25:-5, 20:140] = texture(3, 120, 20)
    found = shipped.match(*framed)
    assert "may not show the same scene" in found.info["warning"] and found.pair_score < 0.05
    # Without a search the pair score decides.
    alone = dualrc.load(device="cpu", max_zoom=1).match(photograph, other, top=100)
    assert "may not show the same scene" in alone.info["warning"] and alone.pair_score < 0.01


def test_few_matches_that_agree_by_chance_are_no_evidence(photograph, shipped, monkeypatch):
    """At a scale far from 1 an image is small, and its few matches may agree although the images are unrelated."""

    def by_chance(matcher, features, first, found):
        few = first[:100]
        assert not is_suspicious(first)
        scores = np.full(len(few), 1e-6, np.float32)
        info = {**first.info, "zoom": 0.5}
        return replace(few, points1=few.points0 * 0.5, scores=scores, info=info, whole=None)

    monkeypatch.setattr("dualrc.matcher.rematch.search_scales", by_chance)
    found = shipped.match(photograph, np.repeat(np.repeat(texture(7, 160, 120), 4, axis=0), 4, axis=1))
    assert found.info["zoom"] == 0.5 and found.pair_score < 0.05
    assert "may not show the same scene" in found.info["warning"]


def test_a_caption_in_both_images_is_no_evidence(photograph, shipped):
    """More than 0.3 of the best matches agree, but all of them are in the caption."""
    images = [photograph.copy(), np.repeat(np.repeat(texture(7, 160, 120), 4, axis=0), 4, axis=1)]
    caption = resized(texture(3, 140, 22), (280, 44))
    images[0][-54:-10, 100:380] = images[1][10:54, 200:480] = caption
    found = shipped.match(*images)
    assert agreement.measure_agreement(found).share > agreement.CHANCE and not is_suspicious(found)
    assert "may not show the same scene" in found.info["warning"] and found.pair_score < 0.05


def test_the_command_line_says_what_was_found(photograph, shrunk, tmp_path):
    from typer.testing import CliRunner

    from dualrc.cli import app

    for name, image in (("a.png", photograph), ("b.png", shrunk), ("c.png", texture(5, 320, 240))):
        Image.fromarray(image).save(tmp_path / name)
    shrinks = CliRunner().invoke(app, ["match", str(tmp_path / "a.png"), str(tmp_path / "b.png"), "--device", "cpu"])
    assert shrinks.exit_code == 0 and "times larger in image 0" in shrinks.output
    other = CliRunner().invoke(app, ["match", str(tmp_path / "a.png"), str(tmp_path / "c.png"), "--device", "cpu"])
    assert other.exit_code == 0 and "may not show the same scene" in " ".join(other.output.split())


def test_any_homography_is_a_view(photograph, shipped):
    """A view rotated by 30 degrees: matches are returned in original pixels."""
    angle, (width, height) = np.radians(30), (320, 240)
    turn = 1.6 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    H = np.eye(3)
    H[:2, :2], H[:2, 2] = turn, np.array([320, 240]) - turn @ (width / 2, height / 2)
    features = shipped.features(photograph)
    view = View(image_from_view=H, size=(width, height), shrinks=1.6)
    shown = show(features, [view])
    (seen,) = extract_shown(shipped, shown)
    assert seen.scale.input_size == (320, 240) and restricted(seen, shown[0]).mask is not None
    (look,) = match_views(shipped, (features, features), [(None, view)])
    error = np.linalg.norm(look.matches.points0 - look.matches.points1, axis=1)[:300]
    assert np.mean(error < 3) > 0.8 and look.agreement.firm
    assert look.agreement.scale == pytest.approx(1 / 1.6, rel=0.1)


def test_features_keep_the_image_as_it_was(shipped):
    image = texture(3, 96, 64)
    features = shipped.features(image)
    before = features.pixels.clone()
    image[:] = 0
    assert torch.equal(features.pixels, before) and before.max() > 100 and before.shape == (64, 96, 3)
    assert features.bytes > before.numel() + features.maps.coarse.numel()


def test_max_zoom_is_checked():
    with pytest.raises(dualrc.ConfigError, match=r"max_zoom = 0\.5"):
        dualrc.MatcherConfig(max_zoom=0.5)
    assert dualrc.config.preset("paper")[1].max_zoom == 1  # as published


def test_a_strip_keeps_its_short_side(shipped):
    image = texture(2, 1800, 120)
    features = shipped.features(image)
    assert features.scale.input_size == (1792, 112)
    with pytest.warns(UserWarning, match="1800x120 pixels is resized to 512x32, where few matches can be found"):
        assert shipped.features(image, size=512).scale.input_size == (512, 32)


def test_a_strip_of_a_panorama():
    """A strip against a normal image of a part of it, and against another strip."""
    scene, eye, focal = make_scene(3, texture_size=256), (0.0, -9.0, 3.0), 600.0

    def view(target, size, focal):
        return look_at(eye, target, size=size, fov_deg=2 * np.degrees(np.arctan(size[0] / 2 / focal)))

    aims = ((0, 2.5, 1.8), (1536, 96)), ((1, 2.5, 2), (320, 240)), ((-0.5, 2.5, 1.9), (1400, 96))
    views = [view(target, size, focal) for target, size in aims]
    images = [np.asarray(render(scene, v, Light(), supersample=1).image) for v in views]
    matcher = dualrc.load(device="cpu", max_size=384)  # at which the strips would be 384x32 and less
    for other, least in ((1, 150), (2, 1500)):
        H = views[other].K @ views[other].cam_from_world[:, :3] @ views[0].cam_from_world[:, :3].T
        H = H @ np.linalg.inv(views[0].K)
        found = matcher.match(images[0], images[other])
        error = np.linalg.norm(apply_homography(H, found.points0) - found.points1, axis=1)
        assert (error < 3).sum() > least and np.mean(error[:300] < 3) > 0.8


@pytest.mark.skipif(not (SHARED / "oxford").is_dir(), reason="needs shared/data/oxford beside the repository")
def test_boat_shrunk_to_a_third(shipped):
    root = SHARED / "oxford" / "v_boat"
    first, second = read(root / "1.png"), read(root / "3.png")
    size = (second.shape[1] // 3, second.shape[0] // 3)
    H = resize_homography(second.shape[1::-1], size) @ np.loadtxt(root / "H_1_3")
    found = shipped.match(first, resized(second, size))
    assert share_right(found, H, px=3.0) > 0.9


@pytest.mark.skipif(not (SHARED / "oxford").is_dir(), reason="needs shared/data/oxford beside the repository")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_leuven_shrunk_to_a_quarter(shipped, number):
    root = SHARED / "oxford" / "i_leuven"
    first, second = read(root / "1.png"), read(root / f"{number}.png")
    found = shipped.match(first, resized(second, (225, 150)))
    assert share_right(found, resize_homography((900, 600), (225, 150)), px=3.0) > 0.95


@pytest.mark.skipif(not (SHARED / "strecha").is_dir(), reason="needs shared/data beside the repository")
def test_an_unrelated_photograph_has_a_warning(shipped):
    """141 matches at another scale agree by chance."""
    other = SHARED / "strecha" / "Herz-Jesus-P8" / "images" / "0000.jpg"
    found = shipped.match(SHARED / "oxford" / "v_trees" / "1.png", other, size=640)
    assert "may not show the same scene" in found.info["warning"] and found.pair_score < 0.01
