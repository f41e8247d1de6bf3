"""How far the search went, what each stage has to compute, and how near it comes to the limits of the device."""

from dataclasses import replace

from dualrc.bench.methods import Dualrc, Stage, coarse_cells
from dualrc.bench.planted import Motion
from dualrc.bench.results import Row, Search
from dualrc.measure import Rates
from dualrc.ops import memory
from dualrc.ops.memory import Work
from dualrc.ops.torch import FIRST_BLOCK

_NEAR_PX = 8.0  # two fine cells


def describe_search(method: Dualrc) -> Search:
    """Matches of the pair, and the coarse cells that were visited to find them."""
    network, correct = method.matcher.network, None
    found, searched = method.on_device(network.match), method.on_device(network.search)
    visited = [count[count > 0] for count in (searched.visited0, searched.visited1)]  # 0: nobody asked
    groups, total = sum(len(count) for count in visited), sum(int(count.sum()) for count in visited)
    if method.task.generated:
        true = Motion().points1(found.points0, method.seen, method.seen)
        correct = float(((true - found.points1).norm(dim=1) <= _NEAR_PX).float().mean().nan_to_num())
    return Search(
        on="planted features" if method.task.generated else "pictures",
        matches=len(found.scores),
        groups=groups,
        visited_cells=total / max(1, groups),
        visited_share=total / max(1, groups * coarse_cells(method.seen)),
        widened_groups=sum(int((count > FIRST_BLOCK).sum()) for count in visited),
        planted_correct=correct,
    )


def stage_work(method: Dualrc, search: Search) -> dict[Stage, Work]:
    """The least that each stage has to do."""
    config, seen, item = method.matcher.network.config, method.seen, method.matcher.dtype.itemsize
    work = {
        Stage.FEATURES: memory.extract_work(config, seen, item),
        Stage.COARSE: memory.coarse_work(config, seen, seen, item),
        Stage.SEARCH: memory.search_work(
            config, seen, seen, item, visited=search.visited_cells * search.groups, matches=search.matches
        ),
    }
    work[Stage.FURTHER] = work[Stage.COARSE] + work[Stage.SEARCH]
    work[Stage.WHOLE] = work[Stage.FEATURES] + work[Stage.FEATURES] + work[Stage.FURTHER]
    return work


def with_work(row: Row, work: Work | None, rates: Rates) -> Row:
    """The row with what its stage had to do, as shares of what the device could do in that time."""
    if work is None or row.timing is None or not row.timing.median_s:
        return row
    operations_per_s, bytes_per_s = work.operations / row.timing.median_s, work.bytes / row.timing.median_s
    return replace(
        row,
        work=work,
        matrix_share=operations_per_s / rates.operations_per_s,
        bandwidth_share=bytes_per_s / rates.bytes_per_s,
    )
