"""The paper's L = L_k + 0.05 L_o (section 3.4), and the form of the published code."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.data.pairs import PairBatch
from dualrc.losses.result import Losses
from dualrc.model.cells import FineMap, corners
from dualrc.model.dualrc import DualRCNet
from dualrc.model.ncnet import ConsensusNet
from dualrc.model.network import Features, Network
from dualrc.model.search import TINY, point_queries, read_coarse
from dualrc.pixels import FINE_STRIDE, RATIO, cell_to_pixel, pixel_to_cell


@dataclass(frozen=True, kw_only=True)
class KeypointMaps:
    """Scores of n keypoints of one image over the other, S, and their target, S_gt: both (... n cells)."""

    scores: Tensor
    target: Tensor
    # Number of cells in a row.
    width: int = 0
    # Side of a cell in pixels.
    stride: int = FINE_STRIDE


def keypoint_losses(
    network: Network,
    features0: Features,
    features1: Features,
    batch: PairBatch,
    form: Literal["paper", "published"],
) -> Losses:
    """Compute the paper's or the published loss, averaged over pairs; keypoints are the valid positions."""
    maps = keypoint_maps(network, features0, features1, batch)
    # Pairs without keypoints do not count, but all parts of the network get gradients.
    shown = batch.valid.any(1)
    weight = shown / shown.sum().clamp(min=1)
    total, keypoint, orthogonal = ((loss * weight).sum() for loss in _losses(maps, batch.valid.sum(1), form))
    accuracy = keypoint_accuracy(network, maps, batch)
    return Losses(total, {"keypoint": keypoint, "orthogonal": orthogonal, **accuracy})


def keypoint_accuracy(network: Network, maps: tuple[KeypointMaps, KeypointMaps], batch: PairBatch) -> dict[str, Tensor]:
    """Return the shares of keypoints within some distances; NCNet is trained on coarse cells, so they are larger."""
    errors_px = torch.stack([_errors_px(maps[0], batch.points1), _errors_px(maps[1], batch.points0)])
    count = 2 * batch.valid.sum().clamp(min=1)
    reach = (8, 16, 32) if isinstance(network, ConsensusNet) else (1, 3, 5)
    return {f"within_{px}px": ((errors_px < px) & batch.valid).sum() / count for px in reach}


def _errors_px(found: KeypointMaps, there: Tensor) -> Tensor:
    """Return the distance of the best cells from the true positions (b n 2): (b n)."""
    index = found.scores.argmax(2)
    cells = torch.stack([index % found.width, index // found.width], 2)
    return (cell_to_pixel(cells, found.stride) - there).norm(dim=2)


def keypoint_loss(one: KeypointMaps, other: KeypointMaps) -> Tensor:
    """Compute the paper's L_k = |S_AB - S_gt| + |S_BA - S_gt| in the Frobenius norm."""
    return sum((torch.linalg.matrix_norm(m.scores - m.target) for m in (one, other)), start=one.scores.new_zeros(()))


def orthogonal_loss(one: KeypointMaps, other: KeypointMaps) -> Tensor:
    """Compute the paper's L_o: Frobenius norms of S S^T - S_gt S_gt^T, summed over both directions."""
    differences = (m.scores @ m.scores.mT - m.target @ m.target.mT for m in (one, other))
    return sum((torch.linalg.matrix_norm(d) for d in differences), start=one.scores.new_zeros(()))


def _losses(
    maps: tuple[KeypointMaps, KeypointMaps], count: Tensor, form: Literal["paper", "published"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total, L_k and L_o (b) of maps with `count` keypoints (b); other rows are zero.

    The paper's loss is L_k + 0.05 L_o, that of the published code 0.95 L_k + 0.05 L_o with means over keypoints.
    """
    if form == "paper":
        keypoint, orthogonal = keypoint_loss(*maps), orthogonal_loss(*maps)
        return keypoint + 0.05 * orthogonal, keypoint, orthogonal
    count = count.clamp(min=1)
    rows = torch.stack([(m.scores - m.target).norm(dim=-1).sum(-1) / count for m in maps])
    keypoint, orthogonal = rows.sum(0), orthogonal_loss(*maps) / count
    return 0.95 * keypoint + 0.05 * orthogonal, keypoint, orthogonal


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


def dense_tensor(network: Network, features0: Features, features1: Features) -> Tensor:
    """Return the coarse tensor (b h0 w0 h1 w1); missing entries of a sparse tensor are zero."""
    tensor = network.coarse_tensor(features0, features1)
    return tensor.to_dense() if tensor.is_sparse else tensor
