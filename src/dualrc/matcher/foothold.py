"""Whether matches agree with each other: the evidence, cheap and free of any model, that two images were matched."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualrc.matches import Matches

TOP = 1000  # matches that vote
_PARTNERS = (1, 4)  # of each match; the second number only where the first leaves a doubt
_FEWEST_MATCHES, _FEWEST_PAIRS = 16, 40
_NEAR = 0.25  # of the long side: only matches near each other move alike
_LEAST_PX = (12, 4)  # apart in one image and in the other, or the direction between them is noise
_BIN = 0.2  # of log scale and of angle
_SCALES = 12  # bins on each side of the scale 1
# Share of the pairs in 3 x 3 bins around the fullest. Unrelated images have up to 0.12, typically 0.05; images of a
# plane tilted by 60 degrees 0.24, wide baselines of a 3D scene 0.18 and more, ordinary pairs 0.5 to 1.
ENOUGH = 0.15
_PLENTY = 0.4  # with one partner each: no doubt
SAME = 1.6  # times larger or smaller: the network sees through this


class Foothold(NamedTuple):
    """How much matches agree on a similarity between the two images as the network saw them."""

    share: float  # of pairs of nearby matches that agree, 0 to 1
    scale: float  # how many times larger things are in image 1 there

    @property
    def firm(self) -> bool:
        """Whether enough agree at all."""
        return self.share >= ENOUGH

    @property
    def same_scale(self) -> bool:
        """Whether the images are at scales that the network matches well."""
        return 1 / SAME <= self.scale <= SAME


def vote(matches: Matches) -> Foothold:
    """How much the best matches agree, from the rotation and scale between pairs of them; `info` has network sizes.

    Exchanging the images leaves the share and inverts the scale, but for near-ties.
    """
    count = min(len(matches), TOP)
    if count < _FEWEST_MATCHES:
        return Foothold(0.0, 1.0)
    sizes = [np.array(matches.info[f"network_size{number}"], dtype=np.float64) for number in (0, 1)]
    own = (matches.points0, matches.size0), (matches.points1, matches.size1)
    # Points as complex numbers, in network pixels: the ratio of two differences is a scale and a rotation.
    places = [
        (points[:count] * (seen / size)).astype(np.float64).view(np.complex128)[:, 0]
        for (points, size), seen in zip(own, sizes, strict=True)
    ]
    near = _NEAR * sizes[0].max(), _NEAR * sizes[1].max()
    order = _shuffled(places[0] + places[1])
    found = Foothold(0.0, 1.0)
    for partners in _PARTNERS:
        steps = [
            np.concatenate([np.roll(own[order], step) - own[order] for step in range(1, partners + 1)])
            for own in places
        ]
        found = _fullest(steps[0], steps[1], near)
        if found.share >= _PLENTY:
            break
    return found


def _shuffled(places: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """An arbitrary order of places (n,), the same whatever order they come in; one more or less moves no other."""
    x, y = (np.rint(part).astype(np.int64).astype(np.uint32) for part in (places.real, places.imag))
    return np.argsort((x * np.uint32(73856093) ^ y * np.uint32(19349663)) * np.uint32(2654435761), kind="stable")


def _fullest(steps0: npt.NDArray[Any], steps1: npt.NDArray[Any], near: tuple[float, float]) -> Foothold:
    """The similarity that most of these steps (n,) from match to match agree on."""
    length0, length1 = np.abs(steps0), np.abs(steps1)
    far_px, least_px = _LEAST_PX
    apart = (np.maximum(length0, length1) > far_px) & (np.minimum(length0, length1) > least_px)
    used = apart & ((length0 < near[0]) | (length1 < near[1]))
    total = np.count_nonzero(used)
    if total < _FEWEST_PAIRS:
        return Foothold(0.0, 1.0)
    ratio = np.log(steps1[used] / steps0[used])
    angles = round(2 * np.pi / _BIN)
    row = np.clip(np.rint(ratio.real / _BIN), -_SCALES, _SCALES).astype(np.int64) + _SCALES
    column = np.rint(ratio.imag * (angles / (2 * np.pi))).astype(np.int64) % angles
    rows = 2 * _SCALES + 1
    counts = np.bincount(row * angles + column, minlength=rows * angles).reshape(rows, angles)
    around = counts + np.roll(counts, 1, axis=1) + np.roll(counts, -1, axis=1)
    around = around[:-2] + around[1:-1] + around[2:]
    best_row, best_column = divmod(int(around.argmax()), angles)
    turned = np.abs((column - best_column + angles // 2) % angles - angles // 2)
    agree = (np.abs(row - best_row - 1) <= 1) & (turned <= 1)
    return Foothold(float(around[best_row, best_column] / total), float(np.exp(np.median(ratio.real[agree]))))
