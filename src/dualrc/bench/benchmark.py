"""The benchmark: time and memory of each stage, for given sizes, devices and engines."""

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
from dualrc.bench.methods import IMAGES, BenchSettings, Dualrc, Stage, Task, coarse_cells, make_matcher, make_method
from dualrc.bench.report import show
from dualrc.bench.results import DeviceResult, Row, Search, SizeResult, describe_search, growth, stage_work
from dualrc.collection.progress import show_status
from dualrc.errors import DualRCError
from dualrc.files import check_writable, first_line, to_json, write_json
from dualrc.image import Scale, read
from dualrc.matcher.budget import release_memory
from dualrc.matcher.extract import choose_device
from dualrc.provenance import versions
from dualrc.types import Size

FORMAT = "dualrc-bench-2"
_SCENE = 1
# A laptop takes about a minute for these.
_SIZES = ((320, 240), (640, 480))
# Maximum long side of a rendered scene in pixels; larger images are scaled up.
_LARGEST_SCENE = 1600
# Maximum total time of a stage; slower stages are repeated less often.
_LIMIT_S = 20.0
# Packages whose versions are recorded if installed.
_PACKAGES = ("triton", "kornia", "opencv-python-headless")
_PLANTED = (
    "this preset has no trained weights: features come from random weights; coarse tensor, search, further pair and "
    "batches use synthetic features; whole pair is the extraction of both images' features plus the further pair."
)


def bench(settings: BenchSettings, *, screen: Console, messages: Console) -> dict[str, Any]:
    """Run the benchmark, print the tables, write the JSON file, and return its content."""
    devices = settings.devices or (choose_device(None).type,)
    settings = replace(settings, sizes=settings.sizes or _SIZES, devices=devices)
    _check(settings)
    if (warning := busy_warning(machine.load_average(), machine.cores())) is not None:
        messages.print(f"Note: {warning}", style="yellow", highlight=False, soft_wrap=True)
    results: dict[str, DeviceResult] = {}
    found_versions = {**versions(*_PACKAGES), "cuda": torch.version.cuda}
    found_versions |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    content = {"format": FORMAT, "settings": asdict(settings), "versions": found_versions, "devices": results}
    with tempfile.TemporaryDirectory(prefix="dualrc-bench-") as folder:
        with show_status("Rendering the images...", messages.quiet):
            _write_images(settings, Path(folder))
        for device in settings.devices:
            for found in _measure_device(settings, device, Path(folder), messages):
                results[device] = found
                # Written after every size, so that an error at a later size loses little.
                if settings.out is not None:
                    write_json(settings.out, to_json(content))
            show(results[device], screen)
    if settings.out is not None:
        screen.print(f"Written: {settings.out}", highlight=False, soft_wrap=True)
    return content


def _check(settings: BenchSettings) -> None:
    """Raise an error now for settings that would fail after long work."""
    configs.preset(settings.preset)
    for method in settings.others:
        check_installed(method)
    if settings.out is not None:
        check_writable(settings.out)
    for device in settings.devices:
        for task in _tasks(replace(settings, others=()), device, settings.sizes[0], Path()):
            # Checks device, engine, weights and precision; each error has its own remedy.
            make_matcher(task)


def _tasks(settings: BenchSettings, device: str, size: Size, folder: Path) -> list[Task]:
    """Return the tasks: our matcher with every engine, then the other methods."""
    task = Task(settings=settings, device=device, size=size, folder=folder / f"{size[0]}x{size[1]}")
    ours = [replace(task, engine=engine) for engine in settings.engines or (None,)]
    return ours + [replace(task, method=other) for other in settings.others]


def _write_images(settings: BenchSettings, folder: Path) -> None:
    """Write the pair at every size as JPEG, because decoding is a stage too."""
    if settings.pair is not None:
        images = [Image.fromarray(read(path)) for path in settings.pair]
    else:
        from dualrc.scenes import make_pair

        largest = max(settings.sizes, key=max)
        ratio = min(1.0, _LARGEST_SCENE / max(largest))
        pair = make_pair(_SCENE, size=(round(largest[0] * ratio), round(largest[1] * ratio)))
        images = [Image.fromarray(rendering.image.numpy()) for rendering in pair]
    for size in settings.sizes:
        place = folder / f"{size[0]}x{size[1]}"
        place.mkdir(exist_ok=True)
        for image, name in zip(images, IMAGES, strict=True):
            image.resize(size, Image.Resampling.LANCZOS).save(place / name, quality=95)


