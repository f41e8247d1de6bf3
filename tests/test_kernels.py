"""The GPU kernels against the plain definitions: in Triton's interpreter, and on a GPU where there is one."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from conftest import rand

from dualrc import kernels
from dualrc.config import ConsensusConfig
from dualrc.kernels import consensus as fast
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import mutual_filter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = {"float32": (torch.float32, 1e-5), "float16": (torch.float16, 4e-3)}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Kernels that are imported in a test run in Python; those of other tests don't."""

    def forget():
        for name in ("jit", "consensus_jit", "search_jit"):
            sys.modules.pop(f"dualrc.kernels.{name}", None)
            kernels.__dict__.pop(name, None)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    yield
    forget()


def make(channels: int, sizes=(3, 3)) -> Consensus:
    """Random kernels, symmetric in nothing, and biases that bring ReLU and the border into play."""
    consensus = Consensus(ConsensusConfig(kernel_sizes=sizes, channels=(channels, 1)))
    for number, (weight, bias) in enumerate(zip(consensus.weights, consensus.biases, strict=True)):
        weight.data = rand(number, *weight.shape) * (weight.shape[1] * weight.shape[2] ** 4) ** -0.5
        bias.data = 0.3 * rand(10 + number, *bias.shape)
    consensus.biases[-1].data.abs_()  # or half of the results would be zero
    return consensus.requires_grad_(False)


def check_consensus(consensus: Consensus, scores: torch.Tensor, tolerance: float, max_values: int | None = None):
    weights, biases = list(consensus.weights), list(consensus.biases)
    assert fast.supported(scores, weights)
    expected = consensus(scores.float())
    found = fast.consensus(scores, weights, biases, max_values)
    assert found.dtype == scores.dtype and found.shape == scores.shape
    assert expected.abs().max() > 0.1
    assert torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", fast.CHANNELS)
def test_consensus_is_the_plain_one(kind, channels):
    dtype, tolerance = KINDS[kind]
    check_consensus(make(channels), rand(1, 2, 2, 3, 3, 5).to(dtype), tolerance)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 3, 2, 1, 70), (1, 2, 1, 5, 2), (1, 1, 40, 2, 3)], ids=str)
def test_consensus_of_odd_shapes(shape):
    check_consensus(make(16), rand(2, *shape), 1e-5)


@pytest.mark.parametrize("max_values", [1, 1300, 2200, 3300])
def test_consensus_in_slabs(max_values):
    """Rows of both pictures one at a time, two at a time, and unevenly."""
    check_consensus(make(8), rand(3, 1, 5, 1, 3, 3), 1e-5, max_values)


def test_walks_that_meet():
    """Long rows are walked by several programs, which must agree at their ends."""
    consensus, scores = make(16), rand(4, 1, 1, 2, 9, 3)
    prepared = fast.prepare(list(consensus.weights), list(consensus.biases), torch.float32)
    for steps in (1, 2, 5):
        found = fast.apply(scores, prepared, tiles=fast.Tiles(steps=steps))
        assert torch.allclose(found, consensus(scores), rtol=1e-5, atol=1e-5)


def test_accumulators_in_turn():
    """Unrolled by three, as on the GPU."""
    consensus, scores = make(16), rand(4, 1, 1, 2, 5, 3).half()
    prepared = fast.prepare(list(consensus.weights), list(consensus.biases), torch.float16)
    found = fast.apply(scores, prepared, tiles=fast.Tiles(unroll=3))
    assert torch.allclose(found.float(), consensus(scores.float()), rtol=4e-3, atol=4e-3)


def test_the_plan_covers_everything_once_and_keeps_to_its_limit():
    shapes = [(1, 75, 100, 75, 100), (32, 30, 40, 30, 40), (1, 150, 200, 150, 200), (3, 2, 5, 7, 3), (2, 1, 1, 1, 1)]
    for shape in shapes:
        batch, h0, w0, h1, w1 = shape
        for limit in (1, 10**6, 2**29, 2**34):
            seen = torch.zeros(batch, h1, dtype=torch.int)
            for slab in fast.plan(shape, 2, limit):
                seen[slab.pairs.start : slab.pairs.stop, slab.region.start : slab.region.stop] += 1
                values = slab.slots * fast.SHARES * len(slab.region) * w0 * (w1 + 2)
                assert 1 <= slab.rows <= h0 and (slab.slots == h0 or slab.slots >= slab.rows + 2)
                assert values // slab.slots < 2**31
                least = len(slab.region) == 1 and slab.slots == min(h0, 3) and len(slab.pairs) == 1
                assert 2 * values * len(slab.pairs) <= limit or least
            assert (seen == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_mutual_filter_is_the_plain_one(kind):
    dtype, tolerance = KINDS[kind]
    scores = rand(5, 2, 2, 3, 2, 4).abs().to(dtype)
    expected = mutual_filter(scores.float())
    assert torch.allclose(fast.mutual_filter(scores).float(), expected, rtol=tolerance, atol=tolerance)
    consensus = make(8)
    prepared = fast.prepare(list(consensus.weights), list(consensus.biases), dtype)
    found = fast.apply(scores, prepared, maxima=fast.maxima_of(scores))
    assert torch.allclose(found.float(), consensus(expected), rtol=tolerance, atol=tolerance)


def test_what_is_not_supported(monkeypatch):
    scores = rand(0, 1, 2, 2, 2, 2)
    assert fast.supported(scores, list(make(16).weights))
    assert not fast.supported(scores.double(), list(make(16).weights))
    assert not fast.supported(scores, list(make(10).weights))
    assert not fast.supported(scores, list(make(16, sizes=(5, 3)).weights))
    assert not fast.supported(scores, list(make(16).requires_grad_(True).weights))
    with torch.no_grad():
        assert fast.supported(scores, list(make(16).requires_grad_(True).weights))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not fast.supported(scores, list(make(16).weights))  # a tensor of the CPU


def test_nothing_of_triton_is_imported_with_the_package():
    code = "import sys, dualrc, dualrc.kernels.consensus; assert 'triton' not in sys.modules"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
