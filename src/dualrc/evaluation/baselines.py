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
from dualrc.geometry import Camera, apply_homography, resize_homography
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.types import FloatArray, Size

OpenCVMethod = Literal["RANSAC", "USAC_MAGSAC"]

# Number of images whose descriptors are cached, at most 2 MB each.
_CACHED_IMAGES = 32
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
class _Described:
    # (n, 2), in pixels of the original image.
    points: FloatArray
    # (n, 128), unit length.
    descriptors: FloatArray
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
        index0, index1, scores = _mutual(described0.descriptors, described1.descriptors, self._ratio)
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

    def _detect(self, path: Path) -> _Described:
        start = time.perf_counter()
        gray = self._cv2.cvtColor(read(path), self._cv2.COLOR_RGB2GRAY)
        own = seen = (gray.shape[1], gray.shape[0])
        if self._size is not None:
            seen = (max(round(own[0] * self._size / max(own)), 1), max(round(own[1] * self._size / max(own)), 1))
            gray = self._cv2.resize(gray, seen, interpolation=self._cv2.INTER_AREA)
        try:
            keypoints, descriptors = self._sift.detectAndCompute(gray, None)
        except self._cv2.error as error:
            reason = " ".join(str(error).split())
            raise ImageError(f"SIFT cannot describe {path} ({reason}); pass a smaller size.") from error
        points = np.array([keypoint.pt for keypoint in keypoints]).reshape(-1, 2)
        if descriptors is None:
            descriptors = np.zeros((0, 128), np.float32)
        rooted = np.sqrt(descriptors / np.maximum(descriptors.sum(axis=1, keepdims=True), 1e-12))
        return _Described(
            points=apply_homography(resize_homography(seen, own), points),
            descriptors=rooted,
            size=own,
            seen=seen,
            seconds=time.perf_counter() - start,
        )


def _mutual(descriptors0: FloatArray, descriptors1: FloatArray, ratio: float | None) -> tuple[Any, Any, FloatArray]:
    """Return indices of mutual nearest neighbors that pass the ratio test in image 1, and scores."""
    if not len(descriptors0) or len(descriptors1) < 2:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing, np.zeros(0, np.float32)
    cosines = torch.from_numpy(descriptors0) @ torch.from_numpy(descriptors1).T
    best_two, nearest_two = (values.numpy() for values in cosines.topk(2, dim=1))
    nearest1, nearest0 = nearest_two[:, 0], cosines.argmax(dim=0).numpy()
    index0 = np.flatnonzero(nearest0[nearest1] == np.arange(len(descriptors0)))
    index1 = nearest1[index0]
    distances = np.sqrt(np.maximum(2 - 2 * best_two[index0], 1e-12))
    quotients = distances[:, 0] / distances[:, 1]
    if ratio is None:
        return index0, index1, best_two[index0, 0]
    passed = quotients < ratio
    return index0[passed], index1[passed], 1 - quotients[passed]


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
