"""Fine matching: the best fine cell of the other picture under coarse score times fine cosine, exactly.

The score of a candidate is its coarse score times a fine score that is at most 1. So the coarse cells are visited by
falling coarse score, one or some at a time, until the best product found exceeds all that the rest could reach. The
full fine correlation is never held, and the result is its argmax all the same (`literal.py` has the definition).
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import dualrc.kernels.search as kernel
from dualrc.kernels import native

Reading = Literal["corner", "center"]

RATIO = 4  # fine cells along each side of a coarse cell
PLACES = RATIO * RATIO
# A cosine of unit vectors may exceed 1 by so much in rounding; the bound allows for it.
_EXCESS = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}
FIRST_BLOCK = 8  # coarse cells visited before the bound is first checked
_SHORTLIST = 3  # times as many are read exactly, to choose those
_WIDEN, _GPU_WIDEN = 2, 4  # times as many are visited where the bound did not hold; on a GPU more work is cheap
_CPU_VALUES = 2**22  # values held at a time by each thread of a CPU, near its cache
_PANEL = 64  # rows of the coarse tensor that a CPU transposes at a time, which takes a quarter of all at once


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

    def member(self, cell: Tensor, place: Tensor) -> Tensor:
        """The row-major fine index of one place (0 to 15) of coarse cells."""
        row, column = cell // self.width * RATIO, cell % self.width * RATIO
        return (row + place // RATIO) * (self.width * RATIO) + column + place % RATIO

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

    def gather_cells(self, pair: Tensor, cells: Tensor) -> Tensor:
        """Features of all members of coarse cells: pair (n), cells (n k) -> (n k 16 c)."""
        # Four members side by side lie together in memory.
        lines = self.features.flatten(0, 1).unflatten(0, (-1, RATIO)).flatten(1)  # b*H*w 4c
        line = cells // self.width * (RATIO * self.width) + cells % self.width + pair[:, None] * (self.cells * RATIO)
        line = line[:, :, None] + self.width * torch.arange(RATIO, device=cells.device)
        return lines.index_select(0, line.flatten()).view(*cells.shape, PLACES, self.features.shape[2])

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


@cache
@torch.inference_mode(False)
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
    features = fine.gather_cells(pair, cell[:, None])[:, 0]
    return Queries(features=features, pair=pair, rows=row * fine.width + column, weights=weights)


def row_sums(tensor: Tensor) -> Tensor:
    """What each cell's row of the coarse tensor (b n m) adds up to: (b n)."""
    return tensor.sum(2, dtype=torch.float32)


