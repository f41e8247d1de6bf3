"""Tests of the fused backbone against the plain one, on a GPU or in Triton's interpreter."""

import copy
import importlib.util

import pytest
import torch
from conftest import rand
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import PRESETS, CompactConfig
from dualrc.model.backbone import CompactBackbone, fold_batch_norm, local_contrast
from dualrc.ops.triton.backbone import add_contrast, fuse, upsample_add
from dualrc.ops.triton.convolution import FusedConv, Tiles, choose_tiles
from dualrc.ops.triton.launch import Launcher

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = {"float32": (torch.float32, 1e-5), "float16": (torch.float16, 4e-3)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(positions=16, outputs=16, terms=16)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Run kernels in the interpreter if there is no GPU."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    """Return random weights without symmetry."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding).requires_grad_(False)
    layer.weight.copy_(rand(1, *layer.weight.shape) * (inputs * kernel**2) ** -0.5)
    layer.bias.copy_(rand(2, outputs))
    return layer


def by_definition(layer: nn.Conv2d, x: Tensor, onto: Tensor | None = None, *, relu: bool) -> Tensor:
    """Compute in float32 on the CPU, from inputs and weights rounded like the kernel's."""
    weight = layer.weight.to(x.dtype).float()
    result = F.conv2d(x.cpu().float(), weight, layer.bias, layer.stride, layer.padding)
    result = result if onto is None else result + onto.cpu().float()
    return result.relu() if relu else result


def fused(layer: nn.Conv2d, dtype: torch.dtype, **options) -> FusedConv:
    return FusedConv(layer, dtype=dtype, **options).to(DEVICE)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "stride", "padding"),
    [
        (4, 32, 4, 2, 1),  # the stem
        (3, 5, 4, 2, 1),
        (32, 20, 4, 2, 1),
        (16, 16, 3, 1, 1),
        (7, 9, 3, 1, 1),
        (16, 24, 2, 2, 0),
        (33, 40, 1, 1, 0),
        (64, 17, 1, 1, 0),
        (2, 3, 5, 1, 2),
        (2, 3, 3, 2, 0),
        (1, 1, 1, 1, 0),
    ],
)
def test_convolution_is_the_plain_one(kind, inputs, outputs, kernel, stride, padding):
    dtype, tolerance = KINDS[kind]
    layer = convolution(inputs, outputs, kernel, stride, padding)
    x = rand(3, 2, inputs, 7, 9).to(DEVICE, dtype)
    for tiles in (None, SMALL):
        found = fused(layer, dtype, relu=False, tiles=tiles)(x)
        assert found.dtype == dtype and found.is_contiguous(memory_format=torch.channels_last)
        assert close(found, by_definition(layer, x, relu=False), tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(5, 7), (1, 1), (1, 20), (16, 16)])
def test_shortcut_and_rectifier(kind, size):
    dtype, tolerance = KINDS[kind]
    layer = convolution(12, 12, 3, 1, 1)
    x, onto = rand(4, 3, 12, *size).to(DEVICE, dtype), rand(5, 3, 12, *size).to(DEVICE, dtype)
    before = onto.clone()
    found = fused(layer, dtype, relu=True)(x, onto=onto)
    assert close(found, by_definition(layer, x, onto, relu=True), tolerance)
    assert (found == 0).any() and (found > 0).any()
    assert torch.equal(onto, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(5, 7), (1, 1), (1, 20), (16, 16)])
