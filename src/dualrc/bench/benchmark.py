"""The benchmark: what each stage takes in time and memory, for given sizes, devices and engines."""

import gc
import tempfile
from collections.abc import Iterator, Sized
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console

from dualrc import config as configs
from dualrc import machine
from dualrc.bench import profiler
from dualrc.bench.baselines import check_installed
from dualrc.bench.machine import busy_warning, describe_machine, versions
from dualrc.bench.methods import PICTURES, Dualrc, Method, Stage, Task, coarse_cells, make_matcher, make_method
from dualrc.bench.report import show
from dualrc.bench.results import DeviceResult, Peaks, Row, Search, SizeResult, growth
from dualrc.bench.settings import BenchSettings
from dualrc.bench.work import describe_search, stage_work, with_work
from dualrc.errors import DualRCError
from dualrc.evaluation.report import write_json
from dualrc.files import check_writable
from dualrc.image import Scale, read
from dualrc.matcher.extract import choose_device
from dualrc.measure import (
    Rates,
    Run,
    held,
    in_new_process,
    measure_rates,
    peak_of,
    reason,
    reset_peak,
    time_interleaved,
)
from dualrc.scenes import make_pair
from dualrc.types import Size

FORMAT = "dualrc-bench-2"
_SCENE = 1
_LARGEST_SCENE = 1600  # px of the long side that are rendered; larger pictures are scaled up from these
_LIMIT_S = 20.0  # of a stage in all; slower ones are repeated less often
_PLANTED = (
    "there are no trained weights of this preset: features are made with generated ones; coarse tensor, search, "
    "further pair and batches are of planted features, and whole pair is making features of both pictures, then the "
    "further pair."
)


def bench(settings: BenchSettings, *, screen: Console, messages: Console) -> dict[str, Any]:
    """Measure, print the tables and write the JSON; gives what the JSON holds."""
    settings = replace(settings, devices=settings.devices or (choose_device(None).type,))
    _check(settings)
    if (warning := busy_warning(machine.load_average(), machine.cores())) is not None:
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


def _check(settings: BenchSettings) -> None:
    """Refuse now what would fail after long work."""
    configs.preset(settings.preset)
    for method in settings.others:
        check_installed(method)
    if settings.out is not None:
        check_writable(settings.out)
    for device in settings.devices:
        for task in _tasks(settings, device, settings.sizes[0], Path()):
            if task.method == "dualrc":
                make_matcher(task)  # checks device, engine, weights and precision, each with its own remedy


def _tasks(settings: BenchSettings, device: str, size: Size, folder: Path) -> list[Task]:
    """Our matcher by every engine, then the others."""
    task = Task(settings=settings, device=device, size=size, folder=folder / f"{size[0]}x{size[1]}")
    ours = [replace(task, engine=engine) for engine in settings.engines or (None,)]
    return ours + [replace(task, method=other) for other in settings.others]


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
    matcher = make_matcher(_tasks(settings, device, settings.sizes[0], folder)[0])
    with messages.status(f"What {device} can do..."):
        rates = measure_rates(matcher.device, matcher.dtype)
    result = DeviceResult(
        device=device,
        precision=matcher.precision,
        machine=describe_machine(matcher.device),
        preset=settings.preset,
        weights=matcher.weights_hash or "generated",
        config=matcher.info,
        rates=rates,
    )
    del matcher  # or its weights would count in every peak
    for size in sorted(set(settings.sizes), key=lambda size: size[0] * size[1]):
        with messages.status(f"{size[0]}x{size[1]} on {device}..."):
            sizes = (*result.sizes, _measure_size(_tasks(settings, device, size, folder), rates))
        result = replace(result, sizes=sizes, growth=growth(sizes))
        yield result


def _measure_size(tasks: list[Task], rates: Rates) -> SizeResult:
    settings, size, seen = tasks[0].settings, tasks[0].size, _fitted(tasks[0])
    notes = [_PLANTED] if tasks[0].generated else []
    if seen != tasks[0].seen:
        notes.append(f"{size[0]}x{size[1]} does not fit into the memory; what is measured is {seen[0]}x{seen[1]}.")
    skipped = {task: why for task in tasks if (why := task.reason_to_skip()) is not None}
    notes += skipped.values()
    tasks = [task for task in tasks if task not in skipped]
    peaks: dict[str, Peaks] = {}
    for task in tasks:  # before anything is built here that would count too
        _release()
        try:
            found = measure_peaks(task)
        except (DualRCError, RuntimeError) as error:
            notes.append(f"Memory of {task.name}: {error}")
            continue
        if found is not None:
            peaks[task.name] = found
            notes += [f"Memory of {task.name}: {found.failure}"] if found.failure else []
    _release()
    searches: dict[str, Search] = {}
    if settings.repeats == 0:
        rows = [Row(method=name, stage=stage) for name, found in peaks.items() for stage in found.stages]
    else:
        rows = _measure_times(tasks, rates, searches, notes)
    return SizeResult(
        size=size,
        network_size=seen,
        tensor_entries=coarse_cells(seen) ** 2,
        searches=searches,
        rows=tuple(_with_peak(row, peaks.get(row.method)) for row in rows),
        notes=tuple(notes),
    )


