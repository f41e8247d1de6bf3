"""What the network tells of a pass, and how near its stages come to what the device can do."""

from dataclasses import replace

from dualrc.bench import counts
from dualrc.bench.clock import Rates
from dualrc.bench.counts import Work
from dualrc.bench.methods import COARSE, FEATURES, FURTHER, SEARCH, WHOLE, Dualrc
from dualrc.bench.planted import Motion
from dualrc.bench.results import Row, Search
from dualrc.model import trace

_NEAR_PX = 8.0  # two fine cells
_NOTED = {FEATURES: "kernel.backbone", COARSE: "kernel.consensus", SEARCH: "kernel.search"}


def trace_search(method: Dualrc, notes: list[str]) -> tuple[Search | None, dict[str, str]]:
    """What the network tells of its search, and of what it ran, by stage."""
    try:
        with trace.recording() as seen:
            method.features()
            found = method.match()
    except RuntimeError as error:
        notes.append(f"Search: {str(error).splitlines()[0]}")
        return None, {}
    noted = seen.notes
    ran = {
        stage: ", ".join(sorted({str(name) for name in noted[key]})) for stage, key in _NOTED.items() if key in noted
    }
    search = Search(on="planted features" if method.task.generated else "pictures", matches=len(found.scores))
    if method.task.generated:
        true = Motion().points1(found.points0, method.seen, method.seen)
        near = (true - found.points1).norm(dim=1) <= _NEAR_PX
        search = replace(search, planted_correct=float(near.float().mean()) if len(near) else 0.0)
    if "search.visited" not in noted:
        return search, ran
    groups, candidates = ([int(count) for count in noted[f"search.{key}"]] for key in ("groups", "candidates"))
    visited = sum(float(count) for count in noted["search.visited"])
    possible = sum(group * cells for group, cells in zip(groups, candidates, strict=True))
    return replace(
        search,
        groups=sum(groups),
        visited_cells=visited / max(1, sum(groups)),
        visited_share=visited / max(1, possible),
        widened_groups=sum(int(count) for count in noted["search.widened"]) if "search.widened" in noted else None,
    ), ran


def with_work(row: Row, stages: dict[str, Work], rates: Rates) -> Row:
    """What the stage had to do, and how near to the device's limits it did that."""
    work = stages.get(row.stage)
    if work is None or row.timing is None or row.method != "dualrc":
        return row
    seconds = row.timing.median_s
    return replace(
        row,
        work=work,
        matrix_share=work.operations / seconds / rates.operations_per_s if seconds else None,
        bandwidth_share=work.bytes / seconds / rates.bytes_per_s if seconds else None,
    )


def work_of(fast: Dualrc, search: Search | None) -> dict[str, Work]:
    """The least that each stage has to do; the search's is known only where it tells what it visited."""
    config, seen = fast.matcher.network.config, fast.seen
    value_bytes = fast.matcher.dtype.itemsize
    features = counts.features_work(config, seen, value_bytes)
    coarse = counts.coarse_work(config, seen, seen, value_bytes)
    work = {FEATURES: features, COARSE: coarse}
    if search is None or search.visited_cells is None or search.groups is None:
        return work
    visited = search.visited_cells * search.groups
    work[SEARCH] = counts.search_work(config, seen, seen, value_bytes, visited=visited, matches=search.matches)
    work[FURTHER] = coarse + work[SEARCH]
    work[WHOLE] = features + features + work[FURTHER]
    return work
