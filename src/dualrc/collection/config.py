"""How a folder of pictures is matched."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dualrc.config import check_bounds
from dualrc.errors import ConfigError
from dualrc.machine import device_name


@dataclass(frozen=True, kw_only=True)
class CollectionConfig:
    """How a folder of pictures is matched."""

    # exhaustive, sequential, retrieval, a text file (two names a line), or the folder of a COLMAP model; auto:
    # exhaustive for few pictures, else retrieval.
    pairs: str = "auto"
    # Pictures that each is matched with: the most similar (retrieval), or those that share most points (model).
    neighbors: int = 20
    # sequential: each picture with so many that follow, and with so many that look alike further away.
    overlap: int = 10
    loops: int = 2
    # The best so many matches of each pair are kept, with at least this score.
    top: int = 4000
    min_score: float = 0.0
    # The network, as in dualrc.load.
    size: int | None = None
    # high looks again at every pair, which takes several times as long.
    quality: Literal["standard", "high"] = "standard"
    preset: str = "default"
    weights: Path | None = None
    device: str | None = None
    # Where it runs: in processes of this machine, or on a Ray cluster, which is started here if no address is given.
    executor: Literal["local", "ray"] = "local"
    address: str | None = None
    # Workers; None: one per GPU, else one per thread, as far as memory allows.
    workers: int | None = None
    # CPU threads of all workers of a machine together, divided equally among them; None: one per core.
    threads: int | None = None
    # GiB that the workers of a machine may take together, about, and how much of that is for features that are kept.
    max_memory: float | None = None  # None: three quarters of what the machine has
    cache: float = 4.0

    def __post_init__(self) -> None:
        check_bounds(self, "neighbors", "overlap", "top", "workers", "threads", at_least=1)
        check_bounds(self, "loops", "cache", at_least=0)
        check_bounds(self, "max_memory", above=0)
        if self.device is not None:
            object.__setattr__(self, "device", device_name(self.device))
        if self.quality not in ("standard", "high"):
            raise ConfigError(f"quality = {self.quality!r} is not known; choose standard or high.")
        if self.executor not in ("local", "ray"):
            raise ConfigError(f"executor = {self.executor!r} is not known; choose local or ray.")
        if self.address is not None and self.executor != "ray":
            raise ConfigError("An address is for the executor ray; choose that one, or leave the address out.")
