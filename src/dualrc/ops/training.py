"""Operations for training on a GPU: bfloat16, in forms whose gradients are fast too.

Both consensus layers run as dense 2D convolutions over the coordinates of image 1, channels last. The neighbors in the
coordinates of image 0 are channels. One pass spreads them before the first layer, and another pass sums them after the
second. Each pass is the gradient of the other.

With so few channels, tensor cores would mostly multiply padding. Channels-last memory of several columns is the same as
that of one column with as many times the channels, so a convolution over such groups of columns needs no copies. Its
kernel has zeros, but is as wide as those of usual networks.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from dualrc.model.backbone import CompactBackbone
from dualrc.model.cells import MaskPair, TensorPair
from dualrc.model.consensus import Consensus, swap_images
from dualrc.model.context import Context
from dualrc.model.engine import Engine

# Neighbors in the coordinates of image 0: a kernel of 3 x 3.
_NEIGHBORS = 9
# The convolutions have a multiple of this number of channels.
_FILLED = 8
# Maximum number of columns that are convolved as one.
_COLUMNS = 4


class TrainingEngine(Engine):
    """The definition, with context and consensus in bfloat16, and a consensus whose gradients are fast."""

    name = "training"

    def prepare(self, backbone: nn.Module) -> nn.Module:
        """Return a copy of the backbone whose up-sampling has a fast gradient."""
        prepared = copy.deepcopy(backbone)
        if isinstance(prepared, CompactBackbone):
            prepared.upsample = FastUpsample()
        return prepared

    def context(self, context: Context, coarse: TensorPair, valid: MaskPair) -> tuple[Tensor, Tensor]:
        """Condition coarse features on the other image; products in bfloat16."""
        with torch.autocast(coarse[0].device.type, torch.bfloat16):
            return super().context(context, coarse, valid)

    def consensus(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Apply the 4D convolutions. Networks other than two layers with kernel size 3 use the definition."""
        shapes = [weight.shape[2:] for weight in consensus.weights]
        if shapes != [(3, 3, 3, 3)] * 2:
            with torch.autocast(scores.device.type, torch.bfloat16):
                return super().consensus(scores, consensus)
        return two_layers(scores, list(consensus.weights), list(consensus.biases), torch.bfloat16)


class FastUpsample(nn.Module):
    """Bilinear up-sampling by 2 with a fast gradient, in the type of the input: (b c h w) -> (b c 2h 2w)."""

    def forward(self, x: Tensor) -> Tensor:
        return _Upsample.apply(x)  # type: ignore[no-untyped-call]


