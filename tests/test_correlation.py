"""Tests of the correlation and the soft mutual filter with known answers."""

import itertools

import pytest
import torch
from conftest import rand

from dualrc.model.correlation import correlate, mutual_filter, normalize


def test_normalize_is_the_published_one():
    features = torch.tensor([3.0, 4.0]).view(1, 2, 1, 1).repeat(1, 1, 1, 2)
    features[:, :, 0, 1] = 0
    unit = normalize(features)
    assert unit[0, :, 0, 0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert unit[0, :, 0, 1].tolist() == [0, 0]
    small = normalize(torch.full((1, 1, 1, 1), 1e-3))
    assert small.item() == pytest.approx(2**-0.5, rel=1e-4)  # 1e-3 / sqrt(1e-6 + 1e-6)


def test_normalize_survives_half_precision():
    # The sum of squares of 1024 values of 16 overflows float16.
    unit = normalize(torch.full((1, 1024, 1, 1), 16.0, dtype=torch.float16))
    assert unit.dtype == torch.float16 and unit.flatten()[0].item() == pytest.approx(1 / 32, rel=1e-3)


def test_correlate_is_the_cosine_of_every_two_cells():
    f0, f1 = rand(0, 2, 5, 2, 3), rand(1, 2, 5, 3, 1)
    scores = correlate(f0, f1)
    assert scores.shape == (2, 2, 3, 3, 1)
    for b, i, j, k, m in itertools.product(*map(range, scores.shape)):
        cosine = torch.nn.functional.cosine_similarity(f0[b, :, i, j], f1[b, :, k, m], dim=0)
        assert scores[b, i, j, k, m].item() == pytest.approx(cosine.item(), abs=1e-5)


def test_features_correlate_with_themselves():
    features = rand(0, 1, 64, 3, 4)
    scores = correlate(features, features).view(12, 12)
    assert torch.allclose(scores.diagonal(), torch.ones(12), atol=1e-5)
    assert scores.argmax(1).tolist() == list(range(12))


def test_mutual_filter_known_answer():
    # Rows are cells of image 0; the maximum of row 0 is 4, of column 1 is 8.
    scores = torch.tensor([[4.0, 2.0], [1.0, 8.0]]).view(1, 1, 2, 1, 2)
    expected = torch.tensor([[4.0, 2 * 2 / 8 * 2 / 4], [1 / 4 / 8, 8.0]]).view(1, 1, 2, 1, 2)
    assert torch.allclose(mutual_filter(scores), expected, rtol=1e-4)


def test_mutual_filter_is_symmetric_and_keeps_zeros():
    scores = rand(4, 1, 2, 3, 3, 2).abs()
    swapped = mutual_filter(scores.permute(0, 3, 4, 1, 2))
    assert torch.allclose(swapped.permute(0, 3, 4, 1, 2), mutual_filter(scores), rtol=1e-6)
    assert not mutual_filter(torch.zeros(1, 2, 2, 2, 2)).any()
