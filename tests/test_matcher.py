"""Tests of the matcher's contract: symmetry, caches, masks, points and settings."""

import importlib
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED, View, match_set, oracle_matcher, same_matches, texture, tiny_matcher, tiny_network
from PIL import Image

from dualrc.config import MatcherConfig
from dualrc.errors import ConfigError, DataError, ImageError
from dualrc.matcher import Matcher, load
from dualrc.matcher.budget import Budget, NoMemoryError
from dualrc.matches import Matches
from dualrc.ops import int8
from dualrc.pixels import pixel_grid

VIEW0, VIEW1 = View(203, 150, (60, 80)), View(190, 161, (66.4, 75.2), (0.95, 0.97))


@pytest.fixture(scope="module")
def images():
    return VIEW0.image(1), VIEW1.image(2)


@pytest.fixture(scope="module")
def matches(oracle, images):
    found = oracle.match(*images)
    assert len(found) > 500
    return found


@pytest.fixture(scope="module")
def blobs():
    """Return an image of blobs and another one that overlaps it, for networks that use more than color ramps."""
    wide = texture(5, 176, 128)
    return wide[:96, :128], wide[8:120, 16:160]


def test_matches_are_best_first(matches):
    assert (np.diff(matches.scores) <= 0).all() and (matches.scores > 0).all()
    assert matches.points0.dtype == matches.points1.dtype == matches.scores.dtype == np.float32
    for points, view in ((matches.points0, VIEW0), (matches.points1, VIEW1)):
        assert (points > -0.5).all() and (points < (view.width - 0.5, view.height - 0.5)).all()


def test_info_is_plain_and_complete(matches):
    info = json.loads(json.dumps(matches.info))
    assert {"dualrc", "torch", "network", "matcher", "weights", "device", "precision"} <= info.keys()
    assert info["network_size0"] == [192, 144] and info["network_size1"] == [176, 160]


def assert_symmetric(there, back, *, least=0.999):
    """Check that exchanged images give exchanged matches, to 0.01 px."""
    assert len(there) == len(back)
    rows, swapped = (np.concatenate([m.points0, m.points1], axis=1) for m in (there, back.swapped()))
    near = [np.abs(swapped - row).max(1).min() < 0.01 for row in rows]
    assert np.mean(near) >= least
    assert np.allclose(np.sort(there.scores), np.sort(back.scores), atol=1e-5)


def test_symmetry_of_the_oracle(oracle, images, matches):
    assert_symmetric(matches, oracle.match(*images[::-1]))


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_symmetry_of_a_network(blobs, temperature, cpu_engine):
    network = tiny_network(temperature=temperature, subpixel_hidden=8)
    random = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(network.subpixel.correction[-1].weight, std=0.1, generator=random)  # as if it had learnt
    matcher = Matcher(network, MatcherConfig(), device="cpu", engine=cpu_engine)
    found = matcher.match(*blobs)
    assert len(found) > 30
    # With so few matches, rounding may move one match in only one of the two orders.
    assert_symmetric(found, matcher.match(*blobs[::-1]), least=0.98)


@pytest.mark.skipif(not (SHARED / "hpatches").is_dir(), reason=f"photographs are not at {SHARED}")
@pytest.mark.parametrize(("first", "second"), [("v_churchill/1", "v_churchill/3"), ("i_pool/1", "i_pool/4")])
def test_symmetry_on_photographs(first, second):
    matcher = load(device="cpu", size=480)
    images = [SHARED / "hpatches" / f"{name}.ppm" for name in (first, second)]
    found = matcher.match(*images)
    assert len(found) > 1000
    assert_symmetric(found, matcher.match(*images[::-1]))


