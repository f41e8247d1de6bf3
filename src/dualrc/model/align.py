"""Photometric alignment of matches by Gauss-Newton on image brightness.

Fine cells are four pixels apart, so refined matches are still off by one or two pixels. Around a correct match both
images show the same surface, possibly under different lighting, related by the local affine motion. A Gauss-Newton
step on the brightness removes the remaining error. Windows are normalized to zero mean and unit variance, so a change
of gain or offset has no effect.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.model.backbone import to_gray

# Pixels from a match to the edge of its window.
REACH = 12
# Pixels between the samples of a window.
STEP = 3
# Gauss-Newton steps in each direction.
ROUNDS = 1
# Added to the diagonal of the normal matrix. Prevents motion along directions without texture.
DAMPING = 0.01
# Largest motion of a match in one step, in pixels.
LONGEST = 1.0
# Largest total motion, in pixels. A match that would move farther keeps its position.
FARTHEST = 3.0
# Smallest correlation between the windows. A match below it keeps its position.
LEAST = 0.5
# Smallest increase of the correlation. A match that gains less keeps its position.
GAIN = 1e-4
# Added to variances, which may be zero.
EPSILON = 1e-6
# Largest ratio of areas between the images.
LARGEST = 16.0


def brightness(images: Tensor) -> Tensor:
    """Return the slightly blurred luminance of normalized images: (b 3 h w) -> (b h w). The blur suppresses noise."""
    gray = F.pad(to_gray(images), (2, 2, 2, 2), mode="replicate")[:, 0]
    # Four passes give the binomial kernel 1 4 6 4 1 along each axis, with a standard deviation of one pixel.
    for _ in range(4):
        gray = torch.lerp(gray[:, 1:], gray[:, :-1], 0.5)
        gray = torch.lerp(gray[:, :, 1:], gray[:, :, :-1], 0.5)
    return gray


@cache
@torch.inference_mode(False)
def window(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sample offsets of a window, (k 2) as (x, y) in pixels, and their Gaussian weights, (k)."""
    axis = torch.arange(-REACH, REACH + 1, STEP, device=device)
    places = torch.stack([axis.repeat(len(axis)), axis.repeat_interleave(len(axis))], dim=1).float()
    weights = torch.exp(places.square().sum(1) * (-1.125 / REACH**2))
    return places, weights / weights.sum()


@torch.no_grad()
def align(light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor) -> Tensor:
    """Return the motion (n 2), in pixels, that aligns the windows of points in image 1 with those in image 0.

    `light0` and `light1` are the brightness images (b h w). `pair` (n) selects the pair of the batch. `points0` and
    `points1` (n 2) are the matches in pixels. `motion` (n 2 2) is the local linear map from image 0 to image 1.
    """
    points0, points1, motion = points0.nan_to_num(), points1.nan_to_num(), motion.nan_to_num()
    light0, light1 = light0.float(), light1.float()
    places, weights = window(pair.device)
    values, slopes = template(light0, pair, points0)
    xx, yy = (slope.square() @ weights + DAMPING for slope in slopes)
    xy = (slopes[0] * slopes[1]) @ weights
    inverse = 1 / (xx * yy - xy * xy)
    # (n k 2)
    offsets = places @ motion.transpose(1, 2)
    move = torch.zeros_like(points1)
    correlations = []
    for turn in range(ROUNDS + 1):
        x, y = ((points1 + move)[:, None] + offsets).unbind(2)
        other, _ = normalized(sample(light1, pair, x, y), weights)
        correlations.append((other * values) @ weights)
        if turn == ROUNDS:
            break
        # The template drops out of the residual because it is orthogonal to its slopes.
        a, b = ((slope * other) @ weights for slope in slopes)
        step = torch.stack([(yy * a - xy * b) * inverse, (xx * b - xy * a) * inverse], dim=1)
        step = step.nan_to_num() / (step.norm(dim=1, keepdim=True) / LONGEST).clamp(min=1)
        move = move - (motion @ step[:, :, None])[:, :, 0]
    area = motion[:, 0, 0] * motion[:, 1, 1] - motion[:, 0, 1] * motion[:, 1, 0]
    first, last = correlations[0], correlations[-1]
    good = (last > first + GAIN) & (last > LEAST) & (move.norm(dim=1) < FARTHEST)
    good = good & (area > 1 / LARGEST) & (area < LARGEST)
    # Reject windows that cross the border, or could cross it while they move.
    good = good & _inside(light0, points0, torch.full_like(move, REACH + 1))
    good = good & _inside(light1, points1, motion.abs().sum(2) * REACH + FARTHEST)
    return move.masked_fill(~good[:, None], 0)


def template(light: Tensor, pair: Tensor, points: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the normalized windows (n k) around points (n 2), and their derivatives along x and y, (n k) each.

    The components of the derivatives along gain and offset are projected out.
    """
    places, weights = window(points.device)
    x, y = (points[:, None] + places).unbind(2)
    values, spread = normalized(sample(light, pair, x, y), weights)
    across = sample(light, pair, x + 1, y) - sample(light, pair, x - 1, y)
    down = sample(light, pair, x, y + 1) - sample(light, pair, x, y - 1)

    def slope(change: Tensor) -> Tensor:
        change = change / (2 * spread)
        change = change - (change @ weights)[:, None]
        return change - values * ((change * values) @ weights)[:, None]

    return values, (slope(across), slope(down))


def normalized(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize windows (n k) to weighted mean 0 and deviation 1; return them with their deviations (n 1)."""
    values = values - (values @ weights)[:, None]
    spread = (values.square() @ weights + EPSILON).sqrt()[:, None]
    return values / spread, spread


def sample(light: Tensor, pair: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Sample brightness (b h w) of images `pair` (n) at positions (n k) in pixels, bilinear and clamped: (n k)."""
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
    """Return whether windows around points (n 2) with half-extents `reach` (n 2) lie inside the image."""
    (x, y), (far_x, far_y) = (points - reach).unbind(1), (points + reach).unbind(1)
    return (x >= 0) & (y >= 0) & (far_x <= light.shape[2] - 1) & (far_y <= light.shape[1] - 1)
