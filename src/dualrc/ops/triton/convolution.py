"""Convolutions on a GPU, at full speed for maps of any size.

cuDNN chooses and prepares a plan for every convolution at every size it meets, which takes tens of milliseconds for a
new size. This kernel is compiled once for the channel counts of a layer. It applies bias, shortcut and rectifier to its
results.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.ops.triton.launch import Launcher, parts, power_above, readable

_MULTIPROCESSORS = 132  # of an H100 or H200
_SUM_BLOCK = 128  # the weights' rows are padded to a multiple; no tile may exceed it
_LARGEST = 2**31  # elements of one image's map; kernels count them in 32 bits
_KERNEL = 31  # taps that fit into the bits of a mask


class Tiles(NamedTuple):
    """The part of a convolution that one program computes; the results don't depend on it."""

    # All three are powers of two, at least 16.
    positions: int
    outputs: int  # channels
    terms: int  # of the sum over taps and input channels, read at a time; at most 128
    warps: int = 4
    stages: int = 4  # of the software pipeline


@lru_cache(maxsize=1024)
def choose_tiles(outputs: int, channels: int, taps: int, positions: int, *, half: bool = True) -> Tiles:
    """Tiles for a layer with so many output and input channels, taps, and positions in all images together.

    The choices are the fastest ones measured on an H200. A layer has three at most, so that few kernels are compiled.
    """
    if not half:  # no tensor cores
        narrow = min(64, max(16, power_above(outputs)))
        return Tiles(positions=64, outputs=narrow, terms=16, warps=4, stages=3)
    terms = 32 if channels % 64 else 64
    if channels % 32:  # then blocks span several taps; with few channels, all of them
        terms = min(64, max(16, power_above(channels * taps)))
    wide = min(128, max(16, power_above(outputs)))
    enough = _MULTIPROCESSORS if taps > 1 else _MULTIPROCESSORS * 3 // 4
    if parts(positions, 128) * parts(outputs, wide) >= enough:
        return Tiles(positions=128, outputs=wide, terms=terms, warps=8 if outputs > 128 else 4, stages=3)
    # Smaller tiles keep more multiprocessors busy.
    if outputs < 128:
        return Tiles(positions=64, outputs=min(wide, 64), terms=terms, warps=4, stages=4)
    if channels % 128 == 0 and parts(positions, 64) * parts(outputs, 32) <= _MULTIPROCESSORS:
        return Tiles(positions=64, outputs=32, terms=128, warps=4, stages=4)
    return Tiles(positions=64, outputs=128, terms=terms, warps=4, stages=4)


