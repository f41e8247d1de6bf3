"""InLoc: photographs localized indoors by their matches with cut-outs of laser scans, whose pixels have 3D points."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualrc.draw import Picture, draw_dots
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation.benchmark import COST_COLUMNS, Benchmark, Cost, GetMatches, Result, Table, cost_cells, failures
from dualrc.evaluation.export import Pair
from dualrc.evaluation.figures import Panel, curve_panels
from dualrc.evaluation.inloc_files import (
    Folders,
    Ranked,
    find_folders,
    find_list,
    read_candidates,
    read_references,
    read_result_list,
    write_result_list,
)
from dualrc.evaluation.inloc_poses import MIN_INLIERS, RANSAC_DEG, CandidatePoses, Tried, pose_rows
from dualrc.evaluation.inloc_scores import (
    ALL,
    CURVE_M,
    THRESHOLDS_M,
    WITHIN_DEG,
    QueryScore,
    Scores,
    floor_score,
    in_words,
    published,
    query_score,
)
from dualrc.image import read
from dualrc.localize.results import write_poses
from dualrc.matches import Matches

DEFAULT_TOP = 4000
_NO_POSE = np.full((3, 4), np.nan)


@dataclass(frozen=True, kw_only=True)
class InLocSettings:
    """What InLoc has beside other benchmarks."""

    # Candidates of each query (.mat or text); None: the one list under the root.
    shortlist: Path | None = None
    # Match each query with the best so many of them.
    candidates: int = 10
    # Rank poses by how alike the photograph and the scan look from there, instead of by inliers.
    verify: bool = False
    # Stored lists of results (.mat), scored beside the matchers, or alone where there is no root.
    results: tuple[Path, ...] = ()


class InLoc(Benchmark):
    """Queries with their candidates, and reference poses by floor; without roots, only stored lists are scored."""

    name = "inloc"

    def __init__(
        self,
        roots: Sequence[Path],
        settings: InLocSettings,
        *,
        truth: Path | None = None,
        top: int = DEFAULT_TOP,
        out: Path | None = None,
    ) -> None:
        if settings.candidates < 1:
            raise ConfigError(f"{settings.candidates} candidates leave nothing to match; give 1 or more.")
        if len(roots) > 1:
            raise ConfigError("InLoc has one folder; give one ROOT.")
        self.notes, self.pairs, self.queries = [], [], list[str]()
        self.top, self.verify, self._out = top, settings.verify, out
        self._poses: CandidatePoses | None = None
        if roots:
            folders = find_folders(roots[0])
            truth = truth or find_list(roots[0], ["*refposes*.mat"])
            self._add_pairs(folders, _shortlist(roots[0], settings.shortlist), settings.candidates)
            self._poses = CandidatePoses(folders, None if out is None else out / "poses.jsonl")
        self.references = {} if truth is None else read_references(truth)
        self._check(truth)
        # Read before the long work, so that a list that can't be scored costs nothing.
        self._lists = {path: self._read_list(path) for path in dict.fromkeys(settings.results)}
        for name in (stems := [path.stem for path in self._lists]):
            if stems.count(name) > 1:
                raise ConfigError(f"Two lists of results are called {name}; rename one of them.")
        self.protocol = {
            "candidates": settings.candidates,
            "top": top,
            "verify": settings.verify,
            "estimator": f"PoseLib LO-RANSAC (P3P), {RANSAC_DEG:g} degrees, {MIN_INLIERS} inliers or more",
            "thresholds_m": list(THRESHOLDS_M),
            "within_deg": WITHIN_DEG,
            "curve_m": list(CURVE_M),
            "reference_queries": {floor: len(poses) for floor, poses in self.references.items()},
            "queries": len(self.queries),
            "pairs": len(self.pairs),
        }

    def _add_pairs(self, folders: Folders, listed: Mapping[str, Ranked], candidates: int) -> None:
        for query, ranked in listed.items():
            self.queries.append(query)
            for name in ranked.candidates[:candidates]:
                # A picture that is missing fails when it is read, and then counts as a failure.
                path0, path1 = folders.queries / query, folders.cutouts / name
                floor = name.split("/", maxsplit=1)[0]
                self.pairs.append(Pair(name0=query, name1=name, path0=path0, path1=path1, group=floor))
        if not any(pair.path0.is_file() for pair in self.pairs):
            raise DataError(f"{folders.queries} has none of the queries, such as {self.queries[0]}; put them there.")
        if not any(pair.path1.is_file() for pair in self.pairs):
            raise DataError(f"{folders.cutouts} has none of the candidates, such as {self.pairs[0].name1}.")

    def _check(self, truth: Path | None) -> None:
        """Note what is not scored, and what is scored without having been tried."""
        if not self.references:
            self.notes.append("There are no reference poses: nothing is scored, poses are only written.")
            return
        floors = {query: floor for floor, poses in self.references.items() for query in poses}
        if self._poses is None:
            return
        if not floors.keys() & set(self.queries):
            raise DataError(f"{truth} has no pose of any query in the list; give the file of this data set.")
        if unknown := [query for query in self.queries if query not in floors]:
            self.notes.append(f"{len(unknown)} queries have no reference pose and are not scored: {_some(unknown)}.")
        if untried := [query for query in floors if query not in set(self.queries)]:
            self.notes.append(f"{len(untried)} queries have no candidates and count as failures: {_some(untried)}.")

    def score(self, matcher: str, get: GetMatches) -> Result:
        """Score a matcher by its stored matches."""
        assert self._poses is not None
        self._poses.broken.clear()
        infos, counts = [], []
        tried: dict[str, list[Tried]] = {query: [] for query in self.queries}
        for pair in self.pairs:
            matches = get(pair)
            infos.append(matches.info)
            counts.append(min(len(matches), self.top))
            tried[pair.name0].append(self._poses.estimate(pair, matches.top(self.top)))
        if self.verify:
            tried = self._poses.verify(tried, {pair.name0: pair.path0 for pair in self.pairs}, self.tell)
        if broken := self._poses.broken:
            file, reason = next(iter(broken.items()))
            note = f"{len(broken)} files can't be used, and their candidates give no pose, such as {file}: {reason}"
            self.notes += [note] * (note not in self.notes)
        best_first = {query: tuple(sorted(found, key=_order)) for query, found in tried.items()}
        figures = self._scored(best_first, float(np.mean(counts)))
        if self._out is not None:
            _write_results(self._out, matcher, best_first)
        return Result(matcher=matcher, cost=Cost.of(infos), failures=failures(self.pairs, infos), figures=figures)

    def score_lists(self) -> list[Result]:
        """Score the stored lists of results, as published or as this benchmark writes them."""
        cost = Cost(seconds_per_pair=None, resolution="")
        return [
            Result(
                matcher=path.stem,
                cost=cost,
                failures={},
                figures=self._scored({query: _stored(ranked) for query, ranked in listed.items()}, float("nan")),
                config={"results": path.name},
            )
            for path, listed in self._lists.items()
        ]

    def _read_list(self, path: Path) -> dict[str, Ranked]:
        if not self.references:
            raise ConfigError("Results are scored against reference poses; give --truth DUC_refposes_all.mat.")
        listed = read_result_list(path)
        if not any(ranked.poses for ranked in listed.values()):
            raise DataError(f"{path} is a list of candidates without poses; give a list of results.")
        known = {query for poses in self.references.values() for query in poses}
        if not known & listed.keys():
            raise DataError(f"{path} has none of the queries that have reference poses; give another list.")
        if missing := sorted(known - listed.keys()):
            self.notes.append(
                f"{path.stem}: {len(missing)} queries are not in the list and count as failures: {_some(missing)}."
            )
        return listed

    def _scored(self, tried: Mapping[str, tuple[Tried, ...]], matches: float) -> Scores:
        scores = []
        for floor, poses in self.references.items():
            for query, reference in poses.items():
                scores.append(query_score(query, floor, reference, tried.get(query, ())))
        scored = {score.query for score in scores}
        floors = {floor: floor_score([s for s in scores if s.floor == floor]) for floor in self.references}
        if self.references:
            floors[ALL] = floor_score(scores)
        rest = [QueryScore(query=q, floor=None, candidates=found) for q, found in tried.items() if q not in scored]
        return Scores(floors=floors, matches=matches, queries=(*scores, *rest))

    def tables(self, results: Sequence[Result]) -> list[Table]:
        """By floor; and beside the published results, where the floors are InLoc's."""
        rows = []
        for result in results:
            scored: Scores = result.figures
            cost = ["-", "-", "-"] if np.isnan(scored.matches) else cost_cells(scored.matches, result.cost)
            for floor, score in scored.floors.items():
                shares = [_percent([within]) for within in score.within]
                rows.append([result.matcher, floor, str(score.queries), *shares, str(score.without_pose), *cost])
            if not scored.floors:
                lost = sum(score.lost for score in scored.queries)
                rows.append([result.matcher, "-", str(len(scored.queries)), "-", "-", "-", str(lost), *cost])
        order = "dense pose verification" if self.verify else "inliers"
        main = Table(
            title="InLoc: queries localized, in percent",
            columns=["matcher", "floor", "queries", *(f"{t:g} m" for t in THRESHOLDS_M), "lost", *COST_COLUMNS],
            rows=rows,
            note=(
                f"Within a distance and {WITHIN_DEG:g} degrees of the reference pose. Lost: queries without a pose; "
                f"they count as failures, as do poses on another floor. Candidates are ranked by {order}; matches and "
                "time a pair, without the estimation."
            ),
        )
        return [main, self._comparison(results)] if self._published() else [main]

    def _comparison(self, results: Sequence[Result]) -> Table:
        floors, dots = [*self.references, ALL], [CURVE_M.index(threshold) for threshold in THRESHOLDS_M]
        curves = {result.matcher: {f: result.figures.floors[f].curve for f in floors} for result in results}
        curves |= {f"{name}, published": curve for name, curve in self._published().items()}
        cells = [[name, *(_percent([curve[f][dot] for dot in dots]) for f in floors)] for name, curve in curves.items()]
        title = f"Beside the published results: {' / '.join(f'{t:g}' for t in THRESHOLDS_M)} m"
        note = "Published: on 198 queries of DUC1 and 131 of DUC2."
        return Table(title=title, columns=["matcher", *floors], rows=cells, note=note)

    def curves(self, results: Sequence[Result]) -> dict[str, Picture]:
        """Share of queries over the distance, a panel for each floor and one for all."""
        if not self.references:
            return {}
        reference, panels = self._published(), []
        for floor in (*self.references, ALL):
            ours = {result.matcher: result.figures.floors[floor].curve for result in results}
            theirs = {f"{name}, published": curves[floor] for name, curves in reference.items()}
            panels.append(Panel(title=floor, x=CURVE_M, ours=ours, published=theirs))
        title = f"Share of queries within a distance and {WITHIN_DEG:g} degrees"
        note = "Thick: this run. Thin: published, on InLoc's 329 queries." if reference else ""
        return {"inloc_recall": curve_panels(panels, title=title, x_label="distance (m)", note=note)}

    def _published(self) -> dict[str, dict[str, list[float]]]:
        """Published curves, where this run's floors are InLoc's."""
        return published() if set(self.references) == {"DUC1", "DUC2"} else {}

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """Queries by the distance of their pose, each with its best candidate."""
        by_names = {(pair.name0, pair.name1): pair for pair in self.pairs}
        scores: list[QueryScore] = [s for s in result.figures.queries if s.candidates and s.floor is not None]
        found = []
        for score in sorted(scores, key=lambda s: (s.error_m, s.distance_m, -s.candidates[0].inliers)):
            pair = by_names.get((score.query, score.candidates[0].candidate))
            if pair is not None:
                found.append((pair, in_words(score)))
        return found

    def draw(self, pair: Pair, matches: Matches) -> Picture:
        """Green dots for inliers of the pose, red ones elsewhere."""
        best = matches.top(self.top)
        agree = np.zeros(len(best), dtype=np.bool_)
        if len(best) and self._poses is not None:
            with suppress(DataError):  # where the points can't be read, nothing agrees
                agree = self._poses.inliers(pair, best)
        return draw_dots(read(pair.path0), read(pair.path1), best, agree)


