"""Maps: pictures whose pixels have known places in the world."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.colmap import Model, read_model
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import Camera, Lens, RgbdFrame, read_depth_m, read_rgbd, sample_depth, unproject
from dualrc.matcher import Matcher, PictureFeatures
from dualrc.matches import Matches
from dualrc.pixels import FINE_STRIDE
from dualrc.types import FloatArray, Size

# Cameras of one size and model are one camera if no pixel's ray differs by more, in pixels.
_SAME_CAMERA_PX = 1.0
# How points follow the matches around them: how many of those, how many fits, and the share of a cell at which a stray
# match counts half.
_NEIGHBORS, _FITS, _STRAY, _PRIOR = 8, 5, 0.25, 0.01
_COMPARED = 9  # places along each side of the picture at which cameras are compared


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

    def best(self, count: int) -> "Correspondences":
        """Those with the highest scores, or all if there are fewer."""
        rows = np.argsort(-self.scores, kind="stable")[:count]
        return Correspondences(
            points=self.points[rows],
            xyz=self.xyz[rows],
            scores=self.scores[rows],
            point_ids=self.point_ids[rows],
            pictures=self.pictures[rows],
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """A picture of a map, and a query, in that order, for a matcher to compare."""

    matcher: Matcher
    features: tuple[PictureFeatures, PictureFeatures]
    pictures: tuple[Path, Path] | None  # where it is to look at these, in high quality

    def match(self) -> Matches:
        """Their matches."""
        if self.pictures is None:
            return self.matcher.match_features(*self.features)
        return self.matcher.match(*self.pictures)

    def match_points(self, points: FloatArray) -> Matches:
        """Where these points (n, 2) of the map's picture are in the query: a row each."""
        if self.pictures is None:
            return self.matcher.match_points(*self.features, points)
        return _follow(self.matcher.match(*self.pictures, top=None), points)


