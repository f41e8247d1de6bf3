"""Operations for training on a GPU: bfloat16, in forms whose gradients are fast too.

Both consensus layers run as dense 2D convolutions over the coordinates of image 1, channels last, with channels padded
to a multiple of 8 for tensor cores. The neighbors in the coordinates of image 0 are channels. One pass spreads them
before the first layer, and another pass sums them after the second. Each pass is the gradient of the other.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dualrc.model.cells import MaskPair, TensorPair
from dualrc.model.consensus import Consensus, swap_images
from dualrc.model.context import Context
from dualrc.model.engine import Engine

# Neighbors in the coordinates of image 0: a kernel of 3 x 3.
_NEIGHBORS = 9
# Channels are padded to a multiple of this.
_FILLED = 8


class TrainingEngine(Engine):
    """The definition, with context and consensus in bfloat16, and a consensus whose gradients are fast."""

    name = "training"

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
    x = _Spread.apply(scores.to(half).flatten(3)[..., None], 1)  # type: ignore[no-untyped-call]
    # (n 16 h1 w1), channels last
    x = x.flatten(0, 2).unflatten(1, size[3:]).movedim(3, 1)
    x = F.conv2d(x, _filled(first, 1).to(half), bias1.repeat(2).to(half), padding=1).relu()
    # (n 24 h1 w1)
    x = F.conv2d(x, _filled(second, 0).to(half), padding=1)
    # (b h0 w0 m 24)
    parts = x.movedim(1, 3).flatten(1, 2).unflatten(0, size[:3])
    both = _Gather.apply(parts, 1, 2).float()  # type: ignore[no-untyped-call]
    both = (both + bias2).relu()
    return both.sum(4).view(size)


def _filled(weight: Tensor, axis: int) -> Tensor:
    """Pad a kernel (o i k k) with zero channels along an axis, to a multiple of _FILLED."""
    missing = -weight.shape[axis] % _FILLED
    return F.pad(weight, (0, 0, 0, 0, 0, missing) if axis == 1 else (0, 0, 0, 0, 0, 0, 0, missing))


def _shifts(values: Tensor, sign: int) -> list[Tensor]:
    """Return values (b h w m c) of the 9 neighbors, zero outside the border; a negative sign mirrors them."""
    height, width = values.shape[1:3]
    padded = F.pad(values, (0, 0, 0, 0, 1, 1, 1, 1))
    steps = [(1 + sign * (y - 1), 1 + sign * (x - 1)) for y in range(3) for x in range(3)]
    return [padded[:, y : y + height, x : x + width] for y, x in steps]


def _spread(values: Tensor, sign: int) -> Tensor:
    channels = torch.stack(_shifts(values, sign), dim=5).flatten(4)
    return F.pad(channels, (0, -channels.shape[4] % _FILLED))


def _gather(values: Tensor, sign: int, groups: int) -> Tensor:
    total = torch.zeros((), device=values.device)
    for number, neighbor in enumerate(_shifts(values, sign)):
        channels = neighbor[..., number : groups * _NEIGHBORS : _NEIGHBORS]
        total = total + channels.float()
    return total.to(values.dtype)


class _Spread(Function):
    """Stack neighbors in image 0 as channels: (b h w m g) -> (b h w m 9g, padded); channel 9g + n is group g's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sign: int) -> Tensor:
        ctx.sign, ctx.groups = sign, values.shape[4]
        return _spread(values, sign)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, -ctx.sign, ctx.groups), None


class _Gather(Function):
    """Sum the channels of all neighbors: (b h w m 9g or more) -> (b h w m g)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sign: int, groups: int) -> Tensor:
        ctx.sign, ctx.channels = sign, values.shape[4]
        return _gather(values, sign, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        channels = _spread(gradient, -ctx.sign)
        return F.pad(channels, (0, ctx.channels - channels.shape[4])), None, None
