"""Adapter for deep-image-matching: a detector-free matcher, registered at run time."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.adapters.modules import SETTINGS, add_module, load_matcher
from dualrc.errors import ConfigError

logger = logging.getLogger(__name__)
# Name and settings of the entry in `deep_image_matching.config.confs`.
PIPELINE = "dualrc"
CONF: dict[str, Any] = {"extractor": {"name": "no_extractor"}, "matcher": {"name": PIPELINE}}
# Image side in pixels above which deep-image-matching scales its thresholds.
_TILE = 1024


def register() -> Any:
    """Register the pipeline "dualrc" in deep-image-matching and return the matcher class."""
    try:
        from deep_image_matching import config, matchers
    except ImportError as error:
        raise ConfigError(
            f"deep-image-matching can't be imported ({error}): pip install deep-image-matching."
        ) from error
    module = add_module(matchers, _make_class)
    if PIPELINE not in config.confs:
        config.confs[PIPELINE] = CONF
        config.opt_zoo["matchers"].append(PIPELINE)
    return module.DualRCMatcher


def _make_class() -> Any:
    """Return the matcher class; it is created here because its base class is imported on demand."""
    from deep_image_matching.constants import Quality, TileSelection, get_size_by_quality
    from deep_image_matching.matchers.matcher_base import DetectorFreeMatcherBase

    from dualrc.image import read, read_header

    class DualRCMatcher(DetectorFreeMatcherBase):  # type: ignore[misc]
        """Matcher with the interface of deep-image-matching; images are matched as a whole, without tiles."""

        _default_conf = {**SETTINGS}  # noqa: RUF012
        grayscale = False
        as_float = True
        max_tile_size = _TILE

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.matcher = load_matcher(self.config["matcher"], self._device)

        def match(
            self, feature_path: Path, matches_path: Path, img0: Path, img1: Path, try_full_image: bool = False
        ) -> npt.NDArray[np.int64] | None:
            """Match two images, verify the matches and write both results to the files of the package."""
            header = read_header(img0)
            long_side = 0 if header is None else max(header.stored_size)
            # The base class multiplies its threshold by long side // max_tile_size // 2, which must not be 0.
            self.max_tile_size = max(1, min(_TILE, long_side // 2))
            return super().match(feature_path, matches_path, img0, img1, try_full_image)

        def _match_pairs(self, feature_path: Path, img0_path: Path, img1_path: Path) -> npt.NDArray[np.int64]:
            """Match two images, add their points to the features file and return the index pairs of the points."""
            images = read(img0_path), read(img1_path)
            # The quality setting of the package determines the size of the network input.
            size = None
            if self._quality != Quality.HIGH:
                sizes = [max(get_size_by_quality(self._quality, image.shape[:2])) for image in images]
                size = max(16, min(max(sizes), self.matcher.config.max_size) // 16 * 16)
            found = self.matcher.match(*images, size=size)
            names, rows = (img0_path.name, img1_path.name), np.arange(len(found))
            points = found.points0, found.points1
            return self._update_features_h5(feature_path, *names, *points, np.stack([rows, rows], axis=1))

        def _match_by_tile(
            self,
            feature_path: Path,
            img0: Path,
            img1: Path,
            method: Any = TileSelection.PRESELECTION,
            select_unique: bool = True,
        ) -> npt.NDArray[np.int64]:
            logger.info("dualrc matches whole images; the tile selection %s is not used.", method.name)
            return self._match_pairs(feature_path, img0, img1)

    return DualRCMatcher
