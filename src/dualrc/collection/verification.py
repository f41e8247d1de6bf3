"""Verification of pairs: two-view geometry first, then consistency with the other pairs of the collection.

A dense matcher also finds hundreds of matches with a common epipolar geometry between images of different but similar
structures. Such a pair is inconsistent with the rest of the collection.

1. *Two views.* Each pair gets an essential matrix. Unknown focal lengths are estimated first, jointly from all pairs. A
   pair is trusted at once if a third of its matches are inliers that form dense regions in both images.
2. *Point cycles.* A chain of two trusted pairs over a third image confirms a match if it ends at the same point, and
   contradicts it if it ends elsewhere.
3. *Rotations.* Rotation averaging over the trusted pairs gives each image a rotation. A pair with few cycles must agree
   with these rotations.

Accepted pairs help to judge the remaining ones, until no decision changes. Each dropped pair has a reason.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dualrc import geometry
from dualrc.collection.progress import Progress, no_progress
from dualrc.collection.rotations import RotationGraph
from dualrc.collection.store import MatchStore, Names
from dualrc.geometry import Camera
from dualrc.matches import Matches
from dualrc.pixels import FINE_STRIDE
from dualrc.types import BoolArray, FloatArray

# Maximum epipolar error of an inlier, in fine cells of the matcher.
_MAX_ERROR = 0.35
# Number of matches for the first estimate of the geometry.
_SAMPLE = 1000
# RANSAC iterations for a pair with a high inlier ratio, and for a pair with a low one.
_QUICK, _THOROUGH = 300, 2000
# Minimum number of inliers, and minimum number of cycles for a decision.
_FEWEST = 30
# Minimum inlier ratio and inlier density of a pair that needs no confirmation.
_SURE_SHARE, _SURE_TOGETHER = 0.35, 0.85
# Minimum inlier density of a pair that may confirm others.
_TRUSTED_TOGETHER = 0.8
# Minimum inlier ratio and inlier density of the only pair that connects two components.
_ALONE_SHARE, _ALONE_TOGETHER = 0.1, 0.8
# Minimum share of confirmed matches, for a pair of which only confirmed matches are used.
_LEAST_CONFIRMED = 0.025
# Number of neighbors of a match in the measure of inlier density.
_NEIGHBORS = 8
# Minimum share of inliers that cycles confirm.
_CONFIRMED = 0.3
# Maximum number of third images per pair.
_BETWEEN = 6
# Maximum distance between a point and the match that transfers it, in fine cells.
_REACH = 1.0
# Maximum distance between the ends of a cycle, in fine cells.
_SAME = 2.0
# Maximum difference between the rotation of a pair and the averaged rotations.
_MAX_TURN_DEG = 10.0
# Maximum number of pairs from which a focal length is estimated.
_FOCAL_PAIRS = 60
# Number of pairs whose matches stay in memory.
_CACHED = 64

# Causes for dropping a pair.
_FEW = "too few matches agree"
_ELSEWHERE = "other pairs contradict its matches"
_TURNED = "other pairs contradict its rotation"
_UNCONFIRMED = "other pairs do not confirm it"
_WEAK = "too weak without other pairs"


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

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of pairs.json."""
        words = ("kept", "cause", "reason", "matches", "inliers", "confirmed", "contradicted", "confirmed_only")
        return {
            "name0": self.names[0],
            "name1": self.names[1],
            **{word: getattr(self, word) for word in words},
            "together": round(self.together, 3),
            "pair_score": round(self.pair_score, 6),
            "rotation_off_deg": None if self.turn_deg is None else round(self.turn_deg, 2),
        }

    def inlier_flags(self) -> BoolArray:
        """Return which matches of the pair are inliers."""
        if self.flags is None:
            return np.zeros(self.matches, dtype=bool)
        return np.unpackbits(self.flags, count=self.matches).astype(bool)


