"""A focal length that many pairs of one camera agree on."""

from collections.abc import Sequence

import numpy as np

from dualrc.types import FloatArray, Size

_RANGE = (0.4, 4.0)  # of focal lengths that are tried, in long sides
_STEPS = 240
_CAP = 0.05  # a pair that no focal length suits, or that has wrong matches, counts no more than this
_FEWEST = 3  # pairs
_DEEPEST = 0.8  # of what the pairs would cost at their worst: a flatter curve has no minimum to trust
# Focal lengths that cost nearly as little, by a tenth of the way to the worst, may differ by this factor. Cameras that
# look at one point, whose axes meet there, leave it open; so does a lens that distorts.
_NEARLY, _WIDEST = 0.1, 1.3


def shared_focal_px(fundamentals: Sequence[FloatArray], size: Size) -> float | None:
    """The focal length of pictures of one `size` that makes F (3, 3) of their pairs essential matrices; None: unclear.

    An essential matrix has two equal singular values. How unequal they are is added over all pairs for each focal
    length, and the least sum wins. A pair with parallel optical axes, of a plane, or with a wrong F tells
    nothing, so several pairs are needed.
    """
    if len(fundamentals) < _FEWEST:
        return None
    focals = np.geomspace(*_RANGE, _STEPS) * max(size)
    cx, cy = (size[0] - 1) / 2, (size[1] - 1) / 2
    K = np.zeros((_STEPS, 3, 3))
    K[:, 0, 0] = K[:, 1, 1] = focals
    K[:, 0, 2], K[:, 1, 2], K[:, 2, 2] = cx, cy, 1
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
