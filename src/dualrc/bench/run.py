"""The benchmark: what each stage takes in time and memory, for given sizes and devices."""

import gc
import re
import tempfile
from collections.abc import Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console

from dualrc import config as configs
from dualrc.bench import counts, profiler
from dualrc.bench.accounts import trace_search, with_work, work_of
from dualrc.bench.clock import Rates, Run, measure_rates, time_interleaved
from dualrc.bench.machine import busy, machine_of, versions
from dualrc.bench.memory import Peaks, measure_peaks
from dualrc.bench.methods import (
    BATCH,
    COARSE,
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
from dualrc.bench.report import show
from dualrc.bench.results import DeviceResult, Row, SizeResult, growth
from dualrc.config import MIN_SIDE
from dualrc.errors import ConfigError, DualRCError
from dualrc.evaluation.report import write_json
from dualrc.files import check_writable
from dualrc.image import Scale, read
from dualrc.matcher import Precision
from dualrc.matcher.budget import Budget
from dualrc.scenes import make_pair
from dualrc.types import Size

FORMAT = "dualrc-bench-1"
_SCENE = 1
_LARGEST_SCENE = 1600  # px of the long side that are rendered; larger pictures are scaled up from these
_BATCH_PIXELS = 1024 * 768  # of larger pictures, batches are measured only where asked for
_LIMIT_S = 20.0  # of a stage in all; slower ones are repeated less often
_PLANTED = (
    f"there are no trained weights of this preset: features are made with generated ones; {COARSE}, search, {FURTHER} "
    f"and {BATCH} are of planted features, and {WHOLE} is making features of both pictures, then the {FURTHER}."
)
_OTHERS: tuple[MethodName, ...] = ("literal", "loftr", "sift")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure."""

    sizes: tuple[Size, ...]  # of the pictures, (width, height)
    devices: tuple[str, ...] = ()  # none: the best there is
    preset: str = "default"
    weights: Path | None = None
    precision: Precision | None = None
    max_memory: float | None = None  # GiB for a pair; None: most of what is free
    pair: tuple[Path, Path] | None = None  # None: a rendered scene
    batch: int | None = None  # pairs; None: 32 on a GPU, 4 elsewhere, of pictures that are not large; 0: no batches
    others: tuple[MethodName, ...] = ()
    repeats: int | None = None  # None: 20 on a GPU, 5 elsewhere; 0: memory alone
    out: Path | None = None


def bench(settings: BenchSettings, *, screen: Console, messages: Console) -> dict[str, Any]:
    """Measure, print the tables and write the JSON; gives what the JSON holds."""
    settings = replace(settings, devices=settings.devices or (_best_device(),))
    _check(settings)
    if (warning := busy()) is not None:
        messages.print(f"Note: {warning}", style="yellow", highlight=False, soft_wrap=True)
    results: dict[str, DeviceResult] = {}
    content = {"format": FORMAT, "settings": asdict(settings), "versions": versions(), "devices": results}
    with tempfile.TemporaryDirectory(prefix="dualrc-bench-") as folder:
        with messages.status("Making the pictures..."):
            _write_pictures(settings, Path(folder))
        for device in settings.devices:
            for found in _measure_device(settings, device, Path(folder), messages):
                results[device] = found
                if settings.out is not None:  # after every size, so that little is lost if a later one fails
                    write_json(settings.out, content)
            show(results[device], screen)
    if settings.out is not None:
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
    batch = settings.batch
    if batch is None:
        small = size[0] * size[1] <= _BATCH_PIXELS
        batch = (32 if device.startswith("cuda") else 4) if small else 0
    return Task(
        method=method,
        preset=settings.preset,
        weights=None if settings.weights is None else str(settings.weights),
        device=device,
        precision=settings.precision,
        size=size,
        batch=batch,
        folder=str(folder / f"{size[0]}x{size[1]}"),
        max_memory=settings.max_memory,
    )


def _write_pictures(settings: BenchSettings, folder: Path) -> None:
    """The pair at every size, as JPEG: decoding is a stage too."""
    if settings.pair is not None:
        images = [Image.fromarray(read(path)) for path in settings.pair]
    else:
        largest = max(settings.sizes, key=max)
        ratio = min(1.0, _LARGEST_SCENE / max(largest))
        pair = make_pair(_SCENE, size=(round(largest[0] * ratio), round(largest[1] * ratio)))
        images = [Image.fromarray(rendering.image.numpy()) for rendering in pair]
    for size in settings.sizes:
        place = folder / f"{size[0]}x{size[1]}"
        place.mkdir(exist_ok=True)
        for image, name in zip(images, PICTURES, strict=True):
            image.resize(size, Image.Resampling.LANCZOS).save(place / name, quality=95)


def _measure_device(settings: BenchSettings, device: str, folder: Path, messages: Console) -> Iterator[DeviceResult]:
    """What is known after each size, the smallest first."""
    matcher = make_matcher(_task(settings, "dualrc", device, settings.sizes[0], folder))
    precision, info, place, budget = matcher.precision, matcher.info, matcher.device, matcher.budget
    dtype = matcher.dtype
    del matcher  # or its weights would count in every peak
    with messages.status(f"What {device} can do..."):
        rates = measure_rates(place, dtype)
    _release()
    sizes: list[SizeResult] = []
    for size in sorted(set(settings.sizes), key=lambda size: size[0] * size[1]):
        with messages.status(f"{size[0]}x{size[1]} on {device}..."):
            sizes.append(_measure_size(settings, device, size, folder, rates, budget))
        yield DeviceResult(
            device=device,
            precision=precision,
            machine=machine_of(place),
            preset=settings.preset,
            weights=info["weights"] or "generated",
            config=info,
            rates=rates,
            sizes=tuple(sizes),
            growth=growth(sizes),
        )


def _measure_size(
    settings: BenchSettings, device: str, size: Size, folder: Path, rates: Rates, budget: Budget
) -> SizeResult:
    names: tuple[MethodName, ...] = ("dualrc", *settings.others)
    notes, tasks = list[str](), list[Task]()
    if _task(settings, "dualrc", device, size, folder).generated:
        notes.append(_PLANTED)
    for name in names:
        task = _task(settings, name, device, size, folder)
        reason = why_not(task)
        if reason is None:
            tasks.append(task)
        else:
            notes.append(reason)
    scale = Scale(picture=size, network=tasks[0].seen)
    seen = budget.fitted((scale, scale))[0].network
    if seen != tasks[0].seen:
        notes.append(f"{size[0]}x{size[1]} does not fit into the memory; what is measured is {seen[0]}x{seen[1]}.")
    peaks: dict[str, Peaks | None] = {}
    for task in tasks:  # before anything is built here that would count too
        try:
            found = peaks[task.method] = measure_peaks(task)
        except (DualRCError, RuntimeError) as error:
            notes.append(f"Memory of {task.method}: {error}")
        else:
            notes += [f"Memory of {task.method}: {found.failure}"] if found and found.failure else []
        _release()
    rows, search = list[Row](), None
    if settings.repeats != 0:
        methods = {task.method: make_method(task) for task in tasks}
        fast = methods["dualrc"]
        assert isinstance(fast, Dualrc)
        rows = _time(methods, fast.matcher.device, settings, notes)
        search, ran = trace_search(fast, notes)
        rows = [_with_kernels(row, fast, ran) if row.method == "dualrc" else row for row in rows]
        work = work_of(fast, search)
        rows = [with_work(row, work, rates) for row in rows]
    else:
        rows = [
            Row(method=method, stage=stage, timing=None)
            for method, measured in peaks.items()
            for stage in (measured.stages if measured else ())
        ]
    _release()
    return SizeResult(
        size=size,
        network_size=seen,
        tensor_entries=counts.cells(seen) ** 2,
        search=search,
        rows=tuple(_with_peak(row, peaks.get(row.method)) for row in rows),
        notes=tuple(notes),
    )


def _time(
    methods: dict[MethodName, Method], device: torch.device, settings: BenchSettings, notes: list[str]
) -> list[Row]:
    """Every stage of every method with its times."""
    repeats = settings.repeats or (20 if device.type == "cuda" else 5)
    found: dict[tuple[str, str], int | None] = {}
    runs = {
        (name, stage): partial(_keep_count, found, (name, stage), run)
        for name, method in methods.items()
        for stage, run in method.runs().items()
    }
    timings, failures = time_interleaved(runs, device, repeats=repeats, limit_s=_LIMIT_S)
    notes += [f"{method}, {stage}: {reason}" for (method, stage), reason in failures.items()]
    rows = []
    for (method, stage), timing in timings.items():
        if stage != MATCH:
            rows.append(Row(method=method, stage=stage, timing=timing, matches=found[method, stage]))
        elif (method, COARSE) in timings:
            rows.append(Row(method=method, stage=SEARCH, timing=timing.minus(timings[method, COARSE])))
    return rows


def _keep_count(found: dict[tuple[str, str], int | None], key: tuple[str, str], run: Run) -> None:
    """Run, and keep the number of matches where the stage ends with such; not the matches, which take memory."""
    result = run()
    found[key] = len(result) if key[1] in (FURTHER, WHOLE) and isinstance(result, Sized) else None


def _with_kernels(row: Row, method: Dualrc, ran: dict[str, str]) -> Row:
    """A stage with what it ran; the profiler looks at one more run."""
    device, runs = method.matcher.device, method.runs()
    if row.stage == BATCH:
        assert row.timing is not None
        return replace(row, pairs_per_s=method.task.batch / row.timing.median_s)
    if row.stage == SEARCH:
        both = profiler.kernel_seconds(runs[MATCH], device)
        seconds = profiler.beyond(both, profiler.kernel_seconds(runs[COARSE], device))
    else:
        seconds = profiler.kernel_seconds(runs[row.stage], device)
    return replace(row, ran=ran.get(row.stage), kernels=profiler.top(seconds))


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


def others_of(names: Sequence[str]) -> tuple[MethodName, ...]:
    """Methods from the command line that are measured beside this project's."""
    for name in names:
        if name not in _OTHERS:
            raise ConfigError(f"--with {name} is not known; choose from {', '.join(_OTHERS)}.")
    return tuple(other for other in _OTHERS if other in names)


def sizes_of(texts: Sequence[str]) -> tuple[Size, ...]:
    """Sizes from the command line, or those that a laptop does in a minute."""
    return tuple(dict.fromkeys(parse_size(text) for text in texts)) or ((320, 240), (640, 480))
