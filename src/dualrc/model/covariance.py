"""Covariance of matches from the normal equations of the photometric alignment.

The inverse normal matrix of the alignment is large along directions without texture. It is scaled by the part of the
brightness that the alignment leaves unexplained, because noise, changed lighting and a wrong local motion increase
both this part and the error of a match.
"""

import torch
from torch import Tensor

from dualrc.model.align import normalized, sample, template, window

# Fitted by `python benchmarks/covariance.py --sequences hpatches oxford --fit`, in pixels of the network input.
# Variance that does not depend on the texture.
FLOOR = 0.00165
# Factor of the inverse normal matrix.
SCALE = 0.193
# Exponent of the unexplained part of the brightness.
POWER = 0.709
# Added to the diagonal of the normal matrix. Limits the variance where there is no texture.
DAMPING = 0.0141
# Smallest unexplained part of the brightness. Interpolation and rounding leave about as much.
LEAST = 0.002
# Side of the squares whose matches determine the local motion, in pixels.
_SIDE = 12
# Weight of the identity in the local motion, in squared pixels.
_PRIOR = 4.0
# Fits of the local motion, and the residual in pixels that halves the weight of a match.
_FITS, _STRAY = 3, 2.0


def covariances(normal: Tensor, unexplained: Tensor) -> Tensor:
    """Return the covariances (n 2 2), in squared pixels, of matches with this `evidence`."""
    xx, yy, xy = normal[:, 0, 0] + DAMPING, normal[:, 1, 1] + DAMPING, normal[:, 0, 1]
    # Written out, because a general inverse is not exactly symmetric.
    scale = SCALE * unexplained**POWER / (xx * yy - xy * xy)
    across = -scale * xy
    entries = torch.stack([FLOOR + scale * yy, across, across, FLOOR + scale * xx], dim=1)
    return entries.reshape(-1, 2, 2)


def evidence(light0: Tensor, light1: Tensor, points0: Tensor, points1: Tensor, motion: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normal matrices (n 2 2) of the windows in image 1, and the unexplained parts (n), 0 to 1.

    `light0` and `light1` are the brightness images (1 h w). `points0` and `points1` (n 2) are the matches in pixels.
    `motion` (n 2 2) is the `local_motion` around them.
    """
    places, weights = window(points0.device)
    pair = torch.zeros(len(points0), dtype=torch.long, device=points0.device)
    x, y = (points0[:, None] + places).unbind(2)
    one, _ = normalized(sample(light0, pair, x, y), weights)
    x, y = (points1[:, None] + places @ motion.transpose(1, 2)).unbind(2)
    other, _ = normalized(sample(light1, pair, x, y), weights)
    unexplained = (1 - (one * other) @ weights).clamp(LEAST, 1)
    # (n 2 k)
    slopes = torch.stack(template(light1, pair, points1)[1], dim=1)
    return (slopes * weights) @ slopes.transpose(1, 2), unexplained


def local_motion(points0: Tensor, points1: Tensor, scores: Tensor) -> Tensor:
    """Fit the linear map (n 2 2) from image 0 to image 1 to the matches in the squares around each match."""
    if not len(points0):
        return points0.new_zeros((0, 2, 2))
    columns, rows = (points0 / _SIDE).long().clamp(min=0).unbind(1)
    width, height = int(columns.max()) + 1, int(rows.max()) + 1
    square = rows * width + columns
    # Offsets from the centers of the images keep the sums of squares small.
    before, after = (points.double() - points.double().mean(0) for points in (points0, points1))
    # (n 5): 1, x0, y0, x1, y1
    values = torch.cat([torch.ones_like(before[:, :1]), before, after], dim=1)
    products = values[:, :3, None] * values[:, None, :]
    weights, motion = scores.double().clamp(min=1e-3), None
    prior = _PRIOR * torch.eye(2, dtype=torch.float64, device=points0.device)
    for _ in range(_FITS):
        sums = torch.zeros((height * width, 15), dtype=torch.float64, device=points0.device)
        sums.index_add_(0, square, (products * weights[:, None, None]).flatten(1))
        sums = sums.T.reshape(1, 15, height, width)
        # Three by three squares.
        sums = torch.nn.functional.avg_pool2d(sums, 3, 1, 1, divisor_override=1)
        here = sums.reshape(3, 5, -1).permute(2, 0, 1)
        # Central moments of the squares.
        mean = here[:, 0] / here[:, 0, :1].clamp(min=1e-12)
        central = here[:, 1:, 1:] - here[:, 1:, :1] * mean[:, None, 1:]
        own = torch.linalg.solve(central[:, :, :2] + prior, central[:, :, 2:] + prior)
        motion = own[square].transpose(1, 2)
        offset = values - mean[square]
        stray = offset[:, 3:] - (motion @ offset[:, 1:3, None])[:, :, 0]
        weights = scores.double().clamp(min=1e-3) / (1 + (stray.norm(dim=1) / _STRAY) ** 2)
    assert motion is not None
    return motion.to(points0.dtype)
