"""Kernels of the support by neighbors; `refine.py` launches them."""

import triton.language as tl

from dualrc.model import support
from dualrc.ops.triton.jit import kernel
from dualrc.ops.triton.launch import power_above

# Triton reads a global only if it is marked as a constant.
_STEP, _REACH = tl.constexpr(support.STEP), tl.constexpr(support.REACH)
_DOUBT, _RIDGE, _OWN = tl.constexpr(support.DOUBT), tl.constexpr(support.RIDGE), tl.constexpr(support.OWN)
_SHARPNESS, _NEAR = tl.constexpr(0.5 / support.SIGMA**2), tl.constexpr(0.5 / support.NEAR**2)
_SIDE, _SQUARE = tl.constexpr(2 * support.REACH + 1), tl.constexpr(support.CROWD_CELLS)
_NEIGHBORS = tl.constexpr(power_above((2 * support.REACH + 1) ** 2))


@kernel()
def _explain(
    # Pointer to the image's planes: x, y, u, v, confidence.
    maps: tl.tensor,
    places: tl.tensor,
    row_length: tl.tensor,
    # (matches)
    at: tl.tensor,
    own_x: tl.tensor,
    own_y: tl.tensor,
    own_u: tl.tensor,
    own_v: tl.tensor,
    exists: tl.tensor,
    # Pointers to the outputs of the matches: motion (a b; c d) and shift (u, v), `apart` values from each other.
    target: tl.tensor,
    apart: tl.tensor,
) -> tl.tensor:
    """Return the share of the neighbors that agree, and store their motion and the shift."""
    number = tl.arange(0, _NEIGHBORS)
    row, column = number // _SIDE - _REACH, number % _SIDE - _REACH
    # A match does not support itself.
    counts = (number < _SIDE * _SIDE) & ((row != 0) | (column != 0))
    place = at[:, None] + ((row * row_length + column) * _STEP)[None, :]
    asked = exists[:, None] & counts[None, :]
    weight = tl.load(maps + 4 * places + place, mask=asked, other=0.0)
    x = tl.load(maps + place, mask=asked, other=0.0) - own_x[:, None]
    y = tl.load(maps + places + place, mask=asked, other=0.0) - own_y[:, None]
    u = tl.load(maps + 2 * places + place, mask=asked, other=0.0) - own_u[:, None]
    v = tl.load(maps + 3 * places + place, mask=asked, other=0.0) - own_v[:, None]
    wx, wy = weight * x, weight * y
    xx, xy, yy = tl.sum(wx * x, axis=1) + _RIDGE, tl.sum(wx * y, axis=1), tl.sum(wy * y, axis=1) + _RIDGE
    inverse = 1.0 / (xx * yy - xy * xy)
    ux, uy, vx, vy = tl.sum(wx * u, axis=1), tl.sum(wy * u, axis=1), tl.sum(wx * v, axis=1), tl.sum(wy * v, axis=1)
    a, b = (yy * ux - xy * uy) * inverse, (xx * uy - xy * ux) * inverse
    c, d = (yy * vx - xy * vy) * inverse, (xx * vy - xy * vx) * inverse
    stray_u, stray_v = u - a[:, None] * x - b[:, None] * y, v - c[:, None] * x - d[:, None] * y
    stray = stray_u * stray_u + stray_v * stray_v
    share = tl.sum(weight * tl.exp(stray * -_SHARPNESS), axis=1) / (tl.sum(weight, axis=1) + _DOUBT)
    near = weight * tl.exp(stray * -_NEAR)
    total = tl.sum(near, axis=1) + _OWN
    shift_u, shift_v = tl.sum(near * stray_u, axis=1) / total, tl.sum(near * stray_v, axis=1) / total
    tl.store(target, a, mask=exists)
    tl.store(target + apart, b, mask=exists)
    tl.store(target + 2 * apart, c, mask=exists)
    tl.store(target + 3 * apart, d, mask=exists)
    tl.store(target + 4 * apart, shift_u, mask=exists)
    tl.store(target + 5 * apart, shift_v, mask=exists)
    return share


