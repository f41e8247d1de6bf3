"""Settings of matching an image collection."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dualrc.config import Quality, check_bounds, check_quality
from dualrc.errors import ConfigError
from dualrc.machine import device_name


@dataclass(frozen=True, kw_only=True)
class CollectionConfig:
    """Settings of matching an image collection."""

    # exhaustive, sequential, retrieval, a text file (two names per line), or the folder of a COLMAP model.
    # auto: exhaustive for small collections, else retrieval.
    pairs: str = "auto"
    # Number of images to match each image with, by retrieval or by covisibility in the model.
    neighbors: int = 20
    # Sequential pairs: number of subsequent images to match each image with.
    overlap: int = 10
    # Sequential pairs: number of similar images from elsewhere in the sequence.
    loops: int = 2
    # Maximum number of matches per pair.
    top: int = 4000
    # Minimum score of a match.
    min_score: float = 0.0
    # Long side of the network input, as in `dualrc.load`.
    size: int | None = None
    # "high" and "search" match every pair several times, as in `dualrc.load`.
    quality: Quality = "standard"
    # Network, as in `dualrc.load`.
    preset: str = "default"
    # Weights file; None: the bundled weights.
    weights: Path | None = None
    # Device; None: the best one available.
    device: str | None = None
    # Processes on this machine, or a Ray cluster.
    executor: Literal["local", "ray"] = "local"
    # Address of the Ray cluster; None: a cluster is started on this machine.
    address: str | None = None
    # Number of workers; None: one per GPU, or one per CPU thread, limited by memory.
    workers: int | None = None
    # CPU threads of all workers of a machine together, divided equally; None: one per core.
    threads: int | None = None
    # Approximate memory of all workers of a machine together, in GiB.
    # None: three quarters of the memory of the machine.
    max_memory: float | None = None
    # The part of `max_memory` that caches features, in GiB.
    cache: float = 4.0

    def __post_init__(self) -> None:
        check_bounds(self, "neighbors", "overlap", "top", "workers", "threads", at_least=1)
        check_bounds(self, "loops", "cache", at_least=0)
        check_bounds(self, "max_memory", above=0)
        if self.device is not None:
            object.__setattr__(self, "device", device_name(self.device))
        check_quality(self.quality)
        if self.executor not in ("local", "ray"):
            raise ConfigError(f"executor = {self.executor!r} is unknown; choose local or ray.")
        if self.address is not None and self.executor != "ray":
            raise ConfigError("An address needs the executor ray; choose that executor, or omit the address.")
