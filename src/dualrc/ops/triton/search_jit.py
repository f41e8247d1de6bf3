"""Kernels of the fine search; `search.py` has the plan they follow."""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


@kernel()
def _neighbors(at: tl.tensor, size: tl.tensor, CORNER: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The three cells along an axis that the four places of a cell lie between; with corners, the third is unused."""
    first = at if CORNER else tl.maximum(at - 1, 0)
    second = tl.minimum(at + 1, size - 1) if CORNER else at
    third = second if CORNER else tl.minimum(at + 1, size - 1)
    return first, second, third


@kernel()
def _places(
    first: tl.tensor, second: tl.tensor, third: tl.tensor, CORNER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The linear mixtures at the four places along an axis."""
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
    row: tl.tensor,  # pointers into the first cell of a row of cells
    left: tl.tensor,  # offsets of the three cells
    middle: tl.tensor,
    right: tl.tensor,
    readable: tl.tensor,
    CORNER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What the four places along a row of cells read."""
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
    reads: tl.tensor,  # 0 where the first place reads nothing
    CORNER: tl.constexpr,
) -> tl.tensor:
    """The highest share among the four places of one column of a cell."""
    a, b, c, d = _places(above, here, below, CORNER)
    total_a, total_b, total_c, total_d = _places(sum_above, sum_here, sum_below, CORNER)
    upper = tl.maximum(a * (reads / (total_a + 1e-15)), b * (1.0 / (total_b + 1e-15)))
    lower = tl.maximum(c * (1.0 / (total_c + 1e-15)), d * (1.0 / (total_d + 1e-15)))
    return tl.maximum(upper, lower)


@kernel()
def _bounds(
    coarse: tl.tensor,  # pointer to the pair's n m
    sums: tl.tensor,  # pointer to the pair's n
    cell: tl.tensor,
    height: tl.tensor,  # of the querying picture, in cells
    width: tl.tensor,
    candidates: tl.tensor,
    candidate: tl.tensor,  # a block of candidate cells
    CORNER: tl.constexpr,
) -> tl.tensor:
    """The most that any of a cell's 16 queries reads at each candidate, as a share of all that it reads."""
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
    # A query at exactly (0, 0) reads nothing by its corner, as published.
    reads = tl.where(cell == 0, 0.0, 1.0) if CORNER else 1.0
    highest = _highest(a0, b0, c0, sa0, sb0, sc0, reads, CORNER)
    highest = tl.maximum(highest, _highest(a1, b1, c1, sa1, sb1, sc1, 1.0, CORNER))
    highest = tl.maximum(highest, _highest(a2, b2, c2, sa2, sb2, sc2, 1.0, CORNER))
    highest = tl.maximum(highest, _highest(a3, b3, c3, sa3, sb3, sc3, 1.0, CORNER))
    return tl.where(highest > 0, highest, 0.0)  # never -0, whose bits would order below 0


@kernel()
def _asking(cells: tl.tensor, group: tl.tensor, EVERY: tl.constexpr) -> tl.tensor:
    """Which cell a group is, counted through the batch."""
    return group if EVERY else tl.load(cells + group)


@kernel("height", "width", "candidates", "blocks")
def block_maxima(
    coarse: tl.tensor,  # b n m
    sums: tl.tensor,  # b n
    cells: tl.tensor,  # groups: which cell asks, counted through the batch; not read where EVERY cell does
    usable: tl.tensor,  # b m: whether a candidate cell has anything to find; read where MASKED
    maxima: tl.tensor,  # groups blocks
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
    """The highest bound of each block of candidate cells."""
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
    """Integers that order as the values do, none negative, and among equals by falling number; -1 for what isn't."""
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(exists, (bits << 32) + (0x7FFFFFFF - numbers).to(tl.int64), -1)


@kernel()
def _number(key: tl.tensor, otherwise: tl.tensor) -> tl.tensor:
    return tl.where(key >= 0, 0x7FFFFFFF - (key & 0x7FFFFFFF), otherwise).to(tl.int32)


@kernel("height", "width", "candidates", "blocks")
def choose(
    coarse: tl.tensor,  # b n m
    sums: tl.tensor,  # b n
    cells: tl.tensor,  # groups
    usable: tl.tensor,  # b m; read where MASKED
    maxima: tl.tensor,  # groups blocks
    chosen: tl.tensor,  # groups VISITED: results, best first; `candidates` where there are no more
    rest: tl.tensor,  # groups: the highest bound of all others
    height: tl.tensor,
    width: tl.tensor,
    candidates: tl.tensor,
    blocks: tl.tensor,
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # blocks
    VISITED: tl.constexpr,  # cells
    TAKEN: tl.constexpr,  # a power of two above VISITED
) -> None:
    """The candidate cells with the highest bounds, which lie in the blocks with the highest maxima."""
    group = tl.program_id(0).to(tl.int64)
    number = _asking(cells, group, EVERY)
    count = height * width
    pair, cell = number // count, number % count
    slot = tl.arange(0, TAKEN * BLOCK)
    candidate = tl.zeros((TAKEN * BLOCK,), tl.int32) + candidates
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for turn in range(VISITED + 1):
        # The highest key below the last one: keys differ all.
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
    """How much each of the four places along an axis takes of the cell that lies so far from its own."""
    at = place * 0.25 if CORNER else place * 0.25 - 0.375
    return tl.maximum(1.0 - tl.abs(at - offset), 0.0)


@kernel()
def members(cell: tl.tensor, place: tl.tensor, width: tl.tensor) -> tl.tensor:
    """The row-major fine index of a place (0 to 15) of a cell."""
    return (cell // width * 4 + place // 4) * (4 * width) + cell % width * 4 + place % 4


@kernel()
def _read(
    coarse: tl.tensor,  # pointer to the pair's n m
    sums: tl.tensor,
    cell: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    candidates: tl.tensor,
    chosen: tl.tensor,  # COLUMNS: candidate cells; `candidates` where there is none
    CORNER: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """What the 16 queries of a cell read at some candidates, 16 x COLUMNS, as shares of their totals, and these."""
    place = tl.arange(0, 16)
    first: tl.constexpr = 0 if CORNER else -1
    mixture = tl.zeros((16, COLUMNS), tl.float32)
    total = tl.zeros((16,), tl.float32)
    reads = place >= (tl.where(cell == 0, 1, 0) if CORNER else 0)  # a query at (0, 0) reads nothing by its corner
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
    coarse: tl.tensor,  # pointer to the pair's n m
    sums: tl.tensor,  # pointer to the pair's n
    query: tl.tensor,  # pointer to the pair's n*16 c
    searched: tl.tensor,  # pointer to the pair's m*16 c
    valid: tl.tensor,  # pointer to the pair's m*16; read where MASKED
    cell: tl.tensor,
    offer: tl.tensor,  # COLUMNS: candidate cells, each 16 times; `candidates` where there is none
    height: tl.tensor,
    width: tl.tensor,
    searched_width: tl.tensor,
    candidates: tl.tensor,
    temperature: tl.tensor,
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    SHARP: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,  # channels of a feature
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The best of the offered cells for each of a cell's 16 queries, as keys, and the totals that these read."""
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
    # Among equals the first in the picture wins, whatever the order of the visit.
    return tl.max(_keys(scores, member[None, :], scores > 0), axis=1), total


@kernel()
def value_of(key: tl.tensor) -> tl.tensor:
    """What a key was made of; 0 for what isn't."""
    return tl.where(key >= 0, (key >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)


@kernel("height", "width", "searched_width", "candidates", "temperature", "slack")
def score_cells(
    coarse: tl.tensor,  # b n m
    sums: tl.tensor,  # b n
    cells: tl.tensor,  # groups
    chosen: tl.tensor,  # groups VISITED
    rest: tl.tensor,  # groups
    query: tl.tensor,  # b n*16 c
    searched: tl.tensor,  # b m*16 c
    valid: tl.tensor,  # b m*16; read where MASKED
    wanted: tl.tensor,  # groups 16; read where SOME
    best: tl.tensor,  # groups 16: results, keys of the best
    unsure: tl.tensor,  # groups 16: results, whether an answer that is wanted might be found elsewhere
    visited: tl.tensor,  # groups: results
    height: tl.tensor,
    width: tl.tensor,
    searched_width: tl.tensor,
    candidates: tl.tensor,
    temperature: tl.tensor,
    slack: tl.tensor,  # how much more than its bound a candidate may reach by rounding
    CORNER: tl.constexpr,
    MASKED: tl.constexpr,
    SOME: tl.constexpr,
    SHARP: tl.constexpr,
    EVERY: tl.constexpr,
    VISITED: tl.constexpr,
    LENGTH: tl.constexpr,  # channels of a feature
    CHANNELS: tl.constexpr,  # that are multiplied at a time
    PRECISION: tl.constexpr,
) -> None:
    """Score the chosen cells for the 16 queries of a cell, and tell whether another could do better."""
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
    # A query that reads nothing, or only zeros, has nothing to find, whatever its group's bound.
    doubt = (value_of(keys) <= others) & (others > 0) & (total > 1e-15)
    if SOME:
        doubt = doubt & (tl.load(wanted + target) != 0)
    tl.store(unsure + target, doubt.to(tl.int8))
    tl.store(visited + group, tl.minimum(candidates, VISITED))


@kernel("height", "width", "searched_width", "candidates", "blocks", "temperature", "slack")
def look_further(
    coarse: tl.tensor,  # b n m
    sums: tl.tensor,  # b n
    cells: tl.tensor,  # groups
    usable: tl.tensor,  # b m; read where MASKED
    maxima: tl.tensor,  # groups blocks
    chosen: tl.tensor,  # groups VISITED: cells that were scored before
    query: tl.tensor,  # b n*16 c
    searched: tl.tensor,  # b m*16 c
    valid: tl.tensor,  # b m*16; read where MASKED
    unsure: tl.tensor,  # groups 16
    best: tl.tensor,  # groups 16: keys, which are raised
    visited: tl.tensor,  # groups: raised by the cells that are scored
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
    ABREAST: tl.constexpr,  # cells that are scored together
    PARTS: tl.constexpr,  # programs that share a group's blocks
    LENGTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Where an answer is unsure, score every other cell in which one of the queries could find better."""
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
            # What a cell must offer a query to be of interest to it.
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
    """Which candidates offer one of the queries enough: (16 k), (16) -> (k)."""
    enough = (shares > 0) & (shares >= needed[:, None])
    return tl.max(enough.to(tl.int32), axis=0) > 0
