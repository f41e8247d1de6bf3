"""The benchmark: what each stage takes in time and memory, for given sizes, devices and engines."""

import os
import platform
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
from dualrc import machine, measure
from dualrc.bench import profiler
from dualrc.bench.baselines import check_installed
from dualrc.bench.methods import PICTURES, BenchSettings, Dualrc, Stage, Task, coarse_cells, make_matcher, make_method
from dualrc.bench.report import show
from dualrc.bench.results import DeviceResult, Row, Search, SizeResult, describe_search, growth, stage_work
from dualrc.collection.progress import show_status
from dualrc.errors import DualRCError
from dualrc.evaluation.report import write_json
from dualrc.files import check_writable
from dualrc.image import Scale, read
from dualrc.matcher.budget import let_go
from dualrc.matcher.extract import choose_device
from dualrc.provenance import versions
from dualrc.scenes import make_pair
from dualrc.types import Size

FORMAT = "dualrc-bench-2"
_SCENE = 1
# Px of the long side that are rendered; larger pictures are scaled up from these.
_LARGEST_SCENE = 1600
# Of a stage in all; slower ones are repeated less often.
_LIMIT_S = 20.0
# Whose versions are written too, where installed.
_PACKAGES = ("triton", "kornia", "opencv-python-headless")
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
    found_versions = {**versions(*_PACKAGES), "cuda": torch.version.cuda}
    found_versions |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    content = {"format": FORMAT, "settings": asdict(settings), "versions": found_versions, "devices": results}
    with tempfile.TemporaryDirectory(prefix="dualrc-bench-") as folder:
        with show_status("Making the pictures...", messages.quiet):
            _write_pictures(settings, Path(folder))
        for device in settings.devices:
            for found in _measure_device(settings, device, Path(folder), messages):
                results[device] = found
                # After every size, so that little is lost if a later one fails.
                if settings.out is not None:
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
        for task in _tasks(replace(settings, others=()), device, settings.sizes[0], Path()):
            # Checks device, engine, weights and precision, each with its own remedy.
            make_matcher(task)


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
    with show_status(f"What {device} can do...", messages.quiet):
        rates = measure.measure_rates(matcher.device, matcher.dtype)
    result = DeviceResult(
        device=device,
        precision=matcher.precision,
        machine=_describe_machine(matcher.device),
        preset=settings.preset,
        weights=matcher.weights_hash or "generated",
        config=matcher.info,
        rates=rates,
    )
    # Or its weights would count in every peak.
    del matcher
    for size in sorted(set(settings.sizes), key=lambda size: size[0] * size[1]):
        with show_status(f"{size[0]}x{size[1]} on {device}...", messages.quiet):
            sizes = (*result.sizes, _measure_size(_tasks(settings, device, size, folder), rates))
        result = replace(result, sizes=sizes, growth=growth(sizes))
        yield result


def _measure_size(tasks: list[Task], rates: measure.Rates) -> SizeResult:
    settings, size = tasks[0].settings, tasks[0].size
    scale = Scale(image_size=size, input_size=tasks[0].seen)
    seen = make_matcher(tasks[0]).budget.fitted((scale, scale))[0].input_size
    notes = [_PLANTED] if tasks[0].generated else []
    if seen != tasks[0].seen:
        notes.append(f"{size[0]}x{size[1]} does not fit into the memory; what is measured is {seen[0]}x{seen[1]}.")
    skipped = {task: why for task in tasks if (why := task.reason_to_skip()) is not None}
    notes += skipped.values()
    tasks = [task for task in tasks if task not in skipped]
    peaks: dict[str, measure.Peaks[Stage]] = {}
    # Before anything is built here that would count too.
    for task in tasks:
        let_go()
        try:
            if (found := peaks_of(task)) is None:
                continue
        except (DualRCError, RuntimeError) as error:
            found = measure.Peaks(loaded=0, bytes={}, failure=str(error))
        peaks[task.name] = found
        notes += [f"Memory of {task.name}: {found.failure}"] if found.failure else []
    let_go()
    searches: dict[str, Search] = {}
    if settings.repeats == 0 or not tasks:
        rows = [Row(method=name, stage=stage) for name, found in peaks.items() for stage in found.bytes]
    else:
        rows = _measure_times(tasks, rates, searches, notes)
    return SizeResult(
        size=size,
        network_size=seen,
        tensor_entries=coarse_cells(seen) ** 2,
        searches=searches,
        rows=tuple(row.with_peak(peaks.get(row.method)) for row in rows),
        notes=tuple(notes),
    )


