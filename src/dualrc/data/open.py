"""Makers of batches from the config of a reader; the only module that knows all readers of pairs."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from dualrc.data.colmap import ColmapConfig, colmap_pairs
from dualrc.data.megadepth import MegaDepthConfig, MegaDepthRecipe, megadepth_pairs
from dualrc.data.pairs import LazyPair, PairMaker
from dualrc.data.pairsfile import PairsFileConfig, read_pairs
from dualrc.data.photo_pairs import PhotoPairs
from dualrc.data.photos import PhotosConfig, read_photos
from dualrc.data.rgbd import RgbdConfig, rgbd_pairs
from dualrc.data.scenes import ScenePairs, ScenesConfig
from dualrc.data.views import FilePairs

DataConfig = PhotosConfig | ScenesConfig | PairsFileConfig | ColmapConfig | MegaDepthConfig | RgbdConfig

# Every tenth image or pair is held out.
_HELD_OUT = 10
_HELD_OUT_SCENES = 16


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Makers of batches from one source, for training and for validation."""

    training: PairMaker
    held_out: PairMaker

    def report(self) -> list[str]:
        """Return lines about data that could not be used so far."""
        lines = (maker.report() for maker in (self.training, self.held_out))
        return [line for line in dict.fromkeys(lines) if line]

    def close(self) -> None:
        """Stop preparing batches."""
        self.training.close()
        self.held_out.close()


def open_pairs(
    config: DataConfig,
    *,
    size: int,
    points: int,
    device: torch.device | str = "cpu",
    hold_out: bool = True,
    clean: bool = False,
) -> Opened:
    """Return makers of batches of `size` x `size` images with `points` points each.

    With `clean`, batches also have the images before their light was changed.
    Every tenth image or pair is held out. With fewer than ten, or `hold_out=False`, both makers use all of them.
    """
    settings: dict[str, Any] = {"size": size, "points": points, "device": torch.device(device), "clean": clean}
    if isinstance(config, PhotosConfig):
        photos = read_photos(config.paths, canvas=config.canvas)
        parts = (
            replace(photos, canvases=photos.canvases[numbers], sizes=photos.sizes[numbers])
            for numbers in _split(len(photos.sizes), hold_out)
        )
        training, held_out = (
            PhotoPairs(part, motion=config.motion, sensors=config.sensors, **settings) for part in parts
        )
        return Opened(training=training, held_out=held_out)
    if isinstance(config, ScenesConfig):
        other = replace(config, seed=config.seed + 1, pool=min(config.pool, _HELD_OUT_SCENES), workers=0)
        scenes = ScenePairs(config, **settings)
        if not hold_out:
            return Opened(training=scenes, held_out=scenes)
        return Opened(training=scenes, held_out=ScenePairs(other, helper=scenes, **settings))
    pairs, broken = _read(config)
    training_pairs, held_out_pairs = (
        FilePairs([pairs[number] for number in numbers], config, **settings) for numbers in _split(len(pairs), hold_out)
    )
    training_pairs.skipped.update(broken)
    return Opened(training=training_pairs, held_out=held_out_pairs)


def _read(
    config: PairsFileConfig | ColmapConfig | MegaDepthConfig | RgbdConfig,
) -> tuple[list[LazyPair], dict[str, str]]:
    """Return the pairs of a source, and the reasons why parts of it cannot be used, by name."""
    match config:
        case PairsFileConfig():
            return read_pairs(config.file, config.images), {}
        case ColmapConfig():
            pairs = colmap_pairs(
                config.model, config.images, min_overlap=config.min_overlap, min_common=config.min_common
            )
            return pairs, {}
        case MegaDepthConfig():
            return megadepth_pairs(config.root, config.split, MegaDepthRecipe(seed=config.seed))
        case RgbdConfig():
            return rgbd_pairs(config.root, min_overlap=config.min_overlap)


def _split(count: int, hold_out: bool) -> tuple[list[int], list[int]]:
    """Return the numbers for training and the numbers for validation."""
    held_out = list(range(_HELD_OUT - 1, count, _HELD_OUT)) if hold_out else []
    if not held_out:
        return list(range(count)), list(range(count))
    return [number for number in range(count) if number % _HELD_OUT != _HELD_OUT - 1], held_out
