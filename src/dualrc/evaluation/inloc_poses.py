"""Poses of InLoc's queries from their matches with each candidate, kept in a file so that none is estimated twice."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.draw import Picture
from dualrc.errors import DualRCError, OutputError
from dualrc.evaluation.export import Pair
from dualrc.evaluation.inloc_files import Folders, read_alignment, read_cutout, read_scan
from dualrc.evaluation.inloc_verify import verify
from dualrc.geometry import (
    AbsolutePose,
    absolute_pose,
    apply_homography,
    on_picture,
    resize_homography,
    transform_points,
)
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.types import BoolArray, FloatArray, Size

RANSAC_DEG = 0.2  # as in the published evaluations of NCNet and of those that followed
MIN_INLIERS = 6
# Neighbouring points whose distances from the scanner differ by a larger share lie on two surfaces.
_EDGE = 0.1
_VERSION = 1  # of the estimation: results of another are not used


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a candidate gave."""

    candidate: str
    inliers: int = 0
    correspondences: int = 0  # matches with a 3D point
    cam_from_world: tuple[tuple[float, ...], ...] | None = None  # (3, 4)
    reason: str | None = None  # why there is no pose
    verified: float | None = None  # how alike photograph and scan look from there

    @property
    def pose(self) -> FloatArray | None:
        """cam_from_world (3, 4)."""
        return None if self.cam_from_world is None else np.array(self.cam_from_world)


class CandidatePoses:
    """Estimates and verifies poses; what is in its file is not done again."""

    def __init__(self, folders: Folders, file: Path | None) -> None:
        self._folders = folders
        self._kept = _Kept(file)
        self.broken: dict[str, str] = {}  # files of the data set that can't be used, and why

    def estimate(self, pair: Pair, matches: Matches) -> Tried:
        """The pose that a candidate's matches give; a candidate whose points can't be read gives none."""
        if not len(matches):
            reason = str(matches.info.get("error", "there are no matches"))
            return Tried(candidate=pair.name1, reason=reason)
        camera = self._folders.camera(pair.name0, matches.size0)
        files = (self._folders.points(pair.name1), self._folders.alignment(pair.name1))
        key = _key("pose", pair.name0, pair.name1, camera.K, camera.size, matches, *files)
        try:
            return Tried(**self._kept.get(key, lambda: self._entry(pair, matches)))
        except DualRCError as error:
            if isinstance(error, OutputError):
                raise
            self.broken[pair.name1] = str(error)
            return Tried(candidate=pair.name1, reason=str(error))

    def inliers(self, pair: Pair, matches: Matches) -> BoolArray:
        """Which matches agree with the pose that they give: (n,)."""
        return self._solve(pair, matches, self._places(pair, matches)).inliers

    def _entry(self, pair: Pair, matches: Matches) -> dict[str, Any]:
        places = self._places(pair, matches)
        found = self._solve(pair, matches, places)
        pose = found.cam_from_world
        return {
            "candidate": pair.name1,
            "inliers": int(found.inliers.sum()),
            "correspondences": int(np.isfinite(places).all(axis=1).sum()),
            "cam_from_world": None if pose is None else pose_rows(pose),
            "reason": found.reason,
        }

    def _places(self, pair: Pair, matches: Matches) -> FloatArray:
        return floor_places(self._folders, pair.name1, matches.points1, matches.size1)

    def _solve(self, pair: Pair, matches: Matches, places: FloatArray) -> AbsolutePose:
        camera = self._folders.camera(pair.name0, matches.size0)
        return absolute_pose(
            matches.points0,
            places,
            camera=camera,
            scores=matches.scores,
            threshold_px=camera.focal_px * float(np.tan(np.radians(RANSAC_DEG))),
            min_inliers=MIN_INLIERS,
        )

    def verify(
        self,
        tried: Mapping[str, Sequence[Tried]],
        photographs: Mapping[str, Path],
        tell: Callable[[str, int, int], None],
    ) -> dict[str, list[Tried]]:
        """The same with `verified`, scan by scan, because scans are large and read but once."""
        by_scan: dict[Path, list[tuple[str, int]]] = defaultdict(list)
        verified = {query: list(candidates) for query, candidates in tried.items()}
        for query, candidates in tried.items():
            for index, one in enumerate(candidates):
                if one.cam_from_world is not None:
                    by_scan[self._folders.scan(one.candidate)].append((query, index))
        for number, places in enumerate(by_scan.values()):
            tell("verifying, scans", number, len(by_scan))
            scan = _Lazy(lambda name: read_scan(self._folders, name))
            photograph = _Lazy(lambda query: read(photographs[query]))
            for query, index in places:
                one = verified[query][index]
                verified[query][index] = replace(one, verified=self._verified(query, one, scan, photograph))
        tell("verifying, scans", len(by_scan), len(by_scan))
        return verified

    def _verified(self, query: str, one: Tried, scan: "_Lazy", photograph: "_Lazy") -> float:
        alignment, file = self._folders.alignment(one.candidate), self._folders.scan(one.candidate)
        key = _key("verify", query, one.candidate, one.pose, alignment, file)

        def compare() -> dict[str, Any]:
            xyz, rgb = scan.get(one.candidate)
            picture: Picture = photograph.get(query)
            camera = self._folders.camera(query, (picture.shape[1], picture.shape[0]))
            floor_from_scan = np.vstack([read_alignment(alignment), [0, 0, 0, 1]])
            pose = one.pose
            assert pose is not None
            return {"verified": verify(picture, camera, pose @ floor_from_scan, xyz, rgb)}

        try:
            return float(self._kept.get(key, compare)["verified"])
        except DualRCError as error:
            if isinstance(error, OutputError):
                raise
            self.broken[str(file.name)] = str(error)
            return 0.0


