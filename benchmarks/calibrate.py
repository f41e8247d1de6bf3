"""Calibrate scores: fit a calibration to labeled pairs, test it on other pairs, and write it.

    python benchmarks/calibrate.py --work DIR --photos PHOTOS --fit-views SCENE --test-views SCENE
                                   --sequences HPATCHES OXFORD --hard HARD --write

PHOTOS are folders or tar files of photos; only those that training holds out are used. A SCENE is a folder with
images/ and cameras.json. All matches are saved to DIR, and a second run continues there. The calibration belongs to
the weights file and is written beside it (`--write`). `benchmarks/pair_score.py` prints the tables again, for any
weights.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import calibration_pairs as known
import numpy as np
import numpy.typing as npt
import pair_score

import dualrc
from dualrc.calibration import Calibration, Curve, PairModel
from dualrc.evidence import collect
from dualrc.model.checkpoint import bundled, file_hash, save_calibration

Array = npt.NDArray[np.float64]

RIGHT_PX = 3.0
KNOTS = 16
PHOTO_PAIRS = {known.RELATED: 120, known.UNRELATED: 180, known.ALIKE: 60}
# Number of rendered scenes for the fit and for the test.
SCENES = (24, 16)
# Weights of the kinds of pairs in the fit of the pair model: one of two pairs is related.
SHARES = {known.RELATED: 0.5, known.UNRELATED: 0.25, known.ALIKE: 0.25}
# Share of matches from unrelated pairs in the fit of the score curve.
NOTHING = 0.05
# Scores below the first value count as zero; knots lie above the second.
LOW = (1e-6, 1e-3)
# Ridge penalty on the coefficients of standardized features.
RIDGE = 1e-3


def main() -> None:
    """Match missing pairs, fit, print the tables, and write the calibration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the matches")
    parser.add_argument("--weights", type=Path, help="weights file; default: the bundled weights")
    parser.add_argument("--photos", nargs="*", type=Path, default=[], help="folders or tar files of photos")
    parser.add_argument("--fit-views", nargs="*", type=Path, default=[], help="multi-view scenes for the fit")
    parser.add_argument("--test-views", nargs="*", type=Path, default=[], help="multi-view scenes for the test")
    parser.add_argument("--sequences", nargs="*", type=Path, default=[], help="folders of sequences for the test")
    parser.add_argument("--hard", type=Path, help="folder with evd/ and wxbs/ for the test")
    parser.add_argument("--write", action="store_true", help="write the calibration beside the weights")
    arguments = parser.parse_args()
    weights = arguments.weights or bundled("default")
    arguments.work.mkdir(parents=True, exist_ok=True)
    match_all(arguments, weights)
    fitted = fit(known.load_all(arguments.work, "fit"), file_hash(weights))
    pair_score.report(known.load_all(arguments.work, "test"), fitted)
    if arguments.write:
        save_calibration(fitted, weights)


def match_all(arguments: argparse.Namespace, weights: Path) -> None:
    """Make and match all pairs that are not in the work folder."""
    matcher = dualrc.load(weights=weights)
    matcher.calibration = None

    def keep(name: str, make: known.Maker) -> None:
        path = arguments.work / f"{name}.npz"
        if not path.exists():
            known.save(list(make()), path)
            print(path, flush=True)

    for part, use in enumerate(("fit", "test")):
        if arguments.photos:
            keep(f"{use}-photos", partial(photo_pairs, matcher, arguments.photos, part))
        keep(f"{use}-scenes", partial(known.scene_pairs, matcher, SCENES[part], 100 + 200 * part))
        for root in arguments.fit_views if use == "fit" else arguments.test_views:
            keep(f"{use}-{root.name}", partial(known.view_pairs, matcher, root))
    if arguments.sequences:
        keep("test-sequences", lambda: known.sequence_pairs(matcher, arguments.sequences))
    if arguments.hard:
        keep("test-hard", lambda: known.hard_pairs(matcher, arguments.hard))


def photo_pairs(matcher: dualrc.Matcher, roots: list[Path], part: int) -> Iterator[known.Pair]:
    """Yield pairs of one half of the photos that training holds out."""
    return known.photo_pairs(matcher, known.Photographs(roots, part), PHOTO_PAIRS, part)


def fit(pairs: list[known.Pair], weights: str) -> Calibration:
    """Fit a calibration to these pairs."""
    true = [pair for pair in pairs if len(pair.errors_px)]
    share = (1 - NOTHING) / len({pair.source for pair in true})
    parts = [(pair.source, share, pair.scores, pair.errors_px) for pair in true]
    for kind in (known.UNRELATED, known.ALIKE):
        wrong = [pair.scores for pair in pairs if pair.kind == kind]
        parts += [(kind, NOTHING / 2, scores, np.full(len(scores), np.inf)) for scores in wrong]
    matches = fit_curve(parts)
    points = fit_curve([(pair.source, share, pair.point_scores, pair.point_errors_px) for pair in true])
    return Calibration(weights=weights, matches=matches, points=points, pairs=fit_pairs(pairs, matches))