def test_repetition_is_bit_identical(oracle, images, matches, blobs):
    assert same_matches(matches, oracle.match(*images))
    tiny = tiny_matcher()
    for threads in (2, 1):
        torch.set_num_threads(threads)
        assert same_matches(tiny.match(*blobs), tiny.match(*blobs))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_two_images_are_extracted_side_by_side(blobs, monkeypatch, precision):
    if precision == "int8" and not int8.works():
        pytest.skip("this processor or torch has no exact int8")
    matcher = Matcher(tiny_network(), MatcherConfig(), device="cpu", precision=precision)
    extract, used = matcher.network.extract, []

    def watched(images):
        used.append((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return extract(images)

    monkeypatch.setattr(matcher.network, "extract", watched)
    both = {(True, 2), (False, 2)} if precision == "int8" else {(True, 4)}
    try:
        for threads, enough, expected in ((4, True, both), (4, False, {(True, 4)}), (1, True, {(True, 1)})):
            torch.set_num_threads(threads)
            alone = [matcher.features(blob).maps for blob in blobs]
            monkeypatch.setattr(matcher.budget, "side_by_side", lambda _, enough=enough: enough)
            used.clear()
            items = [matcher.pending(blob, None) for blob in blobs]
            matcher.extract(items)
            assert len(used) == 2 and set(used) == expected and torch.get_num_threads() == threads
            for found, maps in zip((item.known().maps for item in items), alone, strict=True):
                assert torch.equal(found.fine, maps.fine) and torch.equal(found.coarse, maps.coarse)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(not int8.works(), reason="this processor or torch has no exact int8")
def test_an_error_of_the_other_thread_is_not_lost(blobs, monkeypatch):
    matcher = Matcher(tiny_network(), MatcherConfig(), device="cpu", precision="int8")
    extract = matcher.network.extract

    def broken(images):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("out of memory")
        return extract(images)

    monkeypatch.setattr(matcher.network, "extract", broken)
    torch.set_num_threads(2)
    try:
        with pytest.raises(NoMemoryError):
            matcher.extract([matcher.pending(blob, None) for blob in blobs])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("module", "step"), [("matcher", "recover"), ("rematch", "match_again")])
def test_the_limit_of_threads_holds_in_every_step(blobs, monkeypatch, module, step):
    network, used = tiny_network(), []
    matcher = Matcher(network, MatcherConfig(quality="high"), device="cpu", threads=2)
    module = importlib.import_module(f"dualrc.matcher.{module}")
    function = getattr(module, step)

    def watched(*args, **options):
        used.append(torch.get_num_threads())
        return function(*args, **options)

    monkeypatch.setattr(module, step, watched)
    matcher.match(*blobs)
    list(matcher.match_many([blobs], quality="standard"))
    assert set(used) == {2} and torch.get_num_threads() == 1


def test_another_process_gives_the_same(tmp_path, blobs):
    for number, blob in enumerate(blobs):
        Image.fromarray(blob).save(tmp_path / f"{number}.png")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from conftest import tiny_matcher; "
        "tiny_matcher().match(sys.argv[2] + '/0.png', sys.argv[2] + '/1.png').save(sys.argv[2] + '/m.npz')"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)], check=True)
    ours, theirs = tiny_matcher().match(*blobs), Matches.load(tmp_path / "m.npz")
    assert len(match_set(ours) & match_set(theirs)) >= 0.999 * len(ours)


def test_cached_features_give_the_same(oracle, images, matches):
    features0, features1 = (oracle.features(image) for image in images)
    assert features0.size == (203, 150) and features0.bytes > 0
    assert same_matches(matches, oracle.match_features(features0, features1))
    assert same_matches(matches, oracle.match(features0, features1))
    assert same_matches(matches, oracle.match(features0, images[1]))
    points = np.array([[50.0, 60.0]])
    assert same_matches(oracle.match_points(features0, features1, points), oracle.match_points(*images, points))
    assert np.array_equal(oracle.warp(features0, features1).points1, oracle.warp(*images).points1, equal_nan=True)
    # Features have a fixed size, but accept any mask.
    left = np.zeros((150, 203), bool)
    left[:, :100] = True
    masked = oracle.match_features(features0, features1, mask0=left)
    assert same_matches(masked, oracle.match(features0, images[1], mask0=left))
    assert same_matches(masked, oracle.match(*images, mask0=left))
    assert 0 < len(masked) < len(matches)


