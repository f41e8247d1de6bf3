"""High quality: match again, one image warped into the frame of the other by the motion that most matches share."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualrc import geometry
from dualrc.matches import Matches
from dualrc.types import BoolArray, FloatArray, ImageArray, Size

if TYPE_CHECKING:
    from dualrc.matcher.features import PictureFeatures
    from dualrc.matcher.matcher import Matcher

_LOOKS = 2  # after the first
_SAMPLE = 3000  # matches that the motion is estimated from
_THRESHOLD = 0.006  # of picture 1's long side: scenes are not planes, and a rough motion will do
_FEWEST = 30  # matches that must share the motion
_ITERATIONS = 5000
_TOP = 1000  # matches by whose scores two looks are compared
_SPACING = 0.02  # of picture 0's long side: where the second look found nothing this near, the first one stands


def match_again(
    matcher: "Matcher",
    pictures: tuple[ImageArray, ImageArray],
    *features: "PictureFeatures",
) -> Matches:
    """Match, then bring the picture that shows things larger into the frame of the other and match again.

    Scores are the network's own, by whose sums two looks are compared.
    """
    best = first = next(matcher._match_batch([(features[0], features[1])], None))
    for _ in range(_LOOKS):
        motion = shared_motion(best)
        if motion is None:
            break
        again = _match_moved(matcher, pictures, features, motion)
        if weight(again) <= weight(best):
            break
        best = again
    return first if best is first else joined(best, first)


def _match_moved(
    matcher: "Matcher",
    pictures: tuple[ImageArray, ImageArray],
    features: "tuple[PictureFeatures, ...]",
    motion: "Motion",
) -> Matches:
    """Match one picture as it is with the other in its frame."""
    moves0 = motion.enlarges < 1  # picture 0 is the larger one
    own_from_frame = np.linalg.inv(motion.frame1_from_0) if moves0 else motion.frame1_from_0
    shrinks = 1 / motion.enlarges if moves0 else motion.enlarges
    still, moving = features[moves0], int(not moves0)
    picture, seen = bring(pictures[moving], own_from_frame, still.size, shrinks)
    pair = (picture, still) if moves0 else (still, picture)
    masks = (seen, None) if moves0 else (None, seen)

    def look(features0: "PictureFeatures", features1: "PictureFeatures") -> Matches:
        return next(matcher._match_batch([(features0, features1)], None))

    found = matcher._with_pair(look, pair[0], pair[1], masks[0], masks[1], max(still.scale.input_size))
    points = [found.points0, found.points1]
    points[moving] = geometry.apply_homography(own_from_frame, points[moving]).astype(np.float32)
    found = replace(found, points0=points[0], points1=points[1], size0=features[0].size, size1=features[1].size)
    whole = (np.ones((f.size[1], f.size[0]), dtype=bool) if f.mask is None else f.mask for f in features)
    return replace(found.inside(*whole), whole=None)


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


def bring(
    picture: ImageArray, picture_from_frame: FloatArray, frame: Size, shrinks: float
) -> tuple[ImageArray, BoolArray]:
    """The picture as it looks in a frame of this size, where it is so many times smaller, and where that shows it."""
    size = (picture.shape[1], picture.shape[0])
    if shrinks > 1:  # scaled down first, so that nothing aliases
        smaller = (max(1, round(size[0] / shrinks)), max(1, round(size[1] / shrinks)))
        picture = np.asarray(Image.fromarray(picture).resize(smaller, Image.Resampling.LANCZOS))
        picture_from_frame = geometry.resize_homography(size, smaller) @ picture_from_frame
        size = smaller
    # As for drawing, the places of a frame's pixels in the picture are those of picture 1's in picture 0.
    places = geometry.homography_grid(np.linalg.inv(picture_from_frame), size, frame)
    seen = geometry.sample_bilinear(picture, places).round().astype(np.uint8)
    return seen, geometry.on_picture(places, size)


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
