"""Time: medians of interleaved runs, and what the hardware reaches on a plain product and a plain copy."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from dualrc.errors import DualRCError

Run = Callable[[], object]
Key = TypeVar("Key")

_MATRIX_SIDE = {"cuda": 8192, "cpu": 1536}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
_RATE_REPEATS = 20  # some, so that a GPU reaches its full clock


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of several runs: the median, the quartiles around it, and all of them."""

    median_s: float
    low_s: float  # a quarter of the runs took less
    high_s: float  # a quarter took more
    samples_s: tuple[float, ...]

    @staticmethod
    def of(samples: list[float]) -> "Timing":
        """The summary of at least one run."""
        # Inclusive, so that the quartiles of few samples lie among them.
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return Timing(median_s=middle, low_s=low, high_s=high, samples_s=tuple(samples))

    def minus(self, other: "Timing") -> "Timing":
        """What this takes beyond the other, round by round."""
        pairs = zip(self.samples_s, other.samples_s, strict=False)
        return Timing.of([max(mine - yours, 0.0) for mine, yours in pairs])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the device was measured to do."""

    operations_per_s: float  # additions and multiplications of a large product of matrices
    bytes_per_s: float  # read and written by a large copy


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def time_once(run: Run, device: torch.device) -> float:
    """Seconds of one run, until the device has finished it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def time_interleaved(
    runs: Mapping[Key, Run], device: torch.device, *, repeats: int, limit_s: float
) -> tuple[dict[Key, Timing], dict[Key, str]]:
    """Time runs in turn, round by round, so that what else the machine does slows all alike; with reasons of failures.

    A run that has taken `limit_s` in all is not repeated further.
    """
    samples: dict[Key, list[float]] = {name: [] for name in runs}
    failures: dict[Key, str] = {}
    warmups = 3 if device.type == "cuda" else 1  # kernels are chosen and compiled in the first ones
    for number in range(-warmups, repeats):
        for name, run in runs.items():
            taken = samples[name]
            if name in failures or sum(taken) > limit_s:
                continue
            try:
                seconds = time_once(run, device)
            except (DualRCError, RuntimeError, MemoryError) as error:
                failures[name] = (str(error) or type(error).__name__).splitlines()[0]
                continue
            if number >= 0:
                taken.append(seconds)
    return {name: Timing.of(taken) for name, taken in samples.items() if name not in failures}, failures


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The best of several large products of this type, and of several large copies."""
    kind = device.type if device.type in _MATRIX_SIDE else "cpu"
    side = _MATRIX_SIDE[kind]
    one, other = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(one)
    seconds = _best(lambda: torch.mm(one, other, out=product), device)
    source = torch.zeros(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copying = _best(lambda: target.copy_(source), device)
    return Rates(operations_per_s=2 * side**3 / seconds, bytes_per_s=2 * source.numel() / copying)


def _best(run: Run, device: torch.device) -> float:
    return min(time_once(run, device) for _ in range(_RATE_REPEATS))
