"""The pose of a picture in a map, stage by stage."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from dualrc.matcher import Matcher, PictureFeatures
from dualrc.matcher.cache import LruCache
from dualrc.types import FloatArray, Size

# The picture is parted into so many cells along its long side to tell how much of it supports a pose.
_CELLS = 16
_SAVE_EVERY = 100  # pictures of the map
# So many supporting cells are as good as any number.
_ENOUGH_CELLS = 20
# Expected number of poses with as much support if all correspondences were random; a pose above this is rejected.
_BY_CHANCE = 0.01
# EXIF's focal length is that of the map's camera if they differ by a smaller share.
_SAME_FOCAL = 0.1


@dataclass(frozen=True, kw_only=True)
class LocalizeConfig:
    """How a picture is localized."""

    # Pictures of the map to match a query with, the most similar ones.
    candidates: int = 10
    # A correspondence supports a pose that puts it within so many pixels of its place in the query.
    threshold_px: float = 4.0
    # A pose with less support is none.
    min_inliers: int = 12
    # Memory in GiB for features of the map's pictures.
    max_memory: float = 2.0

    def __post_init__(self) -> None:
        check_bounds(self, "candidates", at_least=1)
        check_bounds(self, "min_inliers", at_least=4)
        check_bounds(self, "threshold_px", above=0)
        check_bounds(self, "max_memory", at_least=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Localization:
    """Where a query was taken, and how sure that is."""

    cam_from_world: FloatArray | None = None  # (3, 4); None where that failed, and then `reason` says why
    reason: str | None = None
    camera: Camera | None = None  # the one used; its `source` says where it comes from
    candidates: dict[str, int] = field(default_factory=dict)  # the map's pictures looked at, and each one's inliers
    correspondences: int = 0
    inliers: int = 0
    covariance: FloatArray | None = None  # (6, 6), as in AbsolutePose
    confidence: float = 0.0  # 0 to 1
    seconds: float = 0.0

    @property
    def position_deviation(self) -> float:
        """Standard deviation of the camera's place, in the map's unit."""
        return float("nan") if self.covariance is None else float(np.sqrt(np.trace(self.covariance[3:, 3:])))

    @property
    def rotation_deviation_deg(self) -> float:
        """Standard deviation of the camera's orientation."""
        if self.covariance is None:
            return float("nan")
        return float(np.degrees(np.sqrt(np.trace(self.covariance[:3, :3]))))


