"""HPatches: mean matching accuracy, coverage and homographies on sequences of a picture and five views of it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from dualrc.draw import Picture, draw_dots
from dualrc.errors import DataError
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
from dualrc.evaluation.export import Pair, cropped
from dualrc.evaluation.figures import Panel, curve_panels
from dualrc.geometry import corner_error_px, crop_homography, estimate
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.metrics import area_under_curve, coverage, match_errors_px, share_within
from dualrc.types import FloatArray

THRESHOLDS_PX = tuple(range(1, 11))
CORRECT_PX = 3
HOMOGRAPHY_PX = (3, 5, 10)
DEFAULT_TOPS = (1000, 2000)
# The protocol leaves these out: their pictures are larger than 1600 x 1200.
LEFT_OUT = (
    "i_contruction",
    "i_crownnight",
    "i_dc",
    "i_pencils",
    "i_whitebuilding",
    "v_artisans",
    "v_astronautis",
    "v_talent",
)
_SUFFIXES = (".ppm", ".png", ".jpg", ".jpeg")
_RANSAC_PX = 3.0
_KINDS = {"i_": "illumination", "v_": "viewpoint"}


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """One pair with one limit on the number of matches."""

    name0: str
    name1: str
    sequence: str
    accuracy: tuple[float, ...]  # at 1 to 10 px
    matches: int
    correct: int  # within 3 px
    coverage: float  # of the correct ones
    corner_error_px: float  # of the estimated homography; inf where there is none


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """Means over pairs."""

    pairs: int
    mma: tuple[float, ...]  # at 1 to 10 px
    matches: float
    correct: float
    coverage: float
    homography_auc: tuple[float, ...]  # at 3, 5 and 10 px of the corner error


@dataclass(frozen=True, kw_only=True)
class TopScore:
    """All scores with one limit on the number of matches."""

    top: int
    groups: dict[str, GroupScore]  # overall, illumination, viewpoint; a kind without pairs is left out
    sequences: dict[str, GroupScore]
    pairs: tuple[PairScore, ...]


class HPatches(Benchmark):
    """Sequences under one or several roots, each with picture 1, pictures 2 to 6, and homographies H_1_k."""

    name = "hpatches"

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        tops: Sequence[int] = DEFAULT_TOPS,
        crop: tuple[int, int] | None = None,
    ) -> None:
        self.tops = tuple(tops)
        self.notes, self.pairs = [], []
        self.homographies: dict[Pair, FloatArray] = {}
        for folder in _sequences(roots, self.notes):
            for pair, H in _pairs(folder, crop, self.notes):
                self.pairs.append(pair)
                self.homographies[pair] = H if crop is None else crop_homography(*crop) @ H
        if not self.pairs:
            raise DataError(f"{roots[0]} has no pair with a homography; each sequence needs 1..6 and H_1_2..H_1_6.")
        self.protocol = {
            "tops": list(self.tops),
            "thresholds_px": list(THRESHOLDS_PX),
            "correct_px": CORRECT_PX,
            "homography_thresholds_px": list(HOMOGRAPHY_PX),
            "homography_estimator": f"PoseLib LO-RANSAC, {_RANSAC_PX:g} px",
            "crop": None if crop is None else list(crop),
            "sequences": len({pair.group for pair in self.pairs}),
            "pairs": len(self.pairs),
        }

    def score(self, matcher: str, get: GetMatches) -> Result:
        """Score a matcher by its stored matches."""
        infos, by_top = [], [list[PairScore]() for _ in self.tops]
        for pair in self.pairs:
            matches = get(pair)
            infos.append(matches.info)
            for top, scores in zip(self.tops, by_top, strict=True):
                scores.append(self._score_pair(pair, matches.top(top)))
        figures = [_summary(top, scores) for top, scores in zip(self.tops, by_top, strict=True)]
        return Result(matcher=matcher, cost=Cost.of(infos), failures=failures(self.pairs, infos), figures=figures)

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

    def tables(self, results: Sequence[Result]) -> list[Table]:
        """Accuracy; homographies and coverage; accuracy by sequence."""
        pairs, sequences = self.protocol["pairs"], self.protocol["sequences"]
        accuracy = Table(
            title=f"HPatches: {pairs} pairs of {sequences} sequences",
            columns=["matcher", "top", "1 px", "3 px", "5 px", "10 px", "illum.", "viewp.", *COST_COLUMNS],
            rows=[[name, *_accuracy_cells(scored), *cost] for name, scored, cost in _rows(results)],
            note=(
                "Mean matching accuracy at 1, 3, 5 and 10 px, and at 3 px of illumination and of viewpoint sequences; "
                "matches and time a pair; the size that the matcher looked at (+: and others)."
            ),
        )
        geometry = Table(
            title="Homographies and coverage",
            columns=["matcher", "top", *(f"H {t} px" for t in HOMOGRAPHY_PX), "correct", "cover", *COST_COLUMNS],
            rows=[[name, *_geometry_cells(scored), *cost] for name, scored, cost in _rows(results)],
            note=(
                f"H: AUC of the corner error of homographies ({self.protocol['homography_estimator']}); correct ones "
                f"({CORRECT_PX} px) of a pair's matches, and the share of a 10x10 grid over the overlap they occupy."
            ),
        )
        return [accuracy, geometry, self._sequence_table(results)]

    def _sequence_table(self, results: Sequence[Result]) -> Table:
        rows = []
        for name in dict.fromkeys(pair.group for pair in self.pairs):
            scores = [result.figures[0].sequences[name] for result in results]
            rows.append([name, *(f"{share(s.mma[CORRECT_PX - 1])} of {s.matches:.0f}" for s in scores)])
        rows.append(["time a pair", *(seconds(result.cost.seconds_per_pair) for result in results)])
        rows.append(["size", *(result.cost.resolution for result in results)])
        title = f"By sequence: accuracy at {CORRECT_PX} px and matches a pair, best {self.tops[0]}"
        return Table(title=title, columns=["sequence", *(result.matcher for result in results)], rows=rows)

    def curves(self, results: Sequence[Result]) -> dict[str, Picture]:
        """Accuracy over thresholds beside the published methods."""
        reference = published()
        count = self.protocol["sequences"]
        figures = {}
        for index, top in enumerate(self.tops):
            panels = []
            for group in ("overall", "illumination", "viewpoint"):
                ours = {
                    result.matcher: result.figures[index].groups[group].mma
                    for result in results
                    if group in result.figures[index].groups
                }
                theirs = {name: curves[group] for name, curves in reference.items()}
                panels.append(Panel(title=group, x=THRESHOLDS_PX, ours=ours, published=theirs))
            figures[f"mma_top{top}"] = curve_panels(
                panels,
                title=f"Mean matching accuracy, best {top} matches",
                x_label="threshold (px)",
                note=f"Thick: this run, {count} sequences. Thin: published, on 108 sequences.",
            )
        return figures

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """By accuracy at 3 px, then by the number of correct matches."""
        scores: Iterable[PairScore] = result.figures[0].pairs
        by_names = {(pair.name0, pair.name1): pair for pair in self.pairs}
        order = sorted(scores, key=lambda s: (-s.accuracy[CORRECT_PX - 1], -s.correct))
        return [(by_names[s.name0, s.name1], f"{s.correct}/{s.matches} correct within {CORRECT_PX} px") for s in order]

    def draw(self, pair: Pair, matches: Matches) -> Picture:
        """Green dots where a match is within 3 px of the truth, red ones elsewhere."""
        best = matches.top(self.tops[0])
        correct = match_errors_px(best, self.homographies[pair]) <= CORRECT_PX
        radius_px = 3.0 if len(best) > 200 else 6.0  # a few wrong ones must not be overlooked
        return draw_dots(read(pair.path0), cropped(pair.path1, pair.crop1), best, correct, radius_px=radius_px)


def published() -> dict[str, dict[str, list[float]]]:
    """Published curves: method -> overall, illumination or viewpoint -> accuracy at 1 to 10 px."""
    text = (resources.files("dualrc.evaluation") / "hpatches_published.json").read_text(encoding="utf-8")
    methods = json.loads(text)["methods"].values()
    return {method["label"]: {key: method[key] for key in ("overall", *_KINDS.values())} for method in methods}


def looks_like_hpatches(root: Path) -> bool:
    """Whether a folder has sequences, or is one."""
    return any(root.glob("[iv]_*/H_1_*")) or any(root.glob("H_1_*"))


def _sequences(roots: Sequence[Path], notes: list[str]) -> list[Path]:
    found: dict[str, Path] = {}
    for root in roots:
        if not root.is_dir():
            raise DataError(f"The folder {root} does not exist; check the path.")
        folders = [root] if root.name[:2] in _KINDS and any(root.glob("H_1_*")) else sorted(root.glob("[iv]_*"))
        folders = [folder for folder in folders if folder.is_dir()]
        if not folders:
            hint = "it looks like one for `dualrc evaluate pose`" if _has_pose_index(root) else "give another one"
            raise DataError(f"{root} has no sequences i_* or v_*: it is not an HPatches folder; {hint}.")
        for folder in folders:
            if folder.name in found:
                raise DataError(
                    f"The sequence {folder.name} is in {found[folder.name]} and {folder}; give one of them."
                )
            if folder.name in LEFT_OUT:
                notes.append(f"{folder.name} is left out, as the protocol does.")
            else:
                found[folder.name] = folder
    return list(found.values())


def _has_pose_index(root: Path) -> bool:
    patterns = ("cameras.json", "*/cameras.json", "*.npz", "*/*.npz")
    return any(True for pattern in patterns for _ in root.glob(pattern))


def _pairs(folder: Path, crop: tuple[int, int] | None, notes: list[str]) -> list[tuple[Pair, FloatArray]]:
    """A sequence's pairs that have ground truth; the others are named in the notes."""
    pictures = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix.lower() in _SUFFIXES}
    pairs = []
    for k in range(2, 7):
        H = _read_homography(folder / f"H_1_{k}")
        if H is None:
            notes.append(f"{folder.name} 1-{k} is not scored: H_1_{k} is missing or not a homography.")
            continue
        # A picture that is missing fails when it is read, and then counts as a failure.
        path0, path1 = (pictures.get(stem, folder / f"{stem}.ppm") for stem in ("1", str(k)))
        names = {"name0": f"{folder.name}/{path0.name}", "name1": f"{folder.name}/{path1.name}"}
        pairs.append((Pair(**names, path0=path0, path1=path1, group=folder.name, crop1=crop), H))
    return pairs


