"""Training losses: the paper's, the published implementation's, and those that train `default`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.data.pairs import PairBatch
from dualrc.model.correlation import correlate
from dualrc.model.dualrc import FINE_STRIDE, DualRCNet, Features
from dualrc.model.fine import RATIO, FineMap, Queries, point_queries


@dataclass(frozen=True, kw_only=True)
class MatchingLosses:
    """The parts of the loss that trains `default`, each a mean over places; `accuracy` are shares, not losses."""

    coarse_raw: Tensor  # cross-entropy of the coarse cosines
    coarse: Tensor  # negative logarithm of the refined coarse score of the true cell
    fine: Tensor  # cross-entropy of the fine cosines
    joint: Tensor  # cross-entropy of coarse score times fine score
    subpixel: Tensor  # smooth L1 distance in fine cells
    trust: Tensor  # binary cross-entropy of the confidence
    accuracy: dict[str, Tensor]

    def total(self) -> Tensor:
        """The sum that is minimized."""
        return 0.5 * self.coarse_raw + self.coarse + 0.5 * self.fine + self.joint + 2 * self.subpixel + self.trust


def matching_losses(network: DualRCNet, features0: Features, features1: Features, batch: PairBatch) -> MatchingLosses:
    """Both directions of a batch, averaged."""
    raw = correlate(features0.coarse.float(), features1.coarse.float())
    # The 4D convolutions take a third of the time in half precision, and lose nothing that training would notice.
    with torch.autocast(raw.device.type, torch.bfloat16, enabled=raw.is_cuda):
        refined = network.refine(raw, max_memory=1e6)
    raw, refined = (t.flatten(3).flatten(1, 2) for t in (raw, refined))  # b n0 n1
    one = _one_way(network, raw, refined, FineMap.of(features0.fine), FineMap.of(features1.fine), batch)
    other = _one_way(
        network,
        raw.transpose(1, 2),
        refined.transpose(1, 2),
        FineMap.of(features1.fine),
        FineMap.of(features0.fine),
        batch.swapped(),
    )
    return MatchingLosses(
        accuracy={name: (one.accuracy[name] + other.accuracy[name]) / 2 for name in one.accuracy},
        **{
            name: (getattr(one, name) + getattr(other, name)) / 2
            for name in ("coarse_raw", "coarse", "fine", "joint", "subpixel", "trust")
        },
    )


def _one_way(
    network: DualRCNet, raw: Tensor, refined: Tensor, fine0: FineMap, fine1: FineMap, batch: PairBatch
) -> MatchingLosses:
    """Places of picture 0 look for themselves in picture 1."""
    count, points = batch.valid.shape
    asked = batch.valid | batch.absent0
    pair = torch.arange(count, device=raw.device).repeat_interleave(points)
    here, there = _to_cells(batch.points0).flatten(0, 1), _to_cells(batch.points1).flatten(0, 1)
    queries = point_queries(fine0, pair, here, network.config.fine.reading)
    valid = batch.valid.flatten()
    weight = valid.float() / valid.sum().clamp(min=1)

    width, height = fine1.width * RATIO, fine1.height * RATIO
    column = (there[:, 0] + 0.5).floor().long().clamp(0, width - 1)
    row = (there[:, 1] + 0.5).floor().long().clamp(0, height - 1)
    cell = row // RATIO * fine1.width + column // RATIO

    cosines = _read(raw, queries) / 0.05
    coarse_raw = F.cross_entropy(cosines, cell, reduction="none")
    scores = _read(refined, queries)
    scores = scores / (scores.sum(1, keepdim=True) + 1e-9)
    coarse = -torch.log(scores.gather(1, cell[:, None])[:, 0] + 1e-5)

    features = queries.features[:, 0]
    logits = torch.bmm(features.view(count, points, -1), fine1.features.transpose(1, 2)).flatten(0, 1).float() / 0.05
    # Nearest up-sampling of the coarse scores to fine cells.
    prior = torch.log(scores + 1e-6).view(-1, fine1.height, 1, fine1.width, 1)
    prior = prior.expand(-1, -1, RATIO, -1, RATIO).reshape_as(logits)
    joint_logits = logits + prior
    fine_loss, joint_loss = (_soft_cross_entropy(x, there, height, width) for x in (logits, joint_logits))

    # Sub-pixel: around the true cell or one beside it, as the search may end there.
    # Places are random already, so which three in ten are moved may be fixed.
    number = torch.arange(len(column), device=raw.device)
    jitter = torch.stack([number // 10 % 3 - 1, number // 30 % 3 - 1]) * (number % 10 < 3)
    near_column, near_row = (column + jitter[0]).clamp(0, width - 1), (row + jitter[1]).clamp(0, height - 1)
    assert network.subpixel is not None, "these losses train a network with sub-pixel refinement"
    refined_near = network.subpixel(features, fine1, pair, near_row * width + near_column)
    target = there - torch.stack([near_column, near_row], 1)
    inner = (near_column > 0) & (near_column < width - 1) & (near_row > 0) & (near_row < height - 1)
    subpixel = F.smooth_l1_loss(refined_near.offset, target, reduction="none", beta=0.1).sum(1) * inner

    # Confidence: is what the search finds right? Its features are not to be bent for that.
    with torch.no_grad():
        found = joint_logits.argmax(1)
        detached = FineMap(features=fine1.features.detach(), height=fine1.height, width=fine1.width, valid=None)
    refined_found = network.subpixel(features.detach(), detached, pair, found)
    place = torch.stack([found % width, found // width], 1) + refined_found.offset.detach()
    error_px = (place - there).norm(dim=1) * FINE_STRIDE
    right = valid & (error_px < 1.5)
    trust = F.binary_cross_entropy_with_logits(refined_found.logit, right.float(), reduction="none")

    def mean(values: Tensor) -> Tensor:
        return (values.float() * weight).sum()

    return MatchingLosses(
        coarse_raw=mean(coarse_raw),
        coarse=mean(coarse),
        fine=mean(fine_loss),
        joint=mean(joint_loss),
        subpixel=mean(subpixel),
        trust=(trust * asked.flatten()).sum() / asked.sum().clamp(min=1),
        accuracy={f"within_{px}px": mean(error_px < px) for px in (1, 3, 5)},
    )


def _to_cells(points: Tensor) -> Tensor:
    """Pixels to fine cells."""
    return (points + 0.5) / FINE_STRIDE - 0.5


def _read(tensor: Tensor, queries: Queries) -> Tensor:
    """The mixture of rows of (b n m) that each query reads: (b*q m)."""
    count, rows = tensor.shape[:2]
    # As a product of matrices: its gradient is one too, where that of indexing would be a slow scatter.
    mixing = tensor.new_zeros(len(queries.rows), rows).scatter_add_(1, queries.rows, queries.weights[:, 0])
    return torch.bmm(mixing.view(count, -1, rows), tensor).flatten(0, 1)


def _soft_cross_entropy(logits: Tensor, target: Tensor, height: int, width: int) -> Tensor:
    """Cross-entropy against the four cells around a place (n 2), by their bilinear weights."""
    x, y = target[:, 0].clamp(0, width - 1), target[:, 1].clamp(0, height - 1)
    left, top = x.floor().clamp(max=width - 2), y.floor().clamp(max=height - 2)
    share_x, share_y = x - left, y - top
    index = (top * width + left).long()
    weights = torch.stack(
        [(1 - share_x) * (1 - share_y), share_x * (1 - share_y), (1 - share_x) * share_y, share_x * share_y], dim=1
    )
    corners = logits.gather(1, torch.stack([index, index + 1, index + width, index + width + 1], dim=1))
    return logits.logsumexp(1) - (weights * corners).sum(1)
