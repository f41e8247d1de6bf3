"""Aachen Day-Night: how well queries by day and by night are localized in a map that their matches make."""

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
from dualrc.draw import Picture, draw_matches
from dualrc.errors import DataError, OutputError
from dualrc.evaluation.aachen_data import AachenData, read_aachen
from dualrc.evaluation.benchmark import COST_COLUMNS, Benchmark, GetMatches, OneNetworkSettings, Option, Result, grouped
from dualrc.evaluation.data_files import pose_errors, read_published
from dualrc.evaluation.export import Pair, file_name, make_folder
from dualrc.evaluation.figures import recall_curves
from dualrc.evaluation.report import Report, Table
from dualrc.evaluation.triangulation import PosedMap, triangulate
from dualrc.geometry import Camera, absolute_pose, cam1_from_cam0, fundamental_from_pose, pose_distance_px
from dualrc.image import read
from dualrc.localize import Correspondences, LocalizeConfig, read_poses, write_poses
from dualrc.matches import Estimate, Matches
from dualrc.types import FloatArray

# Metres and degrees.
THRESHOLDS = ((0.5, 2.0), (1.0, 5.0), (5.0, 10.0))
# An error where the true pose is not known.
UNKNOWN = float("nan")
_SUBMISSION = {"v1.0": "Aachen_eval", "v1.1": "Aachen_v1_1_eval"}
_EPIPOLAR_PX = 2.0
_SHOWN_FAILURES = 20
_DIFFERENCES = (
    "The published evaluation registers queries with COLMAP's image_registrator, all in one model. Here each query is "
    "localized on its own, by PoseLib, from its matches with the triangulated points."
)


@dataclass(frozen=True, kw_only=True)
class AachenSettings(OneNetworkSettings):
    """Settings of Aachen Day-Night."""

    truth: Annotated[Path | None, Option("a file of true poses, name qw qx qy qz tx ty tz.")] = None

    paper: ClassVar = {"size": 1600, "top": 8000}


