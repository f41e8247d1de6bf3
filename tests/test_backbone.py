"""Tests of the backbone: torchvision's names, the fusion variants, and the geometry of the compact network."""

import zlib

import pytest
import torch
from conftest import SHARED, rand
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from dualrc.config import CompactConfig, ResNetConfig
from dualrc.errors import WeightsError
from dualrc.model import backbone as backbones
from dualrc.model.backbone import CompactBackbone, PaperBackbone, ResNet, local_contrast, make_backbone
from dualrc.model.checkpoint import load_imagenet_trunk

LEVELS = ((256, 8, 12), (512, 4, 6), (1024, 2, 3), (2048, 1, 2))  # conv2 to conv5 of an image of 32 x 48


def torchvision_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of torchvision's resnet101().state_dict()."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}

    def norm(name: str, width: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.{part}"] = (width,)
        shapes[f"{name}.num_batches_tracked"] = ()

    norm("bn1", 64)
    inputs = 64
    for stage, (width, depth) in enumerate([(64, 3), (128, 4), (256, 23), (512, 3)], start=1):
        for block in range(depth):
            name = f"layer{stage}.{block}"
            shapes[f"{name}.conv1.weight"] = (width, inputs, 1, 1)
            shapes[f"{name}.conv2.weight"] = (width, width, 3, 3)
            shapes[f"{name}.conv3.weight"] = (4 * width, width, 1, 1)
            for number, channels in enumerate((width, width, 4 * width), start=1):
                norm(f"{name}.bn{number}", channels)
            if block == 0:
                shapes[f"{name}.downsample.0.weight"] = (4 * width, inputs, 1, 1)
                norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    return shapes | {"fc.weight": (1000, 2048), "fc.bias": (1000,)}


@pytest.fixture(scope="module")
def trunk() -> ResNet:
    return ResNet(conv5=True)


def test_trunk_has_torchvisions_names(trunk):
    expected = torchvision_shapes()
    assert sum(name.endswith("conv2.weight") for name in expected) == 33
    del expected["fc.weight"], expected["fc.bias"]
    assert {name: tuple(t.shape) for name, t in trunk.state_dict().items()} == expected


def test_trunk_strides_are_torchvisions(trunk):
    # torchvision puts the stride on the 3x3 convolution.
    for stage, stride in ((trunk.layer1, 1), (trunk.layer2, 2), (trunk.layer3, 2), (trunk.layer4, 2)):
        assert stage[0].conv2.stride == (stride, stride) and stage[0].conv1.stride == (1, 1)
        assert stage[0].downsample[0].stride == (stride, stride)
        assert stage[1].conv2.stride == (1, 1)


def test_a_resnet50_with_its_strides_on_the_first_convolutions(tmp_path):
    """The layout of the first ResNets; read from a safetensors file in half precision with additional tensors."""
    small = ResNet("resnet50", stride_on="1x1")
    assert [len(stage) for stage in (small.layer1, small.layer2, small.layer3)] == [3, 4, 6]
    for stage in (small.layer2, small.layer3):
        assert stage[0].conv1.stride == (2, 2) == stage[0].downsample[0].stride and stage[0].conv2.stride == (1, 1)
    state = {name: rand(zlib.crc32(name.encode()), *t.shape).half() for name, t in small.state_dict().items() if t.ndim}
    save_file(state | {"fc.weight": torch.zeros(3)}, tmp_path / "trunk.safetensors")
    load_imagenet_trunk(small, tmp_path / "trunk.safetensors")
    assert torch.equal(small.layer3[5].conv2.weight, state["layer3.5.conv2.weight"].float())
    (tmp_path / "trunk.safetensors").write_bytes(b"nothing")
    for name in ("trunk", "missing"):
        with pytest.raises(WeightsError, match=r"; .*\.$"):
            load_imagenet_trunk(small, tmp_path / f"{name}.safetensors")


def test_the_last_stride_can_be_removed():
    """Every other cell of the finer map equals a cell of the coarser one, except for the 3x3 convolutions."""
    coarse, fine = ResNet("resnet50"), ResNet("resnet50", stride=8)
    fine.load_state_dict(coarse.state_dict())
    images = rand(0, 1, 3, 64, 96)
    with torch.no_grad():
        assert [tuple(level.shape[2:]) for level in fine(images)] == [(16, 24), (8, 12), (8, 12)]
        one, other = (net.layer3[0](net(images)[1]) for net in (coarse, fine))
    assert torch.allclose(one, other[:, :, ::2, ::2], atol=1e-5)


@pytest.mark.skipif(not (SHARED / "resnet50").exists(), reason="../shared/data/resnet50 is absent")
def test_the_shared_resnet50_has_torchvisions_names():
    trunk = ResNet("resnet50", stride_on="1x1")
    load_imagenet_trunk(trunk, SHARED / "resnet50" / "trunk.safetensors")
    with torch.no_grad():
        features = trunk(rand(0, 1, 3, 64, 64))[2]
    assert features.shape == (1, 1024, 4, 4) and features.isfinite().all() and (features > 0).float().mean() > 0.05


def test_trunk_is_frozen(trunk):
    trunk.train()
    assert not any(module.training for module in trunk.modules())
    assert not any(parameter.requires_grad for parameter in trunk.parameters())
    before = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    with torch.no_grad():
        levels = trunk(rand(0, 1, 3, 32, 48))
    assert [tuple(level.shape[1:]) for level in levels] == list(LEVELS)
    assert all(torch.equal(before[name], tensor) for name, tensor in trunk.state_dict().items())


def test_a_training_network_keeps_its_trunk_frozen(monkeypatch):
    monkeypatch.setattr(ResNet, "_stage", staticmethod(lambda inputs, width, depth, stride: nn.BatchNorm2d(1)))
    backbone = PaperBackbone(ResNetConfig(channels=256)).train()
    assert backbone.training and not any(module.training for module in backbone.trunk.modules())
    assert all(p.requires_grad for name, p in backbone.named_parameters() if not name.startswith("trunk."))


@pytest.mark.parametrize("counters", [True, False], ids=["with counters", "as old as torchvision's"])
def test_imagenet_file_fills_the_trunk(tmp_path, counters):
    """A file like torchvision's, with fc and layer4, and one value per tensor so that the file stays small."""
    state = {
        name: torch.tensor(0 if name.endswith("tracked") else zlib.crc32(name.encode()) / 2**32).expand(shape)
        for name, shape in torchvision_shapes().items()
    }
    tracked = {name: t.long() for name, t in state.items() if name.endswith("tracked")}
    state = state | tracked if counters else {name: t for name, t in state.items() if name not in tracked}
    torch.save(state, tmp_path / "resnet101.pth")
    trunk = ResNet(conv5=False)
    load_imagenet_trunk(trunk, tmp_path / "resnet101.pth")
    assert not any(name.startswith(("fc.", "layer4.")) for name in trunk.state_dict())
    for name, tensor in trunk.state_dict().items():
        assert name not in state or torch.equal(tensor, state[name]), name
    assert not any(parameter.requires_grad for parameter in trunk.parameters())
    del state["layer3.7.bn2.bias"]
    torch.save(state, tmp_path / "resnet101.pth")
    with pytest.raises(WeightsError, match=r"lacks layer3\.7\.bn2\.bias"):
        load_imagenet_trunk(trunk, tmp_path / "resnet101.pth")


class StubTrunk(nn.Module):
    """A ResNet that returns fixed random maps."""

    def __init__(self, kind: str, *, conv5: bool, stride_on: str) -> None:
        super().__init__()
        self.levels = [rand(i, 2, *shape).relu() for i, shape in enumerate(LEVELS)][: 4 if conv5 else 3]

    def forward(self, images):
        return [level.clone() for level in self.levels]


def up(x, like):
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=True)


