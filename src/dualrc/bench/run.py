"""The benchmark: what each stage takes in time and memory, for given sizes and devices."""

import gc
import os
import platform
import re
import tempfile
from collections.abc import Sequence, Sized
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console

from dualrc import config as configs
from dualrc.bench import counts, profiler
from dualrc.bench.clock import Rates, Timing, measure_rates, time_interleaved
from dualrc.bench.counts import Work
from dualrc.bench.memory import Peaks, measure_peaks
from dualrc.bench.methods import (
    BATCH,
    COARSE,
    FEATURES,
    FURTHER,
    MATCH,
    PICTURES,
    SEARCH,
    WHOLE,
    Dualrc,
    Method,
    MethodName,
    Task,
    check_installed,
    make_matcher,
    make_method,
    why_not,
)
from dualrc.bench.planted import Motion
from dualrc.bench.report import show
from dualrc.bench.results import DeviceResult, Row, Search, SizeResult, growth
from dualrc.collection.machine import cores
from dualrc.config import MIN_SIDE
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation.report import write_json
from dualrc.files import check_writable
from dualrc.image import read
from dualrc.matcher import Matcher, Precision
from dualrc.matches import Size
from dualrc.model import trace
from dualrc.scenes import make_pair

FORMAT = "dualrc-bench-1"
_SCENE = 1
_LARGEST_SCENE = 1600  # px of the long side that are rendered; larger pictures are scaled up from these
_BATCH_REPEATS = 3
_LIMIT_S = 20.0  # of a stage in all; slower ones are repeated less often
_NEAR_PX = 8.0  # two fine cells
_OTHERS: tuple[MethodName, ...] = ("literal", "loftr", "sift")
_NOTED = {FEATURES: "kernel.backbone", COARSE: "kernel.consensus", SEARCH: "kernel.search"}


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure."""

    sizes: tuple[Size, ...]  # of the pictures, (width, height)
    devices: tuple[str, ...] = ()  # none: the best there is
    preset: str = "default"
    weights: Path | None = None
    precision: Precision | None = None
    pair: tuple[Path, Path] | None = None  # None: a rendered scene
    batch: int | None = None  # pairs; None: 32 on a GPU, 4 elsewhere; 0: no batches
    others: tuple[MethodName, ...] = ()
    repeats: int | None = None  # None: 20 on a GPU, 5 elsewhere; 0: memory alone
    out: Path | None = None


def bench(settings: BenchSettings, *, screen: Console, messages: Console) -> dict[str, Any]:
    """Measure, print the tables and write the JSON; gives what the JSON holds."""
    settings = replace(settings, devices=settings.devices or (_best_device(),))
    _check(settings)
    results = []
    with tempfile.TemporaryDirectory(prefix="dualrc-bench-") as folder:
        with messages.status("Making the pictures..."):
            _write_pictures(settings, Path(folder))
        for device in settings.devices:
            results.append(_measure_device(settings, device, Path(folder), messages))
            show(results[-1], screen)
    content = {"format": FORMAT, "settings": asdict(settings), "versions": _versions(), "devices": results}
    if settings.out is not None:
        write_json(settings.out, content)
        screen.print(f"Written: {settings.out}", highlight=False, soft_wrap=True)
    return content


def parse_size(text: str) -> Size:
    """A picture's size from WIDTHxHEIGHT."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip().lower())
    if found is None:
        raise ConfigError(f"--size {text} is no size; give WIDTHxHEIGHT in pixels, such as 640x480.")
    size = int(found[1]), int(found[2])
    if min(size) < MIN_SIDE:
        raise ConfigError(f"--size {text} is too small; give at least {MIN_SIDE} pixels a side.")
    return size


def _check(settings: BenchSettings) -> None:
    """Refuse now what would fail after long work."""
    configs.preset(settings.preset)
    if settings.batch is not None and settings.batch < 0:
        raise ConfigError(f"--batch {settings.batch} must not be negative; 0 leaves batches out.")
    if settings.repeats is not None and settings.repeats < 0:
        raise ConfigError(f"--repeats {settings.repeats} must not be negative; 0 measures memory alone.")
    for method in settings.others:
        check_installed(method)
    if settings.out is not None:
        check_writable(settings.out)
    for device in settings.devices:
        # Loading finds out about the device, the weights and the precision, each with its own remedy.
        make_matcher(_task(settings, "dualrc", device, settings.sizes[0], Path()))


def _task(settings: BenchSettings, method: MethodName, device: str, size: Size, folder: Path) -> Task:
    batch = settings.batch if settings.batch is not None else 32 if device.startswith("cuda") else 4
    return Task(
        method=method,
        preset=settings.preset,
        weights=None if settings.weights is None else str(settings.weights),
        device=device,
        precision=settings.precision,
        size=size,
        batch=batch,
        folder=str(folder / f"{size[0]}x{size[1]}"),
    )


