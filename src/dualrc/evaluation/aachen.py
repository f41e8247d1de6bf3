"""Aachen Day-Night: accuracy of day and night queries, localized in a map triangulated from the matches."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from rich.console import Console

from dualrc.collection.keypoints import MergedMatches, merge
from dualrc.collection.store import MatchStore
from dualrc.colmap import import_pycolmap, stored_points
from dualrc.draw import draw_matches
from dualrc.errors import DataError
from dualrc.evaluation.aachen_data import AachenData, read_aachen
from dualrc.evaluation.benchmark import COST_COLUMNS, Benchmark, GetMatches, OneNetworkSettings, Option, Result, grouped
from dualrc.evaluation.data_files import pose_errors, read_published
from dualrc.evaluation.export import Pair, file_name
from dualrc.evaluation.figures import recall_curves
from dualrc.evaluation.report import Report, Table
from dualrc.evaluation.triangulation import PosedMap, triangulate
from dualrc.files import make_folder, writing
from dualrc.geometry import Camera, absolute_pose, cam1_from_cam0, fundamental_from_pose, pose_distance_px
from dualrc.image import read
from dualrc.localize import Correspondences, LocalizeConfig, read_poses, write_poses
from dualrc.matches import Estimate, Matches
from dualrc.types import FloatArray, ImageArray

# In meters and degrees.
THRESHOLDS = ((0.5, 2.0), (1.0, 5.0), (5.0, 10.0))
# Error of a query without ground truth.
UNKNOWN = float("nan")
_SUBMISSION = {"v1.0": "Aachen_eval", "v1.1": "Aachen_v1_1_eval"}
_EPIPOLAR_PX = 2.0
_SHOWN_FAILURES = 20


@dataclass(frozen=True, kw_only=True)
class AachenSettings(OneNetworkSettings):
    """Settings of Aachen Day-Night."""

    truth: Annotated[Path | None, Option("File of ground-truth poses, name qw qx qy qz tx ty tz.")] = None

    paper: ClassVar = {"size": 1600, "top": 8000}
    differences: ClassVar = (
        "The published evaluation registers queries with COLMAP's image_registrator, all in one model. Here each "
        "query is localized on its own, by PoseLib, from its matches with the triangulated points."
    )


@dataclass(frozen=True, kw_only=True)
class QueryScore:
    """Score of a query; errors are inf if it was not localized, and NaN without ground truth."""

    name: str
    condition: str
    # Reason why it was not localized.
    reason: str | None
    candidates: int
    correspondences: int
    inliers: int
    error_m: float = UNKNOWN
    error_deg: float = UNKNOWN

    def describe(self) -> str:
        """Describe the result for a caption."""
        if self.reason is not None:
            return f"not localized: {self.reason}"
        error = "" if np.isnan(self.error_m) else f"{self.error_m:.2f} m and {self.error_deg:.2f}° off, "
        return f"{error}{self.inliers} inliers"


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """Scores of all queries of a condition; queries that were not localized count as wrong."""

    queries: int
    localized: int
    # Median over the localized queries.
    inliers: float
    # Number of queries with ground truth.
    scored: int
    # Share of scored queries within each threshold; empty without ground truth.
    shares: tuple[float, ...]
    median_error_m: float
    median_error_deg: float

    @staticmethod
    def of(queries: Sequence[QueryScore]) -> "GroupScore":
        """Compute the score of the queries of a condition."""
        inliers = [query.inliers for query in queries if query.reason is None]
        known = [query for query in queries if not np.isnan(query.error_m)]
        within = [[q.error_m <= meters and q.error_deg <= degrees for q in known] for meters, degrees in THRESHOLDS]
        return GroupScore(
            queries=len(queries),
            localized=len(inliers),
            inliers=float(np.median(inliers)) if inliers else 0.0,
            scored=len(known),
            shares=tuple(float(np.mean(flags)) for flags in within) if known else (),
            median_error_m=float(np.median([query.error_m for query in known])) if known else UNKNOWN,
            median_error_deg=float(np.median([query.error_deg for query in known])) if known else UNKNOWN,
        )


@dataclass(frozen=True, kw_only=True)
class MapScore:
    """Statistics of the map."""

    # Number of images with at least one point.
    images: int
    points: int
    track_length: float
    error_px: float


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All scores of a matcher."""

    conditions: dict[str, GroupScore]
    map: MapScore
    # Mean per pair.
    matches: float
    queries: tuple[QueryScore, ...]
    # Name of the file of poses.
    submission: str


