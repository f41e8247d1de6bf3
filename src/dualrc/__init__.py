"""Dense correspondences between two images.

matcher = dualrc.load()
matches = matcher.match("a.jpg", "b.jpg", top=2000)
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dualrc.config import MatcherConfig, NetworkConfig
from dualrc.errors import ConfigError, DataError, DualRCError, ImageError, OutputError, WeightsError
from dualrc.matches import Estimate, Match, Matches, RelativePose, Warp

if TYPE_CHECKING:
    from dualrc import colmap, draw, geometry, localize
    from dualrc.collection.config import CollectionConfig
    from dualrc.collection.matching import match_collection
    from dualrc.collection.reconstruct import ReconstructConfig, reconstruct
    from dualrc.collection.store import MatchStore
    from dualrc.localize import LocalizeConfig, Localizer
    from dualrc.matcher import ImageFeatures, Matcher, load
    from dualrc.stitch import panorama, warp_image

    __version__: str

# Names whose modules need further packages (torch, PoseLib, pycolmap, rich) are imported on first access.
_LAZY = {
    "CollectionConfig": "dualrc.collection.config",
    "LocalizeConfig": "dualrc.localize",
    "Localizer": "dualrc.localize",
    "MatchStore": "dualrc.collection.store",
    "Matcher": "dualrc.matcher",
    "ImageFeatures": "dualrc.matcher",
    "ReconstructConfig": "dualrc.collection.reconstruct",
    "load": "dualrc.matcher",
    "match_collection": "dualrc.collection.matching",
    "panorama": "dualrc.stitch",
    "reconstruct": "dualrc.collection.reconstruct",
    "warp_image": "dualrc.stitch",
}
_LAZY_MODULES = ("colmap", "draw", "geometry", "localize")

__all__ = [
    "CollectionConfig",
    "ConfigError",
    "DataError",
    "DualRCError",
    "Estimate",
    "ImageError",
    "ImageFeatures",
    "LocalizeConfig",
    "Localizer",
    "Match",
    "MatchStore",
    "Matcher",
    "MatcherConfig",
    "Matches",
    "NetworkConfig",
    "OutputError",
    "ReconstructConfig",
    "RelativePose",
    "Warp",
    "WeightsError",
    "__version__",
    "colmap",
    "draw",
    "geometry",
    "load",
    "localize",
    "match_collection",
    "panorama",
    "reconstruct",
    "warp_image",
]

# Log messages are shown only if the application configures logging: logging.basicConfig(level="INFO").
logging.getLogger("dualrc").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dualrc")
    if name in _LAZY_MODULES:
        return import_module(f"dualrc.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dualrc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
