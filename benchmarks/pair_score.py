"""Does pair_score tell pictures that show the same from others?

    python benchmarks/pair_score.py DATA/hpatches DATA/oxford

Each folder holds sequences: folders with pictures 1 to 6 of one thing. True pairs are 1-2 to 1-6 of each; the others
are four pairs of pictures from every two sequences.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np

import dualrc

ACROSS = ((1, 2), (1, 6), (3, 4), (5, 1))  # numbers of pictures of two sequences


def picture(sequence: Path, number: int) -> Path:
    """Picture `number` of a sequence."""
    return next(path for path in sorted(sequence.iterdir()) if path.stem == str(number))


def main() -> None:
    """Match all pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="+", type=Path, help="folders of sequences")
    parser.add_argument("--weights", type=Path, help="weights file; without it, those inside the package")
    arguments = parser.parse_args()
    sequences = [path for root in arguments.roots for path in sorted(root.iterdir()) if path.is_dir()]
    matcher = dualrc.load(weights=arguments.weights)
    features = {
        (sequence, number): matcher.features(picture(sequence, number))
        for sequence in sequences
        for number in range(1, 7)
    }
    true, others = {}, {}
    for sequence in sequences:
        for number in range(2, 7):
            found = matcher.match_features(features[sequence, 1], features[sequence, number])
            true[f"{sequence.name} 1-{number}"] = found.pair_score
    for (one, other), (i, j) in itertools.product(itertools.combinations(sequences, 2), ACROSS):
        found = matcher.match_features(features[one, i], features[other, j])
        others[f"{one.name} {i}, {other.name} {j}"] = found.pair_score
    higher = np.subtract.outer(list(true.values()), list(others.values()))
    area = np.mean((higher > 0) + (higher == 0) / 2)
    print("| pairs | number | lowest | highest |\n|---|---|---|---|")
    for name, scores in (("true", true), ("others", others)):
        (low, lowest), *_, (high, highest) = sorted((score, pair) for pair, score in scores.items())
        print(f"| {name} | {len(scores)} | {low:.4f} ({lowest}) | {high:.4f} ({highest}) |")
    print(f"\nArea under the ROC curve: {area:.4f}; second lowest of the true ones: {sorted(true.values())[1]:.4f}")


if __name__ == "__main__":
    main()
