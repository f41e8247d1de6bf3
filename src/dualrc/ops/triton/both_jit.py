"""Kernels that connect the two directions of the fine search; `search.py` describes the algorithm."""

import triton.language as tl

from dualrc.ops.triton.jit import kernel
from dualrc.ops.triton.search_jit import members, value_of


@kernel()
def _position(index: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Convert a row-major fine index to the order by coarse cell; the inverse of `members`."""
    row, column = index // (4 * width), index % (4 * width)
    return (row // 4 * width + column // 4) * 16 + row % 4 * 4 + column % 4


@kernel("queries", "count", "width", "searched_count", "searched_width")
def mark(
    # (queries) Keys; each group has 16 queries.
    best: tl.tensor,
    # (groups) Querying cells; not read if EVERY.
    cells: tl.tensor,
    # (b count*16) Mask of the querying image; read only if MASKED.
    valid: tl.tensor,
    # (queries) Output: row-major fine cell of the query.
    index0: tl.tensor,
    # (queries) Output: the fine cell found, or -1.
    index1: tl.tensor,
    # (queries) Output.
    score: tl.tensor,
    # (b searched_count 16) Output: set to 1 for each fine cell that was found.
    wanted: tl.tensor,
    queries: tl.tensor,
    # Coarse cells of the querying image.
    count: tl.tensor,
    width: tl.tensor,
    searched_count: tl.tensor,
    searched_width: tl.tensor,
    MASKED: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Decode the results of the queries, and mark the fine cells that must answer."""
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = query < queries
    group = (query // 16).to(tl.int64)
    number = group if EVERY else tl.load(cells + group, mask=exists, other=0)
    pair, cell = number // count, number % count
    own = members(cell, query % 16, width)
    key = tl.load(best + query, mask=exists, other=-1)
    found = key >= 0
    if MASKED:
        found = found & (tl.load(valid + pair * count * 16 + own, mask=exists, other=0) != 0)
    index = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    tl.store(index0 + query, own, mask=exists)
    tl.store(index1 + query, tl.where(found, index, -1), mask=exists)
    tl.store(score + query, value_of(key), mask=exists)
    target = wanted + pair * searched_count * 16 + _position(index, searched_width)
    tl.store(target, tl.full((BLOCK,), 1, tl.int8), mask=exists & found)


@kernel("queries", "each", "searched_count", "searched_width")
def answer(
    # (b searched_count 16) Keys of the search back.
    best: tl.tensor,
    # (queries) The fine cell found, or -1.
    index1: tl.tensor,
    # (queries) Output: the fine cell that index1 found back, or -1.
    back: tl.tensor,
    # (queries) Output.
    score: tl.tensor,
    queries: tl.tensor,
    # Queries per pair.
    each: tl.tensor,
    searched_count: tl.tensor,
    searched_width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Gather the answers of the search back for the queries."""
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = query < queries
    index = tl.load(index1 + query, mask=exists, other=-1)
    pair = (query // each).to(tl.int64)
    source = best + pair * searched_count * 16 + _position(index, searched_width)
    key = tl.load(source, mask=exists & (index >= 0), other=-1)
    tl.store(back + query, tl.where(key >= 0, 0x7FFFFFFF - (key & 0x7FFFFFFF), -1), mask=exists)
    tl.store(score + query, value_of(key), mask=exists)


@kernel("n", "m")
def transpose(
    # (b n m)
    tensor: tl.tensor,
    # (b m n) Output.
    transposed: tl.tensor,
    # (b n) Output: row sums of the tensor.
    sums: tl.tensor,
    # (b m) Output: row sums of the transposed tensor.
    transposed_sums: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    # Rows or columns per program.
    LINES: tl.constexpr,
    # Values read per step.
    LENGTH: tl.constexpr,
) -> None:
    """Transpose a tensor and sum its rows and columns in a fixed order."""
    # The first programs go along rows, the others along columns.
    programs = (n + LINES - 1) // LINES
    program = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    tensor += pair * n * m
    transposed += pair * n * m
    line = tl.arange(0, LINES)
    total = tl.zeros((LINES,), tl.float32)
    if program < programs:
        row = program * LINES + line
        for start in range(0, m, LENGTH):
            column = start + tl.arange(0, LENGTH)
            inside = (row < n)[:, None] & (column < m)[None, :]
            values = tl.load(tensor + row.to(tl.int64)[:, None] * m + column[None, :], mask=inside, other=0.0)
            total += tl.sum(values.to(tl.float32), axis=1)
            target = transposed + column.to(tl.int64)[:, None] * n + row[None, :]
            tl.store(target, tl.trans(values), mask=(column < m)[:, None] & (row < n)[None, :])
        tl.store(sums + pair * n + row, total, mask=row < n)
    else:
        column = (program - programs) * LINES + line
        for start in range(0, n, LENGTH):
            row = start + tl.arange(0, LENGTH)
            inside = (row < n)[:, None] & (column < m)[None, :]
            values = tl.load(tensor + row.to(tl.int64)[:, None] * m + column[None, :], mask=inside, other=0.0)
            total += tl.sum(values.to(tl.float32), axis=0)
        tl.store(transposed_sums + pair * m + column, total, mask=column < m)