def test_points_below_a_score_are_not_found(oracle, images):
    points = np.array([[50.0, 60.0], [90.0, 70.0]])
    score = oracle.match_points(*images, points).scores
    assert (score > 0).all()
    kept = oracle.match_points(*images, points, min_score=float(score.max()))
    assert np.isnan(kept.points1).all(axis=1).tolist() == (score < score.max()).tolist()


def test_reprs_fit_a_line(oracle, images, matches):
    assert repr(matches).startswith(f"Matches({len(matches)} of 203x150 and ")
    assert repr(oracle.features(images[0])) == "ImageFeatures(203x150, seen as 192x144)"
    assert repr(oracle) == f"Matcher('default' on cpu, float32, {oracle.engine})"


def test_features_of_other_weights_are_refused(oracle, images):
    other = oracle_matcher().features(images[0])
    with pytest.raises(ConfigError, match="other weights"):
        oracle.match_features(other, oracle.features(images[1]))
    with pytest.raises(ConfigError, match="other weights"):
        oracle.warp(other, images[1])


def test_features_on_another_device_are_refused(oracle, images):
    own, other = oracle.features(images[0]), oracle.features(images[1])
    other = replace(other, maps=replace(other.maps, coarse=other.maps.coarse.to("meta")))
    for pair in ((own, other), (other, own)):
        with pytest.raises(ConfigError, match="on meta, and the matcher on cpu"):
            oracle.match_features(*pair)


