"""Neighbourhood consensus: learnt 4D convolutions over the correlation tensor, N(C) + N(C^T)^T."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import ConsensusConfig
from dualrc.errors import ConfigError

_CPU_ROWS = 8  # fewer compute too much of the halo twice, more fall out of the cache


class Consensus(nn.Module):
    """4D convolutions with ReLU, applied in both matching directions and added.

    The transposed direction is the same tensor convolved with transposed kernels, so nothing is ever transposed but
    those. The tensor is walked in slabs of picture 0's rows, because the hidden channels of all of it would not fit.
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
        if not scores.is_cuda and not torch.is_grad_enabled():
            rows = min(rows, _CPU_ROWS)
        if max_values is not None:
            rows = max(1, min(rows, max_values // (scores[:, 0].numel() * self._values_per_entry())))
        slabs = []
        for start in range(0, height, rows):
            one, other = self._rows(scores, len(self.weights), start, min(start + rows, height))
            slabs.append(one + other)
        return (torch.cat(slabs, dim=1) if len(slabs) > 1 else slabs[0])[..., 0]

    def _values_per_entry(self) -> int:
        """How many values the two directions hold at their widest for one entry of the tensor."""
        return max(2 * (w.shape[2] ** 2 * min(w.shape[:2]) + sum(w.shape[:2])) for w in self.weights)

    def _rows(self, scores: Tensor, layers: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows start to stop of picture 0 after so many layers, in both directions: b rows w0 h1 w1 c each."""
        if layers == 0:
            slab = scores[:, start:stop, ..., None]
            return slab, slab
        weight, bias = self.weights[layers - 1], self.biases[layers - 1]
        halo = weight.shape[2] // 2
        first, last = max(start - halo, 0), min(stop + halo, scores.shape[1])
        one, other = self._rows(scores, layers - 1, first, last)
        rows = (start - first, stop - first)
        turned = weight.permute(0, 1, 4, 5, 2, 3)
        if one is other:  # the first layer: one convolution makes the channels of both directions
            one, other = conv4d(one, torch.cat([weight, turned]), bias.repeat(2), rows).relu_().chunk(2, dim=5)
            return one, other
        return conv4d(one, weight, bias, rows).relu_(), conv4d(other, turned, bias, rows).relu_()


def conv4d(inputs: Tensor, weight: Tensor, bias: Tensor, rows: tuple[int, int]) -> Tensor:
    """4D convolution with zero padding and channels last: (b r w0 h1 w1 i), (o i k k k k), (o) -> (b r' w0 h1 w1 o).

    Gives only the rows of picture 0 from rows[0] to rows[1]; what lies beyond the rows given counts as zero.
    """
    count, columns = rows[1] - rows[0], inputs.shape[2]
    outputs, channels, size = weight.shape[:3]
    halo = size // 2
    offsets = [(row - halo, column - halo) for row in range(size) for column in range(size)]
    if channels <= outputs:
        # Picture 0's neighbours become channels of one 2D convolution over picture 1.
        above, below = max(halo - rows[0], 0), max(rows[1] + halo - inputs.shape[1], 0)
        padded = F.pad(inputs, (0, 0, 0, 0, 0, 0, halo, halo, above, below))
        top = rows[0] + above
        planes = torch.stack(
            [padded[:, top + y : top + y + count, halo + x : halo + x + columns] for y, x in offsets], dim=5
        )  # b r' w0 h1 w1 kk i
        kernel = weight.permute(0, 2, 3, 1, 4, 5).flatten(1, 3)  # o (kk i) k k
        result = F.conv2d(planes.flatten(5).flatten(0, 2).movedim(3, 1), kernel, bias, padding=halo)
        return result.movedim(1, 3).unflatten(0, (-1, count, columns))
    # The other way round: one 2D convolution makes what each neighbour contributes, and the shifts are added.
    kernel = weight.permute(2, 3, 0, 1, 4, 5).flatten(0, 2)  # (kk o) i k k
    parts = F.conv2d(inputs.flatten(0, 2).movedim(3, 1), kernel, padding=halo)
    parts = parts.movedim(1, 3).unflatten(0, inputs.shape[:3]).unflatten(5, (len(offsets), outputs))
    total = bias.expand(len(inputs), count, *inputs.shape[2:5], outputs).clone()
    for index, (y, x) in enumerate(offsets):
        # Output row r, column c takes the part that input row rows[0] + r + y, column c + x has for it.
        from_row, to_row = max(rows[0] + y, 0), min(rows[1] + y, inputs.shape[1])
        from_column, to_column = max(x, 0), min(columns + x, columns)
        if from_row < to_row and from_column < to_column:
            skip = from_row - rows[0] - y
            there = total[:, skip : skip + to_row - from_row, from_column - x : to_column - x]
            there += parts[:, from_row:to_row, from_column:to_column, :, :, index]
    return total
