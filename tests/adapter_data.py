"""What the tests of adapters share: a rendered pair, its ground truth, and a matcher."""

from functools import cache

import numpy as np

import dualrc
from dualrc.scenes import correspond, make_pair

WIDTH, HEIGHT = 320, 240


@cache
def pair():
    return make_pair(1, size=(WIDTH, HEIGHT), light_change=0.2, texture_size=256)


@cache
def images() -> tuple[np.ndarray, np.ndarray]:
    """Both images, uint8 (h, w, 3)."""
    image0, image1 = (rendering.image.cpu().numpy() for rendering in pair())
    return image0, image1


@cache
def matcher() -> dualrc.Matcher:
    return dualrc.load(device="cpu", precision="float32")


def correct(points0, points1, within_px: float = 3.0) -> float:
    """The share of matches within a number of pixels of the truth."""
    truth = correspond(*pair(), np.asarray(points0, dtype=np.float64))
    error = np.linalg.norm(truth.points1.cpu().numpy() - np.asarray(points1), axis=1)
    return float((truth.visible.cpu().numpy() & (error <= within_px)).mean())