def _write_pictures(settings: BenchSettings, folder: Path) -> None:
    """The pair at every size, as JPEG: decoding is a stage too."""
    if settings.pair is not None:
        images = [Image.fromarray(read(path)) for path in settings.pair]
    else:
        largest = max(settings.sizes, key=max)
        ratio = min(1.0, _LARGEST_SCENE / max(largest))
        device = "cuda" if any(name.startswith("cuda") for name in settings.devices) else "cpu"
        pair = make_pair(_SCENE, size=(round(largest[0] * ratio), round(largest[1] * ratio)), device=device)
        images = [Image.fromarray(rendering.image.cpu().numpy()) for rendering in pair]
    for size in settings.sizes:
        place = folder / f"{size[0]}x{size[1]}"
        place.mkdir(exist_ok=True)
        for image, name in zip(images, PICTURES, strict=True):
            image.resize(size, Image.Resampling.LANCZOS).save(place / name, quality=95)


def _measure_device(settings: BenchSettings, device: str, folder: Path, messages: Console) -> DeviceResult:
    matcher = make_matcher(_task(settings, "dualrc", device, settings.sizes[0], folder))
    with messages.status(f"What {device} can do..."):
        rates = measure_rates(matcher.device, matcher.precision)
    sizes = []
    for size in sorted(set(settings.sizes), key=lambda size: size[0] * size[1]):
        with messages.status(f"{size[0]}x{size[1]} on {device}..."):
            sizes.append(_measure_size(settings, device, size, folder, rates))
    return DeviceResult(
        device=device,
        precision=matcher.precision,
        machine=_machine(matcher.device),
        preset=settings.preset,
        weights=matcher.weights_hash or "generated",
        config=matcher.info,
        rates=rates,
        sizes=tuple(sizes),
        growth=growth(sizes),
    )


def _measure_size(settings: BenchSettings, device: str, size: Size, folder: Path, rates: Rates) -> SizeResult:
    names: tuple[MethodName, ...] = ("dualrc", *settings.others)
    notes, tasks = list[str](), list[Task]()
    for name in names:
        task = _task(settings, name, device, size, folder)
        reason = why_not(task)
        if reason is None:
            tasks.append(task)
        else:
            notes.append(reason)
    peaks: dict[str, Peaks | None] = {}
    for task in tasks:  # before anything is built here that would count too
        try:
            peaks[task.method] = measure_peaks(task)
        except (DataError, RuntimeError) as error:
            notes.append(f"Memory of {task.method}: {error}")
        _release()
    rows, search = list[Row](), None
    if settings.repeats != 0:
        methods = {task.method: make_method(task) for task in tasks}
        fast = methods["dualrc"]
        assert isinstance(fast, Dualrc)
        timings = _time(methods, fast.matcher, settings, notes)
        search, ran = _trace(fast, notes)
        rows = [
            _row(method, stage, timing, methods[method], ran)
            for (method, stage), timing in timings.items()
            if stage != MATCH
        ]
        work = _work(fast, search)
        rows = [_with_work(row, work, rates) for row in rows]
    else:
        rows = [
            Row(method=method, stage=stage, timing=None)
            for method, found in peaks.items()
            for stage in (found.stages if found else ())
        ]
    _release()
    seen = tasks[0].seen
    return SizeResult(
        size=size,
        network_size=seen,
        tensor_entries=counts.cells(seen) ** 2,
        search=search,
        rows=tuple(_with_peak(row, peaks.get(row.method)) for row in rows),
        notes=tuple(notes),
    )


def _time(
    methods: dict[MethodName, Method], matcher: Matcher, settings: BenchSettings, notes: list[str]
) -> dict[tuple[MethodName, str], Timing]:
    """Medians of every stage of every method, by (method, stage)."""
    device = matcher.device
    repeats = settings.repeats or (20 if device.type == "cuda" else 5)
    runs = {(name, stage): run for name, method in methods.items() for stage, run in method.runs().items()}
    batches = {key: run for key, run in runs.items() if key[1] == BATCH}
    single = {key: run for key, run in runs.items() if key not in batches}
    timings, failures = time_interleaved(single, device, repeats=repeats, limit_s=_LIMIT_S)
    found, failed = time_interleaved(batches, device, repeats=min(repeats, _BATCH_REPEATS), limit_s=_LIMIT_S)
    notes += [f"{method}, {stage}: {reason}" for (method, stage), reason in (failures | failed).items()]
    result: dict[tuple[MethodName, str], Timing] = {}
    for (method, stage), timing in (timings | found).items():
        result[method, stage] = timing
        if stage == MATCH and (method, COARSE) in timings:
            result[method, SEARCH] = timing.minus(timings[method, COARSE])
    return result


