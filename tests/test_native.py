"""The kernels in C against the plain code beside them, and what happens where they are not there."""

import shutil
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from conftest import rand, texture, tiny_matcher, tiny_network

from dualrc.config import ConsensusConfig
from dualrc.kernels import native
from dualrc.model.align import align
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import normalize
from dualrc.model.fine import FineMap, cell_queries, point_queries, search
from dualrc.model.subpixel import cell_windows, cells_meet, meet
from dualrc.model.support import support

needs_library = pytest.mark.skipif(native._library() is None, reason="the kernels in C were not compiled")


@pytest.fixture(autouse=True)
def threads():
    """Several share the work, more than there may be cores."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def both(monkeypatch):
    """A function that calls another by the kernels, which must really run, and without them."""

    def call(function, *args, **kwargs):
        names = []
        with monkeypatch.context() as patch:
            original = native.call
            patch.setattr(native, "call", lambda name, **values: (names.append(name), original(name, **values)))
            found = function(*args, **kwargs)
        assert names
        with monkeypatch.context() as patch:
            patch.setattr(native, "_library", lambda: None)
            return found, function(*args, **kwargs)

    return call


def fine_map(seed: int, batch: int, height: int, width: int, channels: int, *, masked: bool = False) -> FineMap:
    fine = normalize(rand(seed, batch, channels, 4 * height, 4 * width))
    return FineMap.of(fine, rand(seed, batch, 4 * height, 4 * width) > -0.5 if masked else None)


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("gcc"), reason="there is no compiler")
def test_the_kernels_were_compiled():
    assert native._library() is not None


@needs_library
@pytest.mark.parametrize("generation", native._GENERATIONS)
def test_every_generation_of_processors_finds_the_same(generation, monkeypatch):
    order = list(native._GENERATIONS)
    here = torch.backends.cpu.get_cpu_capability()
    if here not in order or order.index(generation) < order.index(here):
        pytest.skip("this processor is older, or another")
    found = find_spec(f"dualrc.kernels.{native._GENERATIONS[generation]}")
    if found is None:
        pytest.skip("was not compiled, as there is nothing but one for all")
    network = tiny_network(subpixel_hidden=8)
    pictures = [torch.from_numpy(texture(3, 96, 80)).permute(2, 0, 1)[None] / 255 for _ in range(2)]
    with torch.inference_mode():
        features = [network.extract(picture) for picture in pictures]
        tensor, expected = network.coarse_tensor(*features), network.match(*features)
        monkeypatch.setattr(native, "_library", lambda: native._opened(found.origin))
        assert torch.allclose(network.coarse_tensor(*features), tensor, rtol=1e-4, atol=1e-6)
        matches = network.match(*features)
    assert len(matches.pair) == len(expected.pair) > 10
    near = (matches.points1[:, None] - expected.points1).abs().amax(2) < 0.01
    assert (near & ((matches.points0[:, None] - expected.points0).abs().amax(2) < 0.01)).any(1).float().mean() > 0.98


@needs_library
@pytest.mark.parametrize("temperature", [0.0, 0.1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("shape0", "shape1", "channels"), [((9, 7), (8, 16), 96), ((1, 3), (5, 13), 7), ((4, 4), (1, 1), 33)]
)
def test_search(both, shape0, shape1, channels, masked, temperature):
    asking = fine_map(1, 2, *shape0, channels)
    fine = fine_map(2, 2, *shape1, channels, masked=masked)
    tensor = rand(3, 2, asking.cells, fine.cells).abs() ** 6  # some cells stand out
    tensor[:, :, ::5] = 0
    tensor[0, 0] = 0
    cells = torch.arange(2 * asking.cells)
    groups = cell_queries(asking, cells, "center")
    some = cell_queries(asking, cells, "corner")
    some = type(some)(**{**vars(some), "wanted": rand(4, len(cells), 16) > 0})
    points = point_queries(
        asking, torch.tensor([0, 1, 1]), torch.tensor([[0.2, 3.1], [8.8, 1.0], [2.5, 2.5]]), "center"
    )
    for queries in (groups, some, points):
        settings = {"temperature": temperature, "max_values": 10**9}
        found, expected = both(search, tensor, queries, fine, **settings)
        wanted = torch.ones_like(found.index, dtype=torch.bool) if queries.wanted is None else queries.wanted
        assert torch.equal(found.index[wanted], expected.index[wanted])
        assert torch.allclose(found.score[wanted], expected.score[wanted], rtol=1e-5, atol=1e-9)
        assert (found.visited <= fine.cells).all()


@needs_library
def test_search_ends_whatever_the_numbers():
    fine = fine_map(1, 1, 3, 4, 16)
    queries = cell_queries(fine, torch.arange(12), "center")
    for value in (0.0, -1.0, float("inf"), float("nan")):
        found = search(torch.full((1, 12, 12), value), queries, fine, temperature=0.0, max_values=10**9)
        assert ((found.index >= -1) & (found.index < 192)).all()
        broken = FineMap(features=torch.full_like(fine.features, value), height=3, width=4, valid=None)
        found = search(torch.ones(1, 12, 12), queries, broken, temperature=0.0, max_values=10**9)
        assert ((found.index >= -1) & (found.index < 192)).all()


@needs_library
@pytest.mark.parametrize("channels", [8, 16, 24])
@pytest.mark.parametrize("shape", [(2, 3, 2, 5, 19), (1, 2, 5, 3, 8), (3, 1, 1, 7, 17), (1, 6, 4, 1, 1)], ids=str)
def test_consensus(both, channels, shape):
    consensus = Consensus(ConsensusConfig(channels=(channels, 1)))
    for number, weight in enumerate(consensus.weights):
        weight.data = 0.3 * rand(number, *weight.shape)
    consensus.biases[0].data = 0.1 * rand(5, channels)
    scores = rand(6, *shape)
    with torch.no_grad():
        for some in (scores, rand(7, *shape).permute(0, 3, 4, 1, 2)):  # also in another order in memory
            for most in (None, 1):
                found, expected = both(consensus, some, most)
                assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        broken = scores.clone()
        broken[0, 0, 0, 0, 0] = torch.nan
        found, expected = both(consensus, broken)
        assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()


@needs_library
@pytest.mark.parametrize("channels", [96, 16, 5])
def test_cosines_around_matches(channels):
    fine0, fine1 = fine_map(1, 2, 3, 5, channels), fine_map(2, 2, 4, 2, channels)
    index0, index1 = torch.arange(0, 240, 3), torch.arange(0, 80) * 7 % 128
    pair = torch.arange(80) % 2
    seen = cells_meet(fine0, fine1, pair, index0, index1)
    expected = meet(cell_windows(fine0, pair, index0), cell_windows(fine1, pair, index1))
    for found, plain in zip(seen, expected, strict=True):
        assert torch.allclose(found, plain, atol=1e-6)
    assert cells_meet(fine0, fine1, pair[:0], index0[:0], index1[:0]).cosine.shape == (0, 9, 9)


@needs_library
def test_support(both):
    index = torch.randperm(24 * 31, generator=torch.Generator().manual_seed(0))[:500]
    pair = torch.arange(500) % 2
    pair[::50] = -1
    here = torch.stack([index % 31, index // 31], dim=1) + 0.2 * rand(1, 500, 2)
    there = here @ torch.tensor([[0.9, 0.3], [-0.2, 1.1]]) + 0.2 * rand(2, 500, 2)
    there[::7] = 40 * rand(3, 72, 2)  # far off
    matches = index, here, there, rand(4, 500).sigmoid(), pair, (2, 24, 31)
    found, expected = both(support, *matches)
    known = pair >= 0
    for kernel, plain in zip(found, expected, strict=True):
        error = ((kernel - plain).abs() / plain.abs().clamp(min=1))[known]
        # Where neighbours lie nearly on a line, their motion is rounding for the most part.
        assert error.max() < 1e-2 and (error < 1e-4).float().mean() > 0.98


@needs_library
def test_alignment(both):
    picture = torch.from_numpy(texture(0, 200, 150)).float().mean(2) / 60
    light = torch.stack([picture, picture.flip(0)])
    points0 = torch.rand(400, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([220.0, 170.0]) - 10
    motion = torch.eye(2) + 0.05 * rand(2, 400, 2, 2)
    motion[::40] = 0
    motion[1::40] = float("nan")
    pair = torch.arange(400) % 2
    matches = light, light.roll((1, -1), (1, 2)), pair, points0, points0 + 0.5 * rand(3, 400, 2), motion
    found, expected = both(align, *matches)
    moved = (expected - matches[4]).norm(dim=1) > 0
    assert 100 < moved.sum() < 350
    near = (found - expected).norm(dim=1) < 1e-3
    assert near.float().mean() > 0.98  # a match at a threshold may move here and stay there
    assert near[~moved].float().mean() > 0.98


@needs_library
def test_a_matcher_finds_the_same(both):
    matcher = tiny_matcher()
    pictures = texture(0, 130, 98), texture(0, 130, 98)[4:, 2:]
    found, expected = both(matcher.match, *pictures)
    assert len(found.points0) == len(expected.points0) > 10
    same = np.abs(found.points1[:, None] - expected.points1).max(2) < 0.01
    same &= np.abs(found.points0[:, None] - expected.points0).max(2) < 0.01
    assert same.any(1).mean() > 0.98


def test_without_them_torch_does_it(monkeypatch):
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    native._library.cache_clear()
    try:
        assert not native.usable(torch.ones(1))
        assert len(tiny_matcher().match(texture(0, 96, 80), texture(0, 96, 80)).points0) > 10
    finally:
        native._library.cache_clear()


def test_a_file_that_is_no_library_is_left_alone(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.warns(UserWarning, match=r"slower. Install dualrc again"):
        assert native._opened(str(broken)) is None


@needs_library
def test_a_library_of_another_version_is_left_alone(monkeypatch):
    path = native._library()._name
    changed = native._KERNELS["meet"]._replace(sizes="count channels")
    monkeypatch.setitem(native._KERNELS, "meet", changed)
    with pytest.warns(UserWarning, match="older or newer"):
        assert native._opened(path) is None


@needs_library
def test_tensors_that_the_kernels_would_misread_are_refused():
    fine = fine_map(1, 1, 3, 4, 16)
    index = torch.arange(5)
    values = {"features0": fine.features, "features1": fine.features, "pair": index * 0, "index0": index}
    sizes = {"count": 5, "channels": 16, "height0": 12, "width0": 16, "height1": 12, "width1": 16}
    cosines = torch.empty(5, 9, 9)
    native.call("meet", **values, index1=index, cosines=cosines, **sizes)
    for wrong in (index.int(), index.double()):
        with pytest.raises(AssertionError):
            native.call("meet", **values, index1=wrong, cosines=cosines, **sizes)
    with pytest.raises(AssertionError):
        native.call("meet", **values, index1=index, cosines=cosines.transpose(1, 2), **sizes)
