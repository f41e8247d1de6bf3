"""Keypoints of a collection, shared by the matches of all pairs.

The matcher returns different points for every pair. Keypoints are the cluster centers of all matched points of an
image. The local affine motion around a match predicts the position of one image's keypoint in the other image. A few
sweeps over the images move each keypoint to the mean of its predictions. Matches that would join two keypoints of an
image to one track are dropped, and the last sweeps use the other ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dualrc import geometry
from dualrc.collection.progress import Progress, no_progress
from dualrc.collection.store import MatchStore, Names
from dualrc.collection.tracks import Tracks
from dualrc.collection.two_view_geometry import cell_px, load_pair
from dualrc.config import check_bounds
from dualrc.errors import DataError
from dualrc.extras import require
from dualrc.matches import Matches
from dualrc.types import BoolArray, FloatArray, IntArray, Size

# Maximum number of matches from which the epipolar geometry of a pair is estimated.
_SAMPLE = 2000
_ITERATIONS = 5000
# Clustering ends after this number of rounds, or when all but this share of the matches has a cluster.
_ROUNDS, _LOSS = 8, 0.005
# Weight added to every match, so that matches with score 0 count too.
_LEAST = 1e-6
# Density bins per radius.
_BINS = 4
# Histogram of displacements: bins per pixel, and range in pixels.
_PER_PX, _LARGEST_MOVE = 100, 100
# Number of matches from which the local motion of a match is estimated, including itself.
_NEIGHBORS = 9
# Residual of a neighbor at which its weight is one half, relative to the distance between neighbors.
_STRAY = 0.25
# Weight of the identity in the fit of the local motion, in neighbors.
_PRIOR = 0.5
# Maximum distance between a keypoint and its prediction by a match, in radii.
_PAST = 0.35
# Number of sweeps that use only the matches within tracks.
_LAST_SWEEPS = 2
# Number of pairs whose matches stay in memory; a pair takes at most half a megabyte.
_IN_MEMORY = 2000


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Settings of merging matches to keypoints."""

    # Matches within this distance of a keypoint belong to it, in fine cells of the matcher.
    radius: float = 0.5
    # Maximum epipolar error of a match, in fine cells; matches with larger errors are dropped.
    max_error: float = 0.35
    # Number of sweeps that move each keypoint to the mean of the predictions of its matches, before tracks are formed.
    # Without any, keypoints stay at the cluster centers, and no tracks are formed.
    sweeps: int = 3

    def __post_init__(self) -> None:
        check_bounds(self, "radius", "max_error", above=0, at_most=2)
        check_bounds(self, "sweeps", at_least=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Keypoints:
    """The keypoints of one image, in pixels of the upright image."""

    # (k, 2) float32.
    points: FloatArray
    # (k,) float32, sum of the scores of the supporting matches.
    scores: FloatArray
    size: Size
    # (k, 2) float64, cluster centers; matches within the radius belong to the cluster.
    centers: FloatArray
    radius_px: float

    def __len__(self) -> int:
        return len(self.points)


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedMatches:
    """Matches of a pair as keypoint indices, one-to-one, best first."""

    # (n, 2).
    indices: IntArray
    # (n,).
    scores: FloatArray
    # (n,), rows of these matches in the matches of the pair.
    rows: IntArray


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of merging."""

    # Number of keypoints of all images.
    keypoints: int
    # Number of matches of all pairs, after merging.
    matches: int
    # Mean number of images in which a keypoint is seen.
    images_per_keypoint: float
    # Distance between the points of the matches and their keypoints.
    moved_median_px: float
    # 95th percentile of that distance.
    moved_95_px: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Prepared:
    """Matches of a pair between clusters, with their local motion."""

    found: IndexedMatches
    # (n, 2) each, points of the matches.
    points: tuple[FloatArray, FloatArray]
    # (n, 2, 2) each, Jacobians of the motion from the other image to image 0, and to image 1.
    motions: tuple[FloatArray, FloatArray]

    def carried(self, side: int, theirs: Keypoints) -> FloatArray:
        """Return the positions (n, 2) in image `side` that the matches predict for the keypoints of the other image."""
        apart = theirs.points[self.found.indices[:, 1 - side]].astype(np.float64) - self.points[1 - side]
        return self.points[side] + np.einsum("nij,nj->ni", self.motions[side], apart)

    def residuals(self, keypoints0: Keypoints, keypoints1: Keypoints) -> FloatArray:
        """Return the distances (n,) between the keypoints of image 1 and their predictions from image 0."""
        there = keypoints1.points[self.found.indices[:, 1]]
        return np.linalg.norm(self.carried(1, keypoints0) - there, axis=1)


class MergedMatches:
    """Keypoints of all images of a store, and the matches between them; made by `merge`."""

    def __init__(
        self,
        store: MatchStore,
        config: MergeConfig,
        wanted: Iterable[Names],
        inliers: Mapping[Names, BoolArray] | None = None,
    ) -> None:
        self.config = config
        self.keypoints: dict[str, Keypoints] = {}
        self._store = store
        # One bit per match, best match first.
        self._verified = {names: np.packbits(flags) for names, flags in (inliers or {}).items()}
        # Those of recent pairs stay in memory.
        self._prepare = lru_cache(_IN_MEMORY)(self._prepare_pair)
        # Which matches between clusters are within a track, packed like the above.
        self._linked: dict[Names, npt.NDArray[np.uint8]] = {}
        self.pairs = store.usable(wanted)

    def indexed(self, name0: str, name1: str) -> IndexedMatches:
        """Return the matches of a pair as keypoint indices, without matches that miss their keypoint or its track."""
        names = name0, name1
        found = self._prepare(names).found
        if names not in self._linked:
            return found
        kept = self.linked(names) & self._near(names)
        return IndexedMatches(indices=found.indices[kept], scores=found.scores[kept], rows=found.rows[kept])

    def linked(self, names: Names) -> BoolArray:
        """Return which matches between clusters are within a track; all of them before tracks are formed."""
        count = len(self._prepare(names).found.rows)
        if names not in self._linked:
            return np.ones(count, dtype=bool)
        return np.unpackbits(self._linked[names], count=count).astype(bool)

    def link(self) -> None:
        """Form tracks with at most one keypoint per image from the matches that do not miss their keypoint."""
        tracks = Tracks({name: len(keypoints) for name, keypoints in self.keypoints.items()})
        pairs = sorted(self.pairs, key=lambda names: len(self._prepare(names).found.rows), reverse=True)
        # The most exact matches first, because a wrong one can keep two parts of a track apart.
        for past in (_PAST / 2, _PAST):
            for names in pairs:
                linked = self._near(names, past)
                linked[linked] = tracks.join(*names, self._prepare(names).found.indices[linked])
                self._linked[names] = np.packbits(linked)

    def _near(self, names: Names, past: float = _PAST) -> BoolArray:
        """Return which matches between clusters predict the position of their keypoint, within `past` radii."""
        keypoints0, keypoints1 = self.keypoints[names[0]], self.keypoints[names[1]]
        return self._prepare(names).residuals(keypoints0, keypoints1) <= past * keypoints1.radius_px

    def statistics(self) -> Statistics:
        """Return how many matches share keypoints, and how far the points of the matches are from their keypoints."""
        counts, matches = np.zeros(_LARGEST_MOVE * _PER_PX, np.int64), 0
        for names in self.pairs:
            pair = self._load(names)
            found = self.indexed(*names)
            matches += len(found.rows)
            for side, points in enumerate((pair.points0, pair.points1)):
                keypoints = self.keypoints[names[side]].points[found.indices[:, side]]
                moved = np.linalg.norm(points[found.rows] - keypoints, axis=1) * _PER_PX
                counts += np.bincount(np.minimum(moved.astype(np.int64), len(counts) - 1), minlength=len(counts))
        keypoints_in_all = sum(len(keypoints) for keypoints in self.keypoints.values())
        share = np.cumsum(counts) / max(counts.sum(), 1)
        median, most = ((int(np.searchsorted(share, level)) + 0.5) / _PER_PX for level in (0.5, 0.95))
        return Statistics(
            keypoints=keypoints_in_all,
            matches=matches,
            images_per_keypoint=1 + 2 * matches / max(keypoints_in_all, 1),
            moved_median_px=median,
            moved_95_px=most,
        )

    def _load(self, names: Names) -> Matches:
        """Return the matches of a pair that agree with its epipolar geometry, best first."""
        pair = load_pair(self._store, names)
        if pair is None:
            raise DataError(f"The pair {names[0]}, {names[1]} is not in the store; match it first.")
        if names not in self._verified:
            self._verified[names] = np.packbits(_verify(pair, self.config.max_error))
        return pair[np.unpackbits(self._verified[names], count=len(pair)).astype(bool)]

    def _prepare_pair(self, names: Names) -> _Prepared:
        """Return at most one match for each cluster of either image, better matches first, and their local motion."""
        matches = self._load(names)
        index0 = _nearest(matches.points0, self.keypoints[names[0]])
        index1 = _nearest(matches.points1, self.keypoints[names[1]])
        rows = np.flatnonzero((index0 >= 0) & (index1 >= 0))
        for index in (index0, index1):
            rows = rows[np.sort(np.unique(index[rows], return_index=True)[1])]
        indices = np.stack([index0[rows], index1[rows]], axis=1)
        points0, points1 = matches.points0.astype(np.float64), matches.points1.astype(np.float64)
        return _Prepared(
            found=IndexedMatches(indices=indices, scores=matches.scores[rows], rows=rows),
            points=(points0[rows], points1[rows]),
            motions=(_local_motion(points1, points0, rows), _local_motion(points0, points1, rows)),
        )


def merge(
    store: MatchStore,
    config: MergeConfig | None = None,
    progress: Progress = no_progress,
    *,
    pairs: Iterable[Names] | None = None,
    inliers: Mapping[Names, BoolArray] | None = None,
) -> MergedMatches:
    """Find the keypoints that the matches of these pairs share; without `pairs`, of all pairs in the store.

    The store must stay open. Pairs that failed or are not in the store are left out.
    `inliers`: for each pair, which of its matches, in the order of `load_pair`, agree with its geometry. Without it, a
    fundamental matrix is fitted.
    """
    require("scipy", "colmap", "Keypoints of a collection")
    merged = MergedMatches(store, config or MergeConfig(), store.names() if pairs is None else pairs, inliers)
    partners: dict[str, list[Names]] = defaultdict(list)
    for names in merged.pairs:
        for name in names:
            partners[name].append(names)
    for count, (name, its_pairs) in enumerate(partners.items()):
        merged.keypoints[name] = _gather(merged, name, its_pairs)
        progress("Finding keypoints", count + 1, len(partners))
    sweeps = merged.config.sweeps and merged.config.sweeps + _LAST_SWEEPS
    total = sweeps * len(partners)
    for sweep in range(sweeps):
        if sweep == merged.config.sweeps:
            merged.link()
        for count, (name, its_pairs) in enumerate(partners.items()):
            merged.keypoints[name] = _place(merged, name, its_pairs)
            progress("Placing keypoints", sweep * len(partners) + count + 1, total)
    return merged


def _verify(matches: Matches, max_error: float) -> BoolArray:
    """Return which matches agree with the dominant epipolar geometry."""
    threshold_px = max_error * (cell_px(matches, 0) + cell_px(matches, 1)) / 2
    # The best matches determine the geometry as well as all matches, in less time.
    sample = matches.top(_SAMPLE)
    fit = geometry.estimate(sample, "fundamental", threshold_px=threshold_px, max_iterations=_ITERATIONS)
    if fit.matrix is None:
        return np.zeros(len(matches), dtype=bool)
    distance = geometry.sampson_distance_px(fit.matrix, matches.points0, matches.points1)
    # The comparison is false for NaN.
    return distance <= threshold_px


def _gather(merged: MergedMatches, name: str, pairs: Iterable[Names]) -> Keypoints:
    """Return the clusters of the matched points of an image."""
    points, scores, size, cells = [], [], (0, 0), []
    for names in pairs:
        side = names.index(name)
        matches = merged._load(names)
        points.append((matches.points0, matches.points1)[side])
        scores.append(matches.scores)
        size = (matches.size0, matches.size1)[side]
        cells.append(cell_px(matches, side))
    radius = merged.config.radius * float(np.median(cells))
    places, weights = np.concatenate(points).astype(np.float64), np.concatenate(scores).astype(np.float64)
    centers = _cluster(places, weights, radius)
    found = Keypoints(
        points=centers.astype(np.float32), scores=np.zeros(0), size=size, centers=centers, radius_px=radius
    )
    index = _nearest(places, found)
    support = np.bincount(index[index >= 0], weights[index >= 0], minlength=len(centers))
    return replace(found, scores=support.astype(np.float32))


def _cluster(points: FloatArray, weights: FloatArray, radius: float) -> FloatArray:
    """Return cluster centers: density peaks of the points, then density peaks of the points without a cluster, etc."""
    centers: FloatArray = np.zeros((0, 2))
    left = np.arange(len(points))
    for _ in range(_ROUNDS):
        if len(left) <= _LOSS * len(points):
            break
        peaks = _peaks(points[left], weights[left], radius)
        centers = np.concatenate([centers, peaks])
        left = left[_nearest_within(points[left], peaks, radius) < 0]
    for _ in range(2):
        centers = _robust_means(points, weights, _nearest_within(points, centers, radius), centers, radius / 2)
    return centers


def _peaks(points: FloatArray, weights: FloatArray, radius: float) -> FloatArray:
    """Return the positions where the weighted density of the points is highest within the radius."""
    from scipy.ndimage import gaussian_filter, maximum_filter

    step = radius / _BINS
    origin = points.min(0)
    column, row = np.floor((points - origin) / step).astype(np.int64).T
    shape = (int(row.max()) + 1, int(column.max()) + 1)
    bins = np.ravel_multi_index((row, column), shape)
    density = np.bincount(bins, weights + _LEAST, minlength=shape[0] * shape[1]).reshape(shape)
    density = gaussian_filter(density, _BINS / 2, truncate=2.5, mode="constant")
    # Random noise breaks ties; broken by order, a row of equal bins would have only one peak, at its start.
    density *= 1 + 1e-9 * np.random.default_rng(0).random(shape)
    peak = (density == maximum_filter(density, size=2 * _BINS + 1, mode="constant")) & (density > _LEAST / 100)
    return np.argwhere(peak)[:, ::-1] * step + step / 2 + origin


def _place(merged: MergedMatches, name: str, pairs: Iterable[Names]) -> Keypoints:
    """Return the keypoints of an image, moved to the predictions from the keypoints of the other images."""
    mine = merged.keypoints[name]
    places, weights, owners = [], [], []
    for names in pairs:
        side, pair, linked = names.index(name), merged._prepare(names), merged.linked(names)
        places.append(pair.carried(side, merged.keypoints[names[1 - side]])[linked])
        weights.append(pair.found.scores[linked].astype(np.float64))
        owners.append(pair.found.indices[linked, side])
    points, owner = np.concatenate(places), np.concatenate(owners)
    near = np.linalg.norm(points - mine.centers[owner], axis=1) < 2 * mine.radius_px
    owner = np.where(near, owner, -1)
    start = mine.points.astype(np.float64)
    means = _robust_means(points, np.concatenate(weights), owner, start, mine.radius_px / 4)
    return replace(mine, points=means.astype(np.float32))


def _local_motion(source: FloatArray, target: FloatArray, rows: IntArray) -> FloatArray:
    """Return the Jacobians (n, 2, 2) of the motion from source to target points around the given rows."""
    from scipy.spatial import cKDTree

    count = min(_NEIGHBORS, len(source))
    if count < 2:
        return np.tile(np.eye(2), (len(rows), 1, 1))
    _, near = cKDTree(source).query(source[rows], k=count)
    # (n, k, 2).
    before, after = source[near] - source[rows, None], target[near] - target[rows, None]
    reach = float(np.median(np.linalg.norm(before[:, 1:], axis=2))) + 1e-9
    weight = np.ones(near.shape)
    jacobian = np.tile(np.eye(2), (len(rows), 1, 1))
    # The prior stands for neighbors that move without a change of shape; it matters if there are few real neighbors.
    prior = _PRIOR * reach**2 * np.eye(2)
    for _ in range(2):
        # (n, 2, k).
        weighted = (before * weight[:, :, None]).swapaxes(1, 2)
        jacobian = ((weighted @ after).swapaxes(1, 2) + prior) @ np.linalg.inv(weighted @ before + prior)
        # Neighbors that move differently lie on another surface or are wrong.
        stray = np.linalg.norm(after - before @ jacobian.swapaxes(1, 2), axis=2)
        weight = 1 / (1 + (stray / (_STRAY * reach)) ** 2)
    return jacobian


def _robust_means(
    points: FloatArray, weights: FloatArray, owner: IntArray, start: FloatArray, scale: float
) -> FloatArray:
    """Return robust weighted means of the points of each owner, and `start` for owners without points."""
    rows = owner >= 0
    points, weights, owner = points[rows], weights[rows] + _LEAST, owner[rows]
    means = start
    for step in range(3):
        far = np.linalg.norm(points - means[owner], axis=1) / scale
        weight = weights if step == 0 else weights / (1 + far**2)
        total = np.bincount(owner, weight, minlength=len(start))
        sums = [np.bincount(owner, weight * points[:, axis], minlength=len(start)) for axis in (0, 1)]
        means = np.where(total[:, None] > 0, np.stack(sums, axis=1) / np.maximum(total, 1e-30)[:, None], start)
    return means


def _nearest(points: FloatArray, keypoints: Keypoints) -> IntArray:
    """Return the index of the keypoint that each point belongs to, or -1."""
    return _nearest_within(points, keypoints.centers, keypoints.radius_px)


def _nearest_within(points: FloatArray, centers: FloatArray, radius: float) -> IntArray:
    from scipy.spatial import cKDTree

    if not len(centers) or not len(points):
        return np.full(len(points), -1, np.int64)
    _, index = cKDTree(centers).query(points, distance_upper_bound=radius)
    return np.where(index < len(centers), index, -1)
