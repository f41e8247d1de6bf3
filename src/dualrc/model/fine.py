"""Fine matching: the best fine cell of the other picture under coarse score times fine cosine, exactly.

The score of a candidate is its coarse score times a fine score that is at most 1. So the coarse cells are visited by
falling coarse score, a block at a time, until the best product found exceeds all that the rest could reach. The full
fine correlation is never held, and the result is its argmax all the same (`literal.py` has the definition).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Reading = Literal["corner", "center"]

RATIO = 4  # fine cells along each side of a coarse cell
PLACES = RATIO * RATIO
# A cosine of unit vectors may exceed 1 by so much in rounding; the bound allows for it.
_EXCESS = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}
_FIRST_BLOCK = 8  # coarse cells visited before the bound is first checked


@dataclass(frozen=True, kw_only=True)
class FineMap:
    """Fine unit features of pictures with the same size, (b H*W c), and how coarse cells divide them."""

    features: Tensor
    height: int  # in coarse cells
    width: int
    valid: Tensor | None  # (b H*W) bool, where a mask leaves cells out

    @staticmethod
    def of(fine: Tensor, valid: Tensor | None = None) -> "FineMap":
        """Unit fine features (b c 4h 4w) and, with a mask, which fine cells count, (b 4h 4w)."""
        return FineMap(
            # A view where the backbone works with channels last.
            features=fine.movedim(1, -1).flatten(1, 2).contiguous(),
            height=fine.shape[2] // RATIO,
            width=fine.shape[3] // RATIO,
            valid=None if valid is None else valid.flatten(1),
        )

    @property
    def cells(self) -> int:
        """Coarse cells of a picture."""
        return self.height * self.width

    def members(self, cell: Tensor) -> Tensor:
        """The row-major fine indices of the 16 fine cells of coarse cells: (...) -> (... 16)."""
        place = torch.arange(PLACES, device=cell.device)
        row = (cell // self.width * RATIO)[..., None] + place // RATIO
        return row * (self.width * RATIO) + (cell % self.width * RATIO)[..., None] + place % RATIO

    def split(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The coarse cell of a row-major fine index and its place (0 to 15) among the members."""
        row, column = index // (self.width * RATIO), index % (self.width * RATIO)
        return row // RATIO * self.width + column // RATIO, row % RATIO * RATIO + column % RATIO

    def gather(self, pair: Tensor, index: Tensor) -> Tensor:
        """Features at row-major fine indices: pair (n), index (n ...) -> (n ... c)."""
        offset = pair * self.features.shape[1]
        index = index + offset.view(-1, *[1] * (index.ndim - 1))
        found = self.features.flatten(0, 1).index_select(0, index.flatten())
        return found.view(*index.shape, found.shape[1])

    def sample(self, pair: Tensor, points: Tensor) -> Tensor:
        """Unit features, float32, at any places, bilinear: pair (n), points (n 2), (x, y) in fine cells -> (n c)."""
        row, column, share = _corners(points, self.height * RATIO, self.width * RATIO)
        corners = self.gather(pair, row * self.width * RATIO + column)  # n 4 c
        features = (corners.float() * share[:, :, None]).sum(1)
        return features / features.norm(dim=1, keepdim=True).clamp(min=1e-6)


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Groups of queries that read the same few rows of the coarse tensor."""

    features: Tensor  # n p c: unit fine features of the p queries of a group
    pair: Tensor  # n: which pair of the batch
    rows: Tensor  # n m: cells of the querying picture whose rows of the coarse tensor are read
    weights: Tensor  # n p m, or 1 p m: how they are mixed
    wanted: Tensor | None = None  # n p: the queries whose answers will be used; None: all


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best candidate of each query: its row-major fine index, -1 where nothing scores above zero."""

    index: Tensor  # n p
    score: Tensor  # n p
    visited: Tensor  # n: coarse cells that were visited for the group


def reading_weights(reading: Reading, device: torch.device) -> tuple[Tensor, Tensor]:
    """How the 16 fine cells of a coarse cell read its neighbours: offsets (m 2) in cells, weights (16 m)."""
    # Fine cell d of a coarse cell reads at d/4 from the cell ("corner"), or where its centre lies ("center").
    shift = 0.0 if reading == "corner" else -(RATIO - 1) / 2
    offsets = (0, 1) if reading == "corner" else (-1, 0, 1)
    places = (torch.arange(RATIO, dtype=torch.float64) + shift) / RATIO
    axis = (1 - (places[:, None] - torch.tensor(offsets)[None]).abs()).clamp(min=0)  # 4 x offsets
    weights = torch.einsum("am,bn->abmn", axis, axis).reshape(PLACES, -1)
    grid = torch.tensor([(row, column) for row in offsets for column in offsets])
    return grid.to(device), weights.float().to(device)


