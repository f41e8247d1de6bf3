"""From a reader's config to batches: the one place that knows all readers of pairs."""

from typing import Any

import torch

from dualrc.data.colmap import ColmapConfig, ColmapPairs
from dualrc.data.megadepth import MegaDepthConfig, MegaDepthPairs, MegaDepthRecipe
from dualrc.data.pairs import PairSource
from dualrc.data.pairsfile import PairsFile, PairsFileConfig
from dualrc.data.rgbd import RgbdConfig, RgbdPairs
from dualrc.data.scenes import ScenePairs, ScenesConfig
from dualrc.data.views import FilePairs

PairsConfig = ScenesConfig | PairsFileConfig | ColmapConfig | MegaDepthConfig | RgbdConfig


def open_pairs(
    config: PairsConfig, *, size: int, points: int, device: torch.device | str = "cpu"
) -> FilePairs | ScenePairs:
    """A maker of batches of `size` x `size` pictures with so many places each."""
    settings: dict[str, Any] = {"size": size, "points": points, "device": device}
    if isinstance(config, ScenesConfig):
        return ScenePairs(config, **settings)
    source = _source(config)
    maker = FilePairs(source, config, **settings)
    if isinstance(source, (RgbdPairs, MegaDepthPairs)):
        maker.skipped.update(source.broken)
    return maker


def _source(config: PairsFileConfig | ColmapConfig | MegaDepthConfig | RgbdConfig) -> PairSource:
    match config:
        case PairsFileConfig():
            return PairsFile(config.file, config.images)
        case ColmapConfig():
            return ColmapPairs(
                config.model, config.images, min_overlap=config.min_overlap, min_common=config.min_common
            )
        case MegaDepthConfig():
            return MegaDepthPairs(config.root, config.split, MegaDepthRecipe(seed=config.seed))
        case RgbdConfig():
            return RgbdPairs(config.root, min_overlap=config.min_overlap)
