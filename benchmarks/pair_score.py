"""Evaluate scores of matches and of pairs: calibration tables, and true and false positive rates.

    python benchmarks/pair_score.py WORK [--weights FILE] [--figure FILE.png]

WORK is the folder in which `benchmarks/calibrate.py` saves matched, labeled pairs; only the test pairs are read. Scores
use the calibration beside the weights.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import calibration_pairs as known
import numpy as np
import numpy.typing as npt

from dualrc.calibration import Calibration
from dualrc.evidence import collect
from dualrc.model.checkpoint import bundled, read_calibration

Array = npt.NDArray[np.float64]

RIGHT_PX = 3.0
BINS = 10
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
MIN_SCORES = (0.0, 0.2, 0.5, 0.8, 0.9)
# Labels and colors of the sets in the figure.
STYLES = {
    "photos": ("photographs, warped", "#3f51b5"),
    "scenes": ("rendered scenes", "#f57c00"),
    "sequences": ("HPatches and Oxford", "#2e7d32"),
}
NAMES = {known.RELATED: "related", known.UNRELATED: "unrelated", known.ALIKE: "look-alike"}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder with matched pairs")
    parser.add_argument("--weights", type=Path, help="weights file; default: the bundled weights")
    parser.add_argument("--figure", type=Path, help="file to draw the reliability of the scores to")
    arguments = parser.parse_args()
    calibration = read_calibration(arguments.weights or bundled("default"))
    if calibration is None:
        raise SystemExit("These weights have no calibration; make one with benchmarks/calibrate.py.")
    report(known.load_all(arguments.work, "test"), calibration, arguments.figure)


def report(pairs: list[known.Pair], calibration: Calibration, figure: Path | None = None) -> None:
    """Print the tables for these pairs."""
    print("Scores of matches: share within 3 px by score, and expected calibration error\n")
    print(
        "| set | call | number | "
        + " | ".join(f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(BINS))
        + " | error |"
    )
    print("|---" * (BINS + 4) + "|")
    reliability: dict[str, dict[str, Array]] = {"match": {}, "match_points": {}}
    for source in dict.fromkeys(pair.source for pair in pairs if len(pair.errors_px)):
        true = [pair for pair in pairs if pair.source == source and len(pair.errors_px)]
        matches = (calibration.matches(np.concatenate([p.scores for p in true])), [p.errors_px for p in true])
        points = (calibration.points(np.concatenate([p.point_scores for p in true])), [p.point_errors_px for p in true])
        for call, (scores, errors) in (("match", matches), ("match_points", points)):
            right = (np.concatenate(errors) < RIGHT_PX).astype(np.float64)
            shares, error = reliability_of(scores.astype(np.float64), right, np.ones(len(right)))
            cells = " | ".join("" if np.isnan(share) else f"{share:.2f}" for share in shares)
            print(f"| {source} | {call} | {len(right):,} | {cells} | {error:.3f} |")
            reliability[call][source] = shares
    print("\nMatches kept, and share of them within 3 px, by min_score\n")
    print("| set | call | " + " | ".join(f"{t:g}" for t in MIN_SCORES) + " |\n" + "|---" * (len(MIN_SCORES) + 2) + "|")
    for source in dict.fromkeys(pair.source for pair in pairs if len(pair.errors_px)):
        true = [pair for pair in pairs if pair.source == source and len(pair.errors_px)]
        for call, curve, names in (
            ("match", calibration.matches, ("scores", "errors_px")),
            ("match_points", calibration.points, ("point_scores", "point_errors_px")),
        ):
            scores = curve(np.concatenate([getattr(p, names[0]) for p in true]))
            right = np.concatenate([getattr(p, names[1]) for p in true]) < RIGHT_PX
            cells = [
                f"{(scores >= t).mean():.0%}, {right[scores >= t].mean():.3f}" if (scores >= t).any() else "0 %"
                for t in MIN_SCORES
            ]
            print(f"| {source} | {call} | " + " | ".join(cells) + " |")
    if figure is not None:
        draw(figure, reliability)
    report_pairs(pairs, calibration)


def report_pairs(pairs: list[known.Pair], calibration: Calibration) -> None:
    """Print the tables of pair scores."""
    pairs = [pair for pair in pairs if pair.kind in NAMES]
    curve = calibration.matches
    evidence = [collect(p.points0, p.points1, curve(p.scores), p.size0, p.size1) for p in pairs]
    scores = np.array([calibration.pairs(each) for each in evidence])
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        groups[pair.source, NAMES[pair.kind], "plain" if pair.overlay == "none" else "overlaid"].append(number)
    print("\nPairs: pair_score at its quantiles, and share above thresholds\n")
    print("| set | kind | | number | 5 % | median | 95 % | " + " | ".join(f"> {t:g}" for t in (0.1, 0.5, 0.9)) + " |")
    print("|---" * 10 + "|")
    for key, numbers in sorted(groups.items()):
        some = scores[numbers]
        low, middle, high = np.quantile(some, [0.05, 0.5, 0.95])
        above = " | ".join(f"{(some > t).mean():.3f}" for t in (0.1, 0.5, 0.9))
        print(f"| {' | '.join(key)} | {len(some)} | {low:.4f} | {middle:.4f} | {high:.4f} | {above} |")
    # Hard pairs have a separate column, because most of them have no correct matches.
    easy = np.array([pair.source not in ("evd", "wxbs") for pair in pairs])
    kinds = np.array([pair.kind for pair in pairs])
    related = kinds == known.RELATED
    weight = np.zeros(len(pairs))
    for kind, share in ((known.RELATED, 0.5), (known.UNRELATED, 0.25), (known.ALIKE, 0.25)):
        some = easy & (kinds == kind)
        weight[some] = share / max(some.sum(), 1)
    shares, error = reliability_of(scores[easy], related[easy].astype(np.float64), weight[easy])
    others = {"all others": ~related, "unrelated": kinds == known.UNRELATED, "look-alike": kinds == known.ALIKE}
    areas = [f"{area_of(scores[related & easy], scores[some & easy]):.4f} ({name})" for name, some in others.items()]
    print(f"\nArea under the ROC curve, without the hard pairs: {', '.join(areas)}")
    print(f"Expected calibration error at even odds: {error:.3f}")
    print("Share of related pairs by pair_score: " + ", ".join("-" if np.isnan(s) else f"{s:.2f}" for s in shares))
    print(
        "\n| threshold | related | hard related | unrelated | look-alike | unrelated, overlaid |\n" + "|---" * 6 + "|"
    )
    overlaid = np.array([pair.overlay != "none" for pair in pairs])
    columns = (
        related & easy,
        related & ~easy,
        (kinds == known.UNRELATED),
        kinds == known.ALIKE,
        (kinds == known.UNRELATED) & overlaid,
    )
    for threshold in THRESHOLDS:
        rates = " | ".join(f"{(scores[some] >= threshold).mean():.3f}" if some.any() else "-" for some in columns)
        print(f"| {threshold:g} | {rates} |")


def area_of(higher: Array, lower: Array) -> float:
    """Return the area under the ROC curve."""
    apart = np.subtract.outer(higher, lower)
    return float(np.mean((apart > 0) + (apart == 0) / 2))


def reliability_of(scores: Array, right: Array, weight: Array) -> tuple[Array, float]:
    """Return the weighted share of correct items in each of ten score bins, and the expected calibration error."""
    bins = np.minimum((scores * BINS).astype(int), BINS - 1)
    total = np.bincount(bins, weight, minlength=BINS)
    with np.errstate(invalid="ignore"):
        share = np.bincount(bins, weight * right, minlength=BINS) / total
        mean = np.bincount(bins, weight * scores, minlength=BINS) / total
    error = np.nansum(total * np.abs(share - mean)) / max(total.sum(), 1e-12)
    return np.where(total > 0.002 * total.sum(), share, np.nan), float(error)


def draw(path: Path, reliability: dict[str, dict[str, Array]]) -> None:
    """Draw the reliability of the scores: one diagram for each call, one curve for each set of pairs."""
    from matplotlib.figure import Figure

    chart = Figure(figsize=(10, 4.9), layout="constrained")
    centers = (np.arange(BINS) + 0.5) / BINS
    for axes, (call, curves) in zip(chart.subplots(1, len(reliability)), reliability.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for source, shares in curves.items():
            label, color = STYLES.get(source, (source, None))
            axes.plot(centers, shares, marker="o", markersize=5, linewidth=1.8, color=color, label=label)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        axes.set_title(call, fontsize=15)
        axes.set_xlabel("score", fontsize=14)
        axes.set_ylabel("share within 3 px", fontsize=14)
        axes.tick_params(labelsize=12)
        axes.legend(fontsize=13, loc="upper left")
    chart.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
