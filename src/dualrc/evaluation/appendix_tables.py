"""Tables and plots of the paper's appendix, from scores on HPatches and from measured costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from dualrc.config import Fusion
from dualrc.evaluation.benchmark import Result
from dualrc.evaluation.costs import Measured, cost_figure
from dualrc.evaluation.hpatches import HPatches, accuracy_cells, accuracy_curves, published
from dualrc.evaluation.matchers import WeightsFile, variant_label
from dualrc.evaluation.report import Report, Table, seconds
from dualrc.pixels import FINE_STRIDE
from dualrc.types import ImageArray

CHANNELS = (1024, 256)
# Variants for which the paper compares 256 and 1024 channels.
_BOTH_CHANNELS = ("a", "e")
# Published curves of neighborhood consensus: long sides of the image, and of the map that locates matches. NCNet runs
# without the last stride of its backbone, so its map has 1/8 of the image size; it is pooled by 2 for consensus.
_PUBLISHED_SIZES = {
    "DualRC-Net, 1600 px, best 2000": (1600, 400),
    "Sparse-NCNet, 3200 px, hard + soft, best 2000": (3200, 400),
    "Sparse-NCNet, 1600 px, hard + soft, best 2000": (1600, 200),
    "Sparse-NCNet, 1600 px, hard, best 2000": (1600, 200),
    "Sparse-NCNet, 800 px, best 2000": (800, 100),
    "NCNet, 1600 px, relocalized, best 2000": (1600, 200),
    "NCNet, 800 px, best 2000": (800, 100),
}
# The paper's values for a map of 200 x 150: long side of the image, seconds per pair, GPU memory in MB.
PUBLISHED_COSTS = {"DualRC-Net": (800, 2.05, 1232), "Sparse-NCNet": (1600, 0.82, 680), "NCNet": (3200, 4.15, 7868)}


def compare_fusion(benchmark: HPatches, results: Mapping[WeightsFile, Result], size: int) -> Report:
    """Compare the fusion variants, with the number of channels that most of them have."""
    given = {network.variant for network in results if network.variant}
    channels = max(CHANNELS, key=lambda count: sum(variant[1] == count for variant in given))
    wanted = [(fusion, channels) for fusion in get_args(Fusion)]
    return _compare_variants(benchmark, results, wanted, f"Fusion variants, {channels} channels, {size} px", "fusion")


def compare_channels(benchmark: HPatches, results: Mapping[WeightsFile, Result], size: int) -> Report:
    """Compare 256 with 1024 channels, for the paper's two variants and others that have both."""
    given = {network.variant for network in results}
    fusions = [f for f in get_args(Fusion) if f in _BOTH_CHANNELS or all((f, count) in given for count in CHANNELS)]
    wanted = [(fusion, channels) for fusion in fusions for channels in CHANNELS]
    return _compare_variants(benchmark, results, wanted, f"256 against 1024 channels, {size} px", "channels")


def _compare_variants(
    benchmark: HPatches,
    results: Mapping[WeightsFile, Result],
    wanted: Sequence[tuple[Fusion, int]],
    title: str,
    figure: str,
) -> Report:
    found, missing, rows = list[Result](), list[str](), list[Sequence[str]]()
    empty = benchmark.accuracy_table([], title)
    for variant in wanted:
        own = [_with_top(result, 0) for network, result in results.items() if network.variant == variant]
        found += own
        rows += benchmark.accuracy_table(own).rows
        if not own:
            missing.append(variant_label(*variant))
            rows.append([missing[-1], "missing", *["-"] * (len(empty.columns) - 2)])
    return Report(
        tables=[replace(empty, rows=rows)],
        figures={figure: _curves(found, [], f"{title}, best {benchmark.tops[0]} matches")} if found else {},
        notes=[f"{title}: no weights were passed for {', '.join(missing)}."] if missing else [],
    )