@dataclass(frozen=True, kw_only=True, eq=False)
class Verification:
    """Result of verification for all pairs."""

    checks: dict[Names, PairCheck]
    # Cameras used; unknown focal lengths are replaced by estimates where these are reliable.
    cameras: dict[str, Camera]

    @property
    def kept(self) -> list[PairCheck]:
        """Verified pairs."""
        return [check for check in self.checks.values() if check.kept]

    @property
    def dropped(self) -> list[PairCheck]:
        """Pairs that were dropped, with their reasons."""
        return [check for check in self.checks.values() if not check.kept]

    def summary(self) -> "VerificationSummary":
        """Return the number of verified pairs, and of dropped pairs by cause."""
        causes = Counter(check.cause for check in self.dropped)
        return VerificationSummary(pairs=len(self.checks), kept=len(self.kept), dropped=dict(causes.most_common()))


@dataclass(frozen=True, kw_only=True)
class VerificationSummary:
    """Numbers of verified and dropped pairs."""

    pairs: int
    kept: int
    # Number of pairs by cause.
    dropped: dict[str, int]


def verify_pairs(
    store: MatchStore, pairs: Iterable[Names], cameras: Mapping[str, Camera], progress: Progress = no_progress
) -> Verification:
    """Verify pairs of a store, each given once; the cameras need no poses."""
    return _Verifier(store, list(pairs), cameras, progress).run()


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


