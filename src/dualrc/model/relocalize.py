"""Relocalization of matched coarse cells in finer maps: first to a fine cell, then between cells."""

import torch
from torch import Tensor

from dualrc.model.cells import TensorPair

# Factor of the cosines in the soft-argmax, as published.
SHARPNESS = 10.0


def relocalize(fine: TensorPair, pair: Tensor, index: TensorPair, pool: int, *, soft: bool) -> tuple[Tensor, Tensor]:
    """Return the positions of matches in both fine maps, (n 2) as (x, y) in fine cells.

    `fine` are unit features (b c h w). `index` are row-major coarse cells (n) of `pool` x `pool` fine cells each.
    """
    # Rows of features (b*h*w c), ready for gathering. They are views if the maps are channels-last.
    rows = [features.movedim(1, -1).flatten(0, 2) for features in fine]
    sizes = [(features.shape[2], features.shape[3]) for features in fine]
    cells = [_members(own, size[1] // pool, pool) for own, size in zip(index, sizes, strict=True)]
    if pool > 1:
        one, other = (_gather(own, size, pair, of)[0] for own, size, of in zip(rows, sizes, cells, strict=True))
        # argmax returns the first of equal maxima.
        best = torch.bmm(one.float(), other.float().transpose(1, 2)).flatten(1).argmax(1)
        chosen = best // pool**2, best % pool**2
        cells = [own.gather(1, which[:, None, None].expand(-1, 1, 2)) for own, which in zip(cells, chosen, strict=True)]
    places = [own[:, 0] for own in cells]
    return _soften(rows, sizes, pair, places) if soft else (places[0].float(), places[1].float())


def _members(index: Tensor, width: int, pool: int) -> Tensor:
    """Return the fine cells of coarse cells (n), row by row: (n pool*pool 2) as (x, y)."""
    steps = torch.arange(pool, device=index.device)
    offsets = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1).reshape(-1, 2)
    first = torch.stack([index % width, index // width], dim=1) * pool
    return first[:, None] + offsets


def _gather(rows: Tensor, size: tuple[int, int], pair: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return features at cells (n k 2) of each match's pair, (n k c), and whether the cells lie in the map."""
    (height, width), (x, y) = size, cells.unbind(-1)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    index = y.clamp(0, height - 1) * width + x.clamp(0, width - 1) + pair[:, None] * (height * width)
    return rows.index_select(0, index.flatten()).unflatten(0, tuple(index.shape)), inside


def _soften(
    rows: list[Tensor], sizes: list[tuple[int, int]], pair: Tensor, places: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Move each position by a soft-argmax of its 3x3 cells' cosines with the other position."""
    steps = torch.arange(-1, 2, device=pair.device)
    # (9 2)
    offsets = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1).reshape(-1, 2)
    around = [
        _gather(own, size, pair, place[:, None] + offsets) for own, size, place in zip(rows, sizes, places, strict=True)
    ]
    middles = [features[:, 4].float() for features, _ in around]
    moved = []
    for (features, inside), other, place in zip(around, reversed(middles), places, strict=True):
        # Cosines outside the map are 0, as published.
        cosines = torch.einsum("nkc,nc->nk", features.float(), other) * inside
        share = (SHARPNESS * cosines).softmax(1)
        moved.append(place + share @ offsets.float())
    return moved[0], moved[1]
