"""DualRC-Net: features, context, coarse tensor, fine search, refinement.

Symbols of the paper, with A for image 0 and B for image 1: `coarse` is F~ and `fine` is F^ (section 3.2). The coarse
tensor is C-bar, the correlation C after filter M, consensus N and filter M (section 3.1). The search returns the argmax
of S = S^ * U_r(S~) in both directions, and mutual nearest neighbors are matches (section 3.3). Context and refinement
are additions of this project; the preset `paper` has neither.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dualrc.config import NCNetConfig, NetworkConfig, SparseNCNetConfig
from dualrc.model.backbone import make_backbone
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.context import Context
from dualrc.model.engine import Engine
from dualrc.model.ncnet import NCNet, SparseNCNet
from dualrc.model.network import Features, Network, NetworkMatches, best_first, full_precision
from dualrc.model.refine import CellMatches, cell_centers
from dualrc.model.search import Correspondences, search_back
from dualrc.model.subpixel import Subpixel
from dualrc.pixels import FINE_STRIDE, cell_to_pixel, pixel_to_cell

# Tolerance of the round trip for dense or requested points, in fine cells.
# Where one image is larger, several cells share a counterpart, and only one of them can be its first choice.
_RETURN_CELLS = 2.0

__all__ = ["DualRCNet", "Features", "Network", "NetworkMatches", "make_network"]


class DualRCNet(Network):
    """The Dual-Resolution Correspondence Network of the paper."""

    def __init__(
        self,
        config: NetworkConfig,
        *,
        backbone: nn.Module,
        consensus: Consensus,
        subpixel: Subpixel | None,
        context: Context | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(config, backbone=backbone, consensus=consensus, engine=engine)
        self.subpixel = subpixel
        self.context = context

    def extract(self, images: Tensor) -> Features:
        """Extract features of normalized images (b 3 h w) whose sides are multiples of 16."""
        coarse, fine = self.backbone(images)
        coarse, fine = full_precision(coarse), full_precision(fine)
        # Training does not use the brightness.
        light = None if self.subpixel is None or self.training else self.engine.brightness(images)
        return Features(coarse=coarse, fine=self.engine.normalize(fine), light=light)

    def coarse_tensor(self, features0: Features, features1: Features) -> Tensor:
        """Compute the refined coarse tensor C-bar, (b h0 w0 h1 w1)."""
        valid = features0.valid, features1.valid
        return self.engine.coarse(self.in_context(features0, features1), self.consensus, valid)

    def in_context(self, features0: Features, features1: Features) -> tuple[Tensor, Tensor]:
        """Return the coarse features to correlate, conditioned on the other image if there is a context module."""
        coarse, valid = (features0.coarse, features1.coarse), (features0.valid, features1.valid)
        return coarse if self.context is None else self.engine.context(self.context, coarse, valid)

    def search(self, features0: Features, features1: Features) -> Correspondences:
        """Find the best fine cell of image 1 for each queried fine cell of image 0, and its best in image 0."""
        tensor = self.coarse_tensor(features0, features1).flatten(3).flatten(1, 2)
        return self.engine.search(tensor, features0.map(), features1.map(), self.config.fine)

    def match(self, features0: Features, features1: Features, *, top: int | None = None) -> NetworkMatches:
        """Return the mutual matches of every pair in a batch, or the best `top` of each pair."""
        found = self.search(features0, features1)
        mutual = (found.back == found.index0).flatten().nonzero()[:, 0]
        columns = found.index0, found.index1, found.score0, found.score1
        pair = mutual // found.index0.shape[1]
        matches = CellMatches(pair, *(column.flatten().index_select(0, mutual) for column in columns))
        fine, light = (features0.map(), features1.map()), None
        if features0.light is not None and features1.light is not None:
            light = features0.light, features1.light
        if self.subpixel is None:
            points = cell_centers(*fine, matches)
        else:
            points = self.engine.refine(self.subpixel, fine, light, matches)
        keep = best_first(pair, points.scores, top, len(found.index0))
        return NetworkMatches(
            pair=pair[keep], points0=points.points0[keep], points1=points.points1[keep], scores=points.scores[keep]
        )

    def match_points(self, features0: Features, features1: Features, points0: Tensor) -> tuple[Tensor, Tensor]:
        """Locate points of image 0 (n 2, network pixels) of one pair in image 1; a score of 0 means not found."""
        fine0, fine1, config = features0.map(), features1.map(), self.config.fine
        tensor = self.coarse_tensor(features0, features1).flatten(3).flatten(1, 2)
        cells0 = pixel_to_cell(points0, FINE_STRIDE)
        found = self.engine.search_points(tensor, (fine0, fine1), cells0[None], config)
        back = search_back(self.engine, tensor, fine0, found.best.flatten(1), fine1, config)
        index1, score = found.best.flatten(), found.score.flatten()
        good = (index1 >= 0) & self._returns(fine0, back.best.flatten(), cells0)
        index1 = index1.clamp(min=0)
        cells1 = fine1.coordinates(index1)
        if self.subpixel is None:
            score = score + back.score.flatten()
        else:
            pair = torch.zeros_like(index1)
            refined = self.engine.refine_points(self.subpixel, (fine0, fine1), pair, cells0, index1, score)
            cells1, score = cells1 + refined.offset, refined.logit.sigmoid()
        return cell_to_pixel(cells1, FINE_STRIDE), torch.where(good, score, 0)

    def warp(self, features0: Features, features1: Features) -> tuple[Tensor, Tensor]:
        """Locate every fine cell of image 0 of one pair in image 1 (4h 4w 2, pixels), with certainty (4h 4w)."""
        fine0, fine1 = features0.map(), features1.map()
        tensor = self.coarse_tensor(features0, features1).flatten(3).flatten(1, 2)
        found = self.engine.search(tensor, fine0, fine1, replace(self.config.fine, query_share=1.0))
        index0, index1 = found.index0[0], found.index1[0].clamp(min=0)
        good = (found.index1[0] >= 0) & self._returns(fine0, found.back[0], fine0.coordinates(index0))
        cells1, score = fine1.coordinates(index1), (found.score0[0] + found.score1[0]) / 2
        if self.subpixel is not None:
            windows = self.engine.windows(fine0, fine1, torch.zeros_like(index0), index0, index1)
            refined = self.subpixel(windows, found.score0[0])
            cells1, score = cells1 + refined.offset, refined.logit.sigmoid()
        order = index0.argsort()
        points, certainty = cell_to_pixel(cells1, FINE_STRIDE), torch.where(good, score, 0).clamp(max=1)
        return points[order].view(*fine0.fine_size, 2), certainty[order].view(fine0.fine_size)

    @staticmethod
    def _returns(fine0: FineMap, back: Tensor, cells0: Tensor) -> Tensor:
        """Return whether the fine cells `back` (n) of image 0, -1 for none, lie near the start positions (n 2)."""
        near = (fine0.coordinates(back) - cells0).abs().amax(1) <= _RETURN_CELLS
        return near & (back >= 0)


def make_network(config: NetworkConfig) -> Network:
    """Build the network that a config describes, untrained, in evaluation mode."""
    parts: dict[str, Any] = {
        "backbone": make_backbone(config.backbone),
        "consensus": Consensus(config.consensus),
    }
    if isinstance(config.ncnet, NCNetConfig):
        return NCNet(config, **parts).eval()
    if isinstance(config.ncnet, SparseNCNetConfig):
        return SparseNCNet(config, **parts).eval()
    fine = config.fine
    subpixel = Subpixel(config.backbone.fine_channels, fine.subpixel_hidden) if fine.subpixel else None
    context = None if config.context is None else Context(config.context, config.backbone.coarse_channels)
    return DualRCNet(config, **parts, subpixel=subpixel, context=context).eval()
