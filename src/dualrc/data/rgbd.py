"""Pairs from RGB-D frames with poses; points correspond by projection, verified by both depth maps."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from dualrc.config import check_bounds
from dualrc.data.depth import DepthView, correspond_by_depth, points_with_depth
from dualrc.data.pairs import LazyPair, PairSample
from dualrc.data.views import CutConfig
from dualrc.errors import DataError
from dualrc.geometry import (
    RgbdFrame,
    in_image,
    read_depth_m,
    read_rgbd,
    reproject,
    sample_depth,
    transform_points,
    unproject,
)
from dualrc.types import FloatArray

# Number of points per image for the estimate of the overlap.
_GLANCE = 256


@dataclass(frozen=True, kw_only=True)
class RgbdConfig(CutConfig):
    """Pairs from a folder of RGB-D frames: images/, depth/, K.txt or cameras.txt, and world_from_cam.txt."""

    # Folder with `images/`, `depth/`, a camera file and `world_from_cam.txt`.
    root: str
    # Minimum overlap: share of each image that the other image shows.
    min_overlap: float = 0.3
    # Selects this source.
    kind: Literal["rgbd"] = "rgbd"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "min_overlap", at_least=0, below=1)


def rgbd_pairs(root: str | Path, *, min_overlap: float = 0.3) -> tuple[list[LazyPair], dict[str, str]]:
    """Return the overlapping pairs of an RGB-D folder, and the reasons why frames cannot be read, by name."""
    glances, broken = [], {}
    for frame in read_rgbd(root):
        try:
            glances.append(_Glance.at(frame))
        except DataError as error:
            broken[frame.name] = str(error)
    if not glances:
        raise DataError(
            f"No frame of {root} can be used; copy the folder again. The first: {next(iter(broken.values()))}"
        )
    frames = [glance.frame for glance in glances]
    pairs = [
        LazyPair(name=f"{frames[i].name} {frames[j].name}", load=partial(_load, frames[i], frames[j], [i, j]))
        for i, j in _overlapping(glances, min_overlap)
    ]
    if not pairs:
        raise DataError(f"No two images of {root} overlap by {min_overlap:.0%}; lower min_overlap.")
    return pairs, broken


def _load(frame0: RgbdFrame, frame1: RgbdFrame, seed: list[int]) -> PairSample:
    return correspond_by_depth(_view(frame0), _view(frame1), seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Glance:
    """A few points of an image, in pixels and in world coordinates."""

    frame: RgbdFrame
    # (n, 2).
    points: FloatArray
    # (n, 3).
    world: FloatArray

    @staticmethod
    def at(frame: RgbdFrame) -> "_Glance":
        view = _view(frame)
        points = points_with_depth(view, np.random.default_rng(0), _GLANCE)
        if not len(points):
            raise DataError(f"The depth map {frame.depth} is empty; remove this frame.")
        depths = sample_depth(view.depth, points, view.camera.size)
        return _Glance(frame=frame, points=points, world=unproject(view.camera, points, depths))


def _view(frame: RgbdFrame) -> DepthView:
    return DepthView(image=frame.image, depth=read_depth_m(frame.depth), camera=frame.camera)


def _overlapping(glances: list[_Glance], min_overlap: float) -> Iterator[tuple[int, int]]:
    """Yield the numbers of pairs in which each image shows enough of the other's points."""
    read = lru_cache(maxsize=64)(lambda number: _view(glances[number].frame))

    def share(seer: int, seen: int) -> float:
        view0, view1 = read(seen), read(seer)
        found = reproject(glances[seen].points, view0.depth, view0.camera, view1.depth, view1.camera)
        return float(found.seen.mean())

    for i, j in combinations(range(len(glances)), 2):
        # A fast check that ignores occlusion leaves few candidates.
        framed = min(_framed(glances[i], glances[j]), _framed(glances[j], glances[i]))
        if framed >= min_overlap and min(share(i, j), share(j, i)) >= min_overlap:
            yield i, j


def _framed(seer: _Glance, seen: _Glance) -> float:
    """Return the share of the points of an image that lie inside the frame of another, occluded or not."""
    camera = seer.frame.camera
    # `read_rgbd` returns cameras with poses.
    assert camera.cam_from_world is not None
    places = camera.project(transform_points(camera.cam_from_world, seen.world))
    return float(in_image(places, camera.size).mean())
