"""Pairs from a COLMAP model; tracks of its 3D points are correspondences, so no depth maps are needed."""

from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from dualrc.colmap import ModelImage, read_model
from dualrc.config import check_bounds
from dualrc.data.pairs import LazyPair, PairSample
from dualrc.data.views import CutConfig
from dualrc.errors import DataError


@dataclass(frozen=True, kw_only=True)
class ColmapConfig(CutConfig):
    """Pairs from a COLMAP model."""

    # Folder with cameras.bin, images.bin and points3D.bin, or .txt files of these names.
    model: str
    # Folder of the images.
    images: str
    # Minimum covisibility: share of the 3D points of the image with fewer points that the other one observes too.
    min_overlap: float = 0.2
    # Minimum number of shared points.
    min_common: int = 50
    # Selects this source.
    kind: Literal["colmap"] = "colmap"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "min_overlap", at_least=0, at_most=1)
        check_bounds(self, "min_common", at_least=1)


def colmap_pairs(
    model: str | Path, images: str | Path, *, min_overlap: float = 0.2, min_common: int = 50
) -> list[LazyPair]:
    """Return the covisible pairs of a model; points that both images observe correspond."""
    images = Path(images)
    if not images.is_dir():
        raise DataError(f"The image folder {images} does not exist; check the path.")
    found = read_model(model, images).images
    points = {name: np.unique(image.point_ids) for name, image in found.items()}
    pairs = []
    for name0, name1 in combinations(found, 2):
        common = len(np.intersect1d(points[name0], points[name1], assume_unique=True))
        if common >= max(min_common, min_overlap * min(len(points[name0]), len(points[name1]))):
            load = partial(_load, images / name0, images / name1, found[name0], found[name1])
            pairs.append(LazyPair(name=f"{name0} {name1}", load=load))
    if not pairs:
        raise DataError(
            f"No two images of {model} share {min_common} points and {min_overlap:.0%} of their points; "
            "lower min_common or min_overlap."
        )
    return pairs


def _load(path0: Path, path1: Path, image0: ModelImage, image1: ModelImage) -> PairSample:
    # If an image observes a point twice, the first observation is used.
    _, seen0, seen1 = np.intersect1d(image0.point_ids, image1.point_ids, return_indices=True)
    return PairSample(image0=path0, image1=path1, points0=image0.points[seen0], points1=image1.points[seen1])
