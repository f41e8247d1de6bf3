"""Tests of the support of matches by their neighbors; tests/test_ops.py compares it with the reference."""

import numpy as np
import torch
from conftest import rand

from dualrc.model.support import DirectedMatches, crowd, support


def made(seed: int, height: int, width: int, share: float):
    """Return matches from a share of the cells, most with one affine motion, some random."""
    rng = np.random.default_rng(seed)
    index = rng.permutation(height * width)[: int(share * height * width)]
    here = np.stack([index % width, index // width], 1) + rng.uniform(-0.4, 0.4, (len(index), 2))
    there = here @ np.array([[0.9, 0.3], [-0.2, 1.1]]) + [3, 5] + rng.normal(0, 0.1, here.shape)
    wrong = rng.uniform(size=len(index)) < 0.3
    there[wrong] = rng.uniform(0, width, (int(wrong.sum()), 2))
    return index, here, there, rng.uniform(0, 1, len(index)), wrong


def tensors(*arrays):
    return [torch.from_numpy(a) if a.dtype == np.int64 else torch.from_numpy(a).float() for a in arrays]


def test_right_matches_have_more_support():
    index, here, there, trust, wrong = made(2, 40, 50, 0.7)
    pair = torch.zeros(len(index), dtype=torch.long)
    trust = np.where(wrong, 0.2, 0.8)  # what lies around has been told apart to some degree
    found = support(DirectedMatches(*tensors(index, here, there, trust), pair, (1, 40, 50))).share.numpy()
    right = found[~wrong][:, None] > found[wrong][None]
    assert right.mean() > 0.95  # the area under the ROC curve


def test_matches_that_stray_are_shifted_to_where_the_others_are_and_two_planes_keep_apart():
    index, here, _, trust, _ = made(5, 40, 50, 0.7)
    right = here[:, 0] > 25  # another plane, which moves by two and a half cells more
    truth = here @ np.array([[0.9, 0.3], [-0.2, 1.1]]) + np.where(right[:, None], [5.5, 5], [3, 5])
    there = truth + np.random.default_rng(6).normal(0, 0.3, here.shape)
    pair = torch.zeros(len(index), dtype=torch.long)
    shift = support(DirectedMatches(*tensors(index, here, there, trust), pair, (1, 40, 50))).shift.numpy()
    before, after = (np.linalg.norm(places - truth, axis=1) for places in (there, there + shift))
    inside = np.abs(here[:, 0] - 25) > 9
    assert after[inside].mean() < 0.6 * before[inside].mean()
    assert after[~inside].mean() < 1.3 * before[~inside].mean()


def test_pairs_of_a_batch_and_missing_matches_keep_apart():
    one, other = made(3, 12, 16, 0.6), made(4, 12, 16, 0.5)
    columns = [np.concatenate([a, b]) for a, b in zip(one[:4], other[:4], strict=True)]
    pair = torch.tensor([0] * len(one[0]) + [1] * len(other[0]))
    both = support(DirectedMatches(*tensors(*columns), pair, (2, 12, 16)))
    for number, each in enumerate((one, other)):
        alone = support(DirectedMatches(*tensors(*each[:4]), torch.zeros(len(each[0]), dtype=torch.long), (1, 12, 16)))
        for found, expected in zip(both, alone, strict=True):
            assert torch.allclose(found[pair == number], expected, atol=1e-5)
    missing = [np.concatenate([c, c[:3]]) for c in columns]
    padded = support(DirectedMatches(*tensors(*missing), torch.cat([pair, torch.tensor([-1] * 3)]), (2, 12, 16)))
    assert all(torch.allclose(found[:-3], expected, atol=1e-5) for found, expected in zip(padded, both, strict=True))
    nothing = support(DirectedMatches(*[t[:0] for t in tensors(*columns)], pair[:0], (2, 12, 16)))
    assert [tuple(column.shape) for column in nothing] == [(0,), (0, 2, 2), (0, 2)]


def test_a_crowd_is_counted():
    index, pair = torch.from_numpy(np.random.default_rng(0).permutation(500)), torch.arange(500) % 3 - 1
    score = rand(5, 500).mul(4).round() / 4  # with ties
    height, width = 20, 25
    anywhere = torch.zeros(500, 2)
    matches = DirectedMatches(index, anywhere, anywhere, score, pair, (2, height, width))
    found = crowd(matches, score)
    square = torch.stack([pair, index // width // 8, index % width // 8])
    for n in (pair >= 0).nonzero()[:, 0].tolist():
        near = (square == square[:, n : n + 1]).all(0)
        better = near & ((score > score[n]) | ((score == score[n]) & (index < index[n])))
        assert found[n] == better.sum()
    nothing = DirectedMatches(*(column[:0] for column in matches[:5]), matches.shape)
    assert crowd(nothing, score[:0]).shape == (0,)
