"""Backbones: an image to its coarse map F~ at 1/16 and its fine map F^ at 1/4; NCNet uses a single map."""

from itertools import pairwise
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from dualrc.config import CompactConfig, ResNetConfig, TrunkConfig

# Side of the squares whose mean and variance define the local contrast, in pixels.
SQUARE = 8
# Added to variances. Variation below two or three of 255 levels counts as noise.
FAINT = 0.002


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet, with torchvision's parameter names."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module | None = None
        if inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu_(self.bn1(self.conv1(x)))
        x = F.relu_(self.bn2(self.conv2(x)))
        return F.relu_(self.bn3(self.conv3(x)) + shortcut)


class ResNet(nn.Module):
    """ResNet up to conv4, or up to conv5, with torchvision's parameter names; its weights are frozen."""

    def __init__(
        self,
        kind: Literal["resnet101", "resnet50"] = "resnet101",
        *,
        conv5: bool = False,
        stride_on: Literal["3x3", "1x1"] = "3x3",
        stride: Literal[8, 16] = 16,
    ) -> None:
        """Build the stages. `stride` is the stride of conv4; 8 removes the stride of its stage."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = self._stage(64, 64, 3, 1)
        self.layer2 = self._stage(256, 128, 4, 2)
        self.layer3 = self._stage(512, 256, 23 if kind == "resnet101" else 6, 2 if stride == 16 else 1)
        self.layer4 = self._stage(1024, 512, 3, 2) if conv5 else None
        if stride_on == "1x1":
            for block in (stage[0] for stage in (self.layer2, self.layer3, self.layer4) if stage is not None):
                assert isinstance(block, Bottleneck)
                block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
        self.requires_grad_(False)
        self.train(False)

    @staticmethod
    def _stage(inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
        blocks = [Bottleneck(inputs, width, stride)]
        blocks += [Bottleneck(4 * width, width, 1) for _ in range(depth - 1)]
        return nn.Sequential(*blocks)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, so that batch-norm statistics are never updated."""
        return super().train(False)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(b 3 h w) -> conv2 (256, 1/4), conv3 (512, 1/8), conv4 (1024, 1/16) and, if built, conv5 (2048, 1/32)."""
        x = F.max_pool2d(F.relu_(self.bn1(self.conv1(images))), 3, 2, 1)
        levels = []
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            if stage is not None:
                x = stage(x)
                levels.append(x)
        return levels


def _upsample_to(x: Tensor, like: Tensor) -> Tensor:
    # The published network was trained with align_corners=True.
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=True)


class PaperBackbone(nn.Module):
    """ResNet with an FPN-like top-down path, in the five variants of the paper's appendix."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        c, fusion = config.channels, config.fusion
        self.fusion = fusion
        self.trunk = ResNet(config.kind, conv5=fusion == "e", stride_on=config.stride_on)
        # conv4 already has 1024 channels, so variants (a) to (d) use it unchanged.
        own_conv4 = c == 1024 and fusion != "e"
        self.lateral5 = nn.Conv2d(2048, c, 1) if fusion == "e" else None
        self.lateral4 = nn.Identity() if own_conv4 else nn.Conv2d(1024, c, 1)
        self.lateral3 = nn.Conv2d(512, c, 1) if fusion != "b" else None
        self.lateral2 = nn.Conv2d(256, c, 1)
        self.smooth4 = nn.Conv2d(c, c, 3, padding=1) if fusion == "d" else nn.Identity()
        self.smooth3 = nn.Conv2d(c, c, 3, padding=1) if fusion in ("c", "d") else nn.Identity()
        self.coarse = nn.Identity() if own_conv4 else nn.Conv2d(c, c, 3, padding=1)
        self.fine = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(b 3 h w) -> coarse (b c h/16 w/16), fine (b c h/4 w/4), neither normalized."""
        conv2, conv3, conv4, *conv5 = self.trunk(images)
        top = self.lateral4(conv4)
        if self.lateral5 is not None:
            top = top + _upsample_to(self.lateral5(conv5[0]), conv4)
        merged = self.smooth4(top)
        # The sum is in place: at 1/4 of a large image, one map with 1024 channels takes half a gigabyte.
        if self.lateral3 is not None:
            merged = self.smooth3(self.lateral3(conv3).add_(_upsample_to(merged, conv3)))
        merged = self.lateral2(conv2).add_(_upsample_to(merged, conv2))
        return self.coarse(top), self.fine(merged)


class Trunk(nn.Module):
    """ResNet up to conv4, the backbone of NCNet and Sparse-NCNet."""

    def __init__(self, config: TrunkConfig) -> None:
        super().__init__()
        self.trunk = ResNet(config.network, stride_on=config.stride_on, stride=config.stride)

    def forward(self, images: Tensor) -> Tensor:
        """(b 3 h w) -> conv4, (b 1024 h/8 w/8) or (b 1024 h/16 w/16), not normalized."""
        return self.trunk(images)[2]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    # Even kernels at stride 2 keep the center of a cell in the middle of its pixels.
    padding = (kernel - 1) // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        # A zero weight makes the block an identity at initialization.
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.bn2(self.conv2(F.relu_(self.bn1(self.conv1(x))))) + x)


def to_gray(images: Tensor) -> Tensor:
    """Return the mean of the color channels: (b 3 h w) -> (b 1 h w)."""
    red, green, blue = images.split(1, dim=1)
    # The sum of channels is four times as fast as mean(1).
    return (red + green + blue) / 3


def local_contrast(images: Tensor) -> Tensor:
    """Return brightness normalized by its local mean and standard deviation: (b 3 h w) -> (b 1 h w).

    The statistics come from means over squares of 8 px, smoothed to a window of about 24 px.
    """
    gray = to_gray(images.float())
    sums = F.avg_pool2d(torch.cat([gray, gray.square()], dim=1), SQUARE)
    sums = F.avg_pool2d(sums, 3, 1, 1, count_include_pad=False)
    mean, square = F.interpolate(sums, scale_factor=SQUARE, mode="bilinear", align_corners=False).split(1, dim=1)
    deviation = (square - mean.square()).clamp_(min=0).add_(FAINT).sqrt_()
    return (gray - mean).div_(deviation).to(images.dtype)


class CompactBackbone(nn.Module):
    """Small residual network with an FPN-like top-down path."""

    def __init__(self, config: CompactConfig) -> None:
        super().__init__()
        w2, w4, w8, w16, w32 = config.widths
        d4, d8, d16, d32 = config.depths
        self.contrast = config.contrast
        self.stem = _conv(4 if config.contrast else 3, w2, 4, 2)
        self.level4 = self._level(w2, w4, 4, d4)
        self.level8 = self._level(w4, w8, 2, d8)
        self.level16 = self._level(w8, w16, 2, d16)
        self.level32 = self._level(w16, w32, 2, d32)
        self.down32 = nn.Conv2d(w32, w16, 1)
        self.down16 = nn.Conv2d(w16, w8, 1)
        self.down8 = nn.Conv2d(w8, w4, 1)
        self.upsample: nn.Module = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.merge16 = _conv(w16, w16, 3)
        self.merge8 = _conv(w8, w8, 3)
        self.merge4 = _conv(w4, w4, 3)
        self.coarse = nn.Conv2d(w16, config.coarse_channels, 1)
        self.fine = nn.Conv2d(w4, config.fine_channels, 3, padding=1)

    @staticmethod
    def _level(inputs: int, width: int, kernel: int, depth: int) -> nn.Sequential:
        return nn.Sequential(_conv(inputs, width, kernel, 2), *[ResidualBlock(width) for _ in range(depth)])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(b 3 h w) -> coarse (b c h/16 w/16), fine (b c h/4 w/4), neither normalized."""
        if self.contrast:
            images = torch.cat([images, local_contrast(images)], dim=1).contiguous(memory_format=torch.channels_last)
        x4 = self.level4(self.stem(images))
        x8 = self.level8(x4)
        x16 = self.level16(x8)
        # A map with an odd side would lose half a cell of context at 1/32, so its last row and column are repeated.
        odd = (0, x16.shape[3] % 2, 0, x16.shape[2] % 2)
        x32 = self.level32(F.pad(x16, odd, mode="replicate"))
        up32 = self.upsample(self.down32(x32))
        x16 = self.merge16(x16 + up32[:, :, : x16.shape[2], : x16.shape[3]])
        x8 = self.merge8(x8 + self.upsample(self.down16(x16)))
        x4 = self.merge4(x4 + self.upsample(self.down8(x8)))
        return self.coarse(x16), self.fine(x4)


def fold_batch_norm(module: nn.Module) -> None:
    """Fold every batch norm into the convolution before it. The output in evaluation mode does not change."""
    children = list(module.named_children())
    for (name, convolution), (next_name, norm) in pairwise(children):
        if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, name, fuse_conv_bn_eval(convolution, norm))
            setattr(module, next_name, nn.Identity())
    for _, child in children:
        fold_batch_norm(child)


def make_backbone(config: ResNetConfig | CompactConfig | TrunkConfig) -> nn.Module:
    """Build the backbone that a config describes, untrained."""
    if isinstance(config, TrunkConfig):
        return Trunk(config)
    return PaperBackbone(config) if isinstance(config, ResNetConfig) else CompactBackbone(config)