class _Verifier:
    """State of the verification."""

    def __init__(
        self, store: MatchStore, pairs: Sequence[Names], cameras: Mapping[str, Camera], progress: Progress
    ) -> None:
        self._store, self._pairs, self._cameras, self._progress = store, pairs, dict(cameras), progress
        self._checks: dict[Names, PairCheck] = {}
        # Trusted pairs by image and partner.
        self._trusted: dict[str, dict[str, Names]] = defaultdict(dict)
        self._matches: OrderedDict[Names, Matches] = OrderedDict()
        # Pairs whose geometry was estimated twice.
        self._thorough: set[Names] = set()
        # Third images that were used for the last decision on each pair.
        self._asked: dict[Names, Any] = {}
        self._trees: OrderedDict[tuple[Names, int], Any] = OrderedDict()

    def run(self) -> Verification:
        """Verify all pairs."""
        self._find_focals()
        for count, names in enumerate(self._pairs, start=1):
            self._checks[names] = self._two_views(names)
            self._progress("Verifying pairs", count, len(self._pairs))
        for check in self._checks.values():
            if check.share >= _SURE_SHARE and check.together >= _SURE_TOGETHER and check.inliers >= _FEWEST:
                self._trust(check)
        self._recheck_sure()
        while self._judge_open() or self._join_components():
            pass
        return Verification(checks=self._checks, cameras=self._cameras)

    # Two-view geometry

    def _load(self, names: Names) -> Matches:
        if names not in self._matches:
            found = load_pair(self._store, names)
            assert found is not None
            self._matches[names] = found
            if len(self._matches) > _CACHED:
                self._matches.popitem(last=False)
        self._matches.move_to_end(names)
        return self._matches[names]

    def _threshold_px(self, matches: Matches) -> float:
        return _MAX_ERROR * (cell_px(matches, 0) + cell_px(matches, 1)) / 2

    def _find_focals(self) -> None:
        """Replace guessed focal lengths by estimates from the pairs of images with the same guess."""
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for name, camera in self._cameras.items():
            if camera.source.startswith("guess"):
                groups[camera.size].append(name)
        for size, names in groups.items():
            members = set(names)
            scored = [(self._load(pair).pair_score, pair) for pair in self._pairs if members >= set(pair)]
            fundamentals = []
            for _, pair in sorted(scored, reverse=True)[:_FOCAL_PAIRS]:
                matches = self._load(pair)
                fit = geometry.estimate(
                    matches[_spread(len(matches), _SAMPLE)],
                    "fundamental",
                    threshold_px=self._threshold_px(matches),
                    max_iterations=_QUICK,
                )
                if fit.matrix is not None and fit.inliers.mean() >= 0.5:
                    fundamentals.append(fit.matrix)
            focal_px = geometry.shared_focal_px(fundamentals, size)
            if focal_px is not None:
                for name in names:
                    self._cameras[name] = Camera.from_focal(size, focal_px, source=self._cameras[name].source)

    def _two_views(self, names: Names) -> PairCheck:
        """Estimate the geometry of a pair from its own matches."""
        matches = self._load(names)
        check = PairCheck(names=names, matches=len(matches), pair_score=matches.pair_score)
        fit = self._fit(names, matches, _spread(len(matches), _SAMPLE), _QUICK)
        if fit is None:
            return replace(check, cause=_FEW, reason="no geometry fits its matches")
        check = self._with_fit(check, matches, *fit)
        return replace(check, cause=_FEW, reason=f"{check.inliers} of its {check.matches} matches are inliers")

    def _fit(self, names: Names, matches: Matches, rows: Any, iterations: int) -> tuple[FloatArray, BoolArray] | None:
        """Estimate the relative pose from these rows, and return it with its inliers among all matches."""
        camera0, camera1 = self._cameras[names[0]], self._cameras[names[1]]
        threshold_px = self._threshold_px(matches)
        fit = geometry.estimate(
            matches[rows],
            "essential",
            camera0=camera0,
            camera1=camera1,
            threshold_px=threshold_px,
            max_iterations=iterations,
        )
        if fit.pose is None:
            return None
        pose = fit.pose.cam1_from_cam0
        rays0, rays1 = camera0.rays(matches.points0)[:, :2], camera1.rays(matches.points1)[:, :2]
        distance = geometry.sampson_distance_px(geometry.essential_from_pose(pose), rays0, rays1)
        agree: BoolArray = distance * (camera0.focal_px + camera1.focal_px) / 2 <= threshold_px
        return pose, agree

    def _with_fit(self, check: PairCheck, matches: Matches, pose: FloatArray, flags: BoolArray) -> PairCheck:
        return replace(
            check,
            inliers=int(flags.sum()),
            together=_together(matches, flags),
            pose=pose,
            flags=np.packbits(flags),
        )

    # Consistency with other pairs

    def _trust(self, check: PairCheck) -> None:
        """Accept a pair, and use it to judge others."""
        name0, name1 = check.names
        self._checks[check.names] = replace(check, kept=True, cause="", reason="")
        if not check.confirmed_only:
            self._trusted[name0][name1] = self._trusted[name1][name0] = check.names

    def _distrust(self, check: PairCheck) -> None:
        name0, name1 = check.names
        self._checks[check.names] = replace(check, kept=False)
        self._trusted[name0].pop(name1, None)
        self._trusted[name1].pop(name0, None)

    def _carry(self, points: FloatArray, start: str, end: str) -> FloatArray:
        """Transfer points (n, 2) to another image along a trusted pair; NaN where no match is near."""
        from scipy.spatial import cKDTree

        names = self._trusted[start][end]
        side = names.index(start)
        if (names, side) not in self._trees:
            kept = self._load(names)[self._checks[names].inlier_flags()]
            here, there = (kept.points0, kept.points1)[:: 1 - 2 * side]
            self._trees[names, side] = cKDTree(here), here, there, _REACH * cell_px(kept, side)
            if len(self._trees) > 2 * _CACHED:
                self._trees.popitem(last=False)
        self._trees.move_to_end((names, side))
        tree, here, there, reach = self._trees[names, side]
        known = np.isfinite(points).all(1)
        result = np.full(points.shape, np.nan)
        distance, index = tree.query(points[known], distance_upper_bound=reach)
        near = np.isfinite(distance)
        rows = np.flatnonzero(known)[near]
        result[rows] = there[index[near]] + (points[rows] - here[index[near]])
        return result

    def _third_images(self, names: Names) -> list[str]:
        """Return the images that have trusted pairs with both, best first."""
        name0, name1 = names
        between = self._trusted[name0].keys() & self._trusted[name1].keys()
        weight = {name: min(self._checks[self._trusted[end][name]].inliers for end in names) for name in between}
        return sorted(between, key=lambda name: (-weight[name], name))[:_BETWEEN]

    def _cycles(self, names: Names, matches: Matches) -> tuple[BoolArray, BoolArray]:
        """Return which matches the cycles over third images confirm, and which they contradict."""
        name0, name1 = names
        yes, no = np.zeros(len(matches), np.int64), np.zeros(len(matches), np.int64)
        tolerance = _SAME * cell_px(matches, 1)
        for name in self._third_images(names):
            ends = self._carry(self._carry(matches.points0.astype(np.float64), name0, name), name, name1)
            apart = np.linalg.norm(ends - matches.points1, axis=1)
            yes += apart <= tolerance
            no += apart > tolerance
        return (yes > 0) & (yes >= no), no > yes

    def _recheck_sure(self) -> None:
        """Drop trusted pairs that the others contradict by cycles, the weakest first, or by rotations."""
        for check in sorted(self._kept(), key=_strength):
            self._distrust(check)
            yes, no = self._cycles(check.names, self._load(check.names))
            asked = _with_votes(check, yes, no, None)
            if asked.contradicted >= _FEWEST and asked.contradicted > asked.confirmed:
                self._checks[check.names] = replace(asked, kept=False, cause=_ELSEWHERE, reason=_elsewhere(asked))
            else:
                self._trust(asked)
        graph = self._rotations()
        for check in self._kept():
            turned = _with_turn(check, graph.between(*check.names))
            if (turned.turn_deg or 0) > _MAX_TURN_DEG and check.confirmed < _CONFIRMED * check.inliers:
                self._distrust(turned)

    def _kept(self) -> list[PairCheck]:
        return [check for check in self._checks.values() if check.kept]

    def _rotations(self) -> RotationGraph:
        return RotationGraph(
            {check.names: (check.pose[:, :3], _strength(check)) for check in self._kept() if check.pose is not None}
        )

    def _judge_open(self) -> bool:
        """Judge the pairs that are not kept, the strongest first; return whether any was accepted."""
        graph, changed = self._rotations(), False
        todo = [check for check in self._checks.values() if not check.kept and check.matches >= _FEWEST]
        for count, check in enumerate(sorted(todo, key=_strength, reverse=True), start=1):
            asked = (self._third_images(check.names), graph.between(*check.names) is None)
            if self._asked.get(check.names) == asked:
                continue
            self._asked[check.names] = asked
            judged = self._judge(check, graph)
            self._checks[check.names] = judged
            if judged.kept:
                self._trust(judged)
                changed = True
            self._progress("Comparing pairs", count, len(todo))
        return changed

    def _judge(self, check: PairCheck, graph: RotationGraph) -> PairCheck:
        """Judge a pair; it is kept if its rotation and its matches agree with the trusted pairs."""
        matches, wanted = self._load(check.names), graph.between(*check.names)
        yes, no = self._cycles(check.names, matches)
        check = _with_votes(check, yes, no, wanted)
        if check.together >= _TRUSTED_TOGETHER and _agrees(check) and check.confirmed >= _CONFIRMED * check.inliers:
            return replace(check, kept=True)
        fits = []
        if yes.sum() >= _FEWEST:
            fits.append(self._fit(check.names, matches, np.flatnonzero(yes), _QUICK))
            if wanted is not None:
                fits.append(self._fit_direction(check.names, matches, np.flatnonzero(yes), wanted))
        found = [_with_votes(self._with_fit(check, matches, *fit), yes, no, wanted) for fit in fits if fit is not None]
        least = _LEAST_CONFIRMED * check.matches
        found = [again for again in (check, *found) if _agrees(again) and again.confirmed >= least]
        if found:
            # The other inliers may agree by chance, so only confirmed matches are used.
            best = max(found, key=lambda again: again.confirmed)
            flags = best.inlier_flags() & yes
            return replace(best, inliers=best.confirmed, flags=np.packbits(flags), confirmed_only=True, kept=True)
        if check.turn_deg is not None and check.turn_deg > _MAX_TURN_DEG:
            turned = f"its rotation differs by {check.turn_deg:.0f} degrees from the other pairs"
            return replace(check, cause=_TURNED, reason=turned)
        if check.contradicted >= _FEWEST:
            return replace(check, cause=_ELSEWHERE, reason=_elsewhere(check))
        return replace(
            check, cause=_UNCONFIRMED, reason=f"other pairs confirm {check.confirmed} of its {check.inliers} matches"
        )

    def _fit_direction(
        self, names: Names, matches: Matches, rows: Any, rotation: FloatArray
    ) -> tuple[FloatArray, BoolArray] | None:
        """Like `_fit`, with a known rotation."""
        camera0, camera1 = self._cameras[names[0]], self._cameras[names[1]]
        threshold_px = self._threshold_px(matches)
        scale = threshold_px * 2 / (camera0.focal_px + camera1.focal_px)
        rays0, rays1 = camera0.rays(matches.points0), camera1.rays(matches.points1)
        direction = geometry.estimate_direction(rays0[rows], rays1[rows], rotation, scale)
        if direction is None:
            return None
        pose = np.column_stack([rotation, direction])
        return pose, geometry.sampson_distance_px(
            geometry.essential_from_pose(pose), rays0[:, :2], rays1[:, :2]
        ) <= scale

    def _join_components(self) -> bool:
        """Accept the strongest pair between two components, if it is good enough by itself; return whether any was."""
        graph = self._rotations()
        best = None
        for names, check in self._checks.items():
            if check.kept or check.matches < _FEWEST or graph.between(*names) is not None:
                continue
            if names not in self._thorough:
                self._thorough.add(names)
                self._checks[names] = self._look_closer(check)
            closer = self._checks[names]
            enough = closer.inliers >= max(_FEWEST, _ALONE_SHARE * closer.matches)
            if enough and closer.together >= _ALONE_TOGETHER and closer.contradicted <= closer.confirmed:
                best = closer if best is None or _strength(closer) > _strength(best) else best
            else:
                agree = f"{closer.inliers} of its {closer.matches} matches are inliers"
                around = (
                    f"{closer.together:.0%} of the matches around them are too, and no other pair connects the images"
                )
                self._checks[names] = replace(closer, cause=_WEAK, reason=f"{agree}, {around}")
        if best is None:
            return False
        self._trust(best)
        return True

    def _look_closer(self, check: PairCheck) -> PairCheck:
        """Estimate the geometry again with more matches and iterations, and keep the result with more inliers."""
        matches = self._load(check.names)
        fit = self._fit(check.names, matches, _spread(len(matches), 2 * _SAMPLE), _THOROUGH)
        if fit is None or fit[1].sum() <= check.inliers:
            return check
        return self._with_fit(check, matches, *fit)


def _spread(count: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most `most` of `count` rows, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _with_votes(check: PairCheck, yes: BoolArray, no: BoolArray, rotation: FloatArray | None) -> PairCheck:
    flags = check.inlier_flags()
    asked = replace(check, confirmed=int((yes & flags).sum()), contradicted=int((no & flags).sum()))
    return _with_turn(asked, rotation)


def _with_turn(check: PairCheck, rotation: FloatArray | None) -> PairCheck:
    if rotation is None or check.pose is None:
        return replace(check, turn_deg=None)
    return replace(check, turn_deg=geometry.rotation_error_deg(check.pose[:, :3], rotation))


def _elsewhere(check: PairCheck) -> str:
    return f"other pairs transfer {check.contradicted} of {check.confirmed + check.contradicted} matches elsewhere"


def _agrees(check: PairCheck) -> bool:
    """Return whether the other pairs support a pair."""
    if check.turn_deg is not None and check.turn_deg > _MAX_TURN_DEG:
        return False
    return check.confirmed >= _FEWEST and check.confirmed >= 2 * check.contradicted


def _strength(check: PairCheck) -> float:
    """Return the strength of a pair before it is compared with others."""
    return check.inliers * check.together * max(check.pair_score, 0.01) ** 0.5


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
