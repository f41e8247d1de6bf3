"""Convolutions on a GPU, at full speed for maps of any size.

cuDNN selects and prepares a plan for every convolution at every new size, which takes tens of milliseconds. This kernel
is compiled once for the channel counts of a layer. It also adds bias and shortcut and applies the ReLU.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.ops.triton.launch import Launcher, launcher, parts, power_above, readable

# Multiprocessors of an H100 or H200.
_MULTIPROCESSORS = 132
# Granularity of the positions on which the choice of tiles depends, and the number of such blocks beyond which it is
# always the same.
_BLOCK, _MOST_BLOCKS = 64, 2 * _MULTIPROCESSORS
# The rows of the weights are padded to a multiple of this. No tile may exceed it.
_SUM_BLOCK = 128
# Largest number of elements in the map of one image, because kernels use 32-bit offsets.
_LARGEST = 2**31
# Largest kernel size: the taps of a row must fit into a bit mask.
_KERNEL = 31


class Tiles(NamedTuple):
    """The part of a convolution that one program computes; the results do not depend on it."""

    # Output positions. This and the next two are powers of two, at least 16.
    positions: int
    # Output channels.
    outputs: int
    # Terms of the sum over taps and input channels that are read per step; at most 128.
    terms: int
    warps: int = 4
    # Stages of the software pipeline.
    stages: int = 4


@lru_cache(maxsize=1024)
def choose_tiles(outputs: int, channels: int, taps: int, positions: int, *, half: bool = True) -> Tiles:
    """Choose tiles for a layer, from its channels, its taps, and its positions in all images together.

    The choices are the fastest ones measured on an H200. A layer has at most three, so that few kernels are compiled.
    """
    # float32 does not use tensor cores.
    if not half:
        narrow = min(64, max(16, power_above(outputs)))
        return Tiles(positions=64, outputs=narrow, terms=16, warps=4, stages=3)
    terms = 32 if channels % 64 else 64
    # Blocks span several taps; with few channels, all taps.
    if channels % 32:
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
    """Convolution with bias, with an optional shortcut and ReLU after it."""

    # (taps*channels outputs) Both are padded.
    weight: Tensor
    # (outputs) float32, padded.
    bias: Tensor

    def __init__(
        self,
        convolution: nn.Conv2d,
        *,
        relu: bool,
        replicate: bool = False,
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
    ) -> None:
        """Convert a convolution. `replicate` repeats the last row and column of maps that the stride does not divide.

        `tiles` overrides the choice of tiles, for tuning.
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
        # Plans by tiles or number of blocks, and by whether there is a shortcut.
        self._plans: dict[tuple[Tiles | int, bool], _Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Exclude compiled kernels from copies, because they belong to this process."""
        return {**self.__dict__, "_plans": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Plans hold the previous weights.
        self._plans.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Convolve (b c h w) -> (b c' h' w'), channels-last; `onto` is added before the ReLU."""
        if x.dtype != self.weight.dtype or x.shape[1] != self.channels:
            raise ValueError(
                f"Expected {self.channels} channels of {self.weight.dtype}, not {x.shape[1]} of {x.dtype}."
            )
        out = self.new(x)
        if onto is not None and (onto.shape != out.shape or onto.dtype != x.dtype):
            shape = tuple(out.shape)
            raise ValueError(f"Expected a shortcut {shape} of {x.dtype}, not {tuple(onto.shape)} of {onto.dtype}.")
        onto = None if onto is None else readable(onto, torch.channels_last)
        return self.write(readable(x, torch.channels_last), out, onto)

    def new(self, x: Tensor) -> Tensor:
        """Return memory for the result of `x`."""
        batch, channels, height, width = x.shape
        rows, columns = self.out_size(height), self.out_size(width)
        if max(height * width * channels, rows * columns * self.outputs) >= _LARGEST:
            raise ValueError(f"A map of {height} x {width} is too large; give smaller images.")
        shape = batch, self.outputs, rows, columns
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)

    def write(self, x: Tensor, out: Tensor, onto: Tensor | None = None) -> Tensor:
        """Convolve as `forward` does, into `out` as `new` returns it, which may be `onto`; return `out`.

        Nothing is checked, because checks take as long as the launch. All maps must be channels-last and aligned.
        """
        batch, _, height, width = x.shape
        rows, columns = out.shape[2:]
        positions = rows * columns
        if batch * positions:
            key = self.tiles or min(parts(batch * positions, _BLOCK), _MOST_BLOCKS), onto is not None
            launch, step, across, weight, bias = self._plans.get(key) or self._plan(*key)
            added = x if onto is None else onto
            grid = (parts(positions, step) * across, batch, 1)
            launch(grid, x, weight, bias, added, out, height, width, columns, positions)
        return out

    def _plan(self, size: Tiles | int, add: bool) -> "_Plan":
        """Return the plan for these tiles, or for this number of blocks of positions."""
        tiles = self._choose(_BLOCK * size) if isinstance(size, int) else size
        assert tiles.terms <= _SUM_BLOCK and self._pitch % tiles.outputs == 0
        launch = launcher(
            "convolution_jit.convolve", CIN=self.channels, COUT=self.outputs, PITCH=self._pitch, KERNEL=self.kernel,
            STRIDE=self.stride, PADDING=self.padding, REPLICATE=self.replicate, ADD=add, RELU=self.relu,
            BLOCK_M=tiles.positions, BLOCK_N=tiles.outputs, BLOCK_K=tiles.terms, warps=tiles.warps, stages=tiles.stages,
        )  # fmt: skip
        plan = _Plan(launch, tiles.positions, parts(self.outputs, tiles.outputs), self.weight, self.bias)
        self._plans[size, add] = plan
        return plan

    def _choose(self, positions: int) -> Tiles:
        half = self.weight.dtype != torch.float32
        return choose_tiles(self.outputs, self.channels, self.kernel**2, positions, half=half)

    def all_tiles(self) -> list[Tiles]:
        """Return all tiles that may be chosen for this layer."""
        # Every choice holds for a range of positions that contains a power of two.
        return [self.tiles] if self.tiles else list(dict.fromkeys(self._choose(2**power) for power in range(31)))

    def out_size(self, length: int) -> int:
        """Return the rows or columns of the output, given those of the input."""
        if self.replicate:
            return parts(length, self.stride)
        return max(0, (length + 2 * self.padding - self.kernel) // self.stride + 1)


class _Plan(NamedTuple):
    """Everything that a launch of a convolution needs except the maps."""

    launch: Launcher
    # Positions per program.
    step: int
    # Programs that share their positions.
    across: int
    weight: Tensor
    bias: Tensor


def _check(convolution: nn.Conv2d, replicate: bool) -> None:
    """Raise ValueError for convolutions that the kernel does not support."""
    kernel, stride, padding = convolution.kernel_size, convolution.stride, convolution.padding
    plain = convolution.groups == 1 and convolution.dilation == (1, 1) and convolution.padding_mode == "zeros"
    square = not isinstance(padding, str) and all(len(set(sizes)) == 1 for sizes in (kernel, stride, padding))
    if not plain or not square:
        raise ValueError(f"{convolution} is not supported; use a square kernel without groups or dilation.")
    if kernel[0] > _KERNEL:
        raise ValueError(f"{convolution} is not supported; use a kernel of at most {_KERNEL} taps along a side.")
    if replicate and (kernel != stride or padding != (0, 0)):
        raise ValueError("Replicated borders are supported only if kernel and stride are equal, without padding.")
