"""Neighbourhood consensus against its literal definition, and that against plain loops."""

import itertools

import pytest
import torch
from conftest import rand

from dualrc.config import ConsensusConfig
from dualrc.errors import ConfigError
from dualrc.model import literal, trace
from dualrc.model.consensus import Consensus

LAYERS = [((3, 3), (16, 1)), ((5, 5, 5), (16, 16, 1)), ((3, 3, 3), (10, 10, 1)), ((3,), (1,)), ((1, 5), (3, 1))]
SHAPES = [(3, 4, 2, 5), (1, 2, 3, 3), (5, 3, 3, 4)]


def make(sizes, channels) -> Consensus:
    """Random kernels, symmetric in nothing, and biases that bring ReLU and the border into play."""
    consensus = Consensus(ConsensusConfig(kernel_sizes=sizes, channels=channels))
    for number, (weight, bias) in enumerate(zip(consensus.weights, consensus.biases, strict=True)):
        weight.data = rand(number, *weight.shape) * (weight.shape[1] * weight.shape[2] ** 4) ** -0.5
        bias.data = 0.3 * rand(10 + number, *bias.shape)
    consensus.biases[-1].data.abs_()  # or half of the results would be zero
    return consensus.requires_grad_(False)


def by_definition(consensus: Consensus, scores: torch.Tensor) -> torch.Tensor:
    weights, biases = list(consensus.weights), list(consensus.biases)
    return torch.stack([literal.consensus(pair, weights, biases) for pair in scores])


def test_literal_convolution_is_plain_loops():
    values, weight, bias = rand(0, 2, 2, 2, 2, 3), rand(1, 3, 2, 3, 3, 3, 3), rand(2, 3)
    result = literal.conv4d(values, weight, bias)
    assert result.shape == (3, 2, 2, 2, 3)
    v, w = values.tolist(), weight.tolist()
    shape = values.shape[1:]
    for o, i, j, k, m in itertools.product(*map(range, result.shape)):
        total = bias[o].item()
        for c, p, q, r, s in itertools.product(range(2), *[range(3)] * 4):
            place = (i + p - 1, j + q - 1, k + r - 1, m + s - 1)
            if all(0 <= at < side for at, side in zip(place, shape, strict=True)):
                total += w[o][c][p][q][r][s] * v[c][place[0]][place[1]][place[2]][place[3]]
        assert result[o, i, j, k, m].item() == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize(("sizes", "channels"), LAYERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_consensus_is_its_definition(sizes, channels, shape):
    consensus = make(sizes, channels)
    scores = rand(5, 2, *shape)
    expected = by_definition(consensus, scores)
    assert expected.abs().max() > 0.1
    per_row = scores[:, 0].numel() * consensus._values_per_entry()
    # All at once, every row on its own, and two rows at a time.
    for max_values in (None, 1, 2 * per_row):
        assert torch.allclose(consensus(scores, max_values), expected, rtol=1e-4, atol=1e-5), max_values


@pytest.mark.parametrize(("sizes", "channels"), LAYERS[:3], ids=str)
def test_consensus_treats_the_pictures_alike(sizes, channels):
    consensus = make(sizes, channels)
    scores = rand(6, 1, 3, 2, 2, 4)
    turned = consensus(scores.permute(0, 3, 4, 1, 2)).permute(0, 3, 4, 1, 2)
    assert torch.allclose(turned, consensus(scores), rtol=1e-4, atol=1e-5)


def test_a_pair_does_not_feel_its_batch():
    consensus = make((3, 3), (16, 1))
    scores = rand(7, 3, 3, 3, 2, 3)
    alone = torch.cat([consensus(pair[None]) for pair in scores])
    assert torch.allclose(consensus(scores), alone, rtol=1e-5, atol=1e-6)


def test_the_slab_size_changes_nothing():
    consensus = make((3, 3), (16, 1))
    scores = rand(8, 1, 7, 3, 3, 3)
    whole = consensus(scores)
    for rows in range(1, 8):
        slabs = consensus(scores, rows * scores[:, 0].numel() * consensus._values_per_entry())
        assert torch.allclose(slabs, whole, rtol=1e-5, atol=1e-6)


def test_a_fresh_consensus_is_near_the_identity():
    torch.manual_seed(0)
    consensus = Consensus(ConsensusConfig())
    scores = torch.zeros(1, 4, 4, 4, 4)
    scores[0, 1, 2, 3, 0] = 1
    result = consensus(scores)
    assert result.flatten().argmax() == scores.flatten().argmax()


def test_it_can_be_trained():
    consensus = make((3, 3), (16, 1)).requires_grad_(True)
    consensus(rand(9, 1, 3, 3, 3, 3)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in consensus.parameters())


@pytest.mark.parametrize(
    ("sizes", "channels"), [((3, 3), (16, 2)), ((3,), (16, 1)), ((4, 3), (16, 1)), ((), ())], ids=str
)
def test_layers_that_make_no_sense_are_refused(sizes, channels):
    with pytest.raises(ConfigError, match="odd sizes"):
        Consensus(ConsensusConfig(kernel_sizes=sizes, channels=channels))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 3, 4), (5, 6, 4, 7), (4, 9, 2, 3), (7, 2, 3, 5)], ids=str)
@pytest.mark.parametrize("channels", [1, 8, 16, 24])
def test_the_walk_is_the_definition(shape, channels, cpu_kernels):
    """On a CPU, without gradients, rows are walked over: even and odd widths, and slabs of every height."""
    consensus = make((3, 3), (channels, 1))
    scores = rand(6, 1, *shape)
    expected = by_definition(consensus, scores)
    per_row = (shape[1] + shape[1] % 2) * shape[2] * shape[3] * 2 * channels
    with torch.no_grad(), trace.recording() as seen:
        for rows in (1, 2, 3, 100):
            assert torch.allclose(consensus(scores, rows * per_row), expected, rtol=1e-4, atol=1e-5), rows
    assert seen.notes["kernel.consensus"] == ["C" if cpu_kernels == "C" and channels > 1 else "walk"] * 4
    scores.requires_grad_()
    assert consensus(scores).requires_grad
