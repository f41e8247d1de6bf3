"""The fine search against its literal definition: every query, every tie, every mask."""

import itertools
import math

import pytest
import torch
from conftest import rand
from hypothesis import given, settings
from hypothesis import strategies as st

from dualrc.model import fine, literal
from dualrc.model.correlation import normalize
from dualrc.model.dualrc import _best_first
from dualrc.model.fine import FineMap, Queries, both_ways, cell_queries, point_queries, search

READINGS = ("corner", "center")
MANY = 10**9  # values: all groups at once
pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture(autouse=True, scope="module")
def first_block():
    """The tests count visits in blocks of 16, whatever the code starts with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine, "FIRST_BLOCK", 16)
        yield


def coarse_values(kind: str, seed: int, *shape: int) -> torch.Tensor:
    if kind == "exact":  # small integers, so that sums, mixtures and products have no rounding, and many ties
        return rand(seed, *shape).abs().mul(1.5).round()
    if kind == "flat":
        return 0.9 + 0.1 * rand(seed, *shape).sigmoid()
    if kind == "sparse":  # many zeros, whole rows of them too
        return (rand(seed, *shape) - 1.2).clamp(min=0)
    peaks = rand(seed, *shape).flatten(3)
    peaks = torch.where(peaks == peaks.amax(3, keepdim=True), 1.0, 0.01 * peaks.abs())
    return peaks.view(shape)


def features(kind: str, seed: int, batch: int, height: int, width: int) -> torch.Tensor:
    """Unit fine features of a map of coarse cells: (b c 4h 4w)."""
    values = rand(seed, batch, 4, 4 * height, 4 * width)
    # Four halves have length 1, and their dot products are exact.
    return values.sign() / 2 if kind == "exact" else normalize(values)


def case(kind: str, seed: int, shape0: tuple[int, int], shape1: tuple[int, int], batch: int = 1):
    """A coarse tensor (b h0 w0 h1 w1) and the fine features of both pictures."""
    return (
        coarse_values(kind, seed, batch, *shape0, *shape1),
        features(kind, seed + 1000, batch, *shape0),
        features(kind, seed + 2000, batch, *shape1),
    )


def search_all(tensor, fine0, fine1, *, reading, temperature=0.0, valid1=None, max_values=MANY):
    """The fast search from every fine cell of picture 0: index and score (b, H0 * W0), and visits per coarse cell."""
    map0, map1 = FineMap.of(fine0), FineMap.of(fine1, valid1)
    cells = torch.arange(len(tensor) * map0.cells)
    queries = cell_queries(map0, cells, reading)
    found = search(tensor.flatten(3).flatten(1, 2), queries, map1, temperature=temperature, max_values=max_values)
    where = map0.members(cells % map0.cells) + (queries.pair * map0.cells * 16)[:, None]
    index, score = torch.full_like(where.flatten(), -2), torch.empty(where.numel())
    index[where.flatten()], score[where.flatten()] = found.index.flatten(), found.score.flatten()
    return index.view(len(tensor), -1), score.view(len(tensor), -1), found.visited.view(len(tensor), -1)


def search_literally(tensor, fine0, fine1, *, reading, temperature=0.0, valid1=None):
    """The same for one pair, by the definition; also the whole score maps."""
    index, score, maps = [], [], []
    for row, column in itertools.product(range(fine0.shape[1]), range(fine0.shape[2])):
        values = literal.score_map(tensor, fine0, fine1, row, column, reading=reading, temperature=temperature)
        if valid1 is not None:
            values = torch.where(valid1, values, 0)
        best = literal.best(values)
        index.append(best[0])
        score.append(best[1])
        maps.append(values.flatten())
    return torch.tensor(index), torch.tensor(score), torch.stack(maps)


def match_literally(tensor, fine0, fine1, valid0=None, valid1=None, *, reading, temperature, query_share):
    """literal.match among allowed cells only."""
    if valid0 is None and valid1 is None:
        return literal.match(tensor, fine0, fine1, reading=reading, temperature=temperature, query_share=query_share)
    settings = {"reading": reading, "temperature": temperature}
    there, score, _ = search_literally(tensor, fine0, fine1, valid1=valid1, **settings)
    back, score_back, _ = search_literally(tensor.permute(2, 3, 0, 1), fine1, fine0, valid1=valid0, **settings)
    height, width = tensor.shape[:2]
    ranked = tensor.flatten(2).amax(2).flatten().sort(descending=True, stable=True).indices.tolist()
    chosen = ranked[: int(query_share * height * width)]
    result = {}
    for query, target in enumerate(there.tolist()):
        row, column = divmod(query, 4 * width)
        asked = (row // 4) * width + column // 4 in chosen and (valid0 is None or bool(valid0[row, column]))
        if asked and target >= 0 and back[target] == query:
            result[query, target] = (score[query] + score_back[target]).item()
    return result


def match_fast(tensor, fine0, fine1, valid0=None, valid1=None, *, max_values=MANY, **config):
    """both_ways, as one dictionary per pair like the literal one's."""
    found = both_ways(
        tensor.flatten(3).flatten(1, 2),
        FineMap.of(fine0, valid0),
        FineMap.of(fine1, valid1),
        max_values=max_values,
        **config,
    )
    result: list[dict] = [{} for _ in tensor]
    rows = zip(found.pair, found.index0, found.index1, found.back, found.scores.sum(0), strict=True)
    for pair, index0, index1, back, score in rows:
        if back == index0:
            result[pair][index0.item(), index1.item()] = score.item()
    return result


