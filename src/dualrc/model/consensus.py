"""Neighbourhood consensus: learnt 4D convolutions over the correlation tensor, N(C) + N(C^T)^T."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualrc.kernels.consensus as kernel
from dualrc.config import ConsensusConfig
from dualrc.errors import ConfigError
from dualrc.kernels import native
from dualrc.model import trace
from dualrc.model.correlation import mutual_filter

_CPU_ROWS = 8  # fewer compute too much of the halo twice, more fall out of the cache
_CPU_VALUES = 2**20  # hidden values of a walk's slab for each thread, near the cache's size
_C_COLUMNS, _C_CHANNELS = 8, 8  # of picture 1, and of a direction, that the kernel in C takes together
_C_VALUES = 2**22  # hidden values that it holds, which stay in the cache that all cores share,
_C_ROWS = 8  # but no fewer rows of picture 1, as each time two more are worked out than needed
_ABREAST = 2  # columns of picture 0 that share one convolution, whose vectors would else be half empty


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
        self._for_kernels: tuple[tuple[Any, ...], kernel.Prepared] | None = None
        for size, inputs, outputs in zip(sizes, (1, *channels[:-1]), channels, strict=True):
            bound = 0.5 / math.sqrt(inputs * size**4)
            weight = torch.empty(outputs, inputs, *[size] * 4).uniform_(-bound, bound)
            weight[:, :, size // 2, size // 2, size // 2, size // 2] += 1 / inputs  # starts near the identity
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(outputs)))

    def forward(self, scores: Tensor, max_values: int | None = None) -> Tensor:
        """(b h0 w0 h1 w1) -> the same; about `max_values` hidden values are held at a time."""
        if kernel.supported(scores, list(self.weights)):
            trace.note("kernel.consensus", "triton")
            return kernel.apply(scores, self._prepared(scores.dtype), max_values)
        if not scores.is_cuda and not torch.is_grad_enabled() and self._is_plain():
            layers = list(self.weights), list(self.biases)
            if native.usable(scores, *self.weights) and len(self.biases[0]) % _C_CHANNELS == 0:
                trace.note("kernel.consensus", "C")
                return _natively(scores, *layers, max_values)
            trace.note("kernel.consensus", "walk")
            result = torch.empty_like(scores)
            for one, out in zip(scores, result, strict=True):
                _walk(one, *layers, max_values, out=out)
            return result
        height = scores.shape[1]
        rows = height
        if not scores.is_cuda and not torch.is_grad_enabled():
            rows = min(rows, _CPU_ROWS)
        if max_values is not None:
            rows = max(1, min(rows, max_values // (scores[:, 0].numel() * self._values_per_entry())))
        trace.note("kernel.consensus", f"slabs of {rows} rows")
        slabs = []
        for start in range(0, height, rows):
            one, other = self._rows(scores, len(self.weights), start, min(start + rows, height))
            slabs.append(one + other)
        return (torch.cat(slabs, dim=1) if len(slabs) > 1 else slabs[0])[..., 0]

    def filtered(self, scores: Tensor, max_values: int | None = None, *, overwrite: bool = False) -> Tensor:
        """Mutual filter, consensus, mutual filter: (b h0 w0 h1 w1) -> the same; `overwrite` as in mutual_filter."""
        if kernel.supported(scores, list(self.weights)):
            trace.note("kernel.consensus", "triton")
            prepared = self._prepared(scores.dtype)
            return kernel.mutual_filter(kernel.apply(scores, prepared, max_values, maxima=kernel.maxima_of(scores)))
        return mutual_filter(self(mutual_filter(scores, overwrite=overwrite), max_values), overwrite=True)

    def _prepared(self, dtype: torch.dtype) -> kernel.Prepared:
        """The weights as the kernels read them, made once for as long as they don't change."""
        weights, biases = list(self.weights), list(self.biases)
        state = (dtype, *((id(p), p.device, p._version) for p in weights + biases))
        if self._for_kernels is None or self._for_kernels[0] != state:
            self._for_kernels = state, kernel.prepare(weights, biases, dtype)
        return self._for_kernels[1]

    def _is_plain(self) -> bool:
        """Whether this is the paper's two layers of kernel 3."""
        return [w.shape[2] for w in self.weights] == [3, 3]

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


