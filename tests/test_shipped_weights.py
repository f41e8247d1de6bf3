"""Tests of the bundled weights on rendered scenes, which were not part of training."""

import numpy as np
import pytest

import dualrc
from dualrc.model.checkpoint import bundled
from dualrc.scenes import correspond, make_pair

SCENES = (2, 3, 4)
# Smallest share of matches within 1, 3 and 5 px. Measured: .860, .967, .980.
LEAST = {1: 0.84, 3: 0.96, 5: 0.97}


@pytest.mark.skipif(bundled("default") is None, reason="the package carries no weights")
def test_accuracy_on_rendered_scenes():
    matcher, shares = dualrc.load(device="cpu"), []
    for seed in SCENES:
        pair = make_pair(seed, size=(400, 304))
        matches = matcher.match(*(rendering.image.numpy() for rendering in pair), top=500)
        truth = correspond(*pair, matches.points0)
        distance_px = np.linalg.norm(truth.points1.numpy() - matches.points1, axis=1)
        error_px = np.where(truth.visible.numpy(), distance_px, np.inf)
        assert len(matches) == 500
        shares.append([(error_px <= threshold).mean() for threshold in LEAST])
    for threshold, share in zip(LEAST, np.mean(shares, axis=0), strict=True):
        assert share >= LEAST[threshold], f"{share:.3f} within {threshold} px"