def assert_same_matches(fast: dict, expected: dict):
    assert fast.keys() == expected.keys()
    assert list(fast.values()) == pytest.approx([expected[key] for key in fast], rel=1e-4, abs=1e-7)


shapes = st.sampled_from([(1, 1), (1, 2), (2, 3), (3, 3), (3, 5), (5, 4), (7, 3)])


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("shape", [(3, 2), (1, 4), (1, 1)])
def test_the_coarse_tensor_is_read_as_defined(reading, shape):
    tensor, fine0, _ = case("flat", 0, shape, (2, 3), batch=2)
    map0 = FineMap.of(fine0)
    queries = cell_queries(map0, torch.arange(2 * map0.cells), reading)
    rows = tensor.flatten(3).flatten(1, 2)[queries.pair[:, None], queries.rows]  # n m h1*w1
    weights = queries.weights.expand(len(rows), -1, -1)
    read = torch.einsum("npm,nmk->npk", weights, rows)
    members = map0.members(torch.arange(2 * map0.cells) % map0.cells)
    for group, place in itertools.product(range(len(rows)), range(16)):
        row, column = divmod(members[group, place].item(), 4 * shape[1])
        expected = literal.coarse_scores(tensor[queries.pair[group]], row, column, reading).flatten()
        mixed = read[group, place] / (read[group, place].sum() + 1e-15)
        assert torch.allclose(mixed, expected, atol=1e-6), (row, column)
        assert torch.equal(queries.features[group, place], fine0[queries.pair[group], :, row, column])
        if reading == "corner" and (row, column) == (0, 0):
            assert not mixed.any()
        else:
            assert weights[group, place].sum() == pytest.approx(1)


def test_reading_known_answers():
    tensor = torch.zeros(2, 3, 2, 3)
    for row, column in itertools.product(range(2), range(3)):
        tensor[row, column, row, column] = 1
    # Fine cell (2, 5) lies at (0.5, 1.25) by its corner, at (0.125, 0.875) by its centre.
    corner = literal.coarse_scores(tensor, 2, 5, "corner")
    assert corner.tolist() == [[0, 0.375, 0.125], [0, 0.375, 0.125]]
    center = literal.coarse_scores(tensor, 2, 5, "center")
    assert center.flatten().tolist() == pytest.approx([0.875 / 8, 0.875**2, 0, 1 / 64, 0.875 / 8, 0])


