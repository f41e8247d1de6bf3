"""Removal of matches in areas without texture, which are no evidence for a pair."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch.nn import functional as F

from dualrc.matches import Matches
from dualrc.pixels import FINE_STRIDE, pixel_to_cell
from dualrc.types import BoolArray

if TYPE_CHECKING:
    from dualrc.matcher.features import PictureFeatures

# Side of a neighborhood in fine cells, and the standard deviation of gray levels below which it has no texture.
# Sensor noise of a uniform area stays below this.
_CELLS, _LEAST_DEVIATION = 5, 2.0
# Share of the image that must have texture.
_LEAST_SHARE = 0.01
# Number of best matches to examine. A match is stationary if it moves by less than this share of the image size.
_TOP, _STATIONARY = 1000, 0.02
# Share of stationary matches above which the texture is examined.
_SUSPICIOUS = 0.3

BLANK = "Image {} has almost no texture, so it cannot be matched; check that it is the right file."


def is_stationary(matches: Matches) -> bool:
    """Return whether many of the best matches have the same position in both images.

    In blank areas the network distinguishes positions by their distance from the image border, so matches are
    stationary. Other pairs need no check of their texture.
    """
    best = matches.points0[:_TOP] / matches.size0 - matches.points1[:_TOP] / matches.size1
    return len(best) > 0 and bool(np.mean(np.abs(best).max(axis=1) < _STATIONARY) > _SUSPICIOUS)


def without_blank_areas(matches: Matches, features: "tuple[PictureFeatures, PictureFeatures]") -> Matches:
    """Remove matches in areas without texture; all of them, with a warning, if an image is blank."""
    keep = np.ones(len(matches), dtype=bool)
    for number, (points, own) in enumerate(zip((matches.points0, matches.points1), features, strict=True)):
        textured = _textured(own)
        if textured.mean() < _LEAST_SHARE:
            return replace(matches[:0], info={**matches.info, "warning": BLANK.format(number)}, whole=None)
        cells = pixel_to_cell(own.scale.to_network(points), FINE_STRIDE)
        column, row = np.clip(np.rint(cells), 0, np.array(textured.shape[::-1]) - 1).astype(np.int64).T
        keep &= textured[row, column]
    return matches if keep.all() else replace(matches[keep], whole=None)


def _textured(features: "PictureFeatures") -> BoolArray:
    """Return whether the neighborhood of each fine cell has texture: (height / 4, width / 4)."""
    gray = features.pixels.float().mean(-1)[None, None]
    means = [F.avg_pool2d(values, FINE_STRIDE) for values in (gray, gray.square())]
    mean, square = (F.avg_pool2d(m, _CELLS, 1, _CELLS // 2, count_include_pad=False)[0, 0] for m in means)
    textured: BoolArray = (square - mean.square() > _LEAST_DEVIATION**2).cpu().numpy()
    return textured
