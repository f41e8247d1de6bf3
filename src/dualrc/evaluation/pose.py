"""Two-view pose: how well the relative pose of two known cameras follows from their matches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dualrc.draw import Picture, draw_matches
from dualrc.errors import DataError
from dualrc.evaluation.baselines import has_opencv, opencv_relative_pose
from dualrc.evaluation.benchmark import (
    COST_COLUMNS,
    Benchmark,
    Cost,
    GetMatches,
    Result,
    Table,
    cost_cells,
    failures,
    seconds,
    share,
)
from dualrc.evaluation.export import Pair
from dualrc.evaluation.figures import Panel, curve_panels
from dualrc.evaluation.hpatches import looks_like_hpatches
from dualrc.evaluation.layouts import PoseData, PoseTruth, read_pose_data
from dualrc.geometry import Camera, epipolar_distance_px, fundamental_from_pose, relative_pose
from dualrc.image import read
from dualrc.matches import Estimate, Matches
from dualrc.metrics import area_under_curve, pose_error_deg, share_within
from dualrc.types import FloatArray

THRESHOLDS_DEG = (5, 10, 20)
DEFAULT_TOP = 4000
POSELIB = "PoseLib LO-RANSAC, 1 px"
OPENCV_RANSAC = "OpenCV RANSAC, 0.5 px"
OPENCV_MAGSAC = "OpenCV USAC_MAGSAC, 0.5 px"
_EPIPOLAR_PX = 1.0


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """One pair; errors are inf where no pose could be estimated."""

    name0: str
    name1: str
    scene: str
    matches: int
    epipolar_share: float  # of the matches, within 1 px of the true epipolar line
    errors_deg: dict[str, float]  # by estimator


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """A scene, or all of them."""

    pairs: int
    auc: dict[str, tuple[float, ...]]  # by estimator, at 5, 10 and 20 degrees
    matches: float
    epipolar_share: float
    not_estimated: dict[str, int]  # by estimator, pairs without a pose


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All figures of a matcher."""

    overall: GroupScore
    scenes: dict[str, GroupScore]
    pairs: tuple[PairScore, ...]