def test_members_and_split_are_inverse():
    some = FineMap.of(torch.zeros(1, 1, 12, 20))
    members = some.members(torch.arange(some.cells))
    assert sorted(members.flatten().tolist()) == list(range(240))
    assert members[6].tolist() == [(4 + i) * 20 + 4 + j for i in range(4) for j in range(4)]
    cell, place = some.split(members)
    assert torch.equal(cell, torch.arange(15)[:, None].expand(15, 16))
    assert torch.equal(place, torch.arange(16).expand(15, 16))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["exact", "flat", "sparse", "peaked"]),
    seed=st.integers(0, 999),
    shape0=shapes,
    shape1=shapes,
    reading=st.sampled_from(READINGS),
    temperature=st.sampled_from([0.0, 0.5, 0.05]),
    block=st.sampled_from([1, 3, 16]),
    max_values=st.sampled_from([1, 5000, MANY]),
    masked=st.booleans(),
)
def test_search_finds_the_argmax(kind, seed, shape0, shape1, reading, temperature, block, max_values, masked):
    tensor, fine0, fine1 = case(kind, seed, shape0, shape1)
    valid = rand(seed, 1, *fine1.shape[2:]) > 0 if masked else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine, "FIRST_BLOCK", block)
        index, score, _ = search_all(
            tensor, fine0, fine1, reading=reading, temperature=temperature, valid1=valid, max_values=max_values
        )
    expected, best, maps = search_literally(
        tensor[0],
        fine0[0],
        fine1[0],
        reading=reading,
        temperature=temperature,
        valid1=None if valid is None else valid[0],
    )
    assert torch.allclose(score[0], best, rtol=1e-5, atol=1e-9)
    assert torch.equal(index[0] < 0, expected < 0)
    # What was chosen really has that score, by the definition, and is allowed.
    chosen = maps.gather(1, index[0].clamp(min=0)[:, None])[:, 0]
    assert torch.allclose(chosen[index[0] >= 0], best[index[0] >= 0], rtol=1e-5, atol=1e-9)
    if kind == "exact":  # no rounding: the first of equals, exactly
        assert torch.equal(index[0], expected)


@settings(max_examples=50)
@given(
    kind=st.sampled_from(["exact", "flat", "sparse", "peaked"]),
    seed=st.integers(0, 999),
    shape0=shapes,
    shape1=shapes,
    reading=st.sampled_from(READINGS),
    temperature=st.sampled_from([0.0, 0.2]),
    query_share=st.sampled_from([1.0, 0.5, 0.3]),
    block=st.sampled_from([1, 2, 16]),
    max_values=st.sampled_from([1, MANY]),
    masked=st.booleans(),
)
def test_matches_are_those_of_the_definition(
    kind, seed, shape0, shape1, reading, temperature, query_share, block, max_values, masked
):
    tensor, fine0, fine1 = case(kind, seed, shape0, shape1)
    valid0, valid1 = (rand(seed + i, 1, *f.shape[2:]) > -0.3 if masked else None for i, f in enumerate((fine0, fine1)))
    config = {"reading": reading, "temperature": temperature, "query_share": query_share}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine, "FIRST_BLOCK", block)
        (fast,) = match_fast(tensor, fine0, fine1, valid0, valid1, max_values=max_values, **config)
    valid = [None if v is None else v[0] for v in (valid0, valid1)]
    assert_same_matches(fast, match_literally(tensor[0], fine0[0], fine1[0], *valid, **config))


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("kind", ["exact", "flat", "peaked"])
def test_large_maps_with_the_block_as_it_is(kind, reading):
    """More cells than one block, so that bounds decide."""
    tensor, fine0, fine1 = case(kind, 7, (5, 7), (6, 8))
    config = {"reading": reading, "temperature": 0.0, "query_share": 0.5}
    (fast,) = match_fast(tensor, fine0, fine1, **config)
    assert len(fast) > 10
    assert_same_matches(fast, match_literally(tensor[0], fine0[0], fine1[0], **config))


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_is_its_pairs(masked):
    tensor, fine0, fine1 = case("exact", 3, (3, 5), (4, 3), batch=3)
    valid0, valid1 = (rand(9, *f.shape[:1], *f.shape[2:]) > -0.5 if masked else None for f in (fine0, fine1))
    config = {"reading": "corner", "temperature": 0.0, "query_share": 0.5}
    together = match_fast(tensor, fine0, fine1, valid0, valid1, **config)
    assert len({len(pair) for pair in together}) > 1  # the pairs differ
    for number in range(3):
        one = slice(number, number + 1)
        valid = [None if v is None else v[one] for v in (valid0, valid1)]
        assert together[number] == match_fast(tensor[one], fine0[one], fine1[one], *valid, **config)[0]