def wiring(b: PaperBackbone, fusion: str, channels: int):
    """Compute the five variants step by step."""

    def conv(layer, x, padding=0):
        return F.conv2d(x, layer.weight, layer.bias, padding=padding)

    conv2, conv3, conv4, *rest = b.trunk.levels
    coarse = conv4 if channels == 1024 and fusion != "e" else conv(b.lateral4, conv4)
    if fusion == "e":
        coarse = coarse + up(conv(b.lateral5, rest[0]), conv4)
    down = conv(b.smooth4, coarse, 1) if fusion == "d" else coarse
    if fusion == "b":
        merged = conv(b.lateral2, conv2) + up(down, conv2)
    else:
        eighth = conv(b.lateral3, conv3) + up(down, conv3)
        if fusion in "cd":
            eighth = conv(b.smooth3, eighth, 1)
        merged = conv(b.lateral2, conv2) + up(eighth, conv2)
    # With 1024 channels, (a) to (d) return the ResNet's own map; all others smooth their result.
    untouched = channels == 1024 and fusion != "e"
    return (coarse if untouched else conv(b.coarse, coarse, 1)), conv(b.fine, merged, 1)


@pytest.mark.parametrize("channels", [256, 1024])
@pytest.mark.parametrize("fusion", "abcde")
def test_fusion_variants_are_wired_as_designed(monkeypatch, fusion, channels):
    monkeypatch.setattr(backbones, "ResNet", StubTrunk)
    b = PaperBackbone(ResNetConfig(fusion=fusion, channels=channels)).requires_grad_(False)
    coarse, fine = b(torch.zeros(2, 3, 32, 48))
    assert coarse.shape == (2, channels, 2, 3) and fine.shape == (2, channels, 8, 12)
    expected_coarse, expected_fine = wiring(b, fusion, channels)
    assert torch.allclose(coarse, expected_coarse, rtol=1e-4, atol=1e-5)
    assert torch.allclose(fine, expected_fine, rtol=1e-4, atol=1e-5)
    # Every layer is used.
    used = {"a": {3, 2}, "b": {2}, "c": {3, 2}, "d": {3, 2}, "e": {5, 4, 3, 2}}[fusion] | (
        {4} if channels == 256 else set()
    )
    assert {int(name[7]) for name in b.state_dict() if name.startswith("lateral")} == used
    assert {name.split(".")[0] for name in b.state_dict() if name.startswith("smooth")} == {
        "c": {"smooth3"},
        "d": {"smooth3", "smooth4"},
    }.get(fusion, set())
    outputs = {name.split(".")[0] for name in b.state_dict() if name.startswith(("coarse", "fine"))}
    assert outputs == ({"fine"} if channels == 1024 and fusion != "e" else {"coarse", "fine"})


