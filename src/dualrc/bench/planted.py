"""Synthetic features, like those of a trained network for two views of a scene, made without a network.

The search prunes by the coarse tensor. With untrained weights that tensor is flat, nothing can be pruned, and the time
is not representative. So the search is timed on features with a known motion between the images. Their noise makes the
refined tensor as peaked as that of trained networks on photos.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.model.dualrc import Features
from dualrc.pixels import pixel_grid, pixel_to_unit, unit_to_pixel

# All values are chosen so that a query visits about as many coarse cells as with the bundled weights on photos.
# Number of latent factors; channels are mixtures of these, like those of a network.
_FACTORS = 64
# Shares of a feature's energy that all cells, and neighboring cells, have in common; the rest is individual.
_COMMON, _AROUND = 0.1, 0.3
# Radius of the neighborhood, in cells of the map.
_AROUND_CELLS = 6
# Standard deviation of the noise relative to a feature; it varies over the image, as difficulty does.
_NOISE = (0.3, 4.0)
# Number of channels mixed at a time, which limits memory.
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Motion:
    """An affine motion in units of half an image, relative to its center: u1 = matrix u0 + shift."""

    matrix: tuple[tuple[float, float], tuple[float, float]] = ((0.9, -0.12), (0.1, 0.92))
    shift: tuple[float, float] = (0.07, -0.05)

    def __call__(self, places: Tensor) -> Tensor:
        """Apply the motion: (... 2) -> (... 2)."""
        return places @ places.new_tensor(self.matrix).T + places.new_tensor(self.shift)

    def points1(self, points0: Tensor, size0: tuple[int, int], size1: tuple[int, int]) -> Tensor:
        """Map network-input pixels (... 2) of image 0 to image 1; sizes are (width, height)."""
        return unit_to_pixel(self(pixel_to_unit(points0, size0)), size1)


@torch.inference_mode()
def plant(
    features0: Features, features1: Features, *, motion: Motion | None = None, seed: int = 0
) -> tuple[Features, Features]:
    """Return features of the same shapes, types and layouts that correspond by the motion."""
    motion = motion or Motion()
    coarse0, coarse1 = _plant_maps(features0.coarse, features1.coarse, motion, seed)
    fine0, fine1 = _plant_maps(features0.fine, features1.fine, motion, seed + 1)
    return Features(coarse=coarse0, fine=fine0), Features(coarse=coarse1, fine=fine1)


def _plant_maps(like0: Tensor, like1: Tensor, motion: Motion, seed: int) -> tuple[Tensor, Tensor]:
    """Return unit maps (b c h w) of both images; image 0 has the features of image 1 where the motion leads."""
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
    height0, width0 = like0.shape[2:]
    cells = torch.from_numpy(pixel_grid((width0, height0))).to(device)
    # (b, h, w, 2).
    there = motion(pixel_to_unit(cells, (width0, height0))).expand(batch, -1, -1, -1)
    field0 = F.grid_sample(field1, there, mode="bilinear", padding_mode="border", align_corners=False)
    # Parts that image 1 does not show get other features, not those of its border.
    field0 = torch.where((there.abs() > 1).any(-1)[:, None], field(height0, width0), field0)
    # From 0 to 1.
    hard = torch.special.ndtr(smooth(1, height0, width0))
    field0 += normal(factors, height0, width0) * (_NOISE[0] * (_NOISE[1] / _NOISE[0]) ** hard)
    mixing = torch.randn(channels, factors, generator=random, device=device)
    # Orthonormal, so that mixtures have the cosines of the factors.
    mixing = torch.linalg.qr(mixing).Q
    return _mixed(F.normalize(field0), mixing, like0), _mixed(F.normalize(field1), mixing, like1)


def _mixed(field: Tensor, mixing: Tensor, like: Tensor) -> Tensor:
    """Return channels (b c h w) from factors (b f h w)."""
    result = torch.empty_like(like)
    for start in range(0, like.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        result[:, part] = torch.einsum("cf,bfhw->bchw", mixing[part], field)
    return result