@pytest.mark.parametrize(
    "wrong",
    [{"size": "64"}, {"size": 64.5}, {"top": 5.0}, {"min_score": float("nan")}, {"size": 8}, {"top": -1}],
)
def test_wrong_settings_of_a_call_are_refused(oracle, images, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        oracle.match(*images, **wrong)


def inside(points, mask):
    column, row = np.floor(points + 0.5).astype(int).T
    return mask[row, column]


MASK0 = np.zeros((150, 203), bool)
MASK0[20:130, 40:170] = True
MASK1 = np.ones((161, 190), np.uint8)
MASK1[60:100, 70:120] = 0


def test_masks_in_match(oracle, images, matches):
    masked = oracle.match(*images, mask0=MASK0, mask1=MASK1)
    assert inside(masked.points0, MASK0).all() and inside(masked.points1, MASK1).all()
    # Nearly all matches inside of the mask remain.
    expected = (inside(matches.points0, MASK0) & (inside(matches.points1, MASK1) > 0)).sum()
    assert 0.8 * expected < len(masked) <= 1.05 * expected < len(matches)
    assert len(oracle.match(*images, mask0=MASK0, mask1=MASK1, top=10)) == 10
    for one in ({"mask0": MASK0}, {"mask1": torch.from_numpy(MASK1)}):
        assert 0 < len(oracle.match(*images, **one)) < len(matches)


def test_masks_let_the_second_best_win():
    """If the only true counterpart is masked, another place may match, but never the masked one."""
    matcher = tiny_matcher()
    image = texture(3, 96, 64)
    mask = np.ones((64, 96), bool)
    mask[:, :48] = False
    found = matcher.match(image, image, mask1=mask)
    assert (found.points1[:, 0] > 47.5).all()


def test_refined_points_stay_on_a_mask_of_stripes(oracle, images):
    """Cells of 4 px on stripes of 5 px: refinement would move many points out of their stripe."""
    stripes0, stripes1 = np.zeros((150, 203), bool), np.zeros((161, 190), bool)
    stripes0[:, np.arange(203) // 5 % 2 == 0] = True
    stripes1[np.arange(161) // 5 % 2 == 0] = True
    masked = oracle.match(*images, mask0=stripes0, mask1=stripes1)
    assert len(masked) > 50
    assert inside(masked.points0, stripes0).all() and inside(masked.points1, stripes1).all()
    # `top` applies after the mask.
    assert same_matches(oracle.match(*images, mask0=stripes0, mask1=stripes1, top=len(masked)), masked)


def test_masked_cells_do_not_compete(oracle, images):
    """Features in a masked coarse cell do not affect the coarse scores of the others."""
    mask = np.ones((150, 203), bool)
    mask[:, :64] = False
    features0, features1 = oracle.features(images[0], mask=mask).maps, oracle.features(images[1]).maps
    hidden = ~features0.valid.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).any(4).any(2)  # coarse cells, all masked
    assert 0 < hidden.sum() < hidden.numel()
    changed = features0.coarse.clone()
    changed[hidden[:, None].expand_as(changed)] = features1.coarse[:, :, 4, 6].mean()
    for pair in ((0, 1), (1, 0)):
        tensors = []
        for coarse in (features0.coarse, changed):
            sides = replace(features0, coarse=coarse), features1
            tensors.append(oracle.network.coarse_tensor(*(sides[side] for side in pair)))
        assert torch.equal(*tensors) and tensors[0].any()
        by_cell = tensors[0] if pair == (0, 1) else tensors[0].permute(0, 3, 4, 1, 2)
        assert not by_cell[hidden].any() and by_cell[~hidden].flatten(1).any(1).all()


def test_masks_in_match_points(oracle, images):
    points = pixel_grid((203, 150))[::7, ::7].reshape(-1, 2)
    found = oracle.match_points(*images, points, mask0=MASK0, mask1=MASK1)
    assert np.array_equal(found.points0, points)
    there = found.scores > 0
    assert there.sum() > 100
    assert inside(points[there], MASK0).all() and inside(found.points1[there], MASK1).all()
    assert np.isnan(found.points1[~there]).all() and not np.isnan(found.points1[there]).any()


def test_masks_in_warp(oracle, images):
    free, warp = oracle.warp(*images), oracle.warp(*images, mask0=MASK0, mask1=MASK1)
    assert not warp.certainty[~MASK0].any()
    sure = warp.certainty > 0
    assert 0 < sure.sum() < (free.certainty > 0).sum()
    assert inside(warp.points1[sure], MASK1).all()
    assert (np.isfinite(warp.points1) == sure[:, :, None]).all()


def test_masks_that_leave_nothing(oracle, images):
    nothing = np.zeros_like(MASK0)
    assert len(oracle.match(*images, mask0=nothing)) == 0
    assert len(oracle.match(*images, mask1=np.zeros_like(MASK1))) == 0
    assert not oracle.warp(*images, mask0=nothing).certainty.any()
    assert not oracle.warp(*images, mask1=np.zeros_like(MASK1)).certainty.any()
    found = oracle.match_points(*images, [[50, 60]], mask1=np.zeros_like(MASK1))
    assert found.scores.tolist() == [0] and np.isnan(found.points1).all()


def test_masks_of_another_size_are_refused(oracle, images):
    for mask in (MASK1, np.ones((150, 203, 1)), np.ones(3)):
        with pytest.raises(ImageError, match=r"mask has shape .*\(150, 203\)"):
            oracle.match(*images, mask0=mask)


def test_top_and_min_score(oracle, images, matches):
    assert same_matches(oracle.match(*images, top=25), matches[:25])
    assert len(oracle.match(*images, top=0)) == 0
    assert same_matches(oracle.match(*images, top=10**6), matches)
    middle = float(np.median(matches.scores))
    above = oracle.match(*images, min_score=middle)
    assert same_matches(above, matches[matches.scores >= middle]) and 0 < len(above) < len(matches)
    few = oracle_matcher(top=5, min_score=middle)
    assert same_matches(few.match(*images), matches[:5])
    assert same_matches(few.match(*images, top=50, min_score=0.0), matches[:50])
    assert same_matches(next(few.match_many([images])), matches[:5])
    # None means all, regardless of the loaded settings.
    assert same_matches(few.match(*images, top=None), above)
    assert same_matches(next(few.match_many([images], top=None, min_score=0.0)), matches)


def test_sizes(images):
    def network_sizes(matcher, **options):
        info = matcher.match(*images, **options).info
        return info["network_size0"], info["network_size1"]

    assert network_sizes(oracle_matcher(max_zoom=1, max_size=128)) == ((128, 80), (128, 96))
    assert network_sizes(oracle_matcher(max_zoom=1, size=256)) == ((256, 176), (256, 208))  # enlarged, exactly
    assert network_sizes(oracle_matcher(max_zoom=1, size=256), size=96) == ((96, 64), (96, 80))
    assert network_sizes(oracle_matcher(max_zoom=1, max_size=100), size=160) == ((160, 112), (160, 128))
    assert network_sizes(oracle_matcher(max_zoom=1, size=256), size=None) == ((192, 144), (176, 160))  # the images' own


def test_little_memory_gives_the_same(oracle, images, matches, blobs, monkeypatch):
    points = pixel_grid((203, 150))[::31, ::31].reshape(-1, 2)
    many, a = oracle.match_points(*images, points), tiny_matcher().match(*blobs)
    monkeypatch.setattr(Budget, "working", lambda *_: 1)  # byte
    assert match_set(oracle.match(*images)) == match_set(matches)
    few = oracle.match_points(*images, points)
    assert np.allclose(few.points1, many.points1, atol=1e-3, equal_nan=True)
    b = tiny_matcher().match(*blobs)
    assert len(match_set(a) & match_set(b)) >= 0.999 * len(a)


@pytest.mark.parametrize(
    "settings", [{"size": 31}, {"max_size": 8}, {"top": -1}, {"max_memory": 0}, {"max_memory": -1.0}], ids=str
)
def test_settings_without_meaning_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings)).removeprefix("max_s")):
        tiny_matcher(**settings)