class Pose(Benchmark):
    """Pairs of pictures with known cameras, of one or several roots in any of the known layouts."""

    name = "pose"

    def __init__(self, roots: Sequence[Path], *, top: int = DEFAULT_TOP) -> None:
        sets = [_read(root) for root in roots]
        self.top = top
        self.truths = _joined(sets)
        self.pairs = list(self.truths)
        self.notes = [note for data in sets for note in data.notes]
        self.estimators = [POSELIB]
        if has_opencv():
            self.estimators += [OPENCV_RANSAC, OPENCV_MAGSAC]
        else:
            self.notes.append("OpenCV's estimators are left out: pip install 'dualrc[baselines]'.")
        self.protocol = {
            "layouts": sorted({data.layout for data in sets}),
            "top": top,
            "thresholds_deg": list(THRESHOLDS_DEG),
            "estimators": self.estimators,
            "pairs": len(self.pairs),
        }

    def score(self, matcher: str, get: GetMatches) -> Result:
        """Score a matcher by its stored matches."""
        infos, scores = [], []
        for pair in self.pairs:
            matches = get(pair)
            infos.append(matches.info)
            scores.append(self._score_pair(pair, matches.top(self.top)))
        scenes = dict.fromkeys(score.scene for score in scores)
        figures = Scores(
            overall=self._mean(scores),
            scenes={name: self._mean([score for score in scores if score.scene == name]) for name in scenes},
            pairs=tuple(scores),
        )
        return Result(matcher=matcher, cost=Cost.of(infos), failures=failures(self.pairs, infos), figures=figures)

    def _score_pair(self, pair: Pair, matches: Matches) -> PairScore:
        errors, within = {estimator: float("inf") for estimator in self.estimators}, 0.0
        if len(matches):
            truth = self.truths[pair]
            cameras = truth.cameras(matches.size0, matches.size1)
            within = float(np.mean(_epipolar_errors_px(matches, truth, cameras) <= _EPIPOLAR_PX))
            for estimator in self.estimators:
                pose = _estimated(estimator, matches, cameras)
                if pose is not None:
                    errors[estimator] = pose_error_deg(pose, truth.cam1_from_cam0)
        return PairScore(
            name0=pair.name0,
            name1=pair.name1,
            scene=pair.group,
            matches=len(matches),
            epipolar_share=within,
            errors_deg=errors,
        )

    def _mean(self, scores: Sequence[PairScore]) -> GroupScore:
        errors = {name: [score.errors_deg[name] for score in scores] for name in self.estimators}
        return GroupScore(
            pairs=len(scores),
            auc={name: tuple(area_under_curve(errors[name], THRESHOLDS_DEG).tolist()) for name in self.estimators},
            matches=float(np.mean([score.matches for score in scores])),
            epipolar_share=float(np.mean([score.epipolar_share for score in scores])),
            not_estimated={name: int(np.isinf(errors[name]).sum()) for name in self.estimators},
        )

    def tables(self, results: Sequence[Result]) -> list[Table]:
        """One table of all pairs, and one by scene where there are several."""
        rows = []
        for result in results:
            overall: GroupScore = result.figures.overall
            cost = cost_cells(overall.matches, result.cost)
            for estimator in self.estimators:
                aucs = [share(auc) for auc in overall.auc[estimator]]
                failed = str(overall.not_estimated[estimator])
                rows.append([result.matcher, estimator, *aucs, failed, share(overall.epipolar_share), *cost])
        main = Table(
            title=f"Two-view pose: {len(self.pairs)} pairs ({', '.join(self.protocol['layouts'])})",
            columns=["matcher", "estimator", "AUC 5°", "10°", "20°", "lost", "epipolar", *COST_COLUMNS],
            rows=rows,
            note=(
                "Area under the recall curve of the larger of rotation and translation-direction error, up to 5, 10 "
                "and 20 degrees; lost pairs, without a pose, count as infinite errors; epipolar: the share of the best "
                f"{self.top} matches within {_EPIPOLAR_PX:g} px of the true epipolar line; matches and time a pair, "
                "without the estimation."
            ),
        )
        return [main] if len(results[0].figures.scenes) < 2 else [main, self._scene_table(results)]

    def _scene_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for scene, group in results[0].figures.scenes.items():
            scores = [result.figures.scenes[scene] for result in results]
            for estimator in self.estimators:
                cells = [" / ".join(share(auc) for auc in score.auc[estimator]) for score in scores]
                rows.append([scene, str(group.pairs), estimator, *cells])
            rows.append([scene, str(group.pairs), "matches a pair", *(f"{score.matches:.0f}" for score in scores)])
        rows.append(["all", "", "time a pair", *(seconds(result.cost.seconds_per_pair) for result in results)])
        rows.append(["all", "", "size", *(result.cost.resolution for result in results)])
        columns = ["scene", "pairs", "estimator", *(result.matcher for result in results)]
        return Table(title="By scene: AUC at 5 / 10 / 20 degrees", columns=columns, rows=rows)

    def curves(self, results: Sequence[Result]) -> dict[str, Picture]:
        """Recall over the pose error, one panel for each estimator."""
        degrees = np.linspace(0, THRESHOLDS_DEG[-1], 201)
        panels = []
        for estimator in self.estimators:
            ours = {
                result.matcher: share_within(
                    [s.errors_deg[estimator] for s in result.figures.pairs], degrees.tolist()
                ).tolist()
                for result in results
            }
            panels.append(Panel(title=estimator, x=degrees.tolist(), ours=ours))
        return {"pose_recall": curve_panels(panels, title="Share of pairs within a pose error", x_label="degrees")}

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """By PoseLib's pose error."""
        by_names = {(pair.name0, pair.name1): pair for pair in self.pairs}
        order = sorted(result.figures.pairs, key=lambda s: (s.errors_deg[POSELIB], -s.matches))
        return [(by_names[s.name0, s.name1], _in_words(s)) for s in order]

    def draw(self, pair: Pair, matches: Matches) -> Picture:
        """Green lines where a match is within 1 px of the true epipolar line, red ones elsewhere."""
        best, truth = matches.top(self.top), self.truths[pair]
        if not len(best):
            return draw_matches(read(pair.path0), read(pair.path1), best)
        cameras = truth.cameras(best.size0, best.size1)
        agree = _epipolar_errors_px(best, truth, cameras) <= _EPIPOLAR_PX
        F = fundamental_from_pose(truth.cam1_from_cam0, *cameras)
        best = replace(best, estimate=Estimate(kind="fundamental", matrix=F, inliers=agree))
        return draw_matches(read(pair.path0), read(pair.path1), best, colors="inliers")


def _read(root: Path) -> PoseData:
    try:
        return read_pose_data(root)
    except DataError:
        if looks_like_hpatches(root):
            raise DataError(f"{root} holds HPatches sequences; run `dualrc evaluate hpatches` on it.") from None
        raise


def _joined(sets: Sequence[PoseData]) -> dict[Pair, PoseTruth]:
    """All pairs; stores know them by their names, so two roots must not use the same ones."""
    truths: dict[Pair, PoseTruth] = {}
    taken: set[tuple[str, str]] = set()
    for data in sets:
        names = {(pair.name0, pair.name1) for pair in data.pairs}
        if shared := taken & names:
            raise DataError(f"Two roots hold the pair {' '.join(min(shared))}; evaluate them one after the other.")
        taken |= names
        truths |= data.pairs
    return truths


def _estimated(estimator: str, matches: Matches, cameras: tuple[Camera, Camera]) -> FloatArray | None:
    """cam1_from_cam0 (3, 4), or None."""
    if estimator == OPENCV_RANSAC:
        return opencv_relative_pose(matches, *cameras, method="RANSAC", threshold_px=0.5)
    if estimator == OPENCV_MAGSAC:
        return opencv_relative_pose(matches, *cameras, method="USAC_MAGSAC", threshold_px=0.5)
    found = relative_pose(matches, *cameras, threshold_px=1.0)
    return None if found is None else np.column_stack([found.R, found.t])


def _epipolar_errors_px(matches: Matches, truth: PoseTruth, cameras: tuple[Camera, Camera]) -> FloatArray:
    F = fundamental_from_pose(truth.cam1_from_cam0, *cameras)
    errors = epipolar_distance_px(F, matches.points0, matches.points1)
    return np.where(np.isnan(errors), np.inf, errors)


def _in_words(score: PairScore) -> str:
    error = score.errors_deg[POSELIB]
    text = "no pose" if np.isinf(error) else f"pose error {error:.2f}°"
    return f"{text} ({POSELIB}), {score.matches} matches"