def test_a_result_may_replace_its_shortcut(kind, size):
    dtype, _ = KINDS[kind]
    convolve = fused(convolution(12, 12, 3, 1, 1), dtype, relu=True)
    x, onto = (
        rand(number, 3, 12, *size).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last) for number in (4, 5)
    )
    expected = convolve(x, onto=onto)
    assert convolve.write(x, onto, onto=onto) is onto
    assert torch.equal(onto, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bits of bfloat16 as integers")
def test_bfloat16():
    layer = convolution(16, 24, 3, 1, 1)
    x = rand(3, 1, 16, 5, 6).to(DEVICE, torch.bfloat16)
    assert close(fused(layer, torch.bfloat16, relu=True)(x), by_definition(layer, x, relu=True), 2e-2)


def test_tiles_do_not_change_results():
    layer = convolution(32, 48, 3, 1, 1)
    x = rand(3, 1, 32, 6, 11).to(DEVICE, torch.float16)
    expected = by_definition(layer, x, relu=True)
    for positions, outputs, terms in ((16, 64, 32), (128, 16, 64), (32, 32, 128), (64, 64, 16)):
        tiles = Tiles(positions=positions, outputs=outputs, terms=terms)
        assert close(fused(layer, torch.float16, relu=True, tiles=tiles)(x), expected, 4e-3)


@pytest.mark.parametrize("channels", [6, 16])
@pytest.mark.parametrize("size", [(4, 6), (5, 7), (1, 1), (3, 4)])
def test_replicated_borders(channels, size):
    """Borders of maps with odd sides are padded as in CompactBackbone."""
    layer = convolution(channels, 8, 2, 2)
    x = rand(6, 2, channels, *size)
    odd = (0, size[1] % 2, 0, size[0] % 2)
    expected = by_definition(layer, F.pad(x, odd, mode="replicate"), relu=True)
    assert close(fused(layer, torch.float32, relu=True, replicate=True)(x.to(DEVICE)), expected, 1e-5)


@pytest.mark.parametrize("offset", [0, 1])
def test_inputs_of_any_layout(offset):
    """Inputs may be contiguous, transposed, sliced, or at unaligned addresses."""
    layer = convolution(4, 8, 3, 1, 1)
    convolve = fused(layer, torch.float16, relu=False)
    whole = rand(7, 2, 4 + offset, 6, 8).to(DEVICE, torch.float16)
    memory = rand(8, 1, 6, 8, 4).to(DEVICE, torch.float16).flatten()
    unaligned = torch.cat([memory[:offset], memory])[offset:].view(1, 6, 8, 4).permute(0, 3, 1, 2)
    for x in (whole[:, offset:], whole.transpose(2, 3)[:, :4], whole[:, :4, offset:, offset:], unaligned):
        assert close(convolve(x), by_definition(layer, x, relu=False), 4e-3)
        assert close(convolve(x, onto=convolve(x).transpose(0, 1).contiguous().transpose(0, 1)),
                     2 * by_definition(layer, x, relu=False), 2e-2)  # fmt: skip


def test_convolution_without_bias():
    layer = nn.Conv2d(4, 6, 1, bias=False).requires_grad_(False)
    x = rand(8, 1, 4, 3, 3)
    assert close(fused(layer, torch.float32, relu=False)(x.to(DEVICE)), layer(x), 1e-5)


def test_nothing_to_convolve():
    convolve = fused(convolution(4, 6, 4, 2, 1), torch.float16, relu=True)
    empty = torch.zeros(0, 4, 8, 6, dtype=torch.float16, device=DEVICE)
    assert convolve(empty).shape == (0, 6, 4, 3)
    assert convolve(torch.zeros(1, 4, 1, 6, dtype=torch.float16, device=DEVICE)).shape == (1, 6, 0, 3)
    assert upsample_add(empty[:, :, :4, :3], empty).shape == empty.shape
    assert add_contrast(torch.zeros(0, 3, 8, 8, device=DEVICE)).shape == (0, 4, 8, 8)


def test_what_is_not_supported_is_refused():
    for layer in (nn.Conv2d(4, 4, (1, 3)), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same")):
        with pytest.raises(ValueError, match="not supported"):
            FusedConv(layer, relu=False)
    with pytest.raises(ValueError, match="Replicated"):
        FusedConv(nn.Conv2d(4, 4, 3), relu=False, replicate=True)
    convolve = FusedConv(convolution(4, 6, 1), relu=False)
    for x in (torch.zeros(1, 4, 2, 2).half(), torch.zeros(1, 3, 2, 2)):
        with pytest.raises(ValueError, match="Expected 4 channels"):
            convolve(x)
    with pytest.raises(ValueError, match="too large"):
        convolve(torch.zeros(1, 1, 1, 1).expand(1, 4, 2**15, 2**15))
    with pytest.raises(ValueError, match="Expected a shortcut"):
        convolve(torch.zeros(1, 4, 2, 2), onto=torch.zeros(1, 6, 2, 1))
    with pytest.raises(ValueError, match="half the size"):
        upsample_add(torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2))
    with pytest.raises(ValueError, match="divisible by 8"):
        add_contrast(torch.zeros(1, 3, 8, 12))
    with pytest.raises(ValueError, match="choose float16"):
        fuse(make(), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(2, 2), (1, 1), (6, 10), (5, 8), (7, 3)])
def test_upsampling(kind, size):
    dtype, tolerance = KINDS[kind]
    large = rand(1, 2, 5, *size)
    small = rand(2, 2, 5, -(-size[0] // 2), -(-size[1] // 2))
    large, small = large.to(DEVICE, dtype), small.to(DEVICE, dtype)
    up = F.interpolate(small.cpu().float(), scale_factor=2, mode="bilinear", align_corners=False)
    expected = large.cpu().float() + up[:, :, : size[0], : size[1]]
    found = upsample_add(small, large)
    assert close(found, expected, tolerance)
    large = large.contiguous(memory_format=torch.channels_last)
    assert upsample_add(small, large, out=large) is large
    assert torch.equal(large, found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_contrast(kind, memory):
    dtype, tolerance = KINDS[kind]
    images = rand(3, 2, 3, 24, 40).to(DEVICE, dtype).contiguous(memory_format=memory)
    images[1, :, :8] = 0.5  # a part without contrast
    found = add_contrast(images)
    assert torch.equal(found[:, :3], images)
    assert close(found[:, 3:], local_contrast(images.cpu().float()), tolerance)


def make(contrast: bool = True) -> CompactBackbone:
    """Return a tiny backbone with nontrivial batch norms and nonzero residual blocks."""
    config = CompactConfig(
        widths=(4, 8, 8, 16, 12), depths=(1, 1, 2, 1), coarse_channels=12, fine_channels=10, contrast=contrast
    )
    backbone = CompactBackbone(config).requires_grad_(False).eval()
    for number, tensor in enumerate(backbone.state_dict().values()):
        if tensor.is_floating_point():
            spread = 0.3 if tensor.dim() == 1 else tensor[0].numel() ** -0.5
            tensor.copy_(rand(number, *tensor.shape) * spread)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.abs_().add_(0.5)
            module.weight.abs_().add_(0.7)
    return backbone


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 1e-4), ("float16", 2e-2)])
@pytest.mark.parametrize(("contrast", "size"), [(True, (32, 48)), (False, (48, 64)), (True, (64, 80))])
def test_backbone_is_the_plain_one(kind, tolerance, contrast, size):
    dtype = KINDS[kind][0]
    plain = make(contrast)
    before = copy.deepcopy(plain.state_dict())
    fast = fuse(plain.to(DEVICE), dtype)
    images = rand(5, 2, 3, *size).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)
    plain = plain.cpu()
    for found, expected in zip(fast(images), plain(images.cpu().float()), strict=True):
        assert expected.abs().mean() > 0.1
        assert close(found, expected, tolerance)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in before.items())


