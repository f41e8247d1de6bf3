"""Kernel launches for the outputs of the backbone."""

import torch
from torch import Tensor

from dualrc.ops.triton.launch import launcher, parts, power_above, readable

# Elements per program of the normalization.
_ELEMENTS = 4096
# Pixels per program of the blur.
_PIXELS = 256


def normalize(features: Tensor) -> Tensor:
    """Compute `model.correlation.normalize`, channels-last: (b c h w) -> the same."""
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
    """Compute `model.align.brightness`: (b 3 h w) -> (b h w)."""
    batch, _, height, width = images.shape
    result = torch.empty(batch, height, width, dtype=images.dtype, device=images.device)
    if result.numel():
        by_image, by_color, by_row, by_column = images.stride()
        launch = launcher("features_jit.blur", PIXELS=_PIXELS)
        grid = (parts(height * width, _PIXELS), batch, 1)
        launch(grid, images, result, height, width, by_image, by_row, by_column, by_color)
    return result
