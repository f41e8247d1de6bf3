"""Two-view pose: accuracy of the relative pose of two known cameras, estimated from their matches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from dualrc.draw import draw_matches
from dualrc.errors import DataError
from dualrc.evaluation.baselines import OpenCVMethod, has_opencv, opencv_relative_pose
from dualrc.evaluation.benchmark import COST_COLUMNS, Benchmark, GetMatches, Result, folder_hint, grouped, recognize
from dualrc.evaluation.export import Pair
from dualrc.evaluation.figures import recall_curves
from dualrc.evaluation.pose_data import PoseTruth, read_pose_data
from dualrc.evaluation.report import Report, Table, seconds, share
from dualrc.geometry import Camera, fundamental_from_pose, pose_distance_px, relative_pose
from dualrc.image import read
from dualrc.matches import Estimate, Matches
from dualrc.metrics import area_under_curve, pose_error_deg
from dualrc.types import FloatArray, ImageArray

THRESHOLDS_DEG = (5, 10, 20)
POSELIB = "PoseLib LO-RANSAC, 1 px"
OPENCV_RANSAC = "OpenCV RANSAC, 0.5 px"
OPENCV_MAGSAC = "OpenCV USAC_MAGSAC, 0.5 px"
_OPENCV: dict[str, OpenCVMethod] = {OPENCV_RANSAC: "RANSAC", OPENCV_MAGSAC: "USAC_MAGSAC"}
_EPIPOLAR_PX = 1.0


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """Score of a pair; errors are inf if no pose could be estimated."""

    name0: str
    name1: str
    scene: str
    matches: int
    # Share of matches within 1 px of the true epipolar line.
    epipolar_share: float
    # By estimator.
    errors_deg: dict[str, float]

    def describe(self) -> str:
        """Describe the result for a caption."""
        error = self.errors_deg[POSELIB]
        text = "no pose" if np.isinf(error) else f"pose error {error:.2f}°"
        return f"{text} ({POSELIB}), {self.matches} matches"


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """Score of a scene, or of all scenes."""

    pairs: int
    # By estimator, at 5, 10 and 20 degrees.
    auc: dict[str, tuple[float, ...]]
    matches: float
    epipolar_share: float
    # Number of pairs without a pose, by estimator.
    not_estimated: dict[str, int]

    @staticmethod
    def of(scores: Sequence[PairScore]) -> "GroupScore":
        """Compute the scores of the pairs of a group."""
        errors = {name: [score.errors_deg[name] for score in scores] for name in scores[0].errors_deg}
        return GroupScore(
            pairs=len(scores),
            auc={name: tuple(area_under_curve(own, THRESHOLDS_DEG).tolist()) for name, own in errors.items()},
            matches=float(np.mean([score.matches for score in scores])),
            epipolar_share=float(np.mean([score.epipolar_share for score in scores])),
            not_estimated={name: int(np.isinf(own).sum()) for name, own in errors.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All scores of a matcher."""

    overall: GroupScore
    scenes: dict[str, GroupScore]
    pairs: tuple[PairScore, ...]


