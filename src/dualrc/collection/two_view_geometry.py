"""Two-view geometry of pairs: relative pose, inliers and coverage, each from the pair's own matches.

Each pair gets an essential matrix. Unknown focal lengths are estimated first, jointly from all pairs. A pair is clear
if a third of its matches are inliers that form dense regions in both images. The inliers of clear pairs show which
parts of an image can be matched; the coverage of a pair compares its inliers with these.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc import geometry
from dualrc.collection import coverage
from dualrc.collection.store import MatchStore, Names
from dualrc.geometry import Camera
from dualrc.matches import Estimate, EstimateKind, Matches
from dualrc.pixels import FINE_STRIDE
from dualrc.types import BoolArray, FloatArray, IntArray

# Minimum number of inliers, and minimum number of cycles for a decision.
FEWEST = 30
# Number of pairs whose matches stay in memory.
CACHED = 64
# RANSAC iterations for a pair with a high inlier ratio, and for a pair with a low one.
_QUICK, _THOROUGH = 300, 2000
# Maximum epipolar error of an inlier, in fine cells of the matcher.
_MAX_ERROR = 0.35
# Number of matches for the first estimate of the geometry.
_SAMPLE = 1000
# Minimum inlier ratio and inlier density of a clear pair.
_CLEAR_SHARE, _CLEAR_TOGETHER = 0.35, 0.85
# Number of neighbors of a match in the measure of inlier density.
_NEIGHBORS = 8
# Maximum number of pairs from which a focal length is estimated.
_FOCAL_PAIRS = 60

# Cause for dropping a pair without a geometry of its own.
_FEW = "too few matches agree"


@dataclass(frozen=True, kw_only=True, eq=False)
class PairCheck:
    """State of a pair."""

    names: Names
    kept: bool = False
    # Cause for dropping the pair, a short phrase.
    cause: str = ""
    # The cause with numbers.
    reason: str = ""
    matches: int = 0
    inliers: int = 0
    # Inlier density: share of inliers among the neighbors of inliers.
    together: float = 0.0
    # Coverage: share of the area that both images should show in which the pair has inliers.
    cover: float = 1.0
    pair_score: float = 0.0
    # Number of inliers that cycles confirm.
    confirmed: int = 0
    contradicted: int = 0
    # Difference from the rotation that the other pairs imply.
    turn_deg: float | None = None
    # Whether only matches that cycles confirm are inliers.
    confirmed_only: bool = False
    # cam1_from_cam0 (3, 4).
    pose: FloatArray | None = None
    # One bit per match.
    flags: npt.NDArray[np.uint8] | None = None

    @property
    def share(self) -> float:
        """Inlier ratio."""
        return self.inliers / max(self.matches, 1)

    @property
    def clear(self) -> bool:
        """Whether the matches of the pair are clear enough by themselves."""
        return self.share >= _CLEAR_SHARE and self.together >= _CLEAR_TOGETHER and self.inliers >= FEWEST

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of pairs.json."""
        words = ("kept", "cause", "reason", "matches", "inliers", "confirmed", "contradicted", "confirmed_only")
        return {
            "name0": self.names[0],
            "name1": self.names[1],
            **{word: getattr(self, word) for word in words},
            "together": round(self.together, 3),
            "cover": round(self.cover, 3),
            "pair_score": round(self.pair_score, 6),
            "rotation_off_deg": None if self.turn_deg is None else round(self.turn_deg, 2),
        }

    def inlier_flags(self) -> BoolArray:
        """Return which matches of the pair are inliers."""
        if self.flags is None:
            return np.zeros(self.matches, dtype=bool)
        return np.unpackbits(self.flags, count=self.matches).astype(bool)


