"""Tests of every engine against the reference: odd shapes, masks, ties, empty inputs, half precision, low memory."""

import copy
import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import DEVICE, ENGINES, features_of, make_engine, rand, texture, tiny_matcher, tiny_network
from hypothesis import given, settings
from hypothesis import strategies as st

from dualrc import ops
from dualrc.config import ConsensusConfig, FineConfig
from dualrc.errors import ConfigError
from dualrc.model.align import brightness
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import normalize
from dualrc.model.dualrc import Features
from dualrc.model.refine import CellMatches
from dualrc.model.search import Queries
from dualrc.model.subpixel import Subpixel
from dualrc.ops import memory, reference
from dualrc.ops.reference import ReferenceEngine

REFERENCE = ReferenceEngine()
KINDS = ("exact", "flat", "sparse", "peaked")
HALF = {"triton", "triton+graphs", "torch", "definition"}


@pytest.fixture(params=ENGINES)
def engine(request):
    """Return every engine that this machine can run, on its device."""
    return make_engine(request.param)


def only_on_gpu(engine, request):
    """Skip cases that take too long in Triton's interpreter, unless slow tests are enabled."""
    if engine.name == "triton" and DEVICE == "cpu" and not request.config.getoption("--slow"):
        pytest.skip("slow in Triton's interpreter: give --slow to run it")


def place(engine, value):
    """Move tensors, and containers of tensors, to the device of an engine."""
    device = DEVICE if engine.name.startswith("triton") else "cpu"
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return (value if isinstance(value, torch.Tensor) else copy.deepcopy(value)).to(device)
    if isinstance(value, FineMap):
        valid = None if value.valid is None else value.valid.to(device)
        return replace(value, features=value.features.to(device), valid=valid)
    if isinstance(value, CellMatches):
        return CellMatches(*(column.to(device) for column in value))
    return type(value)(place(engine, each) for each in value) if isinstance(value, tuple | list) else value


def run(engine, operation, *inputs, **options):
    """Run an operation without gradients on the engine's device, with results on the CPU."""
    with torch.no_grad():
        result = getattr(engine, operation)(*(place(engine, value) for value in inputs), **options)
    return result.cpu() if isinstance(result, torch.Tensor) else type(result)(*(column.cpu() for column in result))


# Everything after the backbone


@pytest.mark.parametrize("shape", [(2, 5, 3, 4), (1, 96, 2, 1), (1, 1, 1, 1), (0, 4, 2, 2)], ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_unit_features(engine, shape, layout):
    features = rand(0, *shape).contiguous(memory_format=layout)
    features[..., :1] = 0
    found, expected = run(engine, "normalize", features), REFERENCE.normalize(features)
    assert torch.allclose(found.double(), expected, atol=1e-6)
    if engine.name in HALF:
        half = run(engine, "normalize", features.half())
        assert half.dtype == torch.float16 and torch.allclose(half.double(), expected, atol=2e-3)


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 3, 16, 5), (1, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_brightness(engine, shape, layout):
    images = rand(1, *shape).contiguous(memory_format=layout)
    assert torch.allclose(run(engine, "brightness", images).double(), REFERENCE.brightness(images), atol=1e-5)


# Correlation to the second mutual filter


def consensus_of(channels, sizes=(3, 3)) -> Consensus:
    """Return random kernels without symmetry, and biases for which ReLU and the border matter."""
    consensus = Consensus(ConsensusConfig(kernel_sizes=sizes, channels=channels))
    for number, (weight, bias) in enumerate(zip(consensus.weights, consensus.biases, strict=True)):
        weight.data = rand(number, *weight.shape) * (weight.shape[1] * weight.shape[2] ** 4) ** -0.5
        bias.data = 0.3 * rand(10 + number, *bias.shape)
    consensus.biases[-1].data.abs_()  # or half of the results would be zero
    return consensus.requires_grad_(False)


@cache
def coarse_maps(batch, shape0, shape1, seed=0):
    return tuple(0.2 + rand(seed + n, batch, 6, *shape) for n, shape in enumerate((shape0, shape1)))


NOTHING = (None, None)


@pytest.mark.parametrize("channels", [(16, 1), (8, 1), (32, 1)], ids=str)
@pytest.mark.parametrize(
    ("batch", "shape0", "shape1"),
    [(2, (2, 3), (3, 5)), (1, (1, 1), (1, 1)), (1, (3, 2), (1, 9)), (1, (1, 4), (2, 2))],
    ids=str,
)
def test_the_coarse_tensor(engine, channels, batch, shape0, shape1):
    inputs = coarse_maps(batch, shape0, shape1), consensus_of(channels), NOTHING
    expected = REFERENCE.coarse(*inputs)
    found = run(engine, "coarse", *inputs)
    assert found.shape == (batch, *shape0, *shape1) and expected.abs().max() > 0.01
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "channels"),
    [((3, 3), (10, 1)), ((3, 3), (1, 1)), ((5, 3), (16, 1)), ((3, 3, 3), (4, 6, 1)), ((3,), (1,)), ((1, 5), (3, 1))],
    ids=str,
)
def test_other_layers(engine, sizes, channels):
    inputs = coarse_maps(1, (3, 4), (2, 5)), consensus_of(channels, sizes), NOTHING
    # Torch uses TF32 for convolutions on a GPU.
    rtol, atol = (2e-3, 2e-3) if engine.name.startswith("triton") and DEVICE == "cuda" else (1e-4, 1e-5)
    assert torch.allclose(run(engine, "coarse", *inputs), REFERENCE.coarse(*inputs), rtol=rtol, atol=atol)


