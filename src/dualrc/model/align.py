"""The last step of refinement: matches are moved to where the two pictures themselves fit best.

Features lie four pixels apart, and end up within a pixel or two of the truth. Around a good match the pictures show
the same thing, moved as its neighbours move and in another light, so two steps of Gauss and Newton on the brightness
find the rest. What is compared is normalized, so that no change of gain or level affects it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import dualrc.kernels.refine as kernel

_REACH = 12  # pixels from a match to the edge of its window
_STEP = 2  # pixels between the places of a window that are compared
_ROUNDS = 2
_DAMPING = 0.01  # how much brightness must change along a direction for a match to move along it
_LONGEST = 1.0  # pixels that a match moves in a round
_FARTHEST = 3.0  # pixels that it moves in all; one that would go further stays where it is,
_LEAST = 0.5  # as does one around which the pictures are not that alike (their correlation),
_GAIN = 1e-4  # and one around which they would hardly be more alike
_LARGEST = 16.0  # times that things may be larger in one of the pictures, by area
_CPU_VALUES, _GPU_VALUES = 2**15, 2**24  # places compared together; on a CPU they stay in its cache


def brightness(images: Tensor) -> Tensor:
    """What is aligned, of normalized pictures (b 3 h w): (b h w), with a little blur against noise."""
    gray = F.pad(images.mean(1, keepdim=True), (2, 2, 2, 2), mode="replicate")
    for _ in range(4):  # together 1 4 6 4 1 along each axis, a deviation of one pixel
        gray = F.avg_pool2d(gray, 2, stride=1)
    return gray[:, 0]


def align(light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor) -> Tensor:
    """Where the points (n 2) of picture 1 fit best, in pixels of pictures with this brightness (b h w).

    `motion` (n 2 2) takes what is near a point of picture 0 to picture 1.
    """
    matches = pair, points0.nan_to_num(), points1.nan_to_num(), motion.nan_to_num()
    if kernel.supported(light0):
        return points1 + kernel.moves(
            light0,
            light1,
            *matches,
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
    pictures = _Pixels.of(light0), _Pixels.of(light1)
    chunk = max(1, (_GPU_VALUES if pair.is_cuda else _CPU_VALUES) // (_REACH // _STEP * 2 + 1) ** 2)
    columns = (column.split(chunk) for column in matches)
    return points1 + torch.cat([_moves(*pictures, *some) for some in zip(*columns, strict=True)])


class _Pixels(NamedTuple):
    """Pictures, ready to be looked at between their pixels."""

    corners: Tensor  # b*h*w 4: for every pixel the four that a place behind it lies between
    height: int
    width: int

    @staticmethod
    def of(light: Tensor) -> "_Pixels":
        padded = F.pad(light[:, None], (0, 1, 0, 1), mode="replicate")[:, 0]
        corners = padded[:, :-1, :-1], padded[:, :-1, 1:], padded[:, 1:, :-1], padded[:, 1:, 1:]
        return _Pixels(torch.stack(corners, dim=3).flatten(0, 2), light.shape[1], light.shape[2])

    def look(self, pair: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Brightness at places (n k), and how it changes across and down."""
        x, y = x.clamp(0, self.width - 1), y.clamp(0, self.height - 1)
        left, top = x.floor(), y.floor()
        index = top.long() * self.width + left.long() + (pair * (self.height * self.width))[:, None]
        a, b, c, d = self.corners.index_select(0, index.flatten()).float().view(*x.shape, 4).unbind(2)
        x, y = x - left, y - top
        upper, lower = b - a, d - c
        above, below = a + upper * x, c + lower * x
        return above + (below - above) * y, upper + (lower - upper) * y, below - above

    def hold(self, points: Tensor, reach: Tensor) -> Tensor:
        """Whether windows around these points (n 2) that reach so far (n 2) lie inside."""
        (x, y), (far_x, far_y) = points.unbind(1), (points + reach).unbind(1)
        before = (x >= reach[:, 0]) & (y >= reach[:, 1])
        return before & (far_x <= self.width - 1) & (far_y <= self.height - 1)


def _moves(
    pixels0: _Pixels, pixels1: _Pixels, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
) -> Tensor:
    """How far points of picture 1 must move for their windows to look like those of picture 0: (n 2)."""
    axis = torch.arange(-_REACH, _REACH + 1, _STEP, device=pair.device)
    dx, dy = axis.repeat(len(axis)).float(), axis.repeat_interleave(len(axis)).float()
    weights = torch.exp((dx.square() + dy.square()) * (-1.125 / _REACH**2))
    weights = weights / weights.sum()
    template, across, down = pixels0.look(pair, points0[:, :1] + dx, points0[:, 1:] + dy)
    template, spread = _normalized(template, weights)
    # How the normalized window changes when it moves; changes of gain and level are taken out.
    slopes = []
    for change in (across, down):
        slope = change / spread[:, None]
        slope = slope - (slope @ weights)[:, None]
        slopes.append(slope - template * ((slope * template) @ weights)[:, None])
    xx, yy = (slope.square() @ weights + _DAMPING for slope in slopes)
    xy = (slopes[0] * slopes[1]) @ weights
    inverse = 1 / (xx * yy - xy * xy)
    weighted = torch.stack(slopes) * weights
    offset_x, offset_y = (motion[:, i, :1] * dx + motion[:, i, 1:] * dy for i in (0, 1))
    move = torch.zeros_like(points1)
    alike = []
    for turn in range(_ROUNDS + 1):
        place = points1 + move
        window, _, _ = pixels1.look(pair, place[:, :1] + offset_x, place[:, 1:] + offset_y)
        window, _ = _normalized(window, weights)
        alike.append((window * template) @ weights)
        if turn == _ROUNDS:
            break
        x, y = (weighted * (window - template)).sum(2)
        step = torch.stack([(yy * x - xy * y) * inverse, (xx * y - xy * x) * inverse], dim=1)
        step = step.nan_to_num() / (step.norm(dim=1, keepdim=True) / _LONGEST).clamp(min=1)
        move = move - (motion @ step[:, :, None])[:, :, 0]
    area = motion[:, 0, 0] * motion[:, 1, 1] - motion[:, 0, 1] * motion[:, 1, 0]
    good = (alike[-1] > alike[0] + _GAIN) & (alike[-1] > _LEAST) & (move.norm(dim=1) < _FARTHEST)
    good &= (area > 1 / _LARGEST) & (area < _LARGEST)
    good &= pixels0.hold(points0, torch.full_like(move, _REACH)) & pixels1.hold(points1, motion.abs().sum(2) * _REACH)
    return move.masked_fill(~good[:, None], 0)


def _normalized(windows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Windows (n k) without their mean, in units of their deviation, and that (n)."""
    windows = windows - (windows @ weights)[:, None]
    spread = (windows.square() @ weights + 1e-6).sqrt()
    return windows / spread[:, None], spread
