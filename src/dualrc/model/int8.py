"""A backbone in 8 bits, for CPUs that multiply bytes: four times as fast as in float32.

Weights are rounded once, each output channel by its own range; what goes into a convolution is rounded by the range
that it has just then, so nothing has to be calibrated. Sums are exact; results, shortcuts and upsampling are float32.
"""

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualrc.model.backbone import ResidualBlock, fold_batch_norm

_MOST, _MOST_WEIGHT = 255, 127
_TINY = 1e-12  # the least range


class Bytes(NamedTuple):
    """Numbers in 8 bits: (values - zero) * scale, by the range that they have."""

    values: Tensor  # uint8
    scale: float
    zero: int

    @staticmethod
    def of(x: Tensor, *, signed: bool) -> "Bytes":
        """x rounded; unless it is `signed`, nothing in it is negative."""
        low = min(0.0, x.amin().item()) if signed else 0.0
        scale = max((x.amax().item() - low) / _MOST, _TINY)
        zero = int(-low / scale)
        if not _rounds_at_once():
            # Half of a step, as what follows the point is cut off.
            return Bytes(torch.add(zero + 0.5, x, alpha=1 / scale).to(torch.uint8), scale, zero)
        quantized = torch.quantize_per_tensor(x, scale, zero, torch.quint8)
        # The same memory; the library's own way to it is a copy, which takes five times as long.
        values = torch.empty(0, dtype=torch.uint8).set_(quantized.untyped_storage(), 0, x.shape, quantized.stride())
        return Bytes(values, scale, zero)


class Int8Conv(nn.Module):
    """A convolution in 8 bits, with what may follow it: a shortcut to add, and the rectifier."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        relu: bool,
        signed: bool = False,
    ) -> None:
        """`signed` says that what goes in may be negative."""
        super().__init__()
        weight = weight.detach().float()
        scale = (weight.abs().amax((1, 2, 3)) / _MOST_WEIGHT).clamp(min=_TINY)
        self._rounded = (weight / scale[:, None, None, None]).round().to(torch.int8)
        self._scale, self._zeros = scale, torch.zeros(len(scale), dtype=torch.long)
        self._bias = None if bias is None else bias.detach().float()
        self._sides = [[side, side] for side in (stride, padding, 1)]
        self._groups = groups
        self._pack()
        self._signed = signed
        self._after = "relu" if relu else "none"

    @staticmethod
    def of(convolution: nn.Conv2d, *, relu: bool, signed: bool = False) -> "Int8Conv":
        """The same convolution, of square kernels, in 8 bits."""
        padding = convolution.padding[0]
        assert not isinstance(padding, str)
        return Int8Conv(
            convolution.weight,
            convolution.bias,
            stride=convolution.stride[0],
            padding=padding,
            relu=relu,
            signed=signed,
        )

    def _pack(self) -> None:
        # A zero point that is not 0 makes room for any.
        settings = *self._sides, self._groups, None
        self._weight = torch.ops.onednn.qconv_prepack(self._rounded, self._scale, 1.0, 1, *settings)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: packed weights belong to this processor."""
        return {key: value for key, value in self.__dict__.items() if key != "_weight"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """(b c h w) -> float32 of the same kind, added to `onto`, which is overwritten, where it is given."""
        return self.of_bytes(Bytes.of(x, signed=self._signed), onto)

    def of_bytes(self, x: Bytes, onto: Tensor | None = None) -> Tensor:
        """The same of numbers that are rounded already."""
        inputs: tuple[Any, ...] = *x, self._weight, self._scale, self._zeros
        if onto is None:
            convolve = torch.ops.onednn.qconv2d_pointwise.default
            after: tuple[Any, ...] = (self._after, [], "")
        else:
            convolve = torch.ops.onednn.qconv2d_pointwise.binary
            inputs, after = (*inputs, onto), (1.0, 0, "sum", 1.0, self._after, [], "")
        result: Tensor = convolve(*inputs, self._bias, *self._sides, self._groups, 1.0, 0, torch.float32, *after)
        return result

    def to_bytes(self, x: Bytes, most: float) -> Bytes:
        """The rectified result in bytes for 0 to `most`; what exceeds it is 255, and so is `most` itself."""
        scale = most / _MOST
        settings = *self._sides, self._groups, scale, 0, torch.uint8, "relu", [], ""
        convolve = torch.ops.onednn.qconv2d_pointwise.default
        return Bytes(convolve(*x, self._weight, self._scale, self._zeros, self._bias, *settings), scale, 0)


class _Int8Residual(nn.Module):
    """A residual block of folded convolutions."""

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self.conv1, self.conv2 = Int8Conv.of(block.conv1, relu=True), Int8Conv.of(block.conv2, relu=True)

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
        return Int8Conv.of(module, relu=False, signed=signed)
    assert isinstance(module, nn.Sequential)
    if isinstance(module[0], nn.Conv2d):  # and what was its batch norm, and a rectifier
        return Int8Conv.of(module[0], relu=True, signed=signed)
    return nn.Sequential(*[_in_int8(child, signed=signed) for child in module])


@cache
def _rounds_at_once() -> bool:
    """Whether torch still has the function that does it in one pass, which it means to give up."""
    values = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # it says so once
            rounded = torch.quantize_per_tensor(values / 2, 0.5, 3, torch.quint8)
        memory = torch.empty(0, dtype=torch.uint8)
        memory.set_(rounded.untyped_storage(), 0, values.shape, rounded.stride())
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(memory.float(), values + 3)


@cache
def works() -> bool:
    """Whether this CPU and this torch convolve bytes exactly: older CPUs cut sums off, which shows at the largest."""
    convolution = nn.Conv2d(64, 16, 3, padding=1, bias=False)
    nn.init.constant_(convolution.weight, 1.0)
    image, shortcut = torch.full((1, 64, 5, 5), 128.0), torch.ones(1, 16, 5, 5)
    image[:, :, 2, 2] = -127.0  # now the numbers are whole steps
    image, shortcut = (x.contiguous(memory_format=torch.channels_last) for x in (image, shortcut))
    try:
        with torch.no_grad():
            convolved = Int8Conv.of(convolution, relu=False, signed=True)(image)
            summed = Int8Conv.of(convolution, relu=True, signed=True)(image, shortcut)
            expected = convolution(image)
    except (AttributeError, RuntimeError, TypeError):  # another processor, or another torch
        return False
    return torch.allclose(convolved, expected) and torch.allclose(summed, torch.relu(expected + 1))
