"""Removal of matches in areas without texture, which are no evidence for a pair."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dualrc.agreement import FEWEST_SURE
from dualrc.image import Scale
from dualrc.matches import Matches
from dualrc.pixels import FINE_STRIDE, pixel_to_cell
from dualrc.types import BoolArray, FloatArray

# Side of a neighborhood in fine cells, and the standard deviation of gray levels below which it has no texture.
# Sensor noise of a uniform area stays below this.
CELLS, LEAST_DEVIATION = 5, 2.0
# Share of the image that must have texture.
LEAST_SHARE = 0.01
# Number of best matches to examine. A match is stationary if it moves by less than this share of the image size.
_TOP, _STATIONARY = 1000, 0.02
# Share of stationary matches above which the texture is examined.
_SUSPICIOUS = 0.3

BLANK = "Image {} has almost no texture, so it cannot be matched; check that it is the right file."


class Seen(NamedTuple):
    """Texture of an image as the network sees it."""

    # (h / 4, w / 4) See `has_texture`.
    textured: BoolArray
    scale: Scale


def is_suspicious(matches: Matches) -> bool:
    """Return whether agreement of the matches may be chance, or that of blank areas and overlays such as captions."""
    return len(matches) < FEWEST_SURE or is_stationary(matches)


def is_stationary(matches: Matches) -> bool:
    """Return whether many of the best matches have the same position in both images.

    In blank areas the network distinguishes positions by their distance from the image border, so matches are
    stationary. Other pairs need no check of their texture.
    """
    x, y = np.abs(matches.points0[:_TOP] / matches.size0 - matches.points1[:_TOP] / matches.size1).T
    return len(x) > 0 and bool(np.mean((x < _STATIONARY) & (y < _STATIONARY)) > _SUSPICIOUS)


def without_blank_areas(matches: Matches, seen: Sequence[Seen]) -> Matches:
    """Remove matches in areas without texture; all of them, with a warning, if an image is blank."""
    keep = np.ones(len(matches), dtype=bool)
    for number, (points, own) in enumerate(zip((matches.points0, matches.points1), seen, strict=True)):
        textured = own.textured
        if textured.mean() < LEAST_SHARE:
            return replace(matches[:0], info={**matches.info, "warning": BLANK.format(number)}, whole=None)
        cells = pixel_to_cell(own.scale.to_network(points), FINE_STRIDE)
        column, row = np.clip(np.rint(cells), 0, np.array(textured.shape[::-1]) - 1).astype(np.int64).T
        keep &= textured[row, column]
    return matches if keep.all() else replace(matches[keep], whole=None)


def has_texture(gray: FloatArray) -> BoolArray:
    """Return whether the neighborhood of each fine cell has texture: gray levels (h, w) -> (h / 4, w / 4)."""
    height, width = (side // FINE_STRIDE for side in gray.shape)
    cells = gray[: height * FINE_STRIDE, : width * FINE_STRIDE].reshape(height, FINE_STRIDE, width, FINE_STRIDE)
    mean, square = (_smoothed(values.mean(axis=(1, 3))) for values in (cells, np.square(cells)))
    return square - mean**2 > LEAST_DEVIATION**2


def _smoothed(values: FloatArray) -> FloatArray:
    """Return the mean over the part of each neighborhood inside the image."""
    for axis in (0, 1):
        sums = np.insert(np.cumsum(values, axis=axis, dtype=np.float64), 0, 0, axis=axis)
        place, length = np.arange(values.shape[axis]), values.shape[axis]
        end, start = np.minimum(place + CELLS // 2 + 1, length), np.maximum(place - CELLS // 2, 0)
        count = (end - start).reshape((-1, 1) if axis == 0 else (1, -1))
        values = (sums.take(end, axis=axis) - sums.take(start, axis=axis)) / count
    return values
