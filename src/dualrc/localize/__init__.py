"""Localization of images in a map: retrieval of candidates, 2D-3D correspondences, and the pose."""

from dualrc.localize.localizer import Localization, LocalizeConfig, Localizer
from dualrc.localize.maps import Correspondences, Map, ModelMap, RgbdMap, read_map
from dualrc.localize.queries import find_queries, localize_all, missing, results_config
from dualrc.localize.results import ResultsFile, read_poses, write_poses

__all__ = [
    "Correspondences",
    "Localization",
    "LocalizeConfig",
    "Localizer",
    "Map",
    "ModelMap",
    "ResultsFile",
    "RgbdMap",
    "find_queries",
    "localize_all",
    "missing",
    "read_map",
    "read_poses",
    "results_config",
    "write_poses",
]
