"""Training data; all readers return the same kind of batch."""

from dualrc.data.colmap import ColmapConfig
from dualrc.data.megadepth import MegaDepthConfig
from dualrc.data.open import DataConfig, Opened, open_pairs
from dualrc.data.pairs import PairBatch, PairMaker
from dualrc.data.pairsfile import PairsFileConfig
from dualrc.data.photo_pairs import PhotoPairs
from dualrc.data.photos import PhotoMotion, PhotosConfig, read_photos
from dualrc.data.rgbd import RgbdConfig
from dualrc.data.scenes import ScenesConfig
from dualrc.data.views import FilePairs

__all__ = [
    "ColmapConfig",
    "DataConfig",
    "FilePairs",
    "MegaDepthConfig",
    "Opened",
    "PairBatch",
    "PairMaker",
    "PairsFileConfig",
    "PhotoMotion",
    "PhotoPairs",
    "PhotosConfig",
    "RgbdConfig",
    "ScenesConfig",
    "open_pairs",
    "read_photos",
]