def test_a_masked_cell_is_never_returned():
    tensor, fine0, fine1 = case("flat", 5, (3, 4), (4, 3))
    fine1 = fine0.permute(0, 1, 3, 2).contiguous()  # every cell has its twin, and some twins are masked
    valid1 = torch.ones(1, 16, 12, dtype=torch.bool)
    valid1[:, 3:9, 2:7] = False
    valid0 = torch.ones(1, 12, 16, dtype=torch.bool)
    valid0[:, :, 10:] = False
    config = {"reading": "center", "temperature": 0.0, "query_share": 1.0}
    (open_matches,) = match_fast(tensor, fine0, fine1, **config)
    (matches,) = match_fast(tensor, fine0, fine1, valid0, valid1, **config)
    assert matches and len(open_matches) > len(matches)
    allowed0, allowed1 = valid0.flatten().tolist(), valid1.flatten().tolist()
    assert all(allowed0[a] and allowed1[b] for a, b in matches)
    assert not all(allowed0[a] and allowed1[b] for a, b in open_matches)


def test_a_masked_cell_never_asks():
    tensor, fine0, fine1 = case("flat", 5, (3, 4), (4, 3))
    valid0 = rand(0, 1, 12, 16) > 0
    maps = FineMap.of(fine0, valid0), FineMap.of(fine1)
    settings = {"reading": "center", "query_share": 1.0, "temperature": 0.0, "max_values": MANY}
    found = both_ways(tensor.flatten(3).flatten(1, 2), *maps, **settings)
    assert torch.equal(found.index0.sort().values, valid0.flatten().nonzero()[:, 0])
    assert valid0.flatten()[found.back].all()


def test_nothing_is_found_in_nothing():
    _, fine0, fine1 = case("flat", 0, (2, 2), (3, 2))
    zero = torch.zeros(1, 2, 2, 3, 2)
    nowhere = torch.zeros(1, 12, 8, dtype=torch.bool)
    config = {"reading": "center", "temperature": 0.0, "query_share": 1.0}
    assert match_fast(zero, fine0, fine1, **config) == [{}]
    assert match_fast(zero, fine0, fine1, **{**config, "temperature": 0.1}) == [{}]
    assert match_fast(zero + 1, fine0, fine1, None, nowhere, **config) == [{}]
    assert match_fast(zero + 1, fine0, fine1, **{**config, "query_share": 0.2}) == [{}]  # floor(0.8 cells)
    assert match_fast(zero + 1, fine0 * 0, fine1, **config) == [{}]  # features of length 0, cosine 0


@pytest.mark.parametrize("share", [0.0, 0.34, 0.5, 0.99, 1.0])
def test_queries_come_from_the_best_cells(share):
    tensor, fine0, _ = case("exact", 8, (3, 3), (3, 3))
    map0 = FineMap.of(fine0)
    found = both_ways(
        tensor.flatten(3).flatten(1, 2) + 0.5,
        map0,
        FineMap.of(fine0),
        reading="center",
        query_share=share,
        temperature=1.0,
        max_values=MANY,
    )
    cells = set(map0.split(found.index0)[0].tolist())
    ranked = tensor.flatten(3).flatten(1, 2)[0].amax(1).sort(descending=True, stable=True).indices
    assert cells == set(ranked[: math.floor(share * 9)].tolist())


# One query at a picture of one cell, against a picture of 5 x 8 cells: the bound at work.


