"""Kernels of the consensus; `consensus.py` has the plan they follow.

A condition on one number joins a mask as a limit that is 0 where it fails, because Triton's interpreter mistakes the
type of a single truth value that is spread over a block.
"""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


@kernel("length0", "length1", "places")
def measure(
    maps0: tl.tensor,  # b*n0 CHANNELS
    maps1: tl.tensor,  # b*n1 CHANNELS
    scale0: tl.tensor,  # b*n0: results, what makes the features of a cell a unit vector
    scale1: tl.tensor,  # b*n1
    maxima: tl.tensor,  # places: results, below any score
    length0: tl.tensor,  # b*n0
    length1: tl.tensor,
    places: tl.tensor,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,  # a power of two, at least CHANNELS
    POSITIONS: tl.constexpr,
) -> None:
    """Scales of the cells of both pictures, one after the other, and maxima to start from."""
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
    scores: tl.tensor,  # ROWS COLUMNS, in float32
    best0: tl.tensor,  # pointer to the pair's n1
    best1: tl.tensor,  # pointer to the pair's n0
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
    maps0: tl.tensor,  # b n0 CHANNELS
    maps1: tl.tensor,  # b n1 CHANNELS
    scale0: tl.tensor,  # b n0
    scale1: tl.tensor,  # b n1
    cells0: tl.tensor,  # b n0: whether a cell counts; read where MASKED
    cells1: tl.tensor,  # b n1
    scores: tl.tensor,  # b n0 n1: results
    best0: tl.tensor,  # b n1: raised to the maxima over picture 0
    best1: tl.tensor,  # b n0: and over picture 1
    n0: tl.tensor,
    n1: tl.tensor,
    CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,  # channels multiplied at a time
    PRECISION: tl.constexpr,
) -> None:
    """Cosines of all cells of picture 0 with all of picture 1, and their maxima."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.program_id(2).to(tl.int64)
    # Cells past the end repeat the last one.
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
        product = tl.dot(first, tl.trans(second), product, input_precision=PRECISION)
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
    scores: tl.tensor,  # b n0 n1
    best0: tl.tensor,  # b n1: raised to the maxima over picture 0
    best1: tl.tensor,  # b n0: and over picture 1
    n0: tl.tensor,
    n1: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The maxima that the mutual filter divides by, with one pass over the scores."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.program_id(2).to(tl.int64)
    source = scores + (pair * n0 + row)[:, None] * n1 + column[None, :]
    inside = (row < n0)[:, None] & (column < n1)[None, :]
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    _raise_maxima(values, best0 + pair * n1, best1 + pair * n0, row, column, n0, n1)


@kernel("first_pair", "first_row", "rows", "h0", "w0", "h1", "w1")
def lay_out(
    scores: tl.tensor,  # b h0 w0 h1 w1
    best0: tl.tensor,  # b h1*w1: over picture 0; read where FILTERED
    best1: tl.tensor,  # b h0*w0: over picture 1
    padded: tl.tensor,  # pairs rows h1 (w0+2)*(w1+2)
    first_pair: tl.tensor,
    first_row: tl.tensor,  # of picture 0; may be -1, and the last may be h0: rows of zeros
    rows: tl.tensor,
    h0: tl.tensor,
    w0: tl.tensor,
    h1: tl.tensor,
    w1: tl.tensor,
    FILTERED: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    """Rows of picture 0 with the columns of both pictures side by side and a frame of zeros, filtered on the way."""
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
    """The weights for the row above, the row itself and the row below, inputs first."""
    above, here, below = tl.load(pointers), tl.load(pointers + apart), tl.load(pointers + 2 * apart)
    return tl.trans(above), tl.trans(here), tl.trans(below)


@kernel("first_row", "rows", "slots", "region_start", "region_stop", "steps", "w0", "h1", "w1")
def contribute(
    padded: tl.tensor,  # pairs rows+2 h1 (w0+2)*(w1+2)
    shares: tl.tensor,  # pairs slots 2*27 region pitch, which is w0*(w1+2) rounded up to a multiple of 8
    weight1: tl.tensor,  # 3 HIDDEN 32: by shift in picture 1's rows; the other three shifts last
    bias1: tl.tensor,  # HIDDEN
    weight2: tl.tensor,  # 3 64 HIDDEN
    first_row: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    region_start: tl.tensor,  # rows of picture 1 that results are wanted for
    region_stop: tl.tensor,
    steps: tl.tensor,  # how many of them one program walks
    w0: tl.tensor,
    h1: tl.tensor,
    w1: tl.tensor,
    HIDDEN: tl.constexpr,
    POSITIONS: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """What each hidden position gives to its 27 neighbors in picture 0's coordinates and picture 1's columns.

    A program walks down picture 1's rows. Each row of scores is read once and gives to the hidden rows above, at and
    below it; each hidden row is finished in registers and gives to three rows of results in the same way.
    """
    wide = w1 + 2
    plane, padded_plane = w0 * wide, (w0 + 2) * wide
    pitch = (plane + 7) // 8 * 8  # so that eight values are written at once
    region = region_stop - region_start
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    start = region_start + tl.program_id(1) * steps
    stop = tl.minimum(start + steps, region_stop)
    slab_row = tl.program_id(2)
    pair, row = (slab_row // rows).to(tl.int64), slab_row % rows
    # Positions in the frame between the columns count as outside the picture, where the hidden layer is zero.
    column = tl.where(place < plane, place % wide, wide)
    inside = column < w1

    tap = tl.arange(0, 32)
    shift = (tap // 9) * (h1 * padded_plane) + (tap // 3 % 3) * wide + tap % 3
    source = padded + (pair * (rows + 2) + row) * h1 * padded_plane
    # Taps first, so that neighbors in memory go to neighboring threads; 32 bits, because pointers take twice the
    # registers.
    sources = shift[:, None] + place[None, :]
    readable = (tap < 27)[:, None] & inside[None, :]

    channel, result = tl.arange(0, HIDDEN), tl.arange(0, 64)
    # Outputs first: in the shape of the scores' tiles, they would be read in one layout with these, a bad one for both.
    weights1 = weight1 + channel[:, None] * 32 + tap[None, :]
    above1, here1, below1 = _three(weights1, 32 * HIDDEN)
    weights2 = weight2 + result[:, None] * HIDDEN + channel[None, :]
    above2, here2, below2 = _three(weights2, HIDDEN * 64)
    bias = tl.load(bias1 + channel)

    slot = (first_row + row) % slots
    number = result // 32 * 27 + result % 32  # both directions' 27 results stand in 32 columns each
    target = shares + (pair * slots + slot) * 54 * region * pitch
    targets = number[:, None] * (region * pitch) + place[None, :]

    at = tl.maximum(start - 2, 0)
    hidden_a = tl.zeros((POSITIONS, HIDDEN), tl.float32)  # of the row above the one being read, so far
    hidden_b = tl.zeros((POSITIONS, HIDDEN), tl.float32)  # of that row
    result_a = tl.zeros((POSITIONS, 64), tl.float32)  # of the row two above the one being read, so far
    result_b = tl.zeros((POSITIONS, 64), tl.float32)  # of the row one above it
    following = tl.load((source + at * padded_plane) + sources, mask=readable, other=0.0)
    for base in range(at, stop + 2, UNROLL):
        for step in tl.static_range(UNROLL):  # unrolled by three, the accumulators come back to their registers
            y = base + step
            scores = tl.trans(following)
            readable = (tap < tl.where(y + 1 < h1, 27, 0))[:, None] & inside[None, :]
            following = tl.load((source + (y + 1) * padded_plane) + sources, mask=readable, other=0.0)
            done = tl.dot(scores, below1, hidden_a, input_precision=PRECISION)
            hidden_a = tl.dot(scores, here1, hidden_b, input_precision=PRECISION)
            hidden_b = tl.dot(scores, above1, input_precision=PRECISION)
            exists = column < tl.where((y >= 1) & (y <= h1), w1, 0)
            hidden = tl.where(exists[:, None], tl.maximum(done + bias[None, :], 0.0), 0.0)
            hidden = hidden.to(weight2.dtype.element_ty)
            complete = tl.dot(hidden, below2, result_a, input_precision=PRECISION)
            result_a = tl.dot(hidden, here2, result_b, input_precision=PRECISION)
            result_b = tl.dot(hidden, above2, input_precision=PRECISION)
            wanted = tl.where((y - 2 >= start) & (y - 2 < stop), 27, 0)
            writable = (result % 32 < wanted)[:, None] & (place < pitch)[None, :]
            values = tl.trans(complete.to(shares.dtype.element_ty))
            tl.store((target + (y - 2 - region_start) * pitch) + targets, values, mask=writable)


@kernel("first_pair", "first_row", "rows", "slots", "region_start", "region", "h0", "w0", "h1", "w1")
def collect(
    shares: tl.tensor,  # pairs slots 2*27 region pitch, which is w0*(w1+2) rounded up to a multiple of 8
    bias2: tl.tensor,  # 1
    results: tl.tensor,  # b h0 w0 h1 w1
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
    """Add what the 27 neighbors gave to each position, in both directions, and finish the second layer."""
    wide = w1 + 2
    plane = w0 * wide
    pitch = (plane + 7) // 8 * 8
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    step = tl.program_id(1)
    slab_row = tl.program_id(2)
    pair, i = (slab_row // rows).to(tl.int64), first_row + slab_row % rows
    # Neighbours count from the first: tiles that are known to be aligned would get another layout than the rest.
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
                # Beyond a row's ends lies the frame, which holds zeros.
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
    scores: tl.tensor,  # b n0 n1
    best0: tl.tensor,  # b n1
    best1: tl.tensor,  # b n0
    results: tl.tensor,  # b n0 n1
    n0: tl.tensor,
    n1: tl.tensor,
    POSITIONS: tl.constexpr,
) -> None:
    """Each score times its share of the maxima of its row and of its column."""
    place = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    row = tl.program_id(0).to(tl.int64)
    pair = row // n0
    inside = place < n1
    value = tl.load(scores + row * n1 + place, mask=inside, other=0.0).to(tl.float32)
    over0 = tl.load(best0 + pair * n1 + place, mask=inside, other=1.0).to(tl.float32) + 1e-5
    over1 = tl.load(best1 + row).to(tl.float32) + 1e-5
    value = value * (value / over0) * (value / over1)
    tl.store(results + row * n1 + place, value.to(results.dtype.element_ty), mask=inside)
