"""Kernels of the fine search that bound scores and choose the cells to visit; `search.py` describes the algorithm."""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


@kernel()
def _neighbors(at: tl.tensor, size: tl.tensor, CORNER: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the three cells along an axis around the four places of a cell; if CORNER, the third is not used."""
    first = at if CORNER else tl.maximum(at - 1, 0)
    second = tl.minimum(at + 1, size - 1) if CORNER else at
    third = second if CORNER else tl.minimum(at + 1, size - 1)
    return first, second, third


@kernel()
def _places(
    first: tl.tensor, second: tl.tensor, third: tl.tensor, CORNER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the linear interpolations at the four places along an axis."""
    if CORNER:
        a = first
        b = 0.75 * first + 0.25 * second
        c = 0.5 * first + 0.5 * second
        d = 0.25 * first + 0.75 * second
    else:
        a = 0.375 * first + 0.625 * second
        b = 0.125 * first + 0.875 * second
        c = 0.875 * second + 0.125 * third
        d = 0.625 * second + 0.375 * third
    return a, b, c, d


@kernel()
def _line(
    # Pointers into the first cell of a row of cells.
    row: tl.tensor,
    # Offsets of the three cells.
    left: tl.tensor,
    middle: tl.tensor,
    right: tl.tensor,
    readable: tl.tensor,
    CORNER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Interpolate along a row of cells at the four places."""
    first = tl.load(row + left, mask=readable, other=0.0).to(tl.float32)
    second = tl.load(row + middle, mask=readable, other=0.0).to(tl.float32)
    third = second if CORNER else tl.load(row + right, mask=readable, other=0.0).to(tl.float32)
    return _places(first, second, third, CORNER)


@kernel()
def _highest(
    above: tl.tensor,
    here: tl.tensor,
    below: tl.tensor,
    sum_above: tl.tensor,
    sum_here: tl.tensor,
    sum_below: tl.tensor,
    # 0 if the first place reads nothing.
    reads: tl.tensor,
    CORNER: tl.constexpr,
) -> tl.tensor:
    """Return the largest share among the four places of one column of a cell."""
    a, b, c, d = _places(above, here, below, CORNER)
    total_a, total_b, total_c, total_d = _places(sum_above, sum_here, sum_below, CORNER)
    upper = tl.maximum(a * (reads / (total_a + 1e-15)), b * (1.0 / (total_b + 1e-15)))
    lower = tl.maximum(c * (1.0 / (total_c + 1e-15)), d * (1.0 / (total_d + 1e-15)))
    return tl.maximum(upper, lower)


@kernel()
def _bounds(
    # Pointer to the pair's (n m).
    coarse: tl.tensor,
    # Pointer to the pair's (n).
    sums: tl.tensor,
    cell: tl.tensor,
    # Height and width of the querying image in cells.
    height: tl.tensor,
    width: tl.tensor,
    candidates: tl.tensor,
    # A block of candidate cells.
    candidate: tl.tensor,
    CORNER: tl.constexpr,
) -> tl.tensor:
    """Return the largest share of its total that any of the 16 queries of a cell reads at each candidate."""
    above, here, below = _neighbors(cell // width, height, CORNER)
    left, middle, right = _neighbors(cell % width, width, CORNER)
    readable = candidate < candidates
    block = coarse + candidate
    row, left_side, middle_side = width * candidates, left * candidates, middle * candidates
    right_side = right * candidates
    a0, a1, a2, a3 = _line(block + above * row, left_side, middle_side, right_side, readable, CORNER)
    b0, b1, b2, b3 = _line(block + here * row, left_side, middle_side, right_side, readable, CORNER)
    sa0, sa1, sa2, sa3 = _line(sums + above * width, left, middle, right, True, CORNER)
    sb0, sb1, sb2, sb3 = _line(sums + here * width, left, middle, right, True, CORNER)
    c0, c1, c2, c3 = b0, b1, b2, b3
    sc0, sc1, sc2, sc3 = sb0, sb1, sb2, sb3
    if not CORNER:
        c0, c1, c2, c3 = _line(block + below * row, left_side, middle_side, right_side, readable, CORNER)
        sc0, sc1, sc2, sc3 = _line(sums + below * width, left, middle, right, True, CORNER)
    # With CORNER, the query at (0, 0) reads nothing, as published.
    reads = tl.where(cell == 0, 0.0, 1.0) if CORNER else 1.0
    highest = _highest(a0, b0, c0, sa0, sb0, sc0, reads, CORNER)
    highest = tl.maximum(highest, _highest(a1, b1, c1, sa1, sb1, sc1, 1.0, CORNER))
    highest = tl.maximum(highest, _highest(a2, b2, c2, sa2, sb2, sc2, 1.0, CORNER))
    highest = tl.maximum(highest, _highest(a3, b3, c3, sa3, sb3, sc3, 1.0, CORNER))
    # Avoid -0, whose bits order below 0.
    return tl.where(highest > 0, highest, 0.0)


@kernel()
def cell_of(
    cells: tl.tensor, group: tl.tensor, height: tl.tensor, width: tl.tensor, EVERY: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the pair of a group, its cell, and the number of cells of an image."""
    number = group if EVERY else tl.load(cells + group)
    count = height * width
    return number // count, number % count, count


@kernel("height", "width", "candidates", "blocks")
def block_maxima(
    # (b n m)
    coarse: tl.tensor,
    # (b n)
    sums: tl.tensor,
    # (groups) Querying cells, numbered through the batch; not read if EVERY.
    cells: tl.tensor,
    # (b m) Whether a candidate cell has a valid fine cell; read only if MASKED.
    usable: tl.tensor,
    # (groups blocks)
    maxima: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    candidates: tl.tensor,
    blocks: tl.tensor,
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Compute the highest bound of each block of candidate cells."""
    group = tl.program_id(0).to(tl.int64)
    pair, cell, count = cell_of(cells, group, height, width, EVERY)
    coarse += pair * count * candidates
    sums += pair * count
    for start in range(0, blocks, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        candidate = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        bounds = _bounds(coarse, sums, cell, height, width, candidates, candidate, CORNER)
        if MASKED:
            allowed = tl.load(usable + pair * candidates + candidate, mask=candidate < candidates, other=0)
            bounds = tl.where(allowed != 0, bounds, 0.0)
        tl.store(maxima + group * blocks + block, tl.max(bounds, axis=1), mask=block < blocks)


@kernel()
def keys_of(values: tl.tensor, numbers: tl.tensor, exists: tl.tensor) -> tl.tensor:
    """Return integers that sort like nonnegative values, then by descending number; -1 for missing entries."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(exists, (bits << 32) + (0x7FFFFFFF - numbers).to(tl.int64), -1)


@kernel()
def _number(key: tl.tensor, otherwise: tl.tensor) -> tl.tensor:
    return tl.where(key >= 0, 0x7FFFFFFF - (key & 0x7FFFFFFF), otherwise).to(tl.int32)


@kernel("height", "width", "candidates", "blocks")
def choose(
    # (b n m)
    coarse: tl.tensor,
    # (b n)
    sums: tl.tensor,
    # (groups)
    cells: tl.tensor,
    # (b m) Read only if MASKED.
    usable: tl.tensor,
    # (groups blocks)
    maxima: tl.tensor,
    # (groups VISITED) Output: best first; `candidates` for missing entries.
    chosen: tl.tensor,
    # (groups) Output: the highest bound of all other cells.
    rest: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    candidates: tl.tensor,
    blocks: tl.tensor,
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
    # Blocks per step.
    AT_ONCE: tl.constexpr,
    # Number of cells to select.
    VISITED: tl.constexpr,
    # A power of two above VISITED.
    TAKEN: tl.constexpr,
) -> None:
    """Select the candidate cells with the highest bounds, which lie in the blocks with the highest maxima."""
    group = tl.program_id(0).to(tl.int64)
    pair, cell, count = cell_of(cells, group, height, width, EVERY)
    slot = tl.arange(0, TAKEN * BLOCK)
    candidate = tl.zeros((TAKEN * BLOCK,), tl.int32) + candidates
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for turn in range(VISITED + 1):
        # The highest key below the previous one. All keys are distinct.
        best = tl.full((), -1, tl.int64)
        for first in range(0, blocks, AT_ONCE):
            block = first + tl.arange(0, AT_ONCE)
            highest = tl.load(maxima + group * blocks + block, mask=block < blocks, other=0.0)
            keys = keys_of(highest, block, block < blocks)
            best = tl.maximum(best, tl.max(tl.where(keys < last, keys, -1), axis=0))
        start = _number(best, blocks) * BLOCK
        candidate = tl.where(slot // BLOCK == turn, start + slot % BLOCK, candidate)
        last = best

    coarse += pair * count * candidates
    bounds = _bounds(coarse, sums + pair * count, cell, height, width, candidates, candidate, CORNER)
    if MASKED:
        allowed = tl.load(usable + pair * candidates + candidate, mask=candidate < candidates, other=0)
        bounds = tl.where(allowed != 0, bounds, 0.0)
    keys = keys_of(bounds, candidate, candidate < candidates)
    for turn in range(VISITED):
        best = tl.max(keys, axis=0)
        tl.store(chosen + group * VISITED + turn, _number(best, candidates))
        keys = tl.where(keys == best, -1, keys)
    best = tl.max(keys, axis=0)
    highest = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(rest + group, tl.where(best >= 0, highest, 0.0))
