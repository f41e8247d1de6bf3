"""Agreement between matches: fast evidence, without a geometric model, that two images show the same scene."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualrc.matches import Matches
from dualrc.types import IntArray

ADVICE = (
    "the images may not show the same scene. "
    'If they do, try quality="search", rotate one image upright, or crop both images to their overlap.'
)
LOW = f"The pair score is very low: {ADVICE}"

# Number of matches that vote.
TOP = 1000
# Partners of each match. The second number applies only if the first leaves doubt.
_PARTNERS = (1, 4)
_FEWEST_MATCHES, _FEWEST_PAIRS = 16, 40
# Largest distance of partners, as a share of the long side. Only nearby matches move alike.
_NEAR = 0.25
# Smallest distances of partners in one image and in the other. The direction between closer points is noise.
_LEAST_PX = (12, 4)
# Bin size of log scale and of angle.
_BIN = 0.2
# Bins on each side of scale 1.
_SCALES = 12
# Smallest share of the pairs in 3 x 3 bins around the fullest bin that counts as agreement.
# Unrelated images reach up to 0.12, typically 0.05. Images of a plane tilted by 60 degrees reach 0.24.
# Wide baselines of a 3D scene reach 0.18 and more, ordinary pairs 0.5 to 1.
ENOUGH = 0.15
# Unrelated images reach up to this share by chance, and more with fewer matches than this.
CHANCE, FEWEST_SURE = 0.3, 300
# Share with one partner each that leaves no doubt.
_PLENTY = 0.4
# Largest scale factor that the network matches well.
SAME = 1.6


class Agreement(NamedTuple):
    """Agreement of matches on a similarity transform between the two network inputs."""

    # Share of pairs of nearby matches that agree, 0 to 1.
    share: float
    # Scale factor from image 0 to image 1 of the pairs that agree.
    scale: float

    @property
    def firm(self) -> bool:
        """Whether enough matches agree."""
        return self.share >= ENOUGH

    @property
    def same_scale(self) -> bool:
        """Whether the scales of the images are close enough for the network."""
        return 1 / SAME <= self.scale <= SAME


# No agreement.
NONE = Agreement(0.0, 1.0)


def measure_agreement(matches: Matches) -> Agreement:
    """Measure the agreement of the best matches by rotation and scale between pairs; `info` has the network sizes.

    Swapping the images keeps the share and inverts the scale, except for near-ties.
    """
    count = min(len(matches), TOP)
    if count < _FEWEST_MATCHES:
        return NONE
    sizes = [np.array(matches.info[f"network_size{number}"], dtype=np.float64) for number in (0, 1)]
    own = (matches.points0, matches.size0), (matches.points1, matches.size1)
    # Points as complex numbers in network pixels. The ratio of two differences is a scale and a rotation.
    places = [
        (points[:count] * (seen / size)).astype(np.float64).view(np.complex128)[:, 0]
        for (points, size), seen in zip(own, sizes, strict=True)
    ]
    near = _NEAR * sizes[0].max(), _NEAR * sizes[1].max()
    order = _shuffled(places[0] + places[1])
    found = NONE
    for partners in _PARTNERS:
        steps = [
            np.concatenate([np.roll(own[order], step) - own[order] for step in range(1, partners + 1)])
            for own in places
        ]
        found = _fullest(steps[0], steps[1], near)
        if found.share >= _PLENTY:
            break
    return found


def _shuffled(places: npt.NDArray[Any]) -> IntArray:
    """Return a pseudo-random order of positions (n,), independent of their input order and of each other."""
    x, y = (np.rint(part).astype(np.int64).astype(np.uint32) for part in (places.real, places.imag))
    return np.argsort((x * np.uint32(73856093) ^ y * np.uint32(19349663)) * np.uint32(2654435761), kind="stable")


def _fullest(steps0: npt.NDArray[Any], steps1: npt.NDArray[Any], near: tuple[float, float]) -> Agreement:
    """Return the similarity that most steps (n,) between matches agree on."""
    length0, length1 = np.abs(steps0), np.abs(steps1)
    far_px, least_px = _LEAST_PX
    apart = (np.maximum(length0, length1) > far_px) & (np.minimum(length0, length1) > least_px)
    used = apart & ((length0 < near[0]) | (length1 < near[1]))
    total = np.count_nonzero(used)
    if total < _FEWEST_PAIRS:
        return NONE
    ratio = np.log(steps1[used] / steps0[used])
    angles = round(2 * np.pi / _BIN)
    row = np.clip(np.rint(ratio.real / _BIN), -_SCALES, _SCALES).astype(np.int64) + _SCALES
    column = np.rint(ratio.imag * (angles / (2 * np.pi))).astype(np.int64) % angles
    rows = 2 * _SCALES + 1
    counts = np.bincount(row * angles + column, minlength=rows * angles).reshape(rows, angles)
    around = counts + np.roll(counts, 1, axis=1) + np.roll(counts, -1, axis=1)
    around = around[:-2] + around[1:-1] + around[2:]
    best_row, best_column = divmod(int(around.argmax()), angles)
    turns = np.abs((column - best_column + angles // 2) % angles - angles // 2)
    agree = (np.abs(row - best_row - 1) <= 1) & (turns <= 1)
    return Agreement(float(around[best_row, best_column] / total), float(np.exp(np.median(ratio.real[agree]))))
