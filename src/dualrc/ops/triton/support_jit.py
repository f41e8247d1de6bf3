"""Kernels of the support by neighbors; `refine.py` launches them."""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


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
    STEP: tl.constexpr,
    REACH: tl.constexpr,
    SHARPNESS: tl.constexpr,
    DOUBT: tl.constexpr,
    RIDGE: tl.constexpr,
    NEAR: tl.constexpr,
    OWN: tl.constexpr,
    NEIGHBORS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the share of the neighbors that agree, their motion (a b; c d), and the shift (u, v)."""
    side: tl.constexpr = 2 * REACH + 1
    number = tl.arange(0, NEIGHBORS)
    row, column = number // side - REACH, number % side - REACH
    # A match does not support itself.
    counts = (number < side * side) & ((row != 0) | (column != 0))
    place = at[:, None] + ((row * row_length + column) * STEP)[None, :]
    asked = exists[:, None] & counts[None, :]
    weight = tl.load(maps + 4 * places + place, mask=asked, other=0.0)
    x = tl.load(maps + place, mask=asked, other=0.0) - own_x[:, None]
    y = tl.load(maps + places + place, mask=asked, other=0.0) - own_y[:, None]
    u = tl.load(maps + 2 * places + place, mask=asked, other=0.0) - own_u[:, None]
    v = tl.load(maps + 3 * places + place, mask=asked, other=0.0) - own_v[:, None]
    wx, wy = weight * x, weight * y
    xx, xy, yy = tl.sum(wx * x, axis=1) + RIDGE, tl.sum(wx * y, axis=1), tl.sum(wy * y, axis=1) + RIDGE
    inverse = 1.0 / (xx * yy - xy * xy)
    ux, uy, vx, vy = tl.sum(wx * u, axis=1), tl.sum(wy * u, axis=1), tl.sum(wx * v, axis=1), tl.sum(wy * v, axis=1)
    a, b = (yy * ux - xy * uy) * inverse, (xx * uy - xy * ux) * inverse
    c, d = (yy * vx - xy * vy) * inverse, (xx * vy - xy * vx) * inverse
    stray_u, stray_v = u - a[:, None] * x - b[:, None] * y, v - c[:, None] * x - d[:, None] * y
    stray = stray_u * stray_u + stray_v * stray_v
    share = tl.sum(weight * tl.exp(-SHARPNESS * stray), axis=1) / (tl.sum(weight, axis=1) + DOUBT)
    near = weight * tl.exp(-NEAR * stray)
    total = tl.sum(near, axis=1) + OWN
    return share, a, b, c, d, tl.sum(near * stray_u, axis=1) / total, tl.sum(near * stray_v, axis=1) / total


@kernel()
def _store_motion(
    target: tl.tensor,
    apart: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    exists: tl.tensor,
) -> None:
    tl.store(target, a, mask=exists)
    tl.store(target + apart, b, mask=exists)
    tl.store(target + 2 * apart, c, mask=exists)
    tl.store(target + 3 * apart, d, mask=exists)


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
    STEP: tl.constexpr,
    REACH: tl.constexpr,
    SHARPNESS: tl.constexpr,
    DOUBT: tl.constexpr,
    RIDGE: tl.constexpr,
    NEAR: tl.constexpr,
    OWN: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    MATCHES: tl.constexpr,
) -> None:
    """Compute the support of the neighbors in both images, and the score, which is placed on the grids too."""
    match = tl.program_id(0) * MATCHES + tl.arange(0, MATCHES)
    exists = match < count
    x0 = tl.load(known + match, mask=exists, other=0.0)
    y0 = tl.load(known + count + match, mask=exists, other=0.0)
    x1 = tl.load(known + 2 * count + match, mask=exists, other=0.0)
    y1 = tl.load(known + 3 * count + match, mask=exists, other=0.0)
    at0 = tl.load(at + match, mask=exists, other=0)
    at1 = tl.load(at + count + match, mask=exists, other=0)
    maps1 = maps + 6 * places0
    share0, a, b, c, d, u, v = _explain(
        maps, places0, row0, at0, x0, y0, x1, y1, exists,
        STEP, REACH, SHARPNESS, DOUBT, RIDGE, NEAR, OWN, NEIGHBORS,
    )  # fmt: skip
    _store_motion(around + match, count, a, b, c, d, exists)
    tl.store(around + 4 * count + match, u, mask=exists)
    tl.store(around + 5 * count + match, v, mask=exists)
    around += 6 * count
    share1, a, b, c, d, u, v = _explain(
        maps1, places1, row1, at1, x1, y1, x0, y0, exists,
        STEP, REACH, SHARPNESS, DOUBT, RIDGE, NEAR, OWN, NEIGHBORS,
    )  # fmt: skip
    _store_motion(around + match, count, a, b, c, d, exists)
    tl.store(around + 4 * count + match, u, mask=exists)
    tl.store(around + 5 * count + match, v, mask=exists)
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
    row_length: tl.tensor,
    # (matches)
    at: tl.tensor,
    # Row-major cells of the matches.
    index: tl.tensor,
    width: tl.tensor,
    key: tl.tensor,
    exists: tl.tensor,
    SIDE: tl.constexpr,
) -> tl.tensor:
    """Count the matches with a higher score in the same square of cells; among equals the first counts as higher."""
    place = tl.arange(0, SIDE * SIDE)
    row, column = index // width % SIDE, index % width % SIDE
    # The margins are wider than the part of a square beyond the image.
    first = at - row * row_length - column
    offset = place // SIDE * row_length + place % SIDE
    other = tl.load(keys + first[:, None] + offset[None, :], mask=exists[:, None], other=0.0)
    other = other.to(tl.int32, bitcast=True)
    before = place[None, :] < (row * SIDE + column)[:, None]
    higher = (other > key[:, None]) | ((other == key[:, None]) & before)
    return tl.sum(higher.to(tl.float32), axis=1)
