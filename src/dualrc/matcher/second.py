"""A second look: one picture is brought into the frame of the other by the motion that most first matches share."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualrc import geometry
from dualrc.matches import BoolArray, FloatArray, Matches, Size

_SAMPLE = 3000  # matches that the motion is estimated from
_THRESHOLD = 0.006  # of picture 1's long side: scenes are not planes, and a rough motion will do
_FEWEST = 30  # matches that must share the motion
_ITERATIONS = 5000
_TOP = 1000  # matches by whose scores two looks are compared
_SPACING = 0.02  # of picture 0's long side: where the second look found nothing this near, the first one stands


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
    picture: npt.NDArray[np.uint8], picture_from_frame: FloatArray, frame: Size, shrinks: float
) -> tuple[npt.NDArray[np.uint8], BoolArray]:
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