@pytest.mark.parametrize("masked", [(True, True), (True, False), (False, True)], ids=str)
def test_masked_cells_correlate_with_nothing(engine, masked):
    maps = coarse_maps(2, (2, 3), (3, 2))
    masks = (rand(7, 2, 4 * f.shape[2], 4 * f.shape[3]) > 1.7 for f in maps)
    valid = tuple(mask if used else None for mask, used in zip(masks, masked, strict=True))
    inputs = maps, consensus_of((8, 1)), valid
    expected = REFERENCE.coarse(*inputs)
    assert not torch.allclose(expected, REFERENCE.coarse(maps, inputs[1], NOTHING))
    assert torch.allclose(run(engine, "coarse", *inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bytes_", [1, 3_000, 9_000, 40_000])
def test_the_coarse_tensor_in_little_memory(engine, bytes_):
    inputs = coarse_maps(1, (5, 2), (3, 3)), consensus_of((8, 1)), NOTHING
    with memory.working_memory(bytes_):
        found = run(engine, "coarse", *inputs)
    assert torch.allclose(found, REFERENCE.coarse(*inputs), rtol=1e-4, atol=1e-5)


def test_images_exchanged_exchange_the_coarse_tensor(engine):
    maps, consensus = coarse_maps(1, (3, 2), (2, 4)), consensus_of((16, 1))
    there, back = (run(engine, "coarse", pair, consensus, NOTHING) for pair in (maps, maps[::-1]))
    assert torch.allclose(there, back.permute(0, 3, 4, 1, 2), rtol=1e-4, atol=1e-6)


def test_the_coarse_tensor_in_half_precision(engine):
    if engine.name not in HALF:
        pytest.skip("float32 alone")
    maps = tuple(f.half() for f in coarse_maps(1, (2, 3), (3, 4)))
    consensus = consensus_of((16, 1))
    found = run(engine, "coarse", maps, consensus, NOTHING).float()
    assert torch.allclose(found, REFERENCE.coarse(tuple(f.float() for f in maps), consensus, NOTHING), atol=5e-3)


def test_a_broken_score_does_not_spread_silently(engine):
    if engine.name.startswith("triton"):
        pytest.skip("maxima on a GPU leave NaN out")
    maps = tuple(f.clone() for f in coarse_maps(1, (2, 3), (3, 4)))
    maps[0][0, 0, 1, 1] = torch.nan
    assert run(engine, "coarse", maps, consensus_of((8, 1)), NOTHING).isnan().any()


# The fine search


def coarse_values(kind, seed, *shape):
    if kind == "exact":  # small integers, so that sums, mixtures and products have no rounding, and many ties
        return rand(seed, *shape).abs().mul(1.5).round()
    if kind == "flat":
        return 0.9 + 0.1 * rand(seed, *shape).sigmoid()
    if kind == "sparse":  # many zeros, whole rows of them too
        return (rand(seed, *shape) - 1.2).clamp(min=0)
    noise = rand(seed, *shape)
    return torch.where(noise == noise.amax(2, keepdim=True), 1.0, 0.01 * noise.abs())


def search_case(kind, seed, shape0, shape1, batch=1, channels=4, masked=False, dtype=torch.float32):
    """Return a coarse tensor (b n m) and the fine maps of both images."""
    tensor = coarse_values(kind, seed, batch, math.prod(shape0), math.prod(shape1))
    maps = []
    for side, (height, width) in enumerate((shape0, shape1)):
        values = rand(seed + 100 + side, batch, channels, 4 * height, 4 * width)
        # Vectors of four halves have length 1, and their dot products are exact.
        features = values.sign() / 2 if kind == "exact" else normalize(values)
        valid = rand(seed + 200 + side, batch, 4 * height, 4 * width) > -0.3 if masked else None
        maps.append(FineMap.of(features.to(dtype), valid))
    return tensor, *maps


def scores_of(tensor, fine0, fine1, config, pair, index0, index1):
    """Return the score of fine cell `index0` of image 0 and fine cell `index1` of image 1, by the formulas."""
    row, column = divmod(int(index0), 4 * fine0.width)
    size0, size1 = (fine0.height, fine0.width), (fine1.height, fine1.width)
    own = tensor[pair].double().view(*size0, *size1)
    coarse = reference.coarse_scores(own, column, row, config.reading)
    feature, others = fine0.features[pair, index0].double(), fine1.features[pair].double()
    return reference.score_map(coarse, feature, others, size1, config.temperature).flatten()[index1].item()


def assert_search(found, expected, case, config, *, exact):
    """Check that correspondences are equal, or have equal scores up to rounding."""
    tensor, fine0, fine1 = case
    assert torch.equal(found.index0, expected.index0)
    assert torch.allclose(found.score0, expected.score0, rtol=1e-4, atol=1e-8)
    asked = expected.index1 >= 0
    assert torch.equal(found.index1 >= 0, asked)
    if exact:
        assert torch.equal(found.index1, expected.index1) and torch.equal(found.back, expected.back)
    for pair, number in (found.index1 != expected.index1).nonzero().tolist():
        chosen = scores_of(tensor, fine0, fine1, config, pair, found.index0[pair, number], found.index1[pair, number])
        assert chosen == pytest.approx(expected.score0[pair, number].item(), rel=1e-4)
    same = (found.index1 == expected.index1) & asked
    assert same.sum() >= 0.98 * asked.sum()
    assert torch.allclose(found.score1[same], expected.score1[same], rtol=1e-4, atol=1e-8)
    assert (found.back[same] == expected.back[same]).float().mean() > 0.98 if same.any() else True


@cache
def both_directions(reading, kind, masked, share, temperature):
    case = search_case(kind, 3, (2, 2), (2, 3), batch=2, masked=masked)
    config = FineConfig(reading=reading, query_share=share, temperature=temperature)
    return case, config, REFERENCE.search(*case, config)


@pytest.mark.parametrize("reading", ["corner", "center"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("masked", "share", "temperature"), [(False, 1.0, 0.0), (True, 0.5, 0.1)])
def test_the_search_in_both_directions(engine, reading, kind, masked, share, temperature, request):
    if kind in ("flat", "peaked"):
        only_on_gpu(engine, request)
    case, config, expected = both_directions(reading, kind, masked, share, temperature)
    assert (expected.back == expected.index0).any()
    found = run(engine, "search", *case, config)
    assert_search(found, expected, case, config, exact=kind == "exact" and temperature == 0)


@pytest.mark.parametrize(("shape0", "shape1"), [((1, 1), (1, 1)), ((1, 5), (2, 1)), ((3, 1), (1, 4))], ids=str)
def test_the_search_of_odd_shapes(engine, shape0, shape1):
    case, config = search_case("flat", 5, shape0, shape1, channels=7), FineConfig()
    assert_search(run(engine, "search", *case, config), REFERENCE.search(*case, config), case, config, exact=False)


@cache
def many_cells(kind):
    case, config = search_case(kind, 7, (1, 2), (9, 8)), FineConfig(reading="corner")
    return case, config, REFERENCE.search(*case, config)


@pytest.mark.parametrize("kind", ["exact", "flat", "peaked"])
def test_more_cells_than_are_visited_at_first(engine, kind, request):
    if kind != "exact":
        only_on_gpu(engine, request)
    case, config, expected = many_cells(kind)
    found = run(engine, "search", *case, config)
    assert_search(found, expected, case, config, exact=kind == "exact")
    if kind == "peaked" and engine.name != "definition":
        assert found.visited0.float().mean() < 36
    assert (found.visited0 <= 72).all()


@pytest.mark.parametrize("bytes_", [1, 100_000])
def test_the_search_in_little_memory(engine, bytes_, request):
    only_on_gpu(engine, request)
    case, config = search_case("flat", 9, (3, 3), (4, 3), masked=True), FineConfig(query_share=0.5)
    with memory.working_memory(bytes_):
        found = run(engine, "search", *case, config)
    assert_search(found, REFERENCE.search(*case, config), case, config, exact=False)


def test_nothing_is_found_in_nothing(engine, request):
    only_on_gpu(engine, request)
    tensor, fine0, fine1 = search_case("flat", 0, (2, 2), (3, 2))
    nowhere = replace(fine1, valid=torch.zeros(1, 96, dtype=torch.bool))
    none = replace(fine0, features=fine0.features * 0)
    empty = FineConfig(query_share=0.2)  # floor(0.8 cells)
    cases = [(tensor * 0, fine0, fine1), (tensor, fine0, nowhere), (tensor, none, fine1)]
    for case in cases:
        for temperature in (0.0, 0.1):
            if case[1] is none and temperature:
                continue  # a cosine of 0 scores something there
            found = run(engine, "search", *case, FineConfig(temperature=temperature))
            assert (found.index1 == -1).all() and (found.back == -1).all() and not found.score0.any()
    assert run(engine, "search", tensor, fine0, fine1, empty).index0.shape == (1, 0)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_the_search_ends_whatever_the_numbers(engine, value):
    tensor, fine0, fine1 = search_case("flat", 0, (1, 2), (3, 4))
    broken = replace(fine1, features=torch.full_like(fine1.features, value))
    for case in ((torch.full_like(tensor, value), fine0, fine1), (tensor, fine0, broken)):
        found = run(engine, "search", *case, FineConfig())
        assert ((found.index1 >= -1) & (found.index1 < 192)).all()


def test_only_wanted_answers_count(engine):
    tensor, fine0, fine1 = search_case("flat", 8, (2, 2), (5, 4), batch=2)
    cells, config = torch.arange(4).expand(2, -1), FineConfig()
    wanted = torch.zeros(2, 4, 16, dtype=torch.bool)
    wanted[0, 1, 3] = wanted[1, 3] = True
    expected = REFERENCE.search_cells(tensor, fine0, cells, fine1, config)
    found = run(engine, "search_cells", tensor, fine0, cells, fine1, config, wanted=place(engine, wanted))
    assert torch.equal(found.best[wanted], expected.best[wanted])
    assert torch.allclose(found.score[wanted], expected.score[wanted], rtol=1e-4)


@pytest.mark.parametrize("reading", ["corner", "center"])
def test_points_anywhere_are_searched_for(engine, reading):
    tensor, fine0, fine1 = search_case("flat", 4, (3, 4), (4, 5), batch=2, masked=True)
    places = [[0.0, 0.0], [3.25, 7.5], [15.0, 11.0], [-0.4, 4.2], [15.4, 11.3], [7.0, 2.0], [9.9, 0.1]]
    points = torch.tensor([places, places[::-1]])
    inputs = tensor, fine0, points, fine1, FineConfig(reading=reading)
    found, expected = run(engine, "search_points", *inputs), REFERENCE.search_points(*inputs)
    assert torch.equal(found.best, expected.best) and found.best.shape == (2, 7, 1)
    assert torch.allclose(found.score, expected.score, rtol=1e-4)
    assert run(engine, "search_points", tensor, fine0, points[:, :0], fine1, FineConfig()).best.shape == (2, 0, 1)


def test_the_search_in_half_precision(engine):
    if engine.name not in HALF:
        pytest.skip("float32 alone")
    case = search_case("peaked", 11, (1, 2), (3, 6), channels=40, dtype=torch.float16)
    found = run(engine, "search", case[0].half(), *case[1:], FineConfig())
    exact = case[0].half().float(), *(replace(f, features=f.features.float()) for f in case[1:])
    expected = REFERENCE.search(*exact, FineConfig())
    assert torch.equal(found.index1, expected.index1)
    assert torch.allclose(found.score0, expected.score0, rtol=2e-3)


shapes = st.sampled_from([(1, 1), (1, 2), (2, 3), (3, 3), (3, 5), (5, 4), (7, 3)])


@pytest.mark.parametrize("name", [name for name in ENGINES if name == "torch" or name.startswith("native")])
@settings(max_examples=25)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 999),
    shape0=shapes,
    shape1=shapes,
    reading=st.sampled_from(["corner", "center"]),
    temperature=st.sampled_from([0.0, 0.5, 0.05]),
    share=st.sampled_from([1.0, 0.5, 0.3]),
    bytes_=st.sampled_from([1, 20_000, 2**30]),
    masked=st.booleans(),
)
def test_the_search_finds_the_argmax(name, kind, seed, shape0, shape1, reading, temperature, share, bytes_, masked):
    """The definition is the oracle here, because it is fast; the tests above compare it with the reference."""
    engine = make_engine(name)
    case = search_case(kind, seed, shape0, shape1, masked=masked)
    config = FineConfig(reading=reading, temperature=temperature, query_share=share)
    with memory.working_memory(bytes_):
        found = run(engine, "search", *case, config)
    expected = run(make_engine("definition"), "search", *case, config)
    assert_search(found, expected, case, config, exact=kind == "exact" and temperature == 0)


# One query in an image of one cell, against an image of 5 x 8 cells, to test the bound.

BOUNDED = [name for name in ENGINES if name == "torch" or name.startswith("native")]


def one_query(name, coarse, cosine, *, temperature=0.0, dtype=torch.float32):
    """Return coarse scores and cosines of 40 cells for one query; all fine cells of a cell have the same cosine."""
    angle = torch.tensor(cosine).view(1, 1, 5, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    fine1 = torch.cat([angle, (1 - angle.square()).clamp(min=0).sqrt()], dim=1)
    feature = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 1, 1, 2)
    queries = Queries(features=feature, rows=torch.zeros(1, 1, 1, dtype=torch.long), weights=torch.ones(1, 1, 1, 1))
    map1, tensor = FineMap.of(fine1.to(dtype)), torch.tensor(coarse).view(1, 1, 40)
    found = make_engine(name).search_queries(tensor, tensor.sum(2), queries, map1, temperature)
    return found.best.item(), map1.position(found.best).item() // 16, found.score.item(), found.visited.item()


@pytest.mark.parametrize("name", BOUNDED)
def test_the_search_stops_where_the_bound_allows(name):
    coarse = [40.0 - cell for cell in range(40)]
    _, cell, score, visited = one_query(name, coarse, [1.0] + [0.5] * 39)
    assert cell == 0 and visited == (8 if name == "torch" else 1)
    assert score == pytest.approx(40 / sum(coarse), rel=1e-6)


@pytest.mark.parametrize("name", BOUNDED)
def test_the_search_goes_on_until_the_bound_allows(name):
    coarse, cosine = [40.0 - cell for cell in range(40)], [0.1] * 40
    cosine[31] = 1.0  # 9 * 1 beats 40 * 0.1
    _, cell, score, visited = one_query(name, coarse, cosine)
    assert cell == 31 and visited > 8
    assert score == pytest.approx(9 / sum(coarse), rel=1e-6)


@pytest.mark.parametrize("name", BOUNDED)
def test_an_equal_that_is_visited_later_wins_where_it_comes_first(name):
    # Sixteen cells are visited first, with products 2 * 0.5; cell 3, visited later, has 1 * 1.
    coarse, cosine = [0.25] * 40, [0.0] * 40
    for cell in range(20, 36):
        coarse[cell], cosine[cell] = 2.0, 0.5
    coarse[3], cosine[3] = 1.0, 1.0
    assert one_query(name, coarse, cosine)[1] == 3
    index, _, _, visited = one_query(name, [1.0] * 40, [1.0] * 40)
    assert index == 0 and visited == 40


@pytest.mark.parametrize("name", BOUNDED)
def test_a_cosine_above_one_by_rounding_is_not_missed(name):
    coarse, cosine = [0.25] * 40, [0.0] * 40
    for cell in range(20, 36):
        coarse[cell], cosine[cell] = 2.0, 0.5
    coarse[3], cosine[3] = 1.0, 1.000002
    cosine[20] = 0.5000001  # just above what the bound without slack would ask
    assert one_query(name, coarse, cosine)[1] == 3


def test_a_sharp_fine_score_exceeds_one_by_more():
    """exp((cosine - 1) / 0.05) maps a cosine of 1.002, as in half precision, to 1.04."""
    coarse, cosine = [0.001] * 40, [0.0] * 40
    for cell in range(20, 36):
        coarse[cell], cosine[cell] = 1.02, 1.0
    coarse[3], cosine[3] = 1.0, 1.002
    assert one_query("torch", coarse, cosine, temperature=0.05, dtype=torch.float16)[1] == 3


@pytest.mark.parametrize("name", [*BOUNDED, *(name for name in ENGINES if name == "triton")])
def test_queries_that_read_only_zeros_cost_nothing(name):
    """The left of image 0 has no coarse scores at all, and its groups include the next cells."""
    fine = FineMap.of(normalize(rand(0, 1, 64, 12, 20)))
    tensor = torch.eye(15).view(1, 3, 5, 15) + 1e-3
    tensor[:, :, :2] = 0
    found = run(make_engine(name), "search", tensor.view(1, 15, 15), fine, fine, FineConfig())
    index = torch.full((240,), -2)
    index[found.index0[0]] = found.index1[0]
    assert (index.view(12, 20)[:, :6] == -1).all() and (index.view(12, 20)[:, 6:] >= 0).all()
    assert (found.visited0 <= 8).all()


# Refinement


def refinement_case(seed=0, count=60, batch=2, hidden=8, channels=12, size0=(5, 6), size1=(6, 5), dtype=torch.float32):
    """Return matches of two small images with one motion, some at borders, some random, and smooth brightness."""
    fine = tuple(
        FineMap.of(normalize(0.3 + rand(seed + n, batch, channels, 4 * h, 4 * w)).to(dtype))
        for n, (h, w) in enumerate((size0, size1))
    )
    picture = torch.from_numpy(texture(seed, 16 * 8, 16 * 8)).float().permute(2, 0, 1)[None] / 60
    light = tuple(
        brightness(picture[:, :, n : n + 16 * h, 2 * n : 2 * n + 16 * w]).expand(batch, -1, -1).contiguous().to(dtype)
        for n, (h, w) in enumerate((size0, size1))
    )
    random = torch.Generator().manual_seed(seed)
    index0 = torch.randperm(fine[0].cells * 16, generator=random)[:count]
    x, y = index0 % (4 * size0[1]), index0 // (4 * size0[1])
    there = y.clamp(max=4 * size1[0] - 1) * 4 * size1[1] + x.clamp(max=4 * size1[1] - 1)
    # Each cell of image 1 is matched once per pair.
    pair = torch.zeros(count, dtype=torch.long)
    for number in range(count):
        taken = {(p, i) for p, i in zip(pair[:number].tolist(), there[:number].tolist(), strict=True)}
        while (int(pair[number]), int(there[number])) in taken:
            pair[number] += 1
    keep = pair < batch
    scores = torch.rand(2, count, generator=random) * 0.3
    matches = CellMatches(pair[keep], index0[keep], there[keep], scores[0][keep], scores[1][keep])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        subpixel = Subpixel(channels, hidden).requires_grad_(False)
        if hidden:
            torch.nn.init.normal_(subpixel.correction[-1].weight, std=0.3)
    return subpixel, fine, light, matches


def assert_points(found, expected, *, least=0.97, tolerance=5e-3):
    """Check that points and scores are equal, except few that a threshold of the alignment moved in only one result."""
    error = torch.maximum(
        (found.points0 - expected.points0).norm(dim=1), (found.points1 - expected.points1).norm(dim=1)
    )
    assert (error < tolerance).float().mean() >= least if len(error) else True
    assert (error < 3).all() and torch.isfinite(found.points0).all() and torch.isfinite(found.points1).all()
    assert torch.allclose(found.scores, expected.scores, rtol=5e-3, atol=2e-3)


@cache
def refined(hidden, count=60, with_light=True):
    subpixel, fine, light, matches = refinement_case(hidden=hidden, count=count)
    return REFERENCE.refine(subpixel, fine, light if with_light else None, matches)


@pytest.mark.parametrize("hidden", [0, 8])
def test_refinement(engine, hidden, request):
    if not hidden:
        only_on_gpu(engine, request)
    case, expected = refinement_case(hidden=hidden), refined(hidden)
    found = run(engine, "refine", *case)
    assert len(expected.scores) > 50 and expected.scores.max() > 0.01
    assert_points(found, expected)
    plain = run(engine, "refine", case[0], case[1], None, case[3])
    assert_points(plain, refined(hidden, with_light=False))
    assert ((plain.points1 - found.points1).norm(dim=1) > 1e-3).float().mean() > 0.1  # the alignment moved some


def test_refinement_in_half_precision(engine):
    if engine.name not in HALF:
        pytest.skip("float32 alone")
    subpixel, fine, light, matches = refinement_case(count=30, dtype=torch.float16)
    exact = tuple(replace(f, features=f.features.float()) for f in fine), tuple(one.float() for one in light)
    expected = REFERENCE.refine(subpixel, *exact, matches)
    assert_points(run(engine, "refine", subpixel, fine, light, matches), expected, least=0.9, tolerance=0.03)


def test_refinement_treats_the_images_alike(engine, request):
    only_on_gpu(engine, request)
    subpixel, fine, light, matches = refinement_case()
    swapped = CellMatches(matches.pair, matches.index1, matches.index0, matches.score1, matches.score0)
    found = run(engine, "refine", subpixel, fine, light, matches)
    other = run(engine, "refine", subpixel, fine[::-1], light[::-1], swapped)
    assert_points(type(other)(other.points1, other.points0, other.scores), found, tolerance=1e-3)


def test_rows_that_are_empty_change_nothing(engine, request):
    only_on_gpu(engine, request)
    subpixel, fine, light, matches = refinement_case()
    count = len(matches.pair)
    padded = CellMatches(*(torch.cat([column, column[:5]]) for column in matches))
    padded.pair[count:] = -1
    found = run(engine, "refine", subpixel, fine, light, padded)
    expected = run(engine, "refine", subpixel, fine, light, matches)
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine[:count], other, atol=1e-5)