def measure_peaks(task: Task) -> Peaks | None:
    """Peak memory of a task's stages, on a CPU in a new process, so that no peak hides another.

    None on devices that don't tell.
    """
    kind = torch.device(task.device).type
    return peaks_here(task) if kind == "cuda" else in_new_process(peaks_here, task) if kind == "cpu" else None


def peaks_here(task: Task) -> Peaks:
    """The same in this process."""
    device, method = torch.device(task.device), make_method(task)
    reset_peak(device)  # reading the weights takes more than keeping them, and is not matching
    peaks = Peaks(loaded=held(device))
    try:
        for stage, run in method.memory_stages.items():
            peaks.stages[stage] = peak_of(run, device)
    except (DualRCError, RuntimeError, MemoryError) as error:  # what was found before is kept
        return replace(peaks, failure=reason(error))
    return peaks


def _fitted(task: Task) -> Size:
    """The size at which the matcher will see the pictures."""
    scale = Scale(picture=task.size, network=task.seen)
    return make_matcher(task).budget.fitted((scale, scale))[0].network


def _measure_times(tasks: list[Task], rates: Rates, searches: dict[str, Search], notes: list[str]) -> list[Row]:
    """Every stage of every method with its times; ours also with what ran, and how near to the device's limits."""
    methods = {task.name: make_method(task) for task in tasks}
    rows = _time(methods, tasks[0], notes)
    for name, method in methods.items():
        if not isinstance(method, Dualrc):
            continue
        work = {}
        try:
            searches[name] = describe_search(method)
            work = stage_work(method, searches[name])
        except RuntimeError as error:
            notes.append(f"Search of {name}: {reason(error)}")
        rows = [
            with_work(_with_kernels(row, method), work.get(row.stage), rates) if row.method == name else row
            for row in rows
        ]
    return rows


def _time(methods: dict[str, Method], task: Task, notes: list[str]) -> list[Row]:
    device = torch.device(task.device)
    repeats = task.settings.repeats or (20 if device.type == "cuda" else 5)
    found: dict[tuple[str, Stage], int | None] = {}
    runs = {
        (name, stage): partial(_keep_count, found, (name, stage), run)
        for name, method in methods.items()
        for stage, run in method.stages.items()
    }
    timings, failures = time_interleaved(runs, device, repeats=repeats, limit_s=_LIMIT_S)
    notes += [f"{method}, {stage}: {why}" for (method, stage), why in failures.items()]
    rows = []
    for (method, stage), timing in timings.items():
        if stage != Stage.MATCH:
            rows.append(Row(method=method, stage=stage, timing=timing, matches=found[method, stage]))
        elif (method, Stage.COARSE) in timings:
            rows.append(Row(method=method, stage=Stage.SEARCH, timing=timing.minus(timings[method, Stage.COARSE])))
    return rows


def _keep_count(found: dict[tuple[str, Stage], int | None], key: tuple[str, Stage], run: Run) -> None:
    """Run, and keep the number of matches where the stage ends with such; not the matches, which take memory."""
    result = run()
    found[key] = len(result) if key[1] in (Stage.FURTHER, Stage.WHOLE) and isinstance(result, Sized) else None


def _with_kernels(row: Row, method: Dualrc) -> Row:
    """A stage with its engine and kernels; the profiler looks at one more run."""
    device, runs = method.matcher.device, method.stages
    if row.stage != Stage.DECODE:
        row = replace(row, engine=method.matcher.engine)
    if row.stage == Stage.BATCH:
        assert row.timing is not None
        return replace(row, pairs_per_s=method.task.batch / row.timing.median_s)
    if row.stage == Stage.SEARCH:
        both = profiler.kernel_seconds(runs[Stage.MATCH], device)
        return replace(row, kernels=profiler.top(both, without=profiler.kernel_seconds(runs[Stage.COARSE], device)))
    return replace(row, kernels=profiler.top(profiler.kernel_seconds(runs[row.stage], device)))


def _with_peak(row: Row, peaks: Peaks | None) -> Row:
    if peaks is None or row.stage not in peaks.stages:
        return row
    peak = peaks.stages[row.stage]
    return replace(row, peak_bytes=peak, working_bytes=max(peak - peaks.loaded, 0))


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