def one_query(
    coarse: list[float], cosine: list[float], *, norm: float = 1.0, temperature: float = 0.0, dtype=torch.float32
):
    """Coarse scores and cosines of 40 cells, for one query; every fine cell of a cell has the cosine."""
    angle = torch.tensor(cosine).view(1, 1, 5, 8).repeat_interleave(4, 2).repeat_interleave(4, 3)
    fine1 = torch.cat([angle, (1 - angle.square()).clamp(min=0).sqrt()], dim=1) * norm
    queries = Queries(
        features=torch.tensor([[[1.0, 0.0]]], dtype=dtype),
        pair=torch.tensor([0]),
        rows=torch.tensor([[0]]),
        weights=torch.ones(1, 1, 1),
    )
    map1 = FineMap.of(fine1.to(dtype))
    found = search(torch.tensor(coarse).view(1, 1, 40), queries, map1, temperature=temperature, max_values=MANY)
    cell, _ = map1.split(found.index)
    return found.index.item(), cell.item(), found.score.item(), found.visited.item()


def test_the_search_stops_where_the_bound_allows(cpu_kernels):
    coarse = [40.0 - cell for cell in range(40)]
    _, cell, score, visited = one_query(coarse, [1.0] + [0.5] * 39)
    assert (cell, visited) == (0, 1 if cpu_kernels == "C" else 16)
    assert score == pytest.approx(40 / sum(coarse), rel=1e-6)


def test_what_was_visited_does_not_hold_up_the_search():
    # Sixteen equals fill the block, 2 * 0.5 each; what comes after could reach 0.25 at most.
    coarse, cosine = [0.25] * 40, [0.5] * 40
    coarse[20:36] = [2.0] * 16
    assert one_query(coarse, cosine)[1::2] == (20, 16)


def test_the_search_goes_on_until_the_bound_allows():
    coarse = [40.0 - cell for cell in range(40)]
    cosine = [0.1] * 40
    cosine[31] = 1.0  # 9 * 1 beats 40 * 0.1
    _, cell, score, visited = one_query(coarse, cosine)
    assert cell == 31 and visited > 16
    assert score == pytest.approx(9 / sum(coarse), rel=1e-6)


def test_an_equal_beyond_the_block_wins_where_it_comes_first():
    # Sixteen cells fill the first block with products 2 * 0.5; cell 3, visited later, has 1 * 1.
    coarse, cosine = [0.25] * 40, [0.0] * 40
    for cell in range(20, 36):
        coarse[cell], cosine[cell] = 2.0, 0.5
    coarse[3], cosine[3] = 1.0, 1.0
    assert one_query(coarse, cosine)[1] == 3


def test_all_equal_gives_the_first():
    index, _, _, visited = one_query([1.0] * 40, [1.0] * 40)
    assert index == 0 and visited == 40


def test_a_cosine_above_one_by_rounding_is_not_missed():
    coarse, cosine = [0.25] * 40, [0.0] * 40
    for cell in range(20, 36):
        coarse[cell], cosine[cell] = 2.0, 0.5
    coarse[3], cosine[3] = 1.0, 1.000002
    cosine[20] = 0.5000001  # just above what the bound without slack would ask
    assert one_query(coarse, cosine)[1] == 3


def test_a_sharp_fine_score_exceeds_one_by_more():
    """exp((cosine - 1) / 0.05) turns a cosine of 1.002, as half precision gives, into 1.04."""
    coarse, cosine = [0.001] * 40, [0.0] * 40
    for cell in range(20, 36):
        coarse[cell], cosine[cell] = 1.02, 1.0
    coarse[3], cosine[3] = 1.0, 1.002
    assert one_query(coarse, cosine, temperature=0.05, dtype=torch.float16)[1] == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_searched_exactly_too(dtype):
    tensor, fine0, fine1 = case("peaked", 11, (5, 5), (5, 6))
    fine0, fine1 = fine0.to(dtype), fine1.to(dtype)
    index, score, _ = search_all(tensor, fine0, fine1, reading="center")
    _, best, maps = search_literally(tensor[0], fine0[0].float(), fine1[0].float(), reading="center")
    rounding = 2e-3 if dtype == torch.float16 else 2e-2
    chosen = maps.gather(1, index[0].clamp(min=0)[:, None])[:, 0]
    assert (chosen >= best * (1 - rounding)).all()
    assert torch.allclose(score[0], best, rtol=rounding)


