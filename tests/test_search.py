"""Tests of cells, queries and the order of matches; tests/test_ops_search.py compares the search with the reference."""

import itertools
import math

import pytest
import torch
from conftest import rand, texture, tiny_network
from torch.utils._python_dispatch import TorchDispatchMode

from dualrc.config import FineConfig
from dualrc.model.cells import FineMap
from dualrc.model.correlation import normalize
from dualrc.model.engine import Engine
from dualrc.model.network import best_first
from dualrc.model.search import cell_queries, read_coarse
from dualrc.ops import formulas


@pytest.mark.parametrize("reading", ["corner", "center"])
@pytest.mark.parametrize("shape", [(3, 2), (1, 4), (1, 1)])
def test_the_coarse_tensor_is_read_as_defined(reading, shape):
    tensor = rand(0, 2, *shape, 2, 3).sigmoid()
    fine = FineMap.of(normalize(rand(1, 2, 4, 4 * shape[0], 4 * shape[1])))
    cells = torch.arange(fine.cells).expand(2, -1)
    queries = cell_queries(fine, cells, reading)
    read = read_coarse(tensor.flatten(3).flatten(1, 2), queries).view(2, fine.cells, 16, 6)
    for pair, cell, place in itertools.product(range(2), range(fine.cells), range(16)):
        index = fine.members(cells)[pair, cell, place].item()
        row, column = divmod(index, 4 * shape[1])
        assert torch.equal(queries.features[pair, cell, place], fine.features[pair, index])
        mixed = read[pair, cell, place] / (read[pair, cell, place].sum() + 1e-15)
        if reading == "corner" and (row, column) == (0, 0):
            assert not mixed.any()
        else:
            expected = formulas.coarse_scores(tensor[pair].double(), column, row, reading).flatten()
            assert torch.allclose(mixed.double(), expected, atol=1e-6), (row, column)


def test_members_and_positions_are_inverse():
    some = FineMap.of(torch.zeros(1, 1, 12, 20))
    members = some.members(torch.arange(some.cells))
    assert sorted(members.flatten().tolist()) == list(range(240))
    assert members[6].tolist() == [(4 + i) * 20 + 4 + j for i in range(4) for j in range(4)]
    assert torch.equal(some.position(members).flatten(), torch.arange(240))
    assert some.coordinates(torch.tensor([0, 21])).tolist() == [[0, 0], [1, 1]]
    assert some.upsample(torch.arange(15.0)[None])[0, members].eq(torch.arange(15.0)[:, None]).all()


@pytest.mark.parametrize("share", [0.34, 0.5, 0.99, 1.0])
def test_queries_come_from_the_best_cells(share):
    tensor = rand(8, 1, 9, 9).abs().mul(2).round() + 0.5  # with ties
    fine = FineMap.of(normalize(rand(1, 1, 4, 12, 12)))
    found = Engine().search(tensor, fine, fine, FineConfig(query_share=share, temperature=1.0))
    cells = set((fine.position(found.index0) // 16).flatten().tolist())
    ranked = tensor[0].amax(1).sort(descending=True, stable=True).indices
    assert cells == set(ranked[: math.floor(share * 9)].tolist())


def test_planted_matches_are_found():
    fine = FineMap.of(normalize(rand(0, 1, 64, 12, 16)))
    found = Engine().search(torch.eye(12)[None] + 1e-3, fine, fine, FineConfig())
    assert torch.equal(found.index1, found.index0) and torch.equal(found.back, found.index0)


def test_matches_are_ordered_by_pair_and_score():
    pair = torch.tensor([0, 0, 1, 1, 1, 1])
    scores = torch.tensor([0.1, 0.7, 0.3, 0.5, 0.5, 0.2])
    assert best_first(pair, scores, None, 2).tolist() == [1, 0, 3, 4, 2, 5]  # equals keep their order
    assert best_first(pair, scores, 2, 2).tolist() == [1, 0, 3, 4]
    assert best_first(pair, scores, 1, 2).tolist() == [1, 3]
    assert best_first(pair, scores, 0, 2).tolist() == []
    assert best_first(pair[:0], scores[:0], 3, 2).tolist() == []
    many = best_first(torch.zeros(999, dtype=torch.long), torch.zeros(999), None, 1)
    assert many.tolist() == list(range(999))


def test_forward_is_extract_and_match():
    network = tiny_network()
    image = torch.from_numpy(texture(3, 96, 80)).permute(2, 0, 1)[None] / 255
    with torch.inference_mode():
        whole = network(image[:, :, :64, :80], image[:, :, 16:, 6:70], top=20)
        parts = network.match(network.extract(image[:, :, :64, :80]), network.extract(image[:, :, 16:, 6:70]), top=20)
    assert len(whole.scores) == 20
    for name, value in vars(whole).items():
        assert torch.equal(value, getattr(parts, name))


class FromTheHost(TorchDispatchMode):
    """Counts transfers of values between Python and the device, which a CUDA graph cannot capture."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(word in str(function) for word in ("lift_fresh", "item", "nonzero", "_local_scalar")):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_search_and_refinement_wait_for_nothing_from_the_host():
    """Their definitions can be captured in CUDA graphs, with any engine that depends only on shapes."""
    from ops_data import refinement_case

    subpixel, fine, light, matches = refinement_case()
    engine = Engine()
    engine.refine(subpixel, fine, light, matches)  # constants are made once
    with torch.inference_mode(), FromTheHost() as mode:
        engine.refine(subpixel, fine, light, matches)
        engine.search(rand(0, 2, 30, 30).abs(), *fine, FineConfig())
    assert mode.seen == []
    with FromTheHost() as mode:
        torch.zeros(3)[1] = 0
    assert mode.seen  # such an assignment would be seen
