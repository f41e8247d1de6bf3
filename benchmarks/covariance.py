"""Test the covariances of matches, and fit their constants.

    python benchmarks/covariance.py --sequences hpatches oxford [--fit]

SEQUENCES are folders of sequences with homographies (HPatches, Oxford-affine). Every second pair and every second
rendered scene serve for the fit; the table is about the others. `--fit` prints new constants for
`dualrc.model.covariance` and uses them for the table.

Homographies that are measured are off by up to a pixel, smoothly over the image: neighboring matches have the same
error. So a cubic polynomial is fitted to the errors of each pair and subtracted. The last row has the errors as they
are.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import calibration_pairs as known
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import dualrc
from dualrc import geometry, scenes
from dualrc.matcher.uncertainty import alignment_evidence
from dualrc.model import covariance

Array = npt.NDArray[Any]
RIGHT_PX = 3.0
# Matches per pair, so that every pair counts the same.
SAMPLE = 600
SCENES = 16
# Squared Mahalanobis distances are clipped here for the mean.
CLIP = 20.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Matches of one pair that are within 3 px of the truth, in pixels of the network input."""

    source: str
    # (n, 2)
    errors: Tensor
    # (n, 2, 2)
    normal: Tensor
    # (n,)
    unexplained: Tensor


def main() -> None:
    """Match the pairs, fit if asked to, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", nargs="*", type=Path, default=[], help="folders of sequences")
    parser.add_argument("--fit", action="store_true", help="fit the constants")
    arguments = parser.parse_args()
    matcher = dualrc.load()
    folders = [path for root in arguments.sequences for path in sorted(root.iterdir()) if path.is_dir()]
    both = [samples for folder in folders for samples in sequence_samples(matcher, folder)]
    plain, smooth = [first for first, _ in both], [second for _, second in both]
    rendered = list(scene_samples(matcher))
    constants = torch.tensor([covariance.FLOOR, covariance.SCALE, covariance.POWER, covariance.DAMPING]).double().log()
    if arguments.fit:
        constants = fit([*smooth[::2], *rendered[::2]], constants)
        names = ("FLOOR", "SCALE", "POWER", "DAMPING")
        print(*(f"{name} = {value:.3g}" for name, value in zip(names, constants.exp().tolist(), strict=True)), sep="\n")
    print("| pairs | matches | within 1 sigma (.393) | 2 sigma (.865) | 3 sigma (.989) | mean (2) | gain |")
    print("|---|---|---|---|---|---|---|")
    for samples in (smooth[1::2], rendered[1::2], plain[1::2]):
        if samples:
            print(row(samples, constants))


def sequence_samples(matcher: dualrc.Matcher, folder: Path) -> Iterator[tuple[Sample, Sample]]:
    """Yield the samples of the pairs 1-2 to 1-6, with errors as they are, and without their smooth part."""
    paths = {path.stem: path for path in folder.iterdir() if not path.name.startswith("H_")}
    first = matcher.features(paths["1"])
    for number in range(2, 7):
        H = np.loadtxt(folder / f"H_1_{number}")

        def truth(points: Array, H: Array = H) -> Array:
            return np.asarray(geometry.apply_homography(H, points.astype(np.float64)))

        yield (
            take(matcher, first, matcher.features(paths[str(number)]), truth, "sequences, as they are", False),
            take(matcher, first, matcher.features(paths[str(number)]), truth, "sequences", True),
        )


def scene_samples(matcher: dualrc.Matcher) -> Iterator[Sample]:
    """Yield samples of rendered scenes, whose truth is exact."""
    for number in range(SCENES):
        kind = "square" if number // 2 % 4 else "plane"
        angle, zoom = (8.0, 15.0, 25.0, 35.0)[number // 2 % 4], (1.1, 1.3, 1.6)[number % 3]
        made = scenes.make_pair(900 + number, kind=kind, angle_deg=angle, zoom=zoom, min_overlap=0.3, supersample=1)

        def truth(points: Array, made: Any = made) -> Array:
            there = scenes.correspond(made.rendering0, made.rendering1, points)
            return np.where(there.visible.numpy()[:, None], there.points1.numpy(), np.nan)

        features = [matcher.features(view.image.numpy()) for view in (made.rendering0, made.rendering1)]
        yield take(matcher, features[0], features[1], truth, "rendered scenes", False)


@torch.inference_mode()
def take(
    matcher: dualrc.Matcher,
    features0: dualrc.ImageFeatures,
    features1: dualrc.ImageFeatures,
    truth: known.Truth,
    source: str,
    smooth: bool,
) -> Sample:
    """Match a pair and return some of the matches near the truth."""
    matches = matcher.match_features(features0, features1)
    scale = np.array(features1.scale.input_size) / np.array(features1.size)
    errors = (matches.points1 - truth(matches.points0)) * scale
    if smooth:
        errors = errors - smooth_part(matches.points1, errors)
    near = np.flatnonzero(np.linalg.norm(np.nan_to_num(errors, nan=1e6), axis=1) < RIGHT_PX)
    rows = np.random.default_rng(0).choice(near, min(SAMPLE, len(near)), replace=False)
    normal, unexplained = alignment_evidence(matches, features0, features1, matcher.device)
    return Sample(
        source=source,
        errors=torch.from_numpy(errors[rows]).double(),
        normal=normal[rows].double().cpu(),
        unexplained=unexplained[rows].double().cpu(),
    )


def smooth_part(points: Array, errors: Array) -> Array:
    """Return the cubic polynomial of the position (n, 2) that fits the errors (n, 2) within 3 px best."""
    x, y = ((points - points.mean(0)) / points.std(0)).T
    design = np.stack([x**i * y**j for i in range(4) for j in range(4 - i)], axis=1)
    part = np.zeros_like(errors)
    for _ in range(5):
        near = np.linalg.norm(errors - part, axis=1) < RIGHT_PX
        part = design @ np.linalg.lstsq(design[near], errors[near], rcond=None)[0]
    return part


def fit(samples: list[Sample], start: Tensor) -> Tensor:
    """Return the logarithms of the constants with the highest likelihood of the errors."""
    constants = start.clone().requires_grad_()
    every = joined(samples)
    optimizer = torch.optim.LBFGS([constants], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = unlikelihood(every, model(every, constants))
        value.backward()
        return value

    optimizer.step(loss)
    return constants.detach()


def model(sample: Sample, constants: Tensor) -> Tensor:
    """Return the covariances (n, 2, 2) for the logarithms of floor, scale, power and damping."""
    floor, scale, power, damping = constants.exp()
    identity = torch.eye(2, dtype=torch.float64)
    inverse = torch.linalg.inv(sample.normal + damping * identity)
    return floor * identity + scale * sample.unexplained[:, None, None] ** power * inverse


def unlikelihood(sample: Sample, covariances: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the errors, without its constant."""
    return (torch.logdet(covariances) + distances(sample, covariances)).mean() / 2