def load_pair(store: MatchStore, names: Names) -> Matches | None:
    """Return the matches of a pair, merged with those of the swapped pair, best first."""
    pair, other = store.get(*names), store.get(*names[::-1])
    if pair is None:
        return None
    if other is not None and len(other):
        other = other.swapped()
        pair = replace(
            pair,
            points0=np.concatenate([pair.points0, other.points0]),
            points1=np.concatenate([pair.points1, other.points1]),
            scores=np.concatenate([pair.scores, other.scores]),
        )
    return pair.top(len(pair))


def cell_px(matches: Matches, side: int) -> float:
    """Return the size of the matcher's fine cell in pixels of image `side`."""
    size = (matches.size0, matches.size1)[side]
    network = matches.info.get(f"network_size{side}", size)
    return FINE_STRIDE * max(size) / max(*network, 1)


class TwoViews:
    """Two-view geometries of the pairs of a store."""

    def __init__(self, store: MatchStore, pairs: Sequence[Names], cameras: Mapping[str, Camera]) -> None:
        # Cameras by image; `find_focals` replaces guessed focal lengths.
        self.cameras = dict(cameras)
        self._store, self._pairs = store, pairs
        # Those of recent pairs stay in memory.
        self.load, self.rays = lru_cache(CACHED)(self._load), lru_cache(CACHED)(self._rays)
        # Number of clear pairs with inliers in each cell of an image.
        self._seen: dict[str, Any] = {}

    def _load(self, names: Names) -> Matches:
        """Return the matches of a pair, as `load_pair` does."""
        found = load_pair(self._store, names)
        assert found is not None
        return found

    def _rays(self, names: Names) -> tuple[FloatArray, FloatArray]:
        """Return the rays (n, 3) of the matches of a pair in both images."""
        matches = self.load(names)
        return self.cameras[names[0]].rays(matches.points0), self.cameras[names[1]].rays(matches.points1)

    def _threshold_px(self, names: Names) -> float:
        matches = self.load(names)
        return _MAX_ERROR * (cell_px(matches, 0) + cell_px(matches, 1)) / 2

    def _threshold(self, names: Names) -> float:
        """Return the threshold relative to the focal length."""
        return self._threshold_px(names) * 2 / (self.cameras[names[0]].focal_px + self.cameras[names[1]].focal_px)

    def agreeing(self, names: Names, pose: FloatArray, most: float = 1.0) -> BoolArray:
        """Return which matches of a pair agree with a pose, within `most` thresholds."""
        rays0, rays1 = self.rays(names)
        distance = geometry.sampson_distance_px(geometry.essential_from_pose(pose), rays0[:, :2], rays1[:, :2])
        return distance <= most * self._threshold(names)

    def find_focals(self) -> None:
        """Replace guessed focal lengths by estimates from the pairs of images with the same guess."""
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name, camera in self.cameras.items():
            if camera.source.startswith("guess"):
                groups[camera.size].append(name)
        for size, names in groups.items():
            members = set(names)
            scored = [(self.load(pair).pair_score, pair) for pair in self._pairs if members >= set(pair)]
            fundamentals = []
            for _, pair in sorted(scored, reverse=True)[:_FOCAL_PAIRS]:
                fit = self._estimate(pair, _spread(len(self.load(pair)), _SAMPLE), "fundamental", _QUICK)
                if fit.matrix is not None and fit.inliers.mean() >= 0.5:
                    fundamentals.append(fit.matrix)
            focal_px = geometry.shared_focal_px(fundamentals, size)
            if focal_px is not None:
                for name in names:
                    self.cameras[name] = Camera.from_focal(size, focal_px, source=self.cameras[name].source)

    def estimate(self, names: Names) -> PairCheck:
        """Estimate the geometry of a pair from its own matches."""
        matches = self.load(names)
        check = PairCheck(names=names, matches=len(matches), pair_score=matches.pair_score)
        pose = self.fit(names, _spread(len(matches), _SAMPLE))
        if pose is None:
            return replace(check, cause=_FEW, reason="no geometry fits its matches")
        check = self.with_pose(check, pose)
        return replace(check, cause=_FEW, reason=f"{check.inliers} of its {check.matches} matches are inliers")

    def fit(self, names: Names, rows: Any, iterations: int = _QUICK) -> FloatArray | None:
        """Estimate the relative pose (3, 4) of a pair from these rows of its matches."""
        cameras = {"camera0": self.cameras[names[0]], "camera1": self.cameras[names[1]]}
        fit = self._estimate(names, rows, "essential", iterations, **cameras)
        return None if fit.pose is None else fit.pose.cam1_from_cam0

    def _estimate(self, names: Names, rows: Any, kind: EstimateKind, iterations: int, **cameras: Any) -> Estimate:
        chosen, threshold_px = self.load(names)[rows], self._threshold_px(names)
        return geometry.estimate(chosen, kind, threshold_px=threshold_px, max_iterations=iterations, **cameras)

    def fit_direction(self, names: Names, rows: Any, rotation: FloatArray) -> FloatArray | None:
        """Like `fit`, with a known rotation."""
        rays0, rays1 = self.rays(names)
        direction = geometry.estimate_direction(rays0[rows], rays1[rows], rotation, self._threshold(names))
        return None if direction is None else np.column_stack([rotation, direction])

    def with_pose(self, check: PairCheck, pose: FloatArray, most: float = 1.0) -> PairCheck:
        """Return the pair with this pose, and with the matches that agree with it as inliers."""
        flags = self.agreeing(check.names, pose, most)
        together = _together(self.load(check.names), flags)
        return replace(check, inliers=int(flags.sum()), together=together, pose=pose, flags=np.packbits(flags))

    def with_coverage(self, checks: Mapping[Names, PairCheck]) -> dict[Names, PairCheck]:
        """Measure the coverage of all pairs; inliers of clear pairs show which parts of an image can be matched."""
        for check in checks.values():
            if check.clear:
                for name, cells in zip(check.names, self._own_cells(check), strict=True):
                    self._seen[name] = self._seen.get(name, 0) + cells
        return {names: replace(check, cover=self._cover(check)) for names, check in checks.items()}

    def _own_cells(self, check: PairCheck) -> tuple[IntArray, IntArray]:
        kept = self.load(check.names)[check.inlier_flags()]
        return coverage.cells_of(kept.points0, kept.size0), coverage.cells_of(kept.points1, kept.size1)

    def _cover(self, check: PairCheck) -> float:
        """Return the coverage of a pair by its inliers."""
        if check.pose is None or check.inliers < FEWEST:
            return 0.0
        own = self._own_cells(check)
        # What the pair itself shows is no evidence for it.
        cells0, cells1 = (
            (self._seen.get(name, 0) - check.clear * cells) > 0 for name, cells in zip(check.names, own, strict=True)
        )
        kept = self.load(check.names)[check.inlier_flags()]
        camera0, camera1 = self.cameras[check.names[0]], self.cameras[check.names[1]]
        return coverage.cover(kept, check.pose, camera0, camera1, np.asarray(cells0), np.asarray(cells1))

    def look_closer(self, check: PairCheck) -> PairCheck:
        """Estimate the geometry again with more matches and iterations, and keep the result with more inliers."""
        pose = self.fit(check.names, _spread(check.matches, 2 * _SAMPLE), _THOROUGH)
        found = check if pose is None else self.with_pose(check, pose)
        return replace(found, cover=self._cover(found)) if found.inliers > check.inliers else check


def _spread(count: int, most: int) -> IntArray:
    """Return at most `most` of `count` rows, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _together(matches: Matches, flags: BoolArray) -> float:
    """Return the share of inliers among the neighbors of inliers, the lower one of both images."""
    from scipy.spatial import cKDTree

    count = min(_NEIGHBORS, len(matches) - 1)
    if count < 1 or not flags.any():
        return 0.0
    shares = []
    for points in (matches.points0, matches.points1):
        _, near = cKDTree(points).query(points[flags], k=count + 1)
        shares.append(float(flags[near[:, 1:]].mean()))
    return min(shares)
