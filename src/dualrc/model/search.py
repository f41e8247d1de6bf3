"""Dense matching (section 3.3 of the paper): the argmax of S = S^ * U_r(S~).

S^ are the cosines of a query with all fine cells of the other image. S~ are the coarse scores that the query reads from
the refined tensor by bilinear interpolation. U_r up-samples them to fine cells.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dualrc.config import FineConfig
from dualrc.model.cells import PLACES, FineMap, Reading, corners, reading_weights
from dualrc.pixels import RATIO, pixel_to_cell

if TYPE_CHECKING:
    from dualrc.model.engine import Engine

# Added to the sum of the coarse scores that a query reads, which may be zero.
TINY = 1e-15


@dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """Query positions of one image, in groups that read the same coarse cells."""

    # (b g p c) Unit fine features of the p queries of each group.
    features: Tensor
    # (b g m) Coarse cells of the querying image that a group interpolates.
    rows: Tensor
    # (b g p m) or (1 1 p m) Bilinear weights of these cells.
    weights: Tensor


class Found(NamedTuple):
    """The best fine cell of the searched image for each query."""

    # (b g p) Row-major index; -1 if no cell scores above zero.
    best: Tensor
    # (b g p)
    score: Tensor
    # (b g) Coarse cells of the searched image whose fine cells were scored.
    visited: Tensor


class Correspondences(NamedTuple):
    """Best fine cells in image 1 of fine cells in image 0, and the best of those back in image 0."""

    # (b n) The query, row-major.
    index0: Tensor
    # (b n) Its best cell in image 1; -1 for none.
    index1: Tensor
    # (b n) The best cell of index1 back in image 0; -1 for none. A match is mutual if this equals index0.
    back: Tensor
    # (b n) The score from image 0 to image 1.
    score0: Tensor
    # (b n) The score from image 1 to image 0.
    score1: Tensor
    # (b g) Coarse cells visited for each coarse cell of image 0.
    visited0: Tensor
    # (b g) Coarse cells visited for each coarse cell of image 1.
    visited1: Tensor


def cell_queries(fine: FineMap, cells: Tensor, reading: Reading) -> Queries:
    """Build queries for the 16 fine cells of each coarse cell (b g)."""
    offsets, weights = reading_weights(reading, cells.device)
    row = (cells[..., None] // fine.width + offsets[:, 0]).clamp(0, fine.height - 1)
    column = (cells[..., None] % fine.width + offsets[:, 1]).clamp(0, fine.width - 1)
    if reading == "corner":
        # The published implementation reads nothing for the query at (0, 0), and this reproduces it.
        reads = (cells[..., None] > 0) | (torch.arange(PLACES, device=cells.device) > 0)
        weights = weights * reads[..., None]
    else:
        weights = weights[None, None]
    pair = torch.arange(len(cells), device=cells.device)
    features = fine.gather(pair, fine.members(cells))
    return Queries(features=features, rows=row * fine.width + column, weights=weights)


def point_queries(fine: FineMap, points: Tensor, reading: Reading) -> Queries:
    """Build queries at arbitrary points (b g 2), (x, y) in fine cells, one per group."""
    batch, count = points.shape[:2]
    pair = torch.arange(batch, device=points.device).repeat_interleave(count)
    flat = points.flatten(0, 1)
    coarse = flat / RATIO if reading == "corner" else pixel_to_cell(flat, RATIO)
    rows, weights = corners(coarse, fine.height, fine.width)
    return Queries(
        features=fine.sample(pair, flat).to(fine.features.dtype).unflatten(0, (batch, count, 1)),
        rows=rows.unflatten(0, (batch, count)),
        weights=weights.unflatten(0, (batch, count, 1)),
    )


def read_coarse(tensor: Tensor, queries: Queries) -> Tensor:
    """Interpolate the coarse tensor (b n m) at each query, the paper's bilinear(.): (b g*p m)."""
    # A matrix product has a matrix product as gradient; the gradient of indexing is a slow scatter.
    groups, places = queries.features.shape[1:3]
    rows = queries.rows[:, :, None].expand(-1, -1, places, -1).flatten(1, 2)
    weights = queries.weights.expand(len(rows), groups, -1, -1).flatten(1, 2).to(tensor.dtype)
    mixing = tensor.new_zeros(len(rows), groups * places, tensor.shape[1]).scatter_add_(2, rows, weights)
    return torch.bmm(mixing, tensor)


