"""The coarse 4D correlation and its soft mutual filter."""

import torch
from torch import Tensor

_VALUES = 2**20  # worked on together, which stay in a CPU's cache


def normalize(features: Tensor) -> Tensor:
    """Unit features: (b c h w) divided by sqrt(sum of squares + 1e-6) over channels, as published."""
    norm = torch.linalg.vector_norm(features, dim=1, keepdim=True, dtype=torch.float32)
    return features * torch.rsqrt(norm.square() + 1e-6).to(features.dtype)


def correlate(coarse0: Tensor, coarse1: Tensor) -> Tensor:
    """Cosine correlation: (b c h0 w0), (b c h1 w1) -> (b h0 w0 h1 w1)."""
    return torch.einsum("bchw,bcij->bhwij", normalize(coarse0), normalize(coarse1))


def mutual_filter(scores: Tensor, *, overwrite: bool = False) -> Tensor:
    """Soft mutual nearest neighbours, M: (b h0 w0 h1 w1), each score times its share of both rows' maxima.

    Where they may be overwritten, they are, unless gradients are wanted.
    """
    flat = scores.flatten(3).flatten(1, 2)  # b n0 n1
    best0 = flat.amax(1, keepdim=True) + 1e-5  # over picture 0, for each cell of picture 1
    best1 = flat.amax(2, keepdim=True) + 1e-5
    if torch.is_grad_enabled():
        return (flat * (flat / best0) * (flat / best1)).view_as(scores)
    # The same, some rows at a time.
    result = flat if overwrite else torch.empty_like(flat)
    rows = max(1, _VALUES // max(1, len(flat) * flat.shape[2]))
    for start in range(0, flat.shape[1], rows):
        some = slice(start, start + rows)
        own = flat[:, some]
        torch.mul((own / best0).mul_(own), own / best1[:, some], out=result[:, some])
    return result.view_as(scores)
