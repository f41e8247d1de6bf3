"""Looking again: at other scales where matches do not agree, and, in high quality, through the motion they share."""

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

_STEP = 2.0  # from scale to scale of the search; the network sees through what is left
_SURE = 0.5  # agreement that ends the search
_TAKEN = 2 * ENOUGH  # agreement that a scale of the search needs: several are tried, and the best is taken
_EXACTER = 2  # looks at the exact scale
_EXACT = 1.2  # times larger or smaller: closer to the right scale little is gained
_BEST, _OUTSIDE, _MARGIN = 300, 3, 0.15  # matches, percent of them and share of their extent around: where to look
_MOST = 0.5  # of a picture: what covers more is all of it
_WORSE = 0.8  # times the agreement: so much may be lost by chance at the exact scale, which places matches better
_LONGEST = 640  # pixels: pictures that are smaller at the right scale are enlarged, which places matches better
_LOOKS = 2  # after the first
_SAMPLE = 3000  # matches that the motion is estimated from
_THRESHOLD = 0.006  # of picture 1's long side: scenes are not planes, and a rough motion will do
_FEWEST = 30  # matches that must share the motion
_ITERATIONS = 5000
_TOP = 1000  # matches by whose scores two looks are compared
_SPACING = 0.02  # of picture 0's long side: where the second look found nothing this near, the first one stands

NOTHING = (
    "The matches do not agree with each other, at this scale or at others: the pictures may not show the same thing. "
    'If they do, try quality="search", turn one upright, or crop both to what they share.'
)


def search(
    matcher: "Matcher", features: "tuple[PictureFeatures, PictureFeatures]", first: Matches, foothold: Foothold
) -> Matches:
    """Match at the scale that the first look points to, or, where it has no foothold, at the best of several.

    Scales are compared by how much the matches agree with each other. `first` stands where none is better.
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
    # In the pictures' own pixels.
    ratio = [f.size[0] / f.scale.input_size[0] for f in features]
    return replace(look.matches, info={**look.matches.info, "zoom": round(scale * ratio[1] / ratio[0], 3)})


def _best_scale(matcher: "Matcher", features: "tuple[PictureFeatures, PictureFeatures]") -> tuple[Look | None, float]:
    """The scale, of several, at which the matches agree most, and what was found there; None: they agree nowhere."""
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
    """What is found if things are so many times larger in picture 1; None where a picture would be too small."""
    own = features[0].scale, features[1].scale
    scale = 2 ** (round(16 * np.log2(scale)) / 16)  # the same from both sides, for all that matches differ in rounding
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
    """The part of each picture, as the network sees it, that holds nearly all of the best matches; None: most of it."""
    points = matches.points0[:_BEST], matches.points1[:_BEST]
    first, second = (_box(own, f.scale) for own, f in zip(points, features, strict=True))
    return first, second


def _box(points: FloatArray, scale: Scale) -> Box | None:
    size = np.array(scale.input_size)
    low, high = np.percentile(scale.to_network(points), (_OUTSIDE, 100 - _OUTSIDE), axis=0)
    margin = _MARGIN * (high - low)
    # In whole cells, which rounding of the matches does not move.
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
    """Match, then warp the image that shows things larger into the frame of the other and match again.

    With `search_views`, matches of simulated views are further starting points, unless the result is beyond doubt.
    The result that agrees most with an epipolar geometry is then kept. Scores are the network's own.
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
        # A start itself lacks detail.
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
    """The matches of further looks through the motion that matches share, while each finds more than `least`."""
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
    """Match one picture as it is with the other in its frame."""
    moves0 = motion.enlarges < 1  # picture 0 is the larger one
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
    """How picture 0 moves into picture 1, as a whole."""

    frame1_from_0: FloatArray  # 3x3
    enlarges: float  # things are so many times larger in picture 1


def shared_motion(matches: Matches) -> Motion | None:
    """The homography that most matches share, if there is one."""
    if len(matches) < _FEWEST:
        return None
    threshold_px = _THRESHOLD * max(matches.size1)
    fit = geometry.estimate(
        matches.top(_SAMPLE), "homography", threshold_px=threshold_px, min_inliers=_FEWEST, max_iterations=_ITERATIONS
    )
    if fit.matrix is None:
        return None
    # By the middle of what agrees: beyond the horizon of a homography nothing has a size.
    middle = np.median(matches.top(_SAMPLE).points0[fit.inliers], axis=0)
    steps = geometry.apply_homography(fit.matrix, middle + np.array([(0, 0), (1, 0), (0, 1)]))
    area = float(np.linalg.det(steps[1:] - steps[0]))
    if not 1e-4 < area < 1e4:  # mirrored, or collapsed
        return None
    return Motion(frame1_from_0=fit.matrix, enlarges=float(np.sqrt(area)))


def weight(matches: Matches) -> float:
    """How much a look has found."""
    return float(matches.top(_TOP).scores.sum())


def joined(second: Matches, first: Matches) -> Matches:
    """The matches of the second look, and those of the first where the second found nothing nearby, best first."""
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