def peaks_of(task: Task) -> measure.Peaks[Stage] | None:
    """Peak memory of a task's stages, on a CPU in a new process, so that no peak hides another; None: can't be told."""
    kind = torch.device(task.device).type
    return peaks_here(task) if kind == "cuda" else measure.in_new_process(peaks_here, task) if kind == "cpu" else None


def peaks_here(task: Task) -> measure.Peaks[Stage]:
    """The same in this process."""
    return measure.measure_peaks(make_method(task).memory_stages, torch.device(task.device))


def _measure_times(tasks: list[Task], rates: measure.Rates, searches: dict[str, Search], notes: list[str]) -> list[Row]:
    """Every stage of every method with its times; ours also with what ran, and how near to the device's limits."""
    methods = {task.name: make_method(task) for task in tasks}
    counts: dict[tuple[str, Stage], int] = {}
    runs = {
        (name, stage): partial(_counted, run, counts, (name, stage))
        for name, method in methods.items()
        for stage, run in method.stages.items()
    }
    device, repeats = torch.device(tasks[0].device), tasks[0].settings.repeats
    repeats = repeats or (20 if device.type == "cuda" else 5)
    timings, failures = measure.time_interleaved(runs, device, repeats=repeats, limit_s=_LIMIT_S)
    notes += [f"{name}, {stage}: {why}" for (name, stage), why in failures.items()]
    rows = []
    for name, method in methods.items():
        work = {}
        if isinstance(method, Dualrc):
            try:
                search = describe_search(method)
                if search is not None:
                    searches[name] = search
                work = stage_work(method, search)
            except RuntimeError as error:
                notes.append(f"Search of {name}: {measure.reason(error)}")
        for stage in method.stages:
            row = Row(method=name, stage=stage, timing=timings.get((name, stage)), matches=counts.get((name, stage)))
            if stage == Stage.MATCH and row.timing and (name, Stage.COARSE) in timings:
                row = replace(row, stage=Stage.SEARCH, timing=row.timing.minus(timings[name, Stage.COARSE]))
            if isinstance(method, Dualrc) and row.timing:
                row = _with_kernels(row, method).with_work(work.get(row.stage), rates)
            if row.timing and row.stage != Stage.MATCH:
                rows.append(row)
    return rows


def _counted(run: measure.Run, counts: dict[tuple[str, Stage], int], key: tuple[str, Stage]) -> None:
    """Run, and keep the number of matches where the stage ends with such; not the matches, which take memory."""
    result = run()
    if key[1] in (Stage.FURTHER, Stage.WHOLE) and isinstance(result, Sized):
        counts[key] = len(result)


def _with_kernels(row: Row, method: Dualrc) -> Row:
    """A stage with its engine and kernels, which the profiler sees in one more run."""
    device, runs = method.matcher.device, method.stages
    engine = None if row.stage == Stage.DECODE else method.matcher.engine
    if row.stage == Stage.BATCH and row.timing is not None:
        return replace(row, engine=engine, pairs_per_s=method.task.batch / row.timing.median_s)
    is_search = row.stage == Stage.SEARCH
    part = profiler.kernel_seconds(runs[Stage.COARSE], device) if is_search else {}
    seconds = profiler.kernel_seconds(runs[Stage.MATCH if is_search else row.stage], device)
    return replace(row, engine=engine, kernels=profiler.top(seconds, without=part))


def busy_warning(load: float | None, cores: int) -> str | None:
    """A warning if others use this machine's cores, by its load average."""
    if load is None or load < cores / 2:
        return None
    return (
        f"the machine was busy when this began (load {load:.1f}, {cores} cores): times are too long, and with "
        "several threads far too long; trust ratios at most."
    )


def _describe_machine(device: torch.device) -> dict[str, Any]:
    """The processor with its cores and threads, and a GPU with its memory."""
    found = {"system": platform.platform(), "processor": machine.processor(), "cores": machine.cores()}
    found |= {"threads": torch.get_num_threads(), "load": machine.load_average()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"cpu": found["processor"], "processor": properties.name, "gpu_memory": properties.total_memory}
    return found
