"""Modules for export: image to features, and features of two images to matches."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualrc.image import normalize_colors
from dualrc.model.align import brightness
from dualrc.model.cells import PLACES, FineMap
from dualrc.model.correlation import correlate, mutual_filter, normalize
from dualrc.model.dualrc import DualRCNet
from dualrc.model.engine import Engine
from dualrc.model.refine import CellMatches, Placed, align_both, cell_centers, place
from dualrc.onnx.consensus import SlabConsensus
from dualrc.onnx.search import in_share, search_top


class FeatureMaps(NamedTuple):
    """Outputs of the features model; the brightness exists only with sub-pixel refinement."""

    coarse: Tensor  # (1 c h/16 w/16)
    # Features of unit length.
    fine: Tensor  # (1 c h/4 w/4)
    # Brightness in float32, used to align matches.
    light: Tensor  # (1 h w)


class PairMatches(NamedTuple):
    """Outputs of the pair model: the first `count` rows are matches, best first; the other rows are zero."""

    # Points as (x, y) in pixels of the network input.
    points0: Tensor  # (top 2)
    points1: Tensor  # (top 2)
    # Uncalibrated scores.
    scores: Tensor  # (top)
    # Number of matches: (1), int64.
    count: Tensor  # type: ignore[assignment]
    # Whether the search proved that both points are the best counterparts of each other.
    exact: Tensor  # (top) bool


class FeaturesModel(nn.Module):
    """Model that computes the features of an image.

    The input is float32 RGB in 0 to 255, because rounding a resized image to integers would move matches. The model
    includes the normalization, so that callers need no constants.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, network: DualRCNet, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.backbone, self.dtype, self.lit = network.backbone.to(dtype), dtype, network.subpixel is not None
        black, white = (normalize_colors(torch.full((1, 3, 1, 1), level)) for level in (0.0, 1.0))
        self.register_buffer("offset", black.contiguous())
        self.register_buffer("scale", ((white - black) / 255).contiguous())

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of an image (1 3 h w), float32 in 0 to 255; both sides are multiples of 16."""
        images = image * self.scale + self.offset
        coarse, fine = self.backbone(images.to(self.dtype))
        maps = FeatureMaps(coarse, normalize(fine), brightness(images) if self.lit else images)
        return tuple(maps if self.lit else maps[:2])


class PairModel(nn.Module):
    """Model that finds the best matches from the features of two images."""

    def __init__(self, network: DualRCNet, top: int) -> None:
        super().__init__()
        self.config, self.top = network.config.fine, top
        self.context, self.subpixel = network.context, network.subpixel
        self.consensus = SlabConsensus(network.consensus)
        self.engine = Engine()

    def forward(self, *maps: Tensor) -> PairMatches:
        """Match the maps of image 0 and image 1, given in this order as the features model returns them."""
        half = len(maps) // 2
        (coarse0, fine0, *light0), (coarse1, fine1, *light1) = maps[:half], maps[half:]
        map0, map1 = FineMap.of(fine0.float()), FineMap.of(fine1.float())
        tensor = self.coarse_tensor(coarse0.float(), coarse1.float())
        matches, exact = self.search(tensor, map0, map1)
        if self.subpixel is None:
            centers = cell_centers(map0, map1, matches)
            return self._best(matches.pair, exact, centers.scores, centers.points0, centers.points1)[0]
        placed = place(self.engine, self.subpixel, (map0, map1), matches)
        points = placed.points0, placed.points1
        best, motions = self._best(matches.pair, exact, placed.scores, *points, placed.motion0, placed.motion1)
        # Scores do not depend on the alignment, so only the best matches are aligned.
        chosen = Placed(best.points0, best.points1, best.scores, *motions)
        pair = torch.zeros_like(best.exact, dtype=torch.long)
        moved0, moved1 = align_both(self.engine, (light0[0], light1[0]), pair, chosen)
        return best._replace(points0=moved0, points1=moved1)

    def coarse_tensor(self, coarse0: Tensor, coarse1: Tensor) -> Tensor:
        """Return the filtered coarse tensor (n m) of maps (1 c h0 w0) and (1 c h1 w1)."""
        if self.context is not None:
            # Attend as for images of different sizes: the graph must not depend on whether two sizes are equal.
            coarse0, coarse1 = self.context.attend([coarse0, coarse1], [None, None])
        scores = mutual_filter(correlate(coarse0, coarse1))
        scores = mutual_filter(self.consensus(scores[0])[None])
        return scores[0].flatten(2).flatten(0, 1)

    def search(self, tensor: Tensor, fine0: FineMap, fine1: FineMap) -> tuple[CellMatches, Tensor]:
        """Return mutual matches and whether they are exact; the last row is always empty (pair -1)."""
        there = search_top(tensor, fine0, fine1, self.config)
        back = search_top(tensor.transpose(0, 1).contiguous(), fine1, fine0, self.config)
        cells0, cells1 = (torch.arange(fine.cells, device=tensor.device) for fine in (fine0, fine1))
        index0, index1 = fine0.members(cells0).flatten(), fine1.members(cells1).flatten()
        position0 = torch.arange(index0.shape[0], device=tensor.device)
        score1, exact1 = back.score[there.position], back.exact[there.position]
        mutual = (back.position[there.position] == position0) & (there.score > 0) & (score1 > 0)
        if self.config.query_share < 1:
            mutual = mutual & in_share(tensor, self.config.query_share)[position0 // PLACES]
        rows = torch.cat([mutual.nonzero()[:, 0], torch.zeros(1, dtype=torch.long, device=tensor.device)])
        pair = torch.zeros_like(rows)
        pair = torch.cat([pair[1:], pair[:1] - 1])
        matches = CellMatches(pair, index0[rows], index1[there.position[rows]], there.score[rows], score1[rows])
        return matches, (there.exact & exact1)[rows]

    def _best(
        self, pair: Tensor, exact: Tensor, scores: Tensor, points0: Tensor, points1: Tensor, *more: Tensor
    ) -> tuple[PairMatches, list[Tensor]]:
        """Return the best `top` matches, padded with zeros, and the same rows of further columns."""
        known = torch.cat([scores.masked_fill(pair < 0, -1), scores.new_full((self.top,), -1)])
        best, row = known.topk(self.top)
        found = best >= 0
        row = row.clamp(max=scores.shape[0] - 1)

        def chosen(column: Tensor) -> Tensor:
            return column[row] * found.view(-1, *[1] * (column.ndim - 1)).to(column.dtype)

        matches = PairMatches(
            points0=chosen(points0),
            points1=chosen(points1),
            scores=best.clamp(min=0),
            count=found.sum(0, keepdim=True),
            exact=exact[row] & found,
        )
        return matches, [chosen(column) for column in more]
