"""Maps: pictures whose pixels have known places in the world."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dualrc.colmap import Model, read_model
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import Camera, RgbdFrame, read_depth_m, read_rgbd, sample_depth, unproject
from dualrc.matcher import Matcher, PictureFeatures
from dualrc.types import FloatArray, Size

# Cameras of one size are one camera if their matrices differ by less, in pixels.
_SAME_CAMERA_PX = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Correspondences:
    """Places in a query's picture and the 3D points seen there."""

    points: FloatArray  # (n, 2) pixels of the query
    xyz: FloatArray  # (n, 3) in the world
    scores: FloatArray  # (n,)
    point_ids: npt.NDArray[np.int64]  # (n,), which 3D point of the map; -1: one that has no name
    pictures: npt.NDArray[np.int64]  # (n,), from which candidate, counted from 0

    def __len__(self) -> int:
        return len(self.scores)

    @staticmethod
    def join(parts: "Sequence[Correspondences]") -> "Correspondences":
        """Those of several candidates, in their order."""
        return Correspondences(
            points=np.concatenate([np.zeros((0, 2)), *(part.points for part in parts)]),
            xyz=np.concatenate([np.zeros((0, 3)), *(part.xyz for part in parts)]),
            scores=np.concatenate([np.zeros(0), *(part.scores for part in parts)]),
            point_ids=np.concatenate([np.zeros(0, np.int64), *(part.point_ids for part in parts)]),
            pictures=np.concatenate(
                [np.zeros(0, np.int64), *(np.full(len(part), number) for number, part in enumerate(parts))]
            ),
        )

    def merged(self, radius_px: float) -> "Correspondences":
        """One place for each 3D point that several candidates found: the best one's, averaged with those near it."""
        order = np.lexsort((-self.scores, self.point_ids))
        ids = self.point_ids[order]
        # Points without a name stay as they are.
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = (ids[1:] != ids[:-1]) | (ids[1:] < 0)
        group = np.cumsum(first) - 1
        best = order[first]
        near = np.linalg.norm(self.points[order] - self.points[best][group], axis=1) <= radius_px
        weights = np.where(near, np.maximum(self.scores[order], 1e-12), 0.0)
        total = np.bincount(group, weights, minlength=len(best))
        sums = np.stack([np.bincount(group, weights * self.points[order, axis]) for axis in (0, 1)], axis=1)
        return Correspondences(
            points=sums / total[:, None],
            xyz=self.xyz[best],
            scores=self.scores[best],
            point_ids=self.point_ids[best],
            pictures=self.pictures[best],
        )


class Map(Protocol):
    """What localization needs to know of a map."""

    @property
    def names(self) -> Sequence[str]:
        """The map's pictures."""

    @property
    def info(self) -> Mapping[str, Any]:
        """What tells this map from others: plain JSON values."""

    def picture(self, name: str) -> Path:
        """The file of a picture."""

    def camera(self, size: Size) -> Camera | None:
        """The camera that all pictures of this size share; None where they don't."""

    def correspond(
        self, matcher: Matcher, name: str, features: PictureFeatures, query: PictureFeatures
    ) -> Correspondences:
        """What a query sees of one of the map's pictures."""


class ModelMap:
    """A COLMAP model, made of any features: its keypoints that have a 3D point are looked for in the query."""

    def __init__(self, model: Model, images: str | Path) -> None:
        self.model = model
        self.images = Path(images)
        # A picture that sees no 3D point can't help.
        self.names = [name for name, image in model.images.items() if len(image.points)]
        if not self.names:
            raise DataError("No picture of the model sees a 3D point; give a model with points.")

    @property
    def info(self) -> dict[str, Any]:
        return {"kind": "COLMAP model", "pictures": len(self.names), "points": len(self.model.point_ids)}

    def picture(self, name: str) -> Path:
        return self.images / name

    def camera(self, size: Size) -> Camera | None:
        return _shared([image.camera for image in self.model.images.values() if image.size == size])

    def correspond(
        self, matcher: Matcher, name: str, features: PictureFeatures, query: PictureFeatures
    ) -> Correspondences:
        image = self.model.images[name]
        _check_size(self.picture(name), features.size, image.size)
        # At their own sub-pixel places, and not at the nearest place where the network would have matched by itself.
        found = matcher.match_points(features, query, image.points)
        seen = np.flatnonzero(found.scores > 0)
        ids = image.point_ids[seen]
        return Correspondences(
            points=found.points1[seen].astype(np.float64),
            xyz=self.model.xyz_of(ids),
            scores=found.scores[seen].astype(np.float64),
            point_ids=ids,
            pictures=np.zeros(len(seen), np.int64),
        )


class RgbdMap:
    """Pictures with depth maps and poses: what matches them has their depth there."""

    def __init__(self, frames: Sequence[RgbdFrame]) -> None:
        self.frames = {frame.name: frame for frame in frames}
        if not self.frames:
            raise DataError("The map has no pictures; give at least one with depth and pose.")
        self.names = list(self.frames)

    @property
    def info(self) -> dict[str, Any]:
        return {"kind": "RGB-D", "pictures": len(self.names)}

    def picture(self, name: str) -> Path:
        return self.frames[name].image

    def camera(self, size: Size) -> Camera | None:
        return _shared([frame.camera for frame in self.frames.values() if frame.camera.size == size])

    def correspond(
        self, matcher: Matcher, name: str, features: PictureFeatures, query: PictureFeatures
    ) -> Correspondences:
        frame = self.frames[name]
        _check_size(frame.image, features.size, frame.camera.size)
        matches = matcher.match_features(features, query)
        depths = sample_depth(read_depth_m(frame.depth), matches.points0, matches.size0)
        known = np.isfinite(depths)
        return Correspondences(
            points=matches.points1[known].astype(np.float64),
            xyz=unproject(frame.camera, matches.points0[known], depths[known]),
            scores=matches.scores[known].astype(np.float64),
            point_ids=np.full(int(known.sum()), -1),
            pictures=np.zeros(int(known.sum()), np.int64),
        )


def read_map(path: str | Path, images: str | Path | None = None) -> ModelMap | RgbdMap:
    """The map in a folder: a COLMAP model, whose pictures are under `images`, or RGB-D frames with poses."""
    path = Path(path)
    if (path / "world_from_cam.txt").is_file():
        return RgbdMap(read_rgbd(path))
    model = read_model(path, images)
    if images is None:
        raise ConfigError(f"{path} is a COLMAP model without pictures; name their folder with --images.")
    return ModelMap(model, images)


def _shared(cameras: Sequence[Camera | None]) -> Camera | None:
    """One camera that stands for all of them, without a pose; None where there is none, or they differ."""
    known = [camera for camera in cameras if camera is not None]
    if not known or len(known) < len(cameras):
        return None
    matrices = np.stack([camera.K for camera in known])
    if np.ptp(matrices, axis=0).max() > _SAME_CAMERA_PX:
        return None
    return Camera(width=known[0].width, height=known[0].height, K=np.median(matrices, axis=0), source="the map's")


def _check_size(path: Path, found: Size, expected: Size) -> None:
    if found != expected:
        raise DataError(
            f"{path} has {found[0]} x {found[1]} pixels but {expected[0]} x {expected[1]} in the map; "
            "give the pictures that the map was made of."
        )
