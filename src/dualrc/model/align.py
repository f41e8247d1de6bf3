"""The last step of refinement: matches are moved to where the two pictures themselves fit best.

Features lie four pixels apart, and end up within a pixel or two of the truth. Around a good match the pictures show
the same thing, moved as its neighbours move and in another light, so two steps of Gauss and Newton on the brightness
find the rest. What is compared is normalized, so that no change of gain or level affects it.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

import dualrc.kernels.refine as kernel
from dualrc.model.backbone import to_gray

_REACH = 12  # pixels from a match to the edge of its window
_STEP = 3  # pixels between the places of a window that are compared
_ROUNDS = 2
_DAMPING = 0.01  # how much brightness must change along a direction for a match to move along it
_LONGEST = 1.0  # pixels that a match moves in a round
_FARTHEST = 3.0  # pixels that it moves in all; one that would go further stays where it is,
_LEAST = 0.5  # as does one around which the pictures are not that alike (their correlation),
_GAIN = 1e-4  # and one around which they would hardly be more alike
_LITTLE = 1e-6  # added to variances, which may be zero
_LARGEST = 16.0  # times that things may be larger in one of the pictures, by area
_CPU_VALUES, _GPU_VALUES = 2**17, 2**24  # places compared together; on a CPU they stay near its cache


def brightness(images: Tensor) -> Tensor:
    """What is aligned, of normalized pictures (b 3 h w): (b h w), with a little blur against noise."""
    gray = F.pad(to_gray(images), (2, 2, 2, 2), mode="replicate")[:, 0]
    for _ in range(4):  # together 1 4 6 4 1 along each axis, a deviation of one pixel
        gray = torch.lerp(gray[:, 1:], gray[:, :-1], 0.5)
        gray = torch.lerp(gray[:, :, 1:], gray[:, :, :-1], 0.5)
    return gray


@torch.no_grad()
def align(light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor) -> Tensor:
    """Where the points (n 2) of picture 1 fit best, in pixels of pictures with this brightness (b h w).

    `motion` (n 2 2) takes what is near a point of picture 0 to picture 1.
    """
    matches = pair, points0.nan_to_num(), points1.nan_to_num(), motion.nan_to_num()
    if kernel.supported(light0, light1):
        return points1 + kernel.moves(
            light0,
            light1,
            *matches,
            _window(light0.device),
            REACH=_REACH,
            STEP=_STEP,
            ROUNDS=_ROUNDS,
            DAMPING=_DAMPING,
            LONGEST=_LONGEST,
            FARTHEST=_FARTHEST,
            LEAST=_LEAST,
            GAIN=_GAIN,
            LARGEST=_LARGEST,
        )
    around = F.pad(light0[:, None].float(), (1, 1, 1, 1), mode="replicate")[:, 0]
    across, down = around[:, 1:-1, 2:] - around[:, 1:-1, :-2], around[:, 2:, 1:-1] - around[:, :-2, 1:-1]
    maps0 = torch.stack([around[:, 1:-1, 1:-1], across / 2, down / 2])
    chunk = max(1, (_GPU_VALUES if pair.is_cuda else _CPU_VALUES) // (_REACH // _STEP * 2 + 1) ** 2)
    columns = (column.split(chunk) for column in matches)
    return points1 + torch.cat([_moves(maps0, light1[None].float(), *some) for some in zip(*columns, strict=True)])


@cache
@torch.inference_mode(False)
def _window(device: torch.device) -> tuple[Tensor, Tensor]:
    """The places of a window around its middle, (k 2), (x, y) in pixels, and their weights, (k)."""
    axis = torch.arange(-_REACH, _REACH + 1, _STEP, device=device)
    places = torch.stack([axis.repeat(len(axis)), axis.repeat_interleave(len(axis))], dim=1).float()
    weights = torch.exp(places.square().sum(1) * (-1.125 / _REACH**2))
    return places, weights / weights.sum()


def _moves(maps0: Tensor, maps1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor) -> Tensor:
    """How far points of picture 1 must move for their windows to look like those of picture 0: (n 2).

    `maps0` (3 b h w) are brightness, and how it changes across and down; `maps1` (1 b h w) is brightness.
    """
    axis = torch.arange(-_REACH, _REACH + 1, _STEP, device=pair.device)
    window, weights = _window(pair.device)
    template, *changes = _look(maps0, pair, points0, _scaled(maps0, window)[None])
    template = template - (template @ weights)[:, None]
    spread = (template.square() @ weights + _LITTLE).sqrt()
    template = template / spread[:, None]
    # How the normalized window changes when it moves; changes of gain and level are taken out.
    slopes = []
    for change in changes:
        slope = change / spread[:, None]
        slope = slope - (slope @ weights)[:, None]
        slopes.append(slope - template * ((slope * template) @ weights)[:, None])
    xx, yy = (slope.square() @ weights + _DAMPING for slope in slopes)
    xy = (slopes[0] * slopes[1]) @ weights
    inverse = 1 / (xx * yy - xy * xy)
    # Template and slopes have no mean and nothing in common, so the other window need not be normalized first.
    readings = torch.stack([torch.ones_like(template), template, *slopes], dim=1) * weights  # n 4 k
    across, down = _scaled(maps1, motion)[:, None, None].unbind(4)  # n 1 1 2
    offsets = (across * axis[:, None] + down * axis[:, None, None]).flatten(1, 2)  # n k 2
    move = torch.zeros_like(points1)
    alike = []
    for turn in range(_ROUNDS + 1):
        (other,) = _look(maps1, pair, points1 + move, offsets)
        mean, likeness, x, y = torch.bmm(readings, other[:, :, None])[:, :, 0].unbind(1)
        spread = (other.square() @ weights - mean.square()).clamp(min=0).add(_LITTLE).sqrt()
        alike.append(likeness / spread)
        if turn == _ROUNDS:
            break
        x, y = x / spread, y / spread
        step = torch.stack([(yy * x - xy * y) * inverse, (xx * y - xy * x) * inverse], dim=1)
        step = step.nan_to_num() / (step.norm(dim=1, keepdim=True) / _LONGEST).clamp(min=1)
        move = move - (motion @ step[:, :, None])[:, :, 0]
    area = motion[:, 0, 0] * motion[:, 1, 1] - motion[:, 0, 1] * motion[:, 1, 0]
    good = (alike[-1] > alike[0] + _GAIN) & (alike[-1] > _LEAST) & (move.norm(dim=1) < _FARTHEST)
    good &= (area > 1 / _LARGEST) & (area < _LARGEST)
    # Windows that reach over the border, or might on the way, are not compared.
    good &= _inside(maps0, points0, torch.full_like(move, _REACH + 1))
    good &= _inside(maps1, points1, motion.abs().sum(2) * _REACH + _FARTHEST)
    return move.masked_fill(~good[:, None], 0)


def _look(maps: Tensor, pair: Tensor, points: Tensor, offsets: Tensor) -> Tensor:
    """Maps (m b h w) around points (n 2) of the pictures `pair` (n), at offsets (n k 2) by `_scaled`: (m n k)."""
    count, pictures, height, width = maps.shape
    # All pictures as one, below each other.
    points = torch.stack([points[:, 0], points[:, 1] + pair * height], dim=1)
    places = (_scaled(maps, points) - 1)[:, None] + offsets
    tall = maps.reshape(1, count, pictures * height, width)
    return F.grid_sample(tall, places[None], mode="bilinear", padding_mode="border", align_corners=True)[0]


def _scaled(maps: Tensor, vectors: Tensor) -> Tensor:
    """Pixels (n 2), or matrices (n 2 2) that give pixels, in units of half of all pictures below each other."""
    _, pictures, height, width = maps.shape
    x, y = vectors.unbind(1)
    return torch.stack([x * (2 / max(1, width - 1)), y * (2 / max(1, pictures * height - 1))], dim=1)


def _inside(maps: Tensor, points: Tensor, reach: Tensor) -> Tensor:
    """Whether windows around these points (n 2) that reach so far (n 2) lie inside."""
    (x, y), (far_x, far_y) = (points - reach).unbind(1), (points + reach).unbind(1)
    return (x >= 0) & (y >= 0) & (far_x <= maps.shape[3] - 1) & (far_y <= maps.shape[2] - 1)
