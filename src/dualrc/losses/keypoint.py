"""The paper's L = L_k + 0.05 L_o (section 3.4), and the form of the published code."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.data.pairs import PairBatch
from dualrc.losses.result import Losses
from dualrc.model.cells import FineMap, corners
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
    stride = network.stride * network.pool if isinstance(network, ConsensusNet) else FINE_STRIDE
    cells0, cells1 = pixel_to_cell(points0, stride), pixel_to_cell(points1, stride)
    tensor = dense_tensor(network, features0, features1)
    _, height0, width0, height1, width1 = tensor.shape
    # (b n0 n1)
    rows = tensor.flatten(3).flatten(1, 2)
    if isinstance(network, ConsensusNet):
        size0, size1 = (height0, width0), (height1, width1)
        scores = _coarse_scores(rows, size0, cells0), _coarse_scores(rows.mT, size1, cells1)
    else:
        fine0, fine1 = features0.map(), features1.map()
        size0, size1 = fine0.fine_size, fine1.fine_size
        scores = _fine_scores(rows, fine0, fine1, cells0), _fine_scores(rows.mT, fine1, fine0, cells1)
    maps = [
        KeypointMaps(scores=own * valid, target=_target(there, *size) * valid, width=size[1], stride=stride)
        for own, there, size in zip(scores, (cells1, cells0), (size1, size0), strict=True)
    ]
    return maps[0], maps[1]


def _coarse_scores(rows: Tensor, size: tuple[int, int], cells: Tensor) -> Tensor:
    """Interpolate rows (b n0 n1) of the coarse tensor at positions (b n 2) of a map of this size: (b n n1)."""
    read = torch.bmm(_bilinear(cells, *size), rows)
    return read / (read.sum(2, keepdim=True) + TINY)


def _fine_scores(tensor: Tensor, fine0: FineMap, fine1: FineMap, cells: Tensor) -> Tensor:
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
    """Return the target S_gt: bilinear weights of the cells at positions (b n 2), blurred: (b n cells)."""
    target = _bilinear(cells, height, width).view(-1, 1, height, width)
    # 0.25, 0.5, 0.25.
    axis = (2 - (torch.arange(3, device=cells.device) - 1).abs()) / 4
    kernel = (axis[:, None] * axis)[None, None]
    return F.conv2d(target, kernel, padding=1).flatten(1).unflatten(0, cells.shape[:2])


def _bilinear(cells: Tensor, height: int, width: int) -> Tensor:
    """Return the bilinear weights of all cells at positions: (b n 2) -> (b n cells)."""
    index, weights = corners(cells.flatten(0, 1), height, width)
    every = weights.new_zeros(len(index), height * width).scatter_add_(1, index, weights)
    return every.unflatten(0, cells.shape[:2])


def dense_tensor(network: Network, features0: Features, features1: Features) -> Tensor:
    """Return the coarse tensor (b h0 w0 h1 w1); missing entries of a sparse tensor are zero."""
    tensor = network.coarse_tensor(features0, features1)
    return tensor.to_dense() if tensor.is_sparse else tensor
