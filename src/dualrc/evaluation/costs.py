"""Cost of a pair: its time, and the peak memory of a new process, by network and image size."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from dualrc.collection.progress import show_status
from dualrc.errors import DataError
from dualrc.evaluation.export import Pair
from dualrc.evaluation.figures import finished, new_figure
from dualrc.evaluation.matchers import WeightsFile
from dualrc.files import to_json, write_json
from dualrc.machine import cores
from dualrc.matcher import load
from dualrc.measure import Timing, held, in_new_process, peak, reset_peak, time_once, warm_ups
from dualrc.model.checkpoint import file_hash
from dualrc.provenance import versions
from dualrc.types import ImageArray

_FILE = "costs.json"
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network, an image size, and a pair to match."""

    network: WeightsFile
    size: int
    pair: Pair
    device: str
    top: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Cost of matching a pair, from files to matches."""

    # Median of several runs after warm-up.
    seconds: float
    # Peak memory of the process, or on a GPU of torch's allocations.
    memory_bytes: int
    # Part of it in use before the first pair: libraries and network, or on a GPU the network.
    loaded_bytes: int
    # Size of the network input for image 0.
    seen: tuple[int, int]
    machine: str


def measure_all(tasks: Sequence[Task], folder: Path, messages: Console) -> tuple[list[Measured | None], list[str]]:
    """Measure each task in a separate process, except tasks in the folder's costs.json; return failures as notes."""
    path = folder / _FILE
    known, measured, notes = _read(path, messages), list[Measured | None](), list[str]()
    for task in tasks:
        key = _key(task)
        if key not in known:
            with show_status(f"Time and memory of {task.network.weights.name} at {task.size} px...", messages.quiet):
                try:
                    known[key] = measure(task)
                except DataError as error:
                    notes.append(f"Time and memory of {task.network.weights} at {task.size} px: {error}")
                else:
                    write_json(path, to_json(known))
        measured.append(known.get(key))
    return measured, notes


def measure(task: Task) -> Measured:
    """Match the pair in a new process, which has not used any other memory."""
    return in_new_process(_run, task)


def _run(task: Task) -> Measured:
    network, pair = task.network, task.pair
    matcher = load(network.config.preset, weights=network.weights, device=task.device, size=task.size, top=task.top)
    device = matcher.device
    # Loading the weights needs more memory than keeping them, and is not part of matching.
    reset_peak(device)
    loaded = held(device)
    seen = matcher.features(pair.path0).scale.input_size
    runs = range(warm_ups(device) + _REPEATS)
    times = [time_once(lambda: matcher.match(pair.path0, pair.path1), device) for _ in runs]
    return Measured(
        seconds=Timing.of(times[-_REPEATS:]).median_s,
        memory_bytes=peak(device),
        loaded_bytes=loaded,
        seen=seen,
        machine=torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"a CPU (threads: {torch.get_num_threads()})",
    )


def _key(task: Task) -> str:
    """Return a digest of everything that the cost depends on."""
    hashes = [task.network.weights_hash, file_hash(task.pair.path0), file_hash(task.pair.path1)]
    machine = [cores(), os.environ.get("OMP_NUM_THREADS"), versions()]
    text = json.dumps([hashes, task.device, task.size, task.top, machine])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path, messages: Console) -> dict[str, Measured]:
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {key: Measured(**{**values, "seen": tuple(values["seen"])}) for key, values in stored.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        messages.print(f"{path} cannot be read; time and memory are measured again.", style="yellow")
        return {}


def cost_figure(rows: Mapping[str, Sequence[tuple[int, Measured]]], *, title: str) -> ImageArray:
    """Plot time and memory over the long side of the image, one line per network."""
    figure = new_figure(9.0, rows)
    left, right = figure.subplots(1, 2)
    for name, points in rows.items():
        sizes = [size for size, _ in points]
        left.plot(sizes, [cost.seconds for _, cost in points], "o-", linewidth=2, label=name)
        right.plot(sizes, [cost.memory_bytes / 2**30 for _, cost in points], "o-", linewidth=2, label=name)
    for axes, label in ((left, "seconds per pair"), (right, "peak memory (GiB)")):
        axes.set(title=label, xlabel="long side of the image (px)")
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_xticks(sorted({size for points in rows.values() for size, _ in points}))
    return finished(figure, rows, title=title)