def _row(method: str, stage: str, timing: Timing, runs: Method, ran: dict[str, str]) -> Row:
    """A stage with its kernels; the profiler looks at one more run."""
    row = Row(method=method, stage=stage, timing=timing)
    if method != "dualrc":
        return replace(row, matches=_count(runs.runs()[stage]()))
    assert isinstance(runs, Dualrc)
    device, available = runs.matcher.device, runs.runs()
    if stage == SEARCH:
        both = profiler.kernel_seconds(available[MATCH], device)
        seconds = profiler.beyond(both, profiler.kernel_seconds(available[COARSE], device))
    elif stage == BATCH:
        return replace(row, pairs_per_s=runs.task.batch / timing.median_s)
    else:
        seconds = profiler.kernel_seconds(available[stage], device)
    matches = _count(available[stage]()) if stage in (WHOLE, FURTHER) else None
    return replace(row, ran=ran.get(stage), kernels=profiler.top(seconds), matches=matches)


def _count(result: object) -> int | None:
    return len(result) if isinstance(result, Sized) else None


def _trace(method: Dualrc, notes: list[str]) -> tuple[Search | None, dict[str, str]]:
    """What the network tells of its search, and of what it ran, by stage."""
    try:
        with trace.recording() as seen:
            method.features()
            found = method.match()
    except RuntimeError as error:  # reported as the stages' failures too
        notes.append(f"Search: {str(error).splitlines()[0]}")
        return None, {}
    noted = seen.notes
    ran = {
        stage: ", ".join(sorted({str(name) for name in noted[key]})) for stage, key in _NOTED.items() if key in noted
    }
    search = Search(on="planted features" if method.task.generated else "pictures", matches=len(found.scores))
    if method.task.generated:
        true = Motion().points1(found.points0, method.task.seen, method.task.seen)
        near = (true - found.points1).norm(dim=1) <= _NEAR_PX
        search = replace(search, planted_correct=float(near.float().mean()) if len(near) else 0.0)
    if "search.visited" not in noted:
        return search, ran
    groups, candidates = ([int(count) for count in noted[f"search.{key}"]] for key in ("groups", "candidates"))
    visited = sum(float(count) for count in noted["search.visited"])
    possible = sum(group * cells for group, cells in zip(groups, candidates, strict=True))
    return replace(
        search,
        groups=sum(groups),
        visited_cells=visited / max(1, sum(groups)),
        visited_share=visited / max(1, possible),
        widened_groups=sum(int(count) for count in noted["search.widened"]) if "search.widened" in noted else None,
    ), ran


def _with_work(row: Row, stages: dict[str, Work], rates: Rates) -> Row:
    """What the stage had to do, and how near to the device's limits it did that."""
    work = stages.get(row.stage)
    if work is None or row.timing is None or row.method != "dualrc":
        return row
    seconds = row.timing.median_s
    return replace(
        row,
        work=work,
        matrix_share=work.operations / seconds / rates.operations_per_s if seconds else None,
        bandwidth_share=work.bytes / seconds / rates.bytes_per_s if seconds else None,
    )


def _work(fast: Dualrc, search: Search | None) -> dict[str, Work]:
    """The least that each stage has to do; the search's is known only where it tells what it visited."""
    config, seen = fast.matcher.network.config, fast.task.seen
    value_bytes = getattr(torch, fast.matcher.precision).itemsize
    features = counts.features_work(config, seen, value_bytes)
    coarse = counts.coarse_work(config, seen, seen, value_bytes)
    work = {FEATURES: features, COARSE: coarse}
    if search is None or search.visited_cells is None or search.groups is None:
        return work
    visited = search.visited_cells * search.groups
    work[SEARCH] = counts.search_work(config, seen, seen, value_bytes, visited=visited, matches=search.matches)
    work[FURTHER] = coarse + work[SEARCH]
    work[WHOLE] = features + features + work[FURTHER]
    return work


def _with_peak(row: Row, peaks: Peaks | None) -> Row:
    if peaks is None or row.stage not in peaks.stages:
        return row
    peak = peaks.stages[row.stage]
    return replace(row, peak_bytes=peak, working_bytes=max(peak - peaks.loaded, 0))


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _machine(device: torch.device) -> dict[str, Any]:
    machine = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"cpu": machine["processor"], "processor": properties.name, "gpu_memory": properties.total_memory}
    return machine


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _versions() -> dict[str, str | None]:
    packages = ("dualrc", "torch", "triton", "numpy", "kornia", "opencv-python-headless")
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
    return versions


def others_of(names: Sequence[str]) -> tuple[MethodName, ...]:
    """Methods from the command line that are measured beside this project's."""
    for name in names:
        if name not in _OTHERS:
            raise ConfigError(f"--with {name} is not known; choose from {', '.join(_OTHERS)}.")
    return tuple(other for other in _OTHERS if other in names)


def sizes_of(texts: Sequence[str]) -> tuple[Size, ...]:
    """Sizes from the command line, or those that a laptop does in a minute."""
    return tuple(dict.fromkeys(parse_size(text) for text in texts)) or ((320, 240), (640, 480))