class Aachen(Benchmark):
    """Queries with candidates in a database of images with known poses."""

    name = "aachen"
    summary = (
        "aachen localizes the queries of Aachen Day-Night, v1.0 or v1.1, and writes their poses for the "
        "evaluation service."
    )
    example = "data/aachen --out aachen"
    settings_class = AachenSettings
    recognized_by = ("3D-models", "queries", "images/images_upright")
    one_root = True
    sift_features = 8000
    settings: AachenSettings

    def __init__(
        self, settings: AachenSettings, messages: Console | None = None, data: AachenData | None = None
    ) -> None:
        """`data`: default is the dataset in the root."""
        super().__init__(settings, messages)
        # Report a missing package before the slow steps.
        import_pycolmap()
        self.data = data or read_aachen(settings.roots[0])
        self.pairs, self.notes = self.data.pairs, list(self.data.notes)
        self.config = LocalizeConfig()
        self.truth = {} if settings.truth is None else self._match_truth(read_poses(settings.truth))
        conditions = grouped(self.data.queries.values(), lambda query: query.condition)
        self.protocol = {
            "version": self.data.version,
            "database": len(self.data.database),
            "queries": {name: len(queries) for name, queries in conditions.items()},
            "pairs": len(self.pairs),
            "top": self.top,
            "thresholds_m_deg": [list(pair) for pair in THRESHOLDS],
            "threshold_px": self.config.threshold_px,
            "min_inliers": self.config.min_inliers,
            "scored": len(self.truth),
        }

    def _match_truth(self, truth: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
        """Return the ground-truth poses by the full names of queries; files list names with or without folders."""
        by_file = {Path(name).name: pose for name, pose in truth.items()}
        found = {name: by_file[Path(name).name] for name in self.data.queries if Path(name).name in by_file}
        if not found:
            raise DataError("The file of ground-truth poses has none of the queries; pass the file of this dataset.")
        if unknown := [name for name in self.data.queries if name not in found]:
            self.notes.append(f"{len(unknown)} queries have no ground truth and are not scored, such as {unknown[0]}.")
        if len(by_file) > len(found):
            self.notes.append(
                f"{len(by_file) - len(found)} ground-truth poses belong to images that are not evaluated."
            )
        return found

    def score(self, matcher: str, get: GetMatches) -> Scores:
        """Merge the matches, triangulate the map, localize every query, and write the file of poses to `out`."""
        out = self.settings.out
        make_folder(out)
        with (
            writing(out),
            tempfile.TemporaryDirectory(dir=out, prefix=".scoring-") as work,
            MatchStore(Path(work, "matches.sqlite"), {}) as store,
        ):
            counts = self.store_undistorted(get, store)
            world, queries, poses = self.localize(merge(store, progress=self.progress), Path(work))
        # The evaluation service expects names without folders, and localized queries only.
        submission = f"{_SUBMISSION.get(self.data.version, 'poses')}_[{file_name(matcher)}].txt"
        write_poses(out / submission, {Path(name).name: pose for name, pose in poses.items()})
        conditions = grouped(queries, lambda query: query.condition)
        return Scores(
            conditions={name: GroupScore.of(members) for name, members in conditions.items()},
            map=MapScore(
                images=sum(bool((rows >= 0).any()) for rows in world.rows.values()),
                points=len(world.xyz),
                track_length=world.track_length,
                error_px=world.error_px,
            ),
            matches=float(np.mean(counts)) if counts else 0.0,
            queries=tuple(queries),
            submission=submission,
        )

    def store_undistorted(self, get: GetMatches, store: MatchStore) -> list[int]:
        """Store all matches in undistorted coordinates, and return the number of matches of each pair."""
        counts = []
        for pair in self.pairs:
            matches = get(pair)
            counts.append(len(matches))
            if "error" not in matches.info:
                store.put(pair.name0, pair.name1, self.undistort(pair, matches.top(self.top)))
        return counts

    def undistort(self, pair: Pair, matches: Matches) -> Matches:
        """Convert matches to the undistorted, stored images."""
        camera0, camera1 = self._camera(pair.name0), self._camera(pair.name1)
        points0 = camera0.undistort(stored_points(matches.points0, pair.path0))
        points1 = camera1.undistort(stored_points(matches.points1, pair.path1))
        seen = np.isfinite(np.hstack([points0, points1])).all(axis=1)
        info = {f"network_size{side}": matches.info[f"seen{side}"] for side in (0, 1) if f"seen{side}" in matches.info}
        return Matches(
            points0=points0[seen].astype(np.float32),
            points1=points1[seen].astype(np.float32),
            scores=matches.scores[seen],
            size0=camera0.size,
            size1=camera1.size,
            info=info,
        )

    def _camera(self, name: str) -> Camera:
        camera = self.data.queries[name].camera if name in self.data.queries else self.data.database[name]
        # Only images with a camera are matched.
        assert camera is not None
        return camera

    def localize(self, merged: MergedMatches, work: Path) -> tuple[PosedMap, list[QueryScore], dict[str, FloatArray]]:
        """Return the map, the scores of the queries, and the estimated poses; `work` is an empty folder."""
        cameras = {name: camera.pinhole for name, camera in self.data.database.items()}
        world = triangulate(cameras, merged, work, self.progress)
        scores, poses, matched = [], {}, set(merged.pairs)
        for count, (name, query) in enumerate(self.data.queries.items(), start=1):
            pairs = [pair for other in query.candidates for pair in ((name, other), (other, name)) if pair in matched]
            found = Correspondences.join([world.correspond(merged, pair, name) for pair in pairs])
            found = found.merged(self.config.threshold_px)
            reason, inliers = query.reason or (None if pairs else "None of its pairs could be matched."), 0
            if reason is None:
                estimated = absolute_pose(
                    found.points,
                    found.xyz,
                    camera=self._camera(name).pinhole,
                    scores=found.scores,
                    threshold_px=self.config.threshold_px,
                    min_inliers=self.config.min_inliers,
                )
                reason, inliers = estimated.reason, int(estimated.inliers.sum())
                if estimated.cam_from_world is not None:
                    poses[name] = estimated.cam_from_world
            error_m = error_deg = float("inf") if name in self.truth else UNKNOWN
            if name in self.truth and name in poses:
                error_m, error_deg = pose_errors(poses[name], self.truth[name])
            scores.append(
                QueryScore(
                    name=name,
                    condition=query.condition,
                    reason=reason,
                    candidates=len(query.candidates),
                    correspondences=len(found),
                    inliers=inliers,
                    error_m=error_m,
                    error_deg=error_deg,
                )
            )
            self.progress("Localizing", count, len(self.data.queries))
        return world, scores, poses

    def report(self, results: Sequence[Result]) -> Report:
        """Return the localized queries, the paper's table with our rows, the failures, and recall curves."""
        failures = [[r.matcher, q.name, q.reason] for r in results for q in r.figures.queries if q.reason is not None]
        more = f"And {len(failures) - _SHOWN_FAILURES} more, in results.json." if failures[_SHOWN_FAILURES:] else ""
        tables = [self._main_table(results), _recall_table(results)]
        if failures:
            title, columns = "Queries that were not localized", ["matcher", "query", "reason"]
            shown = failures[:_SHOWN_FAILURES]
            tables.append(Table(title=title, columns=columns, rows=shown, note=more, text_columns=columns))
        if not self.truth:
            return Report(tables=tables)
        max_m, max_deg = THRESHOLDS[-1]
        errors = {}
        for result in results:
            known = [query for query in result.figures.queries if not np.isnan(query.error_m)]
            errors[result.matcher] = {
                name: [q.error_m if q.error_deg <= max_deg else float("inf") for q in known if q.condition == name]
                for name in result.figures.conditions
            }
        title = f"Share of queries within a distance and {max_deg:g}°"
        curves = recall_curves(errors, max_m, title=title, x_label="meters")
        return Report(tables=tables, figures={"aachen_recall": curves})

    def _main_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for result in results:
            scores: Scores = result.figures
            world = [str(scores.map.points), f"{scores.map.track_length:.1f}", *result.cost.cells(scores.matches)]
            for condition, group in scores.conditions.items():
                counts = [str(group.queries), str(group.localized), f"{group.inliers:.0f}"]
                rows.append([result.matcher, condition, *counts, *world])
        files = ", ".join(result.figures.submission for result in results)
        size = f"{len(self.data.database)} database images, {len(self.pairs)} pairs"
        return Table(
            title=f"Aachen Day-Night {self.data.version}: {size}",
            columns=["matcher", "condition", "queries", "localized", "inliers", "points", "track", *COST_COLUMNS],
            rows=rows,
            note=(
                "Inliers: median over the localized queries. Points: in the map, triangulated from matches between "
                "database images with their known poses. Track: mean number of images per point. Matches and time are "
                f"per pair. Poses for the evaluation service: {files}."
            ),
            text_columns=["matcher", "condition"],
        )

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """Rank the queries from best to worst, each with its first candidate."""
        first = {pair.name0: pair for pair in reversed(self.pairs) if pair.name0 in self.data.queries}
        scores = [q for q in result.figures.queries if q.name in first]
        order = sorted(scores, key=lambda q: (np.nan_to_num(q.error_m, nan=0.0, posinf=np.inf), -q.inliers))
        return [(first[q.name], q.describe()) for q in order]

    def draw(self, pair: Pair, matches: Matches) -> ImageArray:
        """Draw matches that agree with the ground truth in green, and others in red."""
        best, image0, image1 = matches.top(self.top), read(pair.path0), read(pair.path1)
        if not len(best) or pair.name0 not in self.truth:
            return draw_matches(image0, image1, best)
        camera0, camera1 = self._camera(pair.name0), self._camera(pair.name1)
        # Image 1 is in the database.
        assert camera1.cam_from_world is not None
        pose = cam1_from_cam0(self.truth[pair.name0], camera1.cam_from_world)
        points0, points1 = stored_points(best.points0, pair.path0), stored_points(best.points1, pair.path1)
        agree = pose_distance_px(pose, camera0, camera1, points0, points1, in_image1=True) <= _EPIPOLAR_PX
        F = fundamental_from_pose(pose, camera0, camera1)
        best = replace(best, estimate=Estimate(kind="fundamental", matrix=F, inliers=agree))
        return draw_matches(image0, image1, best, colors="inliers")


def _recall_table(results: Sequence[Result]) -> Table:
    """Return the paper's table below our rows, where ground truth is available."""
    rows = []
    for result in results:
        for condition, group in result.figures.conditions.items():
            if group.scored:
                errors = ((group.median_error_m, " m"), (group.median_error_deg, "°"))
                medians = [f"{value:.3f}{unit}" if np.isfinite(value) else "-" for value, unit in errors]
                shares = [f"{100 * value:.1f}" for value in group.shares]
                rows.append([result.matcher, condition, str(group.scored), *shares, *medians])
    note = "Queries that were not localized count as wrong. The paper's numbers are for the night queries of v1.0."
    if not rows:
        service = "submit the file of poses to the evaluation service, or pass --truth"
        note = f"The ground truth is not public: {service}."
    # The paper's table.
    for name, values in read_published("aachen_published.json").items():
        rows.append([f"{name} (paper)", "night", "98", *(f"{value:.1f}" for value in values), "", ""])
    limits = [f"{meters:g} m, {degrees:g}°" for meters, degrees in THRESHOLDS]
    columns = ["matcher", "condition", "queries", *limits, "median", "error"]
    title, text = "Correctly localized queries (%)", ["matcher", "condition"]
    return Table(title=title, columns=columns, rows=rows, note=note, text_columns=text)