class Pose(Benchmark):
    """Image pairs with known cameras, from one or several roots in any of the supported layouts."""

    name = "pose"
    summary = "pose scores relative poses on MegaDepth-1500, ScanNet-1500, or folders with cameras.json."
    example = "data/strecha --matcher mine.py:match"
    recognized_by = ("cameras.json", "*/cameras.json", "*.npz", "*/*.npz")

    def __init__(self, settings: Any, messages: Console | None = None) -> None:
        super().__init__(settings, messages)
        self.truths: dict[Pair, PoseTruth] = {}
        layouts = set()
        for root in settings.roots:
            try:
                data = read_pose_data(root)
            except DataError as error:
                if recognize(root, self.name) is None:
                    raise
                raise DataError(f"{root} is not a dataset for poses; {folder_hint(root, self.name)}.") from error
            # Stores identify pairs by their names.
            if shared := {pair.names for pair in self.truths} & {pair.names for pair in data.pairs}:
                raise DataError(f"Two roots have the pair {min(shared)}; evaluate them one after the other.")
            self.truths |= data.pairs
            self.notes += data.notes
            layouts.add(data.layout)
        self.pairs = list(self.truths)
        self.estimators = [POSELIB]
        if has_opencv():
            self.estimators += _OPENCV
        else:
            self.notes.append("OpenCV's estimators are left out; install them with pip install 'dualrc[baselines]'.")
        self.protocol = {
            "layouts": sorted(layouts),
            "top": self.top,
            "thresholds_deg": list(THRESHOLDS_DEG),
            "estimators": self.estimators,
            "pairs": len(self.pairs),
        }

    def score(self, matcher: str, get: GetMatches) -> Scores:
        """Compute pose errors of every estimator, by pair, by scene and overall."""
        scores = [self._score_pair(pair, get(pair).top(self.top)) for pair in self.pairs]
        scenes = grouped(scores, lambda score: score.scene)
        return Scores(
            overall=GroupScore.of(scores),
            scenes={name: GroupScore.of(members) for name, members in scenes.items()},
            pairs=tuple(scores),
        )

    def _score_pair(self, pair: Pair, matches: Matches) -> PairScore:
        errors, within = dict.fromkeys(self.estimators, float("inf")), 0.0
        if len(matches):
            truth = self.truths[pair]
            cameras = truth.cameras(matches.size0, matches.size1)
            within = float(np.mean(_epipolar_estimate(matches, truth).inliers))
            for estimator in self.estimators:
                pose = _estimate_pose(estimator, matches, cameras)
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

    def report(self, results: Sequence[Result]) -> Report:
        """Return a table of all pairs, a table by scene if there are several, and recall over the pose error."""
        errors = {
            result.matcher: {name: [s.errors_deg[name] for s in result.figures.pairs] for name in self.estimators}
            for result in results
        }
        title = "Share of pairs within a pose error"
        curves = recall_curves(errors, THRESHOLDS_DEG[-1], title=title, x_label="degrees")
        tables = [self._main_table(results)]
        if len(results[0].figures.scenes) > 1:
            tables.append(self._scene_table(results))
        return Report(tables=tables, figures={"pose_recall": curves})

    def _main_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for result in results:
            overall: GroupScore = result.figures.overall
            common = [share(overall.epipolar_share), *result.cost.cells(overall.matches)]
            for estimator in self.estimators:
                aucs = [share(auc) for auc in overall.auc[estimator]]
                rows.append([result.matcher, estimator, *aucs, str(overall.not_estimated[estimator]), *common])
        return Table(
            title=f"Two-view pose: {len(self.pairs)} pairs ({', '.join(self.protocol['layouts'])})",
            columns=["matcher", "estimator", "AUC 5°", "10°", "20°", "lost", "epipolar", *COST_COLUMNS],
            rows=rows,
            note=(
                "Area under the recall curve of the larger of rotation and translation-direction error, up to 5, 10 "
                "and 20 degrees. Lost: pairs without a pose, which count as infinite errors. Epipolar: share of the "
                f"best {self.top} matches within {_EPIPOLAR_PX:g} px of the true epipolar line. Matches and time are "
                "per pair, without pose estimation."
            ),
            text_columns=["matcher", "estimator"],
        )

    def _scene_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for scene, group in results[0].figures.scenes.items():
            scores = [result.figures.scenes[scene] for result in results]
            for estimator in self.estimators:
                cells = [" / ".join(share(auc) for auc in score.auc[estimator]) for score in scores]
                rows.append([scene, str(group.pairs), estimator, *cells])
            rows.append([scene, str(group.pairs), "matches per pair", *(f"{score.matches:.0f}" for score in scores)])
        rows.append(["all", "", "time per pair", *(seconds(result.cost.seconds_per_pair) for result in results)])
        rows.append(["all", "", "size", *(result.cost.resolution for result in results)])
        columns = ["scene", "pairs", "estimator", *(result.matcher for result in results)]
        title = "By scene: AUC at 5 / 10 / 20 degrees"
        return Table(title=title, columns=columns, rows=rows, text_columns=["scene", "estimator"])

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """Rank pairs by PoseLib's pose error."""
        scored = list(zip(self.pairs, result.figures.pairs, strict=True))
        scored.sort(key=lambda item: (item[1].errors_deg[POSELIB], -item[1].matches))
        return [(pair, score.describe()) for pair, score in scored]

    def draw(self, pair: Pair, matches: Matches) -> ImageArray:
        """Draw matches within 1 px of the true epipolar line in green, and others in red."""
        best, image0, image1 = matches.top(self.top), read(pair.path0), read(pair.path1)
        if not len(best):
            return draw_matches(image0, image1, best)
        best = replace(best, estimate=_epipolar_estimate(best, self.truths[pair]))
        return draw_matches(image0, image1, best, colors="inliers")


def _estimate_pose(estimator: str, matches: Matches, cameras: tuple[Camera, Camera]) -> FloatArray | None:
    """Estimate cam1_from_cam0 (3, 4), or return None."""
    if estimator in _OPENCV:
        return opencv_relative_pose(matches, *cameras, method=_OPENCV[estimator], threshold_px=0.5)
    found = relative_pose(matches, *cameras, threshold_px=1.0)
    return None if found is None else np.column_stack([found.R, found.t])


def _epipolar_estimate(matches: Matches, truth: PoseTruth) -> Estimate:
    """Return the true fundamental matrix, with the matches within 1 px of it as inliers."""
    pose, cameras = truth.cam1_from_cam0, truth.cameras(matches.size0, matches.size1)
    distances_px = pose_distance_px(pose, *cameras, matches.points0, matches.points1, in_image1=True)
    # The comparison is false for NaN.
    agree = distances_px <= _EPIPOLAR_PX
    return Estimate(kind="fundamental", matrix=fundamental_from_pose(pose, *cameras), inliers=agree)