SMALL = CompactConfig(widths=(4, 6, 8, 10, 12), depths=(1, 2, 1, 1), coarse_channels=7, fine_channels=5)


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (64, 112), (112, 48)])
def test_compact_shapes(size):
    backbone = CompactBackbone(SMALL).eval()
    coarse, fine = backbone(rand(0, 2, 3, *size))
    assert coarse.shape == (2, 7, size[0] // 16, size[1] // 16)
    assert fine.shape == (2, 5, size[0] // 4, size[1] // 4)


@pytest.mark.parametrize("axis", [2, 3])
def test_compact_cells_are_centered(axis):
    """With symmetric kernels, a mirrored image gives mirrored maps: there is no half-pixel offset."""
    torch.manual_seed(0)
    backbone = CompactBackbone(SMALL).eval()
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data += module.weight.data.flip(axis)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    images = rand(1, 1, 3, 64, 96)
    with torch.no_grad():
        maps, mirrored = backbone(images), backbone(images.flip(axis))
    for a, b in zip(maps, mirrored, strict=True):
        assert torch.allclose(a.flip(axis), b, rtol=1e-4, atol=1e-5 * a.abs().max().item())


def test_compact_maps_move_with_the_image():
    """After a shift by 32 px, the inner parts of both maps are shifted by 2 and 8 cells."""
    torch.manual_seed(0)
    backbone = CompactBackbone(SMALL).eval()
    wide = rand(2, 1, 3, 448, 480)
    with torch.no_grad():
        coarse0, fine0 = backbone(wide[..., :448])
        coarse1, fine1 = backbone(wide[..., 32:])
    assert torch.allclose(coarse0[:, :, 12:16, 14:16], coarse1[:, :, 12:16, 12:14], atol=1e-5)
    assert torch.allclose(fine0[:, :, 54:58, 56:64], fine1[:, :, 54:58, 48:56], atol=1e-5)


def test_contrast_is_that_of_the_surroundings_and_knows_no_gain_or_level():
    images = torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(0))
    found = local_contrast(images)
    assert found.shape == (2, 1, 48, 64)
    # Where the windows of four squares meet, the four have equal weights; each is the mean of 3x3 squares of 8 px.
    gray = images.mean(1)
    windows = [gray[0, y : y + 24, x : x + 24] for y in (8, 16) for x in (8, 16)]
    mean, square = (torch.stack([power(w) for w in windows]).mean() for power in (torch.mean, lambda w: (w**2).mean()))
    spread = (square - mean**2 + 0.002).sqrt()
    middle = (gray[0, 23:25, 23:25] - mean) / spread  # the four pixels around that place
    assert torch.allclose(found[0, 0, 23:25, 23:25], middle, atol=0.05)
    assert torch.allclose(local_contrast(3 * images + 1), found, atol=0.01, rtol=0.05)
    assert local_contrast(torch.full((1, 3, 16, 16), 0.7)).abs().max() < 1e-2
    assert torch.allclose(local_contrast(images.half()).float(), found, atol=0.02)


def test_make_backbone(monkeypatch):
    monkeypatch.setattr(backbones, "ResNet", StubTrunk)
    assert isinstance(make_backbone(ResNetConfig(channels=256)), PaperBackbone)
    assert isinstance(make_backbone(SMALL), CompactBackbone)


@pytest.mark.parametrize("config", [CompactConfig(), ResNetConfig(channels=256, fusion="e")], ids=["compact", "resnet"])
def test_folding_batch_norms_changes_nothing(config):
    network = make_backbone(config).eval()
    for number, module in enumerate(network.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = 0.1 * rand(number, module.num_features)
            module.running_var = rand(number + 1, module.num_features).square() + 0.5
            module.weight.data = 1 + 0.2 * rand(number + 2, module.num_features)
            module.bias.data = 0.2 * rand(number + 3, module.num_features)
    images = rand(0, 1, 3, 64, 96)
    with torch.no_grad():
        before = network(images)
        backbones.fold_batch_norm(network)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
        for one, other in zip(before, network(images), strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * one.abs().max().item())
