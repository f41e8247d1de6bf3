"""What each stage has to do at least: operations (an addition or a multiplication is one) and bytes moved.

Operations are those of the convolutions and products, which is what runs at the rate of matrix products. Bytes are
those of every layer's input, weights and output once; of five passes over the coarse tensor (correlation writes it,
the consensus reads and writes it, the last filter reads and writes it); and for the search of one pass over the tensor
in each direction and of both fine maps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualrc.config import CompactConfig, ConsensusConfig, NetworkConfig
from dualrc.model.backbone import make_backbone
from dualrc.model.fine import PLACES, RATIO
from dualrc.model.subpixel import WINDOW, Subpixel
from dualrc.pixels import STRIDE

_TENSOR_PASSES = 5


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations and bytes."""

    operations: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(operations=self.operations + other.operations, bytes=self.bytes + other.bytes)


def features_work(config: NetworkConfig, size: tuple[int, int], value_bytes: int) -> Work:
    """The backbone's convolutions on one picture of this (width, height)."""
    work = [Work(operations=0, bytes=0)]

    def count(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        values = inputs[0].numel() + layer.weight.numel() + output.numel()
        operations = 2 * output.numel() * layer.weight[0].numel()
        work[0] += Work(operations=operations, bytes=values * value_bytes)

    with torch.device("meta"):  # shapes without values: nothing is computed
        backbone = make_backbone(config.backbone).eval()
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(count)
        backbone(torch.empty(1, 3, size[1], size[0]))
    return work[0]


def coarse_work(config: NetworkConfig, size0: tuple[int, int], size1: tuple[int, int], value_bytes: int) -> Work:
    """Correlation, consensus in both directions and mutual filters of one pair."""
    cells0, cells1 = cells(size0), cells(size1)
    entries, channels = cells0 * cells1, coarse_channels(config)
    values = _TENSOR_PASSES * entries + (cells0 + cells1) * channels
    operations = 2 * channels * entries + consensus_operations(config.consensus) * entries
    return Work(operations=operations, bytes=values * value_bytes)


def consensus_operations(config: ConsensusConfig) -> int:
    """Operations for each entry of the tensor, of all layers in both directions."""
    layers = zip(config.kernel_sizes, (1, *config.channels[:-1]), config.channels, strict=True)
    return 2 * sum(2 * kernel**4 * inputs * outputs for kernel, inputs, outputs in layers)


def search_work(
    config: NetworkConfig,
    size0: tuple[int, int],
    size1: tuple[int, int],
    value_bytes: int,
    *,
    visited: float,
    matches: int,
) -> Work:
    """Cosines of the cells visited (by groups of 16 queries, all together) and refinement of the matches."""
    cells0, cells1, channels = cells(size0), cells(size1), fine_channels(config)
    operations = 2 * channels * PLACES**2 * visited + matches * refinement_operations(config)
    values = 2 * cells0 * cells1 + (cells0 + cells1) * RATIO**2 * channels
    return Work(operations=operations, bytes=values * value_bytes)


def refinement_operations(config: NetworkConfig) -> int:
    """Operations for each match, in both directions; 0 where the preset refines nothing."""
    if not config.fine.subpixel:
        return 0
    with torch.device("meta"):
        subpixel = Subpixel(fine_channels(config), config.fine.subpixel_hidden)
    layers = sum(2 * layer.weight.numel() for layer in subpixel.modules() if isinstance(layer, nn.Linear))
    return 2 * (2 * fine_channels(config) * WINDOW**2 + layers)


def cells(size: tuple[int, int]) -> int:
    """Coarse cells of a network input of this (width, height)."""
    return (size[0] // STRIDE) * (size[1] // STRIDE)


def coarse_channels(config: NetworkConfig) -> int:
    """Channels of the coarse map."""
    backbone = config.backbone
    return backbone.coarse_channels if isinstance(backbone, CompactConfig) else backbone.channels


def fine_channels(config: NetworkConfig) -> int:
    """Channels of the fine map."""
    backbone = config.backbone
    return backbone.fine_channels if isinstance(backbone, CompactConfig) else backbone.channels
