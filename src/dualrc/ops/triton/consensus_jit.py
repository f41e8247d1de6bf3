"""Kernels of the consensus; `consensus.py` describes the algorithm.

A scalar condition enters a mask as a limit that is 0 if the condition fails. Triton's interpreter would infer a wrong
type for a scalar boolean that is broadcast over a block. Products in float32 are exact ("ieee"); tensor cores would
round the factors to TF32.
"""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


@kernel("length0", "length1", "places")
def measure(
    # (b*n0 CHANNELS)
    maps0: tl.tensor,
    # (b*n1 CHANNELS)
    maps1: tl.tensor,
    # (b*n0) Output: factors that normalize the features of a cell.
    scale0: tl.tensor,
    # (b*n1)
    scale1: tl.tensor,
    # (places) Output: initial maxima, below any score.
    maxima: tl.tensor,
    # b*n0
    length0: tl.tensor,
    length1: tl.tensor,
    places: tl.tensor,
    CHANNELS: tl.constexpr,
    # A power of two, at least CHANNELS.
    BLOCK_C: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    """Compute the normalizing factors of the cells of both images, and initialize the maxima."""
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    channel = tl.arange(0, BLOCK_C)
    some = (channel < CHANNELS)[None, :]
    other = place - length0
    in0, in1 = place < length0, (other >= 0) & (other < length1)
    offset0, offset1 = place.to(tl.int64)[:, None] * CHANNELS, other.to(tl.int64)[:, None] * CHANNELS
    values = tl.load(maps0 + offset0 + channel[None, :], mask=in0[:, None] & some, other=0.0).to(tl.float32)
    values += tl.load(maps1 + offset1 + channel[None, :], mask=in1[:, None] & some, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) + 1e-6)
    tl.store(scale0 + place, scale, mask=in0)
    tl.store(scale1 + other, scale, mask=in1)
    tl.store(maxima + place, tl.full((POSITIONS,), float("-inf"), tl.float32), mask=place < places)


@kernel()
def _raise_maxima(
    # (ROWS COLUMNS) float32
    scores: tl.tensor,
    # Pointer to the pair's (n1).
    best0: tl.tensor,
    # Pointer to the pair's (n0).
    best1: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
) -> None:
    inside = (row < n0)[:, None] & (column < n1)[None, :]
    scores = tl.where(inside, scores, float("-inf"))
    tl.atomic_max(best0 + column, tl.max(scores, axis=0), mask=column < n1, sem="relaxed")
    tl.atomic_max(best1 + row, tl.max(scores, axis=1), mask=row < n0, sem="relaxed")


