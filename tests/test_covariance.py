"""Tests of the covariances of matches."""

import numpy as np
import pytest
import torch

import dualrc
from dualrc import scenes
from dualrc.matcher import uncertainty
from dualrc.matches import Estimate, Matches
from dualrc.model.align import brightness
from dualrc.model.covariance import covariances, evidence, local_motion


@pytest.fixture(scope="module")
def matcher():
    return dualrc.load(device="cpu", threads=1)


@pytest.fixture(scope="module")
def pair():
    return scenes.make_pair(953, kind="square", angle_deg=12.0, zoom=1.1, min_overlap=0.3, supersample=1)


@pytest.fixture(scope="module")
def matched(matcher, pair):
    return matcher.match(pair.rendering0.image.numpy(), pair.rendering1.image.numpy(), covariance=True)


def texture(shift: float, *, both: bool, size: int = 160) -> torch.Tensor:
    """Sum of waves (1 h w) moved by `shift` along x; they vary along x only, or in all directions."""
    y, x = torch.meshgrid(torch.arange(size).double(), torch.arange(size).double(), indexing="ij")
    random = torch.Generator().manual_seed(0)
    image = torch.zeros(size, size).double()
    for _ in range(60):
        angle = torch.rand((), generator=random) * 2 * np.pi if both else torch.zeros(())
        speed, phase = torch.rand(2, generator=random) * torch.tensor([0.5, 6.0]) + torch.tensor([0.2, 0.0])
        image += torch.sin(speed * ((x - shift) * torch.cos(angle) + y * torch.sin(angle)) + phase)
    return brightness(image.float()[None, None].expand(1, 3, size, size) / 40)


def found(*, both: bool, noise: float = 0.0) -> torch.Tensor:
    grid = torch.arange(40.0, 120.0, 8)
    points0 = torch.cartesian_prod(grid, grid)
    light0, light1 = texture(0, both=both), texture(0.4, both=both)
    light1 = light1 + noise * torch.randn(light1.shape, generator=torch.Generator().manual_seed(1))
    points1 = points0 + torch.tensor([0.4, 0.0])
    motion = local_motion(points0, points1, torch.ones(len(points0)))
    return covariances(*evidence(light0, light1, points0, points1, motion))


def test_variance_is_large_along_edges():
    some = found(both=False)
    # The damping bounds the variance along an edge, because features and neighbors place a match there too.
    assert (some[:, 1, 1] > 8 * some[:, 0, 0]).all()
    assert some[:, 0, 1].abs().max() < 1e-3


def test_variance_is_similar_in_all_directions_of_isotropic_texture():
    middle = found(both=True).mean(0)
    assert 0.5 < middle[0, 0] / middle[1, 1] < 2
    assert abs(middle[0, 1]) < 0.3 * middle[0, 0]


def test_noise_increases_the_variance():
    assert (found(both=True, noise=0.1).mean(0).trace() > 2 * found(both=True).mean(0).trace()).all()


def test_local_motion_is_that_of_the_matches():
    points0 = torch.rand(400, 2, generator=torch.Generator().manual_seed(0)) * 100
    motion = torch.tensor([[0.9, -0.3], [0.2, 1.2]])
    points1 = points0 @ motion.T + 7
    # Some wrong matches, which the fit must ignore.
    points1[::20] += 40
    right = torch.arange(400) % 20 != 0
    error = (local_motion(points0, points1, torch.ones(400)) - motion).abs().amax((1, 2))
    assert error[right].median() < 0.1
    assert local_motion(points0[:0], points1[:0], torch.ones(0)).shape == (0, 2, 2)


def test_covariances_are_positive_definite(matched):
    assert matched.covariance.shape == (len(matched), 2, 2)
    assert matched.covariance.dtype == np.float32
    assert (np.linalg.eigvalsh(matched.covariance) > 0).all()
    np.testing.assert_array_equal(matched.covariance, matched.covariance.transpose(0, 2, 1))


def test_covariance_does_not_change_matches(matcher, pair, matched):
    plain = matcher.match(pair.rendering0.image.numpy(), pair.rendering1.image.numpy())
    assert plain.covariance is None
    np.testing.assert_array_equal(plain.points1, matched.points1)


def test_covariances_are_calibrated(pair, matched):
    there = scenes.correspond(pair.rendering0, pair.rendering1, matched.points0)
    errors = np.where(there.visible.numpy()[:, None], matched.points1 - there.points1.numpy(), np.inf)
    near = np.linalg.norm(errors, axis=1) < 3
    errors, covariance = errors[near], matched.covariance[near]
    squares = np.einsum("ni,nij,nj->n", errors, np.linalg.inv(covariance), errors)
    # Exact for a normal distribution: 0.865 and 2. With variances off by a factor of 2, the mean is off by that factor.
    assert 0.8 < np.mean(squares < 4) < 0.95
    assert 1.2 < squares.clip(max=20).mean() < 2.8