def _natively(scores: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], max_values: int | None) -> Tensor:
    """Two layers of kernel 3 in both directions, by C: (b h0 w0 h1 w1) -> the same."""
    height0, width0, height1, width1 = scores.shape[1:]
    turned = [weight.permute(0, 1, 4, 5, 2, 3) for weight in weights]
    first = torch.cat([weights[0], turned[0]])[:, 0].flatten(1)  # 2c 81
    second = torch.cat([weights[1], turned[1]], dim=1)[0].flatten(1)
    # Of picture 1 so many rows at a time, for each of which there are hidden channels in three rows of picture 0.
    row = 3 * width0 * (math.ceil(width1 / _C_COLUMNS) * _C_COLUMNS + 2) * len(first)
    rows = max(_C_ROWS, _C_VALUES // row - 2)
    if max_values is not None:
        rows = min(rows, max_values // row - 2)
    strip = max(2, min(rows, height1 + 1) // 2 * 2)
    hidden = scores.new_empty((strip + 2) * row)
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    for one, out in zip(scores, result, strict=True):
        native.call(
            "consensus",
            scores=one,
            first=first.T,
            bias=biases[0].repeat(2),
            second=second.T,
            hidden=hidden,
            out=out,
            height0=height0,
            width0=width0,
            height1=height1,
            width1=width1,
            channels=len(first),
            strip=strip,
            last_bias=biases[1].item(),
        )
    return result


def _walk(
    scores: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], max_values: int | None, *, out: Tensor
) -> None:
    """The same for one tensor (h0 w0 h1 w1) by torch, for a CPU.

    Walks over the rows of picture 0. Each slab of hidden rows is made once, adds what it has for the rows around it,
    and is forgotten; a row is finished when the slab below has added its part.
    """
    height, width, *there = scores.shape
    first, first_bias, second = _abreast(weights[0]), biases[0].repeat(2 * _ABREAST), _abreast_back(weights[1])
    blocks = math.ceil(width / _ABREAST)
    columns = blocks * _ABREAST
    offsets = [(row, column) for row in range(3) for column in range(_ABREAST + 2)]
    per_row = columns * there[0] * there[1] * 2 * len(biases[0])
    most = _CPU_VALUES * torch.get_num_threads()
    rows = max(1, min(height, min(most, max_values or most) // per_row))
    sums = scores.new_zeros(2, rows + 2, columns + 2, *there)  # of both directions, with a margin of one cell

    def finish(start: int, count: int) -> None:
        """Rows of the result whose sums begin at the first row of `sums`."""
        skip = max(0, -start)
        one, other = (sums[:, skip:count, 1 : 1 + width] + biases[1]).relu_()
        torch.add(one, other, out=out[start + skip : start + count])

    for start in range(0, height, rows):
        count = min(rows, height - start)
        above, below = min(start, 1), min(height - start - count, 1)
        slab = scores[start - above : start + count + below]
        slab = F.pad(slab, (0, 0, 0, 0, 1, columns + 1 - width, 1 - above, 1 - below))
        planes = torch.stack([slab[y : y + count, x : x + columns : _ABREAST] for y, x in offsets], dim=4)
        hidden = F.conv2d(planes.flatten(0, 1).movedim(3, 1), first, first_bias, padding=1).relu_()
        if columns > width:  # columns beyond the picture count as zero
            spare = hidden.unflatten(0, (count, blocks)).unflatten(2, (2, _ABREAST, -1))
            spare[:, -1, :, width - columns :] = 0
        parts = F.conv2d(hidden, second, padding=1, groups=2).contiguous()  # planes of their own add up faster
        parts = parts.unflatten(0, (count, blocks)).unflatten(2, (2, len(offsets)))
        for number, (y, x) in enumerate(offsets):
            sums[:, y : y + count, x : x + columns : _ABREAST] += parts[:, :, :, number].movedim(2, 0)
        finish(start - 1, count)
        sums[:, :2] = sums[:, count : count + 2].clone()
        sums[:, 2:] = 0
    finish(height - 1, 1)


def _abreast(weight: Tensor) -> Tensor:
    """The first layer for columns abreast: (c 1 3 3 3 3) -> (2 directions * columns * c, 3 * (columns + 2), 3, 3)."""
    kernel = weight.new_zeros(2, _ABREAST, len(weight), 3, _ABREAST + 2, 3, 3)
    for direction, turned in enumerate((weight, weight.permute(0, 1, 4, 5, 2, 3))):
        for column in range(_ABREAST):
            kernel[direction, column, :, :, column : column + 3] = turned[:, 0]
    return kernel.flatten(3, 4).flatten(0, 2)


def _abreast_back(weight: Tensor) -> Tensor:
    """The second layer as what columns abreast add to the rows and columns around them.

    (1 c 3 3 3 3) -> (2 directions * 3 * (columns + 2), columns * c, 3, 3), the directions being groups.
    """
    kernel = weight.new_zeros(2, 3, _ABREAST + 2, _ABREAST, weight.shape[1], 3, 3)
    for direction, turned in enumerate((weight, weight.permute(0, 1, 4, 5, 2, 3))):
        for column in range(_ABREAST):
            # What lies one row above adds to this row by the kernel's row below, and so on.
            kernel[direction, :, column : column + 3, column] = turned[0].flip(1, 2).movedim(0, 2)
    return kernel.flatten(3, 4).flatten(0, 2)
