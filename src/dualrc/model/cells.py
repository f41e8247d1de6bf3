"""Cells of an image: coarse cells, the 16 fine cells in each, and features over them."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from dualrc.pixels import RATIO

Reading = Literal["corner", "center"]
# Tensors, and masks of fine cells (None allows every cell), of image 0 and image 1.
TensorPair = tuple[Tensor, Tensor]
MaskPair = tuple[Tensor | None, Tensor | None]

# Fine cells per coarse cell, r * r.
PLACES = RATIO * RATIO


@dataclass(frozen=True, kw_only=True, eq=False)
class FineMap:
    """Fine unit features of images of one size, row-major, with their division into coarse cells."""

    # (b H*W c)
    features: Tensor
    # Height and width in coarse cells.
    height: int
    width: int
    # (b H*W) bool: fine cells that may be matched. None allows every cell.
    valid: Tensor | None = None

    @staticmethod
    def of(fine: Tensor, valid: Tensor | None = None) -> "FineMap":
        """Build a map from unit fine features (b c 4h 4w) and an optional mask of fine cells (b 4h 4w)."""
        return FineMap(
            # This is a view if the features are channels-last.
            features=fine.movedim(1, -1).flatten(1, 2).contiguous(),
            height=fine.shape[2] // RATIO,
            width=fine.shape[3] // RATIO,
            valid=None if valid is None else valid.flatten(1),
        )

    @property
    def cells(self) -> int:
        """Number of coarse cells of an image."""
        return self.height * self.width

    @property
    def fine_size(self) -> tuple[int, int]:
        """Return (height, width) in fine cells."""
        return self.height * RATIO, self.width * RATIO

    def members(self, cells: Tensor) -> Tensor:
        """Return row-major indices of the 16 fine cells of coarse cells: (...) -> (... 16)."""
        place = torch.arange(PLACES, device=cells.device)
        row = (cells // self.width * RATIO)[..., None] + place // RATIO
        return row * (self.width * RATIO) + (cells % self.width * RATIO)[..., None] + place % RATIO

    def position(self, index: Tensor) -> Tensor:
        """Convert row-major fine indices to the order by coarse cell: cell * 16 + place."""
        row, column = index // (self.width * RATIO), index % (self.width * RATIO)
        return (row // RATIO * self.width + column // RATIO) * PLACES + row % RATIO * RATIO + column % RATIO

    def coordinates(self, index: Tensor) -> Tensor:
        """Convert row-major fine indices (...) to (x, y) in fine cells, (... 2)."""
        width = self.width * RATIO
        return torch.stack([index % width, index // width], dim=-1).float()

    def gather(self, pair: Tensor, index: Tensor) -> Tensor:
        """Return features at row-major fine indices: pair (n), index (n ...) -> (n ... c)."""
        index = index + (pair * self.features.shape[1]).view(-1, *[1] * (index.ndim - 1))
        found = self.features.flatten(0, 1).index_select(0, index.flatten())
        return found.view(*index.shape, found.shape[1])

    def sample(self, pair: Tensor, points: Tensor) -> Tensor:
        """Interpolate unit features in float32 at points (n 2), (x, y) in fine cells, bilinear: -> (n c)."""
        index, weights = corners(points, *self.fine_size)
        features = (self.gather(pair, index).float() * weights[:, :, None]).sum(1)
        return features / features.norm(dim=1, keepdim=True).clamp(min=1e-6)

    def upsample(self, values: Tensor) -> Tensor:
        """Apply U_r, nearest-neighbor up-sampling from coarse to fine cells: (... h*w) -> (... 4h*4w)."""
        grid = values.unflatten(-1, (self.height, 1, self.width, 1))
        return grid.expand(*values.shape[:-1], -1, RATIO, -1, RATIO).flatten(-4)


FineMapPair = tuple[FineMap, FineMap]


def corners(points: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the four cells around points (n 2): row-major indices (n 4) and bilinear weights (n 4), clamped."""
    x, y = points[:, 0].clamp(0, width - 1), points[:, 1].clamp(0, height - 1)
    left, top = x.floor(), y.floor()
    share_x, share_y = x - left, y - top
    columns = torch.stack([left, left + 1, left, left + 1], dim=1).long().clamp(max=width - 1)
    rows = torch.stack([top, top, top + 1, top + 1], dim=1).long().clamp(max=height - 1)
    across = torch.stack([1 - share_x, share_x, 1 - share_x, share_x], dim=1)
    down = torch.stack([1 - share_y, 1 - share_y, share_y, share_y], dim=1)
    return rows * width + columns, across * down


@cache
@torch.inference_mode(False)
def reading_weights(reading: Reading, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return offsets (m 2) and bilinear weights (16 m) by which 16 fine cells read the surrounding coarse cells."""
    # Fine cell d reads the coarse tensor at d/4 ("corner", as published) or at its own center ("center").
    shift = 0.0 if reading == "corner" else -(RATIO - 1) / 2
    offsets = (0, 1) if reading == "corner" else (-1, 0, 1)
    places = (torch.arange(RATIO, dtype=torch.float64) + shift) / RATIO
    # (4 offsets)
    axis = (1 - (places[:, None] - torch.tensor(offsets)[None]).abs()).clamp(min=0)
    weights = torch.einsum("am,bn->abmn", axis, axis).reshape(PLACES, -1)
    grid = torch.tensor([(row, column) for row in offsets for column in offsets])
    return grid.to(device), weights.float().to(device)
