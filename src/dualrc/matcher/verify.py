"""Verification of a pass: the matches that agree with one epipolar geometry."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from dualrc import geometry
from dualrc.matches import Matches
from dualrc.types import FloatArray

# Inlier threshold on the distance to an epipolar line, as a share of the long side.
_THRESHOLD = 0.003
# Verified weight above which a tilted view is accepted.
# On hard pairs, wrong results of the search for tilts reach 33, correct ones start at 190.
BEYOND_DOUBT = 100.0
_SAMPLE, _ITERATIONS, _FEWEST = 1000, 1000, 20

T = TypeVar("T")
S = TypeVar("S")


class Verified(NamedTuple):
    """Matches and the epipolar geometry that most of the best ones agree with."""

    matches: Matches
    # (3, 3) Fundamental matrix; None if there is none.
    matrix: FloatArray | None
    # Sum of the scores of the best matches that agree.
    weight: float

    def weight_of(self, others: Matches) -> float:
        """Return the sum of the scores of the best of other matches that agree with this geometry."""
        if self.matrix is None:
            return 0.0
        best = others.top(_SAMPLE)
        agree = geometry.sampson_distance_px(self.matrix, best.points0, best.points1) <= _threshold_px(others)
        return float(best.scores[agree].sum())


def verify(matches: Matches) -> Verified:
    """Estimate the epipolar geometry of the best matches."""
    best = matches.top(_SAMPLE)
    if len(best) < _FEWEST:
        return Verified(matches, None, 0.0)
    fit = geometry.estimate(
        best, "fundamental", threshold_px=_threshold_px(matches), min_inliers=_FEWEST, max_iterations=_ITERATIONS
    )
    return Verified(matches, fit.matrix, float(best.scores[fit.inliers].sum()) if fit.matrix is not None else 0.0)


def side_by_side(estimator: Callable[[S], T], given: Iterable[S]) -> list[T]:
    """Apply an estimator to all items, on other threads, while the next items are computed on this one."""
    threads = torch.get_num_threads()
    if threads < 2:
        return [estimator(item) for item in given]
    with ThreadPoolExecutor(threads, thread_name_prefix="estimator") as pool:
        return list(pool.map(estimator, given))


def _threshold_px(matches: Matches) -> float:
    return _THRESHOLD * max(matches.size1)
