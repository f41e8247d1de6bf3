"""Pairs from a COLMAP model; tracks of its 3D points are correspondences, so no depth maps are needed."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from dualrc.colmap import Model, read_model
from dualrc.config import check_bounds
from dualrc.data.pairs import PairSample
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


class ColmapPairs:
    """The covisible pairs of a model."""

    def __init__(
        self, model: str | Path, images: str | Path, *, min_overlap: float = 0.2, min_common: int = 50
    ) -> None:
        self.images = Path(images)
        if not self.images.is_dir():
            raise DataError(f"The image folder {self.images} does not exist; check the path.")
        self.model = read_model(model, self.images)
        self.pairs = _overlapping(self.model, min_overlap, min_common)
        if not self.pairs:
            raise DataError(
                f"No two images of {model} share {min_common} points and {min_overlap:.0%} of their points; "
                "lower min_common or min_overlap."
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, number: int) -> str:
        """Return the names of both images."""
        return " ".join(self.pairs[number])

    def load(self, number: int) -> PairSample:
        """Load the points that both images observe."""
        name0, name1 = self.pairs[number]
        image0, image1 = self.model.images[name0], self.model.images[name1]
        # If an image observes a point twice, the first observation is used.
        _, seen0, seen1 = np.intersect1d(image0.point_ids, image1.point_ids, return_indices=True)
        return PairSample(
            image0=self.images / name0,
            image1=self.images / name1,
            points0=image0.points[seen0],
            points1=image1.points[seen1],
        )


def _overlapping(model: Model, min_overlap: float, min_common: int) -> list[tuple[str, str]]:
    points = {name: np.unique(image.point_ids) for name, image in model.images.items()}
    pairs = []
    for name0, name1 in combinations(points, 2):
        common = len(np.intersect1d(points[name0], points[name1], assume_unique=True))
        if common >= max(min_common, min_overlap * min(len(points[name0]), len(points[name1]))):
            pairs.append((name0, name1))
    return pairs
