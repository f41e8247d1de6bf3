"""Fine matching: S = S^ * U_r(S~), the fine cosine times the up-sampled coarse score, and its argmax."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dualrc.config import FineConfig
from dualrc.model.cells import PLACES, FineMap, Reading, corners, reading_weights
from dualrc.pixels import RATIO, pixel_to_cell

if TYPE_CHECKING:
    from dualrc.model.engine import Engine

# Added to what a query reads in all, which may be zero.
TINY = 1e-15


@dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """Places of one image that look for their counterparts, in groups that read the same coarse cells."""

    features: Tensor  # b g p c: unit fine features of the p queries of each group
    rows: Tensor  # b g m: coarse cells of the querying image that a group reads
    weights: Tensor  # b g p m, or 1 1 p m: bilinear weights of these cells


class Found(NamedTuple):
    """The best fine cell of the searched image for each query."""

    best: Tensor  # b g p: its row-major index; -1 where nothing scores above zero
    score: Tensor  # b g p
    visited: Tensor  # b g: coarse cells of the searched image whose fine cells were scored


class Correspondences(NamedTuple):
    """What fine cells of image 0 prefer in image 1, and what that prefers in image 0."""

    index0: Tensor  # b n: the query, row-major
    index1: Tensor  # b n: its best; -1: none
    back: Tensor  # b n: the best of its best; -1: none. The match is mutual where this is index0.
    score0: Tensor  # b n: the score from image 0 to image 1
    score1: Tensor  # b n: the score back
    visited0: Tensor  # b g: coarse cells visited for each coarse cell of image 0
    visited1: Tensor  # b g: and on the way back


def cell_queries(fine: FineMap, cells: Tensor, reading: Reading) -> Queries:
    """The 16 fine cells of each of these coarse cells (b g)."""
    offsets, weights = reading_weights(reading, cells.device)
    row = (cells[..., None] // fine.width + offsets[:, 0]).clamp(0, fine.height - 1)
    column = (cells[..., None] % fine.width + offsets[:, 1]).clamp(0, fine.width - 1)
    if reading == "corner":
        # A fact of the published implementation: a query at exactly (0, 0) reads nothing.
        reads = (cells[..., None] > 0) | (torch.arange(PLACES, device=cells.device) > 0)
        weights = weights * reads[..., None]
    else:
        weights = weights[None, None]
    pair = torch.arange(len(cells), device=cells.device)
    features = fine.gather(pair, fine.members(cells))
    return Queries(features=features, rows=row * fine.width + column, weights=weights)


def point_queries(fine: FineMap, points: Tensor, reading: Reading) -> Queries:
    """Queries at any points (b g 2), (x, y) in fine cells, one in each group."""
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
    """What each query reads of the coarse tensor (b n m), bilinear: (b g*p m)."""
    # As a product of matrices: its gradient is one too, where that of indexing would be a slow scatter.
    groups, places = queries.features.shape[1:3]
    rows = queries.rows[:, :, None].expand(-1, -1, places, -1).flatten(1, 2)
    weights = queries.weights.expand(len(rows), groups, -1, -1).flatten(1, 2).to(tensor.dtype)
    mixing = tensor.new_zeros(len(rows), groups * places, tensor.shape[1]).scatter_add_(2, rows, weights)
    return torch.bmm(mixing, tensor)


def fine_cosines(queries: Queries, fine: FineMap) -> Tensor:
    """S^: cosines of every query with every fine cell of the searched image, (b g*p H*W)."""
    return torch.bmm(queries.features.flatten(1, 2), fine.features.transpose(1, 2)).float()


def sharpen(cosine: Tensor, temperature: float) -> Tensor:
    """The fine score: the cosine itself, or exp((cosine - 1) / temperature)."""
    return torch.exp((cosine - 1) / temperature) if temperature > 0 else cosine


def search(tensor: Tensor, queries: Queries, fine: FineMap, temperature: float) -> Found:
    """The argmax of the whole score map of each query; `tensor` is (b n m), the querying image first."""
    coarse = read_coarse(tensor.float(), queries)
    coarse = coarse / (coarse.sum(2, keepdim=True) + TINY)  # S~
    scores = sharpen(fine_cosines(queries, fine), temperature) * fine.upsample(coarse)
    if fine.valid is not None:
        scores = scores.masked_fill(~fine.valid[:, None], 0)
    best = scores.amax(2, keepdim=True)
    # The first in the image among equals.
    cells = torch.arange(scores.shape[2], device=scores.device)
    index = torch.where((scores == best) & (best > 0), cells, len(cells)).amin(2)
    index, best = index.masked_fill(index == len(cells), -1), best[:, :, 0].clamp(min=0)
    shape = queries.features.shape[:3]
    visited = torch.full(shape[:2], tensor.shape[2], device=tensor.device)
    return Found(index.view(shape), best.view(shape), visited)


def best_cells(tensor: Tensor, share: float) -> Tensor:
    """The given share of image 0's coarse cells, those with the highest scores, in order: (b n m) -> (b k)."""
    batch, count = tensor.shape[:2]
    if share == 1:
        return torch.arange(count, device=tensor.device).expand(batch, -1)
    best = tensor.amax(2).sort(dim=1, descending=True, stable=True).indices
    return best[:, : int(share * count)].sort(1).values


def search_both(
    engine: "Engine", tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig
) -> Correspondences:
    """Search from the best coarse cells of image 0, and from what they find back; `tensor` is (b n m)."""
    cells0 = best_cells(tensor, config.query_share)
    there = engine.search_cells(tensor, fine0, cells0, fine1, config)
    index0, index1 = fine0.members(cells0).flatten(1), there.best.flatten(1)
    if fine0.valid is not None:
        index1 = index1.masked_fill(~fine0.valid.gather(1, index0), -1)
    # Only what was found has to answer.
    found = index1 >= 0
    nobody = fine1.cells * PLACES
    position = fine1.position(index1.clamp(min=0))
    wanted = torch.zeros(len(tensor), nobody + 1, dtype=torch.bool, device=tensor.device)
    wanted = wanted.scatter_(1, position.masked_fill(~found, nobody), True)[:, :nobody]
    cells1 = torch.arange(fine1.cells, device=tensor.device).expand(len(tensor), -1)
    back = engine.search_cells(
        tensor.transpose(1, 2), fine1, cells1, fine0, config, wanted=wanted.unflatten(1, (-1, PLACES))
    )
    return Correspondences(
        index0=index0,
        index1=index1,
        back=back.best.flatten(1).gather(1, position).masked_fill(~found, -1),
        score0=there.score.flatten(1),
        score1=back.score.flatten(1).gather(1, position),
        visited0=there.visited,
        visited1=back.visited,
    )
