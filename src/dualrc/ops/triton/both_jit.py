"""Kernels that join the two directions of the fine search; `search.py` has the plan they follow."""

import triton.language as tl

from dualrc.ops.triton.jit import kernel
from dualrc.ops.triton.search_jit import members, value_of


@kernel()
def _position(index: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Where a row-major fine index stands when fine cells are ordered by coarse cell: the inverse of `members`."""
    row, column = index // (4 * width), index % (4 * width)
    return (row // 4 * width + column // 4) * 16 + row % 4 * 4 + column % 4


@kernel("queries", "count", "width", "searched_count", "searched_width")
def mark(
    best: tl.tensor,  # queries: keys; 16 queries for each group
    cells: tl.tensor,  # groups; not read where EVERY cell asks
    valid: tl.tensor,  # b count*16: of the querying picture; read where MASKED
    index0: tl.tensor,  # queries: results, the row-major fine cell that asks
    index1: tl.tensor,  # queries: results, what it found; -1: nothing
    score: tl.tensor,  # queries: results
    wanted: tl.tensor,  # b searched_count 16: set to 1 where something was found
    queries: tl.tensor,
    count: tl.tensor,  # coarse cells of the querying picture
    width: tl.tensor,
    searched_count: tl.tensor,
    searched_width: tl.tensor,
    MASKED: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """What the queries found, and who has to answer."""
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
    best: tl.tensor,  # b searched_count 16: keys of the way back
    index1: tl.tensor,  # queries: what they found; -1: nothing
    back: tl.tensor,  # queries: results, what that found; -1: nothing
    score: tl.tensor,  # queries: results
    queries: tl.tensor,
    each: tl.tensor,  # queries of a pair
    searched_count: tl.tensor,
    searched_width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The answers that belong to the queries."""
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = query < queries
    index = tl.load(index1 + query, mask=exists, other=-1)
    pair = (query // each).to(tl.int64)
    source = best + pair * searched_count * 16 + _position(index, searched_width)
    key = tl.load(source, mask=exists & (index >= 0), other=-1)
    tl.store(back + query, tl.where(key >= 0, 0x7FFFFFFF - (key & 0x7FFFFFFF), -1), mask=exists)
    tl.store(score + query, value_of(key), mask=exists)


@kernel("n", "m")
def turn(
    tensor: tl.tensor,  # b n m
    turned: tl.tensor,  # b m n: results
    sums: tl.tensor,  # b n: results, of the rows of the tensor
    turned_sums: tl.tensor,  # b m: results, of those of the transposed one
    n: tl.tensor,
    m: tl.tensor,
    LINES: tl.constexpr,  # rows or columns of a program
    LENGTH: tl.constexpr,  # read at a time
) -> None:
    """Transpose a tensor and add up its rows and columns, always in the same order."""
    programs = (n + LINES - 1) // LINES  # that go along rows; the others go along columns
    program = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    tensor += pair * n * m
    turned += pair * n * m
    line = tl.arange(0, LINES)
    total = tl.zeros((LINES,), tl.float32)
    if program < programs:
        row = program * LINES + line
        for start in range(0, m, LENGTH):
            column = start + tl.arange(0, LENGTH)
            inside = (row < n)[:, None] & (column < m)[None, :]
            values = tl.load(tensor + row.to(tl.int64)[:, None] * m + column[None, :], mask=inside, other=0.0)
            total += tl.sum(values.to(tl.float32), axis=1)
            target = turned + column.to(tl.int64)[:, None] * n + row[None, :]
            tl.store(target, tl.trans(values), mask=(column < m)[:, None] & (row < n)[None, :])
        tl.store(sums + pair * n + row, total, mask=row < n)
    else:
        column = (program - programs) * LINES + line
        for start in range(0, n, LENGTH):
            row = start + tl.arange(0, LENGTH)
            inside = (row < n)[:, None] & (column < m)[None, :]
            values = tl.load(tensor + row.to(tl.int64)[:, None] * m + column[None, :], mask=inside, other=0.0)
            total += tl.sum(values.to(tl.float32), axis=0)
        tl.store(turned_sums + pair * m + column, total, mask=column < m)