def test_a_batch_is_its_pairs(engine, request):
    only_on_gpu(engine, request)
    subpixel, fine, light, matches = refinement_case()
    together = run(engine, "refine", subpixel, fine, light, matches)
    for number in (0, 1):
        own, here = matches.pair == number, slice(number, number + 1)
        maps = tuple(replace(f, features=f.features[here]) for f in fine)
        alone = CellMatches(*(column[own] for column in matches))
        alone = run(
            engine, "refine", subpixel, maps, tuple(one[here] for one in light), alone._replace(pair=alone.pair * 0)
        )
        assert_points(type(alone)(*(column[own] for column in together)), alone, tolerance=1e-3)


def test_nothing_to_refine(engine):
    subpixel, fine, light, matches = refinement_case(count=3)
    none = CellMatches(*(column[:0] for column in matches))
    found = run(engine, "refine", subpixel, fine, light, none)
    assert found.points0.shape == found.points1.shape == (0, 2) and found.scores.shape == (0,)


@pytest.mark.parametrize("hidden", [0, 8])
def test_points_are_refined(engine, hidden):
    subpixel, (fine0, fine1), _, matches = refinement_case(hidden=hidden)
    points = 0.4 * rand(3, len(matches.pair), 2) + fine0.coordinates(matches.index0)
    inputs = subpixel, fine0, fine1, matches.pair, points, matches.index1, matches.score0
    found, expected = run(engine, "refine_points", *inputs), REFERENCE.refine_points(*inputs)
    assert torch.allclose(found.offset, expected.offset, atol=1e-4)
    assert torch.allclose(found.logit, expected.logit, atol=1e-3)