@kernel("n0", "n1")
def correlate(
    # (b n0 CHANNELS)
    maps0: tl.tensor,
    # (b n1 CHANNELS)
    maps1: tl.tensor,
    # (b n0)
    scale0: tl.tensor,
    # (b n1)
    scale1: tl.tensor,
    # (b n0) Whether a cell is valid; read only if MASKED.
    cells0: tl.tensor,
    # (b n1)
    cells1: tl.tensor,
    # (b n0 n1) Output.
    scores: tl.tensor,
    # (b n1) Raised to the maxima over image 0.
    best0: tl.tensor,
    # (b n0) Raised to the maxima over image 1.
    best1: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    # Channels multiplied per step.
    TERMS: tl.constexpr,
) -> None:
    """Compute cosines of all cells of image 0 with all cells of image 1, and their maxima."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.program_id(2).to(tl.int64)
    # Cells past the end repeat the last cell.
    here, there = pair * n0 + tl.minimum(row, n0 - 1), pair * n1 + tl.minimum(column, n1 - 1)
    rows, columns = maps0 + here * CHANNELS, maps1 + there * CHANNELS
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, CHANNELS, TERMS):
        channel = start + tl.arange(0, TERMS)
        if CHANNELS % TERMS == 0:
            first = tl.load(rows[:, None] + channel[None, :])
            second = tl.load(columns[:, None] + channel[None, :])
        else:
            some = (channel < CHANNELS)[None, :]
            first = tl.load(rows[:, None] + channel[None, :], mask=some, other=0.0)
            second = tl.load(columns[:, None] + channel[None, :], mask=some, other=0.0)
        product = tl.dot(first, tl.trans(second), product, input_precision="ieee")
    product = product * tl.load(scale0 + here)[:, None] * tl.load(scale1 + there)[None, :]
    if MASKED:
        product = tl.where((tl.load(cells0 + here) != 0)[:, None], product, 0.0)
        product = tl.where((tl.load(cells1 + there) != 0)[None, :], product, 0.0)
    values = product.to(scores.dtype.element_ty)
    target = scores + (pair * n0 + row)[:, None] * n1 + column[None, :]
    tl.store(target, values, mask=(row < n0)[:, None] & (column < n1)[None, :])
    _raise_maxima(values.to(tl.float32), best0 + pair * n1, best1 + pair * n0, row, column, n0, n1)


@kernel("n0", "n1")
def find_maxima(
    # (b n0 n1)
    scores: tl.tensor,
    # (b n1) Raised to the maxima over image 0.
    best0: tl.tensor,
    # (b n0) Raised to the maxima over image 1.
    best1: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the maxima that the mutual filter divides by, in one pass over the scores."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.program_id(2).to(tl.int64)
    source = scores + (pair * n0 + row)[:, None] * n1 + column[None, :]
    inside = (row < n0)[:, None] & (column < n1)[None, :]
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    _raise_maxima(values, best0 + pair * n1, best1 + pair * n0, row, column, n0, n1)


@kernel("first_pair", "first_row", "rows", "h0", "w0", "h1", "w1")
def lay_out(
    # (b h0 w0 h1 w1)
    scores: tl.tensor,
    # (b h1*w1) Maxima over image 0; read only if FILTERED.
    best0: tl.tensor,
    # (b h0*w0) Maxima over image 1; read only if FILTERED.
    best1: tl.tensor,
    # (pairs rows h1 (w0+2)*(w1+2)) Output.
    padded: tl.tensor,
    first_pair: tl.tensor,
    # First row of image 0. It may be -1, and the last row may be h0; these rows are zero.
    first_row: tl.tensor,
    rows: tl.tensor,
    h0: tl.tensor,
    w0: tl.tensor,
    h1: tl.tensor,
    w1: tl.tensor,
    FILTERED: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    """Copy rows of image 0 with the columns of both images side by side and a zero border; filter on the way."""
    plane = (w0 + 2) * (w1 + 2)
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    k = tl.program_id(1)
    slab_row = tl.program_id(2)
    pair, i = (first_pair + slab_row // rows).to(tl.int64), first_row + slab_row % rows
    j, col = place // (w1 + 2) - 1, place % (w1 + 2) - 1
    inside = (j >= 0) & (j < w0) & (col >= 0) & (col < tl.where((i >= 0) & (i < h0), w1, 0))
    source = scores + (pair * h0 + i) * w0 * h1 * w1
    value = tl.load(source + j * (h1 * w1) + (k * w1 + col), mask=inside, other=0.0)
    if FILTERED:
        value = value.to(tl.float32)
        over0 = tl.load(best0 + pair * h1 * w1 + k * w1 + col, mask=inside, other=1.0).to(tl.float32) + 1e-5
        over1 = tl.load(best1 + (pair * h0 + i) * w0 + j, mask=inside, other=1.0).to(tl.float32) + 1e-5
        value = value * (value / over0) * (value / over1)
    target = padded + (slab_row.to(tl.int64) * h1 + k) * plane + place
    tl.store(target, value.to(padded.dtype.element_ty), mask=place < plane)


@kernel()
def _three(pointers: tl.tensor, apart: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load the transposed weights for the row above, the row itself and the row below."""
    above, here, below = tl.load(pointers), tl.load(pointers + apart), tl.load(pointers + 2 * apart)
    return tl.trans(above), tl.trans(here), tl.trans(below)


