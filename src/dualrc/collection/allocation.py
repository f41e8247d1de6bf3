"""Which workers a collection gets: how many, on which devices, with how much memory."""

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
from dualrc.config import to_dict
from dualrc.image import Scale
from dualrc.matcher import Matcher
from dualrc.pixels import STRIDE

_GIB = 2**30
_SHARE = 0.75  # of the machine's memory that workers may take
_BASE = 0.5 * _GIB  # what a worker takes beside matching, as measured: torch, the network and a decoded picture
_SAMPLE = 3  # pictures by which a machine tells whether it sees the same folder


def start_executor(images: Path, names: Sequence[str], config: CollectionConfig, matcher: Matcher) -> Executor:
    """Workers that match as this matcher does."""

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
    if devices != ["cpu"]:  # a GPU's workers keep features on the GPU
        devices = [devices[number % len(devices)] for number in range(config.workers or len(devices))]
        cache = config.cache * _GIB * len(set(devices)) / len(devices)
        each = max(1, threads // len(devices))
        return LocalExecutor([settings(device, cache, threads=each) for device in devices])
    limit = machine.memory() * _SHARE if config.max_memory is None else config.max_memory * _GIB
    count = max(1, min(config.workers or threads, int(limit // need)))
    cache = min(config.cache * _GIB, max(0.0, limit - count * need))
    # Where not even one worker has what it needs, it sees the pictures smaller.
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
    """Memory that a worker on a CPU needs at most, beside the features that it keeps."""
    side = (matcher.config.size or matcher.config.max_size) // STRIDE * STRIDE
    square = Scale(image_size=(side, side), input_size=(side, side))  # no picture has more cells
    return _BASE + matcher.budget.need((square, square))
