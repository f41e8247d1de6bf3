"""The fine search from whole coarse cells on the GPU: a few kernels, without synchronization with the host.

The first kernel bounds every candidate cell by the largest share that any of the 16 queries of a cell reads there, and
keeps the maximum of each block of candidates. The k + 1 highest bounds lie in the k + 1 blocks with the highest maxima.
The second kernel recomputes the bounds of those blocks and selects the k best cells. The third scores their fine cells
and tests for each query whether the bound of the next cell proves its answer best. For the few cells with an unproven
query, the fourth visits the blocks whose maxima are high enough and scores every cell that could still be better.

For both directions together, three more kernels transpose the coarse tensor and sum its rows, mark the fine cells that
must answer, and gather the answers.
"""

from typing import Any

import torch
from torch import Tensor

from dualrc.config import FineConfig
from dualrc.model.cells import PLACES, FineMap, FineMapPair
from dualrc.model.search import Correspondences, Found, best_cells
from dualrc.ops.torch import FIRST_BLOCK, slack
from dualrc.ops.triton.launch import launcher, parts, readable

# Candidates per block.
_BLOCK = 64
# Blocks whose maxima are computed per step, and blocks compared per step.
_BOUNDED, _BLOCKS = 16, 128
# Channels multiplied per step. The results do not depend on this, nor on the next two.
_CHANNELS = 64
# Further cells scored per step, and programs that share the further search of a cell.
_ABREAST, _PARTS = 1, 4
# Queries per program that only reads answers.
_QUERIES = 256


def supported(fine0: FineMap, fine1: FineMap) -> bool:
    """Return whether `search_cells` supports these maps, in either direction."""
    return (
        fine0.features.dtype == fine1.features.dtype
        and fine0.features.dtype in (torch.float16, torch.float32)
        # Fine indices have 32 bits.
        and max(fine.height * fine.width for fine in (fine0, fine1)) < 2**26
    )


def search_both(tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> Correspondences:
    """Search in both directions, as `model.search.search_both` defines it."""
    batch, count0, count1 = tensor.shape
    every = config.query_share == 1
    # (b g)
    cells0 = None if every else best_cells(tensor, config.query_share)
    groups = count0 if cells0 is None else cells0.shape[1]
    tensor, device, queries = readable(tensor), tensor.device, batch * groups * PLACES
    cells = None if cells0 is None else _counted(cells0, count0)
    shape = (batch, groups * PLACES)
    index0, index1, back = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(3))
    score0, score1 = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    transposed = torch.empty(batch, count1, count0, dtype=tensor.dtype, device=device)
    sums0 = torch.empty(batch, count0, dtype=torch.float32, device=device)
    sums1 = torch.empty(batch, count1, dtype=torch.float32, device=device)
    wanted = torch.zeros(batch, count1, PLACES, dtype=torch.int8, device=device)
    if tensor.numel():
        launch = launcher("both_jit.transpose", LINES=16, LENGTH=128)
        grid = (parts(count0, 16) + parts(count1, 16), batch, 1)
        launch(grid, tensor, transposed, sums0, sums1, count0, count1)
    best, visited0 = _search(tensor, sums0, cells, (fine0, fine1), config)
    if queries:
        valid = best if fine0.valid is None else readable(fine0.valid).view(torch.uint8)
        launch = launcher("both_jit.mark", MASKED=fine0.valid is not None, EVERY=every, BLOCK=_QUERIES)
        launch(
            (parts(queries, _QUERIES), 1, 1), best, best if cells is None else cells, valid, index0, index1, score0,
            wanted, queries, count0, fine0.width, count1, fine1.width,
        )  # fmt: skip
    best, visited1 = _search(transposed, sums1, None, (fine1, fine0), config, wanted=wanted)
    if queries:
        launch = launcher("both_jit.answer", BLOCK=_QUERIES)
        launch(
            (parts(queries, _QUERIES), 1, 1), best, index1, back, score1, queries, groups * PLACES, count1, fine1.width
        )
    visited = visited0.view(batch, groups), visited1.view(batch, count1)
    return Correspondences(index0, index1, back, score0, score1, *visited)