def test_planted_matches_are_found_with_few_visits():
    """A peaked tensor and features that agree with it: few cells of the 108 are ever looked at."""
    shape = (9, 12)
    fine0 = normalize(rand(0, 1, 64, 36, 48))
    tensor = torch.eye(108).view(1, *shape, *shape) + 1e-3
    index, _, visited = search_all(tensor, fine0, fine0, reading="center")
    assert torch.equal(index[0], torch.arange(36 * 48))
    assert (visited <= 16).all()


def test_queries_that_read_only_zeros_cost_nothing():
    """The left third of picture 0 has no coarse scores at all, and its groups mix it with the next cells."""
    shape = (6, 9)
    fine0 = normalize(rand(0, 1, 64, 24, 36))
    tensor = torch.eye(54).view(1, *shape, *shape) + 1e-3
    tensor[:, :, :3] = 0
    index, _, visited = search_all(tensor, fine0, fine0, reading="center")
    assert (index.view(24, 36)[:, :10] == -1).all() and (index.view(24, 36)[:, 10:] >= 0).all()
    assert (visited <= 16).all()


@pytest.mark.parametrize("reading", READINGS)
def test_points_anywhere_are_read_bilinearly(reading):
    tensor, fine0, fine1 = case("flat", 4, (3, 4), (4, 5), batch=2)
    points = torch.tensor([[0.0, 0.0], [3.25, 7.5], [15.0, 11.0], [-0.4, 4.2], [15.4, 11.3], [7.0, 2.0], [9.9, 0.1]])
    pair = torch.tensor([0, 1, 0, 1, 1, 0, 1])
    queries = point_queries(FineMap.of(fine0), pair, points, reading)
    found = search(tensor.flatten(3).flatten(1, 2), queries, FineMap.of(fine1), temperature=0.0, max_values=MANY)

    def bilinear(values, x, y):  # (h w ...), clamped
        y, x = min(max(y, 0), values.shape[0] - 1), min(max(x, 0), values.shape[1] - 1)
        rows, columns = (math.floor(y), math.ceil(y)), (math.floor(x), math.ceil(x))
        upper = values[rows[0], columns[0]] * (1 - x % 1) + values[rows[0], columns[1]] * (x % 1)
        lower = values[rows[1], columns[0]] * (1 - x % 1) + values[rows[1], columns[1]] * (x % 1)
        return upper * (1 - y % 1) + lower * (y % 1)

    for number, (x, y) in enumerate(points.tolist()):
        feature = bilinear(fine0[pair[number]].permute(1, 2, 0), x, y)
        cosine = torch.einsum("c,chw->hw", feature / feature.norm(), fine1[pair[number]])
        cx, cy = (x / 4, y / 4) if reading == "corner" else ((x + 0.5) / 4 - 0.5, (y + 0.5) / 4 - 0.5)
        coarse = bilinear(tensor[pair[number]], cx, cy)
        coarse = (coarse / coarse.sum()).repeat_interleave(4, 0).repeat_interleave(4, 1)
        index, score = literal.best(cosine * coarse)
        assert found.index[number, 0].item() == index
        assert found.score[number, 0].item() == pytest.approx(score, rel=1e-4)


def test_matches_are_ordered_by_pair_and_score():
    pair = torch.tensor([0, 0, 1, 1, 1, 1])
    scores = torch.tensor([0.1, 0.7, 0.3, 0.5, 0.5, 0.2])
    assert _best_first(pair, scores, None, 2).tolist() == [1, 0, 3, 4, 2, 5]  # equals keep their order
    assert _best_first(pair, scores, 2, 2).tolist() == [1, 0, 3, 4]
    assert _best_first(pair, scores, 1, 2).tolist() == [1, 3]
    assert _best_first(pair, scores, 0, 2).tolist() == []
    assert _best_first(pair[:0], scores[:0], 3, 2).tolist() == []
    many = _best_first(torch.zeros(999, dtype=torch.long), torch.zeros(999), None, 1)
    assert many.tolist() == list(range(999))
