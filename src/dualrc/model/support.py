"""How matches are ranked beside their trust: whether those around move along, and how many better ones are near."""

import math

import torch
from torch import Tensor

import dualrc.kernels.refine as kernel

_STEP = 3  # fine cells between the neighbours that are asked
_REACH = 3  # steps to each side: 48 neighbours in a window of 19 x 19 cells
_SIGMA = 0.25  # fine cells that a neighbour may stray
_DOUBT = 4.0  # neighbours that speak against every match, so that a lonely one has little support
_CROWD_CELLS = 8  # fine cells along each side of the squares in which matches are counted
_CPU_VALUES, _GPU_VALUES = 2**16, 2**24  # neighbours looked at together; on a CPU they stay in its cache


def support(
    index: Tensor, here: Tensor, there: Tensor, trust: Tensor, pair: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """How well the neighbours of each match agree with it, (n) in 0 to 1, and how they move, (n 2 2).

    `index` (n) are the row-major fine cells of this picture that are matched, each once; `here` and `there` (n 2) where
    exactly the matches lie in both pictures, in fine cells; `pair` (n) which pair of the batch they belong to, -1 where
    there is no match. `shape` is (pairs, height, width). Through each match goes the affine motion that fits its
    neighbours best, weighted by their trust, and the support is the trusted share of them that this motion explains.
    The motion's matrix takes what is near here to what is near there.
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
        return kernel.explained(maps, at, known, row_length, step=_STEP, reach=_REACH, sigma=_SIGMA, doubt=_DOUBT)
    axis = torch.arange(-_REACH, _REACH + 1, device=index.device) * _STEP
    offsets = (axis[:, None] * row_length + axis).flatten()
    offsets = torch.cat([offsets[: len(offsets) // 2], offsets[len(offsets) // 2 + 1 :]])  # it is no witness for itself
    chunk = max(1, (_GPU_VALUES if index.is_cuda else _CPU_VALUES) // len(offsets))
    parts = [
        _explained(maps.index_select(1, (offsets[:, None] + places).flatten()).unflatten(1, (len(offsets), -1)), match)
        for places, match in zip(at.split(chunk), known.split(chunk, dim=1), strict=True)
    ]
    return torch.cat([share for share, _ in parts]), torch.cat([motion for _, motion in parts])


def _explained(around: Tensor, match: Tensor) -> tuple[Tensor, Tensor]:
    """The trusted share of neighbours (5 k n), and of those in doubt, that move with matches (5 n), and how they do."""
    x, y, u, v = (around[:4] - match[:4, None]).unbind(0)  # relative to the match
    weight = around[4]
    wx, wy = weight * x, weight * y
    xx, xy, yy = (wx * x).sum(0) + 1e-3, (wx * y).sum(0), (wy * y).sum(0) + 1e-3
    inverse = 1 / (xx * yy - xy * xy)
    stray = torch.zeros_like(weight)
    motion = []
    for value in (u, v):
        along_x, along_y = (wx * value).sum(0), (wy * value).sum(0)
        a, b = (yy * along_x - xy * along_y) * inverse, (xx * along_y - xy * along_x) * inverse
        stray += (value - a * x).sub_(b * y).square_()
        motion += [a, b]
    share = weight.mul(stray.mul_(-0.5 / _SIGMA**2).exp_()).sum(0) / (weight.sum(0) + _DOUBT)
    return share, torch.stack(motion, dim=1).unflatten(1, (2, 2))


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