@pytest.mark.parametrize("channels", [96, 16, 5])
def test_windows(engine, channels):
    _, fine, _, matches = refinement_case(channels=channels)
    inputs = *fine, matches.pair, matches.index0, matches.index1
    found, expected = run(engine, "windows", *inputs), REFERENCE.windows(*inputs)
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine.double(), other.double(), atol=1e-5)
    assert not found.whole0.all() and found.whole0.any()


@pytest.mark.parametrize(("height", "width", "share"), [(20, 28, 0.5), (7, 5, 1.0), (1, 30, 0.5), (40, 3, 0.05)])
def test_support(engine, height, width, share):
    random = torch.Generator().manual_seed(1)
    cells = (torch.rand(2 * height * width, generator=random) < share).nonzero()[:, 0]
    pair, index = cells // (height * width), cells % (height * width)
    here = torch.stack([index % width, index // width], 1) + 0.2 * rand(1, len(index), 2)
    there = here @ torch.tensor([[0.9, 0.3], [-0.2, 1.1]]) + 0.15 * rand(2, len(index), 2)
    there[::7] = 10 * rand(3, len(there[::7]), 2)  # far off
    inputs = index, here, there, rand(4, len(index)).sigmoid(), pair, (2, height, width)
    found, expected = run(engine, "support", *inputs), REFERENCE.support(*inputs)
    assert torch.allclose(found.share.double(), expected.share.double(), atol=2e-3)
    # If neighbors lie nearly on a line, rounding determines most of their motion.
    for mine, other in ((found.motion, expected.motion), (found.shift, expected.shift)):
        error = (mine.double() - other).abs() / other.abs().clamp(min=1)
        assert (error < 1e-3).double().mean() > 0.95 and torch.isfinite(mine).all()


SIZE = 90
MOTION = torch.tensor([[0.95, 0.15], [-0.1, 1.05]])
SHIFT = torch.tensor([6.3, -2.6])


def surface(motion=None, shift=None, seed=0):
    """Return an infinite smooth surface, sampled where the motion leads from image 0: (1 h w)."""
    axis = torch.arange(SIZE, dtype=torch.float32)
    there = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    if motion is not None:
        there = (there - shift) @ torch.linalg.inv(motion).T
    random = torch.Generator().manual_seed(seed)
    waves = torch.randn(40, 2, generator=random) * 0.25
    phases, heights = 7 * torch.rand(40, generator=random), torch.randn(40, generator=random)
    x, y = there.unbind(-1)
    return sum(h * torch.sin(a * x + b * y + p) for (a, b), p, h in zip(waves, phases, heights, strict=True))[None]


def test_alignment(engine):
    points0 = torch.rand(50, 2, generator=torch.Generator().manual_seed(3)) * 90 - 2
    points1 = points0 @ MOTION.T + SHIFT + 0.6 * rand(4, 50, 2)
    motion = MOTION + 0.03 * rand(5, 50, 2, 2)
    motion[:3] = torch.tensor([[0.0, 0.0], [float("nan"), 0.0]])
    inputs = surface().repeat(2, 1, 1), surface(MOTION, SHIFT).repeat(2, 1, 1), torch.arange(50) % 2
    inputs = *inputs, points0, points1, motion
    found, expected = run(engine, "align", *inputs), REFERENCE.align(*inputs)
    assert 10 < (expected != 0).any(1).sum() < 45
    assert ((found - expected).norm(dim=1) < 2e-3).float().mean() >= 0.95


def test_points_move_to_where_the_images_fit_and_stay_where_that_cannot_be_told(engine, request):
    only_on_gpu(engine, request)
    points0 = 30 + 30 * torch.rand(40, 2, generator=torch.Generator().manual_seed(3))
    true = points0 @ MOTION.T + SHIFT
    wrong = true + 0.7 * torch.nn.functional.normalize(rand(4, 40, 2))
    pair, motion = torch.zeros(40, dtype=torch.long), MOTION.expand(40, 2, 2)

    def align(light0, light1, motion=motion):
        return wrong + run(engine, "align", light0, light1, pair, points0, wrong, motion)

    there = surface(MOTION, SHIFT)
    error = (align(surface(), there) - true).norm(dim=1)
    assert error.median() < 0.25  # by a single step
    lit = 0.3 * there + 2 + 0.02 * rand(5, 1, SIZE, SIZE)  # another gain and level, and noise
    assert (align(surface(), lit) - true).norm(dim=1).median() < 0.3
    flat = torch.ones_like(there)
    for light0, light1 in ((flat, flat), (surface(), flat), (flat, there), (surface(), surface(seed=1))):
        assert ((align(light0, light1) - wrong).norm(dim=1) > 0).float().mean() < 0.15
    for bad in (motion * 0, motion * 9, motion * float("nan"), motion @ torch.tensor([[-1.0, 0], [0, 1]])):
        assert torch.equal(align(surface(), there, bad), wrong)


# A complete match


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_whole_match(engine, share, request):
    only_on_gpu(engine, request)
    network = tiny_network(subpixel_hidden=8, query_share=share)
    wide = torch.from_numpy(texture(3, 96, 80)).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        features = [network.extract(wide[:, :, :64, :80]), network.extract(wide[:, :, 16:, 6:70])]
        expected = network.match(*features)
        network = place(engine, network)
        network.engine = engine
        there = [
            Features(**{name: place(engine, value) for name, value in vars(f).items() if value is not None})
            for f in features
        ]
        # A graph is captured and replayed.
        matches = [network.match(*there) for _ in range(4 if engine.name.endswith("graphs") else 1)]
    assert len(expected.scores) > 15
    for found in matches:
        assert len(found.scores) == len(expected.scores)
        rows, wanted = (torch.cat([m.points0, m.points1], 1).cpu() for m in (found, expected))
        near = (rows[:, None] - wanted).abs().amax(2).amin(1)
        assert (near < 0.01).float().mean() > 0.97 and (near < 3).all()
        assert torch.allclose(found.scores.cpu(), expected.scores, atol=1e-3)


def test_gradients_flow_through_the_definition_alone(engine):
    maps = tuple(f.clone().requires_grad_() for f in coarse_maps(1, (2, 2), (2, 3)))
    consensus = place(engine, consensus_of((8, 1)).requires_grad_(True))
    result = engine.coarse(tuple(place(engine, f) for f in maps), consensus, NOTHING)
    result.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in consensus.parameters())
    assert maps[0].grad is not None and maps[0].grad.any()


# The reference itself


def test_reference_convolution_is_plain_loops():
    values, weight, bias = rand(0, 2, 2, 2, 2, 3), rand(1, 3, 2, 3, 3, 3, 3), rand(2, 3)
    result = reference.conv4d(values, weight, bias)
    v, w = values.tolist(), weight.tolist()
    for o, i, j, k, m in itertools.product(*map(range, result.shape)):
        total = bias[o].item()
        for c, p, q, r, s in itertools.product(range(2), *[range(3)] * 4):
            spot = (i + p - 1, j + q - 1, k + r - 1, m + s - 1)
            if all(0 <= at < side for at, side in zip(spot, values.shape[1:], strict=True)):
                total += w[o][c][p][q][r][s] * v[c][spot[0]][spot[1]][spot[2]][spot[3]]
        assert result[o, i, j, k, m].item() == pytest.approx(total, abs=1e-4)


def test_reading_known_answers():
    tensor = torch.zeros(2, 3, 2, 3)
    for row, column in itertools.product(range(2), range(3)):
        tensor[row, column, row, column] = 1
    # Fine cell (2, 5) lies at (0.5, 1.25) by its corner, at (0.125, 0.875) by its center.
    assert reference.coarse_scores(tensor, 5, 2, "corner").tolist() == [[0, 0.375, 0.125], [0, 0.375, 0.125]]
    center = reference.coarse_scores(tensor, 5, 2, "center")
    assert center.flatten().tolist() == pytest.approx([0.875 / 8, 0.875**2, 0, 1 / 64, 0.875 / 8, 0])


# The choice of an engine


def test_engines_are_chosen_by_name_device_and_variable(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.delenv(ops.VARIABLE, raising=False)
    assert ops.choose(cpu).name == next((name for name in ENGINES if name.startswith("native")), "torch")
    assert ops.choose(cpu, "torch").name == "torch" and ops.choose(torch.device("mps")).name == "torch"
    monkeypatch.setenv(ops.VARIABLE, "definition")
    assert ops.choose(cpu).name == "definition" and ops.choose(cpu, "reference").name == "reference"
    for wrong in ("nativ", "native-sse9", "cuda", ""):
        with pytest.raises(ConfigError, match=r"choose one of.*native-avx2"):
            ops.choose(cpu, wrong or "none")
    for name in ("native", "reference"):
        with pytest.raises(ConfigError, match=r"runs on a CPU.*leave the engine out"):
            ops.choose(torch.device("cuda"), name)
    monkeypatch.setenv(ops.VARIABLE, "reference")
    with pytest.raises(ConfigError, match=f"unset {ops.VARIABLE}"):
        ops.choose(torch.device("cuda"))
    with pytest.raises(ConfigError, match="needs Triton"):
        ops.choose(cpu, "triton+graphs")


@pytest.mark.parametrize("name", ["reference", *(name for name in ENGINES if not name.startswith("triton"))])
def test_every_call_of_a_matcher(name):
    """Images of a few cells, so that the reference can take part."""
    matcher, picture = tiny_matcher(engine=name), texture(2, 80, 64)
    pair = picture[:48, :48], picture[4:52, 8:56]
    found, expected = matcher.match(*pair), tiny_matcher(engine="definition").match(*pair)
    assert matcher.engine == name and len(found) == len(expected) > 5
    assert abs(found.scores - expected.scores).max() < 1e-3
    points = matcher.match_points(*pair, [[20.0, 20.0], [30.5, 25.0]])
    assert points.points1.shape == (2, 2)
    warp = matcher.warp(*pair)
    assert warp.points1.shape == (48, 48, 2) and 0 <= warp.certainty.min() <= warp.certainty.max() <= 1


def test_features_can_be_copied_between_engines():
    """Features do not depend on the engine that made them."""
    network = tiny_network()
    assert features_of(network, texture(1, 64, 48)).fine.shape == (1, 16, 12, 16)
