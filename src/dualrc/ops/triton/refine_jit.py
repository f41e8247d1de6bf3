"""Kernels of the refinement; `refine.py` says what they compute."""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


@kernel()
def _around(index: tl.tensor, cells: tl.tensor, width: tl.tensor) -> tl.tensor:
    """The 3x3 cells around one of a map with so many cells, as 16 indices: clamped at the border, the last unused."""
    number = tl.arange(0, 16)
    row = tl.minimum(tl.maximum(index // width + number // 3 - 1, 0), cells // width - 1)
    column = tl.minimum(tl.maximum(index % width + number % 3 - 1, 0), width - 1)
    return row * width + column


@kernel("cells0", "cells1", "width0", "width1")
def window_products(
    features0: tl.tensor,  # b cells0 c
    features1: tl.tensor,  # b cells1 c
    pair: tl.tensor,  # n
    index0: tl.tensor,  # n
    index1: tl.tensor,  # n
    result: tl.tensor,  # n 9 9
    cells0: tl.tensor,
    cells1: tl.tensor,
    width0: tl.tensor,
    width1: tl.tensor,
    channels: tl.tensor,
    CHANNELS: tl.constexpr,
) -> None:
    match = tl.program_id(0).to(tl.int64)
    number = tl.load(pair + match)
    rows0 = features0 + (number * cells0 + _around(tl.load(index0 + match), cells0, width0)) * channels
    rows1 = features1 + (number * cells1 + _around(tl.load(index1 + match), cells1, width1)) * channels
    product = tl.zeros((16, 16), tl.float32)
    for start in range(0, channels, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        some = (channel < channels)[None, :]
        first = tl.load(rows0[:, None] + channel[None, :], mask=some, other=0.0)
        second = tl.load(rows1[:, None] + channel[None, :], mask=some, other=0.0)
        product = tl.dot(first, tl.trans(second), product, input_precision="ieee")
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(result + match * 81 + row * 9 + column, product, mask=(row < 9) & (column < 9))


@kernel("count", "places", "row_length")
def explain(
    maps: tl.tensor,  # 5 places: x, y, u, v, trust
    at: tl.tensor,  # count
    known: tl.tensor,  # 5 count
    share: tl.tensor,  # count: results
    motion: tl.tensor,  # count 2 2
    shift: tl.tensor,  # count 2
    count: tl.tensor,
    places: tl.tensor,
    row_length: tl.tensor,
    STEP: tl.constexpr,
    REACH: tl.constexpr,
    SHARPNESS: tl.constexpr,
    DOUBT: tl.constexpr,
    RIDGE: tl.constexpr,
    NEAR: tl.constexpr,
    OWN: tl.constexpr,
    MATCHES: tl.constexpr,
    NEIGHBORS: tl.constexpr,
) -> None:
    match = tl.program_id(0) * MATCHES + tl.arange(0, MATCHES)
    exists = match < count
    side: tl.constexpr = 2 * REACH + 1
    number = tl.arange(0, NEIGHBORS)
    row, column = number // side - REACH, number % side - REACH
    witness = (number < side * side) & ((row != 0) | (column != 0))  # it is no witness for itself
    place = tl.load(at + match, mask=exists, other=0)[:, None] + ((row * row_length + column) * STEP)[None, :]
    asked = exists[:, None] & witness[None, :]
    weight = tl.load(maps + 4 * places + place, mask=asked, other=0.0)
    x = tl.load(maps + place, mask=asked, other=0.0) - tl.load(known + match, mask=exists, other=0.0)[:, None]
    y = tl.load(maps + places + place, mask=asked, other=0.0)
    y -= tl.load(known + count + match, mask=exists, other=0.0)[:, None]
    u = tl.load(maps + 2 * places + place, mask=asked, other=0.0)
    u -= tl.load(known + 2 * count + match, mask=exists, other=0.0)[:, None]
    v = tl.load(maps + 3 * places + place, mask=asked, other=0.0)
    v -= tl.load(known + 3 * count + match, mask=exists, other=0.0)[:, None]
    wx, wy = weight * x, weight * y
    xx, xy, yy = tl.sum(wx * x, axis=1) + RIDGE, tl.sum(wx * y, axis=1), tl.sum(wy * y, axis=1) + RIDGE
    inverse = 1.0 / (xx * yy - xy * xy)
    ux, uy, vx, vy = tl.sum(wx * u, axis=1), tl.sum(wy * u, axis=1), tl.sum(wx * v, axis=1), tl.sum(wy * v, axis=1)
    a, b = (yy * ux - xy * uy) * inverse, (xx * uy - xy * ux) * inverse
    c, d = (yy * vx - xy * vy) * inverse, (xx * vy - xy * vx) * inverse
    stray_u, stray_v = u - a[:, None] * x - b[:, None] * y, v - c[:, None] * x - d[:, None] * y
    stray = stray_u * stray_u + stray_v * stray_v
    agreed = tl.sum(weight * tl.exp(-SHARPNESS * stray), axis=1) / (tl.sum(weight, axis=1) + DOUBT)
    voice = weight * tl.exp(-NEAR * stray)
    voices = tl.sum(voice, axis=1) + OWN
    tl.store(shift + match * 2, tl.sum(voice * stray_u, axis=1) / voices, mask=exists)
    tl.store(shift + match * 2 + 1, tl.sum(voice * stray_v, axis=1) / voices, mask=exists)
    tl.store(share + match, agreed, mask=exists)
    tl.store(motion + match * 4, a, mask=exists)
    tl.store(motion + match * 4 + 1, b, mask=exists)
    tl.store(motion + match * 4 + 2, c, mask=exists)
    tl.store(motion + match * 4 + 3, d, mask=exists)


@kernel()
def _look(
    light: tl.tensor,  # pointers to the first pixel of each match's picture, matches 1
    height: tl.tensor,
    width: tl.tensor,
    x: tl.tensor,  # matches places
    y: tl.tensor,
) -> tl.tensor:
    """Brightness between the pixels."""
    x = tl.minimum(tl.maximum(x, 0.0), (width - 1).to(tl.float32))
    y = tl.minimum(tl.maximum(y, 0.0), (height - 1).to(tl.float32))
    left, top = x.to(tl.int32), y.to(tl.int32)
    right, bottom = tl.minimum(left + 1, width - 1), tl.minimum(top + 1, height - 1)
    a = tl.load(light + top * width + left).to(tl.float32)
    b = tl.load(light + top * width + right).to(tl.float32)
    c = tl.load(light + bottom * width + left).to(tl.float32)
    d = tl.load(light + bottom * width + right).to(tl.float32)
    x, y = x - left.to(tl.float32), y - top.to(tl.float32)
    above, below = a + (b - a) * x, c + (d - c) * x
    return above + (below - above) * y


@kernel()
def _normalized(window: tl.tensor, weights: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    window = window - tl.sum(window * weights, axis=1)[:, None]
    spread = tl.sqrt(tl.sum(window * window * weights, axis=1) + 1e-6)
    return window / spread[:, None], spread


@kernel()
def _slope(change: tl.tensor, spread: tl.tensor, template: tl.tensor, weights: tl.tensor) -> tl.tensor:
    """How the normalized window changes when it moves; changes of gain and level are taken out."""
    slope = change / spread[:, None]
    slope = slope - tl.sum(slope * weights, axis=1)[:, None]
    return slope - template * tl.sum(slope * template * weights, axis=1)[:, None]


@kernel("count", "height0", "width0", "height1", "width1")
def fit_windows(  # noqa: PLR0915
    light0: tl.tensor,  # b height0 width0
    light1: tl.tensor,  # b height1 width1
    pair: tl.tensor,  # count
    points0: tl.tensor,  # count 2
    points1: tl.tensor,  # count 2
    motion: tl.tensor,  # count 2 2
    result: tl.tensor,  # count 2
    count: tl.tensor,
    height0: tl.tensor,
    width0: tl.tensor,
    height1: tl.tensor,
    width1: tl.tensor,
    REACH: tl.constexpr,
    STEP: tl.constexpr,
    ROUNDS: tl.constexpr,
    DAMPING: tl.constexpr,
    LONGEST: tl.constexpr,
    FARTHEST: tl.constexpr,
    LEAST: tl.constexpr,
    GAIN: tl.constexpr,
    LARGEST: tl.constexpr,
    MATCHES: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    match = tl.program_id(0) * MATCHES + tl.arange(0, MATCHES)
    exists = match < count
    number = tl.load(pair + match, mask=exists, other=0).to(tl.int64)
    x0, y0 = (
        tl.load(points0 + 2 * match, mask=exists, other=0.0),
        tl.load(points0 + 2 * match + 1, mask=exists, other=0.0),
    )
    x1, y1 = (
        tl.load(points1 + 2 * match, mask=exists, other=0.0),
        tl.load(points1 + 2 * match + 1, mask=exists, other=0.0),
    )
    a, b = tl.load(motion + 4 * match, mask=exists, other=0.0), tl.load(motion + 4 * match + 1, mask=exists, other=0.0)
    c = tl.load(motion + 4 * match + 2, mask=exists, other=0.0)
    d = tl.load(motion + 4 * match + 3, mask=exists, other=0.0)
    side: tl.constexpr = 2 * REACH // STEP + 1
    place = tl.arange(0, PLACES)
    dx = (place % side * STEP - REACH).to(tl.float32)[None, :]
    dy = (place // side * STEP - REACH).to(tl.float32)[None, :]
    weights = tl.where(place[None, :] < side * side, tl.exp((dx * dx + dy * dy) * (-1.125 / (REACH * REACH))), 0.0)
    weights = weights / tl.sum(weights, axis=1)[:, None]

    pixels0 = light0 + (number * height0 * width0)[:, None]
    pixels1 = light1 + (number * height1 * width1)[:, None]
    at_x, at_y = x0[:, None] + dx, y0[:, None] + dy
    template = _look(pixels0, height0, width0, at_x, at_y)
    across = _look(pixels0, height0, width0, at_x + 1, at_y) - _look(pixels0, height0, width0, at_x - 1, at_y)
    down = _look(pixels0, height0, width0, at_x, at_y + 1) - _look(pixels0, height0, width0, at_x, at_y - 1)
    template, spread = _normalized(template, weights)
    slope_x, slope_y = _slope(across / 2, spread, template, weights), _slope(down / 2, spread, template, weights)
    xx = tl.sum(slope_x * slope_x * weights, axis=1) + DAMPING
    yy = tl.sum(slope_y * slope_y * weights, axis=1) + DAMPING
    xy = tl.sum(slope_x * slope_y * weights, axis=1)
    inverse = 1.0 / (xx * yy - xy * xy)
    offset_x, offset_y = a[:, None] * dx + b[:, None] * dy, c[:, None] * dx + d[:, None] * dy
    move_x, move_y = tl.zeros((MATCHES,), tl.float32), tl.zeros((MATCHES,), tl.float32)
    window = _look(pixels1, height1, width1, x1[:, None] + offset_x, y1[:, None] + offset_y)
    window, _ = _normalized(window, weights)
    before = tl.sum(window * template * weights, axis=1)
    alike = before
    for _ in tl.static_range(ROUNDS):
        off_x = tl.sum(slope_x * (window - template) * weights, axis=1)
        off_y = tl.sum(slope_y * (window - template) * weights, axis=1)
        step_x, step_y = (yy * off_x - xy * off_y) * inverse, (xx * off_y - xy * off_x) * inverse
        step_x = tl.where(tl.abs(step_x) < 1e30, step_x, 0.0)  # and where it is not a number
        step_y = tl.where(tl.abs(step_y) < 1e30, step_y, 0.0)
        length = tl.maximum(tl.sqrt(step_x * step_x + step_y * step_y) / LONGEST, 1.0)
        step_x, step_y = step_x / length, step_y / length
        move_x, move_y = move_x - (a * step_x + b * step_y), move_y - (c * step_x + d * step_y)
        window = _look(pixels1, height1, width1, (x1 + move_x)[:, None] + offset_x, (y1 + move_y)[:, None] + offset_y)
        window, _ = _normalized(window, weights)
        alike = tl.sum(window * template * weights, axis=1)
    area = a * d - b * c
    good = (alike > before + GAIN) & (alike > LEAST) & (area > 1.0 / LARGEST) & (area < LARGEST)
    good = good & (move_x * move_x + move_y * move_y < FARTHEST * FARTHEST)
    reach = REACH + 1
    good = good & (x0 >= reach) & (y0 >= reach) & (x0 + reach <= width0 - 1) & (y0 + reach <= height0 - 1)
    reach_x, reach_y = (tl.abs(a) + tl.abs(b)) * REACH + FARTHEST, (tl.abs(c) + tl.abs(d)) * REACH + FARTHEST
    good = good & (x1 >= reach_x) & (y1 >= reach_y) & (x1 + reach_x <= width1 - 1) & (y1 + reach_y <= height1 - 1)
    tl.store(result + 2 * match, tl.where(good, move_x, 0.0), mask=exists)
    tl.store(result + 2 * match + 1, tl.where(good, move_y, 0.0), mask=exists)
