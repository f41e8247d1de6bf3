"""The operations in torch, some at a time: any device, any floating-point type, little memory.

The search scores few candidates. The score of a candidate is its coarse score times a fine score that is at most 1. So
coarse cells are visited by falling coarse score until the best product found exceeds all that the rest could reach.
The full fine correlation is never held, and the result is its argmax all the same.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dualrc.config import FineConfig
from dualrc.model import refine, relocalize, subpixel, support
from dualrc.model.align import align
from dualrc.model.cells import PLACES, FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import EPSILON, correlate, mask_cells, max_pool
from dualrc.model.engine import Engine
from dualrc.model.search import TINY, Found, Queries, cell_queries, point_queries, sharpen
from dualrc.model.subpixel import Offsets, Subpixel, WindowPairs
from dualrc.model.support import Support
from dualrc.ops import memory

# Rounding may lift the cosine of unit vectors above 1 by so much; bounds allow for it.
EXCESS = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}
FIRST_BLOCK = 8  # coarse cells visited before the bound is first checked
_SHORTLIST = 3  # times as many are read exactly, to choose those
_WIDEN, _GPU_WIDEN = 2, 4  # times as many are visited where the bound did not hold; on a GPU more work is cheap
_CPU_VALUES = 2**22  # values of the search held at a time by each thread of a CPU, near its cache
_FILTER_VALUES = 2**20  # scores filtered together, which stay in a CPU's cache
# Matches whose windows of features, neighbors or brightness are held together; on a CPU they stay near its cache.
_WINDOWS, _GPU_WINDOWS = 2**11, 2**14
_SUPPORTS, _GPU_SUPPORTS = 2**10, 2**18
_ALIGNMENTS, _GPU_ALIGNMENTS = 2**10, 2**17


class TorchEngine(Engine):
    """Torch operations on parts that fit into the working memory."""

    name = "torch"

    def coarse(
        self, coarse: tuple[Tensor, Tensor], consensus: Consensus, valid: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """Correlation, filters and consensus; without gradients in place and some rows at a time."""
        if torch.is_grad_enabled():
            return super().coarse(coarse, consensus, valid)
        return self.filtered(mask_cells(correlate(*(features.float() for features in coarse)), *valid), consensus)

    def filtered(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Filters and consensus; without gradients in place and some rows at a time."""
        if torch.is_grad_enabled():
            return super().filtered(scores, consensus)
        filter_in_place(scores)
        result = self.consensus(scores, consensus)
        filter_in_place(result)
        return result

    def pooled_correlation(self, fine0: Tensor, fine1: Tensor, pool: int) -> Tensor:
        """Some rows of image 0 at a time, each pooled at once: the whole correlation is never held."""
        if torch.is_grad_enabled():
            return super().pooled_correlation(fine0, fine1, pool)
        height, width = (side // pool for side in fine0.shape[2:])
        size1 = fine1.shape[2] // pool, fine1.shape[3] // pool
        result = fine0.new_empty((len(fine0), height, width, *size1), dtype=torch.float32)
        if fine0.dtype != torch.float16:  # products of which are added in float32 and rounded once
            fine0, fine1 = fine0.float(), fine1.float()
        # Two copies of a part: the products, and what pooling one image makes of them.
        row = 2 * len(fine0) * pool * fine0.shape[3] * fine1.shape[2] * fine1.shape[3]
        rows = max(1, memory.working_values() // max(1, row))
        for start in range(0, height, rows):
            part = fine0[:, :, start * pool : min(start + rows, height) * pool]
            result[:, start : start + rows] = max_pool(torch.einsum("bchw,bcij->bhwij", part, fine1), pool)
        return result

    def relocalize(
        self, fine: tuple[Tensor, Tensor], pair: Tensor, index: tuple[Tensor, Tensor], pool: int, *, soft: bool
    ) -> tuple[Tensor, Tensor]:
        """Some matches at a time."""

        def move(pair: Tensor, index0: Tensor, index1: Tensor) -> tuple[Tensor, Tensor]:
            return relocalize.relocalize(fine, pair, (index0, index1), pool, soft=soft)

        # Features of the cells of both images, as they are and in float32.
        values = 4 * fine[0].shape[1] * max(pool**2, 9 * soft)
        rows = max(1, memory.working_values() // values)
        places = in_parts(move, min(rows, _WINDOWS), min(rows, _GPU_WINDOWS), pair, *index)
        return places[0], places[1]

    def nearest(self, rows: Tensor, others: Tensor, count: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Some rows at a time."""
        some = max(1, memory.working_values() // max(1, 2 * len(rows) * others.shape[1]))
        parts = [super(TorchEngine, self).nearest(part, others, count, valid) for part in rows.split(some, dim=1)]
        return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts], dim=1)

    def consensus(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """The 4D convolutions on slabs of image 0's rows, with as many more rows as the kernels reach."""
        halo = sum(weight.shape[2] // 2 for weight in consensus.weights)
        height = scores.shape[1]
        per_row = max(1, scores[:, 0].numel() * memory.consensus_values(consensus))
        rows = max(1, min(height, memory.working_values() // per_row - 2 * halo))
        if rows == height:
            return consensus(scores)
        result = torch.empty_like(scores)
        for start in range(0, height, rows):
            stop = min(start + rows, height)
            first, last = max(start - halo, 0), min(stop + halo, height)
            result[:, start:stop] = consensus(scores[:, first:last])[:, start - first : stop - first]
        return result

    def search_cells(
        self,
        tensor: Tensor,
        fine0: FineMap,
        cells0: Tensor,
        fine1: FineMap,
        config: FineConfig,
        *,
        wanted: Tensor | None = None,
    ) -> Found:
        """The argmax of the full score map, from the cells with a wanted query alone."""
        tensor, sums = rows_of(tensor)
        if wanted is None:
            queries = cell_queries(fine0, cells0, config.reading)
            return self.search_queries(tensor, sums, queries, fine1, config.temperature)
        found = Found(
            torch.full(wanted.shape, -1, device=tensor.device),
            torch.zeros(wanted.shape, device=tensor.device),
            torch.zeros(wanted.shape[:2], dtype=torch.long, device=tensor.device),
        )
        for pair, asked in enumerate(wanted):  # each pair has another number of them
            groups, this = asked.any(1).nonzero()[:, 0], slice(pair, pair + 1)
            own = FineMap(features=fine0.features[this], height=fine0.height, width=fine0.width)
            valid = None if fine1.valid is None else fine1.valid[this]
            other = FineMap(features=fine1.features[this], height=fine1.height, width=fine1.width, valid=valid)
            queries = cell_queries(own, cells0[this, groups], config.reading)
            part = self.search_queries(
                tensor[this], sums[this], queries, other, config.temperature, wanted=asked[None, groups]
            )
            for whole, some in zip(found, part, strict=True):
                whole[pair, groups] = some[0].to(whole.dtype)
        return found

    def search_points(
        self, tensor: Tensor, fine0: FineMap, points0: Tensor, fine1: FineMap, config: FineConfig
    ) -> Found:
        """The same from points, some at a time."""
        tensor, sums = rows_of(tensor)

        def find(points: Tensor) -> Found:
            queries = point_queries(fine0, points.transpose(0, 1), config.reading)
            found = self.search_queries(tensor, sums, queries, fine1, config.temperature)
            return Found(*(column.transpose(0, 1) for column in found))

        parts = in_parts(find, _WINDOWS, _GPU_WINDOWS, points0.transpose(0, 1))
        return Found(*(column.transpose(0, 1) for column in parts))

    def search_queries(
        self,
        tensor: Tensor,
        sums: Tensor,
        queries: Queries,
        fine: FineMap,
        temperature: float,
        *,
        wanted: Tensor | None = None,
    ) -> Found:
        """The best fine cell of every query (b g p); `sums` are those of the rows of `tensor` (b n m)."""
        search = _Search(tensor, sums, queries, fine, temperature, wanted)
        return search.run()

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        """Windows around cells, some matches at a time."""

        def find(pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
            windows = (subpixel.cell_windows(fine, pair, index) for fine, index in ((fine0, index0), (fine1, index1)))
            return subpixel.pair_windows(*windows)

        return WindowPairs(*in_parts(find, _WINDOWS, _GPU_WINDOWS, pair, index0, index1))

    def support(
        self,
        index: Tensor,
        here: Tensor,
        there: Tensor,
        confidence: Tensor,
        pair: Tensor,
        shape: tuple[int, int, int],
    ) -> Support:
        """Support from neighbors, some matches at a time."""
        layout = support.lay_out(index, here, there, confidence, pair, shape)

        def find(at: Tensor, known: Tensor) -> Support:
            return support.explain(layout, at, known.T)

        return Support(*in_parts(find, _SUPPORTS, _GPU_SUPPORTS, layout.at, layout.known.T))

    def align(
        self, light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
    ) -> Tensor:
        """Alignment by brightness, some matches at a time."""

        def find(*columns: Tensor) -> tuple[Tensor]:
            return (align(light0, light1, *columns),)

        return in_parts(find, _ALIGNMENTS, _GPU_ALIGNMENTS, pair, points0, points1, motion)[0]

    def refine_points(
        self,
        subpixel: Subpixel,
        fine0: FineMap,
        fine1: FineMap,
        pair: Tensor,
        points0: Tensor,
        index1: Tensor,
        score: Tensor,
    ) -> Offsets:
        """Offsets of points, some at a time."""

        def find(*columns: Tensor) -> Offsets:
            return refine.refine_points(subpixel, fine0, fine1, *columns)

        return Offsets(*in_parts(find, _WINDOWS, _GPU_WINDOWS, pair, points0, index1, score))


def in_parts(function: Callable[..., Any], on_cpu: int, on_gpu: int, *columns: Tensor) -> tuple[Tensor, ...]:
    """What a function of columns gives, called with so many rows of them at a time."""
    rows = on_gpu if columns[0].is_cuda else on_cpu
    if len(columns[0]) <= rows:
        return tuple(function(*columns))
    parts = [function(*some) for some in zip(*(column.split(rows) for column in columns), strict=True)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def filter_in_place(scores: Tensor) -> None:
    """The mutual filter, some rows at a time."""
    flat = scores.flatten(3).flatten(1, 2)  # b n m
    best0 = flat.amax(1, keepdim=True) + EPSILON
    best1 = flat.amax(2, keepdim=True) + EPSILON
    rows = max(1, _FILTER_VALUES // max(1, len(flat) * flat.shape[2]))
    for start in range(0, flat.shape[1], rows):
        some = slice(start, start + rows)
        own = flat[:, some]
        torch.mul((own / best0).mul_(own), own / best1[:, some], out=own)


def rows_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The coarse tensor (b n m) with whole rows in memory, and their sums, (b n)."""
    if not tensor.is_contiguous() and not tensor.is_cuda and tensor.transpose(1, 2).is_contiguous():
        result = tensor.new_empty(tensor.shape)
        for start in range(0, tensor.shape[2], 64):  # a quarter of the time of one copy of all, by the cache
            result[:, :, start : start + 64] = tensor[:, :, start : start + 64]
        tensor = result
    return tensor.contiguous(), tensor.sum(2, dtype=torch.float32)


class _Search:
    """One search; groups of queries are open until no cell that was not visited could hold a better answer."""

    def __init__(
        self,
        tensor: Tensor,
        sums: Tensor,
        queries: Queries,
        fine: FineMap,
        temperature: float,
        wanted: Tensor | None,
    ) -> None:
        self.tensor, self.sums, self.fine, self.temperature = tensor, sums, fine, temperature
        self.shape = queries.features.shape[:3]
        self.features = queries.features.flatten(0, 1)  # n p c, groups of all pairs
        self.pair = torch.arange(self.shape[0], device=tensor.device).repeat_interleave(self.shape[1])
        self.rows = queries.rows.flatten(0, 1) + self.pair[:, None] * tensor.shape[1]  # n m
        self.weights = queries.weights.flatten(0, 1).transpose(1, 2)  # n m p, or 1 m p
        self.wanted = None if wanted is None else wanted.flatten(0, 1)
        groups = len(self.features)
        self.index = torch.full((groups, self.shape[2]), -1, device=tensor.device)
        self.score = torch.zeros(groups, self.shape[2], device=tensor.device)
        self.visited = torch.zeros(groups, dtype=torch.long, device=tensor.device)

    @torch.no_grad()
    def run(self) -> Found:
        groups, places, channels = self.features.shape
        candidates = self.tensor.shape[2]
        values = memory.working_values()
        if not self.tensor.is_cuda:
            values = min(values, _CPU_VALUES * torch.get_num_threads())
        still_open = torch.arange(groups, device=self.tensor.device)
        block = min(FIRST_BLOCK, candidates)
        while len(still_open):
            shortlist = min(_SHORTLIST * block, candidates)
            per_group = 3 * candidates + 3 * places * shortlist + block * PLACES * (channels + 2 * places)
            parts = still_open.split(max(1, values // per_group))
            still_open = torch.cat([ids[~self._visit(ids, block)] for ids in parts])
            block = min((_GPU_WIDEN if self.tensor.is_cuda else _WIDEN) * block, candidates)
        return Found(self.index.view(self.shape), self.score.view(self.shape), self.visited.view(self.shape[:2]))

    def _visit(self, ids: Tensor, block: int) -> Tensor:
        """Score the `block` most promising cells for these groups; true where no other cell can do better."""
        fine, pair, rows = self.fine, self.pair[ids], self.rows[ids]
        weights = self.weights[0] if len(self.weights) == 1 else self.weights[ids]  # (g) m p
        total = torch.matmul(self.sums.flatten()[rows][:, None], weights) + TINY  # g 1 p
        limits = self._limits(rows)  # g candidates
        if fine.valid is not None:
            empty = ~fine.valid[:, fine.members(torch.arange(fine.cells, device=ids.device))].any(2)  # b candidates
            limits.masked_fill_(empty[pair], 0)
        # What the cheap limit leaves is read exactly, and the best of that are visited.
        candidates = limits.shape[1]
        limit, cells = limits.topk(min(_SHORTLIST * block + 1, candidates), dim=1)
        rest = limit[:, _SHORTLIST * block] if limit.shape[1] > _SHORTLIST * block else torch.zeros_like(limit[:, 0])
        cells = cells[:, : _SHORTLIST * block]
        read = self.tensor.flatten()[rows[:, None] * candidates + cells[:, :, None]].float()  # g s m
        coarse = torch.matmul(read, weights) / total  # g s p
        bounds = coarse.amax(2).masked_fill_(limit[:, : cells.shape[1]] <= 0, 0)
        bounds, order = bounds.topk(min(block + 1, cells.shape[1]))
        if bounds.shape[1] > block:
            rest = torch.maximum(rest, bounds[:, block])
        order = order[:, :block]
        cells = cells.gather(1, order)
        coarse = coarse.gather(1, order[:, :, None].expand(-1, -1, coarse.shape[2]))  # g k p

        members = fine.members(cells)  # g k 16
        candidate = fine.gather(pair, members)  # g k 16 c
        cosine = torch.bmm(candidate.flatten(1, 2), self.features[ids].transpose(1, 2)).float()
        cosine = cosine.unflatten(1, (-1, PLACES))  # g k 16 p
        if fine.valid is not None:
            cosine = cosine.masked_fill(~fine.valid[pair[:, None, None], members][..., None], -math.inf)
        best = cosine.amax(2)  # within a cell the coarse score is the same
        score = coarse * (sharpen(best, self.temperature) if self.temperature > 0 else best.clamp(min=0))  # g k p
        highest = score.amax(1)  # g p
        # Among equals the first in the image wins, whatever the order of the visit.
        equal = (score == highest[:, None])[:, :, None] & (cosine == best[:, :, None])  # g k 16 p
        index = torch.where(equal, members[..., None], torch.iinfo(members.dtype).max).flatten(1, 2).amin(1)
        positive = highest > 0
        self.index[ids] = index.masked_fill(~positive, -1)
        self.score[ids] = highest.masked_fill(~positive, 0)
        self.visited.index_fill_(0, ids, block)
        rest = rest[:, None] * slack(candidate.dtype, self.temperature)
        # A query that reads nothing, or only zeros, has nothing to find, whatever its group's bound.
        certain = (highest > rest) | (rest <= 0) | (total[:, 0] <= TINY)
        if self.wanted is not None:
            certain |= ~self.wanted[ids]
        return certain.all(1)

    def _limits(self, rows: Tensor) -> Tensor:
        """What no query that mixes these rows (g m) of the coarse tensor can exceed: (g candidates).

        A query reads sum(w t) / sum(w s) over its rows t with sums s, and that is no more than the largest t / s.
        """
        tensor, sums = self.tensor.flatten(0, 1), self.sums.flatten()
        scale = ((1 + 1e-5) / sums).masked_fill_(sums <= 0, 0)  # and a little for rounding
        limits = tensor.index_select(0, rows[:, 0]).float() * scale[rows[:, 0], None]
        for row in rows.T[1:]:
            torch.maximum(limits, tensor.index_select(0, row).float().mul_(scale[row, None]), out=limits)
        return limits


def slack(dtype: torch.dtype, temperature: float) -> float:
    """The factor by which rounding may lift a candidate above its bound."""
    return math.exp(EXCESS[dtype] / temperature) if temperature > 0 else 1 + EXCESS[dtype]
