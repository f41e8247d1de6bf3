"""Dense correspondences between two photographs.

matcher = dualrc.load()
matches = matcher.match("a.jpg", "b.jpg", top=2000)
"""

from dualrc.config import MatcherConfig, NetworkConfig
from dualrc.errors import ConfigError, DataError, DualRCError, ImageError, OutputError, WeightsError
from dualrc.matcher import Matcher, PictureFeatures, load
from dualrc.matches import Estimate, Matches, Warp

__all__ = [
    "ConfigError",
    "DataError",
    "DualRCError",
    "Estimate",
    "ImageError",
    "Matcher",
    "MatcherConfig",
    "Matches",
    "NetworkConfig",
    "OutputError",
    "PictureFeatures",
    "Warp",
    "WeightsError",
    "load",
]
