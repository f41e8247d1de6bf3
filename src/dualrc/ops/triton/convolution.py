"""The compact backbone on a GPU in few launches, at full speed for pictures of any size.

cuDNN chooses and prepares a plan for every convolution at every size it meets, which takes tens of milliseconds for a
new size. These kernels are compiled once for the channel counts of a layer. Each applies bias, shortcut and rectifier
to its results; batch norms are folded into the weights.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.model.backbone import _FAINT, _SQUARE, CompactBackbone, ResidualBlock, fold_batch_norm
from dualrc.ops.triton.launch import power_above

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ALIGNMENT = 16  # bytes; Triton compiles a second kernel for pointers that are aligned less
_MULTIPROCESSORS = 132  # of an H100 or H200
_SUM_BLOCK = 128  # the weights' rows are padded to a multiple; no tile may exceed it
_LARGEST = 2**31  # elements of one picture's map; kernels count them in 32 bits
_PLANS = 256  # shapes that a convolution remembers
_KERNEL = 31  # taps that fit into the bits of a mask
_ELEMENTS = 4096  # of a program that upsamples
_PIXELS = 256  # of a program that measures contrast


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The part of a convolution that one program computes; the results don't depend on it."""

    # All three are powers of two, at least 16.
    positions: int
    outputs: int  # channels
    terms: int  # of the sum over taps and input channels, read at a time; at most 128
    warps: int = 4
    stages: int = 4  # of the software pipeline
    # Read inputs through the L1 cache, where the taps of a row find them again, in copies of half the width.
    cached: bool = False


@lru_cache(maxsize=1024)
def choose_tiles(outputs: int, channels: int, taps: int, positions: int, *, half: bool = True) -> Tiles:
    """Tiles for a layer with so many output and input channels, taps, and positions in all pictures together.

    Only two choices exist for a layer, so that no more than two kernels are compiled for it.
    """
    if not half:  # no tensor cores
        narrow = min(64, max(16, power_above(outputs)))
        return Tiles(positions=64, outputs=narrow, terms=16, warps=4, stages=3)
    terms = 32 if channels % 64 else 64
    if channels % 32:  # then blocks span several taps; with few channels, all of them
        terms = min(64, max(16, power_above(channels * taps)))
    wide = min(128, max(16, power_above(outputs)))
    if _programs(positions, 128, outputs, wide) >= _MULTIPROCESSORS:
        return Tiles(positions=128, outputs=wide, terms=terms, warps=8 if wide == 128 else 4, stages=3)
    # Smaller tiles keep more multiprocessors busy.
    return Tiles(positions=64, outputs=min(wide, 64), terms=terms, warps=4, stages=4)


def _programs(positions: int, block: int, outputs: int, wide: int) -> int:
    return _parts(positions, block) * _parts(outputs, wide)


class _Launcher:
    """Launches a kernel with given compile-time constants.

    From the second launch on, the compiled kernel is called directly: Triton's own launcher takes several times as
    long, to examine all arguments. That is correct as long as all tensors are aligned and the dtypes of all follow
    from that of the first.
    """

    def __init__(
        self, name: str, *constants: Any, warps: int = 4, stages: int = 3, overlap: bool | None = None
    ) -> None:
        """`constants` in the order of the kernel's arguments, of which they are the last.

        With `overlap`, which also is the last constant of kernels that can, a kernel is started while the previous
        one ends (programmatic dependent launch).
        """
        self._name = name
        self._constants = constants if overlap is None else (*constants, overlap)
        self._options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
        if overlap:
            self._options["launch_pdl"] = True
        self._compiled: dict[tuple[torch.device, torch.dtype], Any] = {}
        self._direct = True

    def __call__(self, grid: tuple[int, int, int], first: Tensor, *arguments: Any) -> None:
        key = first.device, first.dtype
        compiled = self._compiled.get(key)
        if compiled is not None:
            try:
                compiled[grid](first, *arguments, *self._constants)
                return
            except (AttributeError, TypeError):  # another version of Triton, which wants other arguments
                self._direct = False
                self._compiled.clear()
        from dualrc.ops.triton import convolution_jit

        function = getattr(convolution_jit, self._name)
        compiled = function[grid](first, *arguments, *self._constants, **self._options)
        if compiled is not None and self._direct:
            self._compiled[key] = compiled