def _follow(matches: Matches, points: FloatArray) -> Matches:
    """Where points (n, 2) of picture 0 go with the matches around them: a row each, NaN and score 0 where none is near.

    An affine motion is fitted to the nearest matches of each point. Those that move otherwise lie on another surface,
    or are wrong, and count little.
    """
    from scipy.spatial import cKDTree

    places, scores = np.full((len(points), 2), np.nan), np.zeros(len(points))
    if len(matches) and len(points):
        source, target = matches.points0.astype(np.float64), matches.points1.astype(np.float64)
        cell = FINE_STRIDE * max(matches.size0) / max(matches.info.get("network_size0", matches.size0))
        apart, nearest = cKDTree(source).query(points, k=[*range(1, min(_NEIGHBORS, len(source)) + 1)])
        rows = np.flatnonzero(apart[:, 0] <= cell)
        near = nearest[rows]
        before, after = source[near] - points[rows, None], target[near]  # (n, k, 2)
        design = np.concatenate([before, np.ones((*near.shape, 1))], axis=2)
        # A little as if the picture were neither turned nor stretched, where neighbours lie on a line.
        prior, start = _PRIOR * cell**2 * np.diag([1.0, 1, 0]), np.eye(3, 2)
        weights = 1 / (1 + (apart[rows] / cell) ** 2)
        for _ in range(_FITS):
            weighted = (design * weights[:, :, None]).swapaxes(1, 2)
            motion = np.linalg.solve(weighted @ design + prior, weighted @ after + prior @ start)  # (n, 3, 2)
            stray = np.linalg.norm(after - design @ motion, axis=2)
            weights = 1 / (1 + (apart[rows] / cell) ** 2) / (1 + (stray / (_STRAY * cell)) ** 2)
        places[rows], scores[rows] = motion[:, 2], matches.scores[near[:, 0]]
    return replace(matches, points0=points, points1=places, scores=scores, estimate=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class MapPicture:
    """A picture of a map."""

    path: Path
    size: Size
    camera: Camera | None  # None where it is not known


class Map(ABC):
    """Pictures whose pixels have known places in the world."""

    def __init__(self, pictures: dict[str, MapPicture], info: dict[str, Any]) -> None:
        """`info` tells this map from others: plain JSON values."""
        self.pictures, self.names = pictures, list(pictures)
        self.info = {**info, "pictures": len(pictures)}

    @abstractmethod
    def see(self, name: str, look: "Look") -> Correspondences:
        """What a query sees of one of the map's pictures."""

    def correspond(
        self,
        matcher: Matcher,
        name: str,
        features: PictureFeatures,
        query: PictureFeatures,
        picture: str | Path | None = None,
    ) -> Correspondences:
        """What a query sees of one of the map's pictures; quality "high" looks at the query's picture."""
        known = self.pictures[name]
        if features.size != known.size:
            there, here = ("{} x {}".format(*size) for size in (known.size, features.size))
            remedy = "give the pictures that the map was made of"
            raise DataError(f"{known.path} has {here} pixels but {there} in the map; {remedy}.")
        if matcher.config.quality == "high" and picture is None:
            raise ConfigError('quality = "high" looks at the pictures again; give pictures instead of features.')
        pictures = None if picture is None or matcher.config.quality == "standard" else (known.path, Path(picture))
        found = self.see(name, Look(matcher=matcher, features=(features, query), pictures=pictures))
        top = matcher.config.top
        return found if top is None else found.best(top)

    def camera(self, size: Size) -> Camera | None:
        """The camera that all pictures of this size share, without a pose; None where there is none, or they differ."""
        cameras = [picture.camera for picture in self.pictures.values() if picture.size == size]
        known = [camera for camera in cameras if camera is not None]
        if not known or len(known) < len(cameras) or len({camera.lens.model for camera in known}) > 1:
            return None
        shared = Camera(
            width=size[0],
            height=size[1],
            K=np.median([camera.K for camera in known], axis=0),
            lens=Lens(known[0].lens.model, tuple(np.median([camera.lens.distortion for camera in known], axis=0))),
            source="the map's",
        )
        return shared if all(_is_same(shared, camera) for camera in _distinct(known)) else None


def _distinct(cameras: Sequence[Camera]) -> list[Camera]:
    """The cameras without repetitions, of which a map has as many as pictures."""
    return list({(camera.lens, camera.K.tobytes()): camera for camera in cameras}.values())


def _is_same(camera0: Camera, camera1: Camera) -> bool:
    """Whether two cameras of one size see the same at every place of the picture."""
    x, y = np.meshgrid(*(np.linspace(0, side - 1, _COMPARED) for side in camera0.size))
    grid = np.stack([x.ravel(), y.ravel()], axis=1)
    apart = np.linalg.norm(camera1.project(camera0.rays(grid)) - grid, axis=1)
    # Beyond the edge of a fisheye's view there is nothing to compare.
    return bool(np.nan_to_num(apart).max() <= _SAME_CAMERA_PX)


class ModelMap(Map):
    """A COLMAP model, made of any features: its keypoints that have a 3D point are looked for in the query."""

    def __init__(self, model: Model, images: str | Path) -> None:
        self.model = model
        pictures = {
            name: MapPicture(path=Path(images, name), size=image.size, camera=image.camera)
            for name, image in model.images.items()
            if len(image.points)  # a picture that sees no 3D point can't help
        }
        if not pictures:
            raise DataError("No picture of the model sees a 3D point; give a model with points.")
        super().__init__(pictures, {"kind": "COLMAP model", "points": len(model.point_ids)})

    def see(self, name: str, look: Look) -> Correspondences:
        image = self.model.images[name]
        # At their own sub-pixel places, and not at the nearest place where the network would have matched by itself.
        found = look.match_points(image.points)
        seen = np.flatnonzero(found.scores > 0)
        ids = image.point_ids[seen]
        return Correspondences(
            points=found.points1[seen].astype(np.float64),
            xyz=self.model.xyz_of(ids),
            scores=found.scores[seen].astype(np.float64),
            point_ids=ids,
            pictures=np.zeros(len(seen), np.int64),
        )


class RgbdMap(Map):
    """Pictures with depth maps and poses: what matches them has their depth there."""

    def __init__(self, frames: Sequence[RgbdFrame]) -> None:
        if not frames:
            raise DataError("The map has no pictures; give at least one with depth and pose.")
        self.frames = {frame.name: frame for frame in frames}
        pictures = {f.name: MapPicture(path=f.image, size=f.camera.size, camera=f.camera) for f in frames}
        super().__init__(pictures, {"kind": "RGB-D"})

    def see(self, name: str, look: Look) -> Correspondences:
        frame = self.frames[name]
        matches = look.match()
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
