"""Localization of an image in a map, stage by stage."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import lgamma
from pathlib import Path

import numpy as np

from dualrc.collection.progress import Progress, no_progress
from dualrc.collection.retrieval import global_descriptor, most_similar, read_descriptors, write_descriptors
from dualrc.config import check_bounds
from dualrc.errors import DataError, DualRCError
from dualrc.files import content_hash
from dualrc.geometry import AbsolutePose, Camera, absolute_pose, camera_from_exif, lacks_sensor_size
from dualrc.localize.maps import Correspondences, Map
from dualrc.matcher import ImageFeatures, Matcher
from dualrc.matcher.cache import LruCache
from dualrc.types import FloatArray, Size

# Number of cells along the long side of the image, in the measure of the area that supports a pose.
_CELLS = 16
# Descriptors are saved after this number of map images.
_SAVE_EVERY = 100
# Number of supporting cells above which the confidence no longer grows.
_ENOUGH_CELLS = 20
# Expected number of poses with as much support if all correspondences were random; a pose above this is rejected.
_BY_CHANCE = 0.01
# Relative difference up to which the focal lengths of EXIF and of the map's camera count as equal.
_SAME_FOCAL = 0.1


@dataclass(frozen=True, kw_only=True)
class LocalizeConfig:
    """Settings of localization."""

    # Number of map images to match a query with, the most similar ones.
    candidates: int = 10
    # Maximum reprojection error of an inlier, in pixels of the query.
    threshold_px: float = 4.0
    # Poses with fewer inliers are rejected.
    min_inliers: int = 12
    # Memory for cached features of map images, in GiB.
    max_memory: float = 2.0

    def __post_init__(self) -> None:
        check_bounds(self, "candidates", at_least=1)
        check_bounds(self, "min_inliers", at_least=4)
        check_bounds(self, "threshold_px", above=0)
        check_bounds(self, "max_memory", at_least=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Localization:
    """Pose of a query and its uncertainty."""

    # (3, 4); None if localization failed, with the reason in `reason`.
    cam_from_world: FloatArray | None = None
    # Why there is no pose.
    reason: str | None = None
    # Camera used; its `source` names its origin.
    camera: Camera | None = None
    # Candidates in the map, with their numbers of inliers.
    candidates: dict[str, int] = field(default_factory=dict)
    # Number of 2D-3D correspondences.
    correspondences: int = 0
    # Number of correspondences that agree with the pose.
    inliers: int = 0
    # (6, 6), as in AbsolutePose.
    covariance: FloatArray | None = None
    # From 0 to 1: the share of the matched area that supports the pose, reduced if that area is small.
    confidence: float = 0.0
    # Time of the query.
    seconds: float = 0.0

    @property
    def position_deviation(self) -> float:
        """Standard deviation of the camera position, in units of the map."""
        return float("nan") if self.covariance is None else float(np.sqrt(np.trace(self.covariance[3:, 3:])))

    @property
    def rotation_deviation_deg(self) -> float:
        """Standard deviation of the camera orientation."""
        if self.covariance is None:
            return float("nan")
        return float(np.degrees(np.sqrt(np.trace(self.covariance[:3, :3]))))


class Localizer:
    """Localizes images in a map, and caches features of map images."""

    def __init__(
        self, matcher: Matcher, map: Map, config: LocalizeConfig | None = None, *, descriptors: Path | None = None
    ) -> None:
        """`descriptors`: file (.npz) that caches the descriptors of the map images for the next run."""
        self.matcher = matcher
        self.map = map
        self.config = config or LocalizeConfig()
        # The reason for each map image that could not be used.
        self.broken: dict[str, str] = {}
        self._descriptors: dict[str, FloatArray] = {}
        self._contents: dict[str, str] = {}
        self._descriptors_file = descriptors
        # Camera that the map images of a size share.
        self._shared_camera = cache(map.camera)
        self._kept: LruCache[str, ImageFeatures] = LruCache(self.config.max_memory * 2**30, keep=1)

    def localize(
        self,
        query: str | Path | ImageFeatures,
        *,
        camera: Camera | None = None,
        candidates: Sequence[str] | None = None,
    ) -> Localization:
        """Estimate the pose of one image; the `reason` of the result is set if that fails.

        `camera`: default is the camera that the map images of this size share, unless EXIF has another focal length;
        else the camera from EXIF; else an estimate. The `source` of the result's camera names the choice.
        `candidates`: names of map images; default is the most similar ones.
        """
        start = time.perf_counter()
        try:
            features = query if isinstance(query, ImageFeatures) else self.matcher.features(query)
            if camera is None:
                camera = self._find_camera(query, features.size)
            _check_camera(camera, features.size)
        except DualRCError as error:
            return Localization(reason=str(error), seconds=time.perf_counter() - start)
        names = list(candidates) if candidates is not None else self.candidates(features)
        image = None if isinstance(query, ImageFeatures) else query
        found = self.correspondences(features, names, image)
        result = self.pose(found, features.size, camera=camera, names=names)
        if camera is None and result.camera is not None and image is not None and lacks_sensor_size(image):
            source = f"{result.camera.source}, as EXIF has no sensor size"
            result = replace(result, camera=replace(result.camera, source=source))
        return replace(result, seconds=time.perf_counter() - start)

    def candidates(self, query: ImageFeatures) -> list[str]:
        """Return the map images that are most similar to the query, best first."""
        if len(self.map.names) <= self.config.candidates:
            return list(self.map.names)
        self.prepare()
        names = list(self._descriptors)
        if not names:
            return []
        database = np.stack([self._descriptors[name] for name in names])
        best = most_similar(global_descriptor(query)[None], database, self.config.candidates)[0]
        return [names[index] for index in best]

    def prepare(self, progress: Progress = no_progress) -> None:
        """Compute the descriptors of map images that are not cached."""
        info, config = self.matcher.info, self.matcher.config
        # Settings that descriptors depend on.
        made_with = {key: info[key] for key in ("weights", "network")} | {"sizes": [config.size, config.max_size]}
        file = self._descriptors_file
        contents = {} if file is None else {name: self.content(name) for name in self.map.names}
        if not self._descriptors and file is not None:
            known = read_descriptors(file, made_with, contents)
            self._descriptors = {name: known[name] for name in self.map.names if name in known}
        new = 0
        for number, name in enumerate(self.map.names):
            progress("Describing map images", number, len(self.map.names))
            if name in self._descriptors or (features := self._features(name)) is None:
                continue
            self._descriptors[name] = global_descriptor(features)
            new += 1
            if file is not None and new % _SAVE_EVERY == 0:
                write_descriptors(file, made_with, self._descriptors, contents)
        if file is not None and new % _SAVE_EVERY:
            write_descriptors(file, made_with, self._descriptors, contents)
        progress("Describing map images", len(self.map.names), len(self.map.names))

    def content(self, name: str) -> str:
        """Return the hash of the files of a map image at the time of the first call."""
        if name not in self._contents:
            self._contents[name] = " ".join(map(content_hash, self.map.files(name)))
        return self._contents[name]

    def correspondences(
        self, query: ImageFeatures, names: Iterable[str], image: str | Path | None = None
    ) -> Correspondences:
        """Return the correspondences of a query with these map images; the higher qualities read `image` again."""
        parts = []
        for name in names:
            features = self._features(name)
            part = Correspondences.join([])
            if features is not None:
                try:
                    part = self.map.correspond(self.matcher, name, features, query, image)
                except DataError as error:
                    self.broken[name] = str(error)
            parts.append(part)
        return Correspondences.join(parts).merged(self.config.threshold_px)

    def pose(
        self, found: Correspondences, size: Size, *, camera: Camera | None = None, names: Sequence[str] = ()
    ) -> Localization:
        """Estimate the pose with the most inliers; `names` are the candidates of the correspondences."""
        pose = absolute_pose(
            found.points,
            found.xyz,
            camera=camera,
            size=size,
            scores=found.scores,
            threshold_px=self.config.threshold_px,
            min_inliers=self.config.min_inliers,
        )
        # Minimum number of correspondences for a pose, without and with a known camera.
        sample = 4 if camera is None else 3
        reason = _by_chance(found, pose, size, self.config.threshold_px, sample)
        if reason is not None:
            pose = AbsolutePose(inliers=np.zeros_like(pose.inliers), reason=reason)
        support = np.bincount(found.images[pose.inliers], minlength=len(names))
        return Localization(
            cam_from_world=pose.cam_from_world,
            reason=pose.reason,
            camera=pose.camera or camera,
            candidates=dict(zip(names, support.tolist(), strict=False)),
            correspondences=len(found),
            inliers=int(pose.inliers.sum()),
            covariance=pose.covariance,
            confidence=_confidence(found, pose, size),
        )

    def _find_camera(self, query: str | Path | ImageFeatures, size: Size) -> Camera | None:
        told = None if isinstance(query, ImageFeatures) else camera_from_exif(query)
        shared = self._shared_camera(size)
        if told is None or shared is None:
            return told or shared
        # The map's camera is refined and includes distortion. EXIF values are rounded, but reveal another lens or zoom.
        return shared if abs(np.log(told.focal_px / shared.focal_px)) <= _SAME_FOCAL else told

    def _features(self, name: str) -> ImageFeatures | None:
        """Return the features of a map image, cached as memory permits, or None if it is broken."""
        if name in self.broken:
            return None
        try:
            return self._kept.get(name, lambda: self.matcher.features(self.map.images[name].path))
        except DualRCError as error:
            self.broken[name] = str(error)
            return None


def _check_camera(camera: Camera | None, size: Size) -> None:
    if camera is not None and camera.size != size:
        raise DataError(
            f"The camera is for {camera.width} x {camera.height} pixels but the image has {size[0]} x {size[1]}; "
            "pass the camera of this image, or use Camera.resized."
        )


def _by_chance(found: Correspondences, pose: AbsolutePose, size: Size, threshold_px: float, sample: int) -> str | None:
    """Return why the support of a pose may be due to chance; None if it is not, or if there is no pose.

    Of thousands of wrong correspondences, a dozen or two agree with some pose. Neighboring ones have similar errors, so
    cells of the query are counted, not correspondences. The pose is accepted if random correspondences would
    give fewer than `_BY_CHANCE` poses with as many supporting cells. This is an a-contrario bound over all choices of
    cells, and of a minimal sample among them.
    """
    if pose.cam_from_world is None:
        return None
    matched, supporting = _cells(found.points, size), _cells(found.points[pose.inliers], size)
    # Probability that a random correspondence is an inlier, then that any of those of a cell is.
    chance = min(0.5, np.pi * threshold_px**2 / (size[0] * size[1]))
    chance = -np.expm1(len(found) / matched * np.log1p(-chance))
    expected = np.log(matched) + _log_choose(matched, supporting) + _log_choose(supporting, min(sample, supporting))
    expected += max(supporting - sample, 0) * np.log(chance)
    if expected < np.log(_BY_CHANCE):
        return None
    inliers = int(pose.inliers.sum())
    return f"only {inliers} of {len(found)} correspondences, in {supporting} of {matched} places, agree with a pose"


def _log_choose(count: int, chosen: int) -> float:
    return lgamma(count + 1) - lgamma(chosen + 1) - lgamma(count - chosen + 1)


def _cells(points: FloatArray, size: Size) -> int:
    """Number of cells of an image that points (n, 2) lie in."""
    cells = (points / (max(size) / _CELLS)).astype(np.int64)
    return len(np.unique(cells[:, 1] * 1000 + cells[:, 0]))


def _confidence(found: Correspondences, pose: AbsolutePose, size: Size) -> float:
    """Return the share of the matched area that supports the pose, reduced if that area is small."""
    if pose.cam_from_world is None:
        return 0.0
    matched, supporting = _cells(found.points, size), _cells(found.points[pose.inliers], size)
    return supporting / matched * min(1.0, supporting / _ENOUGH_CELLS)
