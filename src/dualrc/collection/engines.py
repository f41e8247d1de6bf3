"""Which workers a collection gets: how many, on which devices, with how much memory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from dualrc.collection import machine
from dualrc.collection.config import CollectionConfig
from dualrc.collection.engine import Engine
from dualrc.collection.local import LocalEngine
from dualrc.collection.ray_engine import RayEngine
from dualrc.collection.worker import WorkerSettings
from dualrc.config import to_dict
from dualrc.matcher import Matcher

_GIB = 2**30
_SHARE = 0.75  # of the machine's memory that workers may take
# What a worker takes at most, as measured: torch, the network and a decoded picture, 1.2 times the search's working
# memory, and five times the coarse tensor.
_BASE = 0.5 * _GIB
_TENSORS = 5
_SAMPLE = 3  # pictures by which a machine tells whether it sees the same folder


def start_engine(images: Path, names: Sequence[str], config: CollectionConfig, matcher: Matcher) -> Engine:
    """Workers that match as this matcher does."""

    def settings(device: str, cache_bytes: float) -> WorkerSettings:
        return WorkerSettings(
            images=str(images.resolve()),
            preset=config.preset,
            weights=None if config.weights is None else Path(config.weights).read_bytes(),
            weights_hash=str(matcher.weights_hash),
            device=device,
            matcher=to_dict(matcher.config),
            cache_bytes=int(cache_bytes),
        )

    need = _worker_bytes(matcher)
    if config.engine == "ray":
        return RayEngine(settings, config, worker_bytes=need, sample=names[:_SAMPLE])
    devices = _devices(config)
    if devices != ["cpu"]:  # a GPU's workers keep features on the GPU
        devices = [devices[number % len(devices)] for number in range(config.workers or len(devices))]
        cache = config.cache * _GIB * len(set(devices)) / len(devices)
        return LocalEngine([settings(device, cache) for device in devices])
    limit = machine.memory() * _SHARE if config.max_memory is None else config.max_memory * _GIB
    count = max(1, min(config.workers or machine.cores(), int(limit // need)))
    cache = min(config.cache * _GIB, max(0.0, limit - count * need))
    return LocalEngine([settings("cpu", cache / count)] * count)


def _devices(config: CollectionConfig) -> list[str]:
    if config.device in (None, "cuda") and torch.cuda.is_available():
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if config.device is None:
        return ["mps" if torch.backends.mps.is_available() else "cpu"]
    return [config.device]


def _worker_bytes(matcher: Matcher) -> float:
    """Memory that a worker on a CPU needs at most, beside the features that it keeps."""
    cells = ((matcher.config.size or matcher.config.max_size) // 16) ** 2
    return _BASE + 1.2 * matcher.config.max_memory * _GIB + _TENSORS * 4 * cells**2
