"""Hard pairs: planes at extreme angles (EVD), and wide baselines in viewpoint, light, season and sensor (WxBS)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dualrc.draw import draw_dots, draw_matches
from dualrc.errors import DataError
from dualrc.evaluation.benchmark import COST_COLUMNS, Benchmark, GetMatches, Result, folder_hint
from dualrc.evaluation.data_files import check_folder
from dualrc.evaluation.export import Pair
from dualrc.evaluation.report import Report, Table, share
from dualrc.formats import SUFFIXES
from dualrc.geometry import epipolar_distance_px, estimate
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.metrics import match_errors_px, share_within
from dualrc.types import FloatArray, ImageArray

_EVD, _WXBS = "evd", "wxbs"
# Number of best matches that are scored.
_TOPS = {_EVD: 1000, _WXBS: 2000}
EVD_PX, WXBS_PX = 5, (5, 20)
_RANSAC_PX = 1.5
# RANSAC's result of a hard pair depends on its seed, so the score is the mean over several.
_SEEDS = 8
# Minimum number of matches to estimate a fundamental matrix.
_FEWEST = 8


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """Score of a pair: the share of its matches, or of its points, within each threshold."""

    name: str
    # "evd" or "wxbs".
    kind: str
    # At the thresholds EVD_PX or WXBS_PX.
    within: tuple[float, ...]
    matches: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Mean scores by kind, in the order of the thresholds, and the scores of all pairs."""

    evd: tuple[float, ...] | None
    wxbs: tuple[float, ...] | None
    matches: float
    pairs: tuple[PairScore, ...]

    @staticmethod
    def of(scores: Sequence[PairScore]) -> "Scores":
        """Compute the mean scores of pairs."""

        def mean(kind: str) -> tuple[float, ...] | None:
            shares = [score.within for score in scores if score.kind == kind]
            return tuple(np.mean(shares, axis=0).tolist()) if shares else None

        matches = float(np.mean([score.matches for score in scores]))
        return Scores(evd=mean(_EVD), wxbs=mean(_WXBS), matches=matches, pairs=tuple(scores))


