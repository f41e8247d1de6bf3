"""Figures of several panels, with published methods in the background."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dualrc.metrics import share_within
from dualrc.types import ImageArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors of Okabe and Ito, which color-blind readers can distinguish.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000")
# Muted colors for published methods; with two line styles they suffice for 16 methods.
_MUTED = ("#7f8fa6", "#b08968", "#8ab17d", "#c38d9e", "#9a8cc0", "#d4a373", "#6db5c5", "#a3a380")
_STYLES = ("-", "--", ":", "-.")
DPI = 150


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram: curves of this run, drawn over those of other methods."""

    title: str
    x: Sequence[float]
    ours: Mapping[str, Sequence[float]]
    published: Mapping[str, Sequence[float]] = field(default_factory=dict)


def recall_curves(
    errors: Mapping[str, Mapping[str, Sequence[float]]], max_error: float, *, title: str, x_label: str
) -> ImageArray:
    """Plot the share of errors up to each value, one panel per group."""
    x = np.linspace(0, max_error, 201).tolist()
    panels = []
    for name, by_matcher in errors.items():
        ours = {matcher: share_within(own, x).tolist() for matcher, own in by_matcher.items()}
        panels.append(Panel(title=name, x=x, ours=ours))
    return curve_panels(panels, title=title, x_label=x_label)


def curve_panels(panels: Sequence[Panel], *, title: str, x_label: str, note: str = "") -> ImageArray:
    """Plot panels side by side that share a y axis from 0 to 1, with one legend below."""
    # Imported late because it is slow.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for panel in panels for name in panel.ours))
    others = list(dict.fromkeys(name for panel in panels for name in panel.published))
    legend_rows = -(-(len(names) + len(others)) // 3)
    width, height = max(4.3 * len(panels), 7.0), 3.9 + 0.19 * legend_rows
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    all_axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axes, panel in zip(all_axes, panels, strict=True):
        for index, (name, y) in enumerate(panel.published.items()):
            style = _STYLES[index // len(_MUTED) % len(_STYLES)]
            axes.plot(panel.x, y, style, color=_MUTED[index % len(_MUTED)], linewidth=1.0, label=name)
        for name, y in panel.ours.items():
            index = names.index(name)
            style, color = _STYLES[index // len(_COLORS) % len(_STYLES)], _COLORS[index % len(_COLORS)]
            axes.plot(panel.x, y, style, color=color, linewidth=2.4, label=name, zorder=10)
        axes.set(title=panel.title, xlabel=x_label, ylim=(0, 1), xlim=(min(panel.x), max(panel.x)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=max(panel.x) > 2, steps=[1, 5, 10], nbins=10))
        axes.grid(color="0.9", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontweight="bold")
    handles = {h.get_label(): h for axes in all_axes for h in axes.get_lines()}
    ordered = [handles[name] for name in (*names, *others)]
    # Placed outside of the panels; the constrained layout reserves space for it.
    figure.legend(handles=ordered, loc="outside lower center", ncols=3, frameon=False, fontsize=8, title=note or None)
    return rendered(figure)


def rendered(figure: "Figure") -> ImageArray:
    """Render a matplotlib figure, without pyplot's global state, as in draw.py."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
