"""The fine search from whole coarse cells on the GPU: four kernels, and nothing that the host waits for.

The first bounds every candidate cell by the highest share that any of a cell's 16 queries reads there, and keeps only
the maxima of blocks of candidates. The k + 1 highest bounds lie in the k + 1 blocks with the highest maxima, so the
second works the bounds of those blocks out again and picks the k best cells. The third scores their fine cells, and
says for each query whether the bound of the next cell proves its answer best. For the few cells with a query that is
unsure, the fourth goes through the blocks whose maxima leave room for better, and scores every cell in which a query
reads as much as it has found so far.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualrc.model.cells import PLACES, FineMap, Reading
from dualrc.model.search import Found
from dualrc.ops.triton.launch import device_of, power_above

VISITED = (1, 2, 4, 8, 16, 32)  # numbers of cells that can be visited at first
_BLOCK = 64  # candidates
_MOST_BLOCKS = 1024


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut; the results don't depend on it."""

    at_once: int = 1024  # candidates that are bounded at a time
    bound_warps: int = 4
    choose_warps: int = 4
    channels: int = 64  # that are multiplied at a time
    score_warps: int = 4
    abreast: int = 1  # further cells that are scored together
    parts: int = 4  # programs that share a cell's further search
    further_warps: int = 1


def supported(fine0: FineMap, fine1: FineMap) -> bool:
    """Whether `search_cells` can work with these, in either direction."""
    return (
        fine0.features.dtype == fine1.features.dtype
        and fine0.features.dtype in (torch.float16, torch.float32)
        and max(fine.height * fine.width for fine in (fine0, fine1)) < 2**26  # fine indices have 32 bits
    )


def search_cells(
    tensor: Tensor,
    cells: Tensor,
    fine_query: FineMap,
    fine_searched: FineMap,
    reading: Reading,
    temperature: float,
    k: int = 8,
    *,
    excess: float,
    wanted: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Found:
    """The best fine cells for all 16 fine cells of each of these cells (b g); the k most promising come first.

    `tensor` (b n m) holds no negative values; a cosine may exceed 1 by `excess`. A transposed tensor is copied, because
    columns can't be read fast. `wanted` (b g 16) are the queries whose answers will be used; others get the best of
    the first k.
    """
    assert k in VISITED and tensor.dtype in (torch.float16, torch.float32), (k, tensor.dtype)
    count = tensor.shape[1] * torch.arange(len(cells), device=cells.device)
    flat = (cells + count[:, None]).flatten()
    with device_of(tensor):
        best, visited = _search(
            tensor.contiguous(), flat, fine_query, fine_searched, reading, temperature, k, excess, wanted, tiles
        )
    index, score = _answers(best)
    return Found(index.view(*cells.shape, PLACES), score.view(*cells.shape, PLACES), visited.view(cells.shape))


def _search(
    tensor: Tensor,
    cells: Tensor,
    fine_query: FineMap,
    fine_searched: FineMap,
    reading: Reading,
    temperature: float,
    k: int,
    excess: float,
    wanted: Tensor | None,
    tiles: Tiles | None,
) -> tuple[Tensor, Tensor]:
    """Keys of the best (n 16) and numbers of visited cells (n) for cells that count through the batch."""
    from dualrc.ops.triton.search_jit import block_maxima, choose, look_further, score_cells

    tiles = tiles or Tiles()
    candidates, groups, device = tensor.shape[2], len(cells), tensor.device
    visited = torch.full((groups,), min(k, candidates), dtype=torch.int32, device=device)
    best = torch.empty(groups, PLACES, dtype=torch.int64, device=device)
    if groups == 0:
        return best, visited
    block = _BLOCK
    while candidates > block * _MOST_BLOCKS:
        block *= 2
    blocks = -(-candidates // block)
    valid, allowed = _masks(fine_searched)
    size = fine_query.height, fine_query.width
    flags: dict[str, Any] = {"CORNER": reading == "corner", "MASKED": fine_searched.valid is not None}

    sums = tensor.sum(2, dtype=torch.float32)
    maxima = torch.empty(groups, blocks, device=device)
    block_maxima[(groups,)](
        tensor, sums, cells, allowed, maxima, *size, candidates, blocks,
        BLOCK=block, AT_ONCE=max(1, tiles.at_once // block), num_warps=tiles.bound_warps, **flags,
    )  # fmt: skip
    chosen = torch.empty(groups, k, dtype=torch.int32, device=device)
    rest = torch.empty(groups, device=device)
    choose[(groups,)](
        tensor, sums, cells, allowed, maxima, chosen, rest, *size, candidates, blocks,
        BLOCK=block, BLOCKS=power_above(blocks), VISITED=k, TAKEN=2 * k, num_warps=tiles.choose_warps, **flags,
    )  # fmt: skip
    features = fine_query.features.contiguous(), fine_searched.features.contiguous()
    # What the bound leaves out of account: a cosine that is a little more than 1.
    slack = math.exp(excess / temperature) if temperature > 0 else 1 + excess
    unsure = torch.empty(groups, PLACES, dtype=torch.int8, device=device)
    flags |= {"SHARP": temperature > 0, "PRECISION": "ieee"}

    def channels(cells: int) -> int:
        """What is multiplied at a time must fit into the shared memory, in whatever type."""
        return max(16, tiles.channels * 16 // (max(cells, 8) * features[0].element_size()))

    score_cells[(groups,)](
        tensor, sums, cells, chosen, rest, *features, valid,
        unsure if wanted is None else wanted.contiguous().view(torch.int8), best, unsure,
        *size, fine_searched.width, candidates, features[0].shape[2], temperature or 1.0, slack,
        SOME=wanted is not None, VISITED=k, CHANNELS=channels(k), num_warps=tiles.score_warps, **flags,
    )  # fmt: skip
    look_further[(groups, tiles.parts)](
        tensor, sums, cells, allowed, maxima, chosen, *features, valid, unsure, best, visited,
        *size, fine_searched.width, candidates, blocks, features[0].shape[2], temperature or 1.0, slack,
        BLOCK=block, VISITED=k, ABREAST=tiles.abreast, PARTS=tiles.parts, CHANNELS=channels(tiles.abreast),
        num_warps=tiles.further_warps, **flags,
    )  # fmt: skip
    return best, visited


def _answers(best: Tensor) -> tuple[Tensor, Tensor]:
    """Keys taken apart: the bits of a score above 0x7FFFFFFF less the index; negative where there is nothing."""
    nothing = best < 0
    index = (0x7FFFFFFF - (best & 0x7FFFFFFF)).masked_fill_(nothing, -1)
    return index, (best >> 32).to(torch.int32).view(torch.float32).masked_fill(nothing, 0)


def _masks(fine: FineMap) -> tuple[Tensor, Tensor]:
    """Which fine cells count, and which coarse cells hold one that does; anything at all where all do."""
    if fine.valid is None:
        return fine.features, fine.features
    valid = fine.valid.contiguous().view(torch.uint8)
    return valid, valid.view(len(valid), fine.height, 4, fine.width, 4).amax(4).amax(2).contiguous()
