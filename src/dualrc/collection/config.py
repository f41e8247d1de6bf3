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
    # Sequential pairs: number of subsequent images, and number of similar images from elsewhere in the sequence.
    overlap: int = 10
    loops: int = 2
    # Maximum number of matches per pair, and minimum score of a match.
    top: int = 4000
    min_score: float = 0.0
    # Network settings, as in `dualrc.load`.
    size: int | None = None
    # high matches every pair a second time, which takes several times as long.
    quality: Quality = "standard"
    preset: str = "default"
    weights: Path | None = None
    device: str | None = None
    # Processes on this machine, or a Ray cluster. Without an address, a cluster is started on this machine.
    executor: Literal["local", "ray"] = "local"
    address: str | None = None
    # None: one worker per GPU, or one per CPU thread, limited by memory.
    workers: int | None = None
    # CPU threads of all workers of a machine together, divided equally; None: one per core.
    threads: int | None = None
    # Approximate memory of all workers of a machine together in GiB, and the part of it that caches features.
    # None: three quarters of the memory of the machine.
    max_memory: float | None = None
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
