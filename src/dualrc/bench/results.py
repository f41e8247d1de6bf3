"""What a benchmark found, and how it grows with the size of the pictures."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dualrc.bench.methods import Stage
from dualrc.bench.profiler import Kernel
from dualrc.measure import Rates, Timing
from dualrc.ops.memory import Work
from dualrc.types import Size


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Bytes: resident memory of a process, or on a GPU what torch had allocated there."""

    loaded: int  # before the first pair: libraries and network, on a GPU the network
    stages: dict[Stage, int] = field(default_factory=dict)
    failure: str | None = None  # why there are no more stages


@dataclass(frozen=True, kw_only=True)
class Row:
    """A stage of a method at one size; None: not measured, or not known."""

    method: str
    stage: Stage
    timing: Timing | None = None
    engine: str | None = None  # that the matcher used
    peak_bytes: int | None = None
    working_bytes: int | None = None  # the peak less what was held before the first pair
    work: Work | None = None
    matrix_share: float | None = None  # operations a second, of the device's measured rate
    bandwidth_share: float | None = None  # bytes a second, of the device's measured rate
    kernels: tuple[Kernel, ...] = ()  # that took longest, as the profiler saw them
    matches: int | None = None
    pairs_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """How much of the coarse tensor the search looked at."""

    on: str  # "pictures" or "planted features"
    matches: int
    groups: int  # of 16 queries, both ways together
    visited_cells: float  # mean of a group
    visited_share: float  # of the cells that it could have visited
    widened_groups: int  # that visited more cells than every engine visits at first
    planted_correct: float | None = None  # share of matches within two fine cells of the planted motion


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """All that was measured at one picture size."""

    size: Size
    network_size: Size
    tensor_entries: int
    searches: dict[str, Search]  # by method
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """From one size to the next: factors, and the powers of the picture's side that they amount to."""

    method: str
    stage: Stage
    size0: Size
    size1: Size
    side_factor: float
    time_factor: float | None
    time_power: float | None
    memory_factor: float | None
    memory_power: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """All that was measured on one device."""

    device: str
    precision: str
    machine: dict[str, Any]
    preset: str
    weights: str  # their hash, or "generated"
    config: dict[str, Any]
    rates: Rates
    sizes: tuple[SizeResult, ...] = ()
    growth: tuple[Growth, ...] = ()


def growth(sizes: Sequence[SizeResult]) -> tuple[Growth, ...]:
    """How each stage grows between neighboring sizes, the smallest first."""
    ordered = sorted(sizes, key=lambda result: math.prod(result.network_size))
    found = []
    for small, large in itertools.pairwise(ordered):
        side = math.sqrt(math.prod(large.network_size) / math.prod(small.network_size))
        if side == 1:
            continue
        before = {(row.method, row.stage): row for row in small.rows}
        for row in large.rows:
            other = before.get((row.method, row.stage))
            if other is None:
                continue
            time_factor = _factor(*(item.timing.median_s if item.timing else None for item in (other, row)))
            memory_factor = _factor(other.working_bytes, row.working_bytes)
            found.append(
                Growth(
                    method=row.method,
                    stage=row.stage,
                    size0=small.size,
                    size1=large.size,
                    side_factor=side,
                    time_factor=time_factor,
                    time_power=_power(time_factor, side),
                    memory_factor=memory_factor,
                    memory_power=_power(memory_factor, side),
                )
            )
    return tuple(found)


def _factor(small: float | None, large: float | None) -> float | None:
    return large / small if small and large else None


def _power(factor: float | None, side: float) -> float | None:
    return None if factor is None else math.log(factor) / math.log(side)
