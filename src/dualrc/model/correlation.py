"""The coarse 4D correlation tensor C and the soft mutual nearest neighbor filter M (section 3.1 of the paper)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.pixels import FINE_STRIDE, STRIDE

# Added to maxima, which may be zero, as in the published code.
EPSILON = 1e-5


def normalize(features: Tensor) -> Tensor:
    """Normalize features over channels: (b c h w) divided by sqrt(sum of squares + 1e-6), as published."""
    norm = torch.linalg.vector_norm(features, dim=1, keepdim=True, dtype=torch.float32)
    return features * torch.rsqrt(norm.square() + 1e-6).to(features.dtype)


def correlate(coarse0: Tensor, coarse1: Tensor) -> Tensor:
    """Compute C, the cosine correlation: (b c h0 w0), (b c h1 w1) -> (b h0 w0 h1 w1)."""
    return torch.einsum("bchw,bcij->bhwij", normalize(coarse0), normalize(coarse1))


def valid_cells(valid: Tensor, stride: int = STRIDE) -> Tensor:
    """Return cells of this stride that contain a valid square of 4x4 pixels: (b H W) bool -> (b h w)."""
    return F.max_pool2d(valid[:, None].float(), stride // FINE_STRIDE)[:, 0] > 0


def max_pool(scores: Tensor, size: int) -> Tensor:
    """Take the maximum over blocks of size**4 entries; incomplete blocks at the end are dropped."""
    for axis in (1, 2, 3, 4):
        whole = scores.shape[axis] // size * size
        scores = scores.narrow(axis, 0, whole).unflatten(axis, (-1, size)).amax(axis + 1)
    return scores


def mask_cells(scores: Tensor, valid0: Tensor | None, valid1: Tensor | None, stride: int = STRIDE) -> Tensor:
    """Set scores of cells without a valid square of 4x4 pixels to zero; masks are (b H W) bool, None for all valid."""
    for valid, axes in ((valid0, (1, 2)), (valid1, (3, 4))):
        # A cell outside the mask must not compete with cells inside it.
        if valid is not None:
            cells = valid_cells(valid, stride)
            scores = scores * cells.view(*[n if i in (0, *axes) else 1 for i, n in enumerate(scores.shape)])
    return scores


def mutual_filter(scores: Tensor) -> Tensor:
    """Apply M: multiply each score by r^A and r^B, its ratios to the maximum over each image; same shape."""
    # Maximum over image 0 for each cell of image 1, and the reverse.
    best0 = scores.amax((1, 2), keepdim=True) + EPSILON
    best1 = scores.amax((3, 4), keepdim=True) + EPSILON
    return scores * (scores / best0) * (scores / best1)