def compare_sizes(benchmark: HPatches, by_size: Mapping[int, Result], others: Sequence[Result]) -> Report:
    """Compare equal image sizes, equal map sizes and smaller images with other matchers and published curves."""
    by_size = {size: _with_top(result, -1) for size, result in by_size.items()}
    others = [_with_top(result, -1) for result in others]
    largest, *smaller = sorted(by_size, reverse=True)
    # Size of the map that Sparse-NCNet makes of the largest images.
    cells = largest // (2 * FINE_STRIDE)
    same_image = [name for name, (image, _) in _PUBLISHED_SIZES.items() if image == largest]
    same_map = [name for name, (_, side) in _PUBLISHED_SIZES.items() if side == cells]
    plots = {
        "sizes_same_image": (f"Images of {largest} px", [by_size[largest], *others], same_image),
        "sizes_same_map": (
            f"Maps of {cells} cells",
            [result for size, result in by_size.items() if size == FINE_STRIDE * cells],
            same_map,
        ),
        "sizes_smaller": (
            f"Smaller images and {largest} px",
            [*(by_size[size] for size in smaller), *others] if smaller else [],
            [name for name in same_image if not name.startswith("DualRC-Net")],
        ),
    }
    notes = []
    if FINE_STRIDE * cells not in by_size:
        half = FINE_STRIDE * cells
        notes.append(f"The same map size is not compared: that needs {largest} and {half} px; add --size {half}.")
    if not smaller:
        notes.append("Smaller images are not compared: only one size was passed; add another --size.")
    if 1600 in (largest, 8 * cells):
        notes.append("The paper labels the curve of NCNet at 1600 px NCNet (3200 H), but its data is for 1600 px.")
    shown = {name: sides for name, sides in _PUBLISHED_SIZES.items() if name in (*same_image, *same_map)}
    return Report(
        tables=[_size_table(benchmark, by_size, others, shown)],
        figures={
            file: _curves(ours, theirs, f"{title}, best {benchmark.tops[-1]} matches")
            for file, (title, ours, theirs) in plots.items()
            if ours
        },
        notes=notes,
    )


def _size_table(
    benchmark: HPatches,
    by_size: Mapping[int, Result],
    others: Sequence[Result],
    shown: Mapping[str, tuple[int, int]],
) -> Table:
    whole = benchmark.accuracy_table([*by_size.values(), *others])
    sides = [*((str(size), str(size // FINE_STRIDE)) for size in by_size), *[("-", "-")] * len(others)]
    # Without the limit, which all rows share, and without the network size, so that the table fits on a screen.
    rows = [[row[0], *side, *row[2:-1]] for row, side in zip(whole.rows, sides, strict=True)]
    curves = published()
    for name, (image, side) in shown.items():
        rows.append([f"{name}, published", str(image), str(side), *accuracy_cells(curves[name]), "-", "-"])
    return Table(
        title=f"Image size and map size, best {benchmark.tops[-1]} matches",
        columns=[whole.columns[0], "image", "map", *whole.columns[2:-1]],
        rows=rows,
        note=(
            "Image, map: long sides, in pixels of the image and in cells of the map that locates matches. Mean "
            "matching accuracy at 1, 3, 5 and 10 px, and at 3 px for illumination and for viewpoint sequences. "
            "Matches and time are per pair. Published: best 2000 matches, on 108 sequences."
        ),
    )


def compare_costs(costs: Mapping[tuple[WeightsFile, int], Measured | None]) -> Report:
    """Compare time and memory by network and image size with the paper's values."""
    rows, lines = [], dict[str, list[tuple[int, Measured]]]()
    for (network, size), cost in costs.items():
        cells = ["failed", "-", "-", "-"]
        if cost is not None:
            lines.setdefault(network.label, []).append((size, cost))
            memory = [_gib(cost.memory_bytes), _gib(cost.loaded_bytes)]
            cells = [seconds(cost.seconds), *memory, "{}x{}".format(*cost.seen)]
        rows.append([network.label, str(size), str(size // FINE_STRIDE), *cells])
    for name, (size, time_s, memory_mb) in PUBLISHED_COSTS.items():
        rows.append([f"{name}, published", str(size), "200", seconds(time_s), _gib(memory_mb * 2**20), "-", ""])
    machines = list(dict.fromkeys(cost.machine for cost in costs.values() if cost is not None))
    table = Table(
        title="Time and memory",
        columns=["matcher", "image", "map", "a pair", "memory", "loaded", "size"],
        rows=rows,
        note=(
            f"On {' and '.join(machines) or 'no machine'}: median time of a pair after warm-up, from files to "
            "matches; peak memory of a separate process (on a GPU, allocated memory), and the part of it in use "
            "before the first pair. Published: values of the paper, on its GPU."
        ),
    )
    figures = {"costs": cost_figure(lines, title=f"Time and memory on {machines[0]}")} if lines else {}
    return Report(tables=[table], figures=figures)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _with_top(result: Result, index: int) -> Result:
    """Return the scores for one limit on the number of matches."""
    return replace(result, figures=[result.figures[index]])


def _curves(results: Sequence[Result], published_names: Sequence[str], title: str) -> ImageArray:
    """Draw accuracy over thresholds, with the published methods of these names."""
    known = published() if published_names else {}
    note = "Thick: this run. Thin: published, on 108 sequences." if published_names else ""
    scores = {result.matcher: result.figures[0] for result in results}
    return accuracy_curves(scores, {name: known[name] for name in published_names}, title=title, note=note)