def _shortlist(root: Path, given: Path | None) -> dict[str, Ranked]:
    path = given or find_list(root, ["*shortlist*.mat", "*shortlist*.txt", "*pairs*.txt"])
    if path is None:
        remedy = "give densePE_top100_shortlist_cvpr18.mat or a text file with --shortlist"
        raise DataError(f"{root} has no list of candidates (*shortlist*.mat); {remedy}.")
    return read_candidates(path)


def _write_results(folder: Path, matcher: str, tried: Mapping[str, tuple[Tried, ...]]) -> None:
    """The poses as visuallocalization.net takes them, and the list of results in the published format."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", matcher)
    best = {query: found[0].pose for query, found in tried.items() if found}
    write_poses(folder / f"poses-{stem}.txt", {query: pose for query, pose in best.items() if pose is not None})
    write_result_list(folder / f"results-{stem}.mat", {q: _ranked(found) for q, found in tried.items() if found})


def _stored(ranked: Ranked) -> tuple[Tried, ...]:
    poses = [*ranked.poses, *[_NO_POSE] * (len(ranked.candidates) - len(ranked.poses))]
    return tuple(
        Tried(candidate=name, cam_from_world=pose_rows(pose) if np.isfinite(pose).all() else None)
        for name, pose in zip(ranked.candidates, poses, strict=True)
    )


def _ranked(tried: Sequence[Tried]) -> Ranked:
    return Ranked(
        candidates=tuple(one.candidate for one in tried),
        scores=tuple(float(one.inliers if one.verified is None else one.verified) for one in tried),
        poses=tuple(_NO_POSE if one.pose is None else one.pose for one in tried),
    )


def _order(one: Tried) -> tuple[bool, float, int]:
    """Best first: those with a pose, by verification where there is one, and by inliers."""
    return one.cam_from_world is None, -(one.verified or 0.0), -one.inliers


def _percent(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
