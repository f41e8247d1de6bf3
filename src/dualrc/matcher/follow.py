"""Transfer of points by the matches around them."""

from dataclasses import replace

import numpy as np

from dualrc.matches import Matches
from dualrc.pixels import FINE_STRIDE
from dualrc.types import FloatArray

# Local affine fits: number of neighbors, iterations, residual at which a match has half weight (in cells), and
# weight of the prior.
_NEIGHBORS, _FITS, _STRAY, _PRIOR = 8, 5, 0.25, 0.01


def follow(matches: Matches, points: FloatArray, cells: float = 1.0) -> Matches:
    """Transfer points (n, 2) of image 0 by the matches around them: one row per point, NaN and score 0 without matches.

    An affine motion is fitted to the nearest matches of each point. Matches that move differently lie on another
    surface or are wrong, and have little weight. Points farther than `cells` fine cells from all matches are unknown.
    """
    from scipy.spatial import cKDTree

    places, scores = np.full((len(points), 2), np.nan), np.zeros(len(points))
    if len(matches) and len(points):
        source, target = matches.points0.astype(np.float64), matches.points1.astype(np.float64)
        cell = FINE_STRIDE * max(matches.size0) / max(matches.info.get("network_size0", matches.size0))
        apart, nearest = cKDTree(source).query(points, k=[*range(1, min(_NEIGHBORS, len(source)) + 1)])
        rows = np.flatnonzero(apart[:, 0] <= cells * cell)
        near = nearest[rows]
        # (n, k, 2).
        before, after = source[near] - points[rows, None], target[near]
        design = np.concatenate([before, np.ones((*near.shape, 1))], axis=2)
        # A weak prior for the identity, for neighbors that lie on a line.
        prior, start = _PRIOR * cell**2 * np.diag([1.0, 1, 0]), np.eye(3, 2)
        weights = 1 / (1 + (apart[rows] / cell) ** 2)
        for _ in range(_FITS):
            weighted = (design * weights[:, :, None]).swapaxes(1, 2)
            # (n, 3, 2).
            motion = np.linalg.solve(weighted @ design + prior, weighted @ after + prior @ start)
            stray = np.linalg.norm(after - design @ motion, axis=2)
            weights = 1 / (1 + (apart[rows] / cell) ** 2) / (1 + (stray / (_STRAY * cell)) ** 2)
        places[rows], scores[rows] = motion[:, 2], matches.scores[near[:, 0]]
    return replace(matches, points0=points, points1=places, scores=scores, estimate=None, covariance=None)