def test_arguments_without_meaning_are_refused(oracle, images):
    with pytest.raises(ConfigError, match="top = -3"):
        oracle.match(*images, top=-3)
    with pytest.raises(ConfigError, match="size = 5"):
        oracle.match(*images, size=5)
    for points in ([1.0, 2.0], np.zeros((2, 3)), np.zeros((1, 2, 2))):
        with pytest.raises(DataError, match=r"shape \(n, 2\)"):
            oracle.match_points(*images, points)


def test_points_keep_their_rows(oracle, images):
    points = np.array([[100, 70], [-5, 3], [50.5, 60.25], [np.nan, 1], [202.6, 20], [np.inf, 5], [100, 70]], np.float32)
    found = oracle.match_points(*images, points)
    assert np.array_equal(found.points0, points, equal_nan=True)
    there = [True, False, True, False, False, False, True]
    assert (found.scores > 0).tolist() == there
    assert np.isnan(found.points1).all(axis=1).tolist() == [not t for t in there]
    assert (found.scores[[1, 3, 4, 5]] == 0).all()
    assert np.array_equal(found.points1[0], found.points1[6])
    expected = VIEW1.from_scene(VIEW0.to_scene(points[[0, 2]]))
    assert np.abs(found.points1[[0, 2]] - expected).max() < 0.8
    empty = oracle.match_points(*images, np.zeros((0, 2)))
    assert len(empty) == 0 and empty.size0 == (203, 150)


@pytest.mark.parametrize("subpixel", [True, False])
def test_many_points_are_searched_in_parts(images, subpixel, cpu_engine):
    matcher = oracle_matcher(subpixel=subpixel, engine=cpu_engine)
    points = np.random.default_rng(0).uniform(-5, (205, 155), (50, 2))
    expected = matcher.match_points(*images, points)
    assert 20 < np.isfinite(expected.points1).all(1).sum() < 50
    found = matcher.match_points(*images, np.tile(points, (60, 1)))  # more than one part
    assert np.allclose(found.points1, np.tile(expected.points1, (60, 1)), atol=1e-3, equal_nan=True)
    assert np.allclose(found.scores, np.tile(expected.scores, 60), atol=1e-5)


def test_points_seen_by_one_image_only_have_none(oracle):
    view0, view1 = View(128, 96, (20, 40)), View(128, 96, (84, 40))  # the right half of 0 is the left half of 1
    points = pixel_grid((128, 96))[8:90:9, 4:124:4].reshape(-1, 2)
    found = oracle.match_points(view0.image(1), view1.image(2), points)
    hidden, seen = points[:, 0] < 40, points[:, 0] > 76
    assert (found.scores[seen] > 0).mean() > 0.95
    # Points without a counterpart have much lower scores, or no match.
    assert np.quantile(found.scores[hidden], 0.9) < 0.1 * np.median(found.scores[seen])


