"""Charts of figures that stand in the documents; each is read from its table, so that the two can't differ."""

import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from common import DOCS, GRAY, GREEN, INDIGO, ORANGE, RED, save_figure
from matplotlib.figure import Figure

# Colors of Okabe and Ito, which color-blind readers can distinguish.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000", "#56b4e9", "#999999")
# What benchmarks/reproduction.py measured; tests use other data.
REPRODUCTION = Path(os.environ.get("REPRODUCTION", Path(__file__).parent / "reproduction.json"))


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the table on a page whose header begins with these cells."""
    rows: list[list[str]] = []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if rows and not line.startswith("|"):
            break
        if rows or line.startswith(first):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    if not rows:
        raise SystemExit(f"docs/{page} has no table that begins with {first!r}.")
    return [rows[0], *rows[2:]]


def _seconds(cell: str) -> float:
    """The first time in a cell, in seconds."""
    found = re.search(r"([\d.,]+)\s*(ms|s)\b", cell)
    if found is None:
        return float("nan")
    return float(found[1].replace(",", "")) * (1e-3 if found[2] == "ms" else 1)


def speed() -> None:
    """Time of a pair against the size of the images, on a log scale."""
    figure = Figure(figsize=(10, 4.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    header, *rows = table("speed.md", "| stage | 320x240 |")
    names = {
        "LoFTR (kornia), whole pair": ("LoFTR (kornia)", RED),
        "whole pair": ("dualrc", INDIGO),
        "SIFT (OpenCV), whole pair": ("SIFT (OpenCV)", GRAY),
    }
    pixels = [np.prod([int(side) for side in size.split("x")]) for size in header[1:]]
    for wanted, (label, color) in names.items():
        times = next(row[1:] for row in rows if row[0] == wanted)
        left.plot(pixels, [_seconds(time) for time in times], marker="o", color=color, label=label)
    left.set(xscale="log", yscale="log", ylabel="seconds a pair", title="CPU, two threads")
    _ticks(left, pixels, header[1:])
    header, *rows = table("speed.md", "| preset, image | published code |")
    series: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        preset, size = re.match(r"`(\w+)`, (\d+x\d+)", row[0]).groups()  # type: ignore[union-attr]
        published = _seconds(cells["published code"])
        if np.isfinite(published):
            series.setdefault("DualRC-Net, published code", []).append((size, published))
        # A cell may hold several runs, in milliseconds.
        runs = [float(value) for value in re.findall(r"\d+\.\d+|\d+", cells["whole pair"].split("ms")[0])]
        series.setdefault(f"dualrc, preset {preset}", []).append((size, float(np.median(runs)) / 1000))
    colors = {"DualRC-Net, published code": RED, "dualrc, preset paper": ORANGE, "dualrc, preset default": INDIGO}
    sizes = sorted({size for runs in series.values() for size, _ in runs}, key=_area)
    for label, color in colors.items():
        points = series[label]
        right.plot(
            [_area(size) for size, _ in points],
            [time * 1000 for _, time in points],
            marker="o",
            color=color,
            label=label,
        )
    right.set(xscale="log", yscale="log", ylabel="milliseconds a pair", title="GPU, one H200, half precision")
    _ticks(right, [_area(size) for size in sizes], sizes)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="major")
        axes.set_xlabel("size of both images")
        # Space for the legend above the curves.
        axes.set_ylim(top=axes.get_ylim()[1] * 8)
        axes.legend(loc="upper left")
    save_figure(figure, "speed.png")


def _area(size: str) -> int:
    width, height = size.split("x")
    return int(width) * int(height)


def _ticks(axes: object, places: list[int], names: list[str]) -> None:
    axes.set_xticks(places, names, rotation=25)  # type: ignore[attr-defined]
    axes.minorticks_off()  # type: ignore[attr-defined]


def accuracy() -> None:
    """Matching accuracy against the threshold, and pose."""
    figure = Figure(figsize=(10, 4.7), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    header, *rows = table("benchmarks.md", "| matcher | top | 1 px |")
    limits = [int(name.split()[0]) for name in header if name.endswith(" px")]
    styles = {"dualrc-high": GREEN, "dualrc": INDIGO, "sift-ratio": ORANGE, "sift-mutual": GRAY}
    for matcher, color in styles.items():
        row = next(row for row in rows if row[0] == matcher and row[1] == "1000")
        count = row[header.index("matches")]
        left.plot(
            limits, [float(value) for value in row[2:6]], marker="o", color=color, label=f"{matcher}, {count} matches"
        )
    left.set(
        xscale="log",
        xlabel="threshold, px",
        ylabel="mean matching accuracy",
        ylim=(0, 1),
        title="30 pairs of HPatches and Oxford",
    )
    left.set_xticks(limits, [str(limit) for limit in limits])
    left.minorticks_off()
    header, *rows = table("benchmarks.md", "| matcher | estimator | AUC 5")
    for matcher, color in styles.items():
        found = [row for row in rows if row[0] == matcher and row[1].startswith("PoseLib")]
        if found:
            right.plot([5, 10, 20], [float(value) for value in found[0][2:5]], marker="o", color=color, label=matcher)
    right.set(
        xlabel="threshold, degrees",
        ylabel="AUC of the pose",
        xticks=[5, 10, 20],
        ylim=(0.9, 1),
        title="83 pairs of two scenes, PoseLib at 1 px",
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, "accuracy.png")


def calibration() -> None:
    """The curves that turn the network's scores into probabilities."""
    text = (files("dualrc") / "weights" / "default.calibration.json").read_text(encoding="utf-8")
    curves = {name: value for name, value in json.loads(text).items() if isinstance(value, dict) and "scores" in value}
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    labels = {"matches": ("match", INDIGO), "points": ("match_points, warp", ORANGE)}
    for name, (label, color) in labels.items():
        axes.plot(curves[name]["scores"], curves[name]["probabilities"], marker=".", color=color, label=label)
    axes.set(xlabel="score of the network", ylabel="probability within 3 px", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, "calibration.png")


