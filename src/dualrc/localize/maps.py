"""Maps: images whose pixels have known 3D positions."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.colmap import Model, read_model
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import Camera, Lens, RgbdFrame, read_depth_m, read_rgbd, sample_depth, unproject
from dualrc.matcher import ImageFeatures, Matcher
from dualrc.matcher.features import FeaturePair
from dualrc.matcher.follow import follow
from dualrc.types import FloatArray, IntArray, Size

# Cameras of the same size and model count as one if no pixel's ray differs by more than this, in pixels.
_SAME_CAMERA_PX = 1.0
# Number of positions along each side of the image at which cameras are compared.
_COMPARED = 9
# Files of a map image and of a query.
ImageFiles = tuple[Path, Path]


@dataclass(frozen=True, kw_only=True, eq=False)
class Correspondences:
    """2D-3D correspondences of a query."""

    # (n, 2), in pixels of the query.
    points: FloatArray
    # (n, 3), in world coordinates.
    xyz: FloatArray
    # (n,), scores of the matches.
    scores: FloatArray
    # (n,), ids of the 3D points in the map; -1 for a point without id.
    point_ids: IntArray
    # (n,), index of the candidate.
    images: IntArray

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, rows: IntArray) -> "Correspondences":
        return Correspondences(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @staticmethod
    def of(points: FloatArray, xyz: FloatArray, scores: FloatArray, point_ids: IntArray) -> "Correspondences":
        """Return the correspondences of one candidate."""
        points, scores = points.astype(np.float64), scores.astype(np.float64)
        images = np.zeros(len(scores), np.int64)
        return Correspondences(points=points, xyz=xyz, scores=scores, point_ids=point_ids, images=images)

    @staticmethod
    def join(parts: "Sequence[Correspondences]") -> "Correspondences":
        """Concatenate the correspondences of several candidates."""
        none = np.zeros(0, np.int64)
        joined = Correspondences.of(
            np.concatenate([np.zeros((0, 2)), *(part.points for part in parts)]),
            np.concatenate([np.zeros((0, 3)), *(part.xyz for part in parts)]),
            np.concatenate([none, *(part.scores for part in parts)]),
            np.concatenate([none, *(part.point_ids for part in parts)]),
        )
        numbers = [np.full(len(part), number) for number, part in enumerate(parts)]
        return replace(joined, images=np.concatenate([none, *numbers]))

    def merged(self, radius_px: float) -> "Correspondences":
        """Merge correspondences of the same 3D point: the best position, averaged with those near it."""
        order = np.lexsort((-self.scores, self.point_ids))
        ids = self.point_ids[order]
        # Points without an id are not merged.
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = (ids[1:] != ids[:-1]) | (ids[1:] < 0)
        group = np.cumsum(first) - 1
        best = order[first]
        near = np.linalg.norm(self.points[order] - self.points[best][group], axis=1) <= radius_px
        weights = np.where(near, np.maximum(self.scores[order], 1e-12), 0.0)
        total = np.bincount(group, weights, minlength=len(best))
        sums = np.stack([np.bincount(group, weights * self.points[order, axis]) for axis in (0, 1)], axis=1)
        return replace(self[best], points=sums / total[:, None])


@dataclass(frozen=True, kw_only=True, eq=False)
class MapImage:
    """An image of a map."""

    path: Path
    size: Size
    # None if unknown.
    camera: Camera | None


class Map(ABC):
    """Images whose pixels have known 3D positions."""

    def __init__(self, images: dict[str, MapImage], info: dict[str, Any]) -> None:
        """`info`: identifies the map, as plain JSON values."""
        self.images, self.names = images, list(images)
        self.info = {**info, "images": len(images)}

    def files(self, name: str) -> tuple[Path, ...]:
        """Return the files that the correspondences with a map image depend on."""
        return (self.images[name].path,)

    @abstractmethod
    def see(self, name: str, matcher: Matcher, features: FeaturePair, images: ImageFiles | None) -> Correspondences:
        """Return the correspondences of a map image with a query, in that order; `images`: for higher qualities."""

    def correspond(
        self,
        matcher: Matcher,
        name: str,
        features: ImageFeatures,
        query: ImageFeatures,
        image: str | Path | None = None,
    ) -> Correspondences:
        """Return the correspondences of a query with a map image; the higher qualities read the query image again."""
        known = self.images[name]
        if features.size != known.size:
            there, here = ("{} x {}".format(*size) for size in (known.size, features.size))
            remedy = "pass the images that the map was made from"
            raise DataError(f"{known.path} has {here} pixels, but {there} in the map; {remedy}.")
        if matcher.config.quality != "standard" and image is None:
            raise ConfigError(
                f'quality = "{matcher.config.quality}" warps the images; pass images instead of features.'
            )
        images = None if image is None or matcher.config.quality == "standard" else (known.path, Path(image))
        found = self.see(name, matcher, (features, query), images)
        top = matcher.config.top
        return found if top is None else found[np.argsort(-found.scores, kind="stable")[:top]]

    def camera(self, size: Size) -> Camera | None:
        """Return the camera without pose that all images of this size share; None if there is none or they differ."""
        cameras = [image.camera for image in self.images.values() if image.size == size]
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
        # A map may have one camera per image.
        distinct = {(camera.lens, camera.K.tobytes()): camera for camera in known}.values()
        return shared if all(_is_same(shared, camera) for camera in distinct) else None


def _is_same(camera0: Camera, camera1: Camera) -> bool:
    """Return whether two cameras of one size have the same rays at every position of the image."""
    x, y = np.meshgrid(*(np.linspace(0, side - 1, _COMPARED) for side in camera0.size))
    grid = np.stack([x.ravel(), y.ravel()], axis=1)
    apart = np.linalg.norm(camera1.project(camera0.rays(grid)) - grid, axis=1)
    # Positions outside of a fisheye's field of view give NaN and are ignored.
    return bool(np.nan_to_num(apart).max() <= _SAME_CAMERA_PX)


class ModelMap(Map):
    """A COLMAP model, built from any features; its keypoints with a 3D point are searched in the query."""

    def __init__(self, model: Model, images: str | Path) -> None:
        self.model = model
        observed = {
            name: MapImage(path=Path(images, name), size=image.size, camera=image.camera)
            for name, image in model.images.items()
            # Images without 3D points cannot contribute.
            if len(image.points)
        }
        if not observed:
            raise DataError("No image of the model observes a 3D point; pass a model with points.")
        content = _hash([model.xyz, *(image.points for image in model.images.values())], observed)
        super().__init__(observed, {"kind": "COLMAP model", "points": len(model.point_ids), "content": content})

    def see(self, name: str, matcher: Matcher, features: FeaturePair, images: ImageFiles | None) -> Correspondences:
        image = self.model.images[name]
        # Search at the exact keypoints, not at the cell centers that the network would choose.
        if images is None:
            found = matcher.match_points(*features, image.points)
        else:
            found = follow(matcher.match(*images, top=None), image.points)
        seen = np.flatnonzero(found.scores > 0)
        ids = image.point_ids[seen]
        return Correspondences.of(found.points1[seen], self.model.xyz_of(ids), found.scores[seen], ids)


class RgbdMap(Map):
    """Images with depth maps and poses; depth gives the 3D position of a match."""

    def __init__(self, frames: Sequence[RgbdFrame]) -> None:
        if not frames:
            raise DataError("The map has no images; pass at least one with depth and pose.")
        self.frames = {frame.name: frame for frame in frames}
        images = {f.name: MapImage(path=f.image, size=f.camera.size, camera=f.camera) for f in frames}
        poses = [frame.camera.cam_from_world for frame in frames if frame.camera.cam_from_world is not None]
        super().__init__(images, {"kind": "RGB-D", "content": _hash(poses, images)})

    def files(self, name: str) -> tuple[Path, ...]:
        return self.frames[name].image, self.frames[name].depth

    def see(self, name: str, matcher: Matcher, features: FeaturePair, images: ImageFiles | None) -> Correspondences:
        frame = self.frames[name]
        # Candidates that do not match mostly show something else, and a search over tilted views would double the time
        # of a query.
        matches = matcher.match_features(*features, max_tilt=1) if images is None else matcher.match(*images)
        depths = sample_depth(read_depth_m(frame.depth), matches.points0, matches.size0)
        known = np.isfinite(depths)
        xyz = unproject(frame.camera, matches.points0[known], depths[known])
        return Correspondences.of(matches.points1[known], xyz, matches.scores[known], np.full(len(xyz), -1))


def _hash(arrays: Iterable[FloatArray], images: Mapping[str, MapImage]) -> str:
    """Return a hash of arrays and of the cameras of a map."""
    found = hashlib.sha256()
    for image in images.values():
        found.update(repr(image.camera and (image.camera.K.tolist(), image.camera.lens)).encode())
    for array in arrays:
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def read_map(path: str | Path, images: str | Path | None = None) -> ModelMap | RgbdMap:
    """Read the map in a folder: a COLMAP model with its images under `images`, or RGB-D frames with poses."""
    path = Path(path)
    if (path / "world_from_cam.txt").is_file():
        return RgbdMap(read_rgbd(path))
    model = read_model(path, images)
    if images is None:
        raise ConfigError(f"{path} is a COLMAP model; pass the folder of its images with --images.")
    return ModelMap(model, images)
