"""Choice of workers for a collection: their number, devices and memory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dualrc import machine
from dualrc.collection.config import CollectionConfig
from dualrc.collection.executor import Executor
from dualrc.collection.local import LocalExecutor
from dualrc.collection.ray_cluster import RayExecutor
from dualrc.collection.worker import WorkerSettings
from dualrc.image import Scale
from dualrc.matcher import Matcher
from dualrc.pixels import STRIDE
from dualrc.toml import to_dict

_GIB = 2**30
# Share of the machine's memory that the workers may use.
_SHARE = 0.75
# Measured memory of a worker in addition to matching: torch, the network and a decoded image.
_BASE = 0.5 * _GIB
# Number of images by which a Ray worker checks that it sees the same folder.
_SAMPLE = 3


def start_executor(images: Path, names: Sequence[str], config: CollectionConfig, matcher: Matcher) -> Executor:
    """Start workers that use the settings of this matcher."""

    def settings(device: str, cache_bytes: float, match_bytes: float | None = None, *, threads: int) -> WorkerSettings:
        memory = matcher.config.max_memory if match_bytes is None else match_bytes / _GIB
        return WorkerSettings(
            images=str(images.resolve()),
            preset=config.preset,
            weights=None if config.weights is None else Path(config.weights).read_bytes(),
            weights_hash=str(matcher.weights_hash),
            device=device,
            matcher=to_dict(replace(matcher.config, max_memory=memory)),
            cache_bytes=int(cache_bytes),
            threads=threads,
        )

    need = _worker_bytes(matcher)
    if config.executor == "ray":
        return RayExecutor(settings, config, worker_bytes=need, sample=names[:_SAMPLE])
    devices, threads = _devices(config), config.threads or machine.cores()
    # Workers on a GPU cache features in GPU memory.
    if devices != ["cpu"]:
        devices = [devices[number % len(devices)] for number in range(config.workers or len(devices))]
        cache = config.cache * _GIB * len(set(devices)) / len(devices)
        each = max(1, threads // len(devices))
        return LocalExecutor([settings(device, cache, threads=each) for device in devices])
    limit = machine.memory() * _SHARE if config.max_memory is None else config.max_memory * _GIB
    count = max(1, min(config.workers or threads, int(limit // need)))
    cache = min(config.cache * _GIB, max(0.0, limit - count * need))
    # If the limit is too low for a single worker, it scales images down.
    share = (limit - cache) / count
    for_matching = max(share - _BASE, share / 4)
    return LocalExecutor([settings("cpu", cache / count, for_matching, threads=max(1, threads // count))] * count)


def _devices(config: CollectionConfig) -> list[str]:
    if config.device in (None, "cuda") and torch.cuda.is_available():
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if config.device is None:
        return ["mps" if torch.backends.mps.is_available() else "cpu"]
    return [config.device]


def _worker_bytes(matcher: Matcher) -> float:
    """Return the maximum memory of a CPU worker in bytes, without its feature cache."""
    side = (matcher.config.size or matcher.config.max_size) // STRIDE * STRIDE
    # A square image has the largest number of cells.
    square = Scale(image_size=(side, side), input_size=(side, side))
    return _BASE + matcher.budget.need((square, square))
