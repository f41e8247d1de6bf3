"""Training losses: the loss of `default`, the paper's L = L_k + 0.05 L_o (section 3.4), and the weak loss of NCNet."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dualrc.data.pairs import PairBatch
from dualrc.errors import ConfigError
from dualrc.model.cells import PLACES, FineMap, Reading, corners
from dualrc.model.correlation import correlate, mutual_filter
from dualrc.model.dualrc import DualRCNet
from dualrc.model.ncnet import ConsensusNet
from dualrc.model.network import Features, Network
from dualrc.model.search import TINY, Queries, fine_cosines, point_queries, read_coarse, sharpen
from dualrc.model.subpixel import Subpixel, Windows, cell_windows, pair_windows, point_windows
from dualrc.pixels import FINE_STRIDE, RATIO, cell_to_pixel, pixel_to_cell

# Temperature of the cosines in the cross-entropies.
_SHARPNESS = 0.05


@dataclass(frozen=True, kw_only=True)
class MatchingLosses:
    """Terms of the loss that trains `default`, averaged over positions; `accuracy` are shares, not losses."""

    # Cross-entropy of the coarse cosines.
    coarse_raw: Tensor
    # Negative log of the refined coarse score at the true cell.
    coarse: Tensor
    # Cross-entropy of the fine cosines.
    fine: Tensor
    # Cross-entropy of coarse score times fine score.
    joint: Tensor
    # Smooth L1 distance in fine cells.
    subpixel: Tensor
    # Binary cross-entropy of the confidence.
    trust: Tensor
    accuracy: dict[str, Tensor]

    def total(self) -> Tensor:
        """Return the weighted sum that is minimized."""
        return 0.5 * self.coarse_raw + self.coarse + 0.5 * self.fine + self.joint + 2 * self.subpixel + self.trust

    def logged(self) -> dict[str, Tensor]:
        """Return the terms and the accuracy by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "accuracy"} | self.accuracy


