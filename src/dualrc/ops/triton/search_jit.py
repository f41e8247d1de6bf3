"""Kernels of the fine search that score the chosen cells, and others that may be better; see `search.py`."""

import triton.language as tl

from dualrc.ops.triton.choose_jit import cell_of, keys_of
from dualrc.ops.triton.jit import kernel


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
        cosine = tl.dot(asked, tl.trans(found), cosine, input_precision="ieee")
    shares, total = _read(coarse, sums, cell, height, width, candidates, offer, CORNER, COLUMNS)
    scores = shares * (tl.exp((cosine - 1.0) / temperature) if SHARP else cosine)
    if MASKED:
        allowed = tl.load(valid + member, mask=exists, other=0)
        scores = tl.where((allowed != 0)[None, :], scores, 0.0)
    # Ties go to the first cell in row-major order, independent of the order of the visits.
    return tl.max(keys_of(scores, member[None, :], scores > 0), axis=1), total


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
) -> None:
    """Score the chosen cells for the 16 queries of a cell, and mark queries whose answer is not proven best."""
    group = tl.program_id(0).to(tl.int64)
    pair, cell, count = cell_of(cells, group, height, width, EVERY)
    place, column = tl.arange(0, 16), tl.arange(0, VISITED * 16)
    offer = tl.load(chosen + group * VISITED + column // 16)
    keys, total = _score_keys(
        coarse + pair * count * candidates, sums + pair * count,
        query + pair * count * 16 * LENGTH, searched + pair * candidates * 16 * LENGTH,
        valid + pair * candidates * 16, cell, offer, height, width, searched_width, candidates, temperature,
        CORNER, MASKED, SHARP, VISITED * 16, LENGTH, CHANNELS,
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
) -> None:
    """Score every other cell in which a query with an unproven answer could find a better one."""
    group = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, 16)
    doubt = tl.load(unsure + group * 16 + place) != 0
    if tl.max(doubt.to(tl.int32), axis=0) > 0:
        pair, cell, count = cell_of(cells, group, height, width, EVERY)
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
                        CORNER, MASKED, SHARP, ABREAST * 16, LENGTH, CHANNELS,
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
