"""The assembly: pictures to features, features to the refined coarse tensor, both to matches."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import CompactConfig, NetworkConfig
from dualrc.kernels import native, usable
from dualrc.kernels.search import supported
from dualrc.model import trace
from dualrc.model.align import align, brightness
from dualrc.model.backbone import make_backbone
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import correlate, normalize
from dualrc.model.fine import (
    FIRST_BLOCK,
    RATIO,
    BothWays,
    FineMap,
    both_ways,
    cell_queries,
    point_queries,
    row_sums,
    search,
    turned,
)
from dualrc.model.record import Recorder
from dualrc.model.subpixel import Meeting, Subpixel, cell_windows, cells_meet, meet, point_windows, refine_both
from dualrc.model.support import crowd, support

FINE_STRIDE = 4
# A dense or asked-for point is trusted when the way back ends within so many fine cells of it: where one picture
# is larger, several cells share their counterpart, and only one of them can be its first choice.
_RETURN_CELLS = 2.0
_CPU_WINDOWS, _GPU_POINTS = 2**11, 2**14  # matches and points whose windows of features are held together
_CROWD = 8  # better matches in the same place that halve a score, if it is so in both pictures


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """What matching needs to know of a picture; depends on that picture alone."""

    coarse: Tensor  # b c h w, at 1/16, as the backbone gives it
    fine: Tensor  # b c 4h 4w, at 1/4, unit length
    # Where to look: fine cells that may be matched, (b 4h 4w) bool; None: everywhere.
    valid: Tensor | None = None
    light: Tensor | None = None  # b 16h 16w: the brightness by which matches are aligned, if they are


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkMatches:
    """Matches of a batch in network-input pixels, by pair and then best first."""

    pair: Tensor  # n
    points0: Tensor  # n 2, (x, y), the centre of the first pixel at (0, 0)
    points1: Tensor  # n 2
    # n: the sum of both directions' scores, 0 to 2, as published; with refinement, a confidence of 0 to 1 times the
    # share of the matches around that agree, lowered where many better ones lie.
    scores: Tensor


class DualRCNet(nn.Module):
    """The dual-resolution correspondence network."""

    def __init__(
        self, config: NetworkConfig, *, backbone: nn.Module, consensus: Consensus, subpixel: Subpixel | None
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.consensus = consensus
        self.subpixel = subpixel
        self._record = Recorder()

    def extract(self, images: Tensor) -> Features:
        """Normalized pictures (b 3 h w), sides multiples of 16, to their features."""
        coarse, fine = self.backbone(images)
        light = None if self.subpixel is None else brightness(images)
        return Features(coarse=coarse, fine=normalize(fine), light=light)

    def coarse_tensor(self, features0: Features, features1: Features, max_memory: float = 0.5) -> Tensor:
        """The refined coarse tensor, b h0 w0 h1 w1: in float32, or in half precision where a GPU works in that."""
        coarse = self._coarse(features0, features1)
        if features0.valid is None and features1.valid is None:
            (refined,) = self._record(
                ("coarse", max_memory), partial(self._refined, max_memory=max_memory), *coarse, device=coarse[0].device
            )
            return refined
        scores = correlate(*coarse)
        for features, axes in ((features0, (1, 2)), (features1, (3, 4))):
            if features.valid is not None:  # a cell outside the mask must not compete with those inside
                cells = features.valid.unflatten(1, (-1, RATIO)).unflatten(3, (-1, RATIO)).any(4).any(2)
                scores = scores * cells.view(*[n if i in (0, *axes) else 1 for i, n in enumerate(scores.shape)])
        return self.refine(scores, max_memory, overwrite=True)

    def _coarse(self, features0: Features, features1: Features) -> tuple[Tensor, Tensor]:
        """The coarse features in the precision that the coarse tensor is made in."""
        coarse = features0.coarse, features1.coarse
        if usable(coarse[0]) and coarse[0].dtype == coarse[1].dtype == torch.float16:
            return coarse
        return coarse[0].float(), coarse[1].float()

    def _refined(self, coarse0: Tensor, coarse1: Tensor, *, max_memory: float) -> tuple[Tensor]:
        return (self.refine(correlate(coarse0, coarse1), max_memory, overwrite=True),)

    def refine(self, scores: Tensor, max_memory: float = 0.5, *, overwrite: bool = False) -> Tensor:
        """Mutual filter, consensus, mutual filter: b h0 w0 h1 w1 -> the same; `overwrite` as in mutual_filter."""
        return self.consensus.filtered(scores, _values(max_memory), overwrite=overwrite)

    def match(
        self, features0: Features, features1: Features, *, top: int | None = None, max_memory: float = 0.5
    ) -> NetworkMatches:
        """Mutual matches of every pair of a batch; the best `top` of each pair where given."""
        fine0, fine1, found = self._both_ways(features0, features1, self.config.fine.query_share, max_memory)
        found = found.of((found.back == found.index0).nonzero()[:, 0])
        if self.subpixel is not None:
            cells0, cells1, scores = self._refine(fine0, fine1, found, features0.light, features1.light)
        else:
            cells0, cells1, scores = _cells(found.index0, fine0), _cells(found.index1, fine1), found.scores.sum(0)
        keep = _best_first(found.pair, scores, top, len(fine0.features))
        points = _pixels(torch.cat([cells0, cells1], dim=1)[keep])
        return NetworkMatches(pair=found.pair[keep], points0=points[:, :2], points1=points[:, 2:], scores=scores[keep])

    def _refine(
        self, fine0: FineMap, fine1: FineMap, found: BothWays, light0: Tensor | None, light1: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where the matches really lie in both pictures, (n 2) each in fine cells, and their scores (n)."""
        count = len(found.pair)
        columns, scores = found.columns[:3], found.scores
        if columns.is_cuda:  # few different lengths, so that recordings fit
            spare = (1 << max(count - 1, 1023).bit_length()) - count
            columns, scores = F.pad(columns, (0, spare), value=-1), F.pad(scores, (0, spare))
        refine = partial(self._refine_columns, fine0, fine1)
        inputs = [fine0.features, fine1.features, columns, scores]
        if light0 is not None and light1 is not None:
            inputs += [light0, light1]
        name = ("refine", fine0.width, fine1.width)
        cells0, cells1, refined = self._record(name, refine, *inputs, device=columns.device)
        return cells0[:count], cells1[:count], refined[:count]

    def _refine_columns(
        self,
        fine0: FineMap,
        fine1: FineMap,
        features0: Tensor,
        features1: Tensor,
        columns: Tensor,
        scores: Tensor,
        light0: Tensor | None = None,
        light1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same from pairs and indices (3 n) and scores (2 n); where a pair is -1 there is no match."""
        assert self.subpixel is not None
        fine0, fine1 = replace(fine0, features=features0), replace(fine1, features=features1)
        is_match = columns[0] >= 0
        pair, index0, index1 = columns.clamp(min=0)
        seen = _meet(fine0, fine1, pair, index0, index1)
        offset0, offset1, trust = refine_both(self.subpixel, seen, scores[0], scores[1])
        cells0, cells1 = _cells(index0, fine0) + offset0, _cells(index1, fine1) + offset1
        shapes = [(len(fine.features), fine.height * RATIO, fine.width * RATIO) for fine in (fine0, fine1)]
        known = pair.masked_fill(~is_match, -1)
        around0 = support(index0, cells0, cells1, trust, known, shapes[0])
        around1 = support(index1, cells1, cells0, trust, known, shapes[1])
        score = trust * (around0.share * around1.share).sqrt()
        crowd0, crowd1 = crowd(index0, score, known, shapes[0]), crowd(index1, score, known, shapes[1])
        # The best matches lie close together; what would follow there comes after what stands alone elsewhere.
        score = score * ((1 + crowd0 / _CROWD) * (1 + crowd1 / _CROWD)).rsqrt()
        if light0 is not None and light1 is not None:
            places = _pixels(cells0), _pixels(cells1 + around0.shift)
            cells1 = _from_pixels(align(light0, light1, pair, *places, around0.motion))
        return cells0, cells1, score

    def match_points(
        self, features0: Features, features1: Features, points0: Tensor, *, max_memory: float = 0.5
    ) -> tuple[Tensor, Tensor]:
        """Where these points of picture 0 (n 2, network pixels) are in picture 1, and scores; score 0: nowhere."""
        settings = self.config.fine
        fine0, fine1 = FineMap.of(features0.fine, features0.valid), FineMap.of(features1.fine, features1.valid)
        tensor = self.coarse_tensor(features0, features1, max_memory).flatten(3).flatten(1, 2)
        cells0 = _from_pixels(points0)
        some = cells0.split(_GPU_POINTS if cells0.is_cuda else _CPU_WINDOWS)
        pair = torch.zeros(len(some[0]), dtype=torch.long, device=cells0.device)
        how: dict[str, Any] = {"temperature": settings.temperature, "max_values": _values(max_memory)}
        sums = row_sums(tensor)
        parts = [
            search(tensor, point_queries(fine0, pair[: len(points)], points, settings.reading), fine1, sums=sums, **how)
            for points in some
        ]
        index1, score = (torch.cat([getattr(part, name)[:, 0] for part in parts]) for name in ("index", "score"))
        good, index1 = index1 >= 0, index1.clamp(min=0)
        cell, place = fine1.split(index1)
        answering, inverse = cell.unique(return_inverse=True)
        questions = cell_queries(fine1, answering, settings.reading)
        back = search(turned(tensor), questions, fine0, **how)
        returned = back.index[inverse, place]
        good &= (returned >= 0) & ((_cells(returned, fine0) - cells0).abs().amax(1) <= _RETURN_CELLS)
        cells1 = _cells(index1, fine1)
        if self.subpixel is None:
            return _pixels(cells1), torch.where(good, score + back.score[inverse, place], 0)
        refined = []
        for points, index, found in zip(some, index1.split(len(pair)), parts, strict=True):
            own = pair[: len(points)]
            seen = meet(point_windows(fine0, own, points), cell_windows(fine1, own, index))
            refined.append(self.subpixel(seen, found.score[:, 0]))
        offset, logit = (torch.cat(column) for column in zip(*refined, strict=True))
        return _pixels(cells1 + offset), torch.where(good, logit.sigmoid(), 0)

    def warp(self, features0: Features, features1: Features, *, max_memory: float = 0.5) -> tuple[Tensor, Tensor]:
        """For every fine cell of picture 0: its place in picture 1 (4h 4w 2, network pixels), certainty (4h 4w)."""
        fine0, fine1, found = self._both_ways(features0, features1, 1.0, max_memory)
        found = found.of(found.index1 >= 0)
        cells0, cells1, returned = _cells(found.index0, fine0), _cells(found.index1, fine1), _cells(found.back, fine0)
        score = found.scores.mean(0)
        if self.subpixel is not None:
            refined = self.subpixel(_meet(fine0, fine1, found.pair, found.index0, found.index1), found.scores[0])
            cells1, score = cells1 + refined.offset, refined.logit.sigmoid()
        good = (found.back >= 0) & ((returned - cells0).abs().amax(1) <= _RETURN_CELLS)
        height, width = features0.fine.shape[2:]
        points = torch.zeros(height * width, 2, device=cells1.device)
        certainty = torch.zeros(height * width, device=cells1.device)
        points[found.index0] = _pixels(cells1)
        certainty[found.index0] = torch.where(good, score, 0).clamp(max=1)
        return points.view(height, width, 2), certainty.view(height, width)

    def _both_ways(
        self, features0: Features, features1: Features, query_share: float, max_memory: float
    ) -> tuple[FineMap, FineMap, BothWays]:
        fine0, fine1 = FineMap.of(features0.fine, features0.valid), FineMap.of(features1.fine, features1.valid)
        settings = self.config.fine
        search = partial(
            both_ways,
            reading=settings.reading,
            query_share=query_share,
            temperature=settings.temperature,
            max_values=_values(max_memory),
        )

        def from_features(coarse0: Tensor, coarse1: Tensor, features0: Tensor, features1: Tensor) -> BothWays:
            (tensor,) = self._refined(coarse0, coarse1, max_memory=max_memory)
            maps = replace(fine0, features=features0), replace(fine1, features=features1)
            return search(tensor.flatten(3).flatten(1, 2), *maps)

        by_kernels = supported(fine0, fine1)
        if by_kernels and fine0.valid is None and fine1.valid is None:
            name = ("both ways", query_share, max_memory, fine0.width, fine1.width)
            inputs = *self._coarse(features0, features1), fine0.features, fine1.features
            found = BothWays(*self._record(name, from_features, *inputs, device=fine0.features.device))
        else:
            found = search(self.coarse_tensor(features0, features1, max_memory).flatten(3).flatten(1, 2), fine0, fine1)
        if trace.is_recording():
            in_c = native.usable(fine0.features, fine1.features)
            trace.note("kernel.search", "triton" if by_kernels else "C" if in_c else "blocks")
            for visited, candidates in ((found.visited, fine1.cells), (found.visited_back, fine0.cells)):
                trace.note("search.groups", len(visited))
                trace.note("search.candidates", candidates)
                trace.note("search.visited", visited.sum())
                trace.note("search.widened", (visited > FIRST_BLOCK).sum())
        return fine0, fine1, found


def make_network(config: NetworkConfig) -> DualRCNet:
    """The network that a config describes, untrained, in evaluation mode."""
    backbone = config.backbone
    channels = backbone.fine_channels if isinstance(backbone, CompactConfig) else backbone.channels
    network = DualRCNet(
        config,
        backbone=make_backbone(backbone),
        consensus=Consensus(config.consensus),
        subpixel=Subpixel(channels, config.fine.subpixel_hidden) if config.fine.subpixel else None,
    )
    return network.eval()


def _meet(fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> Meeting:
    """`cells_meet`, some at a time where torch does it on a CPU, as that holds whole windows of features."""
    if pair.is_cuda or native.usable(fine0.features, fine1.features):
        return cells_meet(fine0, fine1, pair, index0, index1)
    columns = (column.split(_CPU_WINDOWS) for column in (pair, index0, index1))
    parts = [cells_meet(fine0, fine1, *some) for some in zip(*columns, strict=True)]
    return Meeting(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _values(max_memory: float) -> int:
    """How many float32 values fit into so many GiB."""
    return int(max_memory * 2**30 / 4)


def _best_first(pair: Tensor, scores: Tensor, top: int | None, pairs: int) -> Tensor:
    """Indices of matches by pair and then by falling score, at most `top` of each of so many pairs."""
    keep = scores.sort(descending=True, stable=True).indices
    if pairs == 1:
        return keep[:top]
    keep = keep[pair[keep].sort(stable=True).indices]
    if top is not None:
        counts = pair.bincount()
        rank = torch.arange(len(keep), device=keep.device) - (counts.cumsum(0) - counts)[pair[keep]]
        keep = keep[rank < top]
    return keep


def _cells(index: Tensor, fine: FineMap) -> Tensor:
    """Row-major fine indices to (x, y) in fine cells."""
    width = fine.width * RATIO
    return torch.stack([index % width, index // width], dim=1).float()


def _pixels(cells: Tensor) -> Tensor:
    """Fine cells to network-input pixels."""
    return (cells + 0.5) * FINE_STRIDE - 0.5


def _from_pixels(points: Tensor) -> Tensor:
    """Network-input pixels to fine cells."""
    return (points + 0.5) / FINE_STRIDE - 0.5
