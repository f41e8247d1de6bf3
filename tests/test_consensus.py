"""Tests of neighborhood consensus; tests/test_ops.py compares it with the reference."""

import pytest
import torch
from conftest import rand

from dualrc.config import PRESETS, ConsensusConfig
from dualrc.errors import ConfigError
from dualrc.model.consensus import Consensus
from dualrc.ops import memory
from dualrc.ops.torch import TorchEngine

LAYERS = [((3, 3), (16, 1)), ((5, 5, 5), (16, 16, 1)), ((3, 3, 3), (10, 10, 1))]


def make(sizes, channels) -> Consensus:
    """Return a consensus with random kernels without symmetry."""
    consensus = Consensus(ConsensusConfig(kernel_sizes=sizes, channels=channels))
    for number, (weight, bias) in enumerate(zip(consensus.weights, consensus.biases, strict=True)):
        weight.data = rand(number, *weight.shape) * (weight.shape[1] * weight.shape[2] ** 4) ** -0.5
        bias.data = 0.3 * rand(10 + number, *bias.shape).abs()
    return consensus.requires_grad_(False)


@pytest.mark.parametrize(("sizes", "channels"), LAYERS, ids=str)
def test_consensus_treats_the_images_alike(sizes, channels):
    consensus = make(sizes, channels)
    scores = rand(6, 1, 3, 2, 2, 4)
    swapped = consensus(scores.permute(0, 3, 4, 1, 2)).permute(0, 3, 4, 1, 2)
    assert torch.allclose(swapped, consensus(scores), rtol=1e-4, atol=1e-5)


def test_a_pair_does_not_feel_its_batch():
    consensus = make((3, 3), (16, 1))
    scores = rand(7, 3, 3, 3, 2, 3)
    alone = torch.cat([consensus(pair[None]) for pair in scores])
    assert torch.allclose(consensus(scores), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sizes", "channels"), LAYERS, ids=str)
def test_the_slab_size_changes_nothing(sizes, channels):
    consensus, scores = make(sizes, channels), rand(8, 1, 7, 3, 3, 3)
    whole, row = consensus(scores), 4 * scores[:, 0].numel() * memory.consensus_values(consensus)
    with torch.no_grad():
        for rows in range(1, 16):
            with memory.working_memory(rows * row):
                assert torch.allclose(TorchEngine().consensus(scores, consensus), whole, rtol=1e-5, atol=1e-6)


def test_an_untrained_consensus_is_near_the_identity():
    torch.manual_seed(0)
    consensus = Consensus(ConsensusConfig())
    scores = torch.zeros(1, 4, 4, 4, 4)
    scores[0, 1, 2, 3, 0] = 1
    assert consensus(scores).flatten().argmax() == scores.flatten().argmax()


def test_the_paper_s_consensus_starts_as_the_published_one():
    """Weights and biases are uniform within 1 / sqrt(inputs * taps)."""
    torch.manual_seed(0)
    config = PRESETS["paper"][0].consensus
    assert config == ConsensusConfig(kernel_sizes=(3, 3), channels=(16, 1), initialization="uniform")
    consensus = Consensus(config)
    for inputs, weight, bias in zip((1, 16), consensus.weights, consensus.biases, strict=True):
        bound = (inputs * 81) ** -0.5
        assert 0.9 * bound < weight.abs().max() <= bound and 0 < bias.abs().max() <= bound
        assert abs(weight.mean()) < 0.05 * bound  # no tap stands out


def test_it_can_be_trained():
    consensus = make((3, 3), (16, 1)).requires_grad_(True)
    consensus(rand(9, 1, 3, 3, 3, 3)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in consensus.parameters())


@pytest.mark.parametrize(("sizes", "channels"), [((3, 3), (16, 2)), ((3,), (16, 1)), ((4, 3), (16, 1))], ids=str)
def test_layers_that_make_no_sense_are_refused(sizes, channels):
    with pytest.raises(ConfigError, match="odd sizes"):
        Consensus(ConsensusConfig(kernel_sizes=sizes, channels=channels))


def test_a_consensus_without_layers_is_refused():
    with pytest.raises(ConfigError, match="channels has 0 entries"):
        ConsensusConfig(kernel_sizes=(), channels=())