def cell_queries(fine: FineMap, cells: Tensor, reading: Reading) -> Queries:
    """All 16 queries of each of these cells; `cells` count through the batch, b * (h*w)."""
    offsets, weights = reading_weights(reading, cells.device)
    pair, cell = cells // fine.cells, cells % fine.cells
    row = (cell[:, None] // fine.width + offsets[:, 0]).clamp(0, fine.height - 1)
    column = (cell[:, None] % fine.width + offsets[:, 1]).clamp(0, fine.width - 1)
    weights = weights[None]
    if reading == "corner":
        # A fact of the published implementation: a query at exactly (0, 0) reads nothing.
        weights = weights.expand(len(cells), -1, -1).clone()
        weights[cell == 0, 0] = 0
    features = fine.gather(pair, fine.members(cell))
    return Queries(features=features, pair=pair, rows=row * fine.width + column, weights=weights)


def search(tensor: Tensor, queries: Queries, fine: FineMap, *, temperature: float, max_values: int) -> Found:
    """The best fine cell of the searched picture for every query.

    `tensor` is the coarse tensor, (b n m): cells of the querying picture times cells of the searched one. About
    `max_values` values are held at a time.
    """
    groups, places, channels = queries.features.shape
    sums = tensor.sum(2)  # b n
    found = Found(
        index=torch.full((groups, places), -1, device=tensor.device),
        score=torch.zeros(groups, places, device=tensor.device),
        visited=torch.zeros(groups, dtype=torch.long, device=tensor.device),
    )
    open_groups = torch.arange(groups, device=tensor.device)
    candidates = tensor.shape[2]
    block = min(_FIRST_BLOCK, candidates)
    while len(open_groups):
        per_group = (queries.rows.shape[1] + places + 2) * candidates + block * PLACES * (channels + 3 * places)
        chunk = max(1, max_values // per_group)
        still_open = []
        for ids in open_groups.split(chunk):
            done = _visit(tensor, sums, queries, ids, fine, block, temperature, found)
            still_open.append(ids[~done])
        open_groups = torch.cat(still_open)
        block = min(4 * block, candidates)
    return found


def _visit(
    tensor: Tensor,
    sums: Tensor,
    queries: Queries,
    ids: Tensor,
    fine: FineMap,
    block: int,
    temperature: float,
    found: Found,
) -> Tensor:
    """Score the `block` most promising cells for these groups; true where no other cell can do better."""
    pair, rows = queries.pair[ids], queries.rows[ids]
    weights = queries.weights.expand(len(queries.features), -1, -1)[ids]  # g p m
    total = torch.einsum("gpm,gm->gp", weights, sums[pair[:, None], rows]) + 1e-15
    coarse = torch.bmm(weights, tensor[pair[:, None], rows]) / total[:, :, None]  # g p candidates
    bound = coarse.amax(1)  # g candidates: no query of the group scores higher there
    if fine.valid is not None:
        empty = ~fine.valid[:, fine.members(torch.arange(fine.cells, device=ids.device))].any(2)  # b candidates
        bound = bound.masked_fill(empty[pair], 0)
    bounds, cells = bound.topk(min(block + 1, bound.shape[1]), dim=1)
    rest = bounds[:, block] if bounds.shape[1] > block else torch.zeros_like(bounds[:, 0])
    cells = cells[:, :block]
    coarse = coarse.gather(2, cells[:, None].expand(-1, weights.shape[1], -1))  # g p k

    index = fine.members(cells)  # g k 16
    candidates = fine.gather(pair, index)  # g k 16 c
    cosine = torch.einsum("gpc,gkqc->gpkq", queries.features[ids], candidates).float()
    fine_score = torch.exp((cosine - 1) / temperature) if temperature > 0 else cosine
    score = coarse[:, :, :, None] * fine_score
    if fine.valid is not None:
        score = torch.where(fine.valid[pair[:, None, None], index][:, None], score, 0)
    score = score.flatten(2)  # g p (k 16)

    highest = score.amax(2)
    # Among equals the first in the picture wins, whatever the order of the visit.
    equal = score == highest[:, :, None]
    first = torch.where(equal, index.flatten(1)[:, None], torch.iinfo(index.dtype).max).amin(2)
    positive = highest > 0
    found.index[ids] = torch.where(positive, first, -1)
    found.score[ids] = torch.where(positive, highest, 0)
    found.visited[ids] = block
    excess = _EXCESS[candidates.dtype]
    rest = rest[:, None] * (math.exp(excess / temperature) if temperature > 0 else 1 + excess)
    # A query that reads nothing, or only zeros, has nothing to find, whatever its group's bound.
    certain = (highest > rest) | (rest <= 0) | (total <= 1e-15)
    if queries.wanted is not None:
        certain |= ~queries.wanted[ids]
    return certain.all(1)


@dataclass(frozen=True, kw_only=True)
class BothWays:
    """What fine cells of picture 0 prefer in picture 1, and what that prefers in picture 0; all n long, row-major."""

    pair: Tensor
    index0: Tensor  # the query
    index1: Tensor  # its best
    back: Tensor  # the best of its best; the match is mutual where this is index0
    score: Tensor  # of the way there
    back_score: Tensor  # of the way back


def both_ways(
    tensor: Tensor,
    fine0: FineMap,
    fine1: FineMap,
    *,
    reading: Reading,
    query_share: float,
    temperature: float,
    max_values: int,
) -> BothWays:
    """Search from the best coarse cells of picture 0, and from what they find back; `tensor` is (b n0 n1)."""
    batch, count0, count1 = tensor.shape
    best = tensor.amax(2).sort(dim=1, descending=True, stable=True).indices[:, : int(query_share * count0)]
    cells0 = (best + count0 * torch.arange(batch, device=tensor.device)[:, None]).flatten().sort().values
    queries = cell_queries(fine0, cells0, reading)
    forward = search(tensor, queries, fine1, temperature=temperature, max_values=max_values)
    keep = forward.index >= 0
    index0 = fine0.members(cells0 % count0)
    if fine0.valid is not None:
        keep &= fine0.valid[queries.pair[:, None], index0]
    pair, index0, index1 = queries.pair[:, None].expand_as(keep)[keep], index0[keep], forward.index[keep]

    cell, place = fine1.split(index1)
    # Only the cells that were found can answer, and each answers for all its queries at once.
    cells1, inverse = (cell + pair * count1).unique(return_inverse=True)
    wanted = torch.zeros(len(cells1), PLACES, dtype=torch.bool, device=tensor.device)
    wanted[inverse, place] = True
    queries = replace(cell_queries(fine1, cells1, reading), wanted=wanted)
    turned = tensor.transpose(1, 2).contiguous()
    backward = search(turned, queries, fine0, temperature=temperature, max_values=max_values)
    return BothWays(
        pair=pair,
        index0=index0,
        index1=index1,
        back=backward.index[inverse, place],
        score=forward.score[keep],
        back_score=backward.score[inverse, place],
    )


def point_queries(fine: FineMap, pair: Tensor, points: Tensor, reading: Reading) -> Queries:
    """Queries at any places: `points` (n 2) are (x, y) in fine cells, the first cell's centre at (0, 0)."""
    features = fine.sample(pair, points)
    coarse = points / RATIO if reading == "corner" else (points + 0.5) / RATIO - 0.5
    row, column, share = _corners(coarse, fine.height, fine.width)
    return Queries(
        features=features[:, None].to(fine.features.dtype),
        pair=pair,
        rows=row * fine.width + column,
        weights=share[:, None],
    )


def _corners(points: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The four cells around each point and their bilinear weights, clamped at the border: rows, columns, (n 4)."""
    x, y = points[:, 0].clamp(0, width - 1), points[:, 1].clamp(0, height - 1)
    left, top = x.floor(), y.floor()
    share_x, share_y = x - left, y - top
    columns = torch.stack([left, left + 1, left, left + 1], dim=1).long().clamp(max=width - 1)
    rows = torch.stack([top, top, top + 1, top + 1], dim=1).long().clamp(max=height - 1)
    across = torch.stack([1 - share_x, share_x, 1 - share_x, share_x], dim=1)
    down = torch.stack([1 - share_y, 1 - share_y, share_y, share_y], dim=1)
    return rows, columns, across * down
