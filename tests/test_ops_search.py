"""Tests of the fine search of every engine against the reference."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import ENGINES, make_engine, rand
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_data import HALF, REFERENCE, only_on_gpu, place, run, search_case

from dualrc.config import FineConfig
from dualrc.model.cells import FineMap
from dualrc.model.correlation import normalize
from dualrc.model.search import Queries
from dualrc.ops import formulas, memory
from dualrc.ops.torch import CoarseRows

KINDS = ("exact", "flat", "sparse", "peaked")


def scores_of(tensor, fine0, fine1, config, pair, index0, index1):
    """Return the score of fine cell `index0` of image 0 and fine cell `index1` of image 1, by the formulas."""
    row, column = divmod(int(index0), 4 * fine0.width)
    size0, size1 = (fine0.height, fine0.width), (fine1.height, fine1.width)
    own = tensor[pair].double().view(*size0, *size1)
    coarse = formulas.coarse_scores(own, column, row, config.reading)
    feature, others = fine0.features[pair, index0].double(), fine1.features[pair].double()
    return formulas.score_map(coarse, feature, others, size1, config.temperature).flatten()[index1].item()


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
    expected = REFERENCE.search_cells(tensor, (fine0, fine1), cells, config)
    found = run(engine, "search_cells", tensor, (fine0, fine1), cells, config, wanted=place(engine, wanted))
    assert torch.equal(found.best[wanted], expected.best[wanted])
    assert torch.allclose(found.score[wanted], expected.score[wanted], rtol=1e-4)


@pytest.mark.parametrize("reading", ["corner", "center"])
def test_points_anywhere_are_searched_for(engine, reading):
    tensor, fine0, fine1 = search_case("flat", 4, (3, 4), (4, 5), batch=2, masked=True)
    places = [[0.0, 0.0], [3.25, 7.5], [15.0, 11.0], [-0.4, 4.2], [15.4, 11.3], [7.0, 2.0], [9.9, 0.1]]
    points = torch.tensor([places, places[::-1]])
    inputs = tensor, (fine0, fine1), points, FineConfig(reading=reading)
    found, expected = run(engine, "search_points", *inputs), REFERENCE.search_points(*inputs)
    assert torch.equal(found.best, expected.best) and found.best.shape == (2, 7, 1)
    assert torch.allclose(found.score, expected.score, rtol=1e-4)
    assert run(engine, "search_points", tensor, (fine0, fine1), points[:, :0], FineConfig()).best.shape == (2, 0, 1)


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
    found = make_engine(name).search_queries(CoarseRows(tensor, tensor.sum(2)), queries, map1, temperature)
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
