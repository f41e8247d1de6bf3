"""Kernels of the fine search; `search.py` describes the algorithm."""

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
def _line_of_sums(
    row: tl.tensor, left: tl.tensor, middle: tl.tensor, right: tl.tensor, CORNER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    first, second = tl.load(row + left), tl.load(row + middle)
    third = second if CORNER else tl.load(row + right)
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
    sa0, sa1, sa2, sa3 = _line_of_sums(sums + above * width, left, middle, right, CORNER)
    sb0, sb1, sb2, sb3 = _line_of_sums(sums + here * width, left, middle, right, CORNER)
    c0, c1, c2, c3 = b0, b1, b2, b3
    sc0, sc1, sc2, sc3 = sb0, sb1, sb2, sb3
    if not CORNER:
        c0, c1, c2, c3 = _line(block + below * row, left_side, middle_side, right_side, readable, CORNER)
        sc0, sc1, sc2, sc3 = _line_of_sums(sums + below * width, left, middle, right, CORNER)
    # With CORNER, the query at (0, 0) reads nothing, as published.
    reads = tl.where(cell == 0, 0.0, 1.0) if CORNER else 1.0
    highest = _highest(a0, b0, c0, sa0, sb0, sc0, reads, CORNER)
    highest = tl.maximum(highest, _highest(a1, b1, c1, sa1, sb1, sc1, 1.0, CORNER))
    highest = tl.maximum(highest, _highest(a2, b2, c2, sa2, sb2, sc2, 1.0, CORNER))
    highest = tl.maximum(highest, _highest(a3, b3, c3, sa3, sb3, sc3, 1.0, CORNER))
    # Avoid -0, whose bits order below 0.
    return tl.where(highest > 0, highest, 0.0)


@kernel()
def _asking(cells: tl.tensor, group: tl.tensor, EVERY: tl.constexpr) -> tl.tensor:
    """Return the cell of a group, numbered through the batch."""
    return group if EVERY else tl.load(cells + group)


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
    number = _asking(cells, group, EVERY)
    count = height * width
    pair, cell = number // count, number % count
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
def _keys(values: tl.tensor, numbers: tl.tensor, exists: tl.tensor) -> tl.tensor:
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
    number = _asking(cells, group, EVERY)
    count = height * width
    pair, cell = number // count, number % count
    slot = tl.arange(0, TAKEN * BLOCK)
    candidate = tl.zeros((TAKEN * BLOCK,), tl.int32) + candidates
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for turn in range(VISITED + 1):
        # The highest key below the previous one. All keys are distinct.
        best = tl.full((), -1, tl.int64)
        for first in range(0, blocks, AT_ONCE):
            block = first + tl.arange(0, AT_ONCE)
            highest = tl.load(maxima + group * blocks + block, mask=block < blocks, other=0.0)
            keys = _keys(highest, block, block < blocks)
            best = tl.maximum(best, tl.max(tl.where(keys < last, keys, -1), axis=0))
        start = _number(best, blocks) * BLOCK
        candidate = tl.where(slot // BLOCK == turn, start + slot % BLOCK, candidate)
        last = best

    coarse += pair * count * candidates
    bounds = _bounds(coarse, sums + pair * count, cell, height, width, candidates, candidate, CORNER)
    if MASKED:
        allowed = tl.load(usable + pair * candidates + candidate, mask=candidate < candidates, other=0)
        bounds = tl.where(allowed != 0, bounds, 0.0)
    keys = _keys(bounds, candidate, candidate < candidates)
    for turn in range(VISITED):
        best = tl.max(keys, axis=0)
        tl.store(chosen + group * VISITED + turn, _number(best, candidates))
        keys = tl.where(keys == best, -1, keys)
    best = tl.max(keys, axis=0)
    highest = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(rest + group, tl.where(best >= 0, highest, 0.0))


@kernel()
def _weight(place: tl.tensor, offset: tl.constexpr, CORNER: tl.constexpr) -> tl.tensor:
    """Return the weight of the cell at this offset for each of the four places along an axis."""
    at = place * 0.25 if CORNER else place * 0.25 - 0.375
    return tl.maximum(1.0 - tl.abs(at - offset), 0.0)


@kernel()
def members(cell: tl.tensor, place: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Return the row-major fine index of a place (0 to 15) of a cell."""
    return (cell // width * 4 + place // 4) * (4 * width) + cell % width * 4 + place % 4


@kernel()
def _read(
    # Pointer to the pair's (n m).
    coarse: tl.tensor,
    sums: tl.tensor,
    cell: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    candidates: tl.tensor,
    # (COLUMNS) Candidate cells; `candidates` for missing entries.
    chosen: tl.tensor,
    CORNER: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the shares (16 COLUMNS) that the 16 queries of a cell read at candidates, and the queries' totals."""
    place = tl.arange(0, 16)
    first: tl.constexpr = 0 if CORNER else -1
    mixture = tl.zeros((16, COLUMNS), tl.float32)
    total = tl.zeros((16,), tl.float32)
    # With CORNER, the query at (0, 0) reads nothing.
    reads = place >= (tl.where(cell == 0, 1, 0) if CORNER else 0)
    for dy in tl.static_range(first, 2):
        row = tl.minimum(tl.maximum(cell // width + dy, 0), height - 1)
        for dx in tl.static_range(first, 2):
            source = row * width + tl.minimum(tl.maximum(cell % width + dx, 0), width - 1)
            weight = _weight(place // 4, dy, CORNER) * _weight(place % 4, dx, CORNER)
            weight = tl.where(reads, weight, 0.0)
            values = tl.load(coarse + source * candidates + chosen, mask=chosen < candidates, other=0.0)
            mixture += weight[:, None] * values.to(tl.float32)[None, :]
            total += weight * tl.load(sums + source)
    total += 1e-15
    return mixture / total[:, None], total


@kernel()
def _score_keys(
    # Pointer to the pair's (n m).
    coarse: tl.tensor,
    # Pointer to the pair's (n).
    sums: tl.tensor,
    # Pointer to the pair's (n*16 c).
    query: tl.tensor,
    # Pointer to the pair's (m*16 c).
    searched: tl.tensor,
    # Pointer to the pair's (m*16); read only if MASKED.
    valid: tl.tensor,
    cell: tl.tensor,
    # (COLUMNS) Candidate cells, each 16 times; `candidates` for missing entries.
    offer: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    searched_width: tl.tensor,
    candidates: tl.tensor,
    temperature: tl.tensor,
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    SHARP: tl.constexpr,
    COLUMNS: tl.constexpr,
    # Channels of a feature.
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return keys of the best offered cells for the 16 queries of a cell, and the queries' totals."""
    place, column = tl.arange(0, 16), tl.arange(0, COLUMNS)
    member = members(offer, column % 16, searched_width)
    exists = offer < candidates
    asking = query + members(cell, place, width) * LENGTH
    offered = searched + member.to(tl.int64) * LENGTH
    cosine = tl.zeros((16, COLUMNS), tl.float32)
    for start in range(0, LENGTH, CHANNELS):
        channel = start + tl.arange(0, CHANNELS)
        some = channel < LENGTH
        asked = tl.load(asking[:, None] + channel[None, :], mask=some[None, :], other=0.0)
        found = tl.load(offered[:, None] + channel[None, :], mask=exists[:, None] & some[None, :], other=0.0)
        cosine = tl.dot(asked, tl.trans(found), cosine, input_precision=PRECISION)
    shares, total = _read(coarse, sums, cell, height, width, candidates, offer, CORNER, COLUMNS)
    scores = shares * (tl.exp((cosine - 1.0) / temperature) if SHARP else cosine)
    if MASKED:
        allowed = tl.load(valid + member, mask=exists, other=0)
        scores = tl.where((allowed != 0)[None, :], scores, 0.0)
    # Ties go to the first cell in row-major order, independent of the order of the visits.
    return tl.max(_keys(scores, member[None, :], scores > 0), axis=1), total


@kernel()
def value_of(key: tl.tensor) -> tl.tensor:
    """Decode the value of a key; 0 for a missing entry."""
    return tl.where(key >= 0, (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)


@kernel("height", "width", "searched_width", "candidates", "temperature", "slack")
def score_cells(
    # (b n m)
    coarse: tl.tensor,
    # (b n)
    sums: tl.tensor,
    # (groups)
    cells: tl.tensor,
    # (groups VISITED)
    chosen: tl.tensor,
    # (groups)
    rest: tl.tensor,
    # (b n*16 c)
    query: tl.tensor,
    # (b m*16 c)
    searched: tl.tensor,
    # (b m*16) Read only if MASKED.
    valid: tl.tensor,
    # (groups 16) Read only if SOME.
    wanted: tl.tensor,
    # (groups 16) Output: keys of the best.
    best: tl.tensor,
    # (groups 16) Output: whether a wanted answer might lie in another cell.
    unsure: tl.tensor,
    # (groups) Output.
    visited: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    searched_width: tl.tensor,
    candidates: tl.tensor,
    temperature: tl.tensor,
    # Factor by which rounding may lift a candidate above its bound.
    slack: tl.tensor,
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    SOME: tl.constexpr,
    SHARP: tl.constexpr,
    EVERY: tl.constexpr,
    VISITED: tl.constexpr,
    # Channels of a feature.
    LENGTH: tl.constexpr,
    # Channels multiplied per step.
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Score the chosen cells for the 16 queries of a cell, and mark queries whose answer is not proven best."""
    group = tl.program_id(0).to(tl.int64)
    number = _asking(cells, group, EVERY)
    count = height * width
    pair, cell = number // count, number % count
    place, column = tl.arange(0, 16), tl.arange(0, VISITED * 16)
    offer = tl.load(chosen + group * VISITED + column // 16)
    keys, total = _score_keys(
        coarse + pair * count * candidates, sums + pair * count,
        query + pair * count * 16 * LENGTH, searched + pair * candidates * 16 * LENGTH,
        valid + pair * candidates * 16, cell, offer, height, width, searched_width, candidates, temperature,
        CORNER, MASKED, SHARP, VISITED * 16, LENGTH, CHANNELS, PRECISION,
    )  # fmt: skip
    target = group * 16 + place
    tl.store(best + target, keys)
    others = tl.zeros((16,), tl.float32) + tl.load(rest + group) * slack
    # A query that reads only zeros has no answer, whatever the bound of its group.
    doubt = (value_of(keys) <= others) & (others > 0) & (total > 1e-15)
    if SOME:
        doubt = doubt & (tl.load(wanted + target) != 0)
    tl.store(unsure + target, doubt.to(tl.int8))
    tl.store(visited + group, tl.minimum(candidates, VISITED))


@kernel("height", "width", "searched_width", "candidates", "blocks", "temperature", "slack")
def look_further(
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
    # (groups VISITED) Cells that are already scored.
    chosen: tl.tensor,
    # (b n*16 c)
    query: tl.tensor,
    # (b m*16 c)
    searched: tl.tensor,
    # (b m*16) Read only if MASKED.
    valid: tl.tensor,
    # (groups 16)
    unsure: tl.tensor,
    # (groups 16) Keys, which are raised.
    best: tl.tensor,
    # (groups) Raised by the number of scored cells.
    visited: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    searched_width: tl.tensor,
    candidates: tl.tensor,
    blocks: tl.tensor,
    temperature: tl.tensor,
    slack: tl.tensor,
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    SHARP: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
    VISITED: tl.constexpr,
    # Cells scored per step.
    ABREAST: tl.constexpr,
    # Programs that share the blocks of a group.
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Score every other cell in which a query with an unproven answer could find a better one."""
    group = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, 16)
    doubt = tl.load(unsure + group * 16 + place) != 0
    if tl.max(doubt.to(tl.int32), axis=0) > 0:
        number = _asking(cells, group, EVERY)
        count = height * width
        pair, cell = number // count, number % count
        coarse += pair * count * candidates
        sums += pair * count
        query += pair * count * 16 * LENGTH
        searched += pair * candidates * 16 * LENGTH
        valid += pair * candidates * 16
        before = tl.load(chosen + group * VISITED + tl.arange(0, VISITED))
        keys = tl.load(best + group * 16 + place)
        scored = 0
        for block in range(tl.program_id(1), blocks, PARTS):
            # The smallest share at which a cell can still be better for a query.
            needed = tl.where(doubt, value_of(keys) / slack, float("inf"))
            highest = tl.load(maxima + group * blocks + block)
            if (highest > 0) & (highest >= tl.min(needed, axis=0) * (1.0 - 1e-5)):
                candidate = block * BLOCK + tl.arange(0, BLOCK)
                shares, _ = _read(coarse, sums, cell, height, width, candidates, candidate, CORNER, BLOCK)
                new = (candidate < candidates) & (
                    tl.max((before[:, None] == candidate[None, :]).to(tl.int32), axis=0) == 0
                )
                if MASKED:
                    allowed = tl.load(usable + pair * candidates + candidate, mask=candidate < candidates, other=0)
                    new = new & (allowed != 0)
                left = new & _is_needed(shares, needed)
                while tl.max(left.to(tl.int32), axis=0) > 0:
                    column = tl.arange(0, ABREAST * 16)
                    offer = tl.zeros((ABREAST * 16,), tl.int32) + candidates
                    for turn in tl.static_range(ABREAST):
                        first = tl.min(tl.where(left, candidate, candidates), axis=0)
                        offer = tl.where(column // 16 == turn, first, offer)
                        scored += tl.where(first < candidates, 1, 0)
                        left = left & (candidate != first)
                    found, _ = _score_keys(
                        coarse, sums, query, searched, valid, cell, offer,
                        height, width, searched_width, candidates, temperature,
                        CORNER, MASKED, SHARP, ABREAST * 16, LENGTH, CHANNELS, PRECISION,
                    )  # fmt: skip
                    keys = tl.maximum(keys, found)
                    left = left & _is_needed(shares, tl.where(doubt, value_of(keys) / slack, float("inf")))
        tl.atomic_max(best + group * 16 + place, keys, mask=doubt)
        tl.atomic_add(visited + group, scored)


@kernel()
def _is_needed(shares: tl.tensor, needed: tl.tensor) -> tl.tensor:
    """Return the candidates that can be better for one of the queries: (16 k), (16) -> (k)."""
    enough = (shares > 0) & (shares >= needed[:, None])
    return tl.max(enough.to(tl.int32), axis=0) > 0