def matching_losses(network: DualRCNet, features0: Features, features1: Features, batch: PairBatch) -> MatchingLosses:
    """Compute the losses of a batch, averaged over both directions."""
    if network.subpixel is None:
        raise ConfigError("These losses train the sub-pixel refinement; give a network with fine.subpixel = true.")
    raw = correlate(*(maps.float() for maps in network.in_context(features0, features1)))
    refined = mutual_filter(network.engine.consensus(mutual_filter(raw), network.consensus))
    # (b n0 n1)
    raw, refined = (t.flatten(3).flatten(1, 2) for t in (raw, refined))
    fine0, fine1 = features0.map(), features1.map()
    reading, back = network.config.fine.reading, batch.swapped()
    one = _one_way(network, raw, refined, fine1, _places(fine0, fine1, batch, reading))
    transposed = raw.transpose(1, 2), refined.transpose(1, 2)
    other = _one_way(network, *transposed, fine0, _places(fine1, fine0, back, reading))
    return MatchingLosses(
        accuracy={name: (one.accuracy[name] + other.accuracy[name]) / 2 for name in one.accuracy},
        **{
            name: (getattr(one, name) + getattr(other, name)) / 2
            for name in ("coarse_raw", "coarse", "fine", "joint", "subpixel", "trust")
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Positions in image 0 and their true positions in image 1, over the whole batch: n = b * points."""

    # (n) Pair of the batch.
    pair: Tensor
    queries: Queries
    windows: Windows
    # (n 2) as (x, y) in fine cells of image 1.
    there: Tensor
    # (n) Column and row of the fine cell that contains it.
    column: Tensor
    row: Tensor
    # (n) Whether the position is visible in both images.
    valid: Tensor
    # (n) Whether the position is valid, or known to be occluded.
    asked: Tensor


def _places(fine0: FineMap, fine1: FineMap, batch: PairBatch, reading: Reading) -> _Places:
    count, points = batch.valid.shape
    pair = torch.arange(count, device=batch.valid.device).repeat_interleave(points)
    here = pixel_to_cell(batch.points0, FINE_STRIDE)
    there = pixel_to_cell(batch.points1, FINE_STRIDE).flatten(0, 1)
    return _Places(
        pair=pair,
        queries=point_queries(fine0, here, reading),
        windows=point_windows(fine0, pair, here.flatten(0, 1)),
        there=there,
        column=(there[:, 0] + 0.5).floor().long().clamp(0, fine1.width * RATIO - 1),
        row=(there[:, 1] + 0.5).floor().long().clamp(0, fine1.height * RATIO - 1),
        valid=batch.valid.flatten(),
        asked=(batch.valid | batch.absent0).flatten(),
    )


def _one_way(network: DualRCNet, raw: Tensor, refined: Tensor, fine1: FineMap, places: _Places) -> MatchingLosses:
    """Compute the losses of positions in image 0 that are searched in image 1."""
    subpixel, temperature = network.subpixel, network.config.fine.temperature
    assert subpixel is not None
    weight = places.valid.float() / places.valid.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (values.float() * weight).sum()

    coarse_raw, coarse, scores = _coarse_losses(raw, refined, fine1, places)
    fine, joint, found, score = _fine_losses(scores, fine1, places, temperature)
    trust, error_px = _trust_losses(subpixel, fine1, places, found, score)
    return MatchingLosses(
        coarse_raw=mean(coarse_raw),
        coarse=mean(coarse),
        fine=mean(fine),
        joint=mean(joint),
        subpixel=mean(_subpixel_losses(subpixel, fine1, places, score)),
        trust=(trust * places.asked).sum() / places.asked.sum().clamp(min=1),
        accuracy={f"within_{px}px": mean(error_px < px) for px in (1, 3, 5)},
    )


def _coarse_losses(raw: Tensor, refined: Tensor, fine1: FineMap, places: _Places) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (n) of the coarse cosines and of the refined scores, and those scores (n cells) with sum 1."""
    cell = places.row // RATIO * fine1.width + places.column // RATIO
    cosines = read_coarse(raw, places.queries).flatten(0, 1) / _SHARPNESS
    scores = read_coarse(refined, places.queries).flatten(0, 1)
    scores = scores / (scores.sum(1, keepdim=True) + 1e-9)
    chosen = scores.gather(1, cell[:, None])[:, 0]
    return F.cross_entropy(cosines, cell, reduction="none"), -torch.log(chosen + 1e-5), scores


def _fine_losses(
    scores: Tensor, fine1: FineMap, places: _Places, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses (n) of the fine cosines and of the joint scores, and the cells and scores of the search."""
    cosines = fine_cosines(places.queries, fine1).flatten(0, 1)
    index, weights = corners(places.there, *fine1.fine_size)
    # The sum of exp over all fine cells is a sum over coarse cells of the sums of their 16 fine cells.
    # Only the exponential has the size of the fine correlation.
    sums, target = _CellSums.apply(cosines, index, weights, fine1.height)  # type: ignore[no-untyped-call]
    coarse = scores + 1e-6
    cell = fine1.position(index) // PLACES
    fine_loss = sums.sum(1).log() - target
    joint_loss = (sums * coarse).sum(1).log() - target - (weights * coarse.gather(1, cell).log()).sum(1)
    with torch.no_grad():
        best = cosines.view(len(cosines), fine1.height, RATIO, -1, RATIO).amax((2, 4)).flatten(1)
        score, found_cell = (scores * sharpen(best, temperature)).max(1)
        # (n 16)
        members = fine1.members(found_cell)
        found = members.gather(1, cosines.gather(1, members).argmax(1, keepdim=True))[:, 0]
    return fine_loss, joint_loss, found, score


class _CellSums(Function):
    """Sum exp((cosine - 1) / 0.05) over the fine cells of each coarse cell, and read exponents at some cells."""

    @staticmethod
    def forward(ctx: Any, cosines: Tensor, index: Tensor, weights: Tensor, height: int) -> tuple[Tensor, Tensor]:
        """(n HW), (n 4), (n 4) -> (n h*w) sums, and (n) the weighted mean of the exponents at the indices."""
        powers = torch.sub(cosines / _SHARPNESS, 1 / _SHARPNESS)
        target = (weights * powers.gather(1, index)).sum(1)
        powers.exp_()
        ctx.height = height
        ctx.save_for_backward(powers, index, weights)
        return powers.view(len(powers), height, RATIO, -1, RATIO).sum((2, 4)).flatten(1), target

    @staticmethod
    def backward(ctx: Any, sums: Tensor, target: Tensor) -> tuple[Tensor | None, ...]:
        powers, index, weights = ctx.saved_tensors
        cells = (sums / _SHARPNESS).view(len(sums), ctx.height, 1, -1, 1)
        gradient = (powers.view(len(powers), ctx.height, RATIO, -1, RATIO) * cells).flatten(1)
        gradient.scatter_add_(1, index, weights * (target / _SHARPNESS)[:, None])
        return gradient, None, None, None


def _subpixel_losses(subpixel: Subpixel, fine1: FineMap, places: _Places, score: Tensor) -> Tensor:
    """Return the error (n) of the refinement, started at the true cell or next to it, where the search may end."""
    height, width = fine1.height * RATIO, fine1.width * RATIO
    # Positions are random already, so a fixed pattern can select the 30 % that are moved.
    number = torch.arange(len(places.column), device=places.column.device)
    jitter = torch.stack([number // 10 % 3 - 1, number // 30 % 3 - 1]) * (number % 10 < 3)
    column, row = (places.column + jitter[0]).clamp(0, width - 1), (places.row + jitter[1]).clamp(0, height - 1)
    answering = cell_windows(fine1, places.pair, row * width + column)
    refined = subpixel(pair_windows(places.windows, answering), score)
    target = places.there - torch.stack([column, row], 1)
    inner = (column > 0) & (column < width - 1) & (row > 0) & (row < height - 1)
    return F.smooth_l1_loss(refined.offset, target, reduction="none", beta=0.1).sum(1) * inner


def _trust_losses(
    subpixel: Subpixel, fine1: FineMap, places: _Places, found: Tensor, score: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss (n) of the confidence in the result of the search, and the error of that result in pixels (n)."""
    width = fine1.width * RATIO
    # Detached, because the confidence must not change the features.
    windows = places.windows, cell_windows(fine1, places.pair, found)
    refined = subpixel(pair_windows(*(Windows(w.features.detach(), w.whole) for w in windows)), score)
    end = torch.stack([found % width, found // width], 1) + refined.offset.detach()
    error_px = (end - places.there).norm(dim=1) * FINE_STRIDE
    right = places.valid & (error_px < 1.5)
    return F.binary_cross_entropy_with_logits(refined.logit, right.float(), reduction="none"), error_px


def distillation_loss(coarse: Tensor, target: Tensor) -> Tensor:
    """Compare the last k channels of coarse features (b c h w) with unit features of a teacher (b k h w).

    Both parts of the unit coarse features should have the same norm, so that a cosine is the mean of two cosines: one
    of features that are learned from correspondences, one of features that are learned from the teacher.
    """
    unit = F.normalize(coarse.float(), dim=1)
    distance = unit[:, -target.shape[1] :] - target * math.sqrt(0.5)
    return distance.square().sum(1).mean()


@dataclass(frozen=True, kw_only=True)
class KeypointMaps:
    """Scores of n keypoints of one image over the other, S, and their target, S_gt: both (... n cells)."""

    scores: Tensor
    target: Tensor
    # Number of cells in a row.
    width: int = 0
    # Side of a cell in pixels.
    stride: int = FINE_STRIDE


@dataclass(frozen=True, kw_only=True)
class KeypointLosses:
    """Keypoint loss and its terms, summed over both directions."""

    total: Tensor
    # L_k of the paper.
    keypoint: Tensor
    # L_o of the paper.
    orthogonal: Tensor


@dataclass(frozen=True, kw_only=True)
class BatchKeypointLosses:
    """Mean keypoint losses of a batch; `accuracy` are shares of keypoints, not losses."""

    mean: KeypointLosses
    accuracy: dict[str, Tensor]

    def total(self) -> Tensor:
        """Return the loss that is minimized."""
        return self.mean.total

    def logged(self) -> dict[str, Tensor]:
        """Return the terms and the accuracy by name."""
        return {"keypoint": self.mean.keypoint, "orthogonal": self.mean.orthogonal} | self.accuracy


def keypoint_losses(
    network: Network,
    features0: Features,
    features1: Features,
    batch: PairBatch,
    form: Literal["paper", "published"],
) -> BatchKeypointLosses:
    """Compute the paper's or the published loss, averaged over pairs; keypoints are the valid positions."""
    maps = keypoint_maps(network, features0, features1, batch)
    # (b) each. Pairs without keypoints do not count, but all parts of the network get gradients.
    losses = _losses(maps, batch.valid.sum(1), form)
    shown = batch.valid.any(1)
    weight = shown / shown.sum().clamp(min=1)
    errors_px = torch.stack([_errors_px(maps[0], batch.points1), _errors_px(maps[1], batch.points0)])
    count = 2 * batch.valid.sum().clamp(min=1)
    return BatchKeypointLosses(
        mean=KeypointLosses(**{f.name: (getattr(losses, f.name) * weight).sum() for f in fields(KeypointLosses)}),
        accuracy={f"within_{px}px": ((errors_px < px) & batch.valid).sum() / count for px in _reach(network)},
    )


def _errors_px(found: KeypointMaps, there: Tensor) -> Tensor:
    """Return the distance of the best cells from the true positions (b n 2): (b n)."""
    index = found.scores.argmax(2)
    cells = torch.stack([index % found.width, index // found.width], 2)
    return (cell_to_pixel(cells, found.stride) - there).norm(dim=2)


def _reach(network: Network) -> tuple[int, ...]:
    """Return the error thresholds in pixels for the accuracy; NCNet is trained on coarse cells only."""
    return (8, 16, 32) if isinstance(network, ConsensusNet) else (1, 3, 5)


def keypoint_loss(one: KeypointMaps, other: KeypointMaps) -> Tensor:
    """Compute the paper's L_k = |S_AB - S_gt| + |S_BA - S_gt| in the Frobenius norm."""
    return sum((torch.linalg.matrix_norm(m.scores - m.target) for m in (one, other)), start=one.scores.new_zeros(()))


def orthogonal_loss(one: KeypointMaps, other: KeypointMaps) -> Tensor:
    """Compute the paper's L_o: Frobenius norms of S S^T - S_gt S_gt^T, summed over both directions."""
    differences = (m.scores @ m.scores.mT - m.target @ m.target.mT for m in (one, other))
    return sum((torch.linalg.matrix_norm(d) for d in differences), start=one.scores.new_zeros(()))


def _losses(
    maps: tuple[KeypointMaps, KeypointMaps], count: Tensor, form: Literal["paper", "published"]
) -> KeypointLosses:
    """Return the losses of maps with `count` keypoints; other rows are zero.

    The paper's loss is L_k + 0.05 L_o, that of the published code 0.95 L_k + 0.05 L_o with means over keypoints.
    """
    if form == "paper":
        keypoint, orthogonal = keypoint_loss(*maps), orthogonal_loss(*maps)
        return KeypointLosses(total=keypoint + 0.05 * orthogonal, keypoint=keypoint, orthogonal=orthogonal)
    count = count.clamp(min=1)
    rows = torch.stack([(m.scores - m.target).norm(dim=-1).sum(-1) / count for m in maps])
    keypoint, orthogonal = rows.sum(0), orthogonal_loss(*maps) / count
    return KeypointLosses(total=0.95 * keypoint + 0.05 * orthogonal, keypoint=keypoint, orthogonal=orthogonal)


def keypoint_maps(
    network: Network, features0: Features, features1: Features, batch: PairBatch
) -> tuple[KeypointMaps, KeypointMaps]:
    """Return both directions of every pair; rows of points that are not valid are zero.

    All operations depend only on shapes, so that a CUDA graph can capture them.
    """
    # Positions that are not valid may be far outside the image.
    valid = batch.valid[..., None]
    points0, points1 = (torch.where(valid, points, 0) for points in (batch.points0, batch.points1))
    read = _coarse_scores if isinstance(network, ConsensusNet) else _fine_scores
    scores, sizes, stride = read(network, features0, features1, points0, points1)  # type: ignore[arg-type]
    maps = [
        KeypointMaps(
            scores=own * valid,
            target=_target(pixel_to_cell(there, stride), *size) * valid,
            width=size[1],
            stride=stride,
        )
        for own, there, size in zip(scores, (points1, points0), sizes, strict=True)
    ]
    return maps[0], maps[1]


# Scores of the keypoints in both directions (b n cells), size of the map of cells that they refer to, and its stride.
_Read = tuple[tuple[Tensor, Tensor], tuple[tuple[int, int], tuple[int, int]], int]


def _fine_scores(
    network: DualRCNet, features0: Features, features1: Features, points0: Tensor, points1: Tensor
) -> _Read:
    """Score keypoints on fine cells."""
    # (b n0 n1)
    tensor = network.coarse_tensor(features0, features1).flatten(3).flatten(1, 2)
    fine0, fine1 = features0.map(), features1.map()
    cells0, cells1 = pixel_to_cell(points0, FINE_STRIDE), pixel_to_cell(points1, FINE_STRIDE)
    scores = _scores(tensor, fine0, fine1, cells0), _scores(tensor.transpose(1, 2), fine1, fine0, cells1)
    return scores, (fine1.fine_size, fine0.fine_size), FINE_STRIDE


def _coarse_scores(
    network: ConsensusNet, features0: Features, features1: Features, points0: Tensor, points1: Tensor
) -> _Read:
    """Score keypoints without a fine search: they interpolate the coarse tensor."""
    tensor, stride = dense_tensor(network, features0, features1), network.stride * network.pool
    _, height0, width0, height1, width1 = tensor.shape
    sizes = (height0, width0), (height1, width1)
    rows, scores = tensor.flatten(3).flatten(1, 2), []
    for own, points, size in ((rows, points0, sizes[0]), (rows.mT, points1, sizes[1])):
        index, weights = corners(pixel_to_cell(points, stride).flatten(0, 1), *size)
        index, weights = (t.unflatten(0, points.shape[:2]) for t in (index, weights))
        mixing = weights.new_zeros(*points.shape[:2], own.shape[1]).scatter_add_(2, index, weights)
        read = torch.bmm(mixing, own)
        scores.append(read / (read.sum(2, keepdim=True) + TINY))
    return (scores[0], scores[1]), (sizes[1], sizes[0]), stride


def dense_tensor(network: Network, features0: Features, features1: Features) -> Tensor:
    """Return the coarse tensor (b h0 w0 h1 w1); missing entries of a sparse tensor are zero."""
    tensor = network.coarse_tensor(features0, features1)
    return tensor.to_dense() if tensor.is_sparse else tensor


@dataclass(frozen=True, kw_only=True)
class WeakLosses:
    """NCNet's weak loss: the mean score of non-matching images minus that of matching images."""

    # Mean matching score of the pairs.
    positive: Tensor
    # Mean matching score of images of different pairs.
    negative: Tensor
    # Accuracy of keypoints; empty during training.
    accuracy: dict[str, Tensor]

    def total(self) -> Tensor:
        """Return the loss that is minimized."""
        return self.negative - self.positive

    def logged(self) -> dict[str, Tensor]:
        """Return the terms and the accuracy by name."""
        return {"positive": self.positive, "negative": self.negative} | self.accuracy


def weak_losses(network: Network, features0: Features, features1: Features, batch: PairBatch) -> WeakLosses:
    """Compute NCNet's weak loss of a batch of at least two pairs; positions are used for the accuracy only.

    Each image 1 is matched with its own image 0 and with that of the next pair. Pairs without overlap do not count as
    positive pairs.
    """
    if len(batch.valid) < 2:
        raise ConfigError('loss = "weak" compares pairs with each other; give at least two pairs per part.')
    shown = batch.valid.any(1).float()
    positive = (matching_scores(dense_tensor(network, features0, features1)) * shown).sum() / shown.sum().clamp(min=1)
    rolled = Features(coarse=features0.coarse.roll(-1, 0), fine=features0.fine.roll(-1, 0))
    negative = matching_scores(dense_tensor(network, rolled, features1)).mean()
    accuracy: dict[str, Tensor] = {}
    # Skipped during training, because it needs another pass.
    if not network.training:
        with torch.no_grad():
            accuracy = keypoint_losses(network, features0, features1, batch, "paper").accuracy
    return WeakLosses(positive=positive, negative=negative, accuracy=accuracy)


def matching_scores(tensor: Tensor) -> Tensor:
    """Return the mean, over the cells of both images, of the largest softmax score: (b h0 w0 h1 w1) -> (b)."""
    rows = tensor.flatten(3).flatten(1, 2)
    # The softmax of the maximum is exp(maximum - logsumexp).
    means = [(rows.amax(axis) - rows.logsumexp(axis)).exp().mean(1) for axis in (1, 2)]
    return (means[0] + means[1]) / 2


def _scores(tensor: Tensor, fine0: FineMap, fine1: FineMap, cells: Tensor) -> Tensor:
    """Return coarse score times fine cosine of positions (b n 2) of image 0 with every fine cell of image 1."""
    # As in the published implementation, positions are relative to the corner of the first cell, half a cell off.
    # This holds for the coarse tensor and for the fine cells, and the nearest fine cell is the query.
    corner, pair = cells + 0.5, torch.arange(len(cells), device=cells.device)
    column, row = corner.round().long().unbind(2)
    height, width = fine0.height * RATIO, fine0.width * RATIO
    features = fine0.gather(pair, row.clamp(0, height - 1) * width + column.clamp(0, width - 1))
    coarse = read_coarse(tensor, point_queries(fine0, corner, "corner"))
    coarse = coarse / (coarse.sum(2, keepdim=True) + TINY)
    return torch.bmm(features, fine1.features.mT) * fine1.upsample(coarse)


def _target(cells: Tensor, height: int, width: int) -> Tensor:
    """Return the target S_gt: bilinear weights of the four cells around positions (b n 2), blurred: (b n cells)."""
    index, weights = corners(cells.flatten(0, 1), height, width)
    target = weights.new_zeros(len(index), height * width).scatter_add_(1, index, weights)
    # 0.25, 0.5, 0.25.
    axis = (2 - (torch.arange(3, device=cells.device) - 1).abs()) / 4
    kernel = (axis[:, None] * axis)[None, None]
    return F.conv2d(target.view(-1, 1, height, width), kernel, padding=1).flatten(1).unflatten(0, cells.shape[:2])
