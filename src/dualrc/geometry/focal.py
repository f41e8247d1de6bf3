"""Estimation of one focal length from many pairs of the same camera."""

from collections.abc import Sequence

import numpy as np

from dualrc.pixels import image_center
from dualrc.types import FloatArray, Size

# Range of candidate focal lengths, in units of the long side.
_RANGE = (0.4, 4.0)
_STEPS = 240
# Largest cost of a pair, because pairs may have wrong matches or fit no focal length.
_CAP = 0.05
# Smallest number of pairs.
_FEWEST = 3
# Largest minimum that is trusted, as a share of the worst cost. A flatter curve has no reliable minimum.
_DEEPEST = 0.8
# Focal lengths within this share of the way from minimum to worst cost may differ by at most this factor.
# Cameras whose axes meet in one point leave the focal length undetermined, as does lens distortion.
_NEARLY, _WIDEST = 0.1, 1.3


def shared_focal_px(fundamentals: Sequence[FloatArray], size: Size) -> float | None:
    """Return the focal length of images of one `size` that makes the F (3, 3) of pairs essential; None if unclear.

    An essential matrix has two equal singular values. Their difference is summed over all pairs for each focal length,
    and the smallest sum wins. A pair with parallel optical axes, of a plane, or with a wrong F gives no information, so
    several pairs are needed.
    """
    if len(fundamentals) < _FEWEST:
        return None
    focals = np.geomspace(*_RANGE, _STEPS) * max(size)
    K = np.zeros((_STEPS, 3, 3))
    K[:, 0, 0] = K[:, 1, 1] = focals
    K[:, :2, 2], K[:, 2, 2] = image_center(size), 1
    costs = np.zeros(_STEPS)
    for F in fundamentals:
        first, second, _ = np.linalg.svd(K.transpose(0, 2, 1) @ F @ K, compute_uv=False).T
        costs += np.minimum(1 - second / np.maximum(first, 1e-300), _CAP)
    best = int(costs.argmin())
    worst = _CAP * len(fundamentals)
    if best in (0, _STEPS - 1) or costs[best] > _DEEPEST * worst:
        return None
    alike = focals[costs <= costs[best] + _NEARLY * (worst - costs[best])]
    return float(focals[best]) if alike.max() <= _WIDEST * alike.min() else None
