"""Output of the benchmark: tables of the stages, and of their growth."""

from collections.abc import Iterator, Sequence

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dualrc.bench.results import DeviceResult, Growth, Row, SizeResult

# Number of characters of a kernel's name, enough to identify it.
_NAME = 44
# Width of the table; output that is not a terminal is not wrapped.
_WIDE = 190


def show(result: DeviceResult, console: Console) -> None:
    """Print the tables of one device."""
    if not console.is_terminal:
        console = Console(file=console.file, width=max(console.width, _WIDE), highlight=False)
    rates = result.rates
    heading = (
        f"{result.preset} ({result.weights}), {result.device}, {result.precision}: {result.machine['processor']}, "
        f"{result.machine['threads']} threads; matrix products {_engineering(rates.operations_per_s)}op/s, "
        f"copies {_engineering(rates.bytes_per_s)}B/s"
    )
    console.print(Text(heading, style="bold"), soft_wrap=True)
    console.print(_stages(result.sizes))
    for size in result.sizes:
        for line in (*_search_lines(size), *(f"Note: {note}" for note in size.notes)):
            console.print(Text(line), soft_wrap=True)
    if result.growth:
        console.print(_growth(result.growth))


def _stages(sizes: Sequence[SizeResult]) -> Table:
    numbers = ("median", "interquartile range", "peak memory", "of matrix rate", "of bandwidth")
    table = _table(("size", "method", "stage"), numbers)
    table.add_column("engine and kernels", overflow="fold")
    for size in sizes:
        for number, row in enumerate(size.rows):
            first = f"{size.size[0]}x{size.size[1]}" if number == 0 else ""
            stage = row.stage if row.matches is None else f"{row.stage} ({row.matches:,} matches)"
            cells = (first, row.method, stage, *_time_cells(row), _bytes(row.peak_bytes))
            shares = (_percent(row.matrix_share), _percent(row.bandwidth_share))
            table.add_row(*(Text(cell) for cell in (*cells, *shares, _ran(row))))
        table.add_section()
    return table


def _growth(growths: Sequence[Growth]) -> Table:
    numbers = ("side", "time", "per doubling", "working memory", "per doubling")
    table = _table(("method", "stage", "sizes"), numbers)
    for item in growths:
        sizes = f"{item.size0[0]}x{item.size0[1]} to {item.size1[0]}x{item.size1[1]}"
        time, memory = (item.time_factor, item.time_per_doubling), (item.memory_factor, item.memory_per_doubling)
        factors = ("" if f is None else f"x {f:.2f}" for f in (item.side_factor, *time, *memory))
        table.add_row(item.method, item.stage, sizes, *factors)
    return table


def _table(words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table with columns of words and of numbers."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for name in (*words, *numbers):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    return table


def _search_lines(size: SizeResult) -> Iterator[str]:
    for method, search in size.searches.items():
        line = f"Search at {size.size[0]}x{size.size[1]}, {method}, on {search.on}: {search.matches:,} matches"
        if search.planted_correct is not None:
            line += f", {search.planted_correct:.1%} as planted"
        line += f"; {search.visited_cells:.1f} coarse cells visited per group of queries, {search.visited_share:.2%}"
        yield f"{line}; {search.widened_groups:,} of {search.groups:,} groups visited more than the first cells."


def _time_cells(row: Row) -> tuple[str, str]:
    if row.timing is None:
        return "", ""
    median = _milliseconds(row.timing.median_s)
    if row.pairs_per_s is not None:
        median += f" ({row.pairs_per_s:,.1f} pairs/s)"
    return median, f"{_milliseconds(row.timing.low_s)} to {_milliseconds(row.timing.high_s)}"


def _ran(row: Row) -> str:
    kernels = ", ".join(f"{_short(kernel.name)} {kernel.share:.0%}" for kernel in row.kernels[:1])
    return ": ".join(filter(None, [row.engine, kernels]))


def _short(name: str) -> str:
    name = name.removeprefix("void ").removeprefix("aten::")
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 1 else 1 if seconds >= 0.01 else 2}f} ms"


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / 2**20:,.0f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _engineering(value: float) -> str:
    return f"{value / 1e12:.3g} T" if value >= 1e12 else f"{value / 1e9:.3g} G"
