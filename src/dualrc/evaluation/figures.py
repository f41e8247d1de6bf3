"""Figures of several panels, with published methods in the background."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from dualrc.metrics import share_within
from dualrc.types import ImageArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Colors of Okabe and Ito, which color-blind readers can distinguish.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000")
# Muted colors for published methods; with two line styles they suffice for 16 methods.
_MUTED = ("#7f8fa6", "#b08968", "#8ab17d", "#c38d9e", "#9a8cc0", "#d4a373", "#6db5c5", "#a3a380")
_STYLES = ("-", "--", ":", "-.")
# Values over x, by method and group.
Curves = Mapping[str, Mapping[str, Sequence[float]]]


def recall_curves(errors: Curves, max_error: float, *, title: str, x_label: str) -> ImageArray:
    """Plot the share of errors up to each value, one panel per group."""
    x = np.linspace(0, max_error, 201).tolist()
    shares = {
        name: {group: share_within(own, x).tolist() for group, own in groups.items()} for name, groups in errors.items()
    }
    return curve_panels(list(next(iter(shares.values()))), x, shares, title=title, x_label=x_label)


def curve_panels(
    groups: Sequence[str],
    x: Sequence[float],
    ours: Curves,
    published: Curves = MappingProxyType({}),
    *,
    title: str,
    x_label: str,
    note: str = "",
) -> ImageArray:
    """Plot one panel per group side by side: curves of this run, drawn over those of published methods.

    All panels share a y axis from 0 to 1, and one legend below.
    """
    from matplotlib.ticker import MaxNLocator

    names = [*ours, *published]
    figure = new_figure(max(4.3 * len(groups), 7.0), names)
    for axes, group in zip(np.atleast_1d(figure.subplots(1, len(groups), sharey=True)), groups, strict=True):
        for index, (name, curves) in enumerate(published.items()):
            style = _STYLES[index // len(_MUTED) % len(_STYLES)]
            axes.plot(x, curves[group], style, color=_MUTED[index % len(_MUTED)], linewidth=1.0, label=name)
        for index, (name, curves) in enumerate(ours.items()):
            style, color = _STYLES[index // len(_COLORS) % len(_STYLES)], _COLORS[index % len(_COLORS)]
            if group in curves:
                axes.plot(x, curves[group], style, color=color, linewidth=2.4, label=name, zorder=10)
        axes.set(title=group, xlabel=x_label, ylim=(0, 1), xlim=(min(x), max(x)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=max(x) > 2, steps=[1, 5, 10], nbins=10))
    return finished(figure, names, title=title, note=note)


def new_figure(width: float, names: Collection[str]) -> "Figure":
    """Return an empty figure with space for a legend of these names."""
    # Imported late because it is slow.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 3.9 + 0.19 * -(-len(names) // 3)), dpi=150, layout="constrained")


def finished(figure: "Figure", names: Iterable[str], *, title: str, note: str = "") -> ImageArray:
    """Add grids, title and legend to a matplotlib figure, and render it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    handles: dict[object, Line2D] = {}
    for axes in figure.axes:
        axes.grid(color="0.9", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        handles |= {line.get_label(): line for line in axes.get_lines()}
    figure.suptitle(title, fontweight="bold")
    # Placed outside of the panels; the constrained layout reserves space for it.
    ordered = [handles[name] for name in names]
    figure.legend(handles=ordered, loc="outside lower center", ncols=3, frameon=False, fontsize=8, title=note or None)
    # Without pyplot's global state, as in draw.py.
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
