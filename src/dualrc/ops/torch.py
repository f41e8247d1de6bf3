"""The operations in torch, in chunks: any device, any floating-point type, little memory.

The search scores few candidates. A score is a coarse score times a fine score, and the fine score is at most 1. The
search therefore visits coarse cells by descending coarse score. It stops when the best product exceeds the bound of all
remaining cells. The full fine correlation S is never held, yet the result is its argmax.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualrc.config import FineConfig
from dualrc.model import support
from dualrc.model.cells import PLACES, FineMap, FineMapPair, TensorPair
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import EPSILON, max_pool, mutual_filter
from dualrc.model.engine import Engine
from dualrc.model.search import TINY, Found, Queries, cell_queries, point_queries, sharpen
from dualrc.model.subpixel import Offsets, Subpixel, WindowPairs
from dualrc.model.support import DirectedMatches, Support
from dualrc.ops import memory

# Largest amount by which rounding may lift the cosine of unit vectors above 1. Bounds allow for it.
EXCESS = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}
# Coarse cells visited before the bound is checked for the first time.
FIRST_BLOCK = 8
# Size of the shortlist, as a multiple of the block. Exact scores of the shortlist select the block.
_SHORTLIST = 3
# Growth of the block if the bound did not hold. A GPU has compute to spare for larger blocks.
_WIDEN, _GPU_WIDEN = 2, 4
# Values that each CPU thread holds in the search, about the size of its cache.
_CPU_VALUES = 2**22
# Scores filtered in one chunk, which fits into the cache of a CPU.
_FILTER_VALUES = 2**20
# Matches per chunk for windows of features, neighbors and brightness. On a CPU the chunks fit into the cache.
_WINDOWS, _GPU_WINDOWS = 2**11, 2**14
_SUPPORTS, _GPU_SUPPORTS = 2**10, 2**18
_ALIGNMENTS, _GPU_ALIGNMENTS = 2**10, 2**17


class CoarseRows(NamedTuple):
    """A coarse tensor with the querying image first."""

    # (b n m) Contiguous.
    tensor: Tensor
    # (b n) Sums of its rows.
    sums: Tensor


class TorchEngine(Engine):
    """Torch operations in chunks that fit into the workspace."""

    name = "torch"

    def filtered(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Filter and apply the consensus; without gradients, in place and in chunks of rows."""
        if torch.is_grad_enabled():
            # Kernels of other engines have no gradients.
            return mutual_filter(consensus(mutual_filter(scores)))
        filter_in_place(scores)
        result = self.consensus(scores, consensus)
        filter_in_place(result)
        return result

    def pooled_correlation(self, fine0: Tensor, fine1: Tensor, pool: int) -> Tensor:
        """Correlate and pool in chunks of rows of image 0, so that the full correlation is never held."""
        if torch.is_grad_enabled():
            return super().pooled_correlation(fine0, fine1, pool)
        height, width = (side // pool for side in fine0.shape[2:])
        size1 = fine1.shape[2] // pool, fine1.shape[3] // pool
        result = fine0.new_empty((len(fine0), height, width, *size1), dtype=torch.float32)
        # float16 products are summed in float32 and rounded once.
        if fine0.dtype != torch.float16:
            fine0, fine1 = fine0.float(), fine1.float()
        # A chunk has two copies: the products, and the result of pooling one image.
        row = 2 * len(fine0) * pool * fine0.shape[3] * fine1.shape[2] * fine1.shape[3]
        rows = max(1, memory.working_values() // max(1, row))
        for start in range(0, height, rows):
            part = fine0[:, :, start * pool : min(start + rows, height) * pool]
            result[:, start : start + rows] = max_pool(torch.einsum("bchw,bcij->bhwij", part, fine1), pool)
        return result

    def relocalize(
        self, fine: TensorPair, pair: Tensor, index: TensorPair, pool: int, *, soft: bool
    ) -> tuple[Tensor, Tensor]:
        """Relocalize in chunks of matches."""
        relocalize = super().relocalize

        def move(pair: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:
            return relocalize(fine, pair, (index[0], index[1]), pool, soft=soft)

        # Features of the cells of both images, in their own type and in float32.
        values = 4 * fine[0].shape[1] * max(pool**2, 9 * soft)
        rows = max(1, memory.working_values() // values)
        places = in_parts(move, min(rows, _WINDOWS), min(rows, _GPU_WINDOWS), pair, *index)
        return places[0], places[1]

    def nearest(self, rows: Tensor, others: Tensor, count: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Search in chunks of rows."""
        some = max(1, memory.working_values() // max(1, 2 * len(rows) * others.shape[1]))
        parts = [super(TorchEngine, self).nearest(part, others, count, valid) for part in rows.split(some, dim=1)]
        return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts], dim=1)

    def consensus(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Apply the 4D convolutions to slabs of rows of image 0, with a halo as wide as the kernels reach."""
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
        self, tensor: Tensor, fine: FineMapPair, cells0: Tensor, config: FineConfig, *, wanted: Tensor | None = None
    ) -> Found:
        """Return the argmax of the full score map, only for cells with a wanted query."""
        coarse, (fine0, fine1) = rows_of(tensor), fine
        if wanted is None:
            queries = cell_queries(fine0, cells0, config.reading)
            return self.search_queries(coarse, queries, fine1, config.temperature)
        found = Found(
            torch.full(wanted.shape, -1, device=tensor.device),
            torch.zeros(wanted.shape, device=tensor.device),
            torch.zeros(wanted.shape[:2], dtype=torch.long, device=tensor.device),
        )
        # Pairs differ in the number of cells with a wanted query.
        for pair, asked in enumerate(wanted):
            groups, this = asked.any(1).nonzero()[:, 0], slice(pair, pair + 1)
            own = FineMap(features=fine0.features[this], height=fine0.height, width=fine0.width)
            valid = None if fine1.valid is None else fine1.valid[this]
            other = FineMap(features=fine1.features[this], height=fine1.height, width=fine1.width, valid=valid)
            queries = cell_queries(own, cells0[this, groups], config.reading)
            some = CoarseRows(coarse.tensor[this], coarse.sums[this])
            part = self.search_queries(some, queries, other, config.temperature, wanted=asked[None, groups])
            for whole, column in zip(found, part, strict=True):
                whole[pair, groups] = column[0].to(whole.dtype)
        return found

    def search_points(self, tensor: Tensor, fine: FineMapPair, points0: Tensor, config: FineConfig) -> Found:
        """Search from arbitrary points in chunks."""
        coarse = rows_of(tensor)

        def find(points: Tensor) -> Found:
            queries = point_queries(fine[0], points.transpose(0, 1), config.reading)
            found = self.search_queries(coarse, queries, fine[1], config.temperature)
            return Found(*(column.transpose(0, 1) for column in found))

        parts = in_parts(find, _WINDOWS, _GPU_WINDOWS, points0.transpose(0, 1))
        return Found(*(column.transpose(0, 1) for column in parts))

    def search_queries(
        self, coarse: CoarseRows, queries: Queries, fine: FineMap, temperature: float, *, wanted: Tensor | None = None
    ) -> Found:
        """Return the best fine cell of every query (b g p)."""
        return _Search(coarse, queries, fine, temperature, wanted).run()

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        """Return windows around cells in chunks of matches."""
        find = partial(super().windows, fine0, fine1)
        return WindowPairs(*in_parts(find, _WINDOWS, _GPU_WINDOWS, pair, index0, index1))

    def support(self, matches: DirectedMatches) -> Support:
        """Compute the support of neighbors in chunks of matches."""
        layout = support.lay_out(matches)

        def find(at: Tensor, known: Tensor) -> Support:
            return support.explain(layout, at, known.T)

        return Support(*in_parts(find, _SUPPORTS, _GPU_SUPPORTS, layout.at, layout.known.T))

    def align(
        self, light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
    ) -> Tensor:
        """Align by brightness in chunks of matches."""
        find = partial(super().align, light0, light1)
        columns = pair, points0, points1, motion
        return in_parts(lambda *some: (find(*some),), _ALIGNMENTS, _GPU_ALIGNMENTS, *columns)[0]

    def refine_points(
        self, subpixel: Subpixel, fine: FineMapPair, pair: Tensor, points0: Tensor, index1: Tensor, score: Tensor
    ) -> Offsets:
        """Refine points in chunks."""
        find = partial(super().refine_points, subpixel, fine)
        return Offsets(*in_parts(find, _WINDOWS, _GPU_WINDOWS, pair, points0, index1, score))


def in_parts(function: Callable[..., Any], on_cpu: int, on_gpu: int, *columns: Tensor) -> tuple[Tensor, ...]:
    """Call a function on chunks of rows of the columns, and concatenate the results."""
    rows = on_gpu if columns[0].is_cuda else on_cpu
    if len(columns[0]) <= rows:
        return tuple(function(*columns))
    parts = [function(*some) for some in zip(*(column.split(rows) for column in columns), strict=True)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def filter_in_place(scores: Tensor) -> None:
    """Apply the mutual filter in chunks of rows."""
    # (b n m)
    flat = scores.flatten(3).flatten(1, 2)
    best0 = flat.amax(1, keepdim=True) + EPSILON
    best1 = flat.amax(2, keepdim=True) + EPSILON
    rows = max(1, _FILTER_VALUES // max(1, len(flat) * flat.shape[2]))
    for start in range(0, flat.shape[1], rows):
        some = slice(start, start + rows)
        own = flat[:, some]
        torch.mul((own / best0).mul_(own), own / best1[:, some], out=own)


def rows_of(tensor: Tensor) -> CoarseRows:
    """Return the coarse tensor (b n m) with contiguous rows."""
    if not tensor.is_contiguous() and not tensor.is_cuda and tensor.transpose(1, 2).is_contiguous():
        result = tensor.new_empty(tensor.shape)
        # Copying in blocks takes a quarter of the time of one copy, because of the cache.
        for start in range(0, tensor.shape[2], 64):
            result[:, :, start : start + 64] = tensor[:, :, start : start + 64]
        tensor = result
    return CoarseRows(tensor.contiguous(), tensor.sum(2, dtype=torch.float32))


class _Search:
    """One search; a group of queries stays open until no unvisited cell could hold a better answer."""

    def __init__(
        self, coarse: CoarseRows, queries: Queries, fine: FineMap, temperature: float, wanted: Tensor | None
    ) -> None:
        self.tensor, self.sums, self.fine, self.temperature = *coarse, fine, temperature
        self.shape = queries.features.shape[:3]
        # (n p c) Groups of all pairs.
        self.features = queries.features.flatten(0, 1)
        self.pair = torch.arange(self.shape[0], device=self.tensor.device).repeat_interleave(self.shape[1])
        # (n m)
        self.rows = queries.rows.flatten(0, 1) + self.pair[:, None] * self.tensor.shape[1]
        # (n m p) or (1 m p)
        self.weights = queries.weights.flatten(0, 1).transpose(1, 2)
        self.wanted = None if wanted is None else wanted.flatten(0, 1)
        groups = len(self.features)
        self.index = torch.full((groups, self.shape[2]), -1, device=self.tensor.device)
        self.score = torch.zeros(groups, self.shape[2], device=self.tensor.device)
        self.visited = torch.zeros(groups, dtype=torch.long, device=self.tensor.device)

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
        """Score the `block` most promising cells for these groups; return True where no other cell can be better."""
        fine, pair, rows = self.fine, self.pair[ids], self.rows[ids]
        # (g m p) or (m p)
        weights = self.weights[0] if len(self.weights) == 1 else self.weights[ids]
        # (g 1 p)
        total = torch.matmul(self.sums.flatten()[rows][:, None], weights) + TINY
        # (g candidates)
        limits = self._limits(rows)
        if fine.valid is not None:
            # (b candidates)
            empty = ~fine.valid[:, fine.members(torch.arange(fine.cells, device=ids.device))].any(2)
            limits.masked_fill_(empty[pair], 0)
        # The cheap bound selects a shortlist. Exact coarse scores of the shortlist select the cells to visit.
        candidates = limits.shape[1]
        limit, cells = limits.topk(min(_SHORTLIST * block + 1, candidates), dim=1)
        rest = limit[:, _SHORTLIST * block] if limit.shape[1] > _SHORTLIST * block else torch.zeros_like(limit[:, 0])
        cells = cells[:, : _SHORTLIST * block]
        # (g s m)
        read = self.tensor.flatten()[rows[:, None] * candidates + cells[:, :, None]].float()
        # (g s p)
        coarse = torch.matmul(read, weights) / total
        bounds = coarse.amax(2).masked_fill_(limit[:, : cells.shape[1]] <= 0, 0)
        bounds, order = bounds.topk(min(block + 1, cells.shape[1]))
        if bounds.shape[1] > block:
            rest = torch.maximum(rest, bounds[:, block])
        order = order[:, :block]
        cells = cells.gather(1, order)
        # (g k p)
        coarse = coarse.gather(1, order[:, :, None].expand(-1, -1, coarse.shape[2]))

        # (g k 16)
        members = fine.members(cells)
        # (g k 16 c)
        candidate = fine.gather(pair, members)
        cosine = torch.bmm(candidate.flatten(1, 2), self.features[ids].transpose(1, 2)).float()
        # (g k 16 p)
        cosine = cosine.unflatten(1, (-1, PLACES))
        if fine.valid is not None:
            cosine = cosine.masked_fill(~fine.valid[pair[:, None, None], members][..., None], -math.inf)
        # The coarse score is constant within a cell.
        best = cosine.amax(2)
        # (g k p)
        score = coarse * (sharpen(best, self.temperature) if self.temperature > 0 else best.clamp(min=0))
        # (g p)
        highest = score.amax(1)
        # Ties go to the first cell in row-major order, independent of the order of the visits: (g k 16 p).
        equal = (score == highest[:, None])[:, :, None] & (cosine == best[:, :, None])
        index = torch.where(equal, members[..., None], torch.iinfo(members.dtype).max).flatten(1, 2).amin(1)
        positive = highest > 0
        self.index[ids] = index.masked_fill(~positive, -1)
        self.score[ids] = highest.masked_fill(~positive, 0)
        self.visited.index_fill_(0, ids, block)
        rest = rest[:, None] * slack(candidate.dtype, self.temperature)
        # A query that reads only zeros has no answer, whatever the bound of its group.
        certain = (highest > rest) | (rest <= 0) | (total[:, 0] <= TINY)
        if self.wanted is not None:
            certain |= ~self.wanted[ids]
        return certain.all(1)

    def _limits(self, rows: Tensor) -> Tensor:
        """Return upper bounds for every query that mixes these rows (g m) of the coarse tensor: (g candidates).

        A query reads sum(w t) / sum(w s) over its rows t with sums s. This is at most the largest t / s.
        """
        tensor, sums = self.tensor.flatten(0, 1), self.sums.flatten()
        # The factor allows for rounding.
        scale = ((1 + 1e-5) / sums).masked_fill_(sums <= 0, 0)
        limits = tensor.index_select(0, rows[:, 0]).float() * scale[rows[:, 0], None]
        for row in rows.T[1:]:
            torch.maximum(limits, tensor.index_select(0, row).float().mul_(scale[row, None]), out=limits)
        return limits


def slack(dtype: torch.dtype, temperature: float) -> float:
    """Return the factor by which rounding may lift a candidate above its bound."""
    return math.exp(EXCESS[dtype] / temperature) if temperature > 0 else 1 + EXCESS[dtype]
