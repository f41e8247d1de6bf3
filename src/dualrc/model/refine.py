"""Refinement: from matched fine cells to points in both images with one score."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dualrc.model.cells import FineMap, FineMapPair, TensorPair
from dualrc.model.subpixel import Subpixel
from dualrc.model.support import DirectedMatches, crowd
from dualrc.pixels import FINE_STRIDE, cell_to_pixel

if TYPE_CHECKING:
    from dualrc.model.engine import Engine

# Number of better matches in the same square of both images that halves a score.
CROWD = 8


class CellMatches(NamedTuple):
    """Matched fine cells of a batch."""

    # (n) Pair of the batch; -1 marks an empty row.
    pair: Tensor
    # (n) Row-major fine cells of image 0.
    index0: Tensor
    # (n) Row-major fine cells of image 1.
    index1: Tensor
    # (n) Score from image 0 to image 1.
    score0: Tensor
    # (n) Score from image 1 to image 0.
    score1: Tensor


class PointMatches(NamedTuple):
    """Matched points in network-input pixels."""

    # (n 2)
    points0: Tensor
    # (n 2)
    points1: Tensor
    # (n) Without refinement: the sum of the scores of both directions, 0 to 2, as published.
    # With refinement: a confidence from 0 to 1, times the support of the neighbors, lowered in crowded squares.
    scores: Tensor


class Placed(NamedTuple):
    """Matches placed by features and neighbors, before they are aligned."""

    # (n 2) In network-input pixels.
    points0: Tensor
    # (n 2)
    points1: Tensor
    # (n) As those of PointMatches.
    scores: Tensor
    # (n 2 2) From image 0 to image 1, around each match.
    motion0: Tensor
    # (n 2 2) And back.
    motion1: Tensor


def cell_centers(fine0: FineMap, fine1: FineMap, matches: CellMatches) -> PointMatches:
    """Return the matches at the centers of their cells, as in the paper."""
    points = (fine.coordinates(index) for fine, index in ((fine0, matches.index0), (fine1, matches.index1)))
    points0, points1 = (cell_to_pixel(point, FINE_STRIDE) for point in points)
    return PointMatches(points0, points1, matches.score0 + matches.score1)


def refine(
    engine: "Engine", subpixel: Subpixel, fine: FineMapPair, light: TensorPair | None, matches: CellMatches
) -> PointMatches:
    """Refine both points of each match by features, neighbors and brightness, and score the match.

    Every step is symmetric in the images: swapping the images swaps the points. `light` is the brightness (b h w) of
    both images; None skips the photometric alignment.
    """
    placed = place(engine, subpixel, fine, matches)
    points = placed.points0, placed.points1
    if light is not None:
        points = align_both(engine, light, matches.pair.clamp(min=0), placed)
    return PointMatches(*points, placed.scores)


def place(engine: "Engine", subpixel: Subpixel, fine: FineMapPair, matches: CellMatches) -> Placed:
    """Move both points of each match to where features and neighbors agree, and score it."""
    pair, index0, index1 = matches.pair, matches.index0, matches.index1
    offset0, offset1, confidence = engine.offsets(subpixel, fine, matches)
    cells0, cells1 = fine[0].coordinates(index0) + offset0, fine[1].coordinates(index1) + offset1

    shape0, shape1 = ((len(f.features), *f.fine_size) for f in fine)
    from0 = DirectedMatches(index0, cells0, cells1, confidence, pair, shape0)
    from1 = DirectedMatches(index1, cells1, cells0, confidence, pair, shape1)
    around0, around1 = engine.support(from0), engine.support(from1)
    share = around0.share * around1.share
    # The derivative of a square root at 0 is infinite. It is taken as 0.
    score = confidence * torch.where(share > 0, share, 1).sqrt() * (share > 0)
    # The best matches cluster. Lowering crowded scores ranks isolated matches elsewhere before them.
    crowd0, crowd1 = crowd(from0, score), crowd(from1, score)
    score = score * ((1 + crowd0 / CROWD) * (1 + crowd1 / CROWD)).rsqrt()

    # Each direction estimates the full residual in the other image, so each point takes half of it.
    points0 = cell_to_pixel(cells0 + around1.shift / 2, FINE_STRIDE)
    points1 = cell_to_pixel(cells1 + around0.shift / 2, FINE_STRIDE)
    return Placed(points0, points1, score, around0.motion, around1.motion)


def align_both(engine: "Engine", light: TensorPair, pair: Tensor, placed: Placed) -> tuple[Tensor, Tensor]:
    """Both points of each match, moved to where the brightness (b h w) of the images agrees; `pair` (n)."""
    move1 = engine.align(*light, pair, placed.points0, placed.points1, placed.motion0)
    move0 = engine.align(*light[::-1], pair, placed.points1, placed.points0, placed.motion1)
    return placed.points0 + move0 / 2, placed.points1 + move1 / 2