def fine_cosines(queries: Queries, fine: FineMap) -> Tensor:
    """Compute S^, the cosines of every query with every fine cell of the searched image: (b g*p H*W)."""
    return torch.bmm(queries.features.flatten(1, 2), fine.features.transpose(1, 2)).float()


def sharpen(cosine: Tensor, temperature: float) -> Tensor:
    """Return the fine score: the cosine itself, or exp((cosine - 1) / temperature)."""
    return torch.exp((cosine - 1) / temperature) if temperature > 0 else cosine


def search(tensor: Tensor, queries: Queries, fine: FineMap, temperature: float) -> Found:
    """Return the argmax of the full score map S of each query; `tensor` is (b n m), the querying image first."""
    coarse = read_coarse(tensor.float(), queries)
    # S~, normalized to sum 1.
    coarse = coarse / (coarse.sum(2, keepdim=True) + TINY)
    scores = sharpen(fine_cosines(queries, fine), temperature) * fine.upsample(coarse)
    if fine.valid is not None:
        scores = scores.masked_fill(~fine.valid[:, None], 0)
    best = scores.amax(2, keepdim=True)
    # Ties go to the first cell in row-major order.
    cells = torch.arange(scores.shape[2], device=scores.device)
    index = torch.where((scores == best) & (best > 0), cells, len(cells)).amin(2)
    index, best = index.masked_fill(index == len(cells), -1), best[:, :, 0].clamp(min=0)
    shape = queries.features.shape[:3]
    visited = torch.full(shape[:2], tensor.shape[2], device=tensor.device)
    return Found(index.view(shape), best.view(shape), visited)


def best_cells(tensor: Tensor, share: float) -> Tensor:
    """Select the share of image 0's coarse cells with the highest scores, in row-major order: (b n m) -> (b k)."""
    batch, count = tensor.shape[:2]
    if share == 1:
        return torch.arange(count, device=tensor.device).expand(batch, -1)
    best = tensor.amax(2).sort(dim=1, descending=True, stable=True).indices
    return best[:, : int(share * count)].sort(1).values


def search_both(
    engine: "Engine", tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig
) -> Correspondences:
    """Search from the best coarse cells of image 0, then back from the cells found; `tensor` is (b n m)."""
    cells0 = best_cells(tensor, config.query_share)
    there = engine.search_cells(tensor, (fine0, fine1), cells0, config)
    index0, index1 = fine0.members(cells0).flatten(1), there.best.flatten(1)
    if fine0.valid is not None:
        index1 = index1.masked_fill(~fine0.valid.gather(1, index0), -1)
    back, score1, visited1 = search_back(engine, tensor, fine0, index1, fine1, config)
    return Correspondences(index0, index1, back, there.score.flatten(1), score1, there.visited, visited1)


def search_back(
    engine: "Engine", tensor: Tensor, fine0: FineMap, index1: Tensor, fine1: FineMap, config: FineConfig
) -> Found:
    """Search from the fine cells `index1` (b n) of image 1, -1 for none, back to image 0: best and score (b n)."""
    # Only cells that were found need an answer.
    found = index1 >= 0
    nobody = fine1.cells * PLACES
    position = fine1.position(index1.clamp(min=0))
    wanted = torch.zeros(len(tensor), nobody + 1, dtype=torch.bool, device=tensor.device)
    wanted = wanted.scatter_(1, position.masked_fill(~found, nobody), True)[:, :nobody].unflatten(1, (-1, PLACES))
    cells1 = torch.arange(fine1.cells, device=tensor.device).expand(len(tensor), -1)
    back = engine.search_cells(tensor.transpose(1, 2), (fine1, fine0), cells1, config, wanted=wanted)
    best, score = (column.flatten(1).gather(1, position) for column in (back.best, back.score))
    return Found(best.masked_fill(~found, -1), score, back.visited)
