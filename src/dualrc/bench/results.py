"""Results of the benchmark: measurements, minimum work of each stage, and growth with the image size."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dualrc.bench.methods import Dualrc, Stage, coarse_cells
from dualrc.bench.planted import Motion
from dualrc.bench.profiler import Kernel
from dualrc.measure import Peaks, Rates, Timing
from dualrc.model.dualrc import DualRCNet
from dualrc.ops import memory
from dualrc.ops.memory import Work
from dualrc.ops.torch import FIRST_BLOCK
from dualrc.types import Size

# Two fine cells.
_NEAR_PX = 8.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A stage of a method at one size; None: not measured, or unknown."""

    method: str
    stage: Stage
    timing: Timing | None = None
    # Engine that the matcher used.
    engine: str | None = None
    peak_bytes: int | None = None
    # Peak memory minus the memory in use before the first pair.
    working_bytes: int | None = None
    work: Work | None = None
    # Operations per second, as a share of the measured rate of the device.
    matrix_share: float | None = None
    # Bytes per second, as a share of the measured rate of the device.
    bandwidth_share: float | None = None
    # Kernels that took most time, from the profiler.
    kernels: tuple[Kernel, ...] = ()
    matches: int | None = None
    pairs_per_s: float | None = None

    def with_peak(self, peaks: Peaks[Stage] | None) -> "Row":
        """Return the row with the peak memory of its stage."""
        if peaks is None or self.stage not in peaks.bytes:
            return self
        peak = peaks.bytes[self.stage]
        return replace(self, peak_bytes=peak, working_bytes=max(peak - peaks.loaded, 0))

    def with_work(self, work: Work | None, rates: Rates) -> "Row":
        """Return the row with its work as shares of the device's peak rates."""
        if work is None or self.timing is None or not self.timing.median_s:
            return self
        matrix_share = work.operations / self.timing.median_s / rates.operations_per_s
        bandwidth_share = work.bytes / self.timing.median_s / rates.bytes_per_s
        return replace(self, work=work, matrix_share=matrix_share, bandwidth_share=bandwidth_share)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Part of the coarse tensor that the search visited."""

    # `images` or `planted features`.
    on: str
    matches: int
    # Number of groups of 16 queries, in both directions.
    groups: int
    # Mean per group.
    visited_cells: float
    # Share of all cells.
    visited_share: float
    # Number of groups that visited more cells than the torch engine visits at first.
    widened_groups: int
    # Share of matches within two fine cells of the known motion.
    planted_correct: float | None


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """All measurements at one image size."""

    size: Size
    network_size: Size
    tensor_entries: int
    # By method.
    searches: dict[str, Search]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Growth:
    """Growth from one size to the next: factors, and factors per doubling of the image sides."""

    method: str
    stage: Stage
    size0: Size
    size1: Size
    side_factor: float
    time_factor: float | None
    time_per_doubling: float | None
    memory_factor: float | None
    memory_per_doubling: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """All measurements on one device."""

    device: str
    precision: str
    machine: dict[str, Any]
    preset: str
    # Hash of the weights, or "generated".
    weights: str
    config: dict[str, Any]
    rates: Rates
    sizes: tuple[SizeResult, ...] = ()
    growth: tuple[Growth, ...] = ()


def describe_search(method: Dualrc) -> Search | None:
    """Return the matches of the pair and the visited coarse cells; None if the network has no fine search."""
    network, correct = method.matcher.network, None
    if not isinstance(network, DualRCNet):
        return None
    found, searched = method.on_device(network.match), method.on_device(network.search)
    # 0 marks cells without a query.
    visited = [count[count > 0] for count in (searched.visited0, searched.visited1)]
    groups, total = sum(len(count) for count in visited), sum(int(count.sum()) for count in visited)
    if method.task.generated:
        true = Motion().points1(found.points0, method.seen, method.seen)
        correct = float(((true - found.points1).norm(dim=1) <= _NEAR_PX).float().mean().nan_to_num())
    return Search(
        on="planted features" if method.task.generated else "images",
        matches=len(found.scores),
        groups=groups,
        visited_cells=total / max(1, groups),
        visited_share=total / max(1, groups * coarse_cells(method.seen)),
        widened_groups=sum(int((count > FIRST_BLOCK).sum()) for count in visited),
        planted_correct=correct,
    )


def stage_work(method: Dualrc, search: Search | None) -> dict[Stage, Work]:
    """Return the minimum work of each stage."""
    config, seen, item = method.matcher.network.config, method.seen, method.matcher.dtype.itemsize
    visited = 0.0 if search is None else search.visited_cells * search.groups
    matches = len(method.further()) if search is None else search.matches
    features = memory.extract_work(config, seen, item)
    coarse = memory.coarse_work(config, seen, seen, item)
    searching = memory.search_work(config, seen, seen, item, visited=visited, matches=matches)
    whole = features + features + coarse + searching
    work = {Stage.FEATURES: features, Stage.COARSE: coarse, Stage.SEARCH: searching}
    return work | {Stage.FURTHER: coarse + searching, Stage.WHOLE: whole}


def growth(sizes: Sequence[SizeResult]) -> tuple[Growth, ...]:
    """Return the growth of each stage between neighboring sizes, the smallest first."""
    found = []
    for small, large in itertools.pairwise(sorted(sizes, key=lambda result: math.prod(result.network_size))):
        side = math.sqrt(math.prod(large.network_size) / math.prod(small.network_size))
        before = {(row.method, row.stage): row for row in small.rows}
        for row in large.rows if side > 1 else ():
            if (other := before.get((row.method, row.stage))) is None:
                continue
            seconds = [item.timing.median_s if item.timing else None for item in (other, row)]
            time = _factors(seconds[0], seconds[1], side)
            memory = _factors(other.working_bytes, row.working_bytes, side)
            found.append(Growth(row.method, row.stage, small.size, large.size, side, *time, *memory))
    return tuple(found)


def _factors(small: float | None, large: float | None, side: float) -> tuple[float | None, float | None]:
    if not small or not large:
        return None, None
    return large / small, (large / small) ** (1 / math.log2(side))
