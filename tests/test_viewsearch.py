"""Search over simulated views."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import match_set, rand, same_matches, texture
from PIL import Image
from test_quality import made_matches, photograph, share_right, shipped, similarity

import dualrc
from dualrc import stitch
from dualrc.geometry import Camera, RgbdFrame, apply_homography
from dualrc.image import Scale
from dualrc.localize import RgbdMap
from dualrc.matcher import rematch, views, viewsearch
from dualrc.matcher.features import ImageFeatures
from dualrc.matcher.verify import Verified, verify
from dualrc.matcher.views import Shown, View, see, show
from dualrc.matcher.viewsearch import (
    Simulated,
    affine_view,
    coarse_cells,
    quick_search,
    simulated_views,
    thorough_search,
    view_agreement,
)
from dualrc.matches import Matches, inside_mask
from dualrc.model.network import Features
from dualrc.pixels import in_image

__all__ = ["photograph", "shipped"]


@pytest.fixture(scope="module")
def untilted():
    """Load a matcher that does not search tilted views."""
    return dualrc.load(device="cpu", max_tilt=1)


def through(image: np.ndarray, view) -> np.ndarray:
    return see(torch.from_numpy(np.array(image)), image.shape[1::-1], [view])[0][0].numpy()


def test_a_tilt_shrinks_along_its_direction_only():
    view = affine_view((400, 300), 400, Simulated(4.0, 30.0))
    center = (np.array(view.size) - 1) / 2
    along = np.array((np.cos(np.pi / 6), np.sin(np.pi / 6)))
    across = np.array((-along[1], along[0]))
    places = apply_homography(view.image_from_view, center + np.array([(0, 0), along, across]))
    assert np.allclose(places[0], (199.5, 149.5))
    assert np.allclose(places[1] - places[0], 4 * along)
    assert np.allclose(places[2] - places[0], across)


def test_a_turn_rotates_the_whole_image():
    view = affine_view((400, 300), 200, Simulated(1.0, 0.0))
    image = np.zeros((300, 400, 3), np.uint8)
    image[:150, 200:] = 255
    mask = torch.arange(view.size[0] * view.size[1]).view(view.size[::-1]) > 99
    shown = Shown(view, torch.from_numpy(through(image, view)), mask)
    for turns in range(4):
        # The bright quarter turns clockwise, from the upper right.
        bright = [(0, 1), (1, 1), (1, 0), (0, 0)][turns]
        halves = [np.array_split(rows, 2, axis=1) for rows in np.array_split(shown.pixels.numpy()[:, :, 0], 2)]
        assert {(y, x) for y in (0, 1) for x in (0, 1) if halves[y][x].mean() > 200} == {bright}
        assert shown.pixels.shape[:2] == shown.mask.shape == view.size[::-1]
        # The geometry of a turned view is that of its pixels.
        assert np.abs(through(image, view).astype(int) - shown.pixels.numpy()).max() <= 1
        shown = shown.rotated()
        view = shown.view


def test_an_image_too_small_for_a_tilt_has_no_view():
    assert affine_view((160, 100), 480, Simulated(4.0, 0.0)) is None


def test_foreshortened_views_do_not_alias():
    stripes = np.zeros((320, 320, 3), np.uint8)
    stripes[:, ::2] = 255
    seen = through(stripes, affine_view((320, 320), 320, Simulated(4.0, 0.0))).astype(int)
    assert np.abs(seen[:, 4:-4] - 128).max() < 16
    # Across the stripes nothing is averaged.
    kept = through(stripes, affine_view((320, 320), 320, Simulated(4.0, 90.0))).astype(int)
    assert kept[20:60, 50:-50].std() > 100


def test_larger_tilts_have_more_directions():
    views = list(simulated_views(thorough_search(rotated=False)))
    assert views[0] == (1.0, 0.0) and len(set(views)) == len(views)
    assert [sum(view.tilt == tilt for view in views) for tilt in (2.0, 4.0)] == [4, 8]


def cells_of(features: torch.Tensor, usable: torch.Tensor | None = None):
    """Return the cells of feature maps (c h w); those that are not usable show nothing."""
    usable = torch.ones(features.shape[1:], dtype=torch.bool) if usable is None else usable
    pixels = torch.zeros(16 * features.shape[1], 16 * features.shape[2], 3, dtype=torch.uint8)
    pixels[::2] = 255
    maps = Features(coarse=features[None], fine=features[None])
    size = (pixels.shape[1], pixels.shape[0])
    scale = Scale(image_size=size, input_size=size)
    seen = ImageFeatures(maps=maps, scale=scale, mask=None, made_by="", pixels=pixels)
    fine = usable.repeat_interleave(4, 0).repeat_interleave(4, 1)
    return coarse_cells([replace(seen, maps=replace(maps, valid=fine[None]))])[0]


def literal_agreement(features0, features1, usable0, usable1) -> float:
    """Compute the agreement cell by cell."""
    places = [[(y, x) for y in range(u.shape[0]) for x in range(u.shape[1]) if u[y, x]] for u in (usable0, usable1)]
    unit = [f / f.norm(dim=0) for f in (features0, features1)]

    def cosine(a, b):
        return float(unit[0][:, a[0], a[1]] @ unit[1][:, b[0], b[1]])

    to1 = {a: max(places[1], key=lambda b: cosine(a, b)) for a in places[0]}
    to0 = {b: max(places[0], key=lambda a: cosine(a, b)) for b in places[1]}
    matches = {a: complex(b[1], b[0]) for a, b in to1.items() if to0[b] == a}
    total = 0
    for (y, x), there in matches.items():
        around = [(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx]
        moves = {a: matches[a] - there for a in around if a in matches}
        factors = [move / complex(a[1] - x, a[0] - y) for a, move in moves.items() if 0.5 < abs(move) < 2.9]
        agree = sum(abs(factor - sum(factors) / len(factors)) < 0.75 for factor in factors)
        total += max(0, agree - 2)
    return total / (len(matches) + 20) ** 0.5


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (3, 12)])
def test_agreement_is_that_of_its_definition(shape):
    features0 = rand(1, 8, *shape)
    flipped = torch.cat([features0.flip(1, 2), rand(2, 8, shape[0], 3)], dim=2)
    features1 = flipped + 0.3 * rand(3, *flipped.shape)
    usable0, usable1 = rand(4, *shape) > -1, rand(5, *flipped.shape[1:]) > -1
    usable0[0, 0] = usable1[0, 0] = True
    found = view_agreement([cells_of(features0, usable0)], [cells_of(features1, usable1)])
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(literal_agreement(features0, features1, usable0, usable1), abs=1e-5)


@pytest.mark.parametrize("compared", [1, 40, 4096])
def test_many_views_agree_as_each_pair_of_them_does(monkeypatch, compared):
    monkeypatch.setattr(viewsearch, "_COMPARED", compared)
    shapes = [[(5, 7), (1, 1), (3, 12), (5, 7)], [(4, 4), (6, 5), (2, 9)]]
    views = []
    for side, own in enumerate(shapes):
        usable = [rand(10 * side + number, *shape) > -0.5 for number, shape in enumerate(own)]
        # Parts of one random field agree more than by chance.
        views.append([cells_of(rand(0, 8, 6, 12)[:, : u.shape[0], : u.shape[1]], u) for u in usable])
    views[1].append(cells_of(rand(1, 8, 2, 3), torch.zeros(2, 3, dtype=torch.bool)))
    found = view_agreement(*views)
    assert found.shape == (4, 4) and found.max() > 1 and (found[:, 3] == 0).all()
    for row, first in enumerate(views[0]):
        for column, second in enumerate(views[1]):
            assert found[row, column] == pytest.approx(view_agreement([first], [second]).item(), abs=1e-6)
    assert view_agreement([], views[1]).shape == (0, 4)


def test_cells_of_many_images_are_those_of_each(photograph, shipped):
    images = [photograph[:320, :480], photograph[:320, :240], texture(1, 480, 320), np.zeros_like(photograph[:320])]
    seen = [shipped.features(np.ascontiguousarray(image)) for image in images]
    mask = np.arange(320 * 480).reshape(320, 480) % 480 > 200
    seen[2] = shipped.masked(seen[2], mask)
    together = coarse_cells(seen)
    for own, cells in zip(seen, together, strict=True):
        (alone,) = coarse_cells([own])
        assert all(torch.equal(one, other) for one, other in zip(cells, alone, strict=True))
    assert len(together[3].place) == 0 < len(together[2].place) < len(together[0].place)
    # The other cells take no memory.
    assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for cells in together for x in cells)
    assert together[2].place[:, 0].min() >= 12
    # The neighbors are at their steps.
    cells = together[2]
    for number, around in enumerate(cells.around.tolist()):
        for other, step in zip(around, viewsearch._AROUND, strict=True):
            there = cells.place[number] + torch.tensor(step)
            if other < len(cells.place):
                assert torch.equal(cells.place[other], there)
            else:
                assert not (cells.place == there).all(1).any()


@pytest.mark.parametrize("masked", [False, True])
def test_views_shown_together_are_those_shown_alone(photograph, shipped, masked):
    features = shipped.features(photograph)
    mask = np.arange(360 * 480).reshape(360, 480) % 480 > 200
    features = shipped.masked(features, mask if masked else None)
    views = [affine_view((480, 360), 400, simulated) for simulated in simulated_views(thorough_search(rotated=False))]
    assert None not in views and len({view.size for view in views}) < len(views)
    # The horizon crosses the last view, and a crop is resized by the network.
    horizon = np.array([(1.0, 0.2, 30), (0, 1, 20), (0.004, 0.001, 0.1)])
    views += [View(image_from_view=horizon, size=(160, 128)), View.part(features.scale, (16, 32, 160, 96), (80, 48))]
    for view, shown in zip(views, show(features, views), strict=True):
        (alone,) = show(features, [view])
        assert shown.view is view and torch.equal(shown.pixels, alone.pixels)
        grid = np.stack(np.meshgrid(*map(np.arange, view.size)), axis=2).reshape(-1, 2)
        places = apply_homography(view.image_from_view, grid)
        if view.image_from_view is horizon:
            behind = (np.c_[grid, np.ones(len(grid))] @ horizon[2]) * view.depth(features.size) <= 0
            assert behind.any()
            places[behind] = np.nan
        allowed = in_image(places, features.size) & inside_mask(places, mask if masked else np.ones_like(mask))
        where = np.ones(view.size[::-1], bool) if shown.mask is None else shown.mask.numpy()
        # Pixels at an edge of the image or of the mask are subject to rounding.
        edges = np.abs(places[:, None] - [(-0.5, -0.5), (200.5, -0.5), (479.5, 359.5)]).min(axis=(1, 2))
        assert ((where.ravel() == allowed) | (edges < 1e-3)).all() and np.mean(edges < 1e-3) < 0.05
        assert (shown.mask is None) == (not masked and bool(allowed.all()))


@pytest.mark.parametrize("masked", [False, True])
def test_views_matched_together_are_those_matched_one_by_one(photograph, shipped, monkeypatch, masked):
    mask = np.arange(360 * 480).reshape(360, 480) % 480 > 200
    features = shipped.masked(shipped.features(photograph), mask if masked else None), shipped.features(photograph)
    tilted = [affine_view((480, 360), 320, Simulated(2.0, direction)) for direction in (0, 45, 135)]
    pairs = [(None, tilted[1]), (None, None), (tilted[1], None), (None, tilted[2]), (tilted[1], tilted[2])]
    pairs += [(None, tilted[1]), (tilted[0], tilted[0])]
    detail = torch.from_numpy(np.ascontiguousarray(photograph[::2, ::2])), None
    batches = []
    match_plain = shipped.match_plain
    monkeypatch.setattr(shipped, "match_plain", lambda batch: (batches.append(len(batch)), match_plain(batch))[1])
    expected = list(views.match_views(shipped, features, pairs, detail))
    assert batches == [1] * 7 and all(len(look.matches) > 100 for look in expected)
    monkeypatch.setattr(views, "_at_once", lambda matcher, features: 6)
    monkeypatch.setattr(views, "batch_size", lambda matcher, scales: 2)
    batches.clear()
    found = list(views.match_views(shipped, features, pairs, detail))
    # The first six pairs have four kinds of sizes, of which one occurs three times.
    assert sorted(batches) == [1, 1, 1, 1, 1, 2]
    for one, other in zip(found, expected, strict=True):
        assert same_matches(one.matches, other.matches) and one.agreement == pytest.approx(other.agreement)


def test_features_of_views_that_do_not_fit_into_memory_are_extracted_again(photograph, shipped, monkeypatch):
    view = affine_view((480, 360), 480, Simulated(4.0, 60.0))
    pair = shipped.features(photograph), shipped.features(through(photograph, view))
    search = replace(quick_search(3.0), verified=3)
    expected, counts, matched = viewsearch.best_views(shipped, pair, search), [], []
    extract, match_seen = shipped.extract, viewsearch.match_seen
    # Three pairs of views are matched. Whether a wrong one has verified matches depends on the processor's rounding.
    monkeypatch.setattr(viewsearch, "match_seen", lambda *args: (matched.append(len(args[2])), match_seen(*args))[1])
    monkeypatch.setattr(shipped, "extract", lambda items: (counts.append(len(items)), extract(items)))
    for spare in (1e12, 0):
        monkeypatch.setattr(type(shipped.budget), "spare", lambda self, pair, spare=spare: spare)
        counts.clear()
        found = viewsearch.best_views(shipped, pair, search)
        assert [own.weight for own in found] == [own.weight for own in expected] and found
        assert sum(counts) == 14 if spare else 14 < sum(counts) <= 14 + 6
    assert matched == [3, 3]


def test_views_of_the_same_thing_agree_and_others_do_not():
    features, other = rand(1, 16, 8, 10), rand(2, 16, 8, 10)
    nothing = torch.zeros(8, 10, dtype=torch.bool)
    views = [cells_of(features), cells_of(features.rot90(1, (1, 2))), cells_of(other), cells_of(other, nothing)]
    same, turned, unrelated, empty = view_agreement([cells_of(features)], views)[0].tolist()
    assert same == turned > 20 * max(1, unrelated) and empty == 0


def test_cells_without_texture_are_not_compared():
    cells = cells_of(rand(1, 4, 3, 4))
    assert len(cells.features) == 12
    blank = ImageFeatures(
        maps=Features(coarse=rand(1, 1, 4, 3, 4), fine=rand(1, 1, 4, 12, 16)),
        scale=Scale(image_size=(64, 48), input_size=(64, 48)),
        mask=None,
        made_by="",
        pixels=torch.full((48, 64, 3), 100, dtype=torch.uint8),
    )
    assert len(coarse_cells([blank])[0].features) == 0


def test_matches_that_agree_weigh_more():
    H = similarity((150, 100), 20, 0.8, (140, 90))
    right, mixed, wrong = (verify(made_matches(H, outliers=share)) for share in (0.0, 0.5, 1.0))
    assert right.weight > mixed.weight > 2 * wrong.weight
    assert right.weight_of(right.matches) == pytest.approx(right.weight, rel=0.01)
    none = verify(Matches.none({}))
    assert none.weight == none.weight_of(right.matches) == 0


@pytest.mark.parametrize(("quality", "turns", "swapped"), [("high", 0, True), ("search", 2, False)])
def test_the_higher_qualities_find_what_a_single_pass_can_not(photograph, shipped, untilted, quality, turns, swapped):
    view = affine_view((480, 360), 480, Simulated(6.0, 60.0))
    for _ in range(turns):
        view = view.rotated()
    there, images = np.linalg.inv(view.image_from_view), (photograph, through(photograph, view))
    if swapped:
        there, images = view.image_from_view, images[::-1]
    assert share_right(untilted.match(*images)[:300], there) < 0.3
    found = shipped.match(*images, quality=quality)
    # In pixels of the frontal image a pixel of the other one is six long.
    assert share_right(found[:300], there, px=18.0 if swapped else 3.0) > 0.9
    assert found.size0 == images[0].shape[1::-1] and (np.diff(found.scores) <= 0).all()
    # The first pass warned that its matches do not agree, which no longer holds.
    assert "warning" not in found.info


@pytest.mark.parametrize(("size0", "size1"), [((40, 33), (50, 36)), ((1100, 40), (160, 120)), ((300, 70), (70, 300))])
def test_tiny_images_and_strips_can_be_searched(shipped, size0, size1):
    found = shipped.match(texture(1, *size0), texture(2, *size1), quality="search")
    assert (found.size0, found.size1) == (size0, size1)
    assert np.isfinite(found.points0).all() and np.isfinite(found.points1).all()


def test_masks_hold_in_every_view(photograph, shipped):
    view = affine_view((480, 360), 480, Simulated(6.0, 60.0))
    mask = np.zeros((360, 480), bool)
    mask[:, :240] = True
    found = shipped.match(photograph, through(photograph, view), mask0=mask, quality="high")
    assert len(found) and (found.points0[:, 0] <= 239.5).all()
    assert share_right(found[:200], np.linalg.inv(view.image_from_view)) > 0.8


@pytest.mark.parametrize("swapped", [False, True])
def test_standard_quality_finds_a_tilted_image(photograph, shipped, untilted, swapped):
    view = affine_view((480, 360), 480, Simulated(5.0, 60.0))
    there, images = np.linalg.inv(view.image_from_view), (photograph, through(photograph, view))
    if swapped:
        there, images = view.image_from_view, images[::-1]
    px = 15.0 if swapped else 3.0
    alone, found = untilted.match(*images), shipped.match(*images)
    assert "warning" in alone.info and "tilted" not in alone.info
    assert share_right(alone[:300], there, px=px) < 0.5
    assert found.info["tilted"] and "warning" not in found.info
    assert share_right(found[:300], there, px=px) > 0.9
    assert found.size0 == images[0].shape[1::-1] and (np.diff(found.scores) <= 0).all()
    # Features hold all that the search needs, and all calls find the same matches.
    features = [shipped.features(image) for image in images]
    assert same_matches(shipped.match_features(*features), found)
    assert same_matches(next(shipped.match_many([images], top=50)), found[:50])
    # The order of the images does not matter.
    back = match_set(shipped.match(*images[::-1]).swapped(), decimals=1)
    assert len(back & match_set(found, decimals=1)) > 0.98 * max(len(back), len(found))
    # Masks hold.
    mask = np.zeros(images[0].shape[:2], bool)
    mask[:, : mask.shape[1] // 2] = True
    masked = shipped.match(*images, mask0=mask)
    assert (masked.points0[:, 0] <= mask.shape[1] // 2 - 0.5).all()


def test_the_command_line_reports_a_tilt(run, photograph, tmp_path):
    view = affine_view((480, 360), 480, Simulated(5.0, 60.0))
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path, image in zip(paths, (photograph, through(photograph, view)), strict=True):
        Image.fromarray(image).save(path)
    status, screen, errors = run("match", *paths, "--device", "cpu")
    assert status == 0 and "matched through tilted views" in screen and "Note" not in errors
    assert json.loads(run("match", *paths, "--device", "cpu", "--json")[1])["tilted"] is True


def test_tilts_of_unrelated_images_agree_no_more_than_by_chance(photograph, shipped):
    other = np.ascontiguousarray(photograph[::-1, ::-1, ::-1])[:, :300] // 2
    view = affine_view((300, 360), 360, Simulated(3.0, 30.0))
    found = shipped.match(texture(5, 400, 300), through(other, view))
    assert "warning" in found.info and "tilted" not in found.info


def test_passes_that_agree_by_chance_do_not_replace_the_first_one(shipped, untilted):
    # Images of 1024 px are not enlarged, so the first passes are the same.
    unrelated = texture(5, 1024, 320), texture(6, 1024, 320)
    first = untilted.match(*unrelated, top=300)
    found = shipped.match(*unrelated, quality="high", top=300)
    assert len(first) and np.array_equal(found.points0, first.points0)


def test_many_unrelated_pairs_are_not_searched_for_tilts(photograph, shipped, tmp_path, monkeypatch):
    """Candidates of localization and pairs of a panorama mostly have nothing in common."""
    searched = []
    monkeypatch.setattr(rematch, "search_tilts", lambda *args: searched.append(args))
    images = [texture(5, 400, 300), photograph]
    features = shipped.features(images[0]), shipped.features(images[1])
    shipped.match_features(*features, max_tilt=1)
    Image.fromarray(np.full((300, 400), 1000, np.uint16)).save(tmp_path / "depth.png")
    camera = replace(Camera.from_focal((400, 300), 400), cam_from_world=np.eye(3, 4))
    frame = RgbdFrame(name="a.png", image=tmp_path / "a.png", depth=tmp_path / "depth.png", camera=camera)
    RgbdMap([frame]).see(frame.name, shipped, features, None)
    assert stitch._links(images, shipped) == {}
    assert not searched
    shipped.match_features(*features)
    assert len(searched) == 1


def test_a_tilt_below_the_smallest_one_is_no_search(photograph, shipped, monkeypatch):
    searched = []
    monkeypatch.setattr(rematch, "best_views", lambda *args: searched.append(args) or [])
    features = shipped.features(texture(5, 400, 300)), shipped.features(photograph)
    for max_tilt, searches in ((2.9, 0), (3.0, 1)):
        found = shipped.match_features(*features, max_tilt=max_tilt)
        assert "warning" in found.info and len(searched) == searches


@pytest.mark.parametrize(("weight", "views"), [(101.0, True), (190.0, False)])
def test_high_quality_searches_views_unless_the_matches_are_certain(photograph, shipped, monkeypatch, weight, views):
    """On hard pairs, wrong results reach a weight of 101, and correct ones start at 190."""
    searched: list[tuple] = []
    monkeypatch.setattr(rematch, "verify", lambda matches: Verified(matches, None, weight))
    monkeypatch.setattr(rematch, "best_views", lambda *args: searched.append(args) or [])
    image = photograph[:160, :160]
    shipped.match(image, image, quality="high")
    assert bool(searched) == views


def test_the_quick_search_has_the_tilts_up_to_the_largest():
    assert quick_search(2.9).tilts == ()
    assert quick_search(3.0).tilts == ((3.0, 6),)
    assert quick_search(9.0).tilts == ((3.0, 6), (9.0, 18))


@pytest.mark.parametrize("max_tilt", [0.5, 9.5, float("nan")])
def test_max_tilt_is_checked(max_tilt):
    with pytest.raises(dualrc.ConfigError, match="max_tilt"):
        dualrc.MatcherConfig(max_tilt=max_tilt)
