"""Support: how well a match agrees with the affine motion of the matches around it, and where that motion puts it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

STEP = 3  # fine cells between the neighbors that are read
REACH = 3  # steps to each side: 48 neighbors in a window of 19 x 19 cells
SIGMA = 0.25  # fine cells: standard deviation of a neighbor that agrees
NEAR = 1.0  # fine cells: standard deviation of a neighbor that may shift a match
OWN = 1.0  # weight of the match's own estimate against its neighbors'
RIDGE = 0.1  # added to the normal matrix, or rounding would decide the motion of neighbors on a line
DOUBT = 4.0  # added to the neighbors' total weight, so that a lone match has little support
CROWD_CELLS = 8  # fine cells along each side of the squares in which better matches are counted


class Support(NamedTuple):
    """What the neighbors of matches tell."""

    share: Tensor  # n: how well they agree with the match, 0 to 1
    motion: Tensor  # n 2 2: their affine motion, from this image to the other
    shift: Tensor  # n 2: from the match's point in the other image to where they would put it, in fine cells


class NeighborMaps(NamedTuple):
    """Matches laid out by their cell, so that neighbors are found at fixed offsets."""

    maps: Tensor  # 5 p: x, y, u, v and confidence by place; zero where there is no match
    at: Tensor  # n: places of the matches
    known: Tensor  # 5 n: the same five values of the matches themselves
    row: int  # places from one row of cells to the next


def lay_out(
    index: Tensor, here: Tensor, there: Tensor, confidence: Tensor, pair: Tensor, shape: tuple[int, int, int]
) -> NeighborMaps:
    """Matches by their cells in this image, with margins as wide as the neighborhood; arguments as in `support`."""
    pairs, height, width = shape
    margin = STEP * REACH
    row = width + margin  # one margin serves as the right one of a row and the left one of the next
    at = (pair * (height + margin) + index // width + margin) * row + index % width + margin
    known = torch.cat([here.T, there.T, confidence[None]])
    places = (pairs * (height + margin) + margin) * row + margin
    maps = known.new_zeros(5, places + 1)  # one more for empty rows
    maps[:, at.masked_fill(pair < 0, places)] = known
    maps[4, places].zero_()
    return NeighborMaps(maps, at.clamp(min=margin * (row + 1)), known, row)


def neighbor_offsets(row: int, device: torch.device) -> Tensor:
    """From a place to its 48 neighbors; a match does not support itself."""
    axis = torch.arange(-REACH, REACH + 1, device=device) * STEP
    offsets = (axis[:, None] * row + axis).flatten()
    middle = len(offsets) // 2
    return torch.cat([offsets[:middle], offsets[middle + 1 :]])


def support(
    index: Tensor, here: Tensor, there: Tensor, confidence: Tensor, pair: Tensor, shape: tuple[int, int, int]
) -> Support:
    """What the neighbors of each match tell.

    `index` (n) are the row-major fine cells of this image that are matched, each once; `here` and `there` (n 2) where
    exactly the matches lie in both images, in fine cells; `pair` (n) which pair of the batch they belong to, -1 where
    a row is empty. `shape` is (pairs, height, width).
    """
    layout = lay_out(index, here, there, confidence, pair, shape)
    return explain(layout, layout.at, layout.known)


def explain(layout: NeighborMaps, at: Tensor, known: Tensor) -> Support:
    """Support of matches at places (n) with values (5 n).

    Through each match goes the affine motion that fits its neighbors best, weighted by their confidence. The share is
    the part of their confidence that this motion explains; the shift is the mean residual of those near to it.
    """
    offsets = neighbor_offsets(layout.row, at.device)
    around = layout.maps.index_select(1, (offsets[:, None] + at).flatten()).unflatten(1, (len(offsets), -1))  # 5 k n
    x, y, u, v = (around[:4] - known[:4, None]).unbind(0)  # relative to the match
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
    # The clamp keeps out subnormal numbers, which can take thirty times as long.
    return (square * (-0.5 / deviation**2)).clamp(min=-80).exp()


def crowd(index: Tensor, score: Tensor, pair: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """How many matches with a higher score lie in the same 8x8 fine cells of this image: (n); as for `support`.

    Among equals the first in the image counts as higher.
    """
    pairs, height, width = shape
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