def test_warp_of_an_image_onto_itself(oracle):
    image = VIEW0.image(1)
    warp = oracle.warp(image, image)
    assert warp.points1.shape == (150, 203, 2) and warp.certainty.shape == (150, 203)
    assert warp.points1.dtype == warp.certainty.dtype == np.float32
    error = np.abs(warp.points1 - pixel_grid((203, 150)))
    assert error.max() < 1 and np.median(error) < 0.05
    assert warp.certainty.min() >= 0 and warp.certainty.max() <= 1 and (warp.certainty > 0).mean() > 0.99


@pytest.mark.parametrize("value", [0, 128, 255])
def test_constant_images_are_no_error(value):
    matcher = tiny_matcher()
    constant, other = np.full((48, 64, 3), value, np.uint8), texture(0, 80, 64)
    for pair in ((constant, other), (other, constant), (constant, constant)):
        matches = matcher.match(*pair)
        # All but the border looks the same, so few cells are mutual nearest neighbors, if any.
        assert len(matches) < 0.5 * 12 * 16
        assert np.isfinite(matches.scores).all()
        warp = matcher.warp(*pair)
        assert (np.isfinite(warp.points1) == (warp.certainty > 0)[:, :, None]).all()
        assert len(matcher.match_points(*pair, [[5, 6], [40, 30]])) == 2


def test_a_network_that_sees_nothing():
    """Features of length zero give no matches and no NaN."""
    network = tiny_network()
    for parameter in network.backbone.parameters():
        torch.nn.init.zeros_(parameter)
    matcher = Matcher(network, MatcherConfig(), device="cpu")
    pair = texture(0, 64, 48), texture(1, 48, 64)
    assert len(matcher.match(*pair)) == 0
    assert matcher.match_points(*pair, [[5, 6]]).scores.tolist() == [0]
    warp = matcher.warp(*pair)
    assert not warp.certainty.any() and np.isnan(warp.points1).all()


def test_an_image_matches_itself():
    image = texture(1, 96, 80)
    matches = tiny_matcher().match(image, image)
    assert len(matches) > 100
    apart = np.abs(matches.points0 - matches.points1).max(axis=1)
    # Wrong matches of an untrained network also move their neighbors.
    assert np.mean(apart < 1e-3) > 0.8 and np.mean(apart < 0.5) > 0.95


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_close(images, precision):
    matcher = Matcher(oracle_matcher().network, MatcherConfig(), device="cpu", precision=precision)
    found = matcher.match(*images)
    error = found.points1 - VIEW1.from_scene(VIEW0.to_scene(found.points0))
    assert len(found) > 300 and np.abs(np.median(error, axis=0)).max() < 0.3
    assert matcher.info["precision"] == precision


MEMORY = """
import resource, sys
import numpy as np, torch
from dualrc.config import preset
from dualrc.matcher import Matcher, prefetch
from dualrc.model.dualrc import make_network

class Planted(torch.nn.Module):
    # The whole backbone runs; then its maps are overwritten, so that the search has something to find.
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, images):
        maps = self.backbone(images)
        for seed, values in enumerate(maps):
            values.normal_(generator=torch.Generator().manual_seed(seed))
        return maps

network_config, matcher_config = preset("paper")
network = make_network(network_config)
network.backbone = Planted(network.backbone)
image = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), np.uint8)
matches = Matcher(network, matcher_config, device="cpu").match(image, image)
assert matches.info["network_size0"] == (1600, 1200)
assert len(matches) > 50000 and np.array_equal(matches.points0, matches.points1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_a_large_pair_fits_into_four_gigabytes():
    """1600x1200 with the preset `paper` on a CPU takes minutes."""
    done = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True, text=True)
    print(f"{float(done.stdout):.2f} GiB resident at most")
    assert float(done.stdout) < 4
