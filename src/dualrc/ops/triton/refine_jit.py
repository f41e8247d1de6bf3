"""Kernels of the refinement; `refine.py` describes the algorithm."""

import triton.language as tl

from dualrc.model import support
from dualrc.model.refine import CROWD
from dualrc.ops.triton.align_jit import fit
from dualrc.ops.triton.jit import kernel
from dualrc.ops.triton.support_jit import crowd, load_four, order_key
from dualrc.pixels import FINE_STRIDE

_CROWD, _STRIDE, _MARGIN = tl.constexpr(CROWD), tl.constexpr(FINE_STRIDE), tl.constexpr(support.STEP * support.REACH)


@kernel()
def _around(index: tl.tensor, cells: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Return indices of the 3x3 cells around a cell, clamped at the border, padded to 16."""
    number = tl.arange(0, 16)
    row = tl.minimum(tl.maximum(index // width + number // 3 - 1, 0), cells // width - 1)
    column = tl.minimum(tl.maximum(index % width + number % 3 - 1, 0), width - 1)
    return row * width + column


@kernel()
def _products(
    # Pointer to the image's (cells LENGTH).
    features0: tl.tensor,
    features1: tl.tensor,
    at0: tl.tensor,
    at1: tl.tensor,
    cells0: tl.tensor,
    cells1: tl.tensor,
    width0: tl.tensor,
    width1: tl.tensor,
    # Channels of a feature.
    LENGTH: tl.constexpr,
    # Channels multiplied per step.
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Return products of the 3x3 cells around two cells, in the first 9 x 9 of 16 x 16."""
    rows0 = features0 + _around(at0, cells0, width0) * LENGTH
    rows1 = features1 + _around(at1, cells1, width1) * LENGTH
    product = tl.zeros((16, 16), tl.float32)
    for start in range(0, LENGTH, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        some = (channel < LENGTH)[None, :]
        first = tl.load(rows0[:, None] + channel[None, :], mask=some, other=0.0)
        second = tl.load(rows1[:, None] + channel[None, :], mask=some, other=0.0)
        product = tl.dot(first, tl.trans(second), product, input_precision="ieee")
    return product


@kernel("cells0", "cells1", "width0", "width1")
def window_products(
    # (b cells0 LENGTH)
    features0: tl.tensor,
    # (b cells1 LENGTH)
    features1: tl.tensor,
    # (n)
    pair: tl.tensor,
    index0: tl.tensor,
    index1: tl.tensor,
    # (n 9 9)
    result: tl.tensor,
    cells0: tl.tensor,
    cells1: tl.tensor,
    width0: tl.tensor,
    width1: tl.tensor,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    match = tl.program_id(0).to(tl.int64)
    number = tl.load(pair + match)
    product = _products(
        features0 + number * cells0 * LENGTH, features1 + number * cells1 * LENGTH,
        tl.load(index0 + match), tl.load(index1 + match), cells0, cells1, width0, width1, LENGTH, CHANNELS,
    )  # fmt: skip
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(result + match * 81 + row * 9 + column, product, mask=(row < 9) & (column < 9))


@kernel()
def _store_mean_step(cosine: tl.tensor, temperature: tl.tensor, target: tl.tensor) -> None:
    """Store the soft-argmax over the first 9 of 16 cosines, as (x, y) from the center of the window."""
    number = tl.arange(0, 16)
    value = tl.where(number < 9, cosine / temperature, float("-inf"))
    weight = tl.exp(value - tl.max(value, axis=0))
    total = tl.sum(weight, axis=0)
    tl.store(target, tl.sum(weight * (number % 3 - 1).to(tl.float32), axis=0) / total)
    tl.store(target + 1, tl.sum(weight * (number // 3 - 1).to(tl.float32), axis=0) / total)


@kernel("count", "cells0", "cells1", "width0", "width1")
def look_around(
    # (b cells0 LENGTH)
    features0: tl.tensor,
    # (b cells1 LENGTH)
    features1: tl.tensor,
    # (count) Negative for an empty row.
    pair: tl.tensor,
    # (count)
    index0: tl.tensor,
    index1: tl.tensor,
    score0: tl.tensor,
    score1: tl.tensor,
    # (1)
    log_temperature: tl.tensor,
    # (2 count 2) Output: soft-argmax in image 1, then in image 0.
    steps: tl.tensor,
    # (2 count PITCH) Output: inputs of the small network in both directions; written only if LEARNT.
    inputs: tl.tensor,
    count: tl.tensor,
    cells0: tl.tensor,
    cells1: tl.tensor,
    width0: tl.tensor,
    width1: tl.tensor,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PITCH: tl.constexpr,
    LEARNT: tl.constexpr,
) -> None:
    """Read the windows around a match: features of both centers, all cosines, and the scores."""
    match = tl.program_id(0).to(tl.int64)
    number = tl.maximum(tl.load(pair + match), 0)
    features0 += number * cells0 * LENGTH
    features1 += number * cells1 * LENGTH
    at0, at1 = tl.load(index0 + match), tl.load(index1 + match)
    product = _products(features0, features1, at0, at1, cells0, cells1, width0, width1, LENGTH, CHANNELS)
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    temperature = tl.exp(tl.load(log_temperature).to(tl.float32))
    _store_mean_step(tl.sum(tl.where(row == 4, product, 0.0), axis=0), temperature, steps + 2 * match)
    _store_mean_step(tl.sum(tl.where(column == 4, product, 0.0), axis=1), temperature, steps + 2 * (count + match))
    if LEARNT:
        there, back = inputs + match * PITCH, inputs + (count + match) * PITCH
        for start in range(0, LENGTH, CHANNELS):
            channel = start + tl.arange(0, CHANNELS)
            some = channel < LENGTH
            middle0 = tl.load(features0 + at0 * LENGTH + channel, mask=some, other=0.0).to(tl.float32)
            middle1 = tl.load(features1 + at1 * LENGTH + channel, mask=some, other=0.0).to(tl.float32)
            tl.store(there + channel, middle0, mask=some)
            tl.store(there + LENGTH + channel, middle1, mask=some)
            tl.store(back + channel, middle1, mask=some)
            tl.store(back + LENGTH + channel, middle0, mask=some)
        inside = (row < 9) & (column < 9)
        tl.store(there + 2 * LENGTH + row * 9 + column, 4 * product, mask=inside)
        tl.store(back + 2 * LENGTH + column * 9 + row, 4 * product, mask=inside)
        last = 2 * LENGTH + 81 + tl.arange(0, 8)
        known0 = tl.log(tl.maximum(tl.load(score0 + match).to(tl.float32), 0.0) + 1e-4) / 2
        known1 = tl.log(tl.maximum(tl.load(score1 + match).to(tl.float32), 0.0) + 1e-4) / 2
        tl.store(there + last, tl.where(last == 2 * LENGTH + 81, known0, 0.0), mask=last < PITCH)
        tl.store(back + last, tl.where(last == 2 * LENGTH + 81, known1, 0.0), mask=last < PITCH)


@kernel()
def _offset(
    steps: tl.tensor,
    learnt: tl.tensor,
    row: tl.tensor,
    score: tl.tensor,
    index: tl.tensor,
    exists: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    LEARNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the offset of a point from its cell, and the probability that it is correct."""
    x = tl.load(steps + 2 * row, mask=exists, other=0.0)
    y = tl.load(steps + 2 * row + 1, mask=exists, other=0.0)
    if LEARNT:
        x += tl.load(learnt + 3 * row, mask=exists, other=0.0)
        y += tl.load(learnt + 3 * row + 1, mask=exists, other=0.0)
        sure = 1.0 / (1.0 + tl.exp(-tl.load(learnt + 3 * row + 2, mask=exists, other=0.0)))
    else:
        # Without a learned part, the score is the only confidence.
        sure = tl.minimum(tl.maximum(tl.load(score, mask=exists, other=0.0).to(tl.float32), 1e-6), 1.0 - 1e-6)
    # At the border, an incomplete window would bias the offset inward.
    row, column = index // width, index % width
    whole = (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)
    return tl.where(whole, x, 0.0), tl.where(whole, y, 0.0), sure


@kernel()
def _put(
    # Pointer to (5 places) or more.
    maps: tl.tensor,
    places: tl.tensor,
    at: tl.tensor,
    x: tl.tensor,
    y: tl.tensor,
    u: tl.tensor,
    v: tl.tensor,
    sure: tl.tensor,
    exists: tl.tensor,
) -> None:
    tl.store(maps + at, x, mask=exists)
    tl.store(maps + places + at, y, mask=exists)
    tl.store(maps + 2 * places + at, u, mask=exists)
    tl.store(maps + 3 * places + at, v, mask=exists)
    tl.store(maps + 4 * places + at, sure, mask=exists)


@kernel("count", "height0", "width0", "height1", "width1", "places0", "places1")
def place(
    # (count) Negative for an empty row.
    pair: tl.tensor,
    # (count)
    index0: tl.tensor,
    index1: tl.tensor,
    score0: tl.tensor,
    score1: tl.tensor,
    # (2 count 2)
    steps: tl.tensor,
    # (2 count 3) Read only if LEARNT.
    learnt: tl.tensor,
    # (5 count) Output: both points in fine cells, and the confidence.
    known: tl.tensor,
    # (2 count) Output: positions on the grids.
    at: tl.tensor,
    # (6 places0) and (6 places1) Output: filled where there are matches.
    maps: tl.tensor,
    count: tl.tensor,
    # Sizes in fine cells.
    height0: tl.tensor,
    width0: tl.tensor,
    height1: tl.tensor,
    width1: tl.tensor,
    places0: tl.tensor,
    places1: tl.tensor,
    MARGIN: tl.constexpr,
    LEARNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute positions and confidences of matches, and place them on grids of cells for both images."""
    match = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = match < count
    number = tl.load(pair + match, mask=exists, other=-1).to(tl.int32)
    cell0 = tl.load(index0 + match, mask=exists, other=0).to(tl.int32)
    cell1 = tl.load(index1 + match, mask=exists, other=0).to(tl.int32)
    x1, y1, sure1 = _offset(steps, learnt, match, score0 + match, cell1, exists, height1, width1, LEARNT)
    x0, y0, sure0 = _offset(steps, learnt, count + match, score1 + match, cell0, exists, height0, width0, LEARNT)
    x0, y0 = (cell0 % width0).to(tl.float32) + x0 / 2, (cell0 // width0).to(tl.float32) + y0 / 2
    x1, y1 = (cell1 % width1).to(tl.float32) + x1 / 2, (cell1 // width1).to(tl.float32) + y1 / 2
    sure = tl.sqrt(sure0 * sure1)
    # The right margin of a row is also the left margin of the next row.
    row0, row1 = width0 + MARGIN, width1 + MARGIN
    at0 = (number * (height0 + MARGIN) + cell0 // width0 + MARGIN) * row0 + cell0 % width0 + MARGIN
    at1 = (number * (height1 + MARGIN) + cell1 // width1 + MARGIN) * row1 + cell1 % width1 + MARGIN
    used = exists & (number >= 0)
    _put(maps, places0, at0, x0, y0, x1, y1, sure, used)
    _put(maps + 6 * places0, places1, at1, x1, y1, x0, y0, sure, used)
    _put(known, count, match, x0, y0, x1, y1, sure, exists)
    # Empty rows read any position inside the grid.
    tl.store(at + match, tl.maximum(at0, MARGIN * (row0 + 1)), mask=exists)
    tl.store(at + count + match, tl.maximum(at1, MARGIN * (row1 + 1)), mask=exists)


@kernel("count", "places0", "places1", "cells_width0", "cells_width1", "height0", "width0", "height1", "width1")
def finish(
    # (b height0 width0) Read only if ALIGN.
    light0: tl.tensor,
    # (b height1 width1) Read only if ALIGN.
    light1: tl.tensor,
    # (count) Negative for an empty row.
    pair: tl.tensor,
    # (count)
    index0: tl.tensor,
    index1: tl.tensor,
    # (5 count)
    known: tl.tensor,
    # (2 count)
    at: tl.tensor,
    # (6 places0) and (6 places1)
    maps: tl.tensor,
    # (2 6 count)
    around: tl.tensor,
    # (count) Lowered in crowded squares.
    score: tl.tensor,
    # (count 2) Output: points in pixels.
    points0: tl.tensor,
    points1: tl.tensor,
    count: tl.tensor,
    places0: tl.tensor,
    places1: tl.tensor,
    # Widths in fine cells.
    cells_width0: tl.tensor,
    cells_width1: tl.tensor,
    # Sizes in pixels.
    height0: tl.tensor,
    width0: tl.tensor,
    height1: tl.tensor,
    width1: tl.tensor,
    ALIGN: tl.constexpr,
    MATCHES: tl.constexpr,
    # Not read; see `explain_both`.
    CONSTANTS: tl.constexpr,
) -> None:
    """Compute the final scores, and move points by support and alignment, half of the motion in each image."""
    match = tl.program_id(0) * MATCHES + tl.arange(0, MATCHES)
    exists = match < count
    own = tl.load(score + match, mask=exists, other=0.0)
    key = order_key(own)
    row0, row1 = cells_width0 + _MARGIN, cells_width1 + _MARGIN
    keys0, keys1 = maps + 5 * places0, maps + 6 * places0 + 5 * places1
    crowd0 = crowd(keys0, at + match, index0 + match, cells_width0, row0, key, exists)
    crowd1 = crowd(keys1, at + count + match, index1 + match, cells_width1, row1, key, exists)
    tl.store(score + match, own / tl.sqrt((1 + crowd0 / _CROWD) * (1 + crowd1 / _CROWD)), mask=exists)

    back = around + 6 * count
    x0, y0, x1, y1 = load_four(known + match, count, exists)
    x0 = (x0 + tl.load(back + 4 * count + match, mask=exists, other=0.0) / 2 + 0.5) * _STRIDE - 0.5
    y0 = (y0 + tl.load(back + 5 * count + match, mask=exists, other=0.0) / 2 + 0.5) * _STRIDE - 0.5
    x1 = (x1 + tl.load(around + 4 * count + match, mask=exists, other=0.0) / 2 + 0.5) * _STRIDE - 0.5
    y1 = (y1 + tl.load(around + 5 * count + match, mask=exists, other=0.0) / 2 + 0.5) * _STRIDE - 0.5
    if ALIGN:
        number = tl.maximum(tl.load(pair + match, mask=exists, other=0), 0).to(tl.int64)
        a, b, c, d = load_four(around + match, count, exists)
        move_x1, move_y1 = fit(light0, light1, number, height0, width0, height1, width1, x0, y0, x1, y1, a, b, c, d)
        a, b, c, d = load_four(back + match, count, exists)
        move_x0, move_y0 = fit(light1, light0, number, height1, width1, height0, width0, x1, y1, x0, y0, a, b, c, d)
        x0, y0, x1, y1 = x0 + move_x0 / 2, y0 + move_y0 / 2, x1 + move_x1 / 2, y1 + move_y1 / 2
    tl.store(points0 + 2 * match, x0, mask=exists)
    tl.store(points0 + 2 * match + 1, y0, mask=exists)
    tl.store(points1 + 2 * match, x1, mask=exists)
    tl.store(points1 + 2 * match + 1, y1, mask=exists)
