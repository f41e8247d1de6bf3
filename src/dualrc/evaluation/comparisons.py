"""Tables and plots of the paper's appendix, made of scores on HPatches and of measured costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from dualrc.config import Fusion, NetworkConfig, ResNetConfig
from dualrc.draw import Picture
from dualrc.evaluation.benchmark import Result, Table, seconds, share
from dualrc.evaluation.costs import Measured, cost_figure
from dualrc.evaluation.figures import Panel, curve_panels
from dualrc.evaluation.hpatches import CORRECT_PX, THRESHOLDS_PX, HPatches, published

CHANNELS = (1024, 256)
STRIDE = 4  # of the map on which matches are located, in pixels of the picture
_GROUPS = ("overall", "illumination", "viewpoint")
_BOTH_CHANNELS = ("a", "e")  # the variants of which the paper compares 256 and 1024 channels
# The published curves of neighbourhood consensus: long side of the picture, and of the map that locates matches.
_PUBLISHED = {
    "DualRC-Net, 1600 px, best 2000": (1600, 400),
    "Sparse-NCNet, 3200 px, hard + soft, best 2000": (3200, 400),
    "Sparse-NCNet, 1600 px, hard + soft, best 2000": (1600, 200),
    "Sparse-NCNet, 1600 px, hard, best 2000": (1600, 200),
    "Sparse-NCNet, 800 px, best 2000": (800, 100),
    "NCNet, 1600 px, relocalized, best 2000": (1600, 100),
    "NCNet, 800 px, best 2000": (800, 50),
}
_NOT_PUBLISHED = ("NCNet, 3200 px", 3200, 200)  # drawn in the paper, but not among the curves that we have
# The paper's own figures for a map of 200 x 150: long side of the picture, seconds a pair, GPU memory in MB.
_PUBLISHED_COSTS = {"DualRC-Net": (800, 2.05, 1232), "Sparse-NCNet": (1600, 0.82, 680), "NCNet": (3200, 4.15, 7868)}


@dataclass(frozen=True, kw_only=True)
class Network:
    """A weights file and what its header says."""

    label: str
    config: NetworkConfig
    weights: Path
    weights_hash: str

    @property
    def variant(self) -> tuple[Fusion, int] | None:
        """Fusion variant and channels, where it is one of the paper's."""
        backbone = self.config.backbone
        return (backbone.fusion, backbone.channels) if isinstance(backbone, ResNetConfig) else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A table with its plots, and what is missing in them."""

    table: Table
    figures: Mapping[str, Picture]
    notes: Sequence[str]


def variant_label(fusion: str, channels: int) -> str:
    """A variant as tables name it."""
    return f"({fusion}) {channels}"


def compare_fusion(benchmark: HPatches, results: Mapping[Network, Result], size: int) -> Comparison:
    """The five fusion variants, with as many channels as most of them are given with."""
    given = [{n.variant[0] for n in results if n.variant and n.variant[1] == count} for count in CHANNELS]
    channels = max(zip(CHANNELS, given, strict=True), key=lambda pair: len(pair[1]))[0]
    wanted = [(fusion, channels) for fusion in get_args(Fusion)]
    title = f"Fusion variants, {channels} channels, {size} px"
    return _compare_variants(benchmark, results, wanted, title, "fusion")


def compare_channels(benchmark: HPatches, results: Mapping[Network, Result], size: int) -> Comparison:
    """256 against 1024 channels, of the paper's two variants and of others that are given with both."""
    given = {network.variant for network in results}
    fusions = [f for f in get_args(Fusion) if f in _BOTH_CHANNELS or all((f, count) in given for count in CHANNELS)]
    wanted = [(fusion, channels) for fusion in fusions for channels in CHANNELS]
    return _compare_variants(benchmark, results, wanted, f"256 against 1024 channels, {size} px", "channels")


def _compare_variants(
    benchmark: HPatches,
    results: Mapping[Network, Result],
    wanted: Sequence[tuple[Fusion, int]],
    title: str,
    name: str,
) -> Comparison:
    found, missing, rows = list[Result](), list[str](), list[Sequence[str]]()
    columns = benchmark.tables([])[0].columns
    for variant in wanted:
        own = [_with_top(result, 0) for network, result in results.items() if network.variant == variant]
        found += own
        rows += benchmark.tables(own)[0].rows
        if not own:
            missing.append(variant_label(*variant))
            rows.append([missing[-1], "missing", *["-"] * (len(columns) - 2)])
    table = replace(benchmark.tables([])[0], title=title, rows=rows)
    figures = {name: _curves(found, {}, f"{title}, best {benchmark.tops[0]} matches")} if found else {}
    notes = [f"{title}: no weights were given for {', '.join(missing)}."] if missing else []
    return Comparison(table=table, figures=figures, notes=notes)


