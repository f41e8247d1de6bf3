"""Aachen Day-Night: how well queries by day and by night are localized in a map that their matches make."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualrc.collection.keypoints import MergedMatches, merge
from dualrc.collection.store import MatchStore
from dualrc.colmap import import_pycolmap
from dualrc.draw import Picture, draw_matches
from dualrc.errors import DataError, OutputError
from dualrc.evaluation.aachen_layout import AachenData, Query, read_aachen
from dualrc.evaluation.aachen_scores import (
    THRESHOLDS,
    UNKNOWN,
    MapScore,
    QueryScore,
    Scores,
    group_score,
    lost_table,
    main_table,
    recall_curves,
    recall_table,
)
from dualrc.evaluation.benchmark import Benchmark, Cost, GetMatches, Result, Table, failures
from dualrc.evaluation.export import Pair, make_folder
from dualrc.evaluation.posed_map import PosedMap, triangulate
from dualrc.geometry import (
    absolute_pose,
    cam1_from_cam0,
    epipolar_distance_px,
    fundamental_from_pose,
    rotation_error_deg,
)
from dualrc.image import read
from dualrc.localize import Correspondences, LocalizeConfig, read_poses, write_poses
from dualrc.matches import Estimate, Matches
from dualrc.types import FloatArray

DEFAULT_TOP = 4000
_FILE = {"v1.0": "Aachen_eval", "v1.1": "Aachen_v1_1_eval"}
_EPIPOLAR_PX = 2.0


Located = tuple[QueryScore, FloatArray | None]  # a query's score and its pose


class Aachen(Benchmark):
    """Queries with candidates in a database of pictures with known poses."""

    name = "aachen"

    def __init__(
        self, data: AachenData, *, out: Path, truth: Mapping[str, FloatArray] | None = None, top: int = DEFAULT_TOP
    ) -> None:
        """`truth` has cam_from_world (3, 4) by query, named with or without folders."""
        import_pycolmap()  # what is missing is said before the long work
        self.data, self.out, self.top = data, out, top
        self.pairs, self.notes = data.pairs, list(data.notes)
        self.config = LocalizeConfig()
        self.truth = {} if truth is None else self._match_truth(truth)
        self.protocol = {
            "version": data.version,
            "database": len(data.database),
            "queries": {name: len(self._names(name)) for name in self._conditions()},
            "pairs": len(data.pairs),
            "top": top,
            "thresholds_m_deg": [list(pair) for pair in THRESHOLDS],
            "threshold_px": self.config.threshold_px,
            "min_inliers": self.config.min_inliers,
            "scored": len(self.truth),
        }

    def _match_truth(self, truth: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
        """The true poses of the queries by their full names."""
        by_file = {Path(name).name: pose for name, pose in truth.items()}
        found = {name: by_file[Path(name).name] for name in self.data.queries if Path(name).name in by_file}
        if not found:
            raise DataError("The file of true poses has none of the queries; give that of this data set.")
        unknown = [name for name in self.data.queries if name not in found]
        if unknown:
            self.notes.append(f"{len(unknown)} queries have no true pose and are not scored, such as {unknown[0]}.")
        if len(by_file) > len(found):
            self.notes.append(f"{len(by_file) - len(found)} true poses are of pictures that are not evaluated.")
        return found

    def _conditions(self) -> list[str]:
        return list(dict.fromkeys(query.condition for query in self.data.queries.values()))

    def _names(self, condition: str) -> list[str]:
        return [name for name, query in self.data.queries.items() if query.condition == condition]

    def score(self, matcher: str, get: GetMatches) -> Result:
        """Merge the matches, make the map, localize every query, and write the file of poses to `out`."""
        make_folder(self.out)
        try:
            with tempfile.TemporaryDirectory(dir=self.out, prefix=".scoring-") as folder:
                work = Path(folder)
                with MatchStore(work / "matches.sqlite", {}) as store:
                    infos, counts = self.undistort(get, store)
                    merged = merge(store, progress=self.tell)
                    world, located = self.locate(merged, work)
        except OSError as error:
            remedy = "make room or write elsewhere"
            raise OutputError(f"The folder {self.out} can't be written ({error.strerror}); {remedy}.") from error
        submission = self._write_submission(matcher, {name: pose for name, (_, pose) in located.items()})
        queries = tuple(score for score, _ in located.values())
        figures = Scores(
            conditions={name: group_score([q for q in queries if q.condition == name]) for name in self._conditions()},
            map=MapScore(
                pictures=sum(bool((rows >= 0).any()) for rows in world.rows.values()),
                points=len(world.xyz),
                track_length=world.track_length,
                error_px=world.error_px,
            ),
            matches=float(np.mean(counts)) if counts else 0.0,
            queries=queries,
            submission=submission.name,
        )
        return Result(matcher=matcher, cost=Cost.of(infos), failures=failures(self.pairs, infos), figures=figures)

    def undistort(self, get: GetMatches, store: MatchStore) -> tuple[list[Mapping[str, Any]], list[int]]:
        """Put all matches that there are into the store, as pinholes see them; their infos and numbers."""
        infos, counts = [], []
        for pair in self.pairs:
            matches = get(pair)
            infos.append(matches.info)
            counts.append(len(matches))
            if "error" not in matches.info:
                store.put(pair.name0, pair.name1, self._as_pinholes(pair, matches.top(self.top)))
        return infos, counts

    def _as_pinholes(self, pair: Pair, matches: Matches) -> Matches:
        """Matches between the undistorted pictures as they are stored."""
        lens0, lens1 = self._lens(pair.name0), self._lens(pair.name1)
        points0 = lens0.undistorted(matches.points0, pair.path0)
        points1 = lens1.undistorted(matches.points1, pair.path1)
        seen = np.isfinite(np.hstack([points0, points1])).all(axis=1)
        info = {f"network_size{side}": matches.info[f"seen{side}"] for side in (0, 1) if f"seen{side}" in matches.info}
        return Matches(
            points0=points0[seen].astype(np.float32),
            points1=points1[seen].astype(np.float32),
            scores=matches.scores[seen],
            size0=lens0.camera.size,
            size1=lens1.camera.size,
            info=info,
        )

    def _lens(self, name: str) -> Any:
        return self.data.queries[name].lens if name in self.data.queries else self.data.database[name]

    def locate(self, merged: MergedMatches, work: Path) -> tuple[PosedMap, dict[str, Located]]:
        """The map of the database, and the queries in it; `work` is an empty folder."""
        cameras = {name: lens.camera for name, lens in self.data.database.items()}
        world = triangulate(cameras, merged, work, self.tell)
        located, matched = {}, set(merged.pairs)
        for count, (name, query) in enumerate(self.data.queries.items(), start=1):
            pairs = [pair for other in query.candidates for pair in ((name, other), (other, name)) if pair in matched]
            found = Correspondences.join([world.correspond(merged, pair, name) for pair in pairs])
            reason = query.reason or (None if pairs else "None of its pairs could be matched.")
            located[name] = self._localize(name, query, found.merged(self.config.threshold_px), reason)
            self.tell("Localizing", count, len(self.data.queries))
        return world, located

    def _localize(self, name: str, query: Query, found: Correspondences, reason: str | None) -> Located:
        """A query's score and pose, which is None where there is a reason why it can't be estimated."""
        pose, inliers = None, 0
        if reason is None and query.lens is not None:
            estimated = absolute_pose(
                found.points,
                found.xyz,
                camera=query.lens.camera,
                scores=found.scores,
                threshold_px=self.config.threshold_px,
                min_inliers=self.config.min_inliers,
            )
            pose, reason, inliers = estimated.cam_from_world, estimated.reason, int(estimated.inliers.sum())
        error_m, error_deg = self._errors(name, pose)
        score = QueryScore(
            name=name,
            condition=query.condition,
            reason=reason,
            candidates=len(query.candidates),
            correspondences=len(found),
            inliers=inliers,
            error_m=error_m,
            error_deg=error_deg,
        )
        return score, pose

    def _errors(self, name: str, pose: FloatArray | None) -> tuple[float, float]:
        """Metres between the places, and degrees between the orientations."""
        true = self.truth.get(name)
        if true is None:
            return UNKNOWN, UNKNOWN
        if pose is None:
            return float("inf"), float("inf")
        distance = float(np.linalg.norm(_center(pose) - _center(true)))
        return distance, rotation_error_deg(pose[:, :3], true[:, :3])

    def _write_submission(self, matcher: str, poses: Mapping[str, FloatArray | None]) -> Path:
        """As the benchmark's service wants it: names without folders, only queries that were localized."""
        method = re.sub(r"[^A-Za-z0-9._-]", "_", matcher)
        path = self.out / f"{_FILE.get(self.data.version, 'poses')}_[{method}].txt"
        write_poses(path, {Path(name).name: pose for name, pose in poses.items() if pose is not None})
        return path

    def tables(self, results: Sequence[Result]) -> list[Table]:
        """What was localized, the paper's table with ours, and the queries that were not."""
        size = f"{len(self.data.database)} database pictures, {len(self.pairs)} pairs"
        tables = [main_table(results, f"Aachen Day-Night {self.data.version}: {size}"), recall_table(results)]
        lost = lost_table(results)
        return [*tables, lost] if lost.rows else tables

    def curves(self, results: Sequence[Result]) -> dict[str, Picture]:
        """The share of queries within a distance, where true poses are known."""
        return {"aachen_recall": recall_curves(results)} if self.truth else {}

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """The queries from best to worst, each with its first candidate."""
        first: dict[str, Pair] = {}
        for pair in self.pairs:
            if pair.name0 in self.data.queries:
                first.setdefault(pair.name0, pair)
        scores = [q for q in result.figures.queries if q.name in first]
        order = sorted(scores, key=lambda q: (np.nan_to_num(q.error_m, nan=0.0, posinf=np.inf), -q.inliers))
        return [(first[q.name], q.in_words()) for q in order]

    def draw(self, pair: Pair, matches: Matches) -> Picture:
        """Where the true pose is known, green lines for matches that agree with it and red ones for others."""
        best, true = matches.top(self.top), self.truth.get(pair.name0)
        lens0, lens1 = self._lens(pair.name0), self._lens(pair.name1)
        if not len(best) or true is None:
            return draw_matches(read(pair.path0), read(pair.path1), best)
        pose = cam1_from_cam0(true, lens1.camera.cam_from_world)
        F = fundamental_from_pose(pose, lens0.camera, lens1.camera)
        points0 = lens0.undistorted(best.points0, pair.path0)
        points1 = lens1.undistorted(best.points1, pair.path1)
        agree = epipolar_distance_px(F, points0, points1) <= _EPIPOLAR_PX
        best = replace(best, estimate=Estimate(kind="fundamental", matrix=F, inliers=agree))
        return draw_matches(read(pair.path0), read(pair.path1), best, colors="inliers")


def open_aachen(roots: Sequence[Path], *, out: Path, truth: Path | None, top: int) -> Aachen:
    """The benchmark of a folder, with true poses from a file where one is given."""
    if len(roots) != 1:
        raise DataError("Aachen Day-Night is one folder; give one.")
    poses = None if truth is None else read_poses(truth)
    return Aachen(read_aachen(roots[0]), out=out, truth=poses, top=top)


def _center(pose: FloatArray) -> FloatArray:
    place: FloatArray = -pose[:, :3].T @ pose[:, 3]
    return place
