"""Fine search with a fixed amount of work: it visits the best coarse cells and bounds the scores of the others."""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.config import FineConfig
from dualrc.model.cells import PLACES, FineMap, Reading
from dualrc.model.search import TINY, cell_queries, sharpen
from dualrc.ops.torch import slack
from dualrc.pixels import RATIO

# Number of coarse cells whose fine cells are scored for each coarse cell of the query image.
VISITED = 16
# Number of coarse cells with exact coarse scores, from which the visited ones are chosen.
SHORTLIST = 48
# Number of cells whose features are gathered at once.
_TOGETHER = 4
# Relative amount by which rounding can raise a coarse score above its limit.
_ROUNDING = 1e-5


class TopFound(NamedTuple):
    """Best fine cell for each of the 16 queries of g coarse cells; positions are cell * 16 + place."""

    position: Tensor  # (g*16)
    # Score, or 0 if no cell has a positive score.
    score: Tensor  # (g*16)
    # Whether no unvisited cell can have a higher score.
    exact: Tensor  # (g*16) bool


def by_cell(fine: FineMap) -> Tensor:
    """Return the features of one image grouped by coarse cell: (cells 16 c)."""
    grid = fine.features[0].unflatten(0, (fine.height, RATIO, fine.width, RATIO))
    return grid.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)


def in_share(tensor: Tensor, share: float) -> Tensor:
    """Return which coarse cells of image 0 belong to the given fraction with the best scores: (n m) -> (n) bool."""
    best = tensor.amax(1)
    order = best.sort(descending=True).indices
    rank = torch.arange(best.shape[0], device=tensor.device)
    # Compare ranks: a number of cells that is rounded while tracing would become a constant of the graph.
    return torch.zeros_like(rank).scatter(0, order, ((rank + 1) <= share * best.shape[0]).long()) > 0


def largest_around(values: Tensor, fine: FineMap, reading: Reading) -> Tensor:
    """Return the maximum over the rows that the queries of each cell read: non-negative values (n m) -> (n m)."""
    before, after = (0, 1) if reading == "corner" else (1, 1)
    grid = values.unflatten(0, (fine.height, fine.width))
    rows = F.pad(grid, (0, 0, 0, 0, before, after))
    shifted = [rows[start : start + fine.height] for start in range(before + after + 1)]
    grid = reduce(torch.maximum, shifted)
    columns = F.pad(grid, (0, 0, before, after))
    shifted = [columns[:, start : start + fine.width] for start in range(before + after + 1)]
    return reduce(torch.maximum, shifted).flatten(0, 1)


def search_top(tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> TopFound:
    """Find the best fine cell of image 1 for every fine cell of image 0; `tensor` is (n m), cells of image 0 first."""
    candidates, sums = tensor.shape[1], tensor.sum(1)
    every = torch.arange(fine0.cells, device=tensor.device)
    queries = cell_queries(fine0, every[None], config.reading)
    # Weights have the shape (g m 16).
    features, rows, weights = queries.features[0], queries.rows[0], queries.weights[0].transpose(1, 2)
    total = torch.matmul(sums[rows][:, None], weights) + TINY  # (g 1 16)

    # A query reads sum(w t) / sum(w s) over rows t with sums s, which is at most the largest t / s.
    scale = torch.where(sums > 0, 1 / sums.clamp(min=torch.finfo(sums.dtype).tiny), 0)
    limits = largest_around(tensor * scale[:, None], fine0, config.reading)
    # Short rows are padded with zeros: the length of the shortlist is a constant of the graph, for images of any size.
    limit, cells = F.pad(limits, (0, SHORTLIST + 1)).topk(SHORTLIST + 1, dim=1)
    cells = cells.clamp(max=candidates - 1)
    outside, limit, cells = limit[:, SHORTLIST], limit[:, :SHORTLIST], cells[:, :SHORTLIST]

    # Compute exact coarse scores of the shortlist, and visit the best cells.
    read = tensor.flatten()[rows[:, None] * candidates + cells[:, :, None]]  # (g s m)
    coarse = torch.matmul(read, weights) / total  # (g s 16)
    # Entries that pad a short row repeat a cell; they get the score 0.
    coarse = torch.where(limit[:, :, None] > 0, coarse, 0)
    order = coarse.amax(2).topk(SHORTLIST, dim=1).indices
    cells = cells.gather(1, order[:, :VISITED])
    coarse = coarse.gather(1, order[:, :, None].expand(-1, -1, PLACES))
    rest = torch.maximum(coarse[:, VISITED:].amax(1), outside[:, None])
    rest = rest * ((1 + _ROUNDING) * slack(torch.float32, config.temperature))
    coarse = coarse[:, :VISITED]

    blocks = by_cell(fine1)
    products = []
    for some in cells.split(_TOGETHER, dim=1):
        block = blocks[some].flatten(1, 2)  # (g 4*16 c)
        products.append(torch.bmm(block, features.transpose(1, 2)))
    cosine = torch.cat(products, dim=1).unflatten(1, (VISITED, PLACES))  # (g v 16 16)
    fine = sharpen(cosine, config.temperature) if config.temperature > 0 else cosine.clamp(min=0)
    score = (coarse[:, :, None] * fine).flatten(1, 2)  # (g v*16 16)
    best, which = score.max(1)
    position = cells.gather(1, which // PLACES) * PLACES + which % PLACES
    exact = (best > rest) | (rest <= 0) | (total[:, 0] <= TINY)
    return TopFound(position.flatten(), best.flatten(), exact.flatten())