def search_cells(
    tensor: Tensor, fine: FineMapPair, cells: Tensor, config: FineConfig, *, wanted: Tensor | None = None
) -> Found:
    """Find the best fine cells for all 16 fine cells of each cell (b g); the most promising cells come first.

    `tensor` (b n m) has no negative values. A transposed tensor is copied, because reading columns is slow. `wanted`
    (b g 16) marks the queries whose answers are used; other queries get the best of the first block.
    """
    tensor, flat = readable(tensor), _counted(cells, tensor.shape[1])
    if wanted is not None:
        wanted = readable(wanted).view(torch.int8)
    best, visited = _search(tensor, tensor.sum(2, dtype=torch.float32), flat, fine, config, wanted=wanted)
    # A key has the bits of the score above 0x7FFFFFFF minus the index; it is negative if nothing was found.
    best, nothing = best.view(*cells.shape, PLACES), (best < 0).view(*cells.shape, PLACES)
    index = (0x7FFFFFFF - (best & 0x7FFFFFFF)).masked_fill_(nothing, -1)
    score = (best >> 32).to(torch.int32).view(torch.float32).masked_fill(nothing, 0)
    return Found(index, score, visited.view(cells.shape))


def _counted(cells: Tensor, count: int) -> Tensor:
    """Number the cells (b g) through the batch; each pair has `count` cells."""
    return (cells + count * torch.arange(len(cells), device=cells.device)[:, None]).flatten()


def _search(
    tensor: Tensor,
    sums: Tensor,
    cells: Tensor | None,
    fine: FineMapPair,
    config: FineConfig,
    *,
    wanted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return keys of the best (n 16) and numbers of visited cells (n); cells are numbered through the batch."""
    fine_query, fine_searched = fine
    # A power of two, at most 32.
    k = FIRST_BLOCK
    batch, count, candidates = tensor.shape
    groups, device = batch * count if cells is None else len(cells), tensor.device
    visited = torch.empty(groups, dtype=torch.int32, device=device)
    best = torch.empty(groups, PLACES, dtype=torch.int64, device=device)
    if groups == 0 or candidates == 0:
        return best.fill_(-1), visited.fill_(0)
    blocks = parts(candidates, _BLOCK)
    valid = allowed = best
    if fine_searched.valid is not None:
        valid = readable(fine_searched.valid).view(torch.uint8)
        # Coarse cells that contain a valid fine cell.
        allowed = valid.view(-1, fine_searched.height, 4, fine_searched.width, 4).amax(4).amax(2).contiguous()
    size = fine_query.height, fine_query.width
    masked, temperature = fine_searched.valid is not None, config.temperature
    flags: dict[str, Any] = {"CORNER": config.reading == "corner", "MASKED": masked, "EVERY": cells is None}
    asking = best if cells is None else cells

    maxima = torch.empty(groups, blocks, device=device)
    bound = launcher("choose_jit.block_maxima", BLOCK=_BLOCK, AT_ONCE=_BOUNDED, **flags)
    bound((groups, 1, 1), tensor, sums, asking, allowed, maxima, *size, candidates, blocks)
    chosen = torch.empty(groups, k, dtype=torch.int32, device=device)
    rest = torch.empty(groups, device=device)
    choose = launcher("choose_jit.choose", BLOCK=_BLOCK, AT_ONCE=_BLOCKS, VISITED=k, TAKEN=2 * k, **flags)
    choose((groups, 1, 1), tensor, sums, asking, allowed, maxima, chosen, rest, *size, candidates, blocks)

    features = readable(fine_query.features), readable(fine_searched.features)
    unsure = torch.empty(groups, PLACES, dtype=torch.int8, device=device)
    flags |= {"SHARP": temperature > 0, "VISITED": k, "LENGTH": features[0].shape[2]}
    numbers = float(temperature or 1), slack(features[0].dtype, temperature)

    def channels(cells: int) -> int:
        """Return the channels per step, so that the operands fit into shared memory in any type."""
        return max(16, _CHANNELS * 16 // (max(cells, 8) * features[0].element_size()))

    score = launcher("search_jit.score_cells", SOME=wanted is not None, CHANNELS=channels(k), **flags)
    score(
        (groups, 1, 1), tensor, sums, asking, chosen, rest, *features, valid, unsure if wanted is None else wanted,
        best, unsure, visited, *size, fine_searched.width, candidates, *numbers,
    )  # fmt: skip
    further = launcher(
        "search_jit.look_further", BLOCK=_BLOCK, ABREAST=_ABREAST, PARTS=_PARTS, CHANNELS=channels(_ABREAST), warps=1,
        **flags,
    )  # fmt: skip
    further(
        (groups, _PARTS, 1), tensor, sums, asking, allowed, maxima, chosen, *features, valid, unsure, best,
        visited, *size, fine_searched.width, candidates, blocks, *numbers,
    )  # fmt: skip
    return best, visited
