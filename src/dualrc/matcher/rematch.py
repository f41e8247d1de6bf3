"""Second passes: at other scales if matches do not agree, and in high quality through their common motion."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dualrc import geometry
from dualrc.image import Scale, to_tensor
from dualrc.matcher.foothold import ENOUGH, Foothold
from dualrc.matcher.views import Box, Look, View, match_views, scale_views
from dualrc.matcher.viewsearch import BEYOND_DOUBT, best_views, verified_weight
from dualrc.matches import Matches
from dualrc.pixels import STRIDE
from dualrc.types import FloatArray, ImageArray

if TYPE_CHECKING:
    from dualrc.matcher.features import PictureFeatures
    from dualrc.matcher.matcher import Matcher

# Factor between the scales of the search. The network tolerates what remains.
_STEP = 2.0
# Agreement that ends the search.
_SURE = 0.5
# Agreement that a scale of the search needs. The best of several scales could agree by chance.
_TAKEN = 2 * ENOUGH
# Number of passes at the exact scale.
_EXACTER = 2
# Scale factor below which another pass gains little.
_EXACT = 1.2
# Best matches that define a crop, percentage of outliers on each side, and margin as a share of their extent.
_BEST, _OUTSIDE, _MARGIN = 300, 3, 0.15
# Largest share of an image that a crop may cover. Beyond it, the whole image is used.
_MOST = 0.5
# Share of the agreement that the exact scale must keep. It localizes better, so a small loss by chance is accepted.
_WORSE = 0.8
# Long side in pixels up to which images are enlarged at the right scale. This improves localization.
_LONGEST = 640
# Number of passes after the first, in high quality.
_LOOKS = 2
# Number of matches from which the common motion is estimated.
_SAMPLE = 3000
# Inlier threshold as a share of image 1's long side. It is wide, because scenes are not planar.
_THRESHOLD = 0.006
# Smallest number of matches that must share the motion.
_FEWEST = 30
_ITERATIONS = 5000
# Number of matches whose scores compare two passes.
_TOP = 1000
# Share of image 0's long side. A match of the first pass stays if the second found nothing this close.
_SPACING = 0.02

NOTHING = (
    "The matches do not agree with each other at any scale: the images may not show the same scene. "
    'If they do, try quality="search", rotate one image upright, or crop both images to their overlap.'
)


def search(
    matcher: "Matcher", features: "tuple[PictureFeatures, PictureFeatures]", first: Matches, foothold: Foothold
) -> Matches:
    """Match at the scale that the first pass indicates, or at the best of several scales if it has no agreement.

    Scales are compared by the agreement of their matches. The result is `first` if no scale is better.
    """
    look: Look | None = None
    scale, agreed = foothold.scale, foothold.share
    if not foothold.firm:
        look, scale = _best_scale(matcher, features)
        if look is None:
            return replace(first, info={**first.info, "warning": NOTHING})
        scale, agreed = scale * look.foothold.scale, look.foothold.share
    for _ in range(_EXACTER):
        seen = first if look is None else look.matches
        exact = _look_at_scale(matcher, features, scale, _boxes(seen, features), _LONGEST)
        if exact is None or exact.foothold.share < _WORSE * agreed:
            break
        if look is None and weight(exact.matches) <= weight(first):
            break
        look, rest, agreed = exact, exact.foothold.scale, exact.foothold.share
        if max(rest, 1 / rest) < _EXACT:
            break
        scale *= rest
    if look is None:
        return first
    # The zoom is the scale between the original images.
    ratio = [f.size[0] / f.scale.input_size[0] for f in features]
    return replace(look.matches, info={**look.matches.info, "zoom": round(scale * ratio[1] / ratio[0], 3)})


def _best_scale(matcher: "Matcher", features: "tuple[PictureFeatures, PictureFeatures]") -> tuple[Look | None, float]:
    """Return the pass and the scale with the highest agreement of several; None if the matches agree at no scale."""
    best: Look | None = None
    best_scale, most = 1.0, _TAKEN
    steps = int(np.log(matcher.config.max_zoom) / np.log(_STEP) + 1e-6)
    for scale in (_STEP**power for step in range(1, steps + 1) for power in (-step, step)):
        look = _look_at_scale(matcher, features, scale)
        if look is not None and look.foothold.share > most:
            best, best_scale, most = look, scale, look.foothold.share
            if most > _SURE:
                break
    return best, best_scale


def _look_at_scale(
    matcher: "Matcher",
    features: "tuple[PictureFeatures, PictureFeatures]",
    scale: float,
    boxes: tuple[Box | None, Box | None] = (None, None),
    longest: int = 0,
) -> Look | None:
    """Match at a scale factor from image 0 to image 1; None if an image would become too small."""
    own = features[0].scale, features[1].scale
    # Rounding makes the scale the same in both directions, although matches differ slightly.
    scale = 2 ** (round(16 * np.log2(scale)) / 16)
    views = scale_views(own, scale, boxes, longest)
    if views is not None and longest > 0:
        first, second = (
            scale if view is None else Scale(image_size=view.size, input_size=view.size)
            for scale, view in zip(own, views, strict=True)
        )
        if not matcher.budget.fits((first, second)):
            views = scale_views(own, scale, boxes)
    return None if views is None else match_views(matcher, features, views)


def _boxes(matches: Matches, features: "tuple[PictureFeatures, PictureFeatures]") -> tuple[Box | None, Box | None]:
    """Return the crop of each network input with nearly all of the best matches; None for the whole image."""
    points = matches.points0[:_BEST], matches.points1[:_BEST]
    first, second = (_box(own, f.scale) for own, f in zip(points, features, strict=True))
    return first, second


def _box(points: FloatArray, scale: Scale) -> Box | None:
    size = np.array(scale.input_size)
    low, high = np.percentile(scale.to_network(points), (_OUTSIDE, 100 - _OUTSIDE), axis=0)
    margin = _MARGIN * (high - low)
    # Whole cells do not depend on small differences between the matches.
    left, top = (np.clip(low - margin, 0, size - 1) // STRIDE * STRIDE).astype(int).tolist()
    right, bottom = (-(-np.clip(high + margin, (left + 1, top + 1), size) // STRIDE) * STRIDE).astype(int).tolist()
    box = (left, top, right - left, bottom - top)
    return None if box[2] * box[3] > _MOST * size.prod() else box


def match_again(
    matcher: "Matcher",
    pictures: tuple[ImageArray, ImageArray],
    features0: "PictureFeatures",
    features1: "PictureFeatures",
    *,
    search_views: bool = False,
) -> Matches:
    """Match, then warp the image with the larger scale into the frame of the other image, and match again.

    With `search_views`, matches of simulated views are further starting points, unless the result is beyond doubt.
    The result that agrees best with an epipolar geometry is kept. Scores are raw network scores.
    """
    features = features0, features1
    everything = replace(matcher.config, top=None)
    first = next(matcher.match_uncalibrated([features], everything))
    # A blank image has no view that matches.
    if not len(first):
        return first
    best = _looked_again(matcher, pictures, features, first, weight(first), _LOOKS)
    if search_views and (agreed := verified_weight(best)) < BEYOND_DOUBT:
        starts = best_views(matcher, features)
        looks = [_looked_again(matcher, pictures, features, start, 0.0, 1) for start in starts]
        # The matches of the simulated views themselves lack detail.
        looks = [look for look, start in zip(looks, starts, strict=True) if look is not start]
        start = max(looks, key=verified_weight, default=None)
        if start is not None:
            found = _looked_again(matcher, pictures, features, start, weight(start), _LOOKS - 1)
            best = found if verified_weight(found) > agreed else best
    return first if best is first else joined(best, first)


def _looked_again(
    matcher: "Matcher",
    pictures: tuple[ImageArray, ImageArray],
    features: "tuple[PictureFeatures, PictureFeatures]",
    best: Matches,
    least: float,
    looks: int,
) -> Matches:
    """Match again through the common motion of the matches, while each pass has a larger weight than `least`."""
    for _ in range(looks):
        motion = shared_motion(best)
        if motion is None:
            break
        again = _match_moved(matcher, pictures, features, motion)
        if (found := weight(again)) <= least:
            break
        best, least = again, found
    return best


def _match_moved(
    matcher: "Matcher",
    pictures: tuple[ImageArray, ImageArray],
    features: "tuple[PictureFeatures, PictureFeatures]",
    motion: "Motion",
) -> Matches:
    """Match one image with the other image warped into its frame."""
    # Warp the image that shows the scene larger, so that no detail is invented.
    moves0 = motion.enlarges < 1
    own_from_frame = np.linalg.inv(motion.frame1_from_0) if moves0 else motion.frame1_from_0
    still, moving = features[moves0], int(not moves0)
    frame = still.scale
    view = View(
        picture_from_view=own_from_frame @ geometry.resize_homography(frame.input_size, frame.image_size),
        size=frame.input_size,
        shrinks=(1 / motion.enlarges if moves0 else motion.enlarges) * frame.image_size[0] / frame.input_size[0],
    )
    pixels = to_tensor(pictures[moving]).to(matcher.device)
    if moves0:
        return match_views(matcher, features, (view, None), (pixels, None)).matches
    return match_views(matcher, features, (None, view), (None, pixels)).matches


@dataclass(frozen=True, kw_only=True, eq=False)
class Motion:
    """Global motion from image 0 to image 1."""

    # (3, 3) Homography.
    frame1_from_0: FloatArray
    # Scale factor from image 0 to image 1.
    enlarges: float


def shared_motion(matches: Matches) -> Motion | None:
    """Estimate the homography that most matches share; None if there is none."""
    if len(matches) < _FEWEST:
        return None
    threshold_px = _THRESHOLD * max(matches.size1)
    fit = geometry.estimate(
        matches.top(_SAMPLE), "homography", threshold_px=threshold_px, min_inliers=_FEWEST, max_iterations=_ITERATIONS
    )
    if fit.matrix is None:
        return None
    # Measure at the median of the inliers, because scale is undefined beyond the horizon of a homography.
    middle = np.median(matches.top(_SAMPLE).points0[fit.inliers], axis=0)
    steps = geometry.apply_homography(fit.matrix, middle + np.array([(0, 0), (1, 0), (0, 1)]))
    area = float(np.linalg.det(steps[1:] - steps[0]))
    # The homography mirrors or collapses the image.
    if not 1e-4 < area < 1e4:
        return None
    return Motion(frame1_from_0=fit.matrix, enlarges=float(np.sqrt(area)))


def weight(matches: Matches) -> float:
    """Return the sum of the best scores of a pass."""
    return float(matches.top(_TOP).scores.sum())


def joined(second: Matches, first: Matches) -> Matches:
    """Merge both passes, best first; matches of the first pass stay where the second found nothing nearby."""
    cell = max(1.0, _SPACING * max(first.size0))
    width = int(first.size0[0] / cell) + 1

    def cells(matches: Matches) -> npt.NDArray[np.int64]:
        column, row = np.clip(matches.points0 / cell, 0, None).astype(np.int64).T
        return row * width + column

    apart = ~np.isin(cells(first), cells(second))
    both = Matches(
        points0=np.concatenate([second.points0, first.points0[apart]]),
        points1=np.concatenate([second.points1, first.points1[apart]]),
        scores=np.concatenate([second.scores, first.scores[apart]]),
        size0=first.size0,
        size1=first.size1,
        info=first.info,
    )
    return both.top(len(both))
