"""The last alignment: points move to where the pictures fit, and stay where that can't be told."""

import pytest
import torch
from conftest import rand

from dualrc.model.align import align, brightness

SIZE = 160
MOTION = torch.tensor([[0.9, 0.25], [-0.2, 1.05]])
SHIFT = torch.tensor([12.3, -4.6])
pytestmark = pytest.mark.usefixtures("cpu_kernels")


def show(x: torch.Tensor, y: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The brightness at any place of an endless surface."""
    random = torch.Generator().manual_seed(seed)
    waves = torch.randn(40, 2, generator=random) * 0.25
    phases, heights = 7 * torch.rand(40, generator=random), torch.randn(40, generator=random)
    return sum(h * torch.sin(a * x + b * y + p) for (a, b), p, h in zip(waves, phases, heights, strict=True))


def surface(motion=None, shift=None, seed: int = 0) -> torch.Tensor:
    """The surface as seen where the motion leads from picture 0's frame: (1 h w)."""
    axis = torch.arange(SIZE, dtype=torch.float32)
    there = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    if motion is not None:
        there = (there - shift) @ torch.linalg.inv(motion).T
    return show(there[..., 0], there[..., 1], seed)[None]


def case(count: int = 60, error: float = 1.2):
    points0 = 40 + 80 * torch.rand(count, 2, generator=torch.Generator().manual_seed(3))
    true = points0 @ MOTION.T + SHIFT
    wrong = true + error * torch.nn.functional.normalize(rand(4, count, 2))
    return points0, true, wrong, MOTION.expand(count, 2, 2), torch.zeros(count, dtype=torch.long)


def test_points_move_to_where_the_pictures_fit():
    points0, true, wrong, motion, pair = case()
    found = align(surface(), surface(MOTION, SHIFT), pair, points0, wrong, motion)
    error = (found - true).norm(dim=1)
    assert error.median() < 0.1 and (error < 0.5).float().mean() > 0.95
    # Another gain and level, and noise: the same.
    lit = 0.3 * surface(MOTION, SHIFT) + 2 + 0.02 * rand(5, 1, SIZE, SIZE)
    error = (align(surface(), lit, pair, points0, wrong, motion) - true).norm(dim=1)
    assert error.median() < 0.2


def test_points_stay_where_nothing_can_be_told():
    points0, _, wrong, motion, pair = case()
    there = surface(MOTION, SHIFT)
    flat = torch.ones_like(there)
    for light0, light1 in ((flat, flat), (surface(), flat), (flat, there), (surface(), surface(seed=1))):
        moved = (align(light0, light1, pair, points0, wrong, motion) - wrong).norm(dim=1) > 0
        assert moved.float().mean() < 0.1
    for bad in (motion * 0, motion * 9, motion * float("nan"), motion @ torch.tensor([[-1.0, 0], [0, 1]])):
        assert torch.equal(align(surface(), there, pair, points0, wrong, bad), wrong)
    border = torch.tensor([[5.0, 80.0]]), torch.tensor([[80.0, 157.0]])
    one = {"pair": pair[:1], "motion": torch.eye(2)[None]}
    for points in (border, border[::-1]):
        assert torch.equal(align(surface(), there, points0=points[0], points1=points[1], **one), points[1])


def test_pairs_of_a_batch_keep_apart():
    points0, _, wrong, motion, pair = case()
    lights0 = torch.cat([surface(seed=1), surface()])
    lights1 = torch.cat([surface(MOTION, SHIFT, seed=1), surface(MOTION, SHIFT)])
    both = align(
        lights0, lights1, torch.cat([pair, pair + 1]), points0.repeat(2, 1), wrong.repeat(2, 1), motion.repeat(2, 1, 1)
    )
    for number in (0, 1):
        alone = align(lights0[number][None], lights1[number][None], pair, points0, wrong, motion)
        assert torch.allclose(both[number * 60 : (number + 1) * 60], alone, atol=1e-5)
    assert align(lights0, lights1, pair[:0], points0[:0], wrong[:0], motion[:0]).shape == (0, 2)


@pytest.mark.parametrize("shape", [(2, 3, 32, 48), (1, 3, 16, 16)])
def test_brightness_is_a_blurred_mean(shape):
    images = rand(1, *shape)
    found = brightness(images)
    assert found.shape == (shape[0], *shape[2:])
    kernel = torch.tensor([1.0, 4, 6, 4, 1]) / 16
    patch = images.mean(1)[:, 4:9, 5:10]
    assert torch.allclose(found[:, 6, 7], torch.einsum("bij,i,j->b", patch, kernel, kernel), atol=1e-6)