def test_a_folded_backbone_can_be_fused():
    plain = make()
    folded = copy.deepcopy(plain)
    fold_batch_norm(folded)
    images = rand(5, 1, 3, 32, 32).to(DEVICE)
    found, expected = (fuse(backbone.to(DEVICE), torch.float32)(images) for backbone in (folded, plain))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_a_fused_backbone_can_be_copied_and_converted():
    fast = fuse(make(), torch.float32).to(DEVICE)
    images = rand(5, 1, 3, 32, 32).to(DEVICE)
    coarse, fine = fast(images)
    again = copy.deepcopy(fast)
    assert all(torch.equal(a, b) for a, b in zip(again(images), (coarse, fine), strict=True))
    assert close(again.half()(images.half())[0], coarse.cpu(), 2e-2)


def test_all_kernels_can_be_compiled_ahead():
    fast = fuse(make(), torch.float16).to(DEVICE)
    fast.compile_kernels()
    for convolve, add in fast._convolutions():
        assert {(tiles, add) for tiles in convolve.all_tiles()} <= convolve._plans.keys()
        assert convolve.tiles is None


def test_tiles_are_few_and_fit():
    """A layer has at most three kernels, for all image sizes."""
    for outputs, channels, taps in (
        (32, 4, 16),
        (64, 32, 16),
        (64, 64, 9),
        (96, 64, 9),
        (128, 256, 1),
        (256, 256, 9),
        (300, 7, 1),
    ):
        for half in (True, False):
            chosen = {choose_tiles(outputs, channels, taps, count, half=half) for count in range(1, 400_000, 999)}
            assert len(chosen) <= 3
            layer = FusedConv(nn.Conv2d(channels, outputs, int(taps**0.5)), relu=False)
            layer = layer.half() if half else layer
            assert chosen <= set(layer.all_tiles())


@pytest.mark.parametrize(("outputs", "channels", "taps"), [(32, 4, 16), (64, 64, 9), (256, 256, 9), (384, 256, 1)])
def test_plans_have_the_tiles_of_every_number_of_positions(outputs, channels, taps, monkeypatch):
    """A convolution looks up its tiles by blocks of positions, and no longer distinguishes large numbers of them."""
    layer = FusedConv(nn.Conv2d(channels, outputs, int(taps**0.5)), relu=False).half()
    monkeypatch.setattr(Launcher, "__call__", lambda self, *arguments: launched.append((self, arguments)))
    for positions in (1, 63, 64, 65, 1000, *range(4000, 20_000, 173), 16_768, 16_769, 200_000):
        launched: list[tuple[Launcher, tuple]] = []
        x = torch.zeros(1, channels, 1, 1, dtype=torch.float16).expand(1, channels, 1, positions)
        out = torch.zeros(1, outputs, 1, 1, dtype=torch.float16).expand(1, outputs, 1, positions)
        layer.write(x, out)
        tiles = choose_tiles(outputs, channels, taps, positions)
        ((launcher, (grid, *_)),) = launched
        assert tuple(launcher._constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")) == tiles[:3]
        assert launcher._options == {"num_warps": tiles.warps, "num_stages": tiles.stages}
        assert grid == (-(-positions // tiles.positions) * -(-outputs // tiles.outputs), 1, 1)
    assert len(layer._plans) <= 265


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_sizes_share_a_compiled_kernel():
    from dualrc.ops.triton import convolution_jit

    fast = fuse(CompactBackbone(PRESETS["default"][0].backbone).to(DEVICE))
    fast.compile_kernels()
    kernels = [getattr(convolution_jit, name) for name in ("convolve", "upsample_add", "square_means", "add_contrast")]

    def count() -> list[int]:
        return [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]

    before = count()
    for size in ((32, 32), (48, 16), (16, 64), (320, 176), (640, 480)):
        for batch in (1, 2, 16):
            fast(torch.rand(batch, 3, *size, device=DEVICE, dtype=torch.float16))
    assert count() == before