def compare_sizes(benchmark: HPatches, by_size: Mapping[int, Result], rivals: Sequence[Result]) -> Comparison:
    """The same picture size, the same map size and smaller pictures, beside rivals and published curves."""
    by_size = {size: _with_top(result, -1) for size, result in by_size.items()}
    rivals = [_with_top(result, -1) for result in rivals]
    largest, *smaller = sorted(by_size, reverse=True)
    cells = largest // (2 * STRIDE)  # of the map that Sparse-NCNet makes of the largest pictures
    same_picture = [name for name, (picture, _) in _PUBLISHED.items() if picture == largest]
    same_map = [name for name, (_, side) in _PUBLISHED.items() if side == cells]
    others = [name for name in same_picture if not name.startswith("DualRC-Net")]
    plots = {
        "sizes_same_picture": (f"Pictures of {largest} px", [by_size[largest], *rivals], same_picture),
        "sizes_same_map": (
            f"Maps of {cells} cells",
            [result for size, result in by_size.items() if size == STRIDE * cells],
            same_map,
        ),
        "sizes_smaller": (
            f"Smaller pictures beside {largest} px",
            [*(by_size[size] for size in smaller), *rivals] if smaller else [],
            others,
        ),
    }
    figures = {
        name: _curves(ours, _published_groups(theirs), f"{title}, best {benchmark.tops[-1]} matches")
        for name, (title, ours, theirs) in plots.items()
        if ours
    }
    shown = [name for name in _PUBLISHED if name in (*same_picture, *same_map)]
    return Comparison(
        table=_size_table(benchmark, by_size, rivals, shown),
        figures=figures,
        notes=_size_notes(largest, cells, list(figures)),
    )


def _size_notes(largest: int, cells: int, drawn: Sequence[str]) -> list[str]:
    notes = []
    if "sizes_same_map" not in drawn:
        half = STRIDE * cells
        notes.append(f"The same map size is not compared: that needs {largest} and {half} px; add --size {half}.")
    if "sizes_smaller" not in drawn:
        notes.append("Smaller pictures are not compared: only one size was given; add another --size.")
    name, picture, side = _NOT_PUBLISHED
    if picture == largest or side == cells:
        notes.append(f"{name} (a map of {side} cells) is missing beside our sizes: we have no published curve of it.")
    return notes


def _size_table(
    benchmark: HPatches, by_size: Mapping[int, Result], rivals: Sequence[Result], shown: Sequence[str]
) -> Table:
    whole = benchmark.tables([*by_size.values(), *rivals])[0]
    sides = [*((str(size), str(size // STRIDE)) for size in by_size), *[("-", "-")] * len(rivals)]
    # Without the limit, which is the same for all, and the size that was seen: the table must fit on a screen.
    rows = [[row[0], *side, *row[2:-1]] for row, side in zip(whole.rows, sides, strict=True)]
    curves = published()
    for name in shown:
        overall, *kinds = (curves[name][group] for group in _GROUPS)
        accuracy = [*(share(overall[px - 1]) for px in (1, 3, 5, 10)), *(share(kind[CORRECT_PX - 1]) for kind in kinds)]
        rows.append([f"{name}, published", *map(str, _PUBLISHED[name]), *accuracy, "-", "-"])
    note = (
        "Picture, map: long sides in pixels, and in cells of the map that locates matches. Mean matching accuracy at "
        "1, 3, 5 and 10 px, and at 3 px of illumination and of viewpoint sequences; matches and time a pair. "
        "Published: best 2000 matches, on 108 sequences."
    )
    title = f"Picture size and map size, best {benchmark.tops[-1]} matches"
    columns = [whole.columns[0], "picture", "map", *whole.columns[2:-1]]
    return Table(title=title, columns=columns, rows=rows, note=note)


def compare_costs(costs: Mapping[tuple[Network, int], Measured | None]) -> Comparison:
    """Time and memory by network and picture size, beside the paper's own figures."""
    rows, lines = [], dict[str, list[tuple[int, Measured]]]()
    for (network, size), cost in costs.items():
        cells = ["failed", "-", "-", "-"]
        if cost is not None:
            lines.setdefault(network.label, []).append((size, cost))
            memory = [_gib(cost.memory_bytes), _gib(cost.loaded_bytes)]
            cells = [seconds(cost.seconds), *memory, "{}x{}".format(*cost.seen)]
        rows.append([network.label, str(size), str(size // STRIDE), *cells])
    for name, (size, time_s, memory_mb) in _PUBLISHED_COSTS.items():
        rows.append([f"{name}, published", str(size), "200", seconds(time_s), _gib(memory_mb * 2**20), "-", ""])
    machines = list(dict.fromkeys(cost.machine for cost in costs.values() if cost is not None))
    table = Table(
        title="Time and memory",
        columns=["matcher", "picture", "map", "a pair", "memory", "loaded", "size"],
        rows=rows,
        note=(
            f"On {' and '.join(machines) or 'no machine'}: the median time of a pair after a warm-up, from files to "
            "matches; the peak memory of a process of its own (on a GPU, of what is allocated there), and what of it "
            "was taken before the first pair. Published: as the paper says, on its GPU."
        ),
    )
    figures = {"costs": cost_figure(lines, title=f"Time and memory on {machines[0]}")} if lines else {}
    return Comparison(table=table, figures=figures, notes=[])


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _published_groups(names: Sequence[str]) -> dict[str, dict[str, Sequence[float]]]:
    """Published curves by group."""
    curves = published()
    return {group: {name: curves[name][group] for name in names} for group in _GROUPS}


def _with_top(result: Result, index: int) -> Result:
    """The scores with one of the limits on the number of matches."""
    return replace(result, figures=[result.figures[index]])


def _curves(results: Sequence[Result], theirs: Mapping[str, Mapping[str, Sequence[float]]], title: str) -> Picture:
    """Accuracy over thresholds."""
    panels = []
    for group in _GROUPS:
        scores = {result.matcher: result.figures[0].groups.get(group) for result in results}
        ours = {name: score.mma for name, score in scores.items() if score is not None}
        if ours:
            panels.append(Panel(title=group, x=THRESHOLDS_PX, ours=ours, published=theirs.get(group, {})))
    note = "Thick: this run. Thin: published, on 108 sequences." if any(theirs.values()) else ""
    return curve_panels(panels, title=title, x_label="threshold (px)", note=note)