def test_covariance_is_in_pixels_of_the_original_image(matcher, pair):
    first, second = (view.image.numpy() for view in (pair.rendering0, pair.rendering1))
    large = np.repeat(np.repeat(second, 2, axis=0), 2, axis=1)
    size = max(second.shape)
    small = matcher.match(first, second, size=size, covariance=True)
    # Seen at the same size, so only the unit differs.
    twice = matcher.match(first, large, size=size, covariance=True)
    assert small.covariance is not None
    assert twice.covariance is not None
    ratio = np.median(twice.covariance[:, 0, 0]) / np.median(small.covariance[:, 0, 0])
    assert 3.5 < ratio < 4.5


def test_points_without_counterpart_have_no_covariance(matcher, pair):
    first, second = (matcher.features(view.image.numpy()) for view in (pair.rendering0, pair.rendering1))
    points = np.array([[320.0, 240.0], [-50.0, 0.0], [200.0, 200.0]])
    some = matcher.with_covariance(matcher.match_points(first, second, points), first, second)
    known = np.isfinite(some.points1).all(axis=1)
    assert not known[1]
    np.testing.assert_array_equal(np.isfinite(some.covariance).all(axis=(1, 2)), known)
    empty = matcher.with_covariance(some[:0], first, second)
    assert empty.covariance.shape == (0, 2, 2)


def test_windows_of_few_matches_are_in_memory_at_a_time(matcher, pair, matched, monkeypatch):
    first, second = (matcher.features(view.image.numpy()) for view in (pair.rendering0, pair.rendering1))
    counts = []

    def watched(*inputs):
        counts.append(len(inputs[-1]))
        return evidence(*inputs)

    monkeypatch.setattr(uncertainty, "evidence", watched)
    monkeypatch.setattr(uncertainty, "_ROWS", 100)
    again = matcher.with_covariance(matched, first, second)
    assert sum(counts) == len(matched) > 300 and max(counts) == 100
    np.testing.assert_allclose(again.covariance, matched.covariance, rtol=1e-4, atol=1e-6)


def small_matches() -> Matches:
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 90, (6, 2)).astype(np.float32)
    root = rng.normal(size=(6, 2, 2)).astype(np.float32)
    covariance = root @ root.transpose(0, 2, 1)
    # Exactly symmetric, as CSV stores one of the two.
    covariance[:, 1, 0] = covariance[:, 0, 1]
    scores = np.array([0.2, 0.9, 0.5, 0.7, 0.1, 0.8])
    return Matches(
        points0=points, points1=points + 1, scores=scores, size0=(100, 90), size1=(100, 90), covariance=covariance
    )


def test_selections_keep_covariances():
    matches = small_matches()
    np.testing.assert_array_equal(matches[2:4].covariance, matches.covariance[2:4])
    np.testing.assert_array_equal(matches.top(2).covariance, matches.covariance[[1, 5]])
    np.testing.assert_array_equal(matches.above(0.7).covariance, matches.covariance[matches.scores >= np.float32(0.7)])
    nowhere = np.zeros((90, 100), bool)
    assert matches.inside(nowhere).covariance.shape == (0, 2, 2)
    assert matches.swapped().covariance is None
    assert "\n" not in repr(matches)
    assert len(repr(matches)) < 80


@pytest.mark.parametrize("suffix", ["npz", "json", "csv"])
@pytest.mark.parametrize("estimated", [False, True])
def test_files_keep_covariances(tmp_path, suffix, estimated):
    matches = small_matches()
    if estimated:
        flags = matches.scores > 0.5
        matches = matches.with_estimate(Estimate(kind="homography", matrix=np.eye(3), inliers=flags))
    matches.save(tmp_path / f"matches.{suffix}")
    again = Matches.load(tmp_path / f"matches.{suffix}")
    np.testing.assert_array_equal(again.covariance, matches.covariance)
    assert (again.estimate is not None) == estimated
    if estimated:
        np.testing.assert_array_equal(again.estimate.inliers, matches.estimate.inliers)


def test_shape_of_covariances_is_checked():
    matches = small_matches()
    with pytest.raises(dualrc.DataError, match="covariance has shape"):
        Matches(
            points0=matches.points0,
            points1=matches.points1,
            scores=matches.scores,
            size0=(1, 1),
            size1=(1, 1),
            covariance=np.ones((6, 2)),
        )
