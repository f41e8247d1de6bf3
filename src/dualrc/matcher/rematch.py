"""Second passes: at other scales if matches do not agree, and in high quality through their common motion."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualrc import geometry
from dualrc.agreement import ADVICE, CHANCE, Agreement
from dualrc.image import Scale, to_tensor
from dualrc.matcher.features import FeaturePair, ImageFeatures
from dualrc.matcher.verify import BEYOND_DOUBT, Verified, side_by_side, verify
from dualrc.matcher.views import (
    LARGEST_GROWTH,
    LEAST_SIDE,
    Box,
    Look,
    View,
    ViewPair,
    match_views,
    rounded,
    scale_views,
)
from dualrc.matcher.viewsearch import best_views, quick_search, thorough_search
from dualrc.matches import Matches
from dualrc.pixels import STRIDE
from dualrc.types import FloatArray, ImagePair

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher

# Factor between the scales of the search. The network tolerates what remains.
_STEP = 2.0
# Agreement that ends the search.
_SURE = 0.5
# Agreement that a scale of the search needs. The best of several scales could agree by chance.
_TAKEN = CHANCE
# Number of matches that must agree at a scale of the search. Among few matches, a large share can agree by chance.
_FEWEST_AGREED = 30
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
# Smaller sizes of the first pass, as shares of the largest. Images that differ much often match better if seen small.
_RATIOS = (0.78, 0.5)
# Starting points from which matching continues at full size, and the verified weight that they need for it.
_STARTS, _WORTH = 2, 1.0
# Verified weight above which high quality searches no other starting point. It is higher than `BEYOND_DOUBT`, because a
# needless search only takes time. On hard pairs, wrong results reach 101, correct ones start at 190.
_CERTAIN = 140.0
# Verified weight that the best of many starting points can reach by chance. The first matches are kept up to it.
_BY_CHANCE = 20.0
# Number of matches from which the common motion is estimated.
_SAMPLE = 3000
# Inlier threshold as a share of image 1's long side. It is wide, because scenes are not planar.
_THRESHOLD = 0.006
# Smallest number of matches that must share the motion.
_FEWEST = 30
_ITERATIONS = 5000
# Share of the verified weight of a pass that must agree with the epipolar geometry of the next one.
_KEPT = 0.5
# Number of matches whose scores compare two passes.
_TOP = 1000
# Side of the squares in which passes are compared, as a share of image 0's long side.
_SPACING = 0.02

NOTHING = f"The matches do not agree with each other at any scale: {ADVICE}"


def search_scales(matcher: "Matcher", features: FeaturePair, first: Matches, agreement: Agreement) -> Matches:
    """Match at the scale that the first pass indicates, or at the best of several scales if it has no agreement.

    Scales are compared by the agreement of their matches. The result is `first` if no scale is better.
    """
    look: Look | None = None
    scale, agreed = agreement.scale, agreement.share
    if not agreement.firm:
        look, scale = _best_scale(matcher, features)
        if look is None:
            return replace(first, info={**first.info, "warning": NOTHING})
        scale, agreed = scale * look.agreement.scale, look.agreement.share
    for _ in range(_EXACTER):
        seen = first if look is None else look.matches
        exact = _look_at_scale(matcher, features, scale, _boxes(seen, features), _LONGEST)
        if exact is None or exact.agreement.share < _WORSE * agreed:
            break
        if look is None and weight(exact.matches) <= weight(first):
            break
        look, rest, agreed = exact, exact.agreement.scale, exact.agreement.share
        if max(rest, 1 / rest) < _EXACT:
            break
        scale *= rest
    if look is None:
        return first
    # The zoom is the scale between the original images.
    ratio = [f.size[0] / f.scale.input_size[0] for f in features]
    return replace(look.matches, info={**look.matches.info, "zoom": round(scale * ratio[1] / ratio[0], 3)})


def _best_scale(matcher: "Matcher", features: FeaturePair) -> tuple[Look | None, float]:
    """Return the pass and the scale with the highest agreement of several; None if the matches agree at no scale."""
    best: Look | None = None
    best_scale, most = 1.0, _TAKEN
    steps = int(np.log(matcher.config.max_zoom) / np.log(_STEP) + 1e-6)
    for scale in (_STEP**power for step in range(1, steps + 1) for power in (-step, step)):
        look = _look_at_scale(matcher, features, scale)
        if look is None or look.agreement.share * len(look.matches) < _FEWEST_AGREED:
            continue
        if look.agreement.share > most:
            best, best_scale, most = look, scale, look.agreement.share
            if most > _SURE:
                break
    return best, best_scale


def _look_at_scale(
    matcher: "Matcher",
    features: FeaturePair,
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
    return None if views is None else next(match_views(matcher, features, [views]))


def _boxes(matches: Matches, features: FeaturePair) -> tuple[Box | None, Box | None]:
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


def search_tilts(matcher: "Matcher", features: FeaturePair, first: Matches, max_tilt: float) -> Matches | None:
    """Match through tilted views of both images, then through the motion found; None if no result is beyond doubt."""
    # Robust estimation depends on the order of the images. Searching in the order of their content makes the matches
    # of swapped images the same.
    if _content(features[0]) < _content(features[1]):
        swapped = search_tilts(matcher, features[::-1], first.swapped(), max_tilt)
        return None if swapped is None else swapped.swapped()
    search = quick_search(max_tilt)
    # Untilted views alone would only repeat the first pass at a smaller size.
    views = best_views(matcher, features, search) if search.tilts else []
    for start in _most_agreed(views)[:_STARTS]:
        (found,) = _looked_again([start], matcher, None, features, _LOOKS)
        if found.weight > BEYOND_DOUBT:
            both = joined(found.matches, first)
            return replace(both, info={**first.info, "tilted": True})
    return None


def _content(features: ImageFeatures) -> tuple[int, ...]:
    """Return numbers that put images into an order."""
    pixels = features.pixels.long()
    return *features.scale.input_size, int(pixels.sum()), int(pixels.square().sum())


def match_again(
    matcher: "Matcher",
    images: ImagePair,
    features0: ImageFeatures,
    features1: ImageFeatures,
    *,
    rotated_views: bool = False,
) -> Matches:
    """Match, then warp the image with the larger scale into the frame of the other image, and match again.

    Unless the first matches are beyond doubt, smaller sizes and then tilted views are further starting points;
    `rotated_views` also rotates them. The result that agrees best with an epipolar geometry is kept. Scores are raw
    network scores.
    """
    features = features0, features1
    # Tilted views are searched below, more thoroughly.
    everything = replace(matcher.config, top=None, max_tilt=1.0)
    first = next(matcher.match_uncalibrated([features], everything))
    # A blank image has no view that matches.
    if not len(first):
        return first
    best = verify(first)
    # Without a calibration, scores of any size can be right, so only the search with rotated views goes on.
    if best.weight > _CERTAIN or (matcher.calibration is None and not rotated_views):
        (best,) = _looked_again([best], matcher, images, features, _LOOKS)
    else:
        smaller = list(_smaller(matcher, images, features))
        small = smaller[-1] if smaller else features
        again = (next(matcher.match_uncalibrated([pair], everything)) for pair in smaller)
        starts = [best, *side_by_side(verify, again)]
        best = _best_of(starts, matcher, images, features, small)
        if best.weight <= _CERTAIN:
            views = best_views(matcher, features, thorough_search(rotated=rotated_views))
            best = _best_of([best, *views], matcher, images, features, small)
    by_chance = matcher.calibration is not None and best.weight <= _BY_CHANCE
    if best.matches is first or by_chance:
        return first
    found = joined(best.matches, first)
    # The first pass may have warned that its matches do not agree.
    info = {key: value for key, value in found.info.items() if key != "warning" or best.weight <= BEYOND_DOUBT}
    return replace(found, info=info)


def _best_of(
    starts: list[Verified], matcher: "Matcher", images: ImagePair, features: FeaturePair, small: FeaturePair
) -> Verified:
    """Return the result of matching again from the best starting points, or a starting point if none is better."""
    # A second pass at a small size shows which starting points are right.
    starts = _most_agreed(_looked_again(starts, matcher, images, small, 1))
    least = 0.0 if matcher.calibration is None else _WORTH
    worth = [start for start in starts[:_STARTS] if start.weight > least]
    return _most_agreed([*starts, *_looked_again(worth, matcher, images, features, _LOOKS)])[0]


def _most_agreed(starts: Iterable[Verified]) -> list[Verified]:
    """Sort by verified weight, highest first."""
    return sorted(starts, key=lambda start: start.weight, reverse=True)


def _looked_again(
    starts: list[Verified], matcher: "Matcher", images: ImagePair | None, features: FeaturePair, looks: int
) -> list[Verified]:
    """Match again through the common motion of each start's matches, while that raises their verified weight.

    Repeated structure can raise it too, so the matches before must agree with the epipolar geometry after. Without
    images, the resized ones of the features are warped.
    """
    best, rising = list(starts), list(range(len(starts)))
    for _ in range(looks):
        motions = side_by_side(shared_motion, [best[number].matches for number in rising])
        moving = [(number, motion) for number, motion in zip(rising, motions, strict=True) if motion is not None]
        moved = _match_moved(matcher, images, features, [motion for _, motion in moving])
        rising = []
        for (number, _), again in zip(moving, side_by_side(verify, moved), strict=True):
            before = best[number]
            if again.weight > before.weight and again.weight_of(before.matches) >= _KEPT * before.weight:
                best[number] = again
                rising.append(number)
    return best


def _smaller(matcher: "Matcher", images: ImagePair, features: FeaturePair) -> Iterator[FeaturePair]:
    """Yield the features of both images at smaller sizes, as long as both are large enough to match."""
    longest = max(max(own.scale.input_size) for own in features)
    for ratio in _RATIOS:
        # An image that is small already stays as it is.
        shrinks = [min(1.0, ratio * longest / max(own.scale.input_size)) for own in features]
        if min(shrink * min(own.scale.input_size) for shrink, own in zip(shrinks, features, strict=True)) < LEAST_SIDE:
            return
        first, second = (
            matcher.masked(matcher.features(image, size=rounded(shrink * max(own.scale.input_size))), own.mask)
            for image, own, shrink in zip(images, features, shrinks, strict=True)
        )
        yield first, second


def _match_moved(
    matcher: "Matcher", images: ImagePair | None, features: FeaturePair, motions: Sequence["Motion"]
) -> Iterator[Matches]:
    """Match through each motion."""
    views = [_moved(features, motion) for motion in motions]
    pixels: tuple[Tensor | None, Tensor | None] = (None, None)
    if images is not None and motions:
        pixels = to_tensor(images[0]).to(matcher.device), to_tensor(images[1]).to(matcher.device)
    return (look.matches for look in match_views(matcher, features, views, pixels))


def _moved(features: FeaturePair, motion: "Motion") -> ViewPair:
    """Return views that warp one image into the frame of the other, cropped if the motion holds for a part of it."""
    # Warp the image that shows the scene larger, so that no detail is invented.
    moves0 = motion.enlarges < 1
    own_from_frame = np.linalg.inv(motion.frame1_from_0) if moves0 else motion.frame1_from_0
    scale, points = features[moves0].scale, motion.points[moves0]
    box = _box(points, scale)
    size = scale.input_size
    if box is not None:
        grow = min(LARGEST_GROWTH, max(size) / max(box[2:]))
        size = (rounded(grow * box[2]), rounded(grow * box[3]))
    frame = View.part(scale, box or (0, 0, *size), size)
    moving = View(
        image_from_view=own_from_frame @ frame.image_from_view,
        size=size,
        shrinks=(1 / motion.enlarges if moves0 else motion.enlarges) * frame.shrinks,
    )
    still = None if box is None else replace(frame, box=None)
    return (moving, still) if moves0 else (still, moving)


@dataclass(frozen=True, kw_only=True, eq=False)
class Motion:
    """Global motion from image 0 to image 1."""

    # (3, 3) Homography.
    frame1_from_0: FloatArray
    # Scale factor from image 0 to image 1.
    enlarges: float
    # (n, 2) The matches that share it, in each image.
    points: tuple[FloatArray, FloatArray]


def shared_motion(matches: Matches) -> Motion | None:
    """Estimate the homography that most matches share; None if there is none."""
    if len(matches) < _FEWEST:
        return None
    threshold_px = _THRESHOLD * max(matches.size1)
    sample = matches.top(_SAMPLE)
    fit = geometry.estimate(
        sample, "homography", threshold_px=threshold_px, min_inliers=_FEWEST, max_iterations=_ITERATIONS
    )
    if fit.matrix is None:
        return None
    points = sample.points0[fit.inliers], sample.points1[fit.inliers]
    # Measure at the median of the inliers, because scale is undefined beyond the horizon of a homography.
    middle = np.median(points[0], axis=0)
    steps = geometry.apply_homography(fit.matrix, middle + np.array([(0, 0), (1, 0), (0, 1)]))
    area = float(np.linalg.det(steps[1:] - steps[0]))
    # The homography mirrors or collapses the image.
    if not 1e-4 < area < 1e4:
        return None
    return Motion(frame1_from_0=fit.matrix, enlarges=float(np.sqrt(area)), points=points)


def weight(matches: Matches) -> float:
    """Return the sum of the best scores of a pass."""
    return float(matches.top(_TOP).scores.sum())


def joined(second: Matches, first: Matches) -> Matches:
    """Merge two passes, best first; in each square of image 0, the pass with the higher sum of scores is kept."""
    side = max(1.0, _SPACING * max(first.size0))
    width = int(first.size0[0] / side) + 1

    def squares(matches: Matches) -> npt.NDArray[np.int64]:
        column, row = np.clip(matches.points0 / side, 0, None).astype(np.int64).T
        return row * width + column

    places = squares(second), squares(first)
    count = 1 + max(int(place.max(initial=0)) for place in places)
    sums = [
        np.bincount(place, weights=matches.scores, minlength=count)
        for place, matches in zip(places, (second, first), strict=True)
    ]
    keep = (sums[0] >= sums[1])[places[0]], (sums[1] > sums[0])[places[1]]
    both = Matches(
        points0=np.concatenate([second.points0[keep[0]], first.points0[keep[1]]]),
        points1=np.concatenate([second.points1[keep[0]], first.points1[keep[1]]]),
        scores=np.concatenate([second.scores[keep[0]], first.scores[keep[1]]]),
        size0=first.size0,
        size1=first.size1,
        info=first.info,
    )
    return both.top(len(both))