class _Plan(NamedTuple):
    """What a launch needs to know, for inputs of one shape."""

    launcher: _Launcher | None  # None: there is nothing to compute
    grid: tuple[int, int, int]
    numbers: tuple[int, int, int, int]  # height, width, out_width, positions
    shape: tuple[int, int, int, int]  # of the results


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
        overlap: bool = False,
    ) -> None:
        """`replicate` repeats the last row and column of maps that the stride does not divide.

        `tiles` replaces the choice of tiles, for tuning. `overlap` starts the kernel while the previous one ends,
        which needs a Hopper GPU.
        """
        super().__init__()
        _check(convolution, replicate)
        weight = convolution.weight.detach()
        self.outputs, self.channels, self.kernel = weight.shape[:3]
        self.stride, self.padding = convolution.stride[0], int(convolution.padding[0])
        self.relu, self.replicate, self.tiles, self.overlap = relu, replicate, tiles, overlap
        terms = self.channels * self.kernel**2
        widest = 256 if self.outputs > 128 else 16
        self._pitch = _parts(power_above(self.outputs) if self.outputs <= 128 else self.outputs, widest) * widest
        rows = weight.permute(2, 3, 1, 0).reshape(terms, self.outputs)
        missing = self._pitch - self.outputs
        padded = F.pad(rows, (0, missing, 0, -terms % _SUM_BLOCK))
        bias = weight.new_zeros(self.outputs) if convolution.bias is None else convolution.bias.detach()
        self.register_buffer("weight", padded.to(dtype or weight.dtype).contiguous(), persistent=False)
        self.register_buffer("bias", F.pad(bias.float(), (0, missing)).contiguous(), persistent=False)
        self._launchers: dict[tuple[Tiles, bool], _Launcher] = {}
        self._plans: dict[Any, _Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies: compiled kernels belong to this process."""
        return {**self.__dict__, "_launchers": {}, "_plans": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._launchers.clear()  # they are for the dtypes of before
        self._plans.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """(b c h w) -> (b c' h' w'), channels-last, with `onto` added before the rectifier."""
        plan = self._plans.get((x.shape, x.dtype, onto is None)) or self._plan(x, onto is not None)
        out = torch.empty(plan.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        if onto is not None and (onto.shape != plan.shape or onto.dtype != x.dtype):
            raise ValueError(f"Expected {plan.shape} of {x.dtype} to add, not {tuple(onto.shape)} of {onto.dtype}.")
        if plan.launcher is not None:
            x = _readable(x)
            added = x if onto is None else _readable(onto)
            with _on_device(x):
                plan.launcher(plan.grid, x, self.weight, self.bias, added, out, *plan.numbers)
        return out

    def _plan(self, x: Tensor, add: bool) -> _Plan:
        """Check an input and prepare for more of its shape."""
        dtype = self.weight.dtype
        if x.dtype != dtype or x.shape[1] != self.channels:
            raise ValueError(f"Expected {self.channels} channels of {dtype}, not {x.shape[1]} of {x.dtype}.")
        batch, _, height, width = x.shape
        rows, columns = self.out_size(height), self.out_size(width)
        positions = rows * columns
        if max(height * width * self.channels, positions * self.outputs) >= _LARGEST:
            raise ValueError(f"A map of {height} x {width} is too large; give smaller images.")
        tiles = self.tiles or self._choose(batch * positions)
        plan = _Plan(
            launcher=self._launcher(tiles, add) if batch * positions else None,
            grid=(_parts(positions, tiles.positions) * _parts(self.outputs, tiles.outputs), batch, 1),
            numbers=(height, width, columns, positions),
            shape=(batch, self.outputs, rows, columns),
        )
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[x.shape, x.dtype, not add] = plan
        return plan

    def use_tiles(self, tiles: Tiles | None) -> None:
        """Replace the choice of tiles from now on; None: back to it."""
        self.tiles = tiles
        self._plans.clear()

    def _choose(self, positions: int) -> Tiles:
        half = self.weight.dtype != torch.float32
        return choose_tiles(self.outputs, self.channels, self.kernel**2, positions, half=half)

    def all_tiles(self) -> list[Tiles]:
        """All tiles that may be chosen for this layer."""
        return [self.tiles] if self.tiles else list(dict.fromkeys([self._choose(1), self._choose(2**30)]))

    def out_size(self, length: int) -> int:
        """Rows or columns of the output, given those of the input."""
        if self.replicate:
            return _parts(length, self.stride)
        return max(0, (length + 2 * self.padding - self.kernel) // self.stride + 1)

    def _launcher(self, tiles: Tiles, add: bool) -> _Launcher:
        if (tiles, add) in self._launchers:
            return self._launchers[tiles, add]
        assert tiles.terms <= _SUM_BLOCK and self._pitch % tiles.outputs == 0
        launcher = _Launcher(
            "convolve", self.channels, self.outputs, self._pitch, self.kernel, self.stride, self.padding,
            self.replicate, add, self.relu, tiles.positions, tiles.outputs, tiles.terms,
            8 // self.weight.element_size() if tiles.cached else 0, "ieee",
            warps=tiles.warps, stages=tiles.stages, overlap=self.overlap,
        )  # fmt: skip
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


class FusedResidual(nn.Module):
    """A residual block of folded convolutions: two launches."""

    def __init__(self, block: ResidualBlock, dtype: torch.dtype, *, overlap: bool = False) -> None:
        super().__init__()
        self.conv1 = FusedConv(block.conv1, relu=True, dtype=dtype, overlap=overlap)
        self.conv2 = FusedConv(block.conv2, relu=True, dtype=dtype, overlap=overlap)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x), onto=x)


class FusedBackbone(nn.Module):
    """What CompactBackbone computes; made by `fuse`."""

    def __init__(self, folded: CompactBackbone, dtype: torch.dtype, *, overlap: bool = False) -> None:
        super().__init__()
        self.contrast, self.overlap = folded.contrast, overlap
        fused = partial(_fused, dtype=dtype, overlap=overlap)
        self.stem = fused(folded.stem)
        self.level4 = fused(folded.level4)
        self.level8 = fused(folded.level8)
        self.level16 = fused(folded.level16)
        # An odd map at 1/16 is padded with its own border.
        self.level32 = fused(folded.level32, replicate=True)
        self.down32 = fused(folded.down32)
        self.down16 = fused(folded.down16)
        self.down8 = fused(folded.down8)
        self.merge16 = fused(folded.merge16)
        self.merge8 = fused(folded.merge8)
        self.merge4 = fused(folded.merge4)
        self.coarse = fused(folded.coarse)
        self.fine = fused(folded.fine)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(b 3 h w) -> coarse (b c h/16 w/16), fine (b c h/4 w/4), neither normalized."""
        with _on_device(images):
            x4 = self.level4(self.stem(add_contrast(images) if self.contrast else images))
            x8 = self.level8(x4)
            x16 = self.level16(x8)
            x32 = self.level32(x16)
            x16 = self.merge16(upsample_add(self.down32(x32), x16, overlap=self.overlap))
            x8 = self.merge8(upsample_add(self.down16(x16), x8, overlap=self.overlap))
            x4 = self.merge4(upsample_add(self.down8(x8), x4, overlap=self.overlap))
            return self.coarse(x16), self.fine(x4)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile, or load from Triton's cache, every kernel that a picture of any size may need."""
        weight = self.fine.weight
        assert isinstance(weight, Tensor)
        self(weight.new_zeros(1, 3, 32, 32))
        for convolution, add in self._convolutions():
            x = weight.new_zeros(1, convolution.channels, convolution.kernel, convolution.kernel)
            rows = convolution.out_size(convolution.kernel)
            onto = weight.new_zeros(1, convolution.outputs, rows, rows) if add else None
            chosen = convolution.tiles
            for tiles in convolution.all_tiles():
                convolution.use_tiles(tiles)
                convolution(x, onto)
            convolution.use_tiles(chosen)

    def _convolutions(self) -> Iterator[tuple[FusedConv, bool]]:
        """All convolutions, and whether something is added to their results."""
        for name, module in self.named_modules():
            if isinstance(module, FusedConv):
                yield module, name.endswith("conv2")


def fuse(backbone: CompactBackbone, dtype: torch.dtype = torch.float16, *, overlap: bool = False) -> FusedBackbone:
    """A fused copy of a backbone, for inference, on the same device; the backbone itself is not changed.

    With `overlap`, kernels are started while the previous ones end, which needs a Hopper GPU and Triton 3.4.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} is not supported; choose float16, bfloat16 or float32.")
    folded = copy.deepcopy(backbone).eval().float()  # batch norms are folded in full precision
    fold_batch_norm(folded)
    return FusedBackbone(folded, dtype, overlap=overlap).eval()


def _fused(module: nn.Module, *, dtype: torch.dtype, overlap: bool, replicate: bool = False) -> nn.Module:
    if isinstance(module, ResidualBlock):
        return FusedResidual(module, dtype, overlap=overlap)
    if isinstance(module, nn.Conv2d):
        return FusedConv(module, relu=False, dtype=dtype, overlap=overlap)
    assert isinstance(module, nn.Sequential)
    if isinstance(module[0], nn.Conv2d):  # and what was its batch norm, and a rectifier
        return FusedConv(module[0], relu=True, replicate=replicate, dtype=dtype, overlap=overlap)
    first, *blocks = module
    first = _fused(first, dtype=dtype, overlap=overlap, replicate=replicate)
    return nn.Sequential(first, *[_fused(block, dtype=dtype, overlap=overlap) for block in blocks])


def upsample_add(small: Tensor, large: Tensor, *, overlap: bool = False) -> Tensor:
    """`large` plus `small` upsampled bilinearly by 2 and cut to its size: (b c h w), (b c h' w') -> (b c h' w')."""
    batch, channels, rows, columns = large.shape
    height, width = small.shape[2:]
    if small.shape[:2] != large.shape[:2] or _parts(rows, 2) != height or _parts(columns, 2) != width:
        raise ValueError(f"A map of {tuple(small.shape)} does not have half the size of {tuple(large.shape)}.")
    out = _empty(large, channels, rows, columns)
    if out.numel() == 0:
        return out
    block = max(1, _ELEMENTS // power_above(channels))
    small, large = _readable(small), _readable(large)
    with _on_device(large):
        _upsampler(channels, block, overlap)(
            (_parts(rows * columns, block), batch, 1), small, large, out, height, width, columns, rows * columns
        )
    return out


def add_contrast(images: Tensor) -> Tensor:
    """The images and their local contrast as a fourth channel, channels-last: (b 3 h w) -> (b 4 h w)."""
    batch, colors, height, width = images.shape
    if colors != 3 or height % _SQUARE or width % _SQUARE:
        raise ValueError(f"Expected images (b 3 h w) with sides that {_SQUARE} divides, not {tuple(images.shape)}.")
    out = _empty(images, 4, height, width)
    if out.numel() == 0:
        return out
    if images.data_ptr() % _ALIGNMENT:
        images = images.clone()
    down, across = height // _SQUARE, width // _SQUARE
    means = torch.empty(batch, 2, down, across, dtype=torch.float32, device=images.device)
    measure, compare = _contrast()
    strides = images.stride()
    with _on_device(images):
        measure(
            (_parts(down * across, _PIXELS // _SQUARE**2), batch, 1), images, means, down * across, across, *strides
        )
        smooth = F.avg_pool2d(means, 3, 1, 1, count_include_pad=False)
        grid = (_parts(height * width, _PIXELS), batch, 1)
        compare(grid, images, smooth, out, width, height * width, down, across, *strides)
    return out


@lru_cache(maxsize=64)
def _upsampler(channels: int, block: int, overlap: bool) -> _Launcher:
    return _Launcher("upsample_add", channels, block, power_above(channels), overlap=overlap)


@cache
def _contrast() -> tuple[_Launcher, _Launcher]:
    measure = _Launcher("square_means", _SQUARE, _PIXELS // _SQUARE**2)
    return measure, _Launcher("add_contrast", _SQUARE, _FAINT, _PIXELS)


def _empty(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    size = like.shape[0], channels, height, width
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _readable(x: Tensor) -> Tensor:
    """The same values, channels-last and aligned, which they nearly always are."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous(memory_format=torch.channels_last)
    return x.clone(memory_format=torch.channels_last) if x.data_ptr() % _ALIGNMENT else x


def _on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's device the current one, where it isn't; asking is cheaper than setting."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def _parts(total: int, size: int) -> int:
    return -(-total // size)
