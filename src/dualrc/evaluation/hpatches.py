"""HPatches: mean matching accuracy, coverage and homographies on sequences of an image and five views of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from rich.console import Console

from dualrc.draw import draw_dots
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation.benchmark import (
    COST_COLUMNS,
    Benchmark,
    GetMatches,
    OneNetworkSettings,
    Option,
    Result,
    folder_hint,
    grouped,
)
from dualrc.evaluation.data_files import check_folder, read_published
from dualrc.evaluation.export import Pair, read_cropped
from dualrc.evaluation.figures import Curves, curve_panels
from dualrc.evaluation.report import Report, Table, seconds, share
from dualrc.formats import SUFFIXES
from dualrc.geometry import corner_error_px, crop_homography, estimate
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.metrics import area_under_curve, coverage, match_errors_px, share_within
from dualrc.types import FloatArray, ImageArray

THRESHOLDS_PX = tuple(range(1, 11))
# Thresholds in tables.
SHOWN_PX = (1, 3, 5, 10)
CORRECT_PX = 3
HOMOGRAPHY_PX = (3, 5, 10)
DEFAULT_TOPS = (1000, 2000)
TOP_OPTION = Option("1000 and 2000 by default.")
# Sequences that the protocol excludes, because their images are larger than 1600 x 1200.
EXCLUDED = (
    *("i_contruction", "i_crownnight", "i_dc", "i_pencils", "i_whitebuilding"),
    *("v_artisans", "v_astronautis", "v_talent"),
)
_KINDS = {"i_": "illumination", "v_": "viewpoint"}
GROUPS = ("overall", *_KINDS.values())
_RANSAC_PX = 3.0


def parse_crop(text: str) -> tuple[int, int]:
    """Parse columns and rows from X,Y."""
    try:
        left, top = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a crop; pass two whole numbers X,Y.") from error
    return left, top


@dataclass(frozen=True, kw_only=True)
class HPatchesSettings(OneNetworkSettings):
    """Settings of HPatches."""

    top: Annotated[int | None, TOP_OPTION] = None
    crop: Annotated[
        tuple[int, int] | None,
        Option(
            "Number of columns X and rows Y to cut off images 2 to 6, left and top.", metavar="X,Y", parse=parse_crop
        ),
    ] = None

    paper: ClassVar = {"size": 1600}
    differences: ClassVar = (
        "The published evaluation counts positions from the outer corner of the first pixel, in both images. Here "
        "they count from its center, as the homographies do."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop is not None and min(self.crop) < 0:
            raise ConfigError(f"{self.crop[0]},{self.crop[1]} is not a crop; pass two numbers of at least 0.")


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """Score of a pair for one limit on the number of matches."""

    name0: str
    name1: str
    sequence: str
    # At 1 to 10 px.
    accuracy: tuple[float, ...]
    matches: int
    # Number of matches within 3 px.
    correct: int
    # Coverage by the correct matches.
    coverage: float
    # Corner error of the estimated homography; inf if there is none.
    corner_error_px: float


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """Mean scores of pairs."""

    pairs: int
    # Mean matching accuracy at 1 to 10 px.
    mma: tuple[float, ...]
    matches: float
    correct: float
    coverage: float
    # AUC of the corner error at 3, 5 and 10 px.
    homography_auc: tuple[float, ...]

    @staticmethod
    def of(scores: Sequence[PairScore]) -> "GroupScore":
        """Compute the mean scores of pairs."""
        corner_errors = [score.corner_error_px for score in scores]
        return GroupScore(
            pairs=len(scores),
            mma=tuple(np.mean([score.accuracy for score in scores], axis=0).tolist()),
            matches=float(np.mean([score.matches for score in scores])),
            correct=float(np.mean([score.correct for score in scores])),
            coverage=float(np.mean([score.coverage for score in scores])),
            homography_auc=tuple(area_under_curve(corner_errors, HOMOGRAPHY_PX).tolist()),
        )


@dataclass(frozen=True, kw_only=True)
class TopScore:
    """All scores for one limit on the number of matches."""

    top: int
    # Overall, illumination, viewpoint; kinds without pairs are missing.
    groups: dict[str, GroupScore]
    sequences: dict[str, GroupScore]
    pairs: tuple[PairScore, ...]

    @staticmethod
    def of(top: int, scores: Sequence[PairScore]) -> "TopScore":
        """Group pairs by kind and by sequence."""
        groups = {"overall": scores, **grouped(scores, lambda score: _KINDS[score.sequence[:2]])}
        sequences = grouped(scores, lambda score: score.sequence)
        return TopScore(
            top=top,
            groups={name: GroupScore.of(groups[name]) for name in GROUPS if name in groups},
            sequences={name: GroupScore.of(members) for name, members in sequences.items()},
            pairs=tuple(scores),
        )


class HPatches(Benchmark):
    """Sequences under one or several roots, each with image 1, images 2 to 6, and homographies H_1_k."""

    name = "hpatches"
    summary = "hpatches scores matches by homographies, on the sequences i_* and v_*."
    example = "data/hpatches --matcher dualrc --matcher sift --out hpatches"
    settings_class = HPatchesSettings
    recognized_by = ("[iv]_*/H_1_*", "H_1_*")
    sift_features = 2000
    settings: HPatchesSettings

    def __init__(self, settings: HPatchesSettings, messages: Console | None = None) -> None:
        super().__init__(settings, messages)
        self.tops = DEFAULT_TOPS if settings.top is None else (settings.top,)
        self.homographies: dict[Pair, FloatArray] = {}
        for folder in self._sequences():
            self._add_pairs(folder)
        if not self.pairs:
            example = "each sequence needs 1..6 and H_1_2..H_1_6"
            raise DataError(f"{settings.roots[0]} has no pair with a homography; {example}.")
        self.protocol = {
            "tops": list(self.tops),
            "thresholds_px": list(THRESHOLDS_PX),
            "correct_px": CORRECT_PX,
            "homography_thresholds_px": list(HOMOGRAPHY_PX),
            "homography_estimator": f"PoseLib LO-RANSAC, {_RANSAC_PX:g} px",
            "crop": settings.crop and list(settings.crop),
            "sequences": len({pair.group for pair in self.pairs}),
            "pairs": len(self.pairs),
        }

    def _sequences(self) -> list[Path]:
        found: dict[str, Path] = {}
        for root in self.settings.roots:
            check_folder(root)
            one = root.name[:2] in _KINDS and any(root.glob("H_1_*"))
            folders = [root] if one else [folder for folder in sorted(root.glob("[iv]_*")) if folder.is_dir()]
            if not folders:
                reason = "has no sequences i_* or v_*: it is not an HPatches folder"
                raise DataError(f"{root} {reason}; {folder_hint(root, self.name)}.")
            for folder in folders:
                if folder.name in found:
                    both = f"{found[folder.name]} and {folder}"
                    raise DataError(f"The sequence {folder.name} is in {both}; pass one of them.")
                if folder.name in EXCLUDED:
                    self.notes.append(f"{folder.name} is left out, as in the published protocol.")
                else:
                    found[folder.name] = folder
        return list(found.values())

    def _add_pairs(self, folder: Path) -> None:
        """Add the pairs of a sequence; notes list pairs without a homography."""
        crop = self.settings.crop
        images = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES}
        for k in range(2, 7):
            H = _read_homography(folder / f"H_1_{k}")
            if H is None:
                self.notes.append(f"{folder.name} 1-{k} is not scored: H_1_{k} is missing or not a homography.")
                continue
            # A missing image raises an error when it is read, and the pair counts as a failure.
            path0, path1 = (images.get(stem, folder / f"{stem}.ppm") for stem in ("1", str(k)))
            names = {"name0": f"{folder.name}/{path0.name}", "name1": f"{folder.name}/{path1.name}"}
            pair = Pair(**names, path0=path0, path1=path1, group=folder.name, crop1=crop)
            self.pairs.append(pair)
            self.homographies[pair] = H if crop is None else crop_homography(*crop) @ H

    def store_config(self) -> dict[str, Any]:
        """Return the store config with the crop, which changes the matches."""
        return {**super().store_config(), "crop": self.protocol["crop"]}

    def score(self, matcher: str, get: GetMatches) -> list[TopScore]:
        """Compute scores for each limit on the number of matches."""
        by_top: dict[int, list[PairScore]] = {top: [] for top in self.tops}
        for pair in self.pairs:
            matches = get(pair)
            for top, scores in by_top.items():
                scores.append(self._score_pair(pair, matches.top(top)))
        return [TopScore.of(top, scores) for top, scores in by_top.items()]

    def _score_pair(self, pair: Pair, matches: Matches) -> PairScore:
        H = self.homographies[pair]
        errors = match_errors_px(matches, H)
        fitted = estimate(matches, "homography", threshold_px=_RANSAC_PX).matrix
        correct = errors <= CORRECT_PX
        return PairScore(
            name0=pair.name0,
            name1=pair.name1,
            sequence=pair.group,
            accuracy=tuple(share_within(errors, THRESHOLDS_PX).tolist()),
            matches=len(matches),
            correct=int(correct.sum()),
            coverage=coverage(matches.points0[correct], H, matches.size0, matches.size1),
            corner_error_px=float("inf") if fitted is None else corner_error_px(fitted, H, matches.size0),
        )

    def report(self, results: Sequence[Result]) -> Report:
        """Return accuracy, homographies and coverage, accuracy by sequence, and curves with published methods."""
        note = f"Thick: this run, {self.protocol['sequences']} sequences. Thin: published, on 108 sequences."
        figures = {}
        for index, top in enumerate(self.tops):
            scores = {result.matcher: result.figures[index] for result in results}
            title = f"Mean matching accuracy, best {top} matches"
            figures[f"mma_top{top}"] = accuracy_curves(scores, published(), title=title, note=note)
        tables = [self.accuracy_table(results), self._homography_table(results), self._sequence_table(results)]
        return Report(tables=tables, figures=figures)

    def accuracy_table(self, results: Sequence[Result], title: str = "") -> Table:
        """Return mean matching accuracy, one row per limit on the number of matches."""
        rows = [
            [
                name,
                str(scored.top),
                *accuracy_cells({group: score.mma for group, score in scored.groups.items()}),
                *cost,
            ]
            for name, scored, cost in _rows(results)
        ]
        return Table(
            title=title or f"HPatches: {self.protocol['pairs']} pairs of {self.protocol['sequences']} sequences",
            columns=["matcher", "top", *(f"{px} px" for px in SHOWN_PX), "illum.", "viewp.", *COST_COLUMNS],
            rows=rows,
            note=(
                "Mean matching accuracy at 1, 3, 5 and 10 px, and at 3 px for illumination and for viewpoint "
                "sequences. Matches and time are per pair. Size: network input (+: and others)."
            ),
        )

    def _homography_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for name, scored, cost in _rows(results):
            overall = scored.groups["overall"]
            aucs = [share(auc) for auc in overall.homography_auc]
            rows.append([name, str(scored.top), *aucs, f"{overall.correct:.0f}", f"{overall.coverage:.0%}", *cost])
        return Table(
            title="Homographies and coverage",
            columns=["matcher", "top", *(f"H {t} px" for t in HOMOGRAPHY_PX), "correct", "cover", *COST_COLUMNS],
            rows=rows,
            note=(
                f"H: AUC of the corner error of homographies ({self.protocol['homography_estimator']}). Correct: "
                f"matches within {CORRECT_PX} px per pair, and the share of a 10x10 grid over the overlap that they "
                "occupy."
            ),
        )

    def _sequence_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for name in dict.fromkeys(pair.group for pair in self.pairs):
            scores = [result.figures[0].sequences[name] for result in results]
            rows.append([name, *(f"{share(s.mma[CORRECT_PX - 1])} of {s.matches:.0f}" for s in scores)])
        rows.append(["time per pair", *(seconds(result.cost.seconds_per_pair) for result in results)])
        rows.append(["size", *(result.cost.resolution for result in results)])
        title = f"By sequence: accuracy at {CORRECT_PX} px and matches per pair, best {self.tops[0]}"
        columns = ["sequence", *(result.matcher for result in results)]
        return Table(title=title, columns=columns, rows=rows, text_columns=["sequence"])

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """Rank pairs by accuracy at 3 px, then by the number of correct matches."""
        scored = list(zip(self.pairs, result.figures[0].pairs, strict=True))
        scored.sort(key=lambda item: (-item[1].accuracy[CORRECT_PX - 1], -item[1].correct))
        return [(pair, f"{s.correct}/{s.matches} correct within {CORRECT_PX} px") for pair, s in scored]

    def draw(self, pair: Pair, matches: Matches) -> ImageArray:
        """Draw matches within 3 px of the ground truth as green dots, and others as red dots."""
        best = matches.top(self.tops[0])
        correct = match_errors_px(best, self.homographies[pair]) <= CORRECT_PX
        # Large dots make a few wrong matches visible.
        radius_px = 3.0 if len(best) > 200 else 6.0
        return draw_dots(read(pair.path0), read_cropped(pair.path1, pair.crop1), best, correct, radius_px=radius_px)


def _read_homography(path: Path) -> FloatArray | None:
    try:
        H = np.array(path.read_text(encoding="utf-8").split(), dtype=np.float64).reshape(3, 3)
    except (OSError, ValueError):
        return None
    return H if np.isfinite(H).all() and np.linalg.matrix_rank(H) == 3 else None


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, TopScore, list[str]]]:
    """Yield for each row of a table its matcher, its scores, and the cells of its cost."""
    for result in results:
        for scored in result.figures:
            yield result.matcher, scored, result.cost.cells(scored.groups["overall"].matches)


def accuracy_cells(curves: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the accuracy at 1, 3, 5 and 10 px overall, and at 3 px by kind, from accuracies at 1 to 10 px."""
    overall = [share(curves["overall"][px - 1]) for px in SHOWN_PX]
    return overall + [share(curves[kind][CORRECT_PX - 1]) if kind in curves else "-" for kind in _KINDS.values()]


def accuracy_curves(scores: Mapping[str, TopScore], published: Curves, *, title: str, note: str) -> ImageArray:
    """Plot accuracy over thresholds, one panel per group of sequences, over the curves of published methods."""
    ours = {name: {group: own.mma for group, own in scored.groups.items()} for name, scored in scores.items()}
    groups = [group for group in GROUPS if published or any(group in curves for curves in ours.values())]
    return curve_panels(groups, THRESHOLDS_PX, ours, published, title=title, x_label="threshold (px)", note=note)


def published() -> dict[str, dict[str, list[float]]]:
    """Read published curves: method -> overall, illumination or viewpoint -> accuracy at 1 to 10 px."""
    methods = read_published("hpatches_published.json").values()
    return {method["label"]: {group: method[group] for group in GROUPS} for method in methods}
