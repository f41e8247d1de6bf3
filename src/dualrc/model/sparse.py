"""A sparse coarse tensor, and neighborhood consensus by 4D convolutions restricted to its entries."""

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualrc.model.cells import MaskPair, TensorPair
from dualrc.model.consensus import Consensus, swap_images

if TYPE_CHECKING:
    from dualrc.model.engine import Engine


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseScores:
    """Entries of sparse coarse tensors (b h0 w0 h1 w1), sorted by their row-major keys."""

    # (n) Strictly increasing.
    keys: Tensor
    # (n)
    values: Tensor
    shape: tuple[int, int, int, int, int]

    def coordinates(self) -> Tensor:
        """Return pair, row and column in image 0, and row and column in image 1 of every entry: (n 5)."""
        return torch.stack(torch.unravel_index(self.keys, self.shape), dim=1)

    def cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return pair, row-major cell of image 0 and row-major cell of image 1 of every entry."""
        count0, count1 = self.shape[1] * self.shape[2], self.shape[3] * self.shape[4]
        return self.keys // (count0 * count1), self.keys // count1 % count0, self.keys % count1

    def best(self, image: int) -> tuple[Tensor, Tensor]:
        """Return the cell of the other image with the largest entry for each cell, and that entry or 0: (b n)."""
        pair, *cells = self.cells()
        counts = self.shape[1] * self.shape[2], self.shape[3] * self.shape[4]
        row = pair * counts[image] + cells[image]
        score = self.values.new_zeros(self.shape[0] * counts[image])
        score = score.scatter_reduce(0, row, self.values, "amax")
        # Ties go to the first cell in row-major order.
        other = torch.where(self.values == score[row], cells[1 - image], counts[1 - image])
        index = torch.full_like(score, counts[1 - image], dtype=torch.long).scatter_reduce(0, row, other, "amin")
        index = index.masked_fill(index == counts[1 - image], 0)
        return index.view(self.shape[0], -1), score.view(self.shape[0], -1)

    def to_torch(self) -> Tensor:
        """Convert to torch's sparse COO tensor."""
        # The indices are sorted and in range. Some versions of torch warn unless the checks are explicitly off.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return torch.sparse_coo_tensor(self.coordinates().T, self.values, self.shape, is_coalesced=True)


def nearest(rows: Tensor, others: Tensor, count: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the largest products of each of `rows` (b n c) with `others` (b m c), and their indices: (b n count)."""
    products = torch.bmm(rows.float(), others.float().transpose(1, 2))
    if valid is not None:
        products = products.masked_fill(~valid[:, None], -torch.inf)
    found = products.topk(min(count, others.shape[1]), dim=2)
    return found.values, found.indices


def nearest_correlations(engine: "Engine", coarse: TensorPair, count: int, valid: MaskPair) -> SparseScores:
    """Find the largest correlations of each cell of either image, (b c h0 w0), (b c h1 w1), with masks (b h w).

    Correlations found from both images are added, as published.
    """
    shape = (len(coarse[0]), *coarse[0].shape[2:], *coarse[1].shape[2:])
    rows0, rows1 = (features.movedim(1, -1).flatten(1, 2) for features in coarse)
    masks = [None if mask is None else mask.flatten(1) for mask in valid]
    found = engine.nearest(rows0, rows1, count, masks[1]), engine.nearest(rows1, rows0, count, masks[0])
    batch, count0, count1 = shape[0], shape[1] * shape[2], shape[3] * shape[4]
    keys, values = [], []
    for image, (score, index) in enumerate(found):
        own = torch.arange(index.shape[1], device=index.device)[None, :, None]
        pair = torch.arange(batch, device=index.device)[:, None, None]
        cell0, cell1 = (own, index) if image == 0 else (index, own)
        kept, mask = score.isfinite(), masks[image]
        if mask is not None:
            kept &= mask[..., None]
        keys.append(((pair * count0 + cell0) * count1 + cell1)[kept])
        values.append(score[kept])
    unique, place = torch.cat(keys).unique(return_inverse=True)
    total = values[0].new_zeros(len(unique)).index_add(0, place, torch.cat(values))
    return SparseScores(keys=unique, values=total, shape=shape)


def neighbors(scores: SparseScores, size: int) -> Tensor:
    """Return indices (n size**4) of the entries around each entry in all four dimensions, row-major; n for none."""
    halo, count = size // 2, len(scores.keys)
    coordinates, result = scores.coordinates(), scores.keys.new_empty(count, size**4)
    steps = range(-halo, halo + 1)
    limits = torch.tensor(scores.shape[1:], device=scores.keys.device)
    width0, height1, width1 = scores.shape[2:]
    offsets = list(itertools.product(steps, repeat=4))
    moves = torch.tensor(offsets, device=scores.keys.device)
    for number, offset in enumerate(offsets):
        moved = coordinates[:, 1:] + moves[number]
        inside = ((moved >= 0) & (moved < limits)).all(1)
        shift = ((offset[0] * width0 + offset[1]) * height1 + offset[2]) * width1 + offset[3]
        key = scores.keys + shift
        place = torch.searchsorted(scores.keys, key).clamp(max=max(count - 1, 0))
        result[:, number] = torch.where(inside & (scores.keys[place] == key), place, count)
    return result


def sparse_consensus(scores: SparseScores, consensus: Consensus) -> SparseScores:
    """Apply N(C) + N(C^T)^T to the stored entries only; entries that are not stored count as zero and stay zero."""
    sizes = {weight.shape[2] for weight in consensus.weights}
    around = {size: neighbors(scores, size) for size in sizes}
    # As in the dense consensus, the two directions are two groups of channels: (n 2 i).
    own = scores.values.relu()[:, None].expand(-1, 2).unflatten(1, (2, 1))
    for weight, bias in zip(consensus.weights, consensus.biases, strict=True):
        # (2 o i k^4)
        both = torch.stack([weight, swap_images(weight)]).flatten(3)
        padded = torch.cat([own, own.new_zeros(1, *own.shape[1:])])
        total = bias.expand(len(own), 2, -1)
        for number, place in enumerate(around[weight.shape[2]].unbind(1)):
            total = total + torch.einsum("ngi,goi->ngo", padded.index_select(0, place), both[..., number])
        own = total.relu()
    return replace(scores, values=own.sum((1, 2)))
