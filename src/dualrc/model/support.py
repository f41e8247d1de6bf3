"""What matches tell of those around: whether they move along, where they should lie, how many better ones are near."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import dualrc.kernels.refine as kernel

_STEP = 3  # fine cells between the neighbours that are asked
_REACH = 3  # steps to each side: 48 neighbours in a window of 19 x 19 cells
_SIGMA = 0.25  # fine cells that a neighbour may stray
_NEAR = 1.0  # fine cells within which neighbours have a say in where a match lies,
_OWN = 1.0  # against its own word, which counts as that many
_DOUBT = 4.0  # neighbours that speak against every match, so that a lonely one has little support
_CROWD_CELLS = 8  # fine cells along each side of the squares in which matches are counted
_CPU_VALUES, _GPU_VALUES = 2**16, 2**24  # neighbours looked at together; on a CPU they stay in its cache


class Support(NamedTuple):
    """What the neighbours of matches tell."""

    share: Tensor  # n: how well they agree with it, 0 to 1
    motion: Tensor  # n 2 2: how they move; takes what is near here to what is near there
    shift: Tensor  # n 2: how far from where it lies there they would have it, in fine cells


def support(index: Tensor, here: Tensor, there: Tensor, trust: Tensor, pair: Tensor, shape: tuple[int, ...]) -> Support:
    """What is told by the neighbours of each match.

    `index` (n) are the row-major fine cells of this picture that are matched, each once; `here` and `there` (n 2) where
    exactly the matches lie in both pictures, in fine cells; `pair` (n) which pair of the batch they belong to, -1 where
    there is no match. `shape` is (pairs, height, width). Through each match goes the affine motion that fits its
    neighbours best, weighted by their trust, and the share is the trusted part of them that this motion explains. The
    shift is the mean of what it leaves over, of those that nearly follow it.
    """
    pairs, height, width = shape
    margin = _STEP * _REACH
    row_length = width + margin  # one margin serves as the right one of a row and the left one of the next
    at = (pair * (height + margin) + index // width + margin) * row_length + index % width + margin
    known = torch.cat([here.T, there.T, trust[None]])  # 5 n
    places = (pairs * (height + margin) + margin) * row_length + margin
    maps = known.new_zeros(5, places + 1)  # one more for what is no match
    maps[:, at.masked_fill(pair < 0, places)] = known
    maps[4, places].zero_()
    at = at.clamp(min=margin * (row_length + 1))
    if kernel.supported(maps):
        limits = {"sigma": _SIGMA, "doubt": _DOUBT, "near": _NEAR, "own": _OWN}
        return Support(*kernel.explained(maps, at, known, row_length, step=_STEP, reach=_REACH, **limits))
    axis = torch.arange(-_REACH, _REACH + 1, device=index.device) * _STEP
    offsets = (axis[:, None] * row_length + axis).flatten()
    offsets = torch.cat([offsets[: len(offsets) // 2], offsets[len(offsets) // 2 + 1 :]])  # it is no witness for itself
    chunk = max(1, (_GPU_VALUES if index.is_cuda else _CPU_VALUES) // len(offsets))
    parts = [
        _explained(maps.index_select(1, (offsets[:, None] + places).flatten()).unflatten(1, (len(offsets), -1)), match)
        for places, match in zip(at.split(chunk), known.split(chunk, dim=1), strict=True)
    ]
    return Support(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _explained(around: Tensor, match: Tensor) -> Support:
    """What neighbours (5 k n), and those that speak against it, tell of matches (5 n)."""
    x, y, u, v = (around[:4] - match[:4, None]).unbind(0)  # relative to the match
    weight = around[4]
    wx, wy = weight * x, weight * y
    xx, xy, yy = (wx * x).sum(0) + 1e-3, (wx * y).sum(0), (wy * y).sum(0) + 1e-3
    inverse = 1 / (xx * yy - xy * xy)
    motion, left = [], []
    for value in (u, v):
        along_x, along_y = (wx * value).sum(0), (wy * value).sum(0)
        a, b = (yy * along_x - xy * along_y) * inverse, (xx * along_y - xy * along_x) * inverse
        left.append((value - a * x).sub_(b * y))
        motion += [a, b]
    stray = left[0].square().add_(left[1].square())
    voice = weight * _fading(stray, _NEAR)
    shift = torch.stack([(voice * value).sum(0) for value in left], dim=1) / (voice.sum(0) + _OWN)[:, None]
    share = (weight * _fading(stray, _SIGMA)).sum(0) / (weight.sum(0) + _DOUBT)
    return Support(share, torch.stack(motion, dim=1).unflatten(1, (2, 2)), shift)


def _fading(squares: Tensor, deviation: float) -> Tensor:
    # On a CPU, exp takes thirty times as long where nothing is left.
    return (squares * (-0.5 / deviation**2)).clamp_(min=-80).exp_()


def crowd(index: Tensor, score: Tensor, pair: Tensor, shape: tuple[int, ...]) -> Tensor:
    """How many matches with a higher score lie in the same 8x8 fine cells of this picture: (n); as for `support`.

    Among equals the first in the picture counts as higher.
    """
    pairs, height, width = shape
    side = _CROWD_CELLS
    rows, columns = -(-height // side), -(-width // side)
    row, column = index // width, index % width
    square = ((pair * rows + row // side) * columns + column // side).masked_fill(pair < 0, pairs * rows * columns)
    place = row % side * side + column % side
    squares = score.new_full((pairs * rows * columns + 1, side * side), -math.inf)
    squares.view(-1)[square * (side * side) + place] = score
    around, mine = squares.index_select(0, square), score[:, None]
    first = torch.arange(side * side, device=index.device) < place[:, None]
    return ((around > mine) | ((around == mine) & first)).sum(1).to(score.dtype)
