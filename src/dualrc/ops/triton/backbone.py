"""The compact backbone on a GPU in few launches, at full speed for images of any size.

Batch norms are folded into the convolutions. Each convolution kernel also adds the shortcut and applies the ReLU.
The work on the host limits the speed of images of new sizes. So a level allocates its map and a spare one, all its
layers write into these two, and only the first layer checks its input.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.model.backbone import FAINT, SQUARE, CompactBackbone, ResidualBlock, fold_batch_norm
from dualrc.ops.triton.convolution import FusedConv
from dualrc.ops.triton.launch import launcher, parts, power_above, readable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Elements per program of the up-sampling.
_ELEMENTS = 4096
# Pixels per program of the local contrast.
_PIXELS = 256


class FusedResidual(nn.Module):
    """Residual block with folded convolutions, in two launches."""

    def __init__(self, block: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(block, ResidualBlock)
        self.conv1 = FusedConv(block.conv1, relu=True, dtype=dtype)
        self.conv2 = FusedConv(block.conv2, relu=True, dtype=dtype)

    def forward(self, x: Tensor, spare: Tensor) -> None:
        """Replace the map by the result; `spare` has the same shape."""
        self.conv2.write(self.conv1.write(x, spare), x, onto=x)


class FusedLevel(nn.Module):
    """Level of the backbone: a convolution, which reduces the size, and residual blocks."""

    def __init__(self, level: nn.Sequential, dtype: torch.dtype, *, replicate: bool = False) -> None:
        super().__init__()
        first, *blocks = level
        self.first = _fused(first, dtype, replicate=replicate)
        self.blocks = nn.ModuleList([FusedResidual(block, dtype) for block in blocks])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map of this level, and another tensor of the same shape."""
        x = _applied(self.first, x)
        spare = torch.empty_like(x)
        for block in self.blocks:
            block.forward(x, spare)
        return x, spare


class FusedBackbone(nn.Module):
    """Fused equivalent of CompactBackbone, created by `fuse`."""

    def __init__(self, folded: CompactBackbone, dtype: torch.dtype) -> None:
        super().__init__()
        self.contrast = folded.contrast
        self.stem = _fused(folded.stem, dtype)
        self.level4 = FusedLevel(folded.level4, dtype)
        self.level8 = FusedLevel(folded.level8, dtype)
        self.level16 = FusedLevel(folded.level16, dtype)
        # An odd map at 1/16 is padded by replicating its border.
        self.level32 = FusedLevel(folded.level32, dtype, replicate=True)
        self.down32 = _fused(folded.down32, dtype)
        self.down16 = _fused(folded.down16, dtype)
        self.down8 = _fused(folded.down8, dtype)
        self.merge16 = _fused(folded.merge16, dtype)
        self.merge8 = _fused(folded.merge8, dtype)
        self.merge4 = _fused(folded.merge4, dtype)
        self.coarse = _fused(folded.coarse, dtype)
        self.fine = _fused(folded.fine, dtype)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(b 3 h w) -> coarse (b c h/16 w/16), fine (b c h/4 w/4), neither normalized."""
        # No variable holds the largest map, so that its memory is free after the first convolution of level4.
        x4, spare4 = self.level4.forward(self.stem(add_contrast(images) if self.contrast else images))
        x8, spare8 = self.level8.forward(x4)
        x16, spare16 = self.level16.forward(x8)
        x32, _ = self.level32.forward(x16)
        x16 = self.merge16.write(upsample_add(_applied(self.down32, x32), x16, out=x16), spare16)
        x8 = self.merge8.write(upsample_add(_applied(self.down16, x16), x8, out=x8), spare8)
        x4 = self.merge4.write(upsample_add(_applied(self.down8, x8), x4, out=x4), spare4)
        return _applied(self.coarse, x16), _applied(self.fine, x4)

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Compile, or load from Triton's cache, every kernel that an image of any size may need."""
        weight = self.fine.weight
        self(weight.new_zeros(1, 3, 32, 32))
        for convolution, add in self._convolutions():
            x = weight.new_zeros(1, convolution.channels, convolution.kernel, convolution.kernel)
            rows = convolution.out_size(convolution.kernel)
            onto = weight.new_zeros(1, convolution.outputs, rows, rows) if add else None
            chosen = convolution.tiles
            for tiles in convolution.all_tiles():
                convolution.tiles = tiles
                convolution(x, onto)
            convolution.tiles = chosen

    def _convolutions(self) -> Iterator[tuple[FusedConv, bool]]:
        """Yield all convolutions, and whether a shortcut is added to their results."""
        for name, module in self.named_modules():
            if isinstance(module, FusedConv):
                yield module, name.endswith("conv2")


