"""Support: how well a match agrees with the affine motion of its neighbors, and the residual to that motion."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Spacing of the neighbors, in fine cells.
STEP = 3
# Steps to each side: 48 neighbors in a window of 19 x 19 fine cells.
REACH = 3
# Standard deviation of the residual of a neighbor that agrees, in fine cells.
SIGMA = 0.25
# Standard deviation of the residual of a neighbor that may shift a match, in fine cells.
NEAR = 1.0
# Weight of the match's own position against its neighbors.
OWN = 1.0
# Added to the diagonal of the normal matrix, which is singular for neighbors on a line.
RIDGE = 0.1
# Added to the total weight of the neighbors, so that an isolated match has little support.
DOUBT = 4.0
# Side of the squares in which better matches are counted, in fine cells.
CROWD_CELLS = 8


class Support(NamedTuple):
    """Agreement and motion of the neighbors of matches."""

    # (n) Share of the neighbors' confidence that agrees with the match, 0 to 1.
    share: Tensor
    # (n 2 2) Affine motion of the neighbors, from this image to the other.
    motion: Tensor
    # (n 2) Mean residual of the neighbors, from the match's point in the other image, in fine cells.
    shift: Tensor


class DirectedMatches(NamedTuple):
    """Matches of a batch from one of the images to the other."""

    # (n) Matched row-major fine cells of this image, each at most once.
    cells: Tensor
    # (n 2) Exact positions in this image, in fine cells.
    here: Tensor
    # (n 2) Exact positions in the other image, in fine cells.
    there: Tensor
    # (n)
    confidence: Tensor
    # (n) Pair of the batch; -1 marks an empty row.
    pair: Tensor
    # Pairs of the batch, and height and width of this image in fine cells.
    shape: tuple[int, int, int]


class NeighborMaps(NamedTuple):
    """Matches on a padded grid of cells, where neighbors are at fixed offsets."""

    # (5 p) x, y, u, v and confidence of every grid position; zero where there is no match.
    maps: Tensor
    # (n) Grid positions of the matches.
    at: Tensor
    # (5 n) The same five values in the order of the matches.
    known: Tensor
    # Distance between two rows of the grid, in positions.
    row: int


def lay_out(matches: DirectedMatches) -> NeighborMaps:
    """Place matches on a grid with margins as wide as the neighborhood."""
    index, here, there, confidence, pair, (pairs, height, width) = matches
    margin = STEP * REACH
    # The right margin of a row is also the left margin of the next row.
    row = width + margin
    at = (pair * (height + margin) + index // width + margin) * row + index % width + margin
    known = torch.cat([here.T, there.T, confidence[None]])
    places = (pairs * (height + margin) + margin) * row + margin
    # The extra position collects empty rows.
    maps = known.new_zeros(5, places + 1)
    maps[:, at.masked_fill(pair < 0, places)] = known
    maps[4, places].zero_()
    return NeighborMaps(maps, at.clamp(min=margin * (row + 1)), known, row)


def neighbor_offsets(row: int, device: torch.device) -> Tensor:
    """Return the grid offsets of the 48 neighbors; a match does not support itself."""
    axis = torch.arange(-REACH, REACH + 1, device=device) * STEP
    offsets = (axis[:, None] * row + axis).flatten()
    middle = len(offsets) // 2
    return torch.cat([offsets[:middle], offsets[middle + 1 :]])


def support(matches: DirectedMatches) -> Support:
    """Estimate the affine motion of the neighbors of each match, and how well they agree with the match."""
    layout = lay_out(matches)
    return explain(layout, layout.at, layout.known)


def explain(layout: NeighborMaps, at: Tensor, known: Tensor) -> Support:
    """Compute the support of matches at grid positions (n) with values (5 n).

    An affine motion that maps the match onto itself is fitted to the neighbors by weighted least squares. The weights
    are their confidences. The share is the part of the total confidence that this motion explains. The shift is the
    mean residual of the neighbors close to it.
    """
    offsets = neighbor_offsets(layout.row, at.device)
    # (5 k n)
    around = layout.maps.index_select(1, (offsets[:, None] + at).flatten()).unflatten(1, (len(offsets), -1))
    # Coordinates relative to the match.
    x, y, u, v = (around[:4] - known[:4, None]).unbind(0)
    weight = around[4]
    wx, wy = weight * x, weight * y
    xx, xy, yy = (wx * x).sum(0) + RIDGE, (wx * y).sum(0), (wy * y).sum(0) + RIDGE
    inverse = 1 / (xx * yy - xy * xy)
    motion, residuals = [], []
    for value in (u, v):
        along_x, along_y = (wx * value).sum(0), (wy * value).sum(0)
        a, b = (yy * along_x - xy * along_y) * inverse, (xx * along_y - xy * along_x) * inverse
        residuals.append(value - a * x - b * y)
        motion += [a, b]
    square = residuals[0].square() + residuals[1].square()
    near = weight * _gaussian(square, NEAR)
    shift = torch.stack([(near * residual).sum(0) for residual in residuals], dim=1) / (near.sum(0) + OWN)[:, None]
    share = (weight * _gaussian(square, SIGMA)).sum(0) / (weight.sum(0) + DOUBT)
    return Support(share, torch.stack(motion, dim=1).unflatten(1, (2, 2)), shift)


def _gaussian(square: Tensor, deviation: float) -> Tensor:
    # The clamp avoids subnormal numbers, which can be thirty times slower.
    return (square * (-0.5 / deviation**2)).clamp(min=-80).exp()


def crowd(matches: DirectedMatches, score: Tensor) -> Tensor:
    """Count the matches with a higher score (n) in the same 8x8 fine cells of this image: (n).

    Among equal scores, the first in row-major order counts as higher.
    """
    index, pair, (pairs, height, width) = matches.cells, matches.pair, matches.shape
    side = CROWD_CELLS
    rows, columns = (height + side - 1) // side, (width + side - 1) // side
    row, column = index // width, index % width
    square = ((pair * rows + row // side) * columns + column // side).masked_fill(pair < 0, pairs * rows * columns)
    place = row % side * side + column % side
    squares = score.new_full(((pairs * rows * columns + 1) * side * side,), -math.inf)
    squares[square * (side * side) + place] = score
    around, own = squares.view(-1, side * side).index_select(0, square), score[:, None]
    first = torch.arange(side * side, device=index.device) < place[:, None]
    return ((around > own) | ((around == own) & first)).sum(1).to(score.dtype)
