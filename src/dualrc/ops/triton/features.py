"""Launches of what follows the backbone."""

import torch
from torch import Tensor

from dualrc.ops.triton.launch import launcher, parts, power_above, readable

_ELEMENTS = 4096  # of a program that normalizes
_PIXELS = 256  # of a program that blurs


def normalize(features: Tensor) -> Tensor:
    """What `model.correlation.normalize` gives, channels-last: (b c h w) -> the same."""
    features = readable(features, torch.channels_last)
    result = torch.empty_like(features)
    channels, positions = features.shape[1], features.numel() // features.shape[1]
    if positions:
        wide = power_above(channels)
        rows = max(1, _ELEMENTS // wide)
        launch = launcher("features_jit.normalize_rows", CHANNELS=channels, WIDE=wide, ROWS=rows)
        launch((parts(positions, rows), 1, 1), features, result, positions)
    return result


def brightness(images: Tensor) -> Tensor:
    """What `model.align.brightness` gives: (b 3 h w) -> (b h w)."""
    batch, _, height, width = images.shape
    result = torch.empty(batch, height, width, dtype=images.dtype, device=images.device)
    if result.numel():
        by_image, by_color, by_row, by_column = images.stride()
        launch = launcher("features_jit.blur", PIXELS=_PIXELS)
        grid = (parts(height * width, _PIXELS), batch, 1)
        launch(grid, images, result, height, width, by_image, by_row, by_column, by_color)
    return result
