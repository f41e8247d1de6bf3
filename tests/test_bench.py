"""Tests of the benchmark: counts, times, outputs, and the motion of synthetic features."""

import json
import math
import mmap
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import plain_consensus, rand, texture, tiny_network
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from dualrc import ConfigError, DataError, measure
from dualrc.bench import BenchSettings, baselines, benchmark, methods, profiler, results
from dualrc.bench.methods import Stage, Task
from dualrc.bench.planted import Motion, plant
from dualrc.config import PRESETS, ConsensusConfig
from dualrc.measure import Rates, Timing
from dualrc.model.backbone import make_backbone
from dualrc.model.dualrc import Features
from dualrc.ops import int8, memory
from dualrc.ops.memory import Work

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Write an image, and the same image shifted by 16 pixels, with the names that the benchmark uses."""
    folder = tmp_path_factory.mktemp("images")
    large = texture(3, 176, 128)
    for name, start in zip(methods.IMAGES, (0, 16), strict=True):
        Image.fromarray(large[:, start : start + 160]).save(folder / name, quality=95)
    return folder


@pytest.fixture
def task(weights, images) -> Task:
    settings = BenchSettings(sizes=((160, 128),), weights=weights, batch=0)
    return Task(settings=settings, device="cpu", size=(160, 128), folder=images)


@pytest.fixture
def bench_command(run):
    """Run `dualrc bench`; return exit status, output and error output."""
    return partial(run, "bench")


# Synthetic features.


def empty_features(width: int, height: int, dtype: torch.dtype = torch.float32, channels: int = 48) -> Features:
    def map_of(stride: int) -> torch.Tensor:
        shape = (1, channels, height // stride, width // stride)
        return torch.empty(shape, dtype=dtype).to(memory_format=torch.channels_last)

    return Features(coarse=map_of(16), fine=map_of(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_planted_features_have_the_layout_of_those_they_stand_for(dtype):
    like0, like1 = empty_features(160, 128, dtype), empty_features(128, 96, dtype)
    for made, like in zip(plant(like0, like1), (like0, like1), strict=True):
        for one, other in ((made.coarse, like.coarse), (made.fine, like.fine)):
            assert one.shape == other.shape and one.dtype == dtype and one.stride() == other.stride()
        assert torch.allclose(made.fine.float().norm(dim=1), torch.ones(1), atol=2e-3)


def test_planted_features_depend_on_the_seed_alone():
    like = empty_features(64, 64)
    first, again, other = plant(like, like), plant(like, like), plant(like, like, seed=7)
    assert torch.equal(first[0].fine, again[0].fine) and torch.equal(first[1].coarse, again[1].coarse)
    assert not torch.equal(first[0].fine, other[0].fine)


@pytest.mark.parametrize("motion", [Motion(), Motion(matrix=((1.0, 0.0), (0.0, 1.0)), shift=(0.25, 0.0))])
def test_the_search_finds_the_planted_motion(motion):
    network = tiny_network(subpixel=False)
    network.consensus = plain_consensus()
    size0, size1 = (320, 240), (288, 256)
    planted = plant(empty_features(*size0), empty_features(*size1), motion=motion)
    with torch.inference_mode():
        found = network.match(*planted)
    error_px = (motion.points1(found.points0, size0, size1) - found.points1).norm(dim=1)
    assert len(error_px) > 300
    assert (error_px <= 8).float().mean() > 0.85
    assert error_px.median() < 4
    # Unrelated features do not match.
    stranger = plant(empty_features(*size0), empty_features(*size1), motion=motion, seed=50)
    with torch.inference_mode():
        found = network.match(planted[0], stranger[1])
    error_px = (motion.points1(found.points0, size0, size1) - found.points1).norm(dim=1)
    assert (error_px <= 8).float().mean() < 0.1


def test_motion_maps_pixels():
    motion = Motion(matrix=((1.0, 0.0), (0.0, 1.0)), shift=(0.5, 0.0))
    # Half of half an image to the right: 160 of 640 pixels.
    there = motion.points1(torch.tensor([[0.0, 0.0], [10.0, 20.0]]), (640, 480), (640, 480))
    assert torch.allclose(there, torch.tensor([[160.0, 0.0], [170.0, 20.0]]), atol=1e-3)
    # In an image of half the size, pixel centers are at (x + 0.5) / 2 - 0.5.
    there = Motion(matrix=((1.0, 0.0), (0.0, 1.0)), shift=(0.0, 0.0)).points1(torch.zeros(1, 2), (640, 480), (320, 240))
    assert torch.allclose(there, torch.full((1, 2), -0.25), atol=1e-4)


# Counting.


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_operations_of_the_backbone_are_those_that_torch_counts(preset):
    config = PRESETS[preset][0]
    with torch.device("meta"):
        backbone = make_backbone(config.backbone)
        with FlopCounterMode(display=False) as counter:
            backbone(torch.empty(1, 3, 96, 160))
    found = memory.extract_work(config, (160, 96), 2)
    assert found.operations == counter.get_total_flops()
    assert memory.extract_work(config, (160, 96), 4).bytes == 2 * found.bytes


def test_operations_of_the_consensus():
    assert memory.consensus_operations(ConsensusConfig()) == 2 * (2 * 81 * 16 + 2 * 81 * 16)
    assert memory.consensus_operations(ConsensusConfig(kernel_sizes=(5, 3, 3), channels=(2, 4, 1))) == 2 * 2 * (
        625 * 2 + 81 * 8 + 81 * 4
    )


def test_operations_of_coarse_tensor_and_search():
    config = PRESETS["default"][0]
    entries = (40 * 30) ** 2
    found = memory.coarse_work(config, (640, 480), (640, 480), 2)
    assert found.operations == entries * (2 * 384 + 5184)
    assert found.bytes == 2 * (5 * entries + 2 * 1200 * 384)
    searching = memory.search_work(config, (640, 480), (640, 480), 2, visited=1000, matches=0)
    assert searching.operations == 1000 * 16 * 16 * 2 * 96
    refined = memory.search_work(config, (640, 480), (640, 480), 2, visited=1000, matches=10)
    inputs = 2 * 96 + 81 + 1
    layers = inputs * 192 + 192 * 192 + 192 * 3
    assert refined.operations - searching.operations == 10 * 2 * (2 * 96 * 81 + 2 * layers)
    assert memory.refine_operations(PRESETS["paper"][0]) == 0


def test_shares_of_the_rates():
    row = results.Row(method="dualrc", stage=Stage.COARSE, timing=Timing.of([2.0]))
    rates = Rates(operations_per_s=100.0, bytes_per_s=40.0)
    shared = row.with_work(Work(operations=50.0, bytes=8.0), rates)
    assert (shared.matrix_share, shared.bandwidth_share) == (0.25, 0.1)
    assert row.with_work(None, rates) is row


# Timing.


def test_median_and_quartiles():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.low_s, timing.median_s, timing.high_s) == (2.0, 3.0, 4.0)
    assert timing.samples_s == (5.0, 1.0, 3.0, 2.0, 4.0)
    assert Timing.of([2.0]) == Timing(median_s=2.0, low_s=2.0, high_s=2.0, samples_s=(2.0,))
    assert Timing.of([3.0, 4.0]).minus(Timing.of([1.0, 5.0])).samples_s == (2.0, 0.0)


def test_runs_take_turns_and_failures_are_told():
    calls = []

    def failing():
        calls.append("failing")
        raise RuntimeError("no room\nand more")

    runs = {"a": lambda: calls.append("a"), "failing": failing, "b": lambda: calls.append("b")}
    timings, failures = measure.time_interleaved(runs, CPU, repeats=3, limit_s=10)
    # The first run of each is the warm-up.
    assert calls == ["a", "failing", "b", "a", "b", "a", "b", "a", "b"]
    assert failures == {"failing": "no room"}
    assert {name: len(timing.samples_s) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_slow_runs_are_repeated_less():
    timings, _ = measure.time_interleaved(
        {"slow": lambda: time.sleep(0.02), "quick": lambda: None}, CPU, repeats=8, limit_s=0.03
    )
    assert len(timings["slow"].samples_s) == 2 and len(timings["quick"].samples_s) == 8
    assert 0.02 <= timings["slow"].median_s < 1


def test_slow_runs_are_warmed_up_less(monkeypatch):
    monkeypatch.setattr(measure, "warm_ups", lambda device: 5)
    calls = []
    runs = {"slow": lambda: calls.append("slow") or time.sleep(0.02), "quick": lambda: calls.append("quick")}
    measure.time_interleaved(runs, CPU, repeats=1, limit_s=0.03)
    assert calls.count("slow") == 3 and calls.count("quick") == 6


def test_rates_are_of_this_world():
    rates = measure.measure_rates(CPU, torch.float32)
    assert 1e8 < rates.operations_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13


def test_the_profiler_tells_what_ran():
    one = rand(0, 300, 300)
    small = profiler.kernel_seconds(lambda: one @ one, CPU)
    both = profiler.kernel_seconds(lambda: (one @ one).cumsum(0).cumsum(1), CPU)
    assert profiler.top(small)[0].name == "aten::mm"
    assert "aten::cumsum" in both
    assert [k.name for k in profiler.top({"a": 1.0, "b": 3.0})] == ["b", "a"]
    assert profiler.top({"a": 1.0, "b": 3.0})[0].share == 0.75
    less = profiler.top({"a": 3.0, "b": 1.0}, without={"a": 1.0, "b": 2.0})
    assert [(kernel.name, kernel.share) for kernel in less] == [("a", 1.0)]
    assert profiler.top({}) == ()


def test_a_busy_machine_is_told_of():
    assert benchmark.busy_warning(1.0, 4) is None and benchmark.busy_warning(None, 4) is None
    assert "load 2.5, 4 cores" in benchmark.busy_warning(2.5, 4)


# Memory.


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone lets a peak be forgotten")
def test_peaks_are_forgotten_between_stages():
    measure.reset_peak(CPU)
    before = measure.peak(CPU)
    take_memory()
    assert measure.peak(CPU) > before + 150e6
    measure.reset_peak(CPU)
    assert measure.peak(CPU) < before + 50e6
    assert measure.peak_of(take_memory, CPU) > before + 150e6


def take_memory():
    """Take 200 MB of new memory and free it; a tensor may get resident memory that earlier tests freed."""
    with mmap.mmap(-1, 200_000_000) as memory:
        for _ in range(200):
            memory.write(bytes(1_000_000))


def describe_itself(argument):
    print("This is not the result.")
    return argument, os.getpid(), torch.get_num_threads()


def test_a_function_runs_in_a_new_process():
    argument, process, threads = measure.in_new_process(describe_itself, {"a": (1, 2)})
    assert argument == {"a": (1, 2)} and process != os.getpid() and threads == torch.get_num_threads()


def test_a_process_that_fails_says_why(task, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        benchmark.peaks_of(replace(task, folder=tmp_path))


def test_peaks_found_before_a_failure_are_kept(task, monkeypatch):
    def fail(self):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(methods.Dualrc, "further", fail)
    peaks = benchmark.peaks_here(task)
    assert peaks.failure == "out of memory"
    assert list(peaks.bytes) == [Stage.WHOLE, Stage.FEATURES, Stage.COARSE, Stage.SEARCH]


# Growth.


def size_result(side: int, seconds: float | None, working: int | None) -> results.SizeResult:
    timing = None if seconds is None else Timing.of([seconds])
    row = results.Row(method="dualrc", stage=Stage.COARSE, timing=timing, working_bytes=working)
    return results.SizeResult(
        size=(side, side), network_size=(side, side), tensor_entries=0, searches={}, rows=(row,), notes=()
    )


def test_growth_between_neighbouring_sizes():
    found = results.growth([size_result(128, 16.0, 400), size_result(64, 1.0, 100), size_result(512, 64.0, None)])
    assert [(item.size0[0], item.size1[0]) for item in found] == [(64, 128), (128, 512)]
    first, second = found
    assert (first.side_factor, first.time_factor, first.memory_factor) == (2.0, 16.0, 4.0)
    assert math.isclose(first.time_per_doubling, 16.0) and math.isclose(first.memory_per_doubling, 4.0)
    assert (second.side_factor, second.time_factor, second.memory_factor) == (4.0, 4.0, None)
    assert math.isclose(second.time_per_doubling, 2.0) and second.memory_per_doubling is None


def test_nothing_grows_from_one_size():
    assert results.growth([size_result(64, 1.0, 1)]) == ()
    assert results.growth([size_result(64, 1.0, 1), size_result(64, 2.0, 1)]) == ()
    assert results.growth([size_result(64, None, 0), size_result(128, 2.0, 8)])[0].time_factor is None


# Methods.


def test_the_reference_engine_finds_as_many_matches(task):
    assert methods.make_method(task).matcher.precision == ("int8" if int8.works() else "float32")
    small = replace(task, settings=replace(task.settings, precision="float32", max_memory=1.0))
    small = replace(small, size=(64, 48))
    found = methods.make_method(small).further()
    reference = methods.make_method(replace(small, method="reference"))
    assert list(reference.stages) == [Stage.FURTHER]
    assert len(reference.stages[Stage.FURTHER]()) == len(found) > 5


def test_generated_weights_are_timed_on_planted_features(images):
    settings = BenchSettings(sizes=((160, 128),), preset="paper", batch=1)
    method = methods.make_method(Task(settings=settings, device="cpu", size=(160, 128), folder=images))
    assert method.task.generated
    assert list(method.stages) == [
        *(Stage.DECODE, Stage.FEATURES, Stage.COARSE, Stage.MATCH, Stage.FURTHER, Stage.WHOLE, Stage.BATCH)
    ]
    search = results.describe_search(method)
    assert search.on == "planted features" and search.planted_correct > 0.7
    assert len(method.whole()) == len(method.further()) == search.matches == len(method.batched()[0])


def test_visited_cells_are_told(task):
    searches = {
        engine: results.describe_search(methods.make_method(replace(task, engine=engine)))
        for engine in ("torch", "definition")
    }
    everywhere, some = searches["definition"], searches["torch"]
    assert everywhere.visited_share == 1 and everywhere.visited_cells == 80
    assert everywhere.groups == everywhere.widened_groups == 80 + 80
    assert 8 <= some.visited_cells <= 80 and some.widened_groups <= some.groups <= 160
    assert everywhere.planted_correct is None


def test_what_does_not_fit_is_left_out_with_a_reason(task):
    assert replace(task, method="reference").reason_to_skip() is None
    large = replace(task, size=(640, 480))
    assert large.reason_to_skip() is None
    assert "1,440,000 entries" in replace(large, method="reference").reason_to_skip()
    assert "dualrc reference is left out" in replace(large, engine="reference").reason_to_skip()
    huge = replace(task, size=(16000, 12000))
    assert huge.reason_to_skip() is None
    assert "GiB" in replace(huge, method="loftr").reason_to_skip()
    assert "GiB" in replace(huge, engine="definition").reason_to_skip()


def test_loftr_runs(task):
    pytest.importorskip("kornia")
    assert methods.make_method(replace(task, method="loftr")).stages[Stage.WHOLE]().shape[1] == 4


def test_sift_finds_the_shift(task):
    pytest.importorskip("cv2")
    assert len(methods.make_method(replace(task, method="sift")).stages[Stage.WHOLE]()) > 0


# The command.

STAGES = list(Stage)[:-1]
TORCH, REFERENCE = "dualrc torch", "reference"


def test_the_command_prints_tables_and_writes_json(bench_command, weights, images, tmp_path):
    out = tmp_path / "bench.json"
    pair = [images / name for name in methods.IMAGES]
    status, screen, errors = bench_command(
        *("--weights", weights, "--pair", *pair, "--device", "cpu", "--size", "176x128", "--size", "32x32"),
        *("--engine", "torch", "--engine", "definition", "--repeats", 2, "--batch", 2, "--with", "reference"),
        *("--precision", "float32", "-o", out),
    )
    assert status == 0, errors
    assert "of matrix rate" in screen and "per doubling" in screen and f"Written: {out}" in screen
    content = json.loads(out.read_text())
    assert content["format"] == "dualrc-bench-2"
    assert content["versions"]["torch"] == torch.__version__ and content["settings"]["repeats"] == 2
    device = content["devices"]["cpu"]
    assert len(device["weights"]) == 16 and device["precision"] == "float32"
    assert device["config"]["network"]["backbone"]["kind"] == "compact"
    assert device["rates"]["operations_per_s"] > 0 and device["machine"]["cores"] >= 1
    assert [size["size"] for size in device["sizes"]] == [[32, 32], [176, 128]]
    for size, cells in zip(device["sizes"], (4, 88), strict=True):
        assert size["tensor_entries"] == cells**2
        assert list(size["searches"]) == [TORCH, "dualrc definition"]
        search = size["searches"][TORCH]
        assert search["on"] == "images" and search["planted_correct"] is None
        rows = {(row["method"], row["stage"]): row for row in size["rows"]}
        ours = [(method, stage) for method in size["searches"] for stage in STAGES]
        # The larger size is too large for the reference engine.
        others = [] if cells == 88 else [(REFERENCE, Stage.FURTHER)]
        assert list(rows) == ours + others and len(size["notes"]) == 1 - len(others)
        for (method, stage), row in rows.items():
            assert len(row["timing"]["samples_s"]) == 2, (method, stage)
            assert stage == Stage.DECODE or row["peak_bytes"] > 50e6
            assert row["engine"] == (None if REFERENCE in method or stage == Stage.DECODE else method.split()[1])
        assert rows[TORCH, Stage.COARSE]["matrix_share"] > 0 and rows[TORCH, Stage.COARSE]["kernels"]
        assert {row["matches"] for row in rows.values() if row["stage"] == Stage.FURTHER} == {search["matches"]}
        median_s = rows[TORCH, Stage.BATCH]["timing"]["median_s"]
        assert math.isclose(rows[TORCH, Stage.BATCH]["pairs_per_s"], 2 / median_s)
    growth = {(item["method"], item["stage"]): item for item in device["growth"]}
    assert math.isclose(growth[TORCH, Stage.COARSE]["side_factor"], 22**0.5)
    assert growth["dualrc definition", Stage.SEARCH]["time_factor"] > 1
    assert "reference is left out at 176x128: 7,744 entries" in screen


def test_memory_alone_of_a_rendered_pair(bench_command, weights, tmp_path):
    out = tmp_path / "bench.json"
    arguments = ("--weights", weights, "--device", "cpu", "--size", "64x64")
    status, screen, errors = bench_command(*arguments, "--repeats", 0, "--batch", 0, "-o", out)
    assert status == 0, errors
    rows = json.loads(out.read_text())["devices"]["cpu"]["sizes"][0]["rows"]
    assert {row["stage"] for row in rows} == {*STAGES} - {Stage.DECODE, Stage.BATCH}
    assert all(row["timing"] is None and row["peak_bytes"] > 0 for row in rows)
    assert "MiB" in screen


def test_a_size_that_does_not_fit_is_measured_smaller(bench_command, weights, tmp_path):
    out = tmp_path / "bench.json"
    arguments = ("--weights", weights, "--device", "cpu", "--size", "1024x1024", "--max-memory", 0.06)
    status, screen, errors = bench_command(*arguments, "--repeats", 0, "--batch", 0, "-o", out)
    assert status == 0, errors
    (size,) = json.loads(out.read_text())["devices"]["cpu"]["sizes"]
    width, height = size["network_size"]
    assert width == height < 1024 and size["tensor_entries"] == (width // 16) ** 4
    assert f"does not fit into memory; the measured size is {width}x{height}" in " ".join(screen.split())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--size", "640"), "WIDTHxHEIGHT"),
        (("--max-memory", 0), "must be above 0"),
        (("--size", "16x640"), "too small"),
        (("--with", "surf"), "reference, loftr, sift"),
        (("--engine", "steam"), "no engine 'steam'"),
        (("--batch", -1), "is negative"),
        (("--repeats", -2), "is negative"),
        (("--preset", "large"), "no preset"),
        (("--weights", "nowhere.safetensors"), "does not exist"),
        (("--device", "abacus"), "Cannot use"),
        (("--out", "nowhere/bench.json"), "does not exist"),
        (("--pair", "nowhere.jpg", "nothing.jpg"), "does not exist"),
    ],
)
def test_mistakes_are_told_in_one_line(bench_command, weights, arguments, words):
    given = ("--weights", weights) if "--weights" not in arguments and "--preset" not in arguments else ()
    device = ("--device", "cpu") if "--device" not in arguments else ()
    status, _, errors = bench_command(*given, *device, *arguments)
    assert status == 1
    assert words in errors and "Traceback" not in errors


def test_what_is_not_installed_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kornia.*pip install 'dualrc\[baselines\]'"):
        baselines.check_installed("loftr")
    monkeypatch.setattr(baselines, "has_opencv", lambda: False)
    with pytest.raises(ConfigError, match="OpenCV"):
        baselines.check_installed("sift")
    baselines.check_installed("reference")
