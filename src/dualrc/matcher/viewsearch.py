"""Search over simulated views: if viewpoints differ too much to match, one image is warped toward the other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dualrc import geometry
from dualrc.matcher.views import Look, View, match_views
from dualrc.matches import Matches
from dualrc.pixels import STRIDE
from dualrc.types import FloatArray, Size

if TYPE_CHECKING:
    from dualrc.matcher.features import PictureFeatures
    from dualrc.matcher.matcher import Matcher

# Long side at which views are compared: a share of the network input, within bounds in pixels.
# The start of a second pass needs no more detail.
_SHARE, _SIDES = 0.47, (320, 480)
# Tilts, as the ratio of foreshortening, and the number of directions of each. A larger tilt needs more directions.
_TILTS = ((2.0, 4), (4.0, 8))
# In-plane rotations of image 0, in degrees.
_TURNS_DEG = (90.0, 180.0, 270.0)
# Views that are verified geometrically, and views of these that are returned.
_VERIFIED, _STARTS = 8, 3
# Inlier threshold on the distance to an epipolar line, as a share of the long side.
_THRESHOLD = 0.003
# Verified weight above which no view is searched. On hard pairs, wrong results reach 33, correct ones start at 190.
BEYOND_DOUBT = 100.0
_SAMPLE, _ITERATIONS, _FEWEST = 1000, 1000, 20
_LEAST_SIDE = 64


class Simulated(NamedTuple):
    """An affine view of one image: foreshortened by `tilt` along a direction, then rotated."""

    tilt: float
    direction_deg: float
    turn_deg: float


def simulated_views() -> Iterator[tuple[int, Simulated]]:
    """Yield the views to try, each with the index of its image."""
    for turn in _TURNS_DEG:
        yield 0, Simulated(1.0, 0.0, turn)
    for tilt, directions in _TILTS:
        for number in range(directions):
            for image in (0, 1):
                yield image, Simulated(tilt, 180.0 * number / directions, 0.0)


def affine_view(image: Size, side: int, simulated: Simulated) -> View | None:
    """Return the view of an image of this size with an untilted long side of `side` pixels; None if too small."""
    scale = min(1.0, side / max(image))
    turn, direction = np.deg2rad((simulated.turn_deg, simulated.direction_deg))
    shrink = np.diag([1 / simulated.tilt, 1.0])
    linear = scale * _rotation(turn) @ _rotation(direction) @ shrink @ _rotation(-direction)
    corners = np.array([(0, 0), (image[0], 0), (0, image[1]), image]) @ linear.T
    low, high = corners.min(axis=0), corners.max(axis=0)
    width, height = (max(1, round(side / STRIDE)) * STRIDE for side in (high - low).tolist())
    if min(width, height) < _LEAST_SIDE:
        return None
    inverse = np.linalg.inv(linear)
    # Align the centers of view and image.
    center, view_center = (np.array(image) - 1) / 2, (np.array((width, height)) - 1) / 2
    picture_from_view = np.eye(3)
    picture_from_view[:2, :2], picture_from_view[:2, 2] = inverse, center - inverse @ view_center
    along = np.array((np.cos(direction), np.sin(direction))) * (simulated.tilt / scale)
    return View(picture_from_view=picture_from_view, size=(width, height), shrinks=1 / scale, blur=along)


def _rotation(angle: float) -> FloatArray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def best_views(matcher: "Matcher", features: "tuple[PictureFeatures, PictureFeatures]") -> list[Matches]:
    """Return matches of the simulated views that agree most with an epipolar geometry, in original pixels."""
    sides = [int(np.clip(_SHARE * max(own.scale.input_size), *_SIDES)) for own in features]
    upright = [affine_view(own.size, side, Simulated(1.0, 0.0, 0.0)) for own, side in zip(features, sides, strict=True)]
    looks: list[Look] = []
    for number, simulated in simulated_views():
        views = list(upright)
        views[number] = affine_view(features[number].size, sides[number], simulated)
        if views[0] is not None and views[1] is not None:
            looks.append(match_views(matcher, features, (views[0], views[1])))
    looks.sort(key=lambda look: look.foothold.share * len(look.matches), reverse=True)
    verified = [(verified_weight(look.matches), look.matches) for look in looks[:_VERIFIED]]
    verified.sort(key=lambda each: each[0], reverse=True)
    return [matches for weight, matches in verified[:_STARTS] if weight > 0]


def verified_weight(matches: Matches) -> float:
    """Return the sum of the scores of the best matches that agree with one epipolar geometry."""
    best = matches.top(_SAMPLE)
    if len(best) < _FEWEST:
        return 0.0
    threshold_px = _THRESHOLD * max(matches.size1)
    fit = geometry.estimate(
        best, "fundamental", threshold_px=threshold_px, min_inliers=_FEWEST, max_iterations=_ITERATIONS
    )
    return float(best.scores[fit.inliers].sum()) if fit.matrix is not None else 0.0
