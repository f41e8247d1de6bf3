"""NCNet and Sparse-NCNet: matches are maxima of the coarse tensor, localized with finer features.

The cell convention is the published one: cell i of a map with stride s has its center at (i + 0.5) s - 0.5 pixels.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.config import NCNetConfig, SparseNCNetConfig, TrunkConfig
from dualrc.model.correlation import mask_cells, valid_cells
from dualrc.model.network import Features, Network, NetworkMatches, best_first, full_precision
from dualrc.model.sparse import SparseScores, nearest_correlations, sparse_consensus
from dualrc.pixels import FINE_STRIDE, cell_to_pixel, pixel_to_cell

# Tolerance of the round trip of a point, in coarse cells.
_RETURN_CELLS = 1


class BestCells(NamedTuple):
    """Best cell in the other image for every coarse cell: row-major indices, and scores above 0 if there is one."""

    # (b n0) For each cell of image 0.
    index1: Tensor
    # (b n0)
    score0: Tensor
    # (b n1) For each cell of image 1.
    index0: Tensor
    # (b n1)
    score1: Tensor


class ConsensusNet(Network):
    """Common part of NCNet and Sparse-NCNet: from cells of the coarse tensor to points."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        assert isinstance(self.config.backbone, TrunkConfig) and self.config.ncnet is not None
        self.pool = self.config.ncnet.pool
        # Stride of the fine map. The stride of the coarse tensor is `pool` times as large.
        self.stride = self.config.backbone.stride

    @abstractmethod
    def best(self, features0: Features, features1: Features) -> BestCells:
        """Return the best cell in the other image for every coarse cell."""

    def match(self, features0: Features, features1: Features, *, top: int | None = None) -> NetworkMatches:
        """Return the best cell in the other image for each cell of either image, without duplicates."""
        best = self.best(features0, features1)
        pair, index0, index1, scores = both_ways(best)
        keep = best_first(pair, scores, top, len(best.index1))
        pair, index0, index1 = pair[keep], index0[keep], index1[keep]
        points0, points1 = self._places(features0, features1, pair, index0, index1)
        return NetworkMatches(pair=pair, points0=points0, points1=points1, scores=scores[keep])

    def match_points(self, features0: Features, features1: Features, points0: Tensor) -> tuple[Tensor, Tensor]:
        """Move each point with the match of its cell, if the round trip ends in that cell or next to it."""
        best = self.best(features0, features1)
        height, width = (side // self.pool for side in features0.fine.shape[2:])
        cells = pixel_to_cell(points0, self.stride * self.pool).round().long()
        cells = torch.stack([cells[:, 0].clamp(0, width - 1), cells[:, 1].clamp(0, height - 1)], dim=1)
        index0 = cells[:, 1] * width + cells[:, 0]
        index1, score = best.index1[0, index0], best.score0[0, index0]
        back = best.index0[0, index1]
        near = (torch.stack([back % width, back // width], dim=1) - cells).abs().amax(1) <= _RETURN_CELLS
        here, there = self._places(features0, features1, torch.zeros_like(index0), index0, index1)
        return there + (points0 - here), torch.where(near, score, 0)

    def warp(self, features0: Features, features1: Features) -> tuple[Tensor, Tensor]:
        """Locate the center of each square of 4x4 pixels as a point."""
        size = [side * self.stride // FINE_STRIDE for side in features0.fine.shape[2:]]
        columns, rows = torch.meshgrid(torch.arange(size[1]), torch.arange(size[0]), indexing="xy")
        centers = cell_to_pixel(torch.stack([columns, rows], dim=2).flatten(0, 1).float(), FINE_STRIDE)
        points, score = self.match_points(features0, features1, centers.to(features0.fine.device))
        return points.unflatten(0, size), score.clamp(max=1).unflatten(0, size)

    def _places(
        self, features0: Features, features1: Features, pair: Tensor, index0: Tensor, index1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Convert matched coarse cells to points in network-input pixels, (n 2)."""
        soft = isinstance(self.config.ncnet, SparseNCNetConfig) and self.config.ncnet.soft
        fine, index = (features0.fine, features1.fine), (index0, index1)
        cells0, cells1 = self.engine.relocalize(fine, pair, index, self.pool, soft=soft)
        return cell_to_pixel(cells0, self.stride), cell_to_pixel(cells1, self.stride)


class NCNet(ConsensusNet):
    """Neighborhood Consensus Networks: a dense coarse tensor, max-pooled from a finer correlation."""

    def extract(self, images: Tensor) -> Features:
        """Extract one map that serves as coarse and fine map."""
        fine = self.engine.normalize(full_precision(self.backbone(images)))
        return Features(coarse=fine, fine=fine)

    def coarse_tensor(self, features0: Features, features1: Features) -> Tensor:
        """Correlate and max-pool, then apply mutual filter, consensus, mutual filter."""
        scores = self.engine.pooled_correlation(features0.fine, features1.fine, self.pool)
        scores = mask_cells(scores, features0.valid, features1.valid, self.stride * self.pool)
        return self.engine.filtered(scores, self.consensus)

    def best(self, features0: Features, features1: Features) -> BestCells:
        """Return the maxima of rows and columns of the coarse tensor."""
        tensor = self.coarse_tensor(features0, features1).flatten(3).flatten(1, 2)
        assert isinstance(self.config.ncnet, NCNetConfig)
        return best_cells(tensor, softmax=self.config.ncnet.softmax)


class SparseNCNet(ConsensusNet):
    """Sparse Neighborhood Consensus Networks: a sparse coarse tensor with the best correlations of each cell."""

    def extract(self, images: Tensor) -> Features:
        """Extract a fine map, and a coarse map by max-pooling each channel within a cell."""
        fine = full_precision(self.backbone(images))
        coarse = F.max_pool2d(fine, self.pool) if self.pool > 1 else fine
        return Features(coarse=self.engine.normalize(coarse), fine=self.engine.normalize(fine))

    def sparse_scores(self, features0: Features, features1: Features) -> SparseScores:
        """Return the entries of the coarse tensor after the consensus."""
        assert isinstance(self.config.ncnet, SparseNCNetConfig)
        cell = self.stride * self.pool
        valid = [None if f.valid is None else valid_cells(f.valid, cell) for f in (features0, features1)]
        coarse = features0.coarse, features1.coarse
        scores = nearest_correlations(self.engine, coarse, self.config.ncnet.neighbors, (valid[0], valid[1]))
        return sparse_consensus(scores, self.consensus)

    def coarse_tensor(self, features0: Features, features1: Features) -> Tensor:
        """Return the coarse tensor as a sparse tensor."""
        return self.sparse_scores(features0, features1).to_torch()

    def best(self, features0: Features, features1: Features) -> BestCells:
        """Return the maxima of rows and columns of the coarse tensor."""
        scores = self.sparse_scores(features0, features1)
        index1, score0 = scores.best(0)
        index0, score1 = scores.best(1)
        return BestCells(index1, score0, index0, score1)


def best_cells(tensor: Tensor, *, softmax: bool) -> BestCells:
    """Return the maxima of rows and columns of a coarse tensor (b n m); a score is 0 if no entry is positive."""
    score0, index1 = tensor.max(2)
    score1, index0 = tensor.max(1)
    # The softmax of the maximum is exp(maximum - logsumexp).
    if softmax:
        score0, score1 = (
            torch.where(score > 0, (score - tensor.logsumexp(axis)).exp(), 0)
            for score, axis in ((score0, 2), (score1, 1))
        )
    return BestCells(index1, score0.float(), index0, score1.float())


def both_ways(best: BestCells) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge matches of both directions without duplicates, with the larger score: pair, index0, index1, score (n)."""
    batch, count0 = best.index1.shape
    count1, device = best.index0.shape[1], best.index1.device
    own0 = torch.arange(count0, device=device).expand(batch, -1)
    own1 = torch.arange(count1, device=device).expand(batch, -1)
    # A match found in both directions is kept once, as a match of image 0.
    mutual0 = best.index0.gather(1, best.index1) == own0
    mutual1 = best.index1.gather(1, best.index0) == own1
    other = best.score1.gather(1, best.index1)
    score0 = torch.where(mutual0, torch.maximum(best.score0, other), best.score0)
    score1 = best.score1.masked_fill(mutual1, 0)
    pair = torch.arange(batch, device=device)[:, None].expand(-1, count0 + count1)
    columns = torch.cat([own0, best.index0], 1), torch.cat([best.index1, own1], 1), torch.cat([score0, score1], 1)
    kept = (columns[2] > 0).flatten().nonzero()[:, 0]
    pair, index0, index1, score = (column.flatten().index_select(0, kept) for column in (pair, *columns))
    return pair, index0, index1, score
