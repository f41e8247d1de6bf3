"""A backbone in 8 bits, for CPUs that multiply bytes: its convolutions are four times as fast as in float32.

Weights are rounded once, each output channel by its own range; what goes into a convolution is rounded by the range
that it has just then, so nothing has to be calibrated. Sums are exact; results, shortcuts and upsampling are float32.
"""

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualrc.errors import WeightsError
from dualrc.model.backbone import ResidualBlock, fold_batch_norm

_MOST, _MOST_WEIGHT = 255, 127
_TINY = 1e-12  # the least range


class Bytes(NamedTuple):
    """Numbers in 8 bits: (values - zero) * scale."""

    values: Tensor  # uint8
    scale: float
    zero: int

    @staticmethod
    def of(x: Tensor, *, signed: bool) -> "Bytes":
        """x rounded by the range that it has, with zero in it; unless it is `signed`, nothing in it is negative."""
        low, high = x.amin().item() if signed else 0.0, x.amax().item()
        if not math.isfinite(high - low):
            raise WeightsError(
                "The network's numbers are not finite; its weights are damaged: copy or train them again."
            )
        low = min(0.0, low)
        scale = max((max(0.0, high) - low) / _MOST, _TINY)
        zero = int(-low / scale)  # cut off, as the highest must not come after 255; the lowest may be a step off
        if not _rounds_at_once():
            # Half of a step, as what follows the point is cut off.
            return Bytes(torch.add(zero + 0.5, x, alpha=1 / scale).to(torch.uint8), scale, zero)
        return Bytes(_memory(torch.quantize_per_tensor(x.float(), scale, zero, torch.quint8)), scale, zero)


class Int8Conv(nn.Module):
    """A convolution in 8 bits, with what may follow it: a shortcut to add, and the rectifier."""

    def __init__(self, convolution: nn.Conv2d, *, relu: bool, signed: bool = False) -> None:
        """`signed` says that what goes in may be negative."""
        super().__init__()
        weight = convolution.weight.detach().float()
        scale = (weight.abs().amax((1, 2, 3)) / _MOST_WEIGHT).clamp(min=_TINY)
        self._rounded = (weight / scale[:, None, None, None]).round().to(torch.int8)
        self._scale, self._zeros = scale, torch.zeros_like(scale, dtype=torch.long)
        self._bias = None if convolution.bias is None else convolution.bias.detach().float()
        assert not isinstance(convolution.padding, str)
        sizes = convolution.stride, convolution.padding, convolution.dilation
        self._settings = [*(list(size) for size in sizes), convolution.groups]
        self._pack()
        self._signed = signed
        self._after = "relu" if relu else "none"

    def _pack(self) -> None:
        _rounds_at_once()  # is found out now, not by whichever thread needs it first
        # A zero point that is not 0 makes room for any.
        self._weight = torch.ops.onednn.qconv_prepack(self._rounded, self._scale, 1.0, 1, *self._settings, None)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: packed weights belong to this processor."""
        return {key: value for key, value in self.__dict__.items() if key != "_weight"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """(b c h w) -> float32 of the same kind, added to `onto`, which is overwritten, where it is given."""
        rounded = Bytes.of(x, signed=self._signed)
        inputs: tuple[Any, ...] = *rounded, self._weight, self._scale, self._zeros
        if onto is None:
            convolve = torch.ops.onednn.qconv2d_pointwise.default
            after: tuple[Any, ...] = (self._after, [], "")
        else:
            convolve = torch.ops.onednn.qconv2d_pointwise.binary
            inputs, after = (*inputs, onto), (1.0, 0, "sum", 1.0, self._after, [], "")
        result: Tensor = convolve(*inputs, self._bias, *self._settings, 1.0, 0, torch.float32, *after)
        return result


class _Int8Residual(nn.Module):
    """A residual block of folded convolutions."""

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self.conv1, self.conv2 = Int8Conv(block.conv1, relu=True), Int8Conv(block.conv2, relu=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x), onto=x)  # nothing but this block has x


def convert(backbone: nn.Module) -> None:
    """Let all convolutions of a compact backbone but the first, which sees the picture, work in 8 bits."""
    fold_batch_norm(backbone)
    for name, child in list(backbone.named_children()):
        if name != "stem":
            # Where the two paths merge, one of them may be negative; all else comes from a rectifier.
            setattr(backbone, name, _in_int8(child, signed=name.startswith("merge")))


def _in_int8(module: nn.Module, *, signed: bool) -> nn.Module:
    if isinstance(module, ResidualBlock):
        return _Int8Residual(module)
    if isinstance(module, nn.Conv2d):
        return Int8Conv(module, relu=False, signed=signed)
    assert isinstance(module, nn.Sequential)
    if isinstance(module[0], nn.Conv2d):  # and what was its batch norm, and a rectifier
        return Int8Conv(module[0], relu=True, signed=signed)
    return nn.Sequential(*[_in_int8(child, signed=signed) for child in module])


def _memory(quantized: Tensor) -> Tensor:
    """The bytes of one of torch's quantized tensors; its own way to them is a copy, which takes five times as long."""
    values = torch.empty(0, dtype=torch.uint8, device=quantized.device)
    return values.set_(quantized.untyped_storage(), 0, quantized.shape, quantized.stride())


@cache
def _rounds_at_once() -> bool:
    """Whether torch still has the function that does it in one pass, which it means to give up."""
    values = torch.arange(24.0, device="cpu").view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # it says so once, unless torch is told to warn always
            rounded = _memory(torch.quantize_per_tensor(values / 2, 0.5, 3, torch.quint8))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(rounded.float(), values + 3)


@cache
def works() -> bool:
    """Whether this CPU and this torch convolve bytes exactly: older CPUs cut sums off, which shows at the largest."""
    plain = nn.Conv2d(64, 16, 3, padding=1, bias=False, device="cpu")
    nn.init.ones_(plain.weight)
    image, shortcut = torch.full((1, 64, 5, 5), 128.0, device="cpu"), torch.ones(1, 16, 5, 5, device="cpu")
    image[:, :, 2, 2] = -127.0  # now the numbers are whole steps
    image, shortcut = (x.contiguous(memory_format=torch.channels_last) for x in (image, shortcut))
    try:
        with torch.no_grad():
            expected = plain(image)
            convolved = Int8Conv(plain, relu=False, signed=True)(image)
            summed = Int8Conv(plain, relu=True, signed=True)(image, shortcut)
    except (AttributeError, RuntimeError, TypeError):  # another processor, or another torch
        return False
    return torch.allclose(convolved, expected) and torch.allclose(summed, torch.relu(expected + 1))
