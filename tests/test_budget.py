"""Tests of the memory budget: the memory of a pair is predicted, and pairs that do not fit are scaled down."""

import ctypes
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import View, match_set, oracle_matcher, same_matches, texture, tiny_matcher
from PIL import Image

from dualrc import machine
from dualrc.config import preset
from dualrc.errors import ImageError
from dualrc.image import Scale
from dualrc.matcher import load, many
from dualrc.matcher.budget import Budget, NoMemoryError
from dualrc.measure import held, in_new_process, peak, reset_peak
from dualrc.ops import choose

GIB = 2**30
VIEW0, VIEW1 = View(320, 240, (20, 60)), View(304, 256, (30, 50), (0.95, 0.97))


def match_with_itself(asked):
    """Match a random image with itself; return the matches and the peak growth of memory in bytes."""
    ((width, height), engine), cpu = asked, torch.device("cpu")
    torch.set_num_threads(1)
    matcher = load(device="cpu", engine=engine)
    # The smallest workspace; otherwise torch would use more.
    matcher.budget.total = matcher.budget.least((seen_as(width, height), seen_as(width, height)))
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    image = np.array(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
    matcher.match(image[:64, :64], image[:64, :64])  # what is made once
    # Otherwise the match reuses memory that loading the weights left behind.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    reset_peak(cpu)
    before = held(cpu)
    count = len(matcher.match(image, image))
    return count, peak(cpu) - before


def seen_as(width, height):
    return Scale(image_size=(width, height), input_size=(width, height))


def budget_of(name, max_memory=1.0, device="cpu", engine=None):
    dtype = torch.float16 if device == "cuda" else torch.float32
    engine = "triton+graphs" if device == "cuda" else choose(torch.device("cpu"), engine).name
    return Budget(preset(name)[0], torch.device(device), dtype, max_memory, engine=engine)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are Linux's")
@pytest.mark.parametrize("size", [(640, 480), (832, 320)])
def test_the_estimate_is_what_is_measured(size, cpu_engine):
    """For an image matched with itself, where every cell has a match, plus the minimum working memory."""
    count, measured = in_new_process(match_with_itself, (size, cpu_engine))
    assert count > 0.9 * size[0] * size[1] / 16
    pair = (seen_as(*size), seen_as(*size))
    assert measured < budget_of("default", engine=cpu_engine).least(pair) < 1.3 * measured + 40 * 2**20


# Measured peak of torch's allocations on a GPU in half precision in GiB, for a given working memory.
GPU = [
    ("default", (544, 400), 0.089, 0),
    ("default", (752, 560), 0.158, 0),
    ("default", (992, 736), 0.290, 0),
    ("default", (1312, 976), 0.552, 0),
    ("paper", (800, 592), 0.51, 0.5),
    ("paper", (1600, 1200), 1.32, 0.5),
    ("paper", (3200, 2400), 8.46, 0.5),
]


@pytest.mark.parametrize(("name", "size", "measured", "working"), GPU)
def test_the_estimate_for_a_gpu(name, size, measured, working):
    budget = budget_of(name, device="cuda")
    pair = (seen_as(*size), seen_as(*size))
    cells = size[0] // 16 * (size[1] // 16)
    shares = min(working, 2 * 54 * cells**2 / GIB)  # what consensus really takes of its working memory
    assert measured < budget.least(pair) / GIB + shares < 1.35 * measured + 0.1


def test_larger_pairs_need_more():
    for name in ("default", "paper"):
        for device in ("cpu", "cuda"):
            budget = budget_of(name, device=device)
            needs = [budget.least((seen_as(64, 64), seen_as(64, side))) for side in range(32, 640, 32)]
            assert needs == sorted(needs) and budget.need((seen_as(64, 64),) * 2) > needs[1]
            # If each of two images fits with an image of its own size, both fit together.
            wide, tall = seen_as(640, 320), seen_as(320, 480)
            assert budget.least((wide, tall)) <= max(budget.least((one, one)) for one in (wide, tall))


def test_features_are_extracted_side_by_side_where_memory_allows_it():
    small, large = (seen_as(640, 480),) * 2, (seen_as(1600, 1200),) * 2
    assert budget_of("default", 4.0).side_by_side(small) and budget_of("default", 4.0).side_by_side(large)
    assert not budget_of("default", 0.5).side_by_side(small) and not budget_of("default", 1.0).side_by_side(large)
    # The memory of the second thread is not given to anything else.
    budget = budget_of("default", 1.1)
    assert budget.side_by_side(small) and budget.spare(small) + budget.need(small) < budget.total - 50 * 2**20
    # Here the features take more memory than anything after them.
    assert not budget_of("paper", 100.0).side_by_side(large)


def test_the_definition_holds_the_whole_fine_correlation():
    pair = (seen_as(400, 304), seen_as(400, 304))
    config, cpu = preset("default")[0], torch.device("cpu")
    plain, whole = (
        Budget(config, cpu, torch.float32, 1.0, engine=name).least(pair) for name in ("torch", "definition")
    )
    assert whole > 4 * (16 * 25 * 19) ** 2 > 2 * plain


def test_working_memory_depends_on_the_sizes_alone():
    budget, pair = budget_of("default", max_memory=0.5), (seen_as(640, 480), seen_as(640, 480))
    assert budget.working(pair) == budget.working(pair) < 0.5 * GIB
    assert budget.working(pair) + budget.least(pair) == pytest.approx(0.5 * GIB + 32 * 2**20, abs=2)
    assert budget.working(pair, 2) < budget.working(pair)
    assert budget_of("default", max_memory=64.0).working(pair) == GIB // 2
    assert budget_of("default", max_memory=64.0, device="cuda").working(pair) == GIB
    assert budget_of("default", max_memory=1e-3).working(pair) > 0
    assert 1 <= budget.together(pair) < budget_of("default", max_memory=64.0).together(pair)


def test_without_a_budget_it_is_most_of_what_is_free(monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 10 * GIB)
    budget = budget_of("default", max_memory=None)
    assert budget.total == 8 * GIB
    monkeypatch.setattr(machine, "free_memory", lambda: 1)
    assert budget.total == 8 * GIB  # looked up once


def test_free_memory(tmp_path, monkeypatch):
    assert 0 < machine.free_memory() <= machine.memory()
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("100000\n")
    assert machine.free_memory() == 100_000 == machine.memory()
    (tmp_path / "memory.current").write_text("70000\n")
    (tmp_path / "memory.stat").write_text("anon 30000\nfile 40000\ninactive_file 25000\nactive_file 5000\n")
    assert machine.free_memory() == 60_000
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine, "_MEMORY", tmp_path / "meminfo")
    assert machine.free_memory() == machine.memory()
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable:     50 kB\n")
    assert machine.free_memory() == 50 * 1024