@kernel()
def load_four(
    table: tl.tensor, apart: tl.tensor, exists: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load four values that are `apart` from each other."""
    first, second = tl.load(table, mask=exists, other=0.0), tl.load(table + apart, mask=exists, other=0.0)
    third = tl.load(table + 2 * apart, mask=exists, other=0.0)
    return first, second, third, tl.load(table + 3 * apart, mask=exists, other=0.0)


@kernel("count", "places0", "places1", "row0", "row1")
def explain_both(
    # (count) Negative for an empty row.
    pair: tl.tensor,
    # (5 count)
    known: tl.tensor,
    # (2 count)
    at: tl.tensor,
    # (6 places0) and (6 places1) The last plane of each is filled.
    maps: tl.tensor,
    # (2 6 count) Output: motion and shift for both images.
    around: tl.tensor,
    # (count) Output.
    score: tl.tensor,
    count: tl.tensor,
    places0: tl.tensor,
    places1: tl.tensor,
    # Positions from one row of the grid to the next.
    row0: tl.tensor,
    row1: tl.tensor,
    MATCHES: tl.constexpr,
    # Not read: the constants of the definition. Triton before 3.4 does not compile again if only a global changes.
    CONSTANTS: tl.constexpr,
) -> None:
    """Compute the support of the neighbors in both images, and the score, which is placed on the grids too."""
    match = tl.program_id(0) * MATCHES + tl.arange(0, MATCHES)
    exists = match < count
    x0, y0, x1, y1 = load_four(known + match, count, exists)
    at0 = tl.load(at + match, mask=exists, other=0)
    at1 = tl.load(at + count + match, mask=exists, other=0)
    maps1 = maps + 6 * places0
    share0 = _explain(maps, places0, row0, at0, x0, y0, x1, y1, exists, around + match, count)
    around += 6 * count
    share1 = _explain(maps1, places1, row1, at1, x1, y1, x0, y0, exists, around + match, count)
    value = tl.load(known + 4 * count + match, mask=exists, other=0.0) * tl.sqrt(share0 * share1)
    tl.store(score + match, value, mask=exists)
    used = exists & (tl.load(pair + match, mask=exists, other=-1) >= 0)
    key = order_key(value).to(tl.float32, bitcast=True)
    tl.store(maps + 5 * places0 + at0, key, mask=used)
    tl.store(maps1 + 5 * places1 + at1, key, mask=used)


@kernel()
def order_key(score: tl.tensor) -> tl.tensor:
    """Return positive integers that sort like nonnegative scores; 0 marks positions without a match."""
    return score.to(tl.int32, bitcast=True) + 1


@kernel()
def crowd(
    # Pointer to the image's positions.
    keys: tl.tensor,
    # (matches) Pointers to their positions, and to their row-major cells.
    at: tl.tensor,
    index: tl.tensor,
    width: tl.tensor,
    row_length: tl.tensor,
    key: tl.tensor,
    exists: tl.tensor,
) -> tl.tensor:
    """Count the matches with a higher score in the same square of cells; among equals the first counts as higher."""
    at = tl.load(at, mask=exists, other=0)
    index = tl.load(index, mask=exists, other=0).to(tl.int32)
    place = tl.arange(0, _SQUARE * _SQUARE)
    row, column = index // width % _SQUARE, index % width % _SQUARE
    # The margins are wider than the part of a square beyond the image.
    first = at - row * row_length - column
    offset = place // _SQUARE * row_length + place % _SQUARE
    other = tl.load(keys + first[:, None] + offset[None, :], mask=exists[:, None], other=0.0)
    other = other.to(tl.int32, bitcast=True)
    before = place[None, :] < (row * _SQUARE + column)[:, None]
    higher = (other > key[:, None]) | ((other == key[:, None]) & before)
    return tl.sum(higher.to(tl.float32), axis=1)