class Hard(Benchmark):
    """Folders with images 1 and 2 and either H_1_2 or points.txt, whose lines are `x1 y1 x2 y2`."""

    name = "hard"
    summary = "hard scores pairs of EVD (with H_1_2) and of WxBS (with points.txt)."
    example = "data/hard --matcher dualrc --matcher dualrc-high --matcher sift"
    recognized_by = ("evd/*/H_1_2", "wxbs/*/points.txt", "*/points.txt")

    def __init__(self, settings: Any, messages: Console | None = None) -> None:
        super().__init__(settings, messages)
        # Homographies (3, 3) of EVD, and points (n, 4) of WxBS.
        self.truths: dict[Pair, FloatArray] = {}
        for root in settings.roots:
            check_folder(root)
            for path in sorted(p for pattern in ("H_1_2", "points.txt") for p in root.rglob(pattern)):
                self._add(path)
        self.pairs = sorted(self.truths, key=lambda pair: pair.group)
        if not self.pairs:
            root, layout = settings.roots[0], "1.jpg, 2.jpg and H_1_2 or points.txt"
            raise DataError(f"{root} has no folder with {layout}; {folder_hint(root, self.name)}.")
        names = [pair.names for pair in self.pairs]
        if len(set(names)) < len(names):
            raise DataError("Two roots have pairs of the same name; evaluate them one after the other.")
        self.tops = {kind: settings.top or top for kind, top in _TOPS.items()}
        self.counts = Counter(pair.group for pair in self.pairs)
        self.protocol = {
            "evd": {"pairs": self.counts[_EVD], "top": self.tops[_EVD], "threshold_px": EVD_PX},
            "wxbs": {"pairs": self.counts[_WXBS], "top": self.tops[_WXBS], "thresholds_px": list(WXBS_PX)},
            "fundamental_estimator": f"PoseLib LO-RANSAC, {_RANSAC_PX:g} px, mean over {_SEEDS} seeds",
        }

    def _add(self, truth: Path) -> None:
        """Add the pair of a ground-truth file; note pairs that cannot be used."""
        folder = truth.parent
        candidates = [[folder / (stem + suffix) for suffix in SUFFIXES] for stem in "12"]
        found = [[path for path in paths if path.is_file()] for paths in candidates]
        try:
            values = np.loadtxt(truth, dtype=np.float64, ndmin=2)
        except (OSError, ValueError):
            values = np.empty((0, 0))
        shape = (3, 3) if truth.name == "H_1_2" else (len(values), 4)
        if not all(found) or values.shape != shape or not values.size or not np.isfinite(values).all():
            self.notes.append(f"{folder.name} is left out: it needs images 1 and 2 and a readable {truth.name}.")
            return
        kind = _EVD if truth.name == "H_1_2" else _WXBS
        names = (f"{kind}/{folder.name}/{number}" for number in "12")
        pair = Pair(name0=next(names), name1=next(names), path0=found[0][0], path1=found[1][0], group=kind)
        self.truths[pair] = values

    def score(self, matcher: str, get: GetMatches) -> Scores:
        """Score EVD by the share of correct matches, and WxBS by the share of points near the epipolar lines."""
        scores = []
        for pair in self.pairs:
            best = get(pair).top(self.tops[pair.group])
            shares = self._evd(pair, best) if pair.group == _EVD else self._wxbs(pair, best)
            name = pair.name0.split("/")[1]
            scores.append(PairScore(name=name, kind=pair.group, within=tuple(shares.tolist()), matches=len(best)))
        return Scores.of(scores)

    def _evd(self, pair: Pair, best: Matches) -> FloatArray:
        return share_within(match_errors_px(best, self.truths[pair]), (EVD_PX,))

    def _wxbs(self, pair: Pair, best: Matches) -> FloatArray:
        points0, points1 = np.split(self.truths[pair], 2, axis=1)
        none, within = np.zeros(len(WXBS_PX)), []
        if len(best) < _FEWEST:
            return none
        for seed in range(_SEEDS):
            fit = estimate(best, "fundamental", threshold_px=_RANSAC_PX, seed=seed)
            if fit.matrix is None:
                return none
            there = epipolar_distance_px(fit.matrix, points0, points1)
            back = epipolar_distance_px(fit.matrix.T, points1, points0)
            # The larger is NaN for an undefined line, which is not within any threshold.
            within.append(share_within(np.maximum(there, back), WXBS_PX))
        return np.mean(within, axis=0)

    def report(self, results: Sequence[Result]) -> Report:
        """Return the means of both datasets, and a table of all pairs."""
        rows = []
        for result in results:
            evd, wxbs = result.figures.evd, result.figures.wxbs
            cells = [share(x) for x in evd] if evd else ["-"]
            cells += [share(x) for x in wxbs] if wxbs else ["-"] * len(WXBS_PX)
            rows.append([result.matcher, *cells, *result.cost.cells(result.figures.matches)])
        columns = [f"EVD {EVD_PX} px", *(f"WxBS {px} px" for px in WXBS_PX)]
        main = Table(
            title=f"Hard pairs: {self.counts[_EVD]} of EVD, {self.counts[_WXBS]} of WxBS",
            columns=["matcher", *columns, *COST_COLUMNS],
            rows=rows,
            note=(
                f"EVD: share of the best {self.tops[_EVD]} matches within {EVD_PX} px of the homography. WxBS: "
                "share of the manual points within 5 and 20 px of the epipolar lines of F, in both images; PoseLib "
                f"estimates F from the best {self.tops[_WXBS]} matches at {_RANSAC_PX:g} px. Mean over {_SEEDS} "
                "seeds of RANSAC."
            ),
        )
        by_pair = []
        for number, pair in enumerate(results[0].figures.pairs):
            own = [result.figures.pairs[number] for result in results]
            by_pair.append([f"{pair.kind}/{pair.name}", *(" / ".join(share(x) for x in score.within) for score in own)])
        titles = ["pair", *(result.matcher for result in results)]
        return Report(tables=[main, Table(title="By pair", columns=titles, rows=by_pair, text_columns=["pair"])])

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """Rank pairs by the share within 5 px."""
        scored = sorted(zip(self.pairs, result.figures.pairs, strict=True), key=lambda item: -item[1].within[0])
        return [(pair, f"{score.within[0]:.0%} within 5 px, {score.matches} matches") for pair, score in scored]

    def draw(self, pair: Pair, matches: Matches) -> ImageArray:
        """Draw correct matches of EVD in green and others in red; for WxBS, the inliers of the fundamental matrix."""
        images, best = (read(pair.path0), read(pair.path1)), matches.top(self.tops[pair.group])
        if pair.group == _EVD:
            return draw_dots(*images, best, match_errors_px(best, self.truths[pair]) <= EVD_PX)
        if len(best) < _FEWEST:
            return draw_matches(*images, best)
        fitted = best.with_estimate(estimate(best, "fundamental", threshold_px=_RANSAC_PX))
        return draw_matches(*images, fitted, colors="inliers")
