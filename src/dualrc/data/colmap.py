"""Pairs from a COLMAP model: the tracks of its 3D points are correspondences, no depth maps needed."""

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
    """Pairs from one's own reconstruction."""

    # Folder with cameras.bin, images.bin and points3D.bin, or the same as .txt.
    model: str
    # Folder of its pictures.
    images: str
    # Share of the 3D points of the picture with fewer of them that the other one must see too.
    min_overlap: float = 0.2
    # And so many of them at least.
    min_common: int = 50
    kind: Literal["colmap"] = "colmap"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "min_overlap", at_least=0, at_most=1)
        check_bounds(self, "min_common", at_least=1)


class ColmapPairs:
    """The pairs of a model that see enough of the same points."""

    def __init__(
        self, model: str | Path, images: str | Path, *, min_overlap: float = 0.2, min_common: int = 50
    ) -> None:
        self.images = Path(images)
        if not self.images.is_dir():
            raise DataError(f"The folder of pictures {self.images} does not exist; check the path.")
        self.model = read_model(model, self.images)
        self.pairs = _overlapping(self.model, min_overlap, min_common)
        if not self.pairs:
            raise DataError(
                f"No two pictures of {model} share {min_common} points and {min_overlap:.0%} of them; "
                "lower min_common or min_overlap."
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, number: int) -> str:
        """The names of both pictures."""
        return " ".join(self.pairs[number])

    def load(self, number: int) -> PairSample:
        """The points that both pictures see."""
        name0, name1 = self.pairs[number]
        image0, image1 = self.model.images[name0], self.model.images[name1]
        # Where a picture sees one point twice, the first place stands for it.
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
