"""Baselines: RootSIFT and OpenCV's pose estimators; the only file that imports OpenCV, which is optional."""

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dualrc.errors import ConfigError, ImageError
from dualrc.extras import require
from dualrc.files import one_line
from dualrc.geometry import Camera, apply_homography, resize_homography
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.types import FloatArray, Size

OpenCVMethod = Literal["RANSAC", "USAC_MAGSAC"]

# Number of images whose descriptors are cached, at most 2 MB each.
_CACHED_IMAGES = 32
# Number of descriptors whose cosines with all others are in memory at a time.
_ROWS = 4096
_CONFIDENCE = 0.99999
# In units of the baseline, as in published evaluations; OpenCV's own limit of 50 rejects points of distant scenes.
_MAX_DEPTH = 1e9


def opencv() -> Any:
    """Import cv2."""
    return require("cv2", "baselines", "SIFT and OpenCV's estimators")


def has_opencv() -> bool:
    """Return whether OpenCV is installed."""
    try:
        opencv()
    except ConfigError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Described:
    """Keypoints of an image with their descriptors."""

    # (n, 2), in pixels of the original image.
    points: FloatArray
    # (n, c), unit length.
    descriptors: FloatArray


@dataclass(frozen=True, kw_only=True)
class _Detected(Described):
    size: Size
    # Size at which SIFT ran.
    seen: Size
    seconds: float


class RootSift:
    """RootSIFT with mutual nearest neighbors and, unless `ratio` is None, a ratio test."""

    def __init__(self, *, features: int, ratio: float | None, size: int | None = None) -> None:
        self._cv2 = opencv()
        self._ratio, self._size = ratio, size
        self._sift = self._cv2.SIFT_create(nfeatures=features)
        self._describe = lru_cache(_CACHED_IMAGES)(self._detect)
        self.name = "sift-mutual" if ratio is None else "sift-ratio"
        self.config: dict[str, Any] = {
            "matcher": "RootSIFT, mutual" + ("" if ratio is None else " and ratio test"),
            "features": features,
            "ratio": ratio,
            "size": size,
            "opencv": self._cv2.__version__,
        }

    def match(self, path0: Path, path1: Path) -> Matches:
        """Match two images; the time is that of the pair without cached features."""
        described0, described1 = self._describe(path0), self._describe(path1)
        start = time.perf_counter()
        index0, index1, cosines = mutual_nearest(described0.descriptors, described1.descriptors)
        scores = cosines[:, 0]
        if self._ratio is not None:
            distances = np.sqrt(np.maximum(2 - 2 * cosines, 1e-12))
            quotients = distances[:, 0] / distances[:, 1]
            passed = quotients < self._ratio
            index0, index1, scores = index0[passed], index1[passed], 1 - quotients[passed]
        order = np.argsort(-scores, kind="stable")
        seconds = time.perf_counter() - start + described0.seconds + described1.seconds
        return Matches(
            points0=described0.points[index0[order]],
            points1=described1.points[index1[order]],
            scores=scores[order],
            size0=described0.size,
            size1=described1.size,
            info={"seconds": seconds, "seen0": described0.seen, "seen1": described1.seen},
        )

    def _detect(self, path: Path) -> _Detected:
        start = time.perf_counter()
        gray = self._cv2.cvtColor(read(path), self._cv2.COLOR_RGB2GRAY)
        own = seen = (gray.shape[1], gray.shape[0])
        if self._size is not None:
            seen = (max(round(own[0] * self._size / max(own)), 1), max(round(own[1] * self._size / max(own)), 1))
            gray = self._cv2.resize(gray, seen, interpolation=self._cv2.INTER_AREA)
        try:
            keypoints, descriptors = self._sift.detectAndCompute(gray, None)
        except self._cv2.error as error:
            raise ImageError(f"SIFT cannot describe {path} ({one_line(error)}); pass a smaller size.") from error
        points = np.array([keypoint.pt for keypoint in keypoints]).reshape(-1, 2)
        if descriptors is None:
            descriptors = np.zeros((0, 128), np.float32)
        rooted = np.sqrt(descriptors / np.maximum(descriptors.sum(axis=1, keepdims=True), 1e-12))
        return _Detected(
            points=apply_homography(resize_homography(seen, own), points),
            descriptors=rooted,
            size=own,
            seen=seen,
            seconds=time.perf_counter() - start,
        )


def mutual_nearest(descriptors0: FloatArray, descriptors1: FloatArray) -> tuple[Any, Any, FloatArray]:
    """Return indices (n,), (n,) of mutual nearest neighbors, and the cosines (n, 2) of the best two in image 1.

    The second cosine is -1 if image 1 has one descriptor only.
    """
    one, other = torch.from_numpy(descriptors0), torch.from_numpy(descriptors1)
    count = min(2, len(other))
    best, nearest = torch.full((len(one), 2), -1.0), torch.zeros(len(one), dtype=torch.long)
    most, back = torch.full((len(other),), -torch.inf), torch.full((len(other),), -1)
    for start in range(0, len(one), _ROWS) if count else ():
        rows = slice(start, start + _ROWS)
        cosines = one[rows] @ other.T
        values, columns = cosines.topk(count, dim=1)
        best[rows, :count], nearest[rows] = values, columns[:, 0]
        highest, row = cosines.max(0)
        back, most = torch.where(highest > most, row + start, back), torch.maximum(highest, most)
    # Without descriptors in one of the images there are no neighbors.
    index0 = (back[nearest] == torch.arange(len(one))).nonzero()[:, 0] if count else nearest[:0]
    return index0.numpy(), nearest[index0].numpy(), best[index0].numpy()


def opencv_relative_pose(
    matches: Matches, camera0: Camera, camera1: Camera, *, method: OpenCVMethod, threshold_px: float
) -> FloatArray | None:
    """Estimate cam1_from_cam0 (3, 4) with OpenCV's essential matrix; None if that fails."""
    cv2 = opencv()
    rays0, rays1 = camera0.rays(matches.points0)[:, :2], camera1.rays(matches.points1)[:, :2]
    finite = np.isfinite(rays0).all(axis=1) & np.isfinite(rays1).all(axis=1)
    rays0, rays1 = rays0[finite], rays1[finite]
    if len(rays0) < 5:
        return None
    threshold = threshold_px / ((camera0.focal_px + camera1.focal_px) / 2)
    cv2.setRNGSeed(0)
    try:
        essentials, mask = cv2.findEssentialMat(
            rays0, rays1, np.eye(3), method=getattr(cv2, method), prob=_CONFIDENCE, threshold=threshold
        )
    except cv2.error:
        # OpenCV raises an error for degenerate points.
        return None
    if essentials is None or essentials.shape[0] < 3:
        return None
    best, best_count = None, 0
    # The five-point method returns up to ten solutions.
    for essential in np.split(essentials, len(essentials) // 3):
        count, R, t, *_ = cv2.recoverPose(
            essential, rays0, rays1, np.eye(3), distanceThresh=_MAX_DEPTH, mask=mask.copy()
        )
        if count > best_count:
            best, best_count = np.column_stack([R, t.ravel()]), count
    return best