class _Upsample(Function):
    """Bilinear up-sampling by 2, whose gradient has no scattered additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        for axis in (2, 3):
            # Each cell is read by its own two halves, and by the nearest half of both neighbors. Borders are repeated.
            first, last = gradient.unflatten(axis, (-1, 2)).unbind(axis + 1)
            cells = first.shape[axis]
            before = torch.cat([first.narrow(axis, 0, 1), last.narrow(axis, 0, cells - 1)], axis)
            after = torch.cat([first.narrow(axis, 1, cells - 1), last.narrow(axis, cells - 1, 1)], axis)
            gradient = (first + last) * 0.75 + (before + after) * 0.25
        return gradient


def two_layers(scores: Tensor, weights: list[Tensor], biases: list[Tensor], half: torch.dtype) -> Tensor:
    """Compute N(C) + N(C^T)^T of scores (b h0 w0 h1 w1) in type `half`; weights (c 1 3 3 3 3), (1 c 3 3 3 3)."""
    (weight1, weight2), (bias1, bias2), size = weights, biases, scores.shape
    hidden = len(weight1)
    # (2c 9 3 3)
    first = torch.cat([weight1, swap_images(weight1)])[:, 0].flatten(1, 2)
    # (9 c 3 3) each
    kernels = [w[0].flatten(1, 2).transpose(0, 1) for w in (weight2, swap_images(weight2))]
    # Each direction reads its own half of the channels.
    second = torch.cat([F.pad(kernels[0], (0, 0, 0, 0, 0, hidden)), F.pad(kernels[1], (0, 0, 0, 0, hidden, 0))])
    columns = math.gcd(_COLUMNS, size[4])
    filled = _NEIGHBORS + -_NEIGHBORS % _FILLED
    x = _Spread.apply(scores.to(half).flatten(3)[..., None], filled)  # type: ignore[no-untyped-call]
    # (n h1 w1 16), (n h1 w1 2c), (n h1 w1 18)
    x = x.flatten(0, 2).unflatten(1, size[3:])
    x = _convolve(x, first.to(half), columns, bias1.repeat(2).to(half)).relu()
    x = _convolve(x, second.to(half), columns)
    # (b h0 w0 m 18)
    parts = x.flatten(1, 2).unflatten(0, size[:3])
    both: Tensor = (_Gather.apply(parts, 2).float() + bias2).relu()  # type: ignore[no-untyped-call]
    return both.sum(4).view(size)


def _convolve(values: Tensor, weight: Tensor, columns: int, bias: Tensor | None = None) -> Tensor:
    """Convolve, zero-padded, this number of columns as one: (n h w i or more), (o i 3 3) -> (n h w o or more)."""
    # Further output channels are zero, and further input channels are not read.
    missing = -len(weight) % (_FILLED // columns)
    weight = F.pad(weight, (0, 0, 0, 0, 0, values.shape[3] - weight.shape[1], 0, missing))
    bias = None if bias is None else F.pad(bias, (0, missing)).repeat(columns)
    x = values.unflatten(2, (-1, columns)).flatten(3).movedim(3, 1)
    x = F.conv2d(x, _grouped(weight, columns), bias, padding=1)
    return x.movedim(1, 3).unflatten(3, (columns, -1)).flatten(2, 3)


def _grouped(weight: Tensor, columns: int) -> Tensor:
    """Return the kernel over groups of columns that equals one over columns: (o i 3 3) -> (columns*o columns*i 3 3)."""
    # Row c is the kernel of column c of a group, at its place among the columns of three groups.
    rows = [F.pad(weight, (columns - 1 + c, 2 * columns - 2 - c)) for c in range(columns)]
    # (c o i 3 3 c)
    kernel = torch.stack(rows).unflatten(4, (3, columns))
    return kernel.permute(0, 1, 5, 2, 3, 4).flatten(2, 3).flatten(0, 1)


def _shifts(values: Tensor, sign: int) -> list[Tensor]:
    """Return values (b h w m c) of the 9 neighbors, zero outside the border; a negative sign mirrors them."""
    height, width = values.shape[1:3]
    padded = F.pad(values, (0, 0, 0, 0, 1, 1, 1, 1))
    steps = [(1 + sign * (y - 1), 1 + sign * (x - 1)) for y in range(3) for x in range(3)]
    return [padded[:, y : y + height, x : x + width] for y, x in steps]


def _spread(values: Tensor, sign: int, channels: int) -> Tensor:
    spread = torch.stack(_shifts(values, sign), dim=5).flatten(4)
    return F.pad(spread, (0, channels - spread.shape[4]))


def _gather(values: Tensor, sign: int, groups: int) -> Tensor:
    total = torch.zeros((), device=values.device)
    for number, neighbor in enumerate(_shifts(values, sign)):
        channels = neighbor[..., number : groups * _NEIGHBORS : _NEIGHBORS]
        total = total + channels.float()
    return total.to(values.dtype)


class _Spread(Function):
    """Stack neighbors in image 0 as channels: (b h w m g) -> (b h w m 9g, padded); channel 9g + n is group g's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, channels: int) -> Tensor:
        ctx.groups = values.shape[4]
        return _spread(values, 1, channels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, -1, ctx.groups), None


class _Gather(Function):
    """Sum the channels of all neighbors: (b h w m 9g or more) -> (b h w m g)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, groups: int) -> Tensor:
        ctx.channels = values.shape[4]
        return _gather(values, 1, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _spread(gradient, -1, ctx.channels), None