def pair_score() -> None:
    """Reliability of pair_score between the thresholds of its table, and its ROC curve."""
    _, *rows = table("scores.md", "| threshold | related | hard related |")
    values = np.array([[float(cell) for cell in row[:6]] for row in rows])
    thresholds, related, _, unrelated, _, alike = values.T
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    # Between two thresholds; the last group reaches to 1. Half of all pairs are related.
    edges = np.append(thresholds, 1.0)
    yes, no = (-np.diff(np.append(share, 0.0)) for share in (related, (unrelated + alike) / 2))
    left.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    left.plot((edges[:-1] + edges[1:]) / 2, yes / (yes + no), marker="o", color=INDIGO, linewidth=1.8)
    left.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="pair_score", ylabel="share of related pairs")
    # Numbers of unrelated and of look-alike pairs, as the page lists them.
    false = (258 * unrelated + 186 * alike) / (258 + 186)
    right.plot(false, related, marker="o", color=INDIGO, linewidth=1.8)
    for threshold, x, y in zip(thresholds, false, related, strict=True):
        right.annotate(f"{threshold:g}".lstrip("0"), (x, y), (7, -13), textcoords="offset points")
    right.set(xlim=(-0.01, 0.26), ylim=(0.7, 1.02))
    right.set(xlabel="share of unrelated and look-alike pairs", ylabel="share of related pairs")
    for axes, title in ((left, "reliability, even odds"), (right, "pairs at or above a threshold")):
        axes.set_title(title)
        axes.grid(alpha=0.3)
    save_figure(figure, "pair-score.png")


def reproduction() -> None:
    """Accuracy and training of the systems of the paper, all trained alike; data of benchmarks/reproduction.py."""
    systems = {system["name"]: system for system in json.loads(REPRODUCTION.read_text(encoding="utf-8"))["systems"]}
    rivals = ("a-1024", "sparse-ncnet", "ncnet", "ncnet-weak", "a-1024-matching-cells", "a-1024-matching")
    rivals += ("a-1024-untrained",)
    _mma(systems, rivals, "2000", "reproduction-rivals.png")
    variants = (*(f"{fusion}-1024" for fusion in "abcde"), "a-256")
    _mma(systems, variants, "1000", "reproduction-variants.png")
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("fine cells", "coarse cells"), strict=True):
        # DualRC-Net is scored within 5 px while it trains, NCNet within 16 px, the size of its cells.
        key = "within_5px" if kind == "fine cells" else "within_16px"
        for color, (label, curve) in zip(COLORS, _held_out(systems, key), strict=False):
            axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, color=color, label=label)
        axes.set(xlabel="step", ylabel=key.replace("within_", "share within ").replace("px", " px"), title=kind)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=11)
    save_figure(figure, "reproduction-training.png")


def _label(system: dict[str, Any]) -> str:
    return f"{system['label']}, {system['loss']} loss" if system["loss"] else f"{system['label']}, not trained"


def _held_out(systems: dict[str, Any], key: str) -> list[tuple[str, list[tuple[int, float]]]]:
    return [(_label(system), system["held_out"][key]) for system in systems.values() if key in system["held_out"]]


def _mma(systems: dict[str, Any], names: tuple[str, ...], top: str, file: str) -> None:
    """Accuracy against the threshold: of all sequences, of illumination and of viewpoint."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    for axes, group in zip(figure.subplots(1, 3, sharey=True), ("overall", "illumination", "viewpoint"), strict=True):
        for name, color in zip(names, COLORS, strict=False):
            if name not in systems or not systems[name]["hpatches"]:
                continue
            # The first size is that of the paper's protocol.
            scored = next(iter(systems[name]["hpatches"].values()))[top]
            if group in scored:
                axes.plot(range(1, 11), scored[group]["mma"], color=color, label=_label(systems[name]))
        axes.set(title=group, xlabel="threshold, px", xticks=(1, 3, 5, 7, 10), ylim=(0, 1))
        axes.grid(alpha=0.3)
        if group == "overall":
            axes.set_ylabel(f"accuracy, best {top}")
            figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save_figure(figure, file)


FIGURES = (speed, accuracy, calibration, pair_score, *([reproduction] if REPRODUCTION.exists() else []))