def least(matcher, size, own=None):
    """Return the memory in GiB with which a pair of this size just fits."""
    scale = Scale(image_size=own or size, input_size=size)
    return matcher.budget.least((scale, scale)) / GIB


@pytest.fixture(scope="module")
def images():
    return VIEW0.image(1), VIEW1.image(2)


def test_what_fits_is_not_changed(oracle, images):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tight = oracle_matcher(max_memory=least(oracle, (320, 256)) * 1.1)
        assert same_matches(tight.match(*images), oracle.match(*images))
        assert tight.features(images[0]).scale.input_size == (320, 240)


def test_a_small_budget_makes_images_smaller(oracle, images):
    small = oracle_matcher(max_memory=least(oracle, (160, 128), (320, 256)))
    with pytest.warns(UserWarning, match=r"A pair of 320x240 and 304x256 does not fit .* matched at .* max_memory"):
        found = small.match(*images)
    sizes = found.info["network_size0"], found.info["network_size1"]
    assert all(32 <= side < 240 and side % 16 == 0 for size in sizes for side in size)
    assert small.budget.fits(
        tuple(Scale(image_size=v, input_size=s) for v, s in zip(((320, 240),) * 2, sizes, strict=True))
    )
    assert found.size0 == (320, 240) and len(found) > 100
    error = found.points1 - VIEW1.from_scene(VIEW0.to_scene(found.points0))
    assert np.median(np.abs(error)) < 3  # of image pixels: a cell has eight
    # The warning is given once per size.
    assert same_matches(small.match(*images), found)
    with pytest.warns(UserWarning, match="A pair of 320x240 does not fit"):
        features = small.features(images[0])
    assert max(features.scale.input_size) < 320
    # All functions that take images do the same, even for an explicit size.
    assert len(small.match_points(*images, [[160, 120]])) == 1
    assert small.warp(*images).certainty.shape == (240, 320)
    with pytest.warns(UserWarning, match="does not fit"):
        asked = small.match(*images, size=480)
    assert asked.info["network_size0"] <= sizes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert small.match(*images, size=96).info["network_size0"] == (96, 64)


def test_the_largest_size_that_fits():
    budget = budget_of("default", max_memory=0.3)
    pair = seen_as(6000, 4000), seen_as(3008, 2000)
    pair = tuple(replace(scale, image_size=(640, 480)) for scale in pair)
    fitted = budget.fitted(pair)
    (w0, h0), (w1, h1) = (scale.input_size for scale in fitted)
    assert budget.fits(fitted) and w0 % 16 == h0 % 16 == w1 % 16 == h1 % 16 == 0
    assert w0 / h0 == pytest.approx(1.5, abs=0.1) and w0 / w1 == pytest.approx(2, abs=0.1)
    larger = tuple(replace(s, input_size=(s.input_size[0] + 32, s.input_size[1] + 32)) for s in fitted)
    assert not budget.fits(larger)
    # Features keep their size, and the other image is scaled down.
    half = budget.fitted((fitted[0], pair[1]), (True, False))
    assert half[0] == fitted[0] and budget.fits(half) and half[1].input_size < pair[1].input_size
    assert budget.fitted(pair, (True, True)) == pair
    # A thin image does not become thinner than the network's minimum.
    thin = budget.fitted((Scale(image_size=(64, 64), input_size=(40_000, 48)),) * 2)
    assert thin[0].input_size[1] == 32 and budget.fits(thin)