@kernel("first_row", "rows", "slots", "region_start", "region_stop", "steps", "w0", "h1", "w1")
def contribute(
    # (pairs rows+2 h1 (w0+2)*(w1+2))
    padded: tl.tensor,
    # (pairs slots 2*27 region pitch) Output. The pitch is w0*(w1+2) rounded up to a multiple of 8.
    shares: tl.tensor,
    # (3 HIDDEN 32) By row shift in image 1; the other three shifts come last.
    weight1: tl.tensor,
    # (HIDDEN)
    bias1: tl.tensor,
    # (3 64 HIDDEN)
    weight2: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    # Rows of image 1 whose results are wanted.
    region_start: tl.tensor,
    region_stop: tl.tensor,
    # Rows per program.
    steps: tl.tensor,
    w0: tl.tensor,
    h1: tl.tensor,
    w1: tl.tensor,
    HIDDEN: tl.constexpr,
    POSITIONS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Compute the contributions of each hidden position to its 27 neighbors in image 0 and in columns of image 1.

    A program walks down the rows of image 1. Each row of scores is read once and contributes to the hidden rows above,
    at and below it. Each hidden row is completed in registers and contributes to three rows of results in the same way.
    """
    wide = w1 + 2
    plane, padded_plane = w0 * wide, (w0 + 2) * wide
    # The alignment lets a thread write eight values with one instruction.
    pitch = (plane + 7) // 8 * 8
    region = region_stop - region_start
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    start = region_start + tl.program_id(1) * steps
    stop = tl.minimum(start + steps, region_stop)
    slab_row = tl.program_id(2)
    pair, row = (slab_row // rows).to(tl.int64), slab_row % rows
    # Positions between the columns, in the zero border, count as outside the image. The hidden layer is zero there.
    column = tl.where(place < plane, place % wide, wide)
    inside = column < w1

    tap = tl.arange(0, 32)
    shift = (tap // 9) * (h1 * padded_plane) + (tap // 3 % 3) * wide + tap % 3
    source = padded + (pair * (rows + 2) + row) * h1 * padded_plane
    # Taps come first, so that adjacent addresses go to adjacent threads.
    # Offsets have 32 bits, because pointers need twice the registers.
    sources = shift[:, None] + place[None, :]
    readable = (tap < 27)[:, None] & inside[None, :]

    channel, result = tl.arange(0, HIDDEN), tl.arange(0, 64)
    # Outputs come first. With the shape of the score tiles, both would share one layout, which is slow for both.
    weights1 = weight1 + channel[:, None] * 32 + tap[None, :]
    above1, here1, below1 = _three(weights1, 32 * HIDDEN)
    weights2 = weight2 + result[:, None] * HIDDEN + channel[None, :]
    above2, here2, below2 = _three(weights2, HIDDEN * 64)
    bias = tl.load(bias1 + channel)

    slot = (first_row + row) % slots
    # The 27 results of each direction occupy 32 columns.
    number = result // 32 * 27 + result % 32
    target = shares + (pair * slots + slot) * 54 * region * pitch
    targets = number[:, None] * (region * pitch) + place[None, :]

    at = tl.maximum(start - 2, 0)
    # Partial sums of the hidden row above the row being read.
    hidden_a = tl.zeros((POSITIONS, HIDDEN), tl.float32)
    # Partial sums of the hidden row at the row being read.
    hidden_b = tl.zeros((POSITIONS, HIDDEN), tl.float32)
    # Partial sums of the result two rows above the row being read.
    result_a = tl.zeros((POSITIONS, 64), tl.float32)
    # Partial sums of the result one row above the row being read.
    result_b = tl.zeros((POSITIONS, 64), tl.float32)
    following = tl.load((source + at * padded_plane) + sources, mask=readable, other=0.0)
    for base in range(at, stop + 2, UNROLL):
        # After three steps the accumulators are back in their registers, so unrolling by three avoids moves.
        for step in tl.static_range(UNROLL):
            y = base + step
            scores = tl.trans(following)
            readable = (tap < tl.where(y + 1 < h1, 27, 0))[:, None] & inside[None, :]
            following = tl.load((source + (y + 1) * padded_plane) + sources, mask=readable, other=0.0)
            done = tl.dot(scores, below1, hidden_a, input_precision="ieee")
            hidden_a = tl.dot(scores, here1, hidden_b, input_precision="ieee")
            hidden_b = tl.dot(scores, above1, input_precision="ieee")
            exists = column < tl.where((y >= 1) & (y <= h1), w1, 0)
            hidden = tl.where(exists[:, None], tl.maximum(done + bias[None, :], 0.0), 0.0)
            hidden = hidden.to(weight2.dtype.element_ty)
            complete = tl.dot(hidden, below2, result_a, input_precision="ieee")
            result_a = tl.dot(hidden, here2, result_b, input_precision="ieee")
            result_b = tl.dot(hidden, above2, input_precision="ieee")
            wanted = tl.where((y - 2 >= start) & (y - 2 < stop), 27, 0)
            writable = (result % 32 < wanted)[:, None] & (place < pitch)[None, :]
            values = tl.trans(complete.to(shares.dtype.element_ty))
            tl.store((target + (y - 2 - region_start) * pitch) + targets, values, mask=writable)


@kernel("first_pair", "first_row", "rows", "slots", "region_start", "region", "h0", "w0", "h1", "w1")
def collect(
    # (pairs slots 2*27 region pitch) The pitch is w0*(w1+2) rounded up to a multiple of 8.
    shares: tl.tensor,
    # (1)
    bias2: tl.tensor,
    # (b h0 w0 h1 w1)
    results: tl.tensor,
    first_pair: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    region_start: tl.tensor,
    region: tl.tensor,
    h0: tl.tensor,
    w0: tl.tensor,
    h1: tl.tensor,
    w1: tl.tensor,
    POSITIONS: tl.constexpr,
) -> None:
    """Sum the contributions of the 27 neighbors to each position in both directions, and finish the second layer."""
    wide = w1 + 2
    plane = w0 * wide
    pitch = (plane + 7) // 8 * 8
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    step = tl.program_id(1)
    slab_row = tl.program_id(2)
    pair, i = (slab_row // rows).to(tl.int64), first_row + slab_row % rows
    # Neighbors are relative to the first one. Tiles with known alignment would get another layout than the others.
    first = place - wide - 1
    bias = tl.load(bias2)
    one = tl.zeros((POSITIONS,), tl.float32) + bias
    other = tl.zeros((POSITIONS,), tl.float32) + bias
    for di in tl.static_range(3):
        row = i + di - 1
        end = tl.where((row >= 0) & (row < h0), plane, 0)
        slot = (row + slots) % slots
        source = shares + ((pair * slots + slot) * 54 * region + step) * pitch
        for dj in tl.static_range(3):
            for dl in tl.static_range(3):
                # The zero border lies beyond the ends of a row.
                neighbor = first + (dj * wide + dl)
                readable = (neighbor >= 0) & (neighbor < end)
                tap = di * 9 + dj * 3 + dl
                one += tl.load(source + tap * (region * pitch) + neighbor, mask=readable, other=0.0).to(tl.float32)
                other += tl.load(source + (27 + tap) * (region * pitch) + neighbor, mask=readable, other=0.0).to(
                    tl.float32
                )
    value = tl.maximum(one, 0.0) + tl.maximum(other, 0.0)
    j, col = place // wide, place % wide
    target = results + ((first_pair + pair) * h0 + i) * w0 * h1 * w1 + (region_start + step) * w1
    tl.store(target + j * (h1 * w1) + col, value.to(results.dtype.element_ty), mask=(place < plane) & (col < w1))


@kernel("n0", "n1")
def filter_scores(
    # (b n0 n1)
    scores: tl.tensor,
    # (b n1)
    best0: tl.tensor,
    # (b n0)
    best1: tl.tensor,
    # (b n0 n1)
    results: tl.tensor,
    n0: tl.tensor,
    n1: tl.tensor,
    POSITIONS: tl.constexpr,
) -> None:
    """Multiply each score by its ratios to the maxima of its row and its column."""
    place = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    row = tl.program_id(0).to(tl.int64)
    pair = row // n0
    inside = place < n1
    value = tl.load(scores + row * n1 + place, mask=inside, other=0.0).to(tl.float32)
    over0 = tl.load(best0 + pair * n1 + place, mask=inside, other=1.0).to(tl.float32) + 1e-5
    over1 = tl.load(best1 + row).to(tl.float32) + 1e-5
    value = value * (value / over0) * (value / over1)
    tl.store(results + row * n1 + place, value.to(results.dtype.element_ty), mask=inside)