def fit_curve(parts: list[tuple[str, float, Array, Array]]) -> Curve:
    """Fit a monotonic curve to the share of correct matches by score.

    Parts have a name, the weight of all parts with that name, scores, and errors in pixels.
    """
    count: dict[str, int] = defaultdict(int)
    for name, _, scores, _ in parts:
        count[name] += len(scores)
    weight = np.concatenate([np.full(len(scores), share / count[name]) for name, share, scores, _ in parts])
    scores, errors_px = (np.concatenate([part[k] for part in parts]).astype(np.float64) for k in (2, 3))
    order = np.argsort(scores, kind="stable")
    scores, weight = scores[order], weight[order] / weight.sum()
    right = (errors_px[order] < RIGHT_PX).astype(np.float64)
    # The lowest scores form one group at zero: a steep curve there would amplify rounding errors.
    low, start = np.searchsorted(scores, LOW)
    floor = float(np.average(right[:low], weights=weight[:low])) if low else 0.0
    scores, right, weight = scores[start:], right[start:], weight[start:] / weight[start:].sum()
    # Knots are dense at both ends: at high scores, and where few matches are correct.
    share = (1 - np.cos(np.linspace(0, np.pi, KNOTS + 1))) / 2
    edges = np.unique(np.searchsorted(np.cumsum(weight), share, side="left"))
    edges[-1] = len(scores)
    groups = []
    for start, end in itertools.pairwise(edges):
        some = weight[start:end]
        means = [float(np.average(values[start:end], weights=some)) for values in (scores, right)]
        groups.append((means[0], means[1], float(some.sum())))
    # Adjacent groups with decreasing shares are merged.
    joined: list[tuple[float, float, float]] = []
    for group in groups:
        joined.append(group)
        while len(joined) > 1 and joined[-2][1] >= joined[-1][1] - 1e-4:
            (s0, p0, n0), (s1, p1, n1) = joined[-2:]
            joined[-2:] = [((s0 * n0 + s1 * n1) / (n0 + n1), (p0 * n0 + p1 * n1) / (n0 + n1), n0 + n1)]
    # No match is certain: the curve ends halfway between the share of the best group and 1.
    end = (max(1.0, 1.01 * joined[-1][0]), (1 + min(joined[-1][1], 0.999)) / 2)
    joined = [group for group in joined if group[1] < end[1]]
    knots = [(0.0, float(f"{floor:.4f}"))]
    for score, share, _ in [*joined, (*end, 0.0)]:
        knot = (float(f"{score:.4g}"), float(f"{share:.4f}"))
        if knot[0] > knots[-1][0] and knot[1] > knots[-1][1]:
            knots.append(knot)
    return Curve(scores=tuple(score for score, _ in knots), probabilities=tuple(share for _, share in knots))


def fit_pairs(pairs: list[known.Pair], curve: Curve) -> PairModel:
    """Fit a logistic regression by Newton's method."""
    pairs = [pair for pair in pairs if pair.kind in SHARES]
    features = np.array([collect(p.points0, p.points1, curve(p.scores), p.size0, p.size1) for p in pairs])
    labels = np.array([pair.kind == known.RELATED for pair in pairs], dtype=np.float64)
    kinds = [pair.kind for pair in pairs]
    weight = np.array([SHARES[kind] / kinds.count(kind) for kind in kinds])
    middle, scale = features.mean(0), features.std(0)
    inputs = np.c_[np.ones(len(pairs)), (features - middle) / scale]
    ridge = RIDGE * np.diag([0.0, *np.ones(features.shape[1])])
    solution = np.zeros(inputs.shape[1])
    for _ in range(50):
        probability = 1 / (1 + np.exp(-inputs @ solution))
        gradient = inputs.T @ (weight * (probability - labels)) + ridge @ solution
        curvature = (inputs * (weight * probability * (1 - probability))[:, None]).T @ inputs + ridge
        solution = solution - np.linalg.solve(curvature + 1e-9 * np.eye(len(solution)), gradient)
    slope = solution[1:] / scale
    values = [float(f"{value:.5g}") for value in (solution[0] - slope @ middle, *slope)]
    return PairModel(bias=values[0], strength=values[1], motion=values[2], epipolar=values[3])


if __name__ == "__main__":
    main()