def test_where_not_even_the_smallest_fits(images):
    with pytest.raises(ImageError, match=r"Not even the smallest .* 32x32 needs .* give more max_memory"):
        tiny_matcher(max_memory=1e-6).match(*images)
    none = list(tiny_matcher(max_memory=1e-6).match_many([images], errors="empty"))
    assert len(none) == 1 and "Not even the smallest" in none[0].info["error"]


def short_of_memory(matcher, monkeypatch, longest, error=torch.OutOfMemoryError):
    """Make the network run out of memory above a number of cells along a side, or for batches."""
    match, tried = matcher.network.match, []

    def raising(features0, features1, **rest):
        tried.append((len(features0.coarse), max(*features0.coarse.shape[2:], *features1.coarse.shape[2:])))
        if tried[-1][1] > longest or tried[-1][0] > 1:
            raise error("can't allocate memory")
        return match(features0, features1, **rest)

    monkeypatch.setattr(matcher.network, "match", raising)
    return tried


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
@pytest.mark.parametrize("quality", ["standard", "high"])
def test_a_device_that_runs_out_of_memory(images, monkeypatch, error, quality):
    matcher = oracle_matcher()
    tried = short_of_memory(matcher, monkeypatch, 14, error)
    with pytest.warns(UserWarning, match="does not fit into the remaining memory of the device; it is matched at"):
        # High quality enlarges small images, unless a size is given.
        found = matcher.match(*images, quality=quality, size=320)
    assert [side for _, side in tried[:3]] == [20, 16, 12]
    assert found.info["network_size0"] == (192, 144) and len(found) > 100
    features = matcher.features(images[0]), matcher.features(images[1])
    with pytest.raises(ImageError, match="smaller size"):  # features have the size that they have
        matcher.match_features(*features)
    with pytest.raises(NoMemoryError):
        matcher.match(*features)
    # The image can still be scaled down, but here that is not enough.
    with pytest.raises(ImageError, match="smaller size"):
        matcher.match(features[0], images[1])


def test_a_device_without_any_memory(images, monkeypatch):
    matcher = tiny_matcher()
    tried = short_of_memory(matcher, monkeypatch, 0)
    with pytest.raises(ImageError, match=r"Not enough memory .* smaller size"):
        matcher.match(*images)
    assert tried[-1] == (1, 2)
    monkeypatch.setattr(matcher.network, "extract", lambda _: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(ImageError, match="smaller size"):
        matcher.features(images[0])

    def broken(_):
        raise RuntimeError("something else")

    monkeypatch.setattr(matcher.network, "extract", broken)
    with pytest.raises(RuntimeError, match="something else"):
        matcher.features(images[0])


def test_many_pairs_with_a_giant(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for number, path in enumerate(paths):
        Image.fromarray(texture(number, *((96, 64) if number < 3 else (960, 640)))).save(path)
    pairs = [
        (paths[0], paths[1]),
        (paths[1], paths[2]),
        (paths[2], paths[3]),
        (paths[3], paths[3]),
        (paths[2], paths[0]),
    ]
    large, one_by_one = tiny_matcher(), [0, 1, 4]
    expected = [large.match(*pair) for pair in pairs]
    small = tiny_matcher(max_memory=least(large, (480, 320), (960, 640)))
    monkeypatch.setattr(many, "batch_size", lambda matcher, pair: 2)
    with pytest.warns(UserWarning, match=r"A pair of (96x64 and )?960x640 does not fit"):
        found = list(small.match_many(pairs))
    for number in one_by_one:
        assert len(match_set(found[number]) & match_set(expected[number])) >= 0.999 * len(expected[number])
    assert max(found[3].info["network_size0"]) <= 496 and len(found[3]) > 100
    # If the device runs out of memory nevertheless, batches are split into pairs, then pairs are scaled down.
    matcher = tiny_matcher()
    tried = short_of_memory(matcher, monkeypatch, 50)
    with pytest.warns(UserWarning, match="remaining memory of the device"):
        found = list(matcher.match_many(pairs))
    assert [count for count, _ in tried[:3]] == [2, 1, 1]
    assert [len(one) > 0 for one in found] == [True] * 5
    assert found[3].info["network_size0"] == (768, 512)
    for number in one_by_one:
        assert len(match_set(found[number]) & match_set(expected[number])) >= 0.999 * len(expected[number])
