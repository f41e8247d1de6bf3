"""Tests of the backbone quantized to int8 against float32."""

import copy
import pickle

import numpy as np
import pytest
import torch
from conftest import texture, tiny_network

import dualrc
from dualrc.config import CompactConfig, MatcherConfig
from dualrc.errors import ConfigError, WeightsError
from dualrc.matcher import Matcher
from dualrc.model.backbone import CompactBackbone
from dualrc.ops import int8
from dualrc.scenes import make_pair

needs_bytes = pytest.mark.skipif(not int8.works(), reason="this CPU does not multiply bytes exactly")


def channels_last(*shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.contiguous(memory_format=torch.channels_last)


def rounded(values, low, high):
    """Return values rounded to int8."""
    step = (high - low) / 255
    zero = int(-low / step)
    return ((values / step + zero + 0.5).floor().clamp(0, 255) - zero) * step


@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 5, 7, 9), (1, 64, 8, 8)])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_numbers_in_bytes_are_nearly_the_same(shape, signed, at_once, monkeypatch):
    if at_once and not int8._rounds_at_once():
        pytest.skip("this torch does not round at once")
    monkeypatch.setattr(int8, "_rounds_at_once", lambda: at_once)
    x = 3 * channels_last(*shape, seed=4)
    x = x if signed else x.abs()
    values, scale, zero = int8.Bytes.of(x, signed=signed)
    assert values.dtype == torch.uint8 and values.stride() == x.stride()
    wrong = ((values.float() - zero) * scale - x).abs() / scale
    assert (wrong[x > x.min() + scale] < 0.51).all() and wrong.max() < 1.01
    assert scale <= (x.max() - min(0.0, x.min())) / 255 + 1e-6
    nothing = int8.Bytes.of(torch.zeros(shape), signed=signed)
    assert (nothing.values == nothing.zero).all()
    if signed:
        for negative in (-x.abs() - 1, torch.full(shape, -3.0)):
            values, scale, zero = int8.Bytes.of(negative, signed=True)
            assert ((values.float() - zero) * scale - negative).abs().max() < 1.01 * scale
    with pytest.raises(WeightsError, match="not finite"):
        int8.Bytes.of(torch.full(shape, torch.nan), signed=signed)


@needs_bytes
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (1, 1, 0), (4, 2, 1), (2, 2, 0)])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (16, 33)])
def test_a_convolution_is_that_of_the_rounded_numbers(signed, kernel, stride, padding, size):
    if min(size) + 2 * padding < kernel:
        pytest.skip("the image is smaller than the kernel")
    convolution = torch.nn.Conv2d(24, 40, kernel, stride, padding)
    x = 3 * channels_last(1, 24, *size, seed=1)
    x = x if signed else x.relu()
    scale = convolution.weight.abs().amax((1, 2, 3), keepdim=True) / 127
    weight = (convolution.weight / scale).round() * scale
    known = rounded(x, min(0.0, x.min().item()), x.max().item())
    expected = torch.nn.functional.conv2d(known, weight, convolution.bias, stride, padding)
    with torch.no_grad():
        plain = int8.Int8Conv(convolution, relu=False, signed=signed)(x)
        shortcut = channels_last(*expected.shape, seed=2)
        added = int8.Int8Conv(convolution, relu=True, signed=signed)(x, onto=shortcut.clone())
    torch.testing.assert_close(plain, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(added, (expected + shortcut).relu(), atol=1e-3, rtol=1e-3)


@needs_bytes
@pytest.mark.parametrize("size", [(16, 16), (48, 80), (112, 64)])
@pytest.mark.parametrize("contrast", [False, True])
def test_a_backbone_is_nearly_the_same(size, contrast):
    backbone = CompactBackbone(CompactConfig(widths=(8, 16, 24, 32, 32), contrast=contrast)).eval()
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # as after training
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.running_mean, std=0.1)
    images = channels_last(1, 3, *size)
    quick = copy.deepcopy(backbone)
    int8.convert(quick)
    with torch.no_grad():
        for one, other in zip(backbone(images), quick(images), strict=True):
            assert torch.nn.functional.cosine_similarity(one, other).min() > 0.98
            assert not torch.equal(one, other)
        black = quick(torch.zeros(1, 3, *size).contiguous(memory_format=torch.channels_last))
    assert all(torch.isfinite(features).all() for features in black)


@needs_bytes
def test_the_shipped_matcher_finds_the_same_in_8_bits():
    pair = make_pair(3, size=(320, 240))
    images = [rendering.image.numpy() for rendering in pair]
    quick, plain = dualrc.load(device="cpu"), dualrc.load(device="cpu", precision="float32")
    assert (quick.precision, plain.precision) == ("int8", "float32")
    found, expected = quick.match(*images, top=500), plain.match(*images, top=500)
    shift = np.abs(found.points0[:, None] - expected.points0).max(2)
    nearest = shift.argmin(1)
    same = shift.min(1) < 4
    assert same.mean() > 0.9
    apart = np.linalg.norm(found.points1[same] - expected.points1[nearest[same]], axis=1)
    assert np.mean(apart < 4) > 0.97
    for other in (copy.deepcopy(quick), pickle.loads(pickle.dumps(quick))):
        np.testing.assert_array_equal(other.match(*images, top=500).points1, found.points1)


def test_without_such_a_cpu_it_is_float32_and_asking_is_refused(monkeypatch):
    monkeypatch.setattr(int8, "works", lambda: False)
    assert dualrc.load(device="cpu").precision == "float32"
    with pytest.raises(ConfigError, match="choose float32"):
        Matcher(tiny_network(), MatcherConfig(), device="cpu", precision="int8")


@needs_bytes
def test_a_matcher_of_ones_own_network_in_8_bits():
    image = texture(1, 96, 80)
    matches = Matcher(tiny_network(), MatcherConfig(), device="cpu", precision="int8").match(image, image)
    apart = np.abs(matches.points0 - matches.points1).max(axis=1)
    assert len(matches) > 100 and np.mean(apart < 0.5) > 0.9


@needs_bytes
def test_a_network_that_is_given_stays_as_it_is():
    network = tiny_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    first, second = (Matcher(network, MatcherConfig(), device="cpu", precision="int8") for _ in range(2))
    image = texture(1, 96, 80)
    np.testing.assert_array_equal(first.match(image, image).points1, second.match(image, image).points1)
    assert Matcher(network, MatcherConfig(), device="cpu", precision="float32").precision == "float32"
    after = network.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@needs_bytes
def test_a_pair_that_has_nothing_in_common_and_few_cells():
    red = np.zeros((32, 32, 3), np.uint8)
    red[..., 0] = 255
    gray = np.repeat(np.linspace(0, 255, 32).astype(np.uint8)[None, :, None], 32, axis=0).repeat(3, axis=2)
    for precision in ("int8", "float32"):
        assert len(dualrc.load(device="cpu", precision=precision).match(red, gray)) == 0
