"""A backbone quantized to int8, for CPUs with VNNI; its convolutions are four times as fast as in float32.

Weights are quantized once, per output channel. Activations are quantized dynamically, by their range in each call, so
no calibration data is needed. Sums are exact. Outputs, shortcuts and up-sampling are float32.
"""

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualrc.errors import WeightsError
from dualrc.model.backbone import ResidualBlock, fold_batch_norm

# Largest quantized activation (uint8) and weight (int8).
_MOST, _MOST_WEIGHT = 255, 127
# Smallest scale, for constant inputs.
_TINY = 1e-12


class Bytes(NamedTuple):
    """Numbers quantized to uint8; their values are (values - zero) * scale."""

    # uint8
    values: Tensor
    scale: float
    zero: int

    @staticmethod
    def of(x: Tensor, *, signed: bool) -> "Bytes":
        """Quantize x by its range, which always includes zero; without `signed`, x must not be negative."""
        low, high = x.amin().item() if signed else 0.0, x.amax().item()
        if not math.isfinite(high - low):
            raise WeightsError(
                "The network computed values that are not finite, so its weights are damaged: copy or train them again."
            )
        low = min(0.0, low)
        scale = max((max(0.0, high) - low) / _MOST, _TINY)
        # Rounding down keeps the maximum at or below 255; the minimum may be one step off.
        zero = int(-low / scale)
        if not _rounds_at_once():
            # The conversion to uint8 truncates, so half a step is added for rounding.
            return Bytes(torch.add(zero + 0.5, x, alpha=1 / scale).to(torch.uint8), scale, zero)
        return Bytes(_memory(torch.quantize_per_tensor(x.float(), scale, zero, torch.quint8)), scale, zero)


class Int8Conv(nn.Module):
    """Convolution quantized to int8, with an optional shortcut and ReLU after it."""

    def __init__(self, convolution: nn.Conv2d, *, relu: bool, signed: bool = False) -> None:
        """Quantize a convolution. `signed` means that its input may be negative."""
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
        # Run the cached check here, not in the first thread that needs it.
        _rounds_at_once()
        # A zero point other than 0 at packing time supports any zero point later.
        self._weight = torch.ops.onednn.qconv_prepack(self._rounded, self._scale, 1.0, 1, *self._settings, None)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the packed weights from copies, because their layout depends on the processor."""
        return {key: value for key, value in self.__dict__.items() if key != "_weight"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Convolve (b c h w) to float32; the result is added to `onto`, if given, which is overwritten."""
        rounded = Bytes.of(x, signed=self._signed)
        inputs: tuple[Any, ...] = *rounded, self._weight, self._scale, self._zeros
        if onto is None:
            convolve = torch.ops.onednn.qconv2d_pointwise.default
            after: tuple[Any, ...] = (self._after, [], "")
        else:
            convolve = torch.ops.onednn.qconv2d_pointwise.binary
            inputs, after = (*inputs, onto), (1.0, 0, "sum", 1.0, self._after, [], "")
        return convolve(*inputs, self._bias, *self._settings, 1.0, 0, torch.float32, *after)


class _Int8Residual(nn.Module):
    """Residual block with folded, quantized convolutions."""

    def __init__(self, block: ResidualBlock) -> None:
        super().__init__()
        self.conv1, self.conv2 = Int8Conv(block.conv1, relu=True), Int8Conv(block.conv2, relu=True)

    def forward(self, x: Tensor) -> Tensor:
        # The block owns x, so the shortcut can be added in place.
        return self.conv2(self.conv1(x), onto=x)


def convert(backbone: nn.Module) -> None:
    """Quantize all convolutions of a compact backbone to int8, except the first, which reads the image."""
    fold_batch_norm(backbone)
    for name, child in list(backbone.named_children()):
        # The up-sampling has nothing to quantize.
        if name != "stem" and list(child.parameters()):
            # The sum of two paths can be negative. All other inputs are outputs of a ReLU.
            setattr(backbone, name, _in_int8(child, signed=name.startswith("merge")))


def _in_int8(module: nn.Module, *, signed: bool) -> nn.Module:
    if isinstance(module, ResidualBlock):
        return _Int8Residual(module)
    if isinstance(module, nn.Conv2d):
        return Int8Conv(module, relu=False, signed=signed)
    assert isinstance(module, nn.Sequential)
    # The sequence is a convolution, its folded batch norm and a ReLU.
    if isinstance(module[0], nn.Conv2d):
        return Int8Conv(module[0], relu=True, signed=signed)
    return nn.Sequential(*[_in_int8(child, signed=signed) for child in module])


def _memory(quantized: Tensor) -> Tensor:
    """Return the bytes of a quantized torch tensor without a copy; torch's own accessor is five times slower."""
    values = torch.empty(0, dtype=torch.uint8, device=quantized.device)
    return values.set_(quantized.untyped_storage(), 0, quantized.shape, quantized.stride())


@cache
def _rounds_at_once() -> bool:
    """Return whether torch still has the deprecated function that quantizes in one pass."""
    values = torch.arange(24.0, device="cpu").view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # The deprecation warning appears once, or always if torch is configured so.
            warnings.simplefilter("ignore")
            rounded = _memory(torch.quantize_per_tensor(values / 2, 0.5, 3, torch.quint8))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(rounded.float(), values + 3)


@cache
def works() -> bool:
    """Return whether this CPU and torch convolve int8 exactly. Older CPUs saturate, which large sums reveal."""
    plain = nn.Conv2d(64, 16, 3, padding=1, bias=False, device="cpu")
    nn.init.ones_(plain.weight)
    image, shortcut = torch.full((1, 64, 5, 5), 128.0, device="cpu"), torch.ones(1, 16, 5, 5, device="cpu")
    # The range from -127 to 128 makes every value a whole quantization step.
    image[:, :, 2, 2] = -127.0
    image, shortcut = (x.contiguous(memory_format=torch.channels_last) for x in (image, shortcut))
    try:
        with torch.no_grad():
            expected = plain(image)
            convolved = Int8Conv(plain, relu=False, signed=True)(image)
            summed = Int8Conv(plain, relu=True, signed=True)(image, shortcut)
    except (AttributeError, RuntimeError, TypeError):
        # An unsupported processor or torch version.
        return False
    return torch.allclose(convolved, expected) and torch.allclose(summed, torch.relu(expected + 1))
