"""Dense matching: the counterparts of given points, and of every pixel."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from dualrc.image import spread
from dualrc.matcher.features import ImageFeatures
from dualrc.matches import Matches, Warp, inside_mask
from dualrc.pixels import FINE_STRIDE, in_image, pixel_grid
from dualrc.types import FloatArray

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher


def match_points(
    matcher: "Matcher", features0: ImageFeatures, features1: ImageFeatures, points: FloatArray, min_score: float
) -> Matches:
    """Locate points (n, 2) of image 0 in image 1; see `Matcher.match_points`."""
    where = np.ones((features0.size[1], features0.size[0]), bool) if features0.mask is None else features0.mask
    asked = inside_mask(points, where)
    result, scores = np.full_like(points, np.nan), np.zeros(len(points), np.float32)
    if asked.any():
        inputs = torch.from_numpy(features0.scale.to_network(points[asked]).astype(np.float32)).to(matcher.device)
        with matcher.working(features0, features1):
            there, score = matcher.network.match_points(features0.maps, features1.maps, inputs)
        result[asked] = features1.scale.to_image(there.cpu().numpy())
        scores[asked] = _calibrated(matcher, score.cpu().numpy())
        if features1.mask is not None:
            scores[~inside_mask(result, features1.mask)] = 0
        scores[scores < min_score] = 0
        result[scores == 0] = np.nan
    return Matches(
        points0=points,
        points1=result,
        scores=scores,
        size0=features0.size,
        size1=features1.size,
        info=matcher.pair_info(features0, features1),
    )


def warp(matcher: "Matcher", features0: ImageFeatures, features1: ImageFeatures, min_score: float) -> Warp:
    """Locate every pixel of image 0 in image 1; see `Matcher.warp`."""
    with matcher.working(features0, features1):
        points, certainty = matcher.network.warp(features0.maps, features1.maps)
    known = torch.from_numpy(_calibrated(matcher, certainty.cpu().numpy()))
    places, sure = spread(points.cpu(), known, features0.scale, FINE_STRIDE)
    dense = features1.scale.to_image(places.reshape(-1, 2)).reshape(places.shape)
    sure = sure * in_image(dense, features1.size)
    for features, points_there in ((features0, pixel_grid(features0.size)), (features1, dense)):
        if features.mask is not None:
            sure = sure * inside_mask(points_there.reshape(-1, 2), features.mask).reshape(sure.shape)
    sure = np.where(sure < min_score, 0, sure).astype(np.float32)
    dense = np.where(sure[:, :, None] > 0, dense, np.nan).astype(np.float32)
    return Warp(points1=dense, certainty=sure, size1=features1.size)


def _calibrated(matcher: "Matcher", scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Convert scores to probabilities; 0, for points without a counterpart, stays 0."""
    return scores if matcher.calibration is None else np.where(scores > 0, matcher.calibration.points(scores), 0)
