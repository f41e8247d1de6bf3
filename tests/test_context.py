"""Tests of context: attention over the coarse cells of both images before the correlation."""

from dataclasses import replace

import pytest
import torch
from conftest import ENGINES, make_engine, rand, same_matches, texture, tiny_config, tiny_network

from dualrc.config import ContextConfig, MatcherConfig, NetworkConfig
from dualrc.errors import ConfigError
from dualrc.matcher import Matcher
from dualrc.model.checkpoint import load_weights, save_weights
from dualrc.model.context import Context
from dualrc.model.dualrc import DualRCNet, make_network
from dualrc.ops import memory
from dualrc.ops.reference import ReferenceEngine
from dualrc.toml import from_dict, to_dict

SMALL = ContextConfig(layers=2, width=16, heads=2)


def context(seed: int = 0, channels: int = 12, config: ContextConfig = SMALL) -> Context:
    """Return a context that changes its input, like a trained one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Context(config, channels).eval()
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def network(seed: int = 0, *, trained: bool = True) -> DualRCNet:
    """Return `tiny_network` with context."""
    made = tiny_network(seed=seed)
    config = replace(made.config, context=SMALL)
    other = make_network(config)
    other.load_state_dict(made.state_dict(), strict=False)
    if trained:
        assert other.context is not None
        other.context.load_state_dict(context().state_dict())
    return other


def matcher(network: DualRCNet, **settings) -> Matcher:
    return Matcher(network, MatcherConfig(), device="cpu", **settings)


def mask(seed: int, height: int, width: int) -> torch.Tensor:
    """Return a mask of a random half of the coarse cells, with some of their fine cells."""
    cells = rand(seed, 1, height, width) > 0
    fine = rand(seed + 1, 1, 4 * height, 4 * width) > 0
    return cells.repeat_interleave(4, 1).repeat_interleave(4, 2) & fine


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("shape0", "shape1"), [((3, 4), (3, 4)), ((3, 5), (4, 2)), ((1, 1), (2, 3))])
@pytest.mark.parametrize("name", ENGINES)
def test_engines_agree_with_the_formulas(name, shape0, shape1, masked):
    maps = rand(0, 2, 12, *shape0), rand(1, 2, 12, *shape1)
    valid = (None, None)
    if masked:
        valid = torch.cat([mask(2, *shape0), mask(4, *shape0)]), torch.cat([mask(6, *shape1)] * 2)
    engine, module = make_engine(name), context()
    expected = ReferenceEngine().context(module, maps, valid)
    device = "cuda" if name.startswith("triton") and torch.cuda.is_available() else "cpu"
    moved = [tuple(None if t is None else t.to(device) for t in pair) for pair in (maps, valid)]
    with torch.inference_mode():
        found = engine.context(module.to(device), *moved)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=2e-5, rtol=2e-5)


def test_untrained_it_changes_nothing():
    images = texture(0, 96, 80), texture(1, 112, 64)
    before, after = (matcher(made).match(*images) for made in (tiny_network(), network(trained=False)))
    assert len(before) > 0
    assert same_matches(before, after)
    assert not same_matches(before, matcher(network()).match(*images))


@pytest.mark.parametrize("sizes", [((96, 80), (96, 80)), ((96, 80), (112, 64))])
def test_images_exchanged_exchange_the_results(sizes):
    module, maps = context(), [rand(number, 1, 12, *size) for number, size in enumerate(sizes)]
    with torch.inference_mode():
        there, back = module(*maps), module(*maps[::-1])
    for one, other in zip(there, back[::-1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_batch_is_its_pairs():
    module, maps = context(), (rand(0, 3, 12, 4, 5), rand(1, 3, 12, 4, 5))
    together = module(*maps)
    for number in range(3):
        alone = module(*(x[number : number + 1] for x in maps))
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(one[0], other[number], atol=1e-5, rtol=1e-5)


def test_what_a_mask_hides_is_not_looked_at():
    module, maps = context(), (rand(0, 1, 12, 4, 6), rand(1, 1, 12, 4, 6))
    cells = torch.ones(1, 4, 6, dtype=torch.bool)
    cells[:, :, 4:] = False
    first = module(*maps, None, cells)
    changed = maps[1].clone()
    changed[:, :, :, 4:] = rand(2, 1, 12, 4, 2)
    second = module(maps[0], changed, None, cells)
    torch.testing.assert_close(first[0], second[0])
    torch.testing.assert_close(first[1][:, :, :, :4], second[1][:, :, :, :4])
    nothing = module(*maps, torch.zeros_like(cells), torch.zeros_like(cells))
    assert all(x.isfinite().all() for x in nothing)


def test_a_mask_of_everything_is_no_mask():
    module, maps = context(), (rand(0, 1, 12, 3, 5), rand(1, 1, 12, 4, 2))
    everything = [torch.ones(1, *x.shape[2:], dtype=torch.bool) for x in maps]
    for one, other in zip(module(*maps), module(*maps, *everything), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_features_serve_with_any_other_image():
    """Features depend on one image only, so cached features give the same matches."""
    made, images = matcher(network()), (texture(0, 96, 80), texture(1, 112, 64))
    features = [made.features(image) for image in images]
    assert same_matches(made.match(*images), made.match_features(*features))


def test_round_trip(tmp_path):
    made = network()
    save_weights(made, tmp_path / "weights.safetensors")
    again = load_weights(tmp_path / "weights.safetensors")
    assert again.config == made.config
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_files_of_networks_without_context_are_as_before(tmp_path):
    save_weights(tiny_network(), tmp_path / "weights.safetensors")
    assert load_weights(tmp_path / "weights.safetensors").context is None
    assert "context" not in to_dict(tiny_config())


def test_config():
    config = replace(tiny_config(), context=SMALL)
    assert from_dict(NetworkConfig, to_dict(config)) == config
    with pytest.raises(ConfigError, match="multiple of heads"):
        make_network(replace(config, context=ContextConfig(width=10, heads=4)))
    with pytest.raises(ConfigError, match="layers"):
        ContextConfig(layers=0)


def test_budget_and_work_count_it():
    sizes, own = ((640, 480), (640, 480)), memory.traits("native", torch.device("cpu"), torch.float32, 8)
    plain = tiny_config()
    wide = replace(plain, context=ContextConfig(width=512))
    needs = [memory.needs(c, sizes, sizes, 4, own, on_gpu=False) for c in (plain, wide)]
    assert needs[1].coarse > needs[0].coarse
    assert needs[1].search == needs[0].search
    work = [memory.coarse_work(c, *sizes, 4) for c in (plain, wide)]
    assert work[1].operations > work[0].operations


def test_gradients_reach_features_and_weights():
    module = context()
    maps = [rand(number, 1, 12, 3, 4).requires_grad_() for number in (0, 1)]
    sum(x.square().sum() for x in module(*maps)).backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in [*maps, *module.parameters()])
