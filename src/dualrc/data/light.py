"""Random photometric changes on the training device, for images (b 3 h w) between 0 and 1."""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

# Random numbers per image, more than are used.
_UNIFORM, _NORMAL = 128, 96


class Draws:
    """Random numbers for each image of a batch, in the requested shape, or in that of `single`.

    They are generated at once and handed out in order, so that the code that uses them can be compiled.
    """

    def __init__(self, uniform: Tensor, normal: Tensor, single: tuple[int, ...] = ()) -> None:
        """`uniform` (b k), between 0 and 1, and `normal` (b l) are the numbers to hand out."""
        self._uniform, self._normal, self._single = uniform, normal, single
        self._used = [0, 0]

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Return numbers between low and high: (b, *shape)."""
        return low + (high - low) * self._next(self._uniform, 0, shape or self._single)

    def normal(self, deviation: float, *shape: int) -> Tensor:
        """Return normal numbers around 0: (b, *shape)."""
        return deviation * self._next(self._normal, 1, shape or self._single)

    def _next(self, numbers: Tensor, which: int, shape: tuple[int, ...]) -> Tensor:
        start = self._used[which]
        self._used[which] = end = start + math.prod(shape)
        assert end <= numbers.shape[1]
        return numbers[:, start:end].reshape(-1, *shape)

    def chance(self, probability: float) -> Tensor:
        """Return True with this probability."""
        return self.uniform(0, 1) < probability


def draw_numbers(count: int, random: Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Generate the numbers of `Draws` for `count` images: uniform ones between 0 and 1, and normal ones."""
    uniform = torch.rand(count, _UNIFORM, generator=random, device=device)
    return uniform, torch.randn(count, _NORMAL, generator=random, device=device)


def relight(images: Tensor, random: Generator, sensors: float = 0.0) -> Tensor:
    """Change light and camera: shadows, exposure, color, night, blur, noise and compression.

    `sensors`: share of images that simulate another sensor or season.
    """
    numbers = draw_numbers(len(images), random, images.device)
    noise = torch.randn(images.shape, generator=random, device=images.device)
    return light(images, *numbers, noise, sensors)


def light(images: Tensor, uniforms: Tensor, normals: Tensor, noise: Tensor, sensors: float) -> Tensor:
    """Apply the changes of `relight` with these random numbers, all of one dtype; `noise` is (b 3 h w)."""
    device = images.device
    draws = Draws(uniforms, normals, single=(1, 1, 1))
    uniform, normal, chance = draws.uniform, draws.normal, draws.chance
    other = chance(sensors)
    if sensors > 0:
        images = torch.where(other, _other_sensor(draws, images.clamp(0, 1)), images)
    linear = images.clamp(0, 1) ** 2.2
    night = chance(0.3)
    gain = torch.exp2(normal(0.6) - torch.where(night, uniform(0, 8), 0))
    tint = torch.exp(normal(0.12, 3, 1, 1) * (1 + 2 * night))
    # Lamps of other colors change the brightness of surfaces.
    mixing = torch.eye(3, device=device, dtype=images.dtype) + normal(0.08, 3, 3) * (1 + 2 * night)[..., 0]
    # Products and sums are faster than a matrix product of three columns.
    parts = [mixing[:, :, i, None, None] * linear[:, i : i + 1] for i in range(3)]
    linear = (parts[0] + parts[1] + parts[2]).clamp(0, 1)
    linear = linear * torch.where(night, _lamps(uniform, linear), 1)
    # Under other lamps, a surface that is brighter by day may be darker at night.
    wave = (images.clamp(0, 1) * normal(5.0, 3, 1, 1)).sum(1, keepdim=True) + uniform(0, 2 * math.pi)
    linear = linear * torch.exp(wave.sin() * torch.where(night, uniform(0, 2.5), uniform(0, 0.8) * chance(0.3)))
    # Shadows and glows: a smooth field, sometimes with hard edges.
    field = F.interpolate(normal(1.0, 1, 5, 5), size=images.shape[2:], mode="bicubic", align_corners=False)
    field = torch.where(chance(0.3), (8 * field).tanh() * 0.5, field)
    shade = torch.exp(field * uniform(0, 0.7) * chance(0.6))
    linear = (linear * gain * tint * shade).clamp(0, 1)
    images = linear ** (1 / (2.2 * torch.exp(normal(0.2))))
    mean = images.mean((1, 2, 3), keepdim=True)
    images = (images - mean) * torch.exp(normal(0.2)) + mean + normal(0.05)
    images = torch.where(chance(0.1), images.mean(1, keepdim=True).expand_as(images), images)
    images = _blurred(images, uniform(0, 1.8) * chance(0.5) * (1 + other))
    images = images + noise * (uniform(0, 0.05) * chance(0.7))
    images = images.clamp(0, 1)
    return torch.where(chance(0.35), _compressed(images, uniform(0.01, 0.12)), images)


