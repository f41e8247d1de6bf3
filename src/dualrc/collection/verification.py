"""Verification of pairs: two-view geometry first, then consistency with the other pairs of the collection.

A dense matcher also finds hundreds of matches with a common epipolar geometry between images of different but similar
structures. Such a pair is inconsistent with the rest of the collection.

1. *Two views.* Each pair gets an essential matrix from its own matches, and may be clear by itself: see
   `two_view_geometry`.
2. *Coverage.* A clear pair is trusted at once if its inliers cover the area that both images should show, as far as
   other clear pairs have inliers there.
3. *Point cycles.* A chain of two trusted pairs over a third image confirms a match if it ends at the same point, and
   contradicts it if it ends elsewhere.
4. *Rotations.* Rotation averaging over the trusted pairs gives each image a rotation. A pair with few cycles must agree
   with these rotations.
5. *Poses over third images.* Two trusted pairs also give the relative pose of a third one. If cycles confirm only some
   matches of a pair, these must agree with such poses, which are candidates for the geometry of the pair too.

Accepted pairs help to judge the remaining ones, until no decision changes. Each dropped pair has a reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dualrc import geometry
from dualrc.collection.progress import Progress, no_progress
from dualrc.collection.rotations import RotationGraph
from dualrc.collection.store import MatchStore, Names
from dualrc.collection.trusted import TrustedPairs
from dualrc.collection.two_view_geometry import FEWEST, PairCheck, TwoViews, cell_px
from dualrc.geometry import Camera
from dualrc.types import BoolArray, FloatArray

# Minimum coverage of a clear pair that needs no confirmation, and of the only pair that connects two components.
_SURE_COVER, _ALONE_COVER = 0.8, 0.7
# Minimum inlier density of a pair that may confirm others.
_TRUSTED_TOGETHER = 0.8
# Minimum inlier ratio and inlier density of the only pair that connects two components.
_ALONE_SHARE, _ALONE_TOGETHER = 0.1, 0.8
# Minimum share of confirmed matches, for a pair of which only confirmed matches are used.
_LEAST_CONFIRMED = 0.025
# Minimum share of inliers that cycles confirm.
_CONFIRMED = 0.3
# Maximum error of a match for the pose over a third image, in thresholds.
_MAX_CHAINED_ERROR = 2.0
# Maximum distance between the ends of a cycle, in fine cells.
_SAME = 2.0
# Maximum difference between the rotation of a pair and the averaged rotations.
_MAX_TURN_DEG = 10.0

# Causes for dropping a pair that has a geometry.
_ELSEWHERE = "other pairs contradict its matches"
_TURNED = "other pairs contradict its rotation"
_UNCONFIRMED = "other pairs do not confirm it"
_WEAK = "too weak without other pairs"


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
        return VerificationSummary(
            pairs=len(self.checks),
            kept=len(self.kept),
            dropped=dict(causes.most_common()),
            look_alikes=sum(check.clear for check in self.dropped),
        )


@dataclass(frozen=True, kw_only=True)
class VerificationSummary:
    """Numbers of verified and dropped pairs."""

    # Number of pairs that were verified.
    pairs: int
    # Number of pairs that were kept.
    kept: int
    # Number of dropped pairs by cause.
    dropped: dict[str, int]
    # Number of dropped pairs whose own matches are clear. They show that the collection has copies of a place.
    look_alikes: int


def verify_pairs(
    store: MatchStore, pairs: Iterable[Names], cameras: Mapping[str, Camera], progress: Progress = no_progress
) -> Verification:
    """Verify pairs of a store, each given once; the cameras need no poses."""
    return _Verifier(store, list(pairs), cameras, progress).run()


class _Verifier:
    """State of the verification."""

    def __init__(
        self, store: MatchStore, pairs: Sequence[Names], cameras: Mapping[str, Camera], progress: Progress
    ) -> None:
        self._views, self._pairs, self._progress = TwoViews(store, pairs, cameras), pairs, progress
        self._checks: dict[Names, PairCheck] = {}
        self._trusted = TrustedPairs(self._views)
        # Pairs whose geometry was estimated twice.
        self._thorough: set[Names] = set()
        # Third images that were used for the last decision on each pair.
        self._asked: dict[Names, Any] = {}

    def run(self) -> Verification:
        """Verify all pairs."""
        self._views.find_focals()
        for count, names in enumerate(self._pairs, start=1):
            self._checks[names] = self._views.estimate(names)
            self._progress("Verifying pairs", count, len(self._pairs))
        self._checks = self._views.with_coverage(self._checks)
        for check in self._checks.values():
            if check.clear and check.cover >= _SURE_COVER:
                self._trust(check)
        self._recheck_sure()
        while self._judge_open() or self._join_components():
            pass
        return Verification(checks=self._checks, cameras=self._views.cameras)

    def _trust(self, check: PairCheck) -> None:
        """Accept a pair, and use it to judge others."""
        self._checks[check.names] = replace(check, kept=True, cause="", reason="")
        if not check.confirmed_only:
            self._trusted.add(check)

    def _distrust(self, check: PairCheck) -> None:
        self._checks[check.names] = replace(check, kept=False)
        self._trusted.remove(check.names)

    def _cycles(self, names: Names) -> tuple[BoolArray, BoolArray]:
        """Return which matches the cycles over third images confirm, and which they contradict."""
        (name0, name1), matches = names, self._views.load(names)
        yes, no = np.zeros(len(matches), np.int64), np.zeros(len(matches), np.int64)
        tolerance = _SAME * cell_px(matches, 1)
        for name in self._trusted.third_images(names):
            between = self._trusted.carry(matches.points0.astype(np.float64), name0, name)
            ends = self._trusted.carry(between, name, name1)
            apart = np.linalg.norm(ends - matches.points1, axis=1)
            yes += apart <= tolerance
            no += apart > tolerance
        return (yes > 0) & (yes >= no), no > yes

    def _recheck_sure(self) -> None:
        """Drop trusted pairs that the others contradict by cycles, the weakest first, or by rotations."""
        for check in sorted(self._kept(), key=_strength):
            self._distrust(check)
            yes, no = self._cycles(check.names)
            asked = _with_votes(check, yes, no, None)
            if asked.contradicted >= FEWEST and asked.contradicted > asked.confirmed:
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
        todo = [check for check in self._checks.values() if not check.kept and check.matches >= FEWEST]
        for count, check in enumerate(sorted(todo, key=_strength, reverse=True), start=1):
            asked = (self._trusted.third_images(check.names), graph.between(*check.names) is None)
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
        wanted = graph.between(*check.names)
        yes, no = self._cycles(check.names)
        check = _with_votes(check, yes, no, wanted)
        # If most matches that cycles confirm are outliers, they confirm another geometry than the pair's own.
        own = 2 * check.confirmed >= yes.sum() and check.confirmed >= _CONFIRMED * check.inliers
        if check.together >= _TRUSTED_TOGETHER and _agrees(check) and own:
            return replace(check, kept=True)
        found = [check]
        if yes.sum() >= FEWEST:
            poses = [self._views.fit(check.names, np.flatnonzero(yes))]
            if wanted is not None:
                poses.append(self._views.fit_direction(check.names, np.flatnonzero(yes), wanted))
            fits = [self._views.with_pose(check, pose) for pose in poses if pose is not None]
            over = self._trusted.poses_over(check.names)
            fits += [self._views.with_pose(check, pose, _MAX_CHAINED_ERROR) for pose in over]
            found += [_with_votes(fit, yes, no, wanted) for fit in fits]
        least = _LEAST_CONFIRMED * check.matches
        found = [again for again in found if _agrees(again) and again.confirmed >= least]
        if found:
            # The other inliers may agree by chance, so only confirmed matches are used.
            best = self._with_predicted(max(found, key=lambda again: again.confirmed), yes)
            best = _with_turn(best, wanted)
            if best.confirmed >= max(FEWEST, least):
                return replace(best, confirmed_only=True, kept=True)
            check = best
        if check.turn_deg is not None and check.turn_deg > _MAX_TURN_DEG:
            turned = f"its rotation differs by {check.turn_deg:.0f} degrees from the other pairs"
            return replace(check, cause=_TURNED, reason=turned)
        if check.contradicted >= FEWEST:
            return replace(check, cause=_ELSEWHERE, reason=_elsewhere(check))
        return replace(
            check, cause=_UNCONFIRMED, reason=f"other pairs confirm {check.confirmed} of its {check.inliers} matches"
        )

    def _with_predicted(self, check: PairCheck, confirmed: BoolArray) -> PairCheck:
        """Reduce the inliers to confirmed matches that agree with the poses over most third images.

        These poses do not depend on the pair's own matches, which may fit a wrong geometry together.
        """
        flags, poses = check.inlier_flags() & confirmed, self._trusted.poses_over(check.names)
        if poses:
            agree = np.array([self._views.agreeing(check.names, pose, _MAX_CHAINED_ERROR) for pose in poses])
            flags &= 2 * agree.sum(axis=0) > len(poses)
            check = replace(check, pose=poses[(agree & flags).sum(axis=1).argmax()])
        count = int(flags.sum())
        return replace(check, inliers=count, confirmed=count, flags=np.packbits(flags))

    def _join_components(self) -> bool:
        """Accept the strongest pair between two components, if it is good enough by itself; return whether any was."""
        graph = self._rotations()
        best = None
        for names, check in self._checks.items():
            if check.kept or check.matches < FEWEST or graph.between(*names) is not None:
                continue
            if names not in self._thorough:
                self._thorough.add(names)
                self._checks[names] = self._views.look_closer(check)
            closer = self._checks[names]
            enough = closer.inliers >= max(FEWEST, _ALONE_SHARE * closer.matches)
            enough = enough and closer.together >= _ALONE_TOGETHER and closer.cover >= _ALONE_COVER
            if enough and closer.contradicted <= closer.confirmed:
                best = closer if best is None or _strength(closer) > _strength(best) else best
            else:
                agree = f"{closer.inliers} of its {closer.matches} matches are inliers"
                around = f"{closer.together:.0%} of the matches around them are too"
                area = f"they cover {closer.cover:.0%} of the common area, and no other pair connects the images"
                self._checks[names] = replace(closer, cause=_WEAK, reason=f"{agree}, {around}, {area}")
        if best is None:
            return False
        self._trust(best)
        return True


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
    turned = (check.turn_deg or 0) > _MAX_TURN_DEG
    return not turned and check.confirmed >= max(FEWEST, 2 * check.contradicted)


def _strength(check: PairCheck) -> float:
    """Return the strength of a pair before it is compared with others."""
    return check.inliers * check.together * check.cover**4 * max(check.pair_score, 0.01) ** 0.5
