"""Training data: every reader gives the same kind of batch."""

from dualrc.data.colmap import ColmapConfig
from dualrc.data.megadepth import MegaDepthConfig
from dualrc.data.open import PairsConfig, open_pairs
from dualrc.data.pairs import PairBatch, PairMaker
from dualrc.data.pairsfile import PairsFileConfig
from dualrc.data.photos import PhotoPairs, read_photos
from dualrc.data.rgbd import RgbdConfig
from dualrc.data.scenes import ScenesConfig

__all__ = [
    "ColmapConfig",
    "MegaDepthConfig",
    "PairBatch",
    "PairMaker",
    "PairsConfig",
    "PairsFileConfig",
    "PhotoPairs",
    "RgbdConfig",
    "ScenesConfig",
    "open_pairs",
    "read_photos",
]