def _other_sensor(draws: Draws, images: Tensor) -> Tensor:
    """Swap or invert channels, and apply another tone curve that varies over the image."""
    uniform, normal, chance = draws.uniform, draws.normal, draws.chance
    order = uniform(0, 1, 3).argsort(1)
    images = images.gather(1, order[:, :, None, None].expand_as(images))
    images = torch.where(chance(0.2), images.mean(1, keepdim=True), images)
    images = torch.where(chance(0.3) ^ (uniform(0, 1, 3, 1, 1) < 0.1), 1 - images, images)
    # Smooth, not necessarily monotonic curves: other sensors respond differently to materials.
    amount = uniform(0, 0.5)
    for wave in (1, 2, 3):
        images = images + (images * (wave * math.pi)).sin() * normal(1.0, 3, 1, 1) * amount / wave
    field = F.interpolate(normal(1.0, 1, 4, 4), size=images.shape[2:], mode="bilinear", align_corners=False)
    return images.clamp(0, 1) ** torch.exp(field * uniform(0, 1.2))


def _lamps(uniform: Callable[..., Tensor], images: Tensor) -> Tensor:
    """Return the light of colored lamps on images (b 3 h w), much brighter than the night around them."""
    lamps = (8, 1, 1, 1)
    # At a quarter of the resolution, because light is smooth.
    y, x = ((torch.arange(side // 4, device=images.device) + 0.5) / (side // 4) for side in images.shape[2:])
    # (b, 8, 1, 1, 1) each.
    column, row, reach = (n.float() for n in (uniform(0, 1, *lamps), uniform(0, 1, *lamps), uniform(-6, -3, *lamps)))
    distance = (x - column).square() + (y[:, None] - row).square()
    color = torch.exp2(uniform(-2, 5, 8, 3, 1, 1)) * (uniform(0, 1, *lamps) < 0.6)
    light = 1 + (color / (1 + distance / torch.exp2(reach).square())).sum(1)
    return F.interpolate(light.to(images.dtype), size=images.shape[2:], mode="bilinear", align_corners=False)


def _blurred(images: Tensor, sigma: Tensor) -> Tensor:
    """Apply Gaussian blur with a standard deviation in pixels per image (b 1 1 1); 0: none."""
    reach = 4
    axis = torch.arange(-reach, reach + 1, device=images.device)
    # (b, 1, 1, 9).
    kernel = torch.exp(-axis.square() / (2 * sigma.float().clamp(min=1e-3).square()))
    kernel = (kernel / kernel.sum(3, keepdim=True)).to(images.dtype)
    height, width = images.shape[2:]
    # Shifts and sums are faster than a convolution with one kernel per image.
    padded = F.pad(images, (reach, reach, 0, 0), mode="replicate")
    images = sum((padded[..., i : i + width] * kernel[..., i : i + 1] for i in range(2 * reach + 1)), start=sigma * 0)
    padded = F.pad(images, (0, 0, reach, reach), mode="replicate")
    return sum((padded[:, :, i : i + height] * kernel[..., i : i + 1] for i in range(2 * reach + 1)), start=sigma * 0)


def _compressed(images: Tensor, strength: Tensor) -> Tensor:
    """Apply block transform and rounding, as in JPEG; `strength` (b 1 1 1) is the step of the middle frequencies."""
    place = torch.arange(8, device=images.device)
    basis = torch.cos(math.pi / 8 * (place + 0.5) * place[:, None]) / 2
    basis = torch.where(place[:, None] > 0, basis, basis / math.sqrt(2))
    # (64 64): both axes at once, because larger matrices are faster.
    basis = torch.kron(basis, basis).to(images.dtype)
    frequency = (place[:, None] + place).flatten()
    step = strength[..., None] * (0.25 + frequency / 8).to(images.dtype)
    # (b 3 h/8 w/8 64)
    blocks = images.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4).flatten(4)
    blocks = ((blocks @ basis.T) / step).round() * step @ basis
    return blocks.unflatten(4, (8, 8)).transpose(3, 4).flatten(4).flatten(2, 3).clamp(0, 1)