class FusedConv(nn.Module):
    """A convolution with bias, and with what may follow it: a tensor to add, and the rectifier."""

    weight: Tensor  # taps*channels outputs, both padded
    bias: Tensor  # outputs, padded; float32

    def __init__(
        self,
        convolution: nn.Conv2d,
        *,
        relu: bool,
        replicate: bool = False,
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        """`replicate` repeats the last row and column of maps that the stride does not divide.

        `tiles` replaces the choice of tiles, for tuning.
        """
        super().__init__()
        _check(convolution, replicate)
        weight = convolution.weight.detach()
        self.outputs, self.channels, self.kernel = weight.shape[:3]
        self.stride, self.padding = convolution.stride[0], int(convolution.padding[0])
        self.relu, self.replicate, self.tiles = relu, replicate, tiles
        terms = self.channels * self.kernel**2
        widest = 256 if self.outputs > 128 else 16
        self._pitch = parts(power_above(self.outputs) if self.outputs <= 128 else self.outputs, widest) * widest
        rows = weight.permute(2, 3, 1, 0).reshape(terms, self.outputs)
        missing = self._pitch - self.outputs
        padded = F.pad(rows, (0, missing, 0, -terms % _SUM_BLOCK))
        bias = weight.new_zeros(self.outputs) if convolution.bias is None else convolution.bias.detach()
        self.register_buffer("weight", padded.to(dtype or weight.dtype).contiguous(), persistent=False)
        self.register_buffer("bias", F.pad(bias.float(), (0, missing)).contiguous(), persistent=False)
        self._launchers: dict[tuple[Tiles, bool], Launcher] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies: compiled kernels belong to this process."""
        return {**self.__dict__, "_launchers": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._launchers.clear()  # they are for the dtypes of before
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """(b c h w) -> (b c' h' w'), channels-last, with `onto` added before the rectifier."""
        weight, (batch, channels, height, width) = self.weight, x.shape
        if x.dtype != weight.dtype or channels != self.channels:
            raise ValueError(f"Expected {self.channels} channels of {weight.dtype}, not {channels} of {x.dtype}.")
        rows, columns = self.out_size(height), self.out_size(width)
        positions, shape = rows * columns, (batch, self.outputs, rows, columns)
        if max(height * width * channels, positions * self.outputs) >= _LARGEST:
            raise ValueError(f"A map of {height} x {width} is too large; give smaller images.")
        if onto is not None and (onto.shape != shape or onto.dtype != x.dtype):
            raise ValueError(f"Expected {shape} of {x.dtype} to add, not {tuple(onto.shape)} of {onto.dtype}.")
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        if batch * positions:
            x = readable(x, torch.channels_last)
            added = x if onto is None else readable(onto, torch.channels_last)
            tiles = self.tiles or self._choose(batch * positions)
            launch = self._launchers.get((tiles, onto is not None)) or self._launcher(tiles, onto is not None)
            grid = (parts(positions, tiles.positions) * parts(self.outputs, tiles.outputs), batch, 1)
            launch(grid, x, weight, self.bias, added, out, height, width, columns, positions)
        return out

    def _choose(self, positions: int) -> Tiles:
        half = self.weight.dtype != torch.float32
        return choose_tiles(self.outputs, self.channels, self.kernel**2, positions, half=half)

    def all_tiles(self) -> list[Tiles]:
        """All tiles that may be chosen for this layer."""
        # Each of the choices holds for a range of positions with a power of two in it.
        return [self.tiles] if self.tiles else list(dict.fromkeys(self._choose(2**power) for power in range(31)))

    def out_size(self, length: int) -> int:
        """Rows or columns of the output, given those of the input."""
        if self.replicate:
            return parts(length, self.stride)
        return max(0, (length + 2 * self.padding - self.kernel) // self.stride + 1)

    def _launcher(self, tiles: Tiles, add: bool) -> Launcher:
        assert tiles.terms <= _SUM_BLOCK and self._pitch % tiles.outputs == 0
        constants = {
            "CIN": self.channels, "COUT": self.outputs, "PITCH": self._pitch, "KERNEL": self.kernel,
            "STRIDE": self.stride, "PADDING": self.padding, "REPLICATE": self.replicate, "ADD": add,
            "RELU": self.relu, "BLOCK_M": tiles.positions, "BLOCK_N": tiles.outputs, "BLOCK_K": tiles.terms,
            "PRECISION": "ieee",
        }  # fmt: skip
        launcher = Launcher("convolution_jit.convolve", constants, warps=tiles.warps, stages=tiles.stages)
        self._launchers[tiles, add] = launcher
        return launcher


def _check(convolution: nn.Conv2d, replicate: bool) -> None:
    """Refuse what the kernel does not compute."""
    kernel, stride, padding = convolution.kernel_size, convolution.stride, convolution.padding
    plain = convolution.groups == 1 and convolution.dilation == (1, 1) and convolution.padding_mode == "zeros"
    square = not isinstance(padding, str) and all(len(set(sizes)) == 1 for sizes in (kernel, stride, padding))
    if not plain or not square:
        raise ValueError(f"{convolution} is not supported: only square kernels without groups or dilation are.")
    if kernel[0] > _KERNEL:
        raise ValueError(f"{convolution} is not supported: kernels have at most {_KERNEL} taps along a side.")
    if replicate and (kernel != stride or padding != (0, 0)):
        raise ValueError("Borders are replicated only where kernel and stride are equal, without padding.")
