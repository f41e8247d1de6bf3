"""Alignment: matches are moved to where the brightness of the two images agrees best.

Features lie four pixels apart, and end up within a pixel or two of the truth. Around a good match the images show the
same surface under another light, moved as its neighbors move. A Gauss-Newton step on the brightness finds the rest.
The windows are normalized, so that no change of gain or level affects them.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.model.backbone import to_gray

REACH = 12  # pixels from a match to the edge of its window
STEP = 3  # pixels between the samples of a window
ROUNDS = 1  # Gauss-Newton steps in each direction
DAMPING = 0.01  # added to the diagonal: how much brightness must change along a direction for a match to move along it
LONGEST = 1.0  # pixels that a match moves in a round
FARTHEST = 3.0  # pixels that it moves in all; one that would go further stays where it is,
LEAST = 0.5  # as does one whose windows correlate less than this,
GAIN = 1e-4  # and one whose windows would correlate hardly better
EPSILON = 1e-6  # added to variances, which may be zero
LARGEST = 16.0  # largest ratio of areas between the images


def brightness(images: Tensor) -> Tensor:
    """What is aligned, of normalized images (b 3 h w): (b h w), with a little blur against noise."""
    gray = F.pad(to_gray(images), (2, 2, 2, 2), mode="replicate")[:, 0]
    for _ in range(4):  # together 1 4 6 4 1 along each axis, a standard deviation of one pixel
        gray = torch.lerp(gray[:, 1:], gray[:, :-1], 0.5)
        gray = torch.lerp(gray[:, :, 1:], gray[:, :, :-1], 0.5)
    return gray


@cache
@torch.inference_mode(False)
def window(device: torch.device) -> tuple[Tensor, Tensor]:
    """The samples of a window around its middle, (k 2), (x, y) in pixels, and their Gaussian weights, (k)."""
    axis = torch.arange(-REACH, REACH + 1, STEP, device=device)
    places = torch.stack([axis.repeat(len(axis)), axis.repeat_interleave(len(axis))], dim=1).float()
    weights = torch.exp(places.square().sum(1) * (-1.125 / REACH**2))
    return places, weights / weights.sum()


@torch.no_grad()
def align(light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor) -> Tensor:
    """How far points of image 1 must move for their windows to look like those of image 0: (n 2), in pixels.

    `light0` and `light1` are brightness (b h w), `pair` (n) says which of the batch, `points0` and `points1` (n 2) are
    the matches in pixels, and `motion` (n 2 2) takes what is near a point of image 0 to image 1.
    """
    points0, points1, motion = points0.nan_to_num(), points1.nan_to_num(), motion.nan_to_num()
    light0, light1 = light0.float(), light1.float()
    places, weights = window(pair.device)
    x, y = (points0[:, None] + places).unbind(2)
    template, spread = _normalized(_sample(light0, pair, x, y), weights)
    across = _sample(light0, pair, x + 1, y) - _sample(light0, pair, x - 1, y)
    down = _sample(light0, pair, x, y + 1) - _sample(light0, pair, x, y - 1)
    # How the normalized window changes when it moves; changes of gain and level are projected out.
    slopes = []
    for change in (across, down):
        slope = change / (2 * spread)
        slope = slope - (slope @ weights)[:, None]
        slopes.append(slope - template * ((slope * template) @ weights)[:, None])
    xx, yy = (slope.square() @ weights + DAMPING for slope in slopes)
    xy = (slopes[0] * slopes[1]) @ weights
    inverse = 1 / (xx * yy - xy * xy)
    offsets = places @ motion.transpose(1, 2)  # n k 2
    move = torch.zeros_like(points1)
    correlations = []
    for turn in range(ROUNDS + 1):
        x, y = ((points1 + move)[:, None] + offsets).unbind(2)
        other, _ = _normalized(_sample(light1, pair, x, y), weights)
        correlations.append((other * template) @ weights)
        if turn == ROUNDS:
            break
        a, b = ((slope * other) @ weights for slope in slopes)  # the template is orthogonal to its slopes
        step = torch.stack([(yy * a - xy * b) * inverse, (xx * b - xy * a) * inverse], dim=1)
        step = step.nan_to_num() / (step.norm(dim=1, keepdim=True) / LONGEST).clamp(min=1)
        move = move - (motion @ step[:, :, None])[:, :, 0]
    area = motion[:, 0, 0] * motion[:, 1, 1] - motion[:, 0, 1] * motion[:, 1, 0]
    first, last = correlations[0], correlations[-1]
    good = (last > first + GAIN) & (last > LEAST) & (move.norm(dim=1) < FARTHEST)
    good = good & (area > 1 / LARGEST) & (area < LARGEST)
    # Windows that reach over the border, or might on the way, are not compared.
    good = good & _inside(light0, points0, torch.full_like(move, REACH + 1))
    good = good & _inside(light1, points1, motion.abs().sum(2) * REACH + FARTHEST)
    return move.masked_fill(~good[:, None], 0)


def _normalized(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Windows (n k) with mean 0 and deviation 1 under the weights, and their deviations (n 1)."""
    values = values - (values @ weights)[:, None]
    spread = (values.square() @ weights + EPSILON).sqrt()[:, None]
    return values / spread, spread


def _sample(light: Tensor, pair: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Brightness (b h w) of the images `pair` (n) at places (n k) in pixels, bilinear, clamped: (n k)."""
    _, height, width = light.shape
    x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    left, top = x.long(), y.long()
    right, bottom = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)
    flat, own = light.flatten(), (pair * (height * width))[:, None]
    x, y = x - left, y - top
    above = torch.lerp(flat[own + top * width + left], flat[own + top * width + right], x)
    below = torch.lerp(flat[own + bottom * width + left], flat[own + bottom * width + right], x)
    return torch.lerp(above, below, y)


def _inside(light: Tensor, points: Tensor, reach: Tensor) -> Tensor:
    """Whether windows around these points (n 2) that reach so far (n 2) lie inside."""
    (x, y), (far_x, far_y) = (points - reach).unbind(1), (points + reach).unbind(1)
    return (x >= 0) & (y >= 0) & (far_x <= light.shape[2] - 1) & (far_y <= light.shape[1] - 1)