def places_at(xyz: npt.NDArray[np.float32], points: npt.ArrayLike, size: Size) -> FloatArray:
    """3D points (n, 3) at pixels (n, 2) of a cut-out of `size`; NaN where the scan has none.

    On one surface they are interpolated; at its edge the nearest one is taken.
    """
    height, width = xyz.shape[:2]
    places = apply_homography(resize_homography(size, (width, height)), points)
    inside = on_picture(places, (width, height))
    places = np.clip(np.where(inside[:, None], places, 0), 0, (width - 1, height - 1))
    left, top = places.astype(np.int64).T
    x, y = (places - np.column_stack([left, top])).T
    right, below = np.minimum(left + 1, width - 1), np.minimum(top + 1, height - 1)
    near = np.stack([xyz[row, column] for row in (top, below) for column in (left, right)]).astype(np.float64)
    weights = np.stack([v * h for v in (1 - y, y) for h in (1 - x, x)])
    ranges = np.linalg.norm(near, axis=-1)  # (4, n)
    smooth = np.isfinite(ranges).all(axis=0) & (ranges.max(axis=0) <= (1 + _EDGE) * ranges.min(axis=0))
    nearest = near[weights.argmax(axis=0), np.arange(len(places))]
    found = np.where(smooth[:, None], (weights[..., None] * near).sum(axis=0), nearest)
    return np.where(inside[:, None], found, np.nan)


def floor_places(folders: Folders, cutout: str, points: npt.ArrayLike, size: Size) -> FloatArray:
    """3D points (n, 3) in the floor's frame at pixels (n, 2) of a cut-out; NaN where there is none."""
    floor_from_scan = read_alignment(folders.alignment(cutout))
    return transform_points(floor_from_scan, places_at(read_cutout(folders.points(cutout)), points, size))


class _Lazy:
    """Remembers the latest thing read: its name may differ, as those of cut-outs of one scan do."""

    def __init__(self, read_one: Callable[[str], Any]) -> None:
        self._read, self._name, self._value = read_one, "", None

    def get(self, name: str) -> Any:
        group = name.rpartition("/")[0] or name  # cut-outs of a scan are in one folder
        if group != self._name:
            self._value = self._read(name)
            self._name = group
        return self._value


class _Kept:
    """Results by the hash of all that they depend on, a line of JSON each; without a file, for this run only."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._entries: dict[str, dict[str, Any]] | None = None

    def get(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result, made and kept if it is not there; an error is not kept, because its cause may be mended."""
        if self._entries is None:
            self._entries = self._read()
        if key not in self._entries:
            entry = make()
            self._entries[key] = entry
            self._append(json.dumps({"key": key, "entry": entry}))
        return self._entries[key]

    def _read(self) -> dict[str, dict[str, Any]]:
        entries = {}
        if self._file is not None and self._file.is_file():
            for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    content = json.loads(line)
                    entries[content["key"]] = content["entry"]
                except (ValueError, LookupError, TypeError):
                    continue  # the process was killed in the middle of it
        return entries

    def _append(self, line: str) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")  # the line before may be torn
        except OSError as error:
            remedy = "make room or write elsewhere"
            raise OutputError(f"{self._file} can't be written ({error.strerror}); {remedy}.") from error


def pose_rows(pose: FloatArray) -> tuple[tuple[float, ...], ...]:
    """A pose (3, 4) as plain numbers."""
    return tuple(map(tuple, pose.tolist()))


def _key(*parts: Any) -> str:
    """A hash of names, arrays, matches, and of files by their size and time."""
    digest = hashlib.sha256(f"{_VERSION} {RANSAC_DEG} {MIN_INLIERS}".encode())
    for part in parts:
        if isinstance(part, Matches):
            blobs = [np.ascontiguousarray(a).tobytes() for a in (part.points0, part.points1, part.scores)]
            digest.update(b"".join(blobs) + f"{part.size0} {part.size1}".encode())
        elif isinstance(part, np.ndarray):
            digest.update(np.ascontiguousarray(part).tobytes())
        elif isinstance(part, Path):
            stat = part.stat() if part.is_file() else None
            digest.update(f"{part.name} {stat and (stat.st_size, stat.st_mtime_ns)}".encode())
        else:
            digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()