def fuse(backbone: CompactBackbone, dtype: torch.dtype = torch.float16) -> FusedBackbone:
    """Return a fused copy of a backbone for inference, on the same device; the backbone itself is not changed."""
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} is not supported; choose float16, bfloat16 or float32.")
    # Fold batch norms in full precision.
    folded = copy.deepcopy(backbone).eval().float()
    fold_batch_norm(folded)
    return FusedBackbone(folded, dtype).eval()


def _fused(module: nn.Module, dtype: torch.dtype, *, replicate: bool = False) -> FusedConv:
    """Return a convolution, or a sequence of a convolution, its folded batch norm and a ReLU."""
    if isinstance(module, nn.Conv2d):
        return FusedConv(module, relu=False, dtype=dtype)
    assert isinstance(module, nn.Sequential) and isinstance(module[0], nn.Conv2d)
    return FusedConv(module[0], relu=True, replicate=replicate, dtype=dtype)


def _applied(convolution: FusedConv, x: Tensor) -> Tensor:
    """Convolve without checks."""
    return convolution.write(x, convolution.new(x))


def upsample_add(small: Tensor, large: Tensor, out: Tensor | None = None) -> Tensor:
    """Add `small`, up-sampled bilinearly by 2 and cropped, to `large`: (b c h w), (b c h' w') -> (b c h' w').

    `out` may be `large`, which must then be channels-last and aligned.
    """
    batch, channels, rows, columns = large.shape
    height, width = small.shape[2:]
    if small.shape[:2] != large.shape[:2] or parts(rows, 2) != height or parts(columns, 2) != width:
        raise ValueError(f"A map of {tuple(small.shape)} is not half the size of {tuple(large.shape)}.")
    out = _empty(large, channels, rows, columns) if out is None else out
    if out.numel() == 0:
        return out
    block = max(1, _ELEMENTS // power_above(channels))
    launch = launcher("convolution_jit.upsample_add", CHANNELS=channels, BLOCK_M=block, BLOCK_C=power_above(channels))
    grid = (parts(rows * columns, block), batch, 1)
    small, large = readable(small, torch.channels_last), readable(large, torch.channels_last)
    launch(grid, small, large, out, height, width, columns, rows * columns)
    return out


def add_contrast(images: Tensor) -> Tensor:
    """Append the local contrast as a fourth channel, channels-last: (b 3 h w) -> (b 4 h w)."""
    batch, colors, height, width = images.shape
    if colors != 3 or height % SQUARE or width % SQUARE:
        raise ValueError(f"Expected images (b 3 h w) with sides divisible by {SQUARE}, not {tuple(images.shape)}.")
    out = _empty(images, 4, height, width)
    if out.numel() == 0:
        return out
    if images.data_ptr() % 16:
        images = images.clone()
    down, across = height // SQUARE, width // SQUARE
    means = torch.empty(batch, 2, down, across, dtype=torch.float32, device=images.device)
    strides, squares = images.stride(), _PIXELS // SQUARE**2
    measure = launcher("convolution_jit.square_means", SIDE=SQUARE, BLOCK=squares)
    measure((parts(down * across, squares), batch, 1), images, means, down * across, across, *strides)
    smooth = F.avg_pool2d(means, 3, 1, 1, count_include_pad=False)
    compare = launcher("convolution_jit.add_contrast", SIDE=SQUARE, FAINT=FAINT, BLOCK=_PIXELS)
    grid = (parts(height * width, _PIXELS), batch, 1)
    compare(grid, images, smooth, out, width, height * width, down, across, *strides)
    return out


def _empty(like: Tensor, channels: int, height: int, width: int) -> Tensor:
    size = like.shape[0], channels, height, width
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
