"""Image pairs with depth maps and poses: corresponding and occluded points."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualrc.data.pairs import PairSample
from dualrc.geometry import Camera, reproject
from dualrc.pixels import resize_points
from dualrc.types import FloatArray

# Number of points sampled in each image.
_POINTS = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class DepthView:
    """An image with its depth map (h, w) and its camera with a pose."""

    image: Path
    depth: FloatArray
    camera: Camera


def correspond_by_depth(view0: DepthView, view1: DepthView, seed: int | list[int], count: int = _POINTS) -> PairSample:
    """Sample points of both images that correspond by depth, or that are known to be occluded in the other image."""
    rng = np.random.default_rng(seed)
    points0, points1 = points_with_depth(view0, rng, count), points_with_depth(view1, rng, count)
    there = reproject(points0, view0.depth, view0.camera, view1.depth, view1.camera)
    back = reproject(points1, view1.depth, view1.camera, view0.depth, view0.camera)
    return PairSample(
        image0=view0.image,
        image1=view1.image,
        points0=np.concatenate([points0[there.seen], back.points1[back.seen]]),
        points1=np.concatenate([there.points1[there.seen], points1[back.seen]]),
        hidden0=points0[there.hidden],
        hidden1=points1[back.hidden],
    )


def points_with_depth(view: DepthView, rng: np.random.Generator, count: int) -> FloatArray:
    """Sample at most `count` pixels (n, 2) of the depth map that have a depth, in pixels of the image."""
    height, width = view.depth.shape
    known = np.flatnonzero(view.depth > 0)
    chosen = known if len(known) <= count else known[rng.choice(len(known), count, replace=False)]
    pixels = np.column_stack([chosen % width, chosen // width])
    return resize_points(pixels, (width, height), view.camera.size)
