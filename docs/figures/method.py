"""How the method works, on a rendered pair: coarse tensor, fine search, refinement."""

import numpy as np
import torch
from common import GRAY, GREEN, INDIGO, ORANGE, RED, errors_px, matcher, pixels, save_figure, town
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from dualrc import scenes
from dualrc.model.correlation import correlate, mutual_filter
from dualrc.model.search import TINY, cell_queries, fine_cosines, read_coarse
from dualrc.pixels import STRIDE, cell_to_pixel

_SIZE = (640, 480)


def pipeline() -> None:
    """The pipeline as a drawing."""
    figure = Figure(figsize=(10.6, 3.7))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 106), ylim=(0, 35))
    axes.axis("off")
    boxes = {
        "image0": (1, 22, 10, 8, "image 0", "#eeeeee"),
        "image1": (1, 5, 10, 8, "image 1", "#eeeeee"),
        "features0": (16, 20, 16, 12, "features\ncoarse: 1/16\nfine: 1/4", "#e8eaf6"),
        "features1": (16, 3, 16, 12, "features\ncoarse: 1/16\nfine: 1/4", "#e8eaf6"),
        "coarse": (
            38,
            9.5,
            17,
            16,
            "coarse tensor\n4D correlation\nmutual filter\nconsensus\nmutual filter",
            "#fff3e0",
        ),
        "search": (60, 9.5, 14, 16, "fine search\nargmax of\ncoarse score\n× fine cosine,\nboth ways", "#fff3e0"),
        "refine": (79, 9.5, 14, 16, "refinement\nsub-pixel,\nneighbors,\nbrightness", "#fff3e0"),
        "matches": (95.8, 12.5, 9.8, 10, "matches\n(x, y)\nscores", "#e8f5e9"),
    }
    for x, y, width, height, text, color in boxes.values():
        style = "round,pad=0,rounding_size=1"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="#555555"))
        head, _, rest = text.partition("\n")
        lines = text.count("\n")
        middle = y + height / 2
        axes.text(x + width / 2, middle + lines * 1.25, head, ha="center", va="center", fontsize=12.5, weight="bold")
        axes.text(x + width / 2, middle - 1.3, rest, ha="center", va="center", fontsize=11.5, linespacing=1.3)

    def arrow(start: tuple[float, float], end: tuple[float, float], bend: float = 0.0) -> None:
        style = f"arc3,rad={bend}"
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="#555555", connectionstyle=style)
        )

    arrow((11, 26), (16, 26))
    arrow((11, 9), (16, 9))
    arrow((32, 24), (38, 20))
    arrow((32, 11), (38, 15))
    arrow((55, 17.5), (60, 17.5))
    arrow((74, 17.5), (79, 17.5))
    arrow((93, 17.5), (95.8, 17.5))
    # Fine features go past the coarse tensor into search and refinement.
    arrow((32, 29), (67, 25.8), -0.18)
    arrow((32, 6), (67, 9.2), 0.18)
    axes.text(51, 32.4, "fine features", ha="center", fontsize=11.5, color=GRAY)
    axes.text(51, 2.1, "fine features", ha="center", fontsize=11.5, color=GRAY)
    save_figure(figure, "pipeline.svg")


def coarse_tensor() -> None:
    """What one cell of image 0 sees in image 1: before and after the consensus."""
    pair = town(1, _SIZE)
    images = [pixels(rendering) for rendering in pair]
    maps = [matcher().features(image).maps for image in images]
    with torch.inference_mode():
        raw = correlate(maps[0].coarse.float(), maps[1].coarse.float())
        filtered = mutual_filter(raw)
        refined = mutual_filter(matcher().network.consensus(filtered))
    row, column = _query(pair, raw[0], refined[0])
    x, y = (cell_to_pixel(float(value), STRIDE) for value in (column, row))
    truth = scenes.correspond(*pair, np.array([[x, y]])).points1.numpy()[0]
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    panels[0].imshow(images[0])
    panels[0].add_patch(
        Rectangle((x - STRIDE / 2, y - STRIDE / 2), STRIDE, STRIDE, fill=False, edgecolor="#00e5ff", linewidth=2.5)
    )
    panels[0].set_title("image 0 and one coarse cell", fontsize=11)
    slices = (
        (raw, "cosine correlation"),
        (filtered, "after the mutual filter"),
        (refined, "after the consensus"),
    )
    for axes, (tensor, title) in zip(panels[1:], slices, strict=True):
        values = tensor[0, row, column].clamp(min=0).numpy()
        axes.imshow(images[1], alpha=0.35)
        axes.imshow(
            values / values.max(),
            extent=(-0.5, _SIZE[0] - 0.5, _SIZE[1] - 0.5, -0.5),
            cmap="magma",
            alpha=0.8,
            vmin=0,
            vmax=1,
        )
        axes.plot(
            *truth, marker="o", markersize=13, markerfacecolor="none", markeredgecolor="#4dd0e1", markeredgewidth=2
        )
        share = values.max() / values.sum()
        axes.set_title(f"{title}: best cell {share:.1%}", fontsize=11)
    for axes in panels:
        axes.axis("off")
    save_figure(figure, "coarse.png")


