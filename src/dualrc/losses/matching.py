"""The loss of `default`, and the distillation of a teacher."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dualrc.data.pairs import PairBatch
from dualrc.losses.result import Losses
from dualrc.model.cells import PLACES, FineMap, Reading, corners
from dualrc.model.correlation import correlate, mutual_filter
from dualrc.model.dualrc import DualRCNet
from dualrc.model.network import Features
from dualrc.model.search import Queries, fine_cosines, point_queries, read_coarse, sharpen
from dualrc.model.subpixel import Subpixel, Windows, cell_windows, pair_windows, point_windows
from dualrc.pixels import FINE_STRIDE, RATIO, pixel_to_cell

# Temperature of the cosines in the cross-entropies.
_SHARPNESS = 0.05
# Terms of the loss that trains `default`, each averaged over positions, and their weights in it.
_WEIGHTS = {
    # Cross-entropy of the coarse cosines.
    "coarse_raw": 0.5,
    # Negative log of the refined coarse score at the true cell.
    "coarse": 1.0,
    # Cross-entropy of the fine cosines.
    "fine": 0.5,
    # Cross-entropy of coarse score times fine score.
    "joint": 1.0,
    # Smooth L1 distance in fine cells.
    "subpixel": 2.0,
    # Binary cross-entropy of the confidence.
    "trust": 1.0,
}


def matching_losses(network: DualRCNet, features0: Features, features1: Features, batch: PairBatch) -> Losses:
    """Compute the losses of a batch, averaged over both directions."""
    raw = correlate(*(maps.float() for maps in network.in_context(features0, features1)))
    refined = mutual_filter(network.engine.consensus(mutual_filter(raw), network.consensus))
    # (b n0 n1)
    raw, refined = (t.flatten(3).flatten(1, 2) for t in (raw, refined))
    fine0, fine1 = features0.map(), features1.map()
    reading, back = network.config.fine.reading, batch.swapped()
    one = _one_way(network, raw, refined, fine1, _places(fine0, fine1, batch, reading))
    transposed = raw.transpose(1, 2), refined.transpose(1, 2)
    other = _one_way(network, *transposed, fine0, _places(fine1, fine0, back, reading))
    logged = {name: (value + other[name]) / 2 for name, value in one.items()}
    total = sum((weight * logged[name] for name, weight in _WEIGHTS.items()), start=raw.new_zeros(()))
    return Losses(total, logged)


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


def _one_way(network: DualRCNet, raw: Tensor, refined: Tensor, fine1: FineMap, places: _Places) -> dict[str, Tensor]:
    """Compute the terms and the accuracy of positions in image 0 that are searched in image 1."""
    subpixel, temperature = network.subpixel, network.config.fine.temperature
    assert subpixel is not None
    weight = places.valid.float() / places.valid.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return (values.float() * weight).sum()

    coarse_raw, coarse, scores = _coarse_losses(raw, refined, fine1, places)
    fine, joint, found, score = _fine_losses(scores, fine1, places, temperature)
    trust, error_px = _trust_losses(subpixel, fine1, places, found, score)
    return {
        "coarse_raw": mean(coarse_raw),
        "coarse": mean(coarse),
        "fine": mean(fine),
        "joint": mean(joint),
        "subpixel": mean(_subpixel_losses(subpixel, fine1, places, score)),
        "trust": (trust * places.asked).sum() / places.asked.sum().clamp(min=1),
        **{f"within_{px}px": mean(error_px < px) for px in (1, 3, 5)},
    }


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