def distances(sample: Sample, covariances: Tensor) -> Tensor:
    """Return the squared Mahalanobis distances (n,)."""
    solved = torch.linalg.solve(covariances, sample.errors[:, :, None])
    return (sample.errors[:, None] @ solved)[:, 0, 0]


def joined(samples: list[Sample]) -> Sample:
    """Return all samples as one."""
    fields = {name: torch.cat([getattr(s, name) for s in samples]) for name in ("errors", "normal", "unexplained")}
    return replace(samples[0], **fields)


def row(samples: list[Sample], constants: Tensor) -> str:
    """Return a row of the table: shares within 1 to 3 sigma, the mean, and the gain in log-likelihood.

    The gain is over the best single variance for all matches, in nats per match.
    """
    every = joined(samples)
    found = model(every, constants)
    squares = distances(every, found)
    shares = [f"{(squares < limit).double().mean():.3f}" for limit in (1, 4, 9)]
    variance = every.errors.square().mean()
    gain = math.log(variance) + 1 - float(unlikelihood(every, found))
    cells = [f"{every.source}, {len(samples)}", str(len(squares)), *shares, f"{squares.clamp(max=CLIP).mean():.2f}"]
    return "| " + " | ".join([*cells, f"{gain:+.2f}"]) + " |"


if __name__ == "__main__":
    main()
