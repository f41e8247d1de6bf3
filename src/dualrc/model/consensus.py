"""Neighborhood consensus: learned 4D convolutions, C~ = N(C) + N(C^T)^T (section 3.1 of the paper)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import ConsensusConfig
from dualrc.errors import ConfigError


class Consensus(nn.Module):
    """4D convolutions N with ReLU, applied in both matching directions and summed."""

    def __init__(self, config: ConsensusConfig) -> None:
        super().__init__()
        sizes, channels = config.kernel_sizes, config.channels
        if len(sizes) != len(channels) or not sizes or channels[-1] != 1 or any(size % 2 == 0 for size in sizes):
            raise ConfigError(
                f"Cannot build a consensus with kernel sizes {sizes} and channels {channels}; give as many odd sizes "
                "as channels, and 1 as the last channel."
            )
        # (out in k k k k) The kernel spans rows and columns of image 0, then rows and columns of image 1.
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for size, inputs, outputs in zip(sizes, (1, *channels[:-1]), channels, strict=True):
            uniform = config.initialization == "uniform"
            bound = (1 if uniform else 0.5) / math.sqrt(inputs * size**4)
            weight = torch.empty(outputs, inputs, *[size] * 4).uniform_(-bound, bound)
            bias = torch.zeros(outputs)
            if uniform:
                bias.uniform_(-bound, bound)
            else:
                weight[:, :, size // 2, size // 2, size // 2, size // 2] += 1 / inputs
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(bias))

    def forward(self, scores: Tensor) -> Tensor:
        """Compute N(C) + N(C^T)^T: (b h0 w0 h1 w1) -> the same."""
        # N(C^T)^T equals C convolved with swapped kernels, so both directions run as two groups of channels.
        x, groups = scores[..., None], 1
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = conv4d(x, torch.cat([weight, swap_images(weight)]), bias.repeat(2), groups).relu_()
            groups = 2
        return x.sum(5)


def swap_images(weight: Tensor) -> Tensor:
    """Swap the images in a kernel, for the other matching direction: (o i k0 k0 k1 k1) -> (o i k1 k1 k0 k0)."""
    return weight.permute(0, 1, 4, 5, 2, 3)


def conv4d(inputs: Tensor, weight: Tensor, bias: Tensor, groups: int = 1) -> Tensor:
    """Convolve in 4D, zero-padded, channels last: (b h0 w0 h1 w1 i), (o i/groups k k k k) -> (b h0 w0 h1 w1 o)."""
    batch, height, width = inputs.shape[:3]
    outputs, channels, size = weight.shape[:3]
    halo = size // 2
    shifts = [(y, x) for y in range(size) for x in range(size)]
    if groups == 1 and channels <= outputs:
        # The neighbors in image 0 become input channels of one 2D convolution over image 1.
        padded = F.pad(inputs, (0, 0, 0, 0, 0, 0, halo, halo, halo, halo))
        planes = torch.stack([padded[:, y : y + height, x : x + width] for y, x in shifts], dim=5)
        # (o kk*i k k)
        kernel = weight.permute(0, 2, 3, 1, 4, 5).flatten(1, 3)
        result = F.conv2d(planes.flatten(5).flatten(0, 2).movedim(3, 1), kernel, bias, padding=halo)
        return result.movedim(1, 3).unflatten(0, (batch, height, width))
    # One 2D convolution over image 1 computes the contribution to each neighbor in image 0.
    # The loop below shifts and adds these contributions. The kernel is (groups*kk*o i k k).
    kernel = weight.unflatten(0, (groups, -1)).permute(0, 3, 4, 1, 2, 5, 6).flatten(0, 3)
    parts = F.conv2d(inputs.flatten(0, 2).movedim(3, 1), kernel, padding=halo, groups=groups)
    parts = parts.movedim(1, 3).unflatten(0, (batch, height, width)).unflatten(5, (groups, len(shifts), -1))
    total = bias.expand(batch, height, width, *inputs.shape[3:5], outputs).clone().unflatten(5, (groups, -1))
    for number, (y, x) in enumerate((y - halo, x - halo) for y, x in shifts):
        # Output (r, c) receives the contribution of input (r + y, c + x).
        rows, columns = (max(y, 0), min(height + y, height)), (max(x, 0), min(width + x, width))
        if rows[0] < rows[1] and columns[0] < columns[1]:
            target = total[:, rows[0] - y : rows[1] - y, columns[0] - x : columns[1] - x]
            target += parts[:, rows[0] : rows[1], columns[0] : columns[1], :, :, :, number]
    return total.flatten(5)
