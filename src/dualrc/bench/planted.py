"""Planted features: what a trained network would give for two views of one thing, made without any network.

The search prunes by the coarse tensor, and with untrained weights that is flat: nothing can be left out, and the time
says nothing of real pairs. So the search is timed on features with a known motion between the pictures, and with
noise that makes the refined tensor as peaked as trained networks make it on photographs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.model.dualrc import Features

# Chosen so that about as many coarse cells have to be visited for a query as with the bundled weights on photographs.
# What features depend on; channels are mixtures of these, as those of a network are.
_FACTORS = 64
# Parts of a feature's energy: shared by all cells, by those around; the rest is its own.
_COMMON, _AROUND = 0.1, 0.3
# How far "around" reaches, in cells of the map.
_AROUND_CELLS = 6
# Deviation of the noise, where a feature's is 1: it varies over the picture, as some places are harder than others.
_NOISE = (0.3, 4.0)
# Channels that are mixed at a time, so that making a map takes little more memory than the map.
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Motion:
    """An affine motion in units of half a picture, from its middle: u1 = matrix u0 + shift."""

    matrix: tuple[tuple[float, float], tuple[float, float]] = ((0.9, -0.12), (0.1, 0.92))
    shift: tuple[float, float] = (0.07, -0.05)

    def __call__(self, places: Tensor) -> Tensor:
        """(... 2) to (... 2)."""
        return places @ places.new_tensor(self.matrix).T + places.new_tensor(self.shift)

    def points1(self, points0: Tensor, size0: tuple[int, int], size1: tuple[int, int]) -> Tensor:
        """Where network-input pixels (... 2) of picture 0 are in picture 1; sizes are (width, height)."""
        unit = (points0 + 0.5) / points0.new_tensor(size0) * 2 - 1
        return (self(unit) + 1) / 2 * points0.new_tensor(size1) - 0.5


@torch.inference_mode()
def plant(
    features0: Features, features1: Features, *, motion: Motion | None = None, seed: int = 0
) -> tuple[Features, Features]:
    """Features of the same shapes, types and layouts that correspond by the motion."""
    motion = motion or Motion()
    coarse0, coarse1 = _plant_maps(features0.coarse, features1.coarse, motion, seed)
    fine0, fine1 = _plant_maps(features0.fine, features1.fine, motion, seed + 1)
    return Features(coarse=coarse0, fine=fine0), Features(coarse=coarse1, fine=fine1)


def _plant_maps(like0: Tensor, like1: Tensor, motion: Motion, seed: int) -> tuple[Tensor, Tensor]:
    """Unit maps (b c h w) of both pictures; picture 0 shows what picture 1 has where the motion leads."""
    random, device = torch.Generator(like0.device).manual_seed(seed), like0.device
    batch, channels = like0.shape[:2]
    factors = min(_FACTORS, channels)

    def normal(count: int, height: int, width: int) -> Tensor:
        return torch.randn(batch, count, height, width, generator=random, device=device)

    def smooth(count: int, height: int, width: int) -> Tensor:
        values = normal(count, height // _AROUND_CELLS + 2, width // _AROUND_CELLS + 2)
        return F.interpolate(values, size=(height, width), mode="bicubic", align_corners=False)

    def field(height: int, width: int) -> Tensor:
        around, own = smooth(factors, height, width), normal(factors, height, width)
        return own.mul_((1 - _COMMON - _AROUND) ** 0.5).add_(around, alpha=_AROUND**0.5).add_(_COMMON**0.5)

    field1 = field(*like1.shape[2:])
    size0 = height0, width0 = like0.shape[2:]
    # Centers of cells in units of half a picture, from its middle.
    y, x = ((torch.arange(count, device=device) + 0.5) / count * 2 - 1 for count in size0)
    # B h w 2.
    there = motion(torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)).expand(batch, -1, -1, -1)
    field0 = F.grid_sample(field1, there, mode="bilinear", padding_mode="border", align_corners=False)
    # What picture 1 does not show is something else, not its border again.
    field0 = torch.where((there.abs() > 1).any(-1)[:, None], field(height0, width0), field0)
    # 0 to 1.
    hard = torch.special.ndtr(smooth(1, height0, width0))
    field0 += normal(factors, height0, width0) * (_NOISE[0] * (_NOISE[1] / _NOISE[0]) ** hard)
    mixing = torch.randn(channels, factors, generator=random, device=device)
    # Orthonormal: cosines of mixtures are those of the factors.
    mixing = torch.linalg.qr(mixing).Q
    return _mixed(F.normalize(field0), mixing, like0), _mixed(F.normalize(field1), mixing, like1)


def _mixed(field: Tensor, mixing: Tensor, like: Tensor) -> Tensor:
    """Channels (b c h w) from factors (b f h w)."""
    result = torch.empty_like(like)
    for start in range(0, like.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        result[:, part] = torch.einsum("cf,bfhw->bchw", mixing[part], field)
    return result
