"""InLoc: indoor localization of photos by matches with cutouts of laser scans, whose pixels have 3D points."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from rich.console import Console

from dualrc.draw import draw_dots
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation.benchmark import COST_COLUMNS, SIZE_OPTION, Benchmark, GetMatches, Option, Result, Settings
from dualrc.evaluation.data_files import pose_errors, read_published
from dualrc.evaluation.export import Pair, file_name
from dualrc.evaluation.figures import curve_panels
from dualrc.evaluation.inloc_data import (
    CandidatePose,
    find_folders,
    find_list,
    read_candidates,
    read_references,
    read_result_list,
    write_result_list,
)
from dualrc.evaluation.inloc_poses import MIN_INLIERS, PAPER_MIN_INLIERS, RANSAC_DEG, PoseEstimator
from dualrc.evaluation.matchers import MatcherSettings, PairMatcher, make_matchers, network_matcher, read_networks
from dualrc.evaluation.report import Report, Table
from dualrc.image import read
from dualrc.localize import write_poses
from dualrc.matches import Matches
from dualrc.types import FloatArray, ImageArray

THRESHOLDS_M = (0.25, 0.5, 1.0)
# Distances at which the published curves are sampled.
CURVE_M = (*(step / 16 for step in range(17)), *(1 + step / 8 for step in range(1, 9)))
WITHIN_DEG = 10.0
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class InLocSettings(Settings):
    """Settings of InLoc."""

    weights: Annotated[tuple[Path, ...], Option("Repeatable, to compare networks as in the paper's appendix.")] = ()
    size: Annotated[int | None, SIZE_OPTION] = None
    truth: Annotated[Path | None, Option("File of reference poses (.mat). Default: the one in ROOT.")] = None
    shortlist: Annotated[
        Path | None, Option("Candidates of each query, .mat as published or text. Default: the list in ROOT.")
    ] = None
    min_inliers: Annotated[
        int, Option(f"Minimum number of inliers of a pose. Default: {MIN_INLIERS}.", flags=("--min-inliers",))
    ] = MIN_INLIERS
    candidates: Annotated[int, Option("Number of candidates to match each query with. Default: 10.")] = 10
    verify: Annotated[bool, Option("Rank poses by dense verification against the scan, not by inliers.")] = False
    results: Annotated[
        tuple[Path, ...], Option("List of results (.mat) to score too, or alone without ROOT; repeatable.")
    ] = ()

    paper: ClassVar = {"size": 1600, "top": 2000, "verify": True, "min_inliers": PAPER_MIN_INLIERS}
    differences: ClassVar = (
        "The published evaluation keeps poses with 3 inliers, which fit several poses, and takes the 3D point of one "
        f"pixel of a cutout. Here a pose needs {PAPER_MIN_INLIERS} inliers, and 3D points are interpolated."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_inliers < PAPER_MIN_INLIERS:
            raise ConfigError(
                f"min_inliers = {self.min_inliers} is too low for a pose; pass {PAPER_MIN_INLIERS} or more."
            )
        if self.candidates < 1:
            raise ConfigError(f"candidates = {self.candidates} leaves no pairs to match; pass 1 or more.")
        for name in (names := [path.stem for path in dict.fromkeys(self.results)]):
            if names.count(name) > 1:
                raise ConfigError(f"Two lists of results are called {name}; rename one of them.")

    @property
    def needs_roots(self) -> bool:
        """Whether the dataset is needed; stored lists of results can be scored without it."""
        return not self.results


@dataclass(frozen=True, kw_only=True)
class QueryScore:
    """Score of a query; errors are inf without a pose, or with a pose on another floor."""

    query: str
    # None if it has no reference pose and is not scored.
    floor: str | None
    distance_m: float = float("inf")
    rotation_deg: float = float("inf")
    # Best first.
    candidates: tuple[CandidatePose, ...] = ()

    @staticmethod
    def of(query: str, floor: str, reference: FloatArray, candidates: tuple[CandidatePose, ...]) -> "QueryScore":
        """Score a query by the pose of its best candidate."""
        score = QueryScore(query=query, floor=floor, candidates=candidates)
        pose = candidates[0].pose if candidates else None
        # Each floor has its own coordinate frame, so a pose on another floor is always wrong.
        if pose is None or candidates[0].candidate.split("/", maxsplit=1)[0] != floor:
            return score
        distance_m, rotation_deg = pose_errors(pose, reference)
        return replace(score, distance_m=distance_m, rotation_deg=rotation_deg)

    @property
    def lost(self) -> bool:
        """Whether there is no pose."""
        return not self.candidates or self.candidates[0].cam_from_world is None

    @property
    def error_m(self) -> float:
        """Distance if the rotation is correct, else inf."""
        return self.distance_m if self.rotation_deg <= WITHIN_DEG else float("inf")

    def describe(self) -> str:
        """Describe the result of a query with candidates for a caption."""
        best = self.candidates[0]
        if best.pose is None:
            return f"no pose: {best.reason}"
        errors = f"{self.distance_m:.2f} m, {self.rotation_deg:.1f}°"
        where = errors if np.isfinite(self.distance_m) else "another floor"
        return f"{where}, {best.inliers} of {best.correspondences} inliers"


@dataclass(frozen=True, kw_only=True)
class FloorScore:
    """Scores of the queries of a floor, or of all."""

    queries: int
    without_pose: int
    # Share of queries at 0.25, 0.5 and 1 m.
    within: tuple[float, ...]
    # Share of queries at CURVE_M.
    curve: tuple[float, ...]

    @staticmethod
    def of(scores: Sequence[QueryScore]) -> "FloorScore":
        """Compute the shares of queries within each distance."""
        errors = np.array([score.error_m for score in scores])

        def within(thresholds: Sequence[float]) -> tuple[float, ...]:
            return tuple(float(np.mean(errors < threshold)) if len(errors) else 0.0 for threshold in thresholds)

        lost = sum(score.lost for score in scores)
        return FloorScore(queries=len(scores), without_pose=lost, within=within(THRESHOLDS_M), curve=within(CURVE_M))


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All scores of a matcher or of a stored list."""

    # By floor, and "all".
    floors: dict[str, FloorScore]
    # Mean per pair.
    matches: float
    queries: tuple[QueryScore, ...]


