"""Poses of InLoc's queries from their matches with each candidate, with a cache."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc.errors import DualRCError
from dualrc.evaluation.dense_verification import verify
from dualrc.evaluation.export import Pair
from dualrc.evaluation.inloc_data import (
    CandidatePose,
    Folders,
    Points,
    pose_rows,
    read_alignment,
    read_cutout,
    read_scan,
)
from dualrc.files import writing
from dualrc.geometry import (
    AbsolutePose,
    absolute_pose,
    apply_homography,
    in_image,
    resize_homography,
    transform_points,
)
from dualrc.geometry.dense import bilinear_corners
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.types import BoolArray, FloatArray, Size

# As in the published evaluations of NCNet and its successors.
RANSAC_DEG = 0.2
# The published evaluation keeps every pose, even with 3 inliers.
MIN_INLIERS, PAPER_MIN_INLIERS = 6, 4
# Neighboring points whose distances from the scanner differ by a larger share lie on different surfaces.
_EDGE = 0.1
# Version of the estimation; cached results of other versions are ignored.
_VERSION = 2


class PoseEstimator:
    """Estimates and verifies poses of candidates, and caches the results in a file, one JSON line each."""

    def __init__(self, folders: Folders, file: Path, min_inliers: int = MIN_INLIERS) -> None:
        self._folders, self._min_inliers = folders, min_inliers
        # Results by the hash of everything that they depend on.
        self._file, self._results = file, _read_results(file)
        self._read_scan, self._read_photograph = lru_cache(1)(read_scan), lru_cache(1)(read)
        # The reason for each dataset file that cannot be used.
        self.broken: dict[str, str] = {}

    def estimate(self, pair: Pair, matches: Matches) -> CandidatePose:
        """Estimate the pose from the matches of a candidate; there is none if the candidate's points cannot be read."""
        if not len(matches):
            reason = str(matches.info.get("error", "there are no matches"))
            return CandidatePose(candidate=pair.name1, reason=reason)
        camera = self._folders.camera(pair.name0, matches.size0)
        files = (self._folders.points(pair.name1), self._folders.alignment(pair.name1))
        key = _hash(
            "pose", self._min_inliers, pair.name0, pair.name1, camera.K, camera.lens, camera.size, matches, *files
        )
        found = self._cached(pair.name1, key, partial(self._estimate, pair, matches))
        return CandidatePose(**{"candidate": pair.name1, **found})

    def _estimate(self, pair: Pair, matches: Matches) -> dict[str, Any]:
        xyz, found = self._solve(pair, matches)
        return {
            "candidate": pair.name1,
            "inliers": int(found.inliers.sum()),
            "correspondences": int(np.isfinite(xyz).all(axis=1).sum()),
            "cam_from_world": None if found.cam_from_world is None else pose_rows(found.cam_from_world),
            "reason": found.reason,
        }

    def inliers(self, pair: Pair, matches: Matches) -> BoolArray:
        """Return which matches (n,) are inliers of the pose that they give."""
        return self._solve(pair, matches)[1].inliers

    def _solve(self, pair: Pair, matches: Matches) -> tuple[FloatArray, AbsolutePose]:
        """Return the 3D points of matches in the floor's frame (n, 3), NaN where there is none, and the pose."""
        floor_from_scan = read_alignment(self._folders.alignment(pair.name1))
        cutout = read_cutout(self._folders.points(pair.name1))
        xyz = transform_points(floor_from_scan, points_at(cutout, matches.points1, matches.size1))
        camera = self._folders.camera(pair.name0, matches.size0)
        found = absolute_pose(
            matches.points0,
            xyz,
            camera=camera,
            scores=matches.scores,
            threshold_px=camera.focal_px * float(np.tan(np.radians(RANSAC_DEG))),
            min_inliers=self._min_inliers,
        )
        return xyz, found

    def verify(
        self,
        poses: Mapping[str, Sequence[CandidatePose]],
        photographs: Mapping[str, Path],
        progress: Callable[[str, int, int], None],
    ) -> dict[str, list[CandidatePose]]:
        """Return the poses with `verified`, computed scan by scan, because only the last scan is cached."""
        verified = {query: list(found) for query, found in poses.items()}
        places = [
            (self._folders.scan(one.candidate), query, index)
            for query, found in poses.items()
            for index, one in enumerate(found)
            if one.pose is not None
        ]
        for count, (scan, query, index) in enumerate(sorted(places, key=lambda place: place[0]), start=1):
            one = verified[query][index]
            alignment = self._folders.alignment(one.candidate)
            key = _hash("verify", query, one.candidate, one.pose, alignment, scan)
            found = self._cached(scan.name, key, partial(self._verify, query, photographs[query], one))
            verified[query][index] = replace(one, verified=float(found.get("verified", 0.0)))
            progress("verifying poses", count, len(places))
        return verified

    def _verify(self, query: str, photograph: Path, one: CandidatePose) -> dict[str, Any]:
        folders, pose = self._folders, one.pose
        assert pose is not None
        xyz, rgb = self._read_scan(folders.scan(one.candidate), folders.points(one.candidate).parent)
        image = self._read_photograph(photograph)
        camera = folders.camera(query, (image.shape[1], image.shape[0]))
        floor_from_scan = np.vstack([read_alignment(folders.alignment(one.candidate)), [0, 0, 0, 1]])
        return {"verified": verify(image, camera, pose @ floor_from_scan, xyz, rgb)}

    def _cached(self, source: str, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a result, computed and stored if missing, or the reason for having none if the source cannot be read.

        The reason is not stored, because its cause may be fixed.
        """
        if key in self._results:
            return self._results[key]
        try:
            found = compute()
        except DualRCError as error:
            self.broken[source] = str(error)
            return {"reason": str(error)}
        self._results[key] = found
        with writing(self._file), self._file.open("a", encoding="utf-8") as file:
            # The previous line may be incomplete.
            file.write(f"\n{json.dumps({'key': key, 'entry': found})}\n")
        return found


def points_at(xyz: Points, pixels: npt.ArrayLike, size: Size) -> FloatArray:
    """Return 3D points (n, 3) at pixels (n, 2) of a cutout of `size`; NaN where the scan has none.

    Points on one surface are interpolated; at an edge the nearest point is used.
    """
    height, width = xyz.shape[:2]
    places = apply_homography(resize_homography(size, (width, height)), pixels)
    inside = in_image(places, (width, height))
    rows, columns, weights = bilinear_corners(np.where(inside[:, None], places, 0), (width, height))
    # (4, n, 3).
    near = xyz[rows, columns].astype(np.float64)
    # (4, n).
    ranges = np.linalg.norm(near, axis=-1)
    smooth = np.isfinite(ranges).all(axis=0) & (ranges.max(axis=0) <= (1 + _EDGE) * ranges.min(axis=0))
    nearest = near[weights.argmax(axis=0), np.arange(len(places))]
    found = np.where(smooth[:, None], (weights[..., None] * near).sum(axis=0), nearest)
    return np.where(inside[:, None], found, np.nan)


def _read_results(file: Path) -> dict[str, dict[str, Any]]:
    results = {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in lines:
        try:
            content = json.loads(line)
            results[content["key"]] = content["entry"]
        except (ValueError, LookupError, TypeError):
            # The process was killed while it wrote this line.
            continue
    return results


def _hash(*parts: Any) -> str:
    """Return a hash of names, arrays, matches, and of files by size and time."""
    digest = hashlib.sha256(f"{_VERSION} {RANSAC_DEG}".encode())
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