def _read_homography(path: Path) -> FloatArray | None:
    try:
        H = np.array(path.read_text(encoding="utf-8").split(), dtype=np.float64).reshape(3, 3)
    except (OSError, ValueError):
        return None
    return H if np.isfinite(H).all() and np.linalg.matrix_rank(H) == 3 else None


def _rows(results: Sequence[Result]) -> Iterator[tuple[str, TopScore, list[str]]]:
    """For each row of a table its matcher, its scores, and what stands in every table."""
    for result in results:
        for scored in result.figures:
            yield result.matcher, scored, cost_cells(scored.groups["overall"].matches, result.cost)


def _accuracy_cells(scored: TopScore) -> list[str]:
    overall = scored.groups["overall"]
    kinds = [scored.groups.get(kind) for kind in _KINDS.values()]
    return [
        str(scored.top),
        *(share(overall.mma[threshold - 1]) for threshold in (1, 3, 5, 10)),
        *("-" if kind is None else share(kind.mma[CORRECT_PX - 1]) for kind in kinds),
    ]


def _geometry_cells(scored: TopScore) -> list[str]:
    overall = scored.groups["overall"]
    aucs = [share(auc) for auc in overall.homography_auc]
    return [str(scored.top), *aucs, f"{overall.correct:.0f}", f"{overall.coverage:.0%}"]


def _summary(top: int, scores: list[PairScore]) -> TopScore:
    groups = {"overall": _mean(scores)}
    for prefix, kind in _KINDS.items():
        if chosen := [score for score in scores if score.sequence.startswith(prefix)]:
            groups[kind] = _mean(chosen)
    sequences = {
        name: _mean([score for score in scores if score.sequence == name])
        for name in dict.fromkeys(score.sequence for score in scores)
    }
    return TopScore(top=top, groups=groups, sequences=sequences, pairs=tuple(scores))


def _mean(scores: Sequence[PairScore]) -> GroupScore:
    return GroupScore(
        pairs=len(scores),
        mma=tuple(np.mean([score.accuracy for score in scores], axis=0).tolist()),
        matches=float(np.mean([score.matches for score in scores])),
        correct=float(np.mean([score.correct for score in scores])),
        coverage=float(np.mean([score.coverage for score in scores])),
        homography_auc=tuple(area_under_curve([score.corner_error_px for score in scores], HOMOGRAPHY_PX).tolist()),
    )
