"""Neighbourhood consensus: learnt 4D convolutions over the correlation tensor, N(C) + N(C^T)^T."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import ConsensusConfig
from dualrc.errors import ConfigError


class Consensus(nn.Module):
    """4D convolutions with ReLU, applied in both matching directions and added.

    The transposed direction is the same tensor convolved with transposed kernels, so one pass serves both: the
    kernels of the two directions stand side by side as groups. The tensor is walked in slabs of picture 0's rows,
    because the hidden channels of all of it would not fit.
    """

    def __init__(self, config: ConsensusConfig) -> None:
        super().__init__()
        sizes, channels = config.kernel_sizes, config.channels
        if len(sizes) != len(channels) or not sizes or channels[-1] != 1 or any(size % 2 == 0 for size in sizes):
            raise ConfigError(
                f"Consensus with kernel sizes {sizes} and channels {channels} can't be built; give as many odd sizes "
                "as channels, and 1 as the last channel."
            )
        self.weights = nn.ParameterList()  # out in k k k k: picture 0's rows and columns, then picture 1's
        self.biases = nn.ParameterList()
        for size, inputs, outputs in zip(sizes, (1, *channels[:-1]), channels, strict=True):
            bound = 0.5 / math.sqrt(inputs * size**4)
            weight = torch.empty(outputs, inputs, *[size] * 4).uniform_(-bound, bound)
            weight[:, :, size // 2, size // 2, size // 2, size // 2] += 1 / inputs  # starts near the identity
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(outputs)))

    def forward(self, scores: Tensor, max_values: int | None = None) -> Tensor:
        """(b h0 w0 h1 w1) -> the same; about `max_values` hidden values are held at a time."""
        height = scores.shape[1]
        rows = height
        if max_values is not None:
            rows = max(1, min(height, max_values // (scores[:, 0].numel() * self._values_per_entry())))
        slabs = [self._rows(scores, len(self.weights), a, min(a + rows, height)) for a in range(0, height, rows)]
        both = torch.cat(slabs, dim=1) if len(slabs) > 1 else slabs[0]
        return both.sum(3)  # b h0 w0 2 h1 w1: the two directions added

    def _values_per_entry(self) -> int:
        """How many values a convolution holds at its widest for one entry of the tensor."""
        return max(2 * (w.shape[2] ** 2 * min(w.shape[:2]) + sum(w.shape[:2])) for w in self.weights)

    def _rows(self, scores: Tensor, layers: int, start: int, stop: int) -> Tensor:
        """Rows start to stop of picture 0 after so many layers: b rows w0 c h1 w1."""
        if layers == 0:
            return scores[:, start:stop, :, None]
        weight, bias = self.weights[layers - 1], self.biases[layers - 1]
        halo = weight.shape[2] // 2
        below, above = max(start - halo, 0), min(stop + halo, scores.shape[1])
        inputs = self._rows(scores, layers - 1, below, above)
        # Beyond the picture every layer sees zeros, not what the layer before would make of zeros.
        missing = (below - (start - halo), (stop + halo) - above)
        return F.relu(conv4d_pair(inputs, weight, bias, missing))


def conv4d_pair(inputs: Tensor, weight: Tensor, bias: Tensor, missing_rows: tuple[int, int]) -> Tensor:
    """Convolve with a 4D kernel and with its transpose: (b r w0 c h1 w1), (o i k k k k), (o) -> (b r' w0 2o h1 w1).

    Either c = i, and both kernels see the same channels, or c = 2i, and each sees its own half. Columns and picture
    1 are padded with zeros; rows only by `missing_rows`, so r' = r + sum(missing_rows) - k + 1.
    """
    batch, rows, columns, channels = inputs.shape[:4]
    outputs, size = weight.shape[0], weight.shape[2]
    groups = channels // weight.shape[1]
    halo = size // 2
    rows_out = rows + sum(missing_rows) - 2 * halo
    kernels = torch.stack([weight, weight.permute(0, 1, 4, 5, 2, 3)])  # 2 o i k k k k
    padded = F.pad(inputs, (0, 0, 0, 0, 0, 0, halo, halo, *missing_rows))
    offsets = [(row, column) for row in range(size) for column in range(size)]

    def shifted(values: Tensor, row: int, column: int) -> Tensor:
        return values[:, row : row + rows_out, column : column + columns]

    if channels <= 2 * outputs:
        # Picture 0's neighbours become channels of one 2D convolution over picture 1.
        planes = torch.stack([shifted(padded, *offset) for offset in offsets], dim=4)  # b r w c kk h1 w1
        kernel = kernels.flatten(3, 4).flatten(2, 3).flatten(0, 1)  # (2 o) (i kk) k k
        result = F.conv2d(planes.flatten(3, 4).flatten(0, 2), kernel, bias.repeat(2), padding=halo, groups=groups)
        return result.unflatten(0, (batch, rows_out, columns))
    # The other way round: one 2D convolution makes what each neighbour contributes, and the shifts are added.
    kernel = kernels.permute(0, 3, 4, 1, 2, 5, 6).flatten(0, 3)  # (2 kk o) i k k
    if groups == 2 and inputs.is_cuda:  # there, zeros cost less than groups do
        one, other = kernel.chunk(2)
        zeros = torch.zeros_like(one)
        kernel, groups = torch.cat([torch.cat([one, zeros], 1), torch.cat([zeros, other], 1)]), 1
    result = F.conv2d(padded.flatten(0, 2), kernel, padding=halo, groups=groups)
    result = result.unflatten(1, (2, len(offsets), outputs)).unflatten(0, (batch, -1, columns + 2 * halo))
    total = bias[:, None, None].expand(2, outputs, 1, 1)
    for index, offset in enumerate(offsets):
        total = total + shifted(result[:, :, :, :, index], *offset)  # b r w 2 o h1 w1
    return total.flatten(3, 4)
