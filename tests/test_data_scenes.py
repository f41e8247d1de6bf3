"""Tests of pairs of procedural scenes."""

import os
import signal
import time

import numpy as np
import pytest
import torch

from dualrc.data import ScenesConfig, open_pairs
from dualrc.data.scenes import render_sample
from dualrc.errors import ConfigError
from dualrc.scenes import correspond

SMALL = ScenesConfig(image_size=(96, 80), texture=32, pool=2, workers=0)


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def equal(a, b):
    return all(map(torch.equal, a.tensors(), b.tensors()))


@pytest.fixture(scope="module")
def maker():
    made = open_pairs(SMALL, size=64, points=48).training
    yield made
    made.close()


def test_points_agree_with_the_scene(monkeypatch):
    from dualrc.data import scenes

    drawn = []
    draw = scenes._draw_pair
    monkeypatch.setattr(scenes, "_draw_pair", lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1])
    sample = render_sample(SMALL, 3)
    first, second = drawn[0]
    assert len(sample.points0) > 500 and len(sample.hidden0) > 50 and len(sample.hidden1) > 50
    assert np.array_equal(sample.image0, first.image.numpy()) and np.array_equal(sample.image1, second.image.numpy())
    truth = correspond(first, second, sample.points0)
    error = np.linalg.norm(truth.points1.numpy() - sample.points1, axis=1)
    assert np.median(error) < 1e-6 and (error < 0.5).mean() > 0.99
    assert not correspond(first, second, sample.hidden0).visible.any()
    assert not correspond(second, first, sample.hidden1).visible.any()


def test_a_fixed_pool_makes_the_same_batches(maker):
    batch = maker.make(4, random())
    assert batch.images0.shape == (4, 3, 64, 64)
    assert batch.valid.sum(1).min() >= 8 and batch.absent0.any() and batch.absent1.any()
    assert equal(batch, maker.make(4, random())) and not equal(batch, maker.make(4, random(1)))
    other = open_pairs(SMALL, size=64, points=48).training
    assert equal(batch, other.make(4, random()))
    other.close()
    # Pairs are reused with other crops and another light.
    assert len(maker.source) == 2
    assert not any(torch.equal(batch.images0[i], batch.images0[j]) for i in range(4) for j in range(i))


def test_another_seed_and_another_number_are_other_pairs():
    samples = [
        render_sample(ScenesConfig(image_size=(64, 64), texture=32, seed=seed), number)
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    again = render_sample(ScenesConfig(image_size=(64, 64), texture=32), 0)
    assert np.array_equal(samples[0].image0, again.image0) and np.array_equal(samples[0].points1, again.points1)
    assert not np.array_equal(samples[0].image0, samples[1].image0)
    assert not np.array_equal(samples[0].image0, samples[2].image0)


def test_workers_render_the_same_pairs_renew_the_pool_and_may_die():
    config = ScenesConfig(image_size=(64, 64), texture=32, pool=2, workers=1)
    maker = open_pairs(config, size=64, points=32).training
    try:
        first = maker.source[0].load()
        assert len(maker.source) == 2
        expected = [render_sample(config, number).image0 for number in range(2)]
        assert any(np.array_equal(first.image0, image) for image in expected)
        start = time.monotonic()
        while maker.source[0].load() is first and time.monotonic() < start + 60:
            maker.make(1, random())
            time.sleep(0.05)
        assert maker.source[0].load() is not first and len(maker.source) == 2
        for pid in list(maker.pool._executor._processes):
            os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        while not maker.report() and time.monotonic() < start + 30:
            maker.make(1, random())
            time.sleep(0.05)
        assert "were killed" in maker.report()
        # The existing pairs are used again.
        assert equal(maker.make(2, random()), maker.make(2, random()))
    finally:
        maker.close()


def test_settings_without_meaning():
    for settings in (
        {"image_size": (32, 64)},
        {"pool": 0},
        {"workers": -1},
        {"zoom": 0.5},
        {"texture": 48},
        {"night": 2.0},
        {"crop": 0.0},
    ):
        with pytest.raises(ConfigError):
            ScenesConfig(**settings)