class InLoc(Benchmark):
    """Queries with candidates, and reference poses by floor; without roots, only stored lists are scored."""

    name = "inloc"
    summary = "inloc localizes InLoc's queries by cutouts of its scans, and plots the recall with published curves."
    example = "data/inloc --verify --out inloc"
    settings_class = InLocSettings
    recognized_by = ("cutouts", "cutouts_imageonly", "database/cutouts", "iphone7", "query/iphone7")
    one_root = True
    sift_features = 8000
    settings: InLocSettings

    def __init__(self, settings: InLocSettings, messages: Console | None = None) -> None:
        super().__init__(settings, messages)
        self.queries: list[str] = []
        truth = settings.truth
        if settings.roots:
            self._open(settings.roots[0])
            truth = truth or find_list(settings.roots[0], ["*refposes*.mat"])
        self.references = {} if truth is None else read_references(truth)
        self._check_references(truth)
        # Read before the slow steps, to report an unusable file at once.
        self._networks = read_networks(settings.weights) if settings.roots and len(settings.weights) > 1 else []
        self._lists = {path: self._read_list(path) for path in dict.fromkeys(settings.results)}
        self.protocol = {
            "candidates": settings.candidates,
            "top": self.top,
            "verify": settings.verify,
            "estimator": f"PoseLib LO-RANSAC (P3P), {RANSAC_DEG:g} degrees, {settings.min_inliers} inliers or more",
            "thresholds_m": list(THRESHOLDS_M),
            "within_deg": WITHIN_DEG,
            "curve_m": list(CURVE_M),
            "reference_queries": {floor: len(poses) for floor, poses in self.references.items()},
            "queries": len(self.queries),
            "pairs": len(self.pairs),
        }

    def _open(self, root: Path) -> None:
        """Find the pairs of queries and candidates."""
        folders = find_folders(root)
        shortlist = self.settings.shortlist or find_list(root, ["*shortlist*.mat", "*shortlist*.txt", "*pairs*.txt"])
        if shortlist is None:
            remedy = "pass densePE_top100_shortlist_cvpr18.mat or a text file with --shortlist"
            raise DataError(f"{root} has no list of candidates (*shortlist*.mat); {remedy}.")
        for query, candidates in read_candidates(shortlist).items():
            self.queries.append(query)
            for name in candidates[: self.settings.candidates]:
                # A missing image raises an error when it is read, and the pair counts as a failure.
                path0, path1, floor = folders.queries / query, folders.cutouts / name, name.split("/", maxsplit=1)[0]
                self.pairs.append(Pair(name0=query, name1=name, path0=path0, path1=path1, group=floor))
        if not any(pair.path0.is_file() for pair in self.pairs):
            raise DataError(f"{folders.queries} has none of the queries, such as {self.queries[0]}; copy them there.")
        if not any(pair.path1.is_file() for pair in self.pairs):
            raise DataError(
                f"{folders.cutouts} has none of the candidates, such as {self.pairs[0].name1}; copy them there."
            )
        self._estimator = PoseEstimator(folders, self.settings.out / "poses.jsonl", self.settings.min_inliers)

    def _check_references(self, truth: Path | None) -> None:
        """Note which queries are not scored, and which are scored without candidates."""
        if not self.references:
            self.notes.append("There are no reference poses: nothing is scored, poses are only written.")
        if not self.references or not self.queries:
            return
        known = [query for poses in self.references.values() for query in poses]
        if not set(known) & set(self.queries):
            raise DataError(f"{truth} has no pose of any query in the list; pass the file of this dataset.")
        if unknown := [query for query in self.queries if query not in known]:
            self.notes.append(f"{len(unknown)} queries have no reference pose and are not scored: {_some(unknown)}.")
        if untried := [query for query in known if query not in self.queries]:
            self.notes.append(f"{len(untried)} queries have no candidates and count as failures: {_some(untried)}.")

    def _read_list(self, path: Path) -> dict[str, tuple[CandidatePose, ...]]:
        if not self.references:
            raise ConfigError("Scoring results needs reference poses; pass --truth DUC_refposes_all.mat.")
        listed = read_result_list(path, need_poses=True)
        known = {query for poses in self.references.values() for query in poses}
        if not known & listed.keys():
            raise DataError(f"{path} has none of the queries with reference poses; pass another list.")
        if missing := sorted(known - listed.keys()):
            words = "queries are not in the list and count as failures"
            self.notes.append(f"{path.stem}: {len(missing)} {words}: {_some(missing)}.")
        return listed

    def matcher_settings(self) -> MatcherSettings:
        """Return the settings of matchers."""
        # As in localization: most candidates do not show the place of the query.
        weights = next(iter(self.settings.weights), None)
        return replace(super().matcher_settings(), weights=weights, size=self.settings.size, max_tilt=1.0)

    def matchers(self) -> Iterator[tuple[str, PairMatcher]]:
        """Yield the matchers to evaluate; with several weights, each of them instead of dualrc."""
        weights, wanted = self.settings.weights, self.settings.matchers
        if len(weights) < 2 or "dualrc" not in wanted:
            yield from super().matchers()
            return
        chosen = self.matcher_settings()
        for network in self._networks:
            yield network.label, network_matcher(network, chosen, self.settings.size)
        for matcher in make_matchers([name for name in wanted if name != "dualrc"], chosen):
            yield matcher.name, matcher

    def score(self, matcher: str, get: GetMatches) -> Scores:
        """Estimate a pose for each candidate, rank the candidates, and write the poses to `out`."""
        self._estimator.broken.clear()
        counts, found = [], dict[str, list[CandidatePose]]({query: [] for query in self.queries})
        for pair in self.pairs:
            matches = get(pair).top(self.top)
            counts.append(len(matches))
            found[pair.name0].append(self._estimator.estimate(pair, matches))
        if self.settings.verify:
            photographs = {pair.name0: pair.path0 for pair in self.pairs}
            found = self._estimator.verify(found, photographs, self.progress)
        if broken := self._estimator.broken:
            file, reason = next(iter(broken.items()))
            note = f"{len(broken)} files cannot be used, and their candidates give no pose, such as {file}: {reason}"
            self.notes += [note] * (note not in self.notes)
        # Candidates with a pose first, by verification if available, then by inliers.
        ranked = {
            query: tuple(sorted(own, key=lambda one: (one.pose is None, -(one.verified or 0.0), -one.inliers)))
            for query, own in found.items()
        }
        poses = {query: own[0].pose for query, own in ranked.items() if own and own[0].pose is not None}
        out, stem = self.settings.out, file_name(matcher)
        # In the format of visuallocalization.net.
        write_poses(out / f"poses-{stem}.txt", poses)
        write_result_list(out / f"results-{stem}.mat", {query: own for query, own in ranked.items() if own})
        return self._scores(ranked, float(np.mean(counts)))

    def stored_results(self) -> list[Result]:
        """Return the stored lists of results, as published or as this benchmark writes them."""
        return [
            Result(matcher=path.stem, figures=self._scores(listed, float("nan")), config={"results": path.name})
            for path, listed in self._lists.items()
        ]

    def _scores(self, ranked: Mapping[str, tuple[CandidatePose, ...]], matches: float) -> Scores:
        scores, floors = list[QueryScore](), dict[str, FloorScore]()
        for floor, poses in self.references.items():
            own = [QueryScore.of(query, floor, pose, ranked.get(query, ())) for query, pose in poses.items()]
            floors[floor] = FloorScore.of(own)
            scores += own
        if floors:
            floors[ALL] = FloorScore.of(scores)
        known = {score.query for score in scores}
        rest = [QueryScore(query=q, floor=None, candidates=own) for q, own in ranked.items() if q not in known]
        return Scores(floors=floors, matches=matches, queries=(*scores, *rest))

    def report(self, results: Sequence[Result]) -> Report:
        """Return localized queries by floor, with the published results if the floors are InLoc's."""
        if not self.references:
            return Report(tables=[self._main_table(results)])
        floors = [*self.references, ALL]
        # Method -> DUC1, DUC2 or all -> share of queries at CURVE_M.
        published_curves = read_published("inloc_published.json") if set(self.references) == {"DUC1", "DUC2"} else {}
        ours = {result.matcher: {floor: result.figures.floors[floor].curve for floor in floors} for result in results}
        theirs = {f"{name}, published": curves for name, curves in published_curves.items()}
        title = f"Share of queries within a distance and {WITHIN_DEG:g} degrees"
        note = "Thick: this run. Thin: published, on InLoc's 329 queries." if published_curves else ""
        curves = curve_panels(floors, CURVE_M, ours, theirs, title=title, x_label="distance (m)", note=note)
        tables = [self._main_table(results)]
        if published_curves:
            dots = [CURVE_M.index(threshold) for threshold in THRESHOLDS_M]
            comparison = Table(
                title=f"Beside the published results: {' / '.join(f'{t:g}' for t in THRESHOLDS_M)} m",
                columns=["matcher", *floors],
                rows=[
                    [name, *(_percent([curves[floor][dot] for dot in dots]) for floor in floors)]
                    for name, curves in {**ours, **theirs}.items()
                ],
                note="Published: on 198 queries of DUC1 and 131 of DUC2.",
            )
            tables.append(comparison)
        return Report(tables=tables, figures={"inloc_recall": curves})

    def _main_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for result in results:
            scored: Scores = result.figures
            cost = ["-", "-", "-"] if np.isnan(scored.matches) else result.cost.cells(scored.matches)
            for floor, score in scored.floors.items():
                shares = [_percent([within]) for within in score.within]
                rows.append([result.matcher, floor, str(score.queries), *shares, str(score.without_pose), *cost])
            if not scored.floors:
                lost = sum(score.lost for score in scored.queries)
                rows.append([result.matcher, "-", str(len(scored.queries)), "-", "-", "-", str(lost), *cost])
        order = "dense pose verification" if self.settings.verify else "inliers"
        return Table(
            title="InLoc: queries localized, in percent",
            columns=["matcher", "floor", "queries", *(f"{t:g} m" for t in THRESHOLDS_M), "lost", *COST_COLUMNS],
            rows=rows,
            note=(
                f"Within a distance and {WITHIN_DEG:g} degrees of the reference pose. Lost: queries without a pose, "
                f"which count as failures, as do poses on another floor. Candidates are ranked by {order}. Matches "
                "and time are per pair, without pose estimation."
            ),
        )

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """Rank queries by the distance of their pose, each with its best candidate."""
        pairs = {(pair.name0, pair.name1): pair for pair in self.pairs}
        scores: list[QueryScore] = [s for s in result.figures.queries if s.candidates and s.floor is not None]
        scores.sort(key=lambda s: (s.error_m, s.distance_m, -s.candidates[0].inliers))
        return [(pairs[score.query, score.candidates[0].candidate], score.describe()) for score in scores]

    def draw(self, pair: Pair, matches: Matches) -> ImageArray:
        """Draw inliers of the pose as green dots, and other matches as red dots."""
        best = matches.top(self.top)
        agree = np.zeros(len(best), dtype=np.bool_)
        if len(best):
            # If the points cannot be read, there are no inliers.
            with suppress(DataError):
                agree = self._estimator.inliers(pair, best)
        return draw_dots(read(pair.path0), read(pair.path1), best, agree)


def _percent(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
