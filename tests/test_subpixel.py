"""Tests of sub-pixel refinement: a soft-argmax around a match, symmetric in both images."""

import itertools
import math

import pytest
import torch
from conftest import rand

from dualrc.model.cells import FineMap
from dualrc.model.correlation import normalize
from dualrc.model.subpixel import Subpixel, cell_windows, pair_windows, point_windows, refine_both


@pytest.fixture
def refinement():
    """Return two small fine maps and a refinement whose learned part is untrained."""
    fine0, fine1 = (normalize(rand(number, 1, 4, 8, width)) for number, width in enumerate((8, 12)))
    return fine0, fine1, Subpixel(4, hidden=8).requires_grad_(False)


def first_pair(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.long)


def test_the_subpixel_offset_is_a_soft_argmax(refinement):
    fine0, fine1, subpixel = refinement
    index = torch.tensor([4 * 12 + 5, 12 + 10, 6 * 12 + 1])
    query = fine0[0, :, 3, 1:4].T
    asking = cell_windows(FineMap.of(fine0), first_pair(3), torch.tensor([3 * 8 + 1, 3 * 8 + 2, 3 * 8 + 3]))
    answering = cell_windows(FineMap.of(fine1), first_pair(3), index)
    offsets = subpixel(pair_windows(asking, answering), torch.rand(3)).offset
    for number, (row, column) in enumerate([(4, 5), (1, 10), (6, 1)]):
        steps = list(itertools.product((-1, 0, 1), (-1, 0, 1)))
        weights = [math.exp(query[number] @ fine1[0, :, row + dy, column + dx] / 0.05) for dy, dx in steps]
        x = sum(w * dx for w, (_, dx) in zip(weights, steps, strict=True)) / sum(weights)
        y = sum(w * dy for w, (dy, _) in zip(weights, steps, strict=True)) / sum(weights)
        assert offsets[number].tolist() == pytest.approx([x, y], abs=1e-4)
    assert offsets.abs().max() > 0.1


def test_the_subpixel_offset_is_zero_at_the_border(refinement):
    fine0, fine1, subpixel = refinement
    index = torch.tensor([0, 5, 11, 12, 23, 7 * 12 + 4])
    asking = cell_windows(FineMap.of(fine0), first_pair(6), torch.arange(6) + 3 * 8)
    seen = pair_windows(asking, cell_windows(FineMap.of(fine1), first_pair(6), index))
    assert not subpixel(seen, torch.rand(6)).offset.any()


def test_windows_between_cells_are_mixed_and_at_cells_are_theirs(refinement):
    fine0, _, _ = refinement
    fine, pair = FineMap.of(fine0), first_pair(2)
    cells, places = torch.tensor([3 * 8 + 2, 0]), torch.tensor([[2.0, 3.0], [0.0, 0.0]])
    at_cells, at_places = cell_windows(fine, pair, cells), point_windows(fine, pair, places)
    assert torch.allclose(at_cells.features, at_places.features, atol=1e-6)
    assert at_cells.whole.tolist() == at_places.whole.tolist() == [True, False]
    between = point_windows(fine, first_pair(1), torch.tensor([[2.5, 3.0]])).features[0, 4]
    mixed = fine0[0, :, 3, 2] + fine0[0, :, 3, 3]
    assert torch.allclose(between, mixed / mixed.norm(), atol=1e-6)


def test_refinement_moves_both_points_by_half(refinement):
    fine0, fine1, subpixel = refinement
    torch.nn.init.normal_(subpixel.correction[-1].weight, generator=torch.Generator().manual_seed(0))
    map0, map1 = FineMap.of(fine0), FineMap.of(fine1)
    pair, index0, index1 = first_pair(1), torch.tensor([3 * 8 + 2]), torch.tensor([2 * 12 + 7])
    windows0, windows1 = cell_windows(map0, pair, index0), cell_windows(map1, pair, index1)
    score0, score1 = torch.tensor([0.3]), torch.tensor([0.1])
    offset0, offset1, trust = refine_both(subpixel, pair_windows(windows0, windows1), score0, score1)
    assert torch.allclose(offset0, subpixel(pair_windows(windows1, windows0), score1).offset / 2)
    assert torch.allclose(offset1, subpixel(pair_windows(windows0, windows1), score0).offset / 2)
    # The learned part is symmetric in the images too.
    swapped = refine_both(subpixel, pair_windows(windows1, windows0), score1, score0)
    for mine, other in zip((offset1, offset0, trust), swapped, strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
    assert 0 < trust.item() < 1


def test_nothing_to_refine(refinement):
    fine0, fine1, subpixel = refinement
    none = first_pair(0)
    seen = pair_windows(*(cell_windows(FineMap.of(fine), none, none) for fine in (fine0, fine1)))
    offset0, offset1, trust = refine_both(subpixel, seen, torch.zeros(0), torch.zeros(0))
    assert offset0.shape == offset1.shape == (0, 2) and trust.shape == (0,)