@dataclass(frozen=True, kw_only=True)
class QueryScore:
    """One query; errors are inf where it was not localized, NaN where the true pose is not known."""

    name: str
    condition: str
    # Why it was not localized.
    reason: str | None
    candidates: int
    correspondences: int
    inliers: int
    error_m: float = UNKNOWN
    error_deg: float = UNKNOWN

    def describe(self) -> str:
        """Its result for a caption."""
        if self.reason is not None:
            return f"not localized: {self.reason}"
        error = "" if np.isnan(self.error_m) else f"{self.error_m:.2f} m and {self.error_deg:.2f}° off, "
        return f"{error}{self.inliers} inliers"


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """All queries of a condition; those that were not localized count as wrong."""

    queries: int
    localized: int
    # Median over those localized.
    inliers: float
    # Whose true pose is known.
    scored: int
    # Of those, within each threshold; none where no true pose is known.
    shares: tuple[float, ...]
    median_error_m: float
    median_error_deg: float

    @staticmethod
    def of(queries: Sequence[QueryScore]) -> "GroupScore":
        """The score of the queries of a condition."""
        inliers = [query.inliers for query in queries if query.reason is None]
        known = [query for query in queries if not np.isnan(query.error_m)]
        within = [[q.error_m <= metres and q.error_deg <= degrees for q in known] for metres, degrees in THRESHOLDS]
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
    """The map that the matches made."""

    # With at least one point.
    pictures: int
    points: int
    track_length: float
    error_px: float


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All figures of a matcher."""

    conditions: dict[str, GroupScore]
    map: MapScore
    # A pair.
    matches: float
    queries: tuple[QueryScore, ...]
    # The file of poses.
    submission: str


class Aachen(Benchmark):
    """Queries with candidates in a database of pictures with known poses."""

    name = "aachen"
    summary = (
        "aachen localizes the queries of Aachen Day-Night, v1.0 or v1.1, and writes their poses for the benchmark's "
        "service."
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
        """`data` is read from the root unless it is given."""
        super().__init__(settings, messages)
        # What is missing is said before the long work.
        import_pycolmap()
        self.data = data or read_aachen(settings.roots[0])
        self.pairs, self.notes = self.data.pairs, list(self.data.notes)
        if settings.protocol == "paper":
            self.notes.append(_DIFFERENCES)
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
        """The true poses of the queries by their full names; files have them with or without folders."""
        by_file = {Path(name).name: pose for name, pose in truth.items()}
        found = {name: by_file[Path(name).name] for name in self.data.queries if Path(name).name in by_file}
        if not found:
            raise DataError("The file of true poses has none of the queries; give that of this data set.")
        if unknown := [name for name in self.data.queries if name not in found]:
            self.notes.append(f"{len(unknown)} queries have no true pose and are not scored, such as {unknown[0]}.")
        if len(by_file) > len(found):
            self.notes.append(f"{len(by_file) - len(found)} true poses are of pictures that are not evaluated.")
        return found

    def score(self, matcher: str, get: GetMatches) -> Scores:
        """Merge the matches, make the map, localize every query, and write the file of poses to `out`."""
        out = self.settings.out
        make_folder(out)
        try:
            with (
                tempfile.TemporaryDirectory(dir=out, prefix=".scoring-") as work,
                MatchStore(Path(work, "matches.sqlite"), {}) as store,
            ):
                counts = self.store_undistorted(get, store)
                world, queries, poses = self.localize(merge(store, progress=self.progress), Path(work))
        except OSError as error:
            remedy = "make room or write elsewhere"
            raise OutputError(f"The folder {out} can't be written ({error.strerror}); {remedy}.") from error
        # As the benchmark's service wants it: names without folders, only queries that were localized.
        submission = f"{_SUBMISSION.get(self.data.version, 'poses')}_[{file_name(matcher)}].txt"
        write_poses(out / submission, {Path(name).name: pose for name, pose in poses.items()})
        conditions = grouped(queries, lambda query: query.condition)
        return Scores(
            conditions={name: GroupScore.of(members) for name, members in conditions.items()},
            map=MapScore(
                pictures=sum(bool((rows >= 0).any()) for rows in world.rows.values()),
                points=len(world.xyz),
                track_length=world.track_length,
                error_px=world.error_px,
            ),
            matches=float(np.mean(counts)) if counts else 0.0,
            queries=tuple(queries),
            submission=submission,
        )

    def store_undistorted(self, get: GetMatches, store: MatchStore) -> list[int]:
        """Store all matches as pinhole cameras see them; returns the number of matches of each pair."""
        counts = []
        for pair in self.pairs:
            matches = get(pair)
            counts.append(len(matches))
            if "error" not in matches.info:
                store.put(pair.name0, pair.name1, self.undistort(pair, matches.top(self.top)))
        return counts

    def undistort(self, pair: Pair, matches: Matches) -> Matches:
        """Matches between the undistorted pictures as they are stored."""
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
        # Pictures without a camera are not matched.
        assert camera is not None
        return camera

    def localize(self, merged: MergedMatches, work: Path) -> tuple[PosedMap, list[QueryScore], dict[str, FloatArray]]:
        """The map of the database, the queries' scores, and the poses that were found; `work` is an empty folder."""
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
        """What was localized, the paper's table with ours, the queries that were not, and recall over distances."""
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
        errors: dict[str, dict[str, list[float]]] = {}
        for condition in results[0].figures.conditions:
            for result in results:
                known = [q for q in result.figures.queries if q.condition == condition and not np.isnan(q.error_m)]
                own = [query.error_m if query.error_deg <= max_deg else float("inf") for query in known]
                errors.setdefault(condition, {})[result.matcher] = own
        title = f"Share of queries within a distance and {max_deg:g}°"
        curves = recall_curves(errors, max_m, title=title, x_label="metres")
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
        size = f"{len(self.data.database)} database pictures, {len(self.pairs)} pairs"
        return Table(
            title=f"Aachen Day-Night {self.data.version}: {size}",
            columns=["matcher", "condition", "queries", "localized", "inliers", "points", "track", *COST_COLUMNS],
            rows=rows,
            note=(
                "Inliers: median of the localized queries; points: of the map, triangulated from the matches between "
                "database pictures with their known poses; track: pictures that see a point on average; matches and "
                f"time a pair. Poses for the benchmark's service: {files}."
            ),
            text_columns=["matcher", "condition"],
        )

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """The queries from best to worst, each with its first candidate."""
        first = {pair.name0: pair for pair in reversed(self.pairs) if pair.name0 in self.data.queries}
        scores = [q for q in result.figures.queries if q.name in first]
        order = sorted(scores, key=lambda q: (np.nan_to_num(q.error_m, nan=0.0, posinf=np.inf), -q.inliers))
        return [(first[q.name], q.describe()) for q in order]

    def draw(self, pair: Pair, matches: Matches) -> Picture:
        """Where the true pose is known, green lines for matches that agree with it and red ones for others."""
        best, image0, image1 = matches.top(self.top), read(pair.path0), read(pair.path1)
        if not len(best) or pair.name0 not in self.truth:
            return draw_matches(image0, image1, best)
        camera0, camera1 = self._camera(pair.name0), self._camera(pair.name1)
        # It is one of the database.
        assert camera1.cam_from_world is not None
        pose = cam1_from_cam0(self.truth[pair.name0], camera1.cam_from_world)
        points0, points1 = stored_points(best.points0, pair.path0), stored_points(best.points1, pair.path1)
        agree = pose_distance_px(pose, camera0, camera1, points0, points1, in_picture1=True) <= _EPIPOLAR_PX
        F = fundamental_from_pose(pose, camera0, camera1)
        best = replace(best, estimate=Estimate(kind="fundamental", matrix=F, inliers=agree))
        return draw_matches(image0, image1, best, colors="inliers")


def _recall_table(results: Sequence[Result]) -> Table:
    """The paper's table, below our rows where true poses are known."""
    rows = []
    for result in results:
        for condition, group in result.figures.conditions.items():
            if group.scored:
                errors = ((group.median_error_m, " m"), (group.median_error_deg, "°"))
                medians = [f"{value:.3f}{unit}" if np.isfinite(value) else "-" for value, unit in errors]
                shares = [f"{100 * value:.1f}" for value in group.shares]
                rows.append([result.matcher, condition, str(group.scored), *shares, *medians])
    note = "Queries that were not localized count as wrong. The paper's figures are of v1.0's night-time queries."
    if not rows:
        service = "send the file of poses to the benchmark's service, or score it here with --truth"
        note = f"The true poses are not public: {service}."
    # The paper's table.
    for name, values in read_published("aachen_published.json").items():
        rows.append([f"{name} (paper)", "night", "98", *(f"{value:.1f}" for value in values), "", ""])
    limits = [f"{metres:g} m, {degrees:g}°" for metres, degrees in THRESHOLDS]
    columns = ["matcher", "condition", "queries", *limits, "median", "error"]
    title, text = "Correctly localized queries (%)", ["matcher", "condition"]
    return Table(title=title, columns=columns, rows=rows, note=note, text_columns=text)