def _measure_device(settings: BenchSettings, device: str, folder: Path, messages: Console) -> Iterator[DeviceResult]:
    """Yield the results after each size, the smallest first."""
    matcher = make_matcher(_tasks(settings, device, settings.sizes[0], folder)[0])
    with show_status(f"Measuring the peak rates of {device}...", messages.quiet):
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
    # Otherwise its weights would count in every peak.
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
        notes.append(f"{size[0]}x{size[1]} does not fit into memory; the measured size is {seen[0]}x{seen[1]}.")
    skipped = {task: why for task in tasks if (why := task.reason_to_skip()) is not None}
    notes += skipped.values()
    tasks = [task for task in tasks if task not in skipped]
    peaks: dict[str, measure.Peaks[Stage]] = {}
    # Before this process builds anything that would count too.
    for task in tasks:
        release_memory()
        try:
            if (found := peaks_of(task)) is None:
                continue
        except (DualRCError, RuntimeError) as error:
            found = measure.Peaks(loaded=0, bytes={}, failure=str(error))
        peaks[task.name] = found
        notes += [f"Memory of {task.name}: {found.failure}"] if found.failure else []
    release_memory()
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
    """Return the peak memory of the stages of a task, on a CPU from a new process; None if it cannot be measured."""
    kind = torch.device(task.device).type
    return peaks_here(task) if kind == "cuda" else measure.in_new_process(peaks_here, task) if kind == "cpu" else None


def peaks_here(task: Task) -> measure.Peaks[Stage]:
    """Return the peak memory of the stages of a task, measured in this process."""
    return measure.measure_peaks(make_method(task).memory_stages, torch.device(task.device))


def _measure_times(tasks: list[Task], rates: measure.Rates, searches: dict[str, Search], notes: list[str]) -> list[Row]:
    """Time every stage of every method; ours also with its kernels and its share of the device's peak rates."""
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
                notes.append(f"Search of {name}: {first_line(error)}")
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
    """Run a stage, and record its number of matches but not the matches, which take memory."""
    result = run()
    if key[1] in (Stage.FURTHER, Stage.WHOLE) and isinstance(result, Sized):
        counts[key] = len(result)


def _with_kernels(row: Row, method: Dualrc) -> Row:
    """Add engine and kernels to a stage, from one more run with the profiler."""
    device, runs = method.matcher.device, method.stages
    engine = None if row.stage == Stage.DECODE else method.matcher.engine
    if row.stage == Stage.BATCH and row.timing is not None:
        return replace(row, engine=engine, pairs_per_s=method.task.batch / row.timing.median_s)
    is_search = row.stage == Stage.SEARCH
    part = profiler.kernel_seconds(runs[Stage.COARSE], device) if is_search else {}
    seconds = profiler.kernel_seconds(runs[Stage.MATCH if is_search else row.stage], device)
    return replace(row, engine=engine, kernels=profiler.top(seconds, without=part))


def busy_warning(load: float | None, cores: int) -> str | None:
    """Return a warning if the load average shows that other processes use the cores."""
    if load is None or load < cores / 2:
        return None
    return (
        f"the machine was busy at the start (load {load:.1f}, {cores} cores): times are too long, with several threads "
        "by far; use ratios only."
    )


def _describe_machine(device: torch.device) -> dict[str, Any]:
    """Describe the processor with its cores and threads, and the GPU with its memory."""
    found = {"system": platform.platform(), "processor": machine.processor(), "cores": machine.cores()}
    found |= {"threads": torch.get_num_threads(), "load": machine.load_average()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"cpu": found["processor"], "processor": properties.name, "gpu_memory": properties.total_memory}
    return found