class Localizer:
    """Localizes pictures in a map; features of the map's pictures are kept for the next query."""

    def __init__(
        self, matcher: Matcher, map: Map, config: LocalizeConfig | None = None, *, descriptors: Path | None = None
    ) -> None:
        """`descriptors` is a file (.npz) that keeps what retrieval knows of the map's pictures for the next run."""
        self.matcher = matcher
        self.map = map
        self.config = config or LocalizeConfig()
        # Pictures of the map that could not be used, and why.
        self.broken: dict[str, str] = {}
        self._descriptors: dict[str, FloatArray] = {}
        self._contents: dict[str, str] = {}
        self._descriptors_file = descriptors
        self._cameras: dict[Size, Camera | None] = {}  # that the map's pictures of a size share
        self._kept: LruCache[str, PictureFeatures] = LruCache(self.config.max_memory * 2**30, keep=1)

    def localize(
        self,
        query: str | Path | PictureFeatures,
        *,
        camera: Camera | None = None,
        candidates: Sequence[str] | None = None,
    ) -> Localization:
        """The pose of one picture; what it can't be localized for is the result's `reason`.

        Without a camera: the one that the map's pictures of this size share, unless EXIF tells another focal length;
        else EXIF's, else an estimated one. The result's camera has a `source` that says which.
        Without candidates: the most similar pictures of the map.
        """
        start = time.perf_counter()
        try:
            features = query if isinstance(query, PictureFeatures) else self.matcher.features(query)
            if camera is None:
                camera = self._find_camera(query, features.size)
            _check_camera(camera, features.size)
        except DualRCError as error:
            return Localization(reason=str(error), seconds=time.perf_counter() - start)
        names = list(candidates) if candidates is not None else self.candidates(features)
        picture = None if isinstance(query, PictureFeatures) else query
        found = self.correspondences(features, names, picture)
        result = self.pose(found, features.size, camera=camera, names=names)
        if camera is None and result.camera is not None and picture is not None and lacks_sensor_size(picture):
            source = f"{result.camera.source}, as EXIF has no sensor size"
            result = replace(result, camera=replace(result.camera, source=source))
        return replace(result, seconds=time.perf_counter() - start)

    def candidates(self, query: PictureFeatures) -> list[str]:
        """The map's pictures that are most similar to the query, best first."""
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
        """Describe the map's pictures that are not described yet."""
        info, config = self.matcher.info, self.matcher.config
        # All that descriptors depend on.
        made_with = {key: info[key] for key in ("weights", "network")} | {"sizes": [config.size, config.max_size]}
        file = self._descriptors_file
        contents = {} if file is None else {name: self.content(name) for name in self.map.names}
        if not self._descriptors and file is not None:
            known = read_descriptors(file, made_with, contents)
            self._descriptors = {name: known[name] for name in self.map.names if name in known}
        new = 0
        for number, name in enumerate(self.map.names):
            progress("Looking at the map's pictures", number, len(self.map.names))
            if name in self._descriptors or (features := self._features(name)) is None:
                continue
            self._descriptors[name] = global_descriptor(features)
            new += 1
            if file is not None and new % _SAVE_EVERY == 0:
                write_descriptors(file, made_with, self._descriptors, contents)
        if file is not None and new % _SAVE_EVERY:
            write_descriptors(file, made_with, self._descriptors, contents)
        progress("Looking at the map's pictures", len(self.map.names), len(self.map.names))

    def content(self, name: str) -> str:
        """A hash of the file of a picture of the map, as it was when it was first asked for."""
        if name not in self._contents:
            self._contents[name] = content_hash(self.map.pictures[name].path)
        return self._contents[name]

    def correspondences(
        self, query: PictureFeatures, names: Iterable[str], picture: str | Path | None = None
    ) -> Correspondences:
        """What the query sees of these pictures of the map, together; quality "high" looks at its picture."""
        parts = []
        for name in names:
            features = self._features(name)
            part = Correspondences.join([])
            if features is not None:
                try:
                    part = self.map.correspond(self.matcher, name, features, query, picture)
                except DataError as error:
                    self.broken[name] = str(error)
            parts.append(part)
        return Correspondences.join(parts).merged(self.config.threshold_px)

    def pose(
        self, found: Correspondences, size: Size, *, camera: Camera | None = None, names: Sequence[str] = ()
    ) -> Localization:
        """The pose that most correspondences agree with; `names` are the candidates that they come from."""
        pose = absolute_pose(
            found.points,
            found.xyz,
            camera=camera,
            size=size,
            scores=found.scores,
            threshold_px=self.config.threshold_px,
            min_inliers=self.config.min_inliers,
        )
        sample = 4 if camera is None else 3  # correspondences that determine a pose, and the focal length
        reason = _by_chance(found, pose, size, self.config.threshold_px, sample)
        if reason is not None:
            pose = AbsolutePose(inliers=np.zeros_like(pose.inliers), reason=reason)
        support = np.bincount(found.pictures[pose.inliers], minlength=len(names))
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

    def _find_camera(self, query: str | Path | PictureFeatures, size: Size) -> Camera | None:
        told = None if isinstance(query, PictureFeatures) else camera_from_exif(query)
        if size not in self._cameras:
            self._cameras[size] = self.map.camera(size)
        shared = self._cameras[size]
        if told is None or shared is None:
            return told or shared
        # The map's was refined and has its lens; EXIF rounds, but tells another lens or zoom.
        return shared if abs(np.log(told.focal_px / shared.focal_px)) <= _SAME_FOCAL else told

    def _features(self, name: str) -> PictureFeatures | None:
        """Features of a picture of the map, kept as long as they fit into memory; None where it is broken."""
        if name in self.broken:
            return None
        try:
            return self._kept.get(name, lambda: self.matcher.features(self.map.pictures[name].path))
        except DualRCError as error:
            self.broken[name] = str(error)
            return None


def _check_camera(camera: Camera | None, size: Size) -> None:
    if camera is not None and camera.size != size:
        raise DataError(
            f"The camera is for {camera.width} x {camera.height} pixels but the picture has {size[0]} x {size[1]}; "
            "give the camera of this picture, or use Camera.resized."
        )


def _by_chance(found: Correspondences, pose: AbsolutePose, size: Size, threshold_px: float, sample: int) -> str | None:
    """Why a pose's support may be chance; None where it is not, or where there is no pose.

    Of thousands of wrong correspondences, a dozen or two agree with some pose, and those near each other err together.
    So cells of the query are counted: fewer than `_BY_CHANCE` poses with as many supporting cells are expected if all
    correspondences were random (an a-contrario bound over all choices of cells, and of a minimal sample among them).
    """
    if pose.cam_from_world is None:
        return None
    matched, supporting = _cells(found.points, size), _cells(found.points[pose.inliers], size)
    # A random correspondence lies within the threshold of its place, and one of those of a cell does.
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
    """How much of what matched supports the pose, by area, less where that is little."""
    if pose.cam_from_world is None:
        return 0.0
    matched, supporting = _cells(found.points, size), _cells(found.points[pose.inliers], size)
    return supporting / matched * min(1.0, supporting / _ENOUGH_CELLS)