@torch.no_grad()
def search(
    tensor: Tensor,
    queries: Queries,
    fine: FineMap,
    *,
    temperature: float,
    max_values: int,
    sums: Tensor | None = None,
) -> Found:
    """The best fine cell of the searched picture for every query.

    `tensor` is the coarse tensor, (b n m): cells of the querying picture times cells of the searched one, and `sums`
    its `row_sums`, for who searches it several times. About `max_values` values are held at a time.
    """
    groups, places, channels = queries.features.shape
    sums = row_sums(tensor) if sums is None else sums
    if native.usable(tensor, queries.features, fine.features):
        return _search_natively(tensor, sums, queries, fine, temperature)
    found = Found(
        index=torch.full((groups, places), -1, device=tensor.device),
        score=torch.zeros(groups, places, device=tensor.device),
        visited=torch.zeros(groups, dtype=torch.long, device=tensor.device),
    )
    open_groups = torch.arange(groups, device=tensor.device)
    candidates = tensor.shape[2]
    if not tensor.is_cuda:
        max_values = min(max_values, _CPU_VALUES * torch.get_num_threads())
    block = min(FIRST_BLOCK, candidates)
    while len(open_groups):
        shortlist = min(_SHORTLIST * block, candidates)
        per_group = 3 * candidates + 3 * places * shortlist + block * PLACES * (channels + 2 * places)
        still_open = []
        for ids in open_groups.split(max(1, max_values // per_group)):
            done = _visit(tensor, sums, queries, ids, fine, block, temperature, found)
            still_open.append(ids[~done])
        open_groups = torch.cat(still_open)
        block = min((_GPU_WIDEN if tensor.is_cuda else _WIDEN) * block, candidates)
    return found


def _search_natively(tensor: Tensor, sums: Tensor, queries: Queries, fine: FineMap, temperature: float) -> Found:
    """`search` by C, which leaves a group's cells as soon as the bound holds for each query by itself."""
    groups, places, channels = queries.features.shape
    excess = _EXCESS[torch.float32]
    found = Found(
        index=torch.empty(groups, places, dtype=torch.long, device=tensor.device),
        score=queries.features.new_empty(groups, places),
        visited=torch.empty(groups, dtype=torch.long, device=tensor.device),
    )
    native.call(
        "search",
        tensor=tensor,
        sums=sums,
        queries=queries.features,
        pair=queries.pair,
        rows=queries.rows + queries.pair[:, None] * tensor.shape[1],
        weights=queries.weights,
        wanted=queries.wanted,
        fine=fine.features,
        valid=fine.valid,
        index=found.index,
        score=found.score,
        visited=found.visited,
        groups=groups,
        places=places,
        channels=channels,
        mixed=queries.rows.shape[1],
        weights_apart=0 if len(queries.weights) == 1 < groups else places * queries.rows.shape[1],
        candidates=tensor.shape[2],
        width=fine.width,
        temperature=temperature,
        allowance=math.exp(excess / temperature) if temperature > 0 else 1 + excess,
    )
    return found


def search_from_cells(
    tensor: Tensor,
    asking: FineMap,
    cells: Tensor,
    fine: FineMap,
    *,
    reading: Reading,
    temperature: float,
    max_values: int,
    wanted: Tensor | None = None,
) -> Found:
    """`search` from all 16 fine cells of each of these cells, which count through the batch; `wanted` as in Queries."""
    if kernel.supported(asking, fine):
        excess = _EXCESS[fine.features.dtype]
        answers = kernel.search_cells(
            tensor, cells, asking, fine, reading, temperature, FIRST_BLOCK, excess=excess, wanted=wanted
        )
        return Found(index=answers.index, score=answers.score, visited=answers.visited)
    queries = replace(cell_queries(asking, cells, reading), wanted=wanted)
    return search(tensor, queries, fine, temperature=temperature, max_values=max_values)


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
    pair = queries.pair[ids]
    rows = queries.rows[ids] + pair[:, None] * tensor.shape[1]  # g m, of all pairs
    # Places of a group come last, so that what is done for each of them is done for all at once.
    weights = queries.weights.transpose(1, 2)  # g m p, or 1 m p where all groups mix their rows in the same way
    weights = weights[0] if len(weights) == 1 else weights[ids]
    total = torch.matmul(sums.flatten()[rows][:, None], weights) + 1e-15  # g 1 p
    limits = _limits(tensor.flatten(0, 1), sums.flatten(), rows)  # g candidates
    if fine.valid is not None:
        empty = ~fine.valid[:, fine.members(torch.arange(fine.cells, device=ids.device))].any(2)  # b candidates
        limits.masked_fill_(empty[pair], 0)
    # What the cheap limit leaves is read exactly, and the best of that are visited.
    candidates = limits.shape[1]
    limit, cells = limits.topk(min(_SHORTLIST * block + 1, candidates), dim=1)
    rest = limit[:, _SHORTLIST * block] if limit.shape[1] > _SHORTLIST * block else torch.zeros_like(limit[:, 0])
    cells = cells[:, : _SHORTLIST * block]
    read = tensor.flatten()[rows[:, None] * candidates + cells[:, :, None]].float()  # g s m
    coarse = torch.matmul(read, weights) / total  # g s p
    bounds, order = coarse.amax(2).masked_fill_(limit[:, : cells.shape[1]] <= 0, 0).topk(min(block + 1, cells.shape[1]))
    if bounds.shape[1] > block:
        rest = torch.maximum(rest, bounds[:, block])
    order = order[:, :block]
    cells = cells.gather(1, order)
    coarse = coarse.gather(1, order[:, :, None].expand(-1, -1, coarse.shape[2]))  # g k p

    candidate = fine.gather_cells(pair, cells)  # g k 16 c
    cosine = torch.bmm(candidate.flatten(1, 2), queries.features[ids].transpose(1, 2)).float()
    cosine = cosine.unflatten(1, (-1, PLACES))  # g k 16 p
    if fine.valid is not None:
        cosine = cosine.masked_fill(~fine.valid[pair[:, None, None], fine.members(cells)][..., None], -math.inf)
    best = cosine.amax(2)  # within a cell the coarse score is the same
    score = coarse * (torch.exp((best - 1) / temperature) if temperature > 0 else best.clamp(min=0))  # g k p

    highest, winner = score.max(1)  # g p
    place = cosine.gather(1, winner[:, None, None].expand(-1, -1, PLACES, -1))[:, 0].max(1).indices
    index = fine.member(cells.gather(1, winner), place)
    equal = (score == highest[:, None]) & (highest > 0)[:, None]
    if (equal.sum(1) > 1).any():
        # Among equals the first in the picture wins, whatever the order of the visit.
        indices = fine.members(cells).gather(2, cosine.max(2).indices)
        index = indices.masked_fill(~equal, torch.iinfo(indices.dtype).max).amin(1)
    positive = highest > 0
    found.index[ids] = index.masked_fill(~positive, -1)
    found.score[ids] = highest.masked_fill(~positive, 0)
    found.visited.index_fill_(0, ids, block)
    excess = _EXCESS[candidate.dtype]
    rest = rest[:, None] * (math.exp(excess / temperature) if temperature > 0 else 1 + excess)
    # A query that reads nothing, or only zeros, has nothing to find, whatever its group's bound.
    certain = (highest > rest) | (rest <= 0) | (total[:, 0] <= 1e-15)
    if queries.wanted is not None:
        certain |= ~queries.wanted[ids]
    return certain.all(1)


def _limits(tensor: Tensor, sums: Tensor, rows: Tensor) -> Tensor:
    """What no query that mixes these rows (g m) of the coarse tensor can exceed: (g candidates).

    A query reads sum(w t) / sum(w s) over its rows t with their sums s, and that is no more than the largest t / s.
    """
    scale = ((1 + 1e-5) / sums).masked_fill_(sums <= 0, 0)  # and a little for rounding
    limits = tensor.index_select(0, rows[:, 0]).float() * scale[rows[:, 0], None]
    for row in rows.T[1:]:
        torch.maximum(limits, tensor.index_select(0, row).float().mul_(scale[row, None]), out=limits)
    return limits


class BothWays(NamedTuple):
    """What fine cells of picture 0 prefer in picture 1, and what that prefers in picture 0; n long, row-major.

    Cells that find nothing may be among them, or be left out.
    """

    columns: Tensor  # 4 n: pair, index0, index1 and back, as below
    scores: Tensor  # 2 n: of the way there, and of the way back
    # Coarse cells that were visited for each coarse cell that asked, on the way there and on the way back.
    visited: Tensor
    visited_back: Tensor

    @property
    def pair(self) -> Tensor:
        """Which of the batch."""
        return self.columns[0]

    @property
    def index0(self) -> Tensor:
        """The query."""
        return self.columns[1]

    @property
    def index1(self) -> Tensor:
        """Its best; -1: nothing."""
        return self.columns[2]

    @property
    def back(self) -> Tensor:
        """The best of its best, -1: nothing; the match is mutual where this is index0."""
        return self.columns[3]

    def of(self, chosen: Tensor) -> "BothWays":
        """These alone, by indices or by a mask."""
        return self._replace(columns=self.columns[:, chosen], scores=self.scores[:, chosen])


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
    """Search from the best coarse cells of picture 0, and from what they find back; `tensor` is (b n0 n1).

    Where the kernels search, nothing here depends on what is found but the values: the work can be recorded.
    """
    batch, count0, count1 = tensor.shape
    by_kernels = kernel.supported(fine0, fine1)
    settings: dict[str, Any] = {"reading": reading, "temperature": temperature, "max_values": max_values}
    if query_share < 1:
        best = tensor.amax(2).sort(dim=1, descending=True, stable=True).indices[:, : int(query_share * count0)]
        cells0 = (best + count0 * torch.arange(batch, device=tensor.device)[:, None]).flatten().sort().values
    else:
        cells0 = torch.arange(batch * count0, device=tensor.device)
    forward = search_from_cells(tensor, fine0, cells0, fine1, **settings)
    pair = (cells0 // count0).repeat_interleave(PLACES)
    index0, index1, score = fine0.members(cells0 % count0).flatten(), forward.index.flatten(), forward.score.flatten()
    if fine0.valid is not None:
        index1 = index1.masked_fill(~fine0.valid[pair, index0], -1)
    if not by_kernels:
        asked = (index1 >= 0).nonzero()[:, 0]
        pair, index0, index1, score = pair[asked], index0[asked], index1[asked], score[asked]

    # Only what was found answers, each coarse cell for all its queries at once.
    found = index1 >= 0
    cell, place = fine1.split(index1.clamp(min=0))
    nobody = batch * count1 * PLACES
    answering = (cell + pair * count1) * PLACES + place
    wanted = torch.zeros(nobody + 1, dtype=torch.bool, device=tensor.device)
    wanted = wanted.index_fill_(0, answering.masked_fill(~found, nobody), True)[:nobody].view(-1, PLACES)
    cells1 = torch.arange(len(wanted), device=tensor.device)
    if not by_kernels:  # they choose for themselves
        cells1 = wanted.any(1).nonzero()[:, 0]
        wanted, number = wanted[cells1], torch.zeros_like(wanted[:, 0], dtype=torch.long)
        number[cells1] = torch.arange(len(cells1), device=tensor.device)
        answering = number[answering // PLACES] * PLACES + place
    backward = search_from_cells(turned(tensor), fine1, cells1, fine0, wanted=wanted, **settings)
    back = backward.index.flatten()[answering].masked_fill(~found, -1)
    return BothWays(
        columns=torch.stack([pair, index0, index1, back]),
        scores=torch.stack([score, backward.score.flatten()[answering]]),
        visited=forward.visited,
        visited_back=backward.visited,
    )


@torch.no_grad()
def turned(tensor: Tensor) -> Tensor:
    """(b n m) -> (b m n), in memory too."""
    if tensor.is_cuda:
        return tensor.transpose(1, 2).contiguous()
    result = tensor.new_empty(len(tensor), tensor.shape[2], tensor.shape[1])
    for start in range(0, tensor.shape[1], _PANEL):
        result[:, :, start : start + _PANEL] = tensor[:, start : start + _PANEL].transpose(1, 2)
    return result


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