def _query(pair: scenes.ScenePair, raw: torch.Tensor, refined: torch.Tensor) -> tuple[int, int]:
    """A cell whose best correlation is wrong, and right after the consensus: what the consensus is for."""
    height, width = raw.shape[:2]
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    centers = np.stack([cell_to_pixel(columns, STRIDE), cell_to_pixel(rows, STRIDE)], axis=-1).astype(float)
    truth = scenes.correspond(*pair, centers.reshape(-1, 2))
    points1, visible = truth.points1.numpy(), truth.visible.numpy()

    def distance(tensor: torch.Tensor) -> np.ndarray:
        best = tensor.flatten(0, 1).flatten(1).argmax(1).numpy()
        found = np.stack(
            [cell_to_pixel(best % tensor.shape[3], STRIDE), cell_to_pixel(best // tensor.shape[3], STRIDE)]
        )
        return np.where(visible, np.linalg.norm(found.T - points1, axis=1), np.nan)

    before, after = distance(raw), distance(refined)
    inner = ((rows > 6) & (rows < height - 6) & (columns > 6) & (columns < width - 6)).ravel()
    good = inner & (before > 120) & (after < STRIDE)
    score = np.where(good, refined.flatten(0, 1).flatten(1).amax(1).numpy(), -1)
    best = int(score.argmax())
    return best // width, best % width


def exact_search() -> None:
    """The bound that ends the search, for one query, and how many cells all queries visit."""
    pair = town(1, _SIZE)
    maps = [matcher().features(pixels(rendering)).maps for rendering in pair]
    network = matcher().network
    with torch.inference_mode():
        tensor = network.coarse_tensor(*maps).flatten(3).flatten(1, 2).float()
        fine0, fine1 = maps[0].map(), maps[1].map()
        every = torch.arange(fine0.cells)[None]
        queries = cell_queries(fine0, every, network.config.fine.reading)
        # Queries by coarse cells, and queries by fine cells.
        coarse = read_coarse(tensor, queries)
        coarse = (coarse / (coarse.sum(2, keepdim=True) + TINY))[0]
        cosine = fine_cosines(queries, fine1)[0]
        # The best cosine in each coarse cell of image 1.
        order = fine1.members(torch.arange(fine1.cells))
        product = torch.stack([cosine[:, order[cell]].amax(1) for cell in range(fine1.cells)], 1) * coarse
    best = product.amax(1)
    visited = (coarse >= best[:, None]).sum(1).numpy()
    query = int(np.argsort(np.abs(visited - 7))[0])
    ranked = coarse[query].argsort(descending=True)[:16]
    figure = Figure(figsize=(10, 4.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    number = np.arange(1, len(ranked) + 1)
    stop = int(visited[query])
    left.bar(number, coarse[query, ranked], color="#c5cae9", label="coarse score: upper bound of a cell")
    left.bar(number[:stop], product[query, ranked][:stop], color=INDIGO, width=0.5, label="best product in the cell")
    left.axhline(float(best[query]), color=ORANGE, label="best product so far")
    left.axvline(stop + 0.5, color=GRAY, linestyle="--")
    left.annotate("stop", (stop + 0.6, float(coarse[query].max()) * 0.55), color=GRAY)
    left.set(xlabel="cells of image 1, by coarse score", ylabel="score", title="one query\n", xticks=range(0, 17, 4))
    left.legend()
    right.hist(np.clip(visited, 1, 30), bins=np.arange(0.5, 31.5), color=INDIGO)
    share = visited.mean() / fine1.cells
    right.set(
        xlabel="cells that a query needs (30: or more)",
        ylabel="queries",
        title=f"all {len(visited):,} queries\nmean {visited.mean():.1f} of {fine1.cells:,} cells ({share:.2%})",
    )
    save_figure(figure, "search.png")


def refinement() -> None:
    """Errors of the cells that the search finds, and of the refined points."""
    pair = town(1, _SIZE)
    images = [pixels(rendering) for rendering in pair]
    matches = matcher().match(*images)
    # The same matches, at the centers of their fine cells.
    centers = [np.floor((points + 0.5) / 4) * 4 + 1.5 for points in (matches.points0, matches.points1)]
    good = matches.scores > 0.5
    thresholds = np.geomspace(0.1, 10, 80)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for points, label, color in ((centers, "centers of fine cells", GRAY), (None, "after refinement", INDIGO)):
        pair_of = points if points is not None else [matches.points0, matches.points1]
        error = errors_px(pair, pair_of[0][good], pair_of[1][good])
        error = error[np.isfinite(error)]
        left.plot(thresholds, [(error <= limit).mean() for limit in thresholds], color=color, label=label, linewidth=2)
    left.set(
        xscale="log",
        xlabel="error, px",
        ylabel="share of matches",
        ylim=(0, 1.01),
        title="score > .5, visible in both images",
    )
    left.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    left.grid(alpha=0.3)
    left.legend()
    error = errors_px(pair, matches.points0, matches.points1)
    inner = (np.abs(matches.points1 - np.array(_SIZE) / 2) < np.array(_SIZE) / 3).all(1)
    texture = np.array(
        [
            images[1][int(y) - 8 : int(y) + 9, int(x) - 8 : int(x) + 9].std() if ok else 0
            for (x, y), ok in zip(matches.points1, inner, strict=True)
        ]
    )
    moved = np.linalg.norm(centers[1] - matches.points1, axis=1)
    number = int(np.argmax(np.where((error < 0.3) & (moved > 1.2) & inner, texture, 0)))
    truth = scenes.correspond(*pair, matches.points0[number : number + 1]).points1.numpy()[0]
    x, y = matches.points1[number]
    right.imshow(images[1])
    for cell in np.arange(-4, 5):
        for line, at in ((right.axvline, centers[1][number][0]), (right.axhline, centers[1][number][1])):
            line(at + 4 * cell + 2, color="white", linewidth=0.5, alpha=0.6)
    right.plot(*centers[1][number], marker="s", color=ORANGE, markersize=9, linestyle="", label="cell of the search")
    right.plot(x, y, marker="o", color="#4dd0e1", markersize=10, linestyle="", label="refined")
    right.plot(*truth, marker="+", color=RED, markersize=18, markeredgewidth=2, linestyle="", label="truth")
    right.set(
        xlim=(x - 14, x + 14), ylim=(y + 10, y - 10), xticks=[], yticks=[], title="one match; fine cells are 4 px"
    )
    right.legend(loc="lower right")
    save_figure(figure, "refine.png")


def pixel_convention() -> None:
    """Where pixel (0, 0) is."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(
        np.array([[0.95, 0.85, 0.95, 0.85], [0.85, 0.95, 0.85, 0.95], [0.95, 0.85, 0.95, 0.85]]),
        cmap="gray",
        vmin=0,
        vmax=1,
    )
    left.plot(0, 0, "o", color=INDIGO)
    left.annotate("(0, 0)\ncenter of the\nfirst pixel", (0, 0), (0.35, 0.55), color=INDIGO, fontsize=12)
    left.plot(-0.5, -0.5, "s", color=RED, clip_on=False)
    left.annotate(
        "(-0.5, -0.5): outer corner; COLMAP's (0, 0)", (-0.42, -0.62), color=RED, fontsize=12, annotation_clip=False
    )
    left.plot(3, 2, "o", color=GREEN)
    left.annotate("(3, 2)", (3, 2), (2.72, 2.34), color=GREEN, fontsize=12)
    left.set(xticks=range(4), yticks=range(3), xlabel="x", ylabel="y", title="4x3 pixels\n")
    right.set(
        xlim=(-1, 16),
        ylim=(3.2, -0.4),
        xticks=(0, 4, 8, 12, 15),
        yticks=[],
        xlabel="x, in pixels of the network's input",
        title="cell i of stride s: (i + 0.5) s - 0.5\n",
    )
    for stride, height, color in ((1, 0.2, GRAY), (4, 1.2, ORANGE), (16, 2.2, INDIGO)):
        for cell in range(16 // stride):
            right.add_patch(Rectangle((cell * stride - 0.5, height), stride, 0.6, facecolor="none", edgecolor=color))
            right.plot(
                cell_to_pixel(float(cell), stride), height + 0.3, "o", color=color, markersize=3 if stride == 1 else 5
            )
        name = {1: "pixels", 4: "fine cells, stride 4", 16: "coarse cell, stride 16"}[stride]
        right.text(-0.5, height - 0.07, name, fontsize=12, color=color)
    right.spines["left"].set_visible(False)
    save_figure(figure, "pixels.svg")


FIGURES = (pipeline, coarse_tensor, exact_search, refinement, pixel_convention)
