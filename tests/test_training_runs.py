"""Tests of whole training runs: learning, interruption, several processes, and the recipe of the paper."""

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, point_batch, rand, texture, tiny_config, tiny_network
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

import dualrc.train.loop
import dualrc.train.step
from dualrc.config import (
    PRESETS,
    ConsensusConfig,
    ContextConfig,
    FineConfig,
    NetworkConfig,
    ResNetConfig,
    TrunkConfig,
)
from dualrc.data import PairBatch, PhotoMotion, PhotoPairs, PhotosConfig, ScenesConfig, read_photos
from dualrc.data.photos import Photos
from dualrc.errors import ConfigError, DataError, DualRCError, OutputError
from dualrc.losses import keypoint_losses
from dualrc.model.backbone import ResNet, make_backbone
from dualrc.model.checkpoint import load_weights, save_weights
from dualrc.model.consensus import Consensus
from dualrc.model.context import Context
from dualrc.model.dualrc import Features
from dualrc.model.engine import Engine
from dualrc.ops.training import FastUpsample, TrainingEngine, two_layers
from dualrc.toml import read_toml, to_toml
from dualrc.train import TrainConfig, train
from dualrc.train.batches import Batches

CPU = torch.device("cpu")
CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write thirty images of noise with structure at many scales."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(30):
        Image.fromarray(texture(number, 160, 150)).save(folder / f"{number:02}.png")
    return folder


def tiny_run(folder, **changes) -> TrainConfig:
    settings = {"size": 64, "pairs": 4, "points": 32, "steps": 6, "warm_up": 2, "precision": "float32"}
    settings |= {"network": tiny_config(subpixel_hidden=16), "validate_every": 3, "validation_batches": 1}
    return TrainConfig(data=(PhotosConfig(paths=(str(folder),), canvas=160),), **{**settings, **changes})


def logged(folder, name: str) -> dict[int, float]:
    """Return the values of one name in log.csv, by step."""
    with (folder / "log.csv").open() as file:
        return {int(step): float(value) for step, key, value in csv.reader(file) if key == name}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_our_configs_can_be_read(path):
    assert read_toml(TrainConfig, path).steps > 0


def test_a_tiny_network_learns_on_a_cpu(folder, tmp_path):
    config = read_toml(TrainConfig, CONFIGS / "tiny.toml")
    config = replace(config, data=(replace(config.data[0], paths=(str(folder),)),), seed=1)
    before = train(replace(config, learning_rate=1e-12), tmp_path / "before", device="cpu", minutes=0)
    after = train(config, tmp_path / "after", device="cpu")
    assert before["within_5px"] < 0.15
    assert after["within_5px"] > before["within_5px"] + 0.3
    assert after["within_3px"] > 3 * before["within_3px"]
    held_out = logged(tmp_path / "after", "held_out_joint")
    assert held_out[100] < 0.95 * held_out[50]
    with Image.open(tmp_path / "after" / "images" / "0000100.jpg") as image:
        assert np.asarray(image).std() > 20
    assert load_weights(tmp_path / "after" / "weights.safetensors").config == config.network


def test_training_leaves_the_settings_of_torch_as_they_were(folder, tmp_path, monkeypatch):
    """Matching in the same process keeps its precision, and does not measure convolutions for every new size."""

    def settings():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark

    before, during, advance = settings(), [], dualrc.train.loop._Run.advance
    monkeypatch.setattr(
        dualrc.train.loop._Run, "advance", lambda *given: (during.append(settings()), advance(*given))[1]
    )
    train(tiny_run(folder, steps=1), tmp_path, device="cpu")
    assert during == [("high", True)] and settings() == before != during[0]


def test_the_loss_curve_of_a_stopped_run_is_that_of_an_undisturbed_one(folder, tmp_path):
    config = tiny_run(folder, validate_every=2)
    train(config, tmp_path / "whole", device="cpu")
    for _ in range(3):
        # One step each.
        train(config, tmp_path / "parts", device="cpu", minutes=0)
    train(config, tmp_path / "parts", device="cpu")
    whole, parts = logged(tmp_path / "whole", "loss"), logged(tmp_path / "parts", "loss")
    assert list(whole) == [2, 4, 6]
    assert parts == pytest.approx(whole, rel=1e-5)


def test_two_processes_train_as_one_with_the_same_pairs(folder, tmp_path):
    config = tiny_run(folder, parts=2, steps=3)
    (tmp_path / "run.toml").write_text(to_toml(config))
    train(config, tmp_path / "one", device="cpu")
    command = [sys.executable, "-m", "dualrc", "train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--device", "cpu", "--devices", "2"], check=True, timeout=120, env=environment)
    one, two = (load_weights(tmp_path / name / "weights.safetensors").state_dict() for name in ("one", "two"))
    for name, tensor in one.items():
        assert torch.allclose(two[name].float(), tensor.float(), rtol=1e-3, atol=1e-4), name
    assert logged(tmp_path / "two", "held_out_fine") == pytest.approx(
        logged(tmp_path / "one", "held_out_fine"), rel=1e-4
    )
    untrained = train(replace(config, steps=1, learning_rate=1e-12), tmp_path / "none", device="cpu")
    # Other weights give another loss, so the agreement above is not trivial.
    assert abs(untrained["fine"] - logged(tmp_path / "one", "held_out_fine")[3]) > 1e-2


def test_processes_that_can_not_share_the_pairs(folder, tmp_path):
    with pytest.raises(ConfigError, match="pairs = 4 is not a multiple of parts = 3"):
        tiny_run(folder, parts=3)
    (tmp_path / "run.toml").write_text(to_toml(tiny_run(folder)))
    command = [sys.executable, "-m", "dualrc", "train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    result = subprocess.run(
        [*command, "--device", "cpu", "--devices", "2"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode != 0
    assert "set parts to a multiple of 2" in result.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_same_command_goes_on(folder, tmp_path, number, status):
    (tmp_path / "run.toml").write_text(to_toml(tiny_run(folder, steps=100_000, validate_every=5_000)))
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "dualrc",
        "train",
        str(tmp_path / "run.toml"),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 100
    # Written at step 100.
    while not (out / "log.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(OutputError, match=f"Another run .process {process.pid} "):
        train(read_toml(TrainConfig, out / "config.toml"), out, device="cpu")
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == status
    assert "run the same command again to continue" in text and f"Stopped. The checkpoint is in {out}" in text
    assert "Traceback" not in text
    step = torch.load(out / "checkpoint.pt", weights_only=True)["step"]
    assert step >= 100
    config = read_toml(TrainConfig, out / "config.toml")
    train(config, out, device="cpu", minutes=0)
    assert torch.load(out / "checkpoint.pt", weights_only=True)["step"] == step + 1


def test_a_step_whose_loss_is_not_finite_is_left_out(folder, tmp_path, monkeypatch, caplog):
    whole = dualrc.train.step.matching_losses
    calls = []

    def broken(*arguments):
        calls.append(None)
        losses = whole(*arguments)
        return losses._replace(total=losses.total * (float("nan") if len(calls) == 2 else 1))

    monkeypatch.setattr(dualrc.train.step, "matching_losses", broken)
    figures = train(tiny_run(folder), tmp_path / "once", device="cpu")
    assert np.isfinite(list(figures.values())).all()
    assert "not finite in 1 of 3 steps" in caplog.text
    assert all(
        t.isfinite().all() for t in load_weights(tmp_path / "once" / "weights.safetensors").state_dict().values()
    )
    monkeypatch.setattr(
        dualrc.train.step, "matching_losses", lambda *a: whole(*a)._replace(total=whole(*a).total * float("nan"))
    )
    with pytest.raises(DataError, match="lower learning_rate"):
        train(tiny_run(folder), tmp_path / "ever", device="cpu")


def test_a_full_disk_leaves_the_last_good_checkpoint(folder, tmp_path, monkeypatch):
    config = tiny_run(folder)
    train(config, tmp_path, device="cpu", minutes=0)
    good = (tmp_path / "checkpoint.pt").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OutputError, match="free some space"):
        train(config, tmp_path, device="cpu")
    assert (tmp_path / "checkpoint.pt").read_bytes() == good


def test_sources_are_mixed_by_their_shares_and_every_step_can_be_made_again():
    class Numbered:
        def __init__(self, number):
            self.number = number

        def make(self, count, random):
            noise = torch.rand(count, 1, generator=random)
            flags = torch.ones(count, 1, dtype=torch.bool)
            images = torch.full((count, 3, 8, 8), float(self.number))
            both = {"images0": images, "images1": images}
            return PairBatch(**both, points0=noise, points1=noise, valid=flags, absent0=flags, absent1=flags)

    sources = PhotosConfig(paths=("a",)), PhotosConfig(paths=("b",), share=3.0)
    config = TrainConfig(data=sources, seed=5, pairs=4, parts=2)

    def batches():
        return Batches(config, [Numbered(0), Numbered(1)], CPU)

    made = [batches().get(step, [0, 1]) for step in range(100)]
    share = float(np.mean([batch.images0.mean() for batch in made]))
    assert share == pytest.approx(0.75, abs=0.1)
    straight = batches()
    for step, batch in enumerate(made):
        assert torch.equal(straight.get(step, [0, 1]).points0, batch.points0)
    halves = torch.cat([batches().get(7, [part]).points0 for part in (0, 1)])
    assert torch.equal(halves, made[7].points0)
    assert len({float(batch.points0[0]) for batch in made}) == 100


def test_scenes_and_photographs_train_together(folder, tmp_path):
    scenes = ScenesConfig(image_size=(96, 80), pool=2, workers=0, min_points=4)
    config = tiny_run(folder, size=64, steps=2, validation_batches=2)
    config = replace(config, data=(*config.data, scenes))
    assert read_toml(TrainConfig, _written(config, tmp_path / "run.toml")) == config
    figures = train(config, tmp_path / "run", device="cpu")
    assert np.isfinite(list(figures.values())).all()


def _written(config, path):
    path.write_text(to_toml(config))
    return path


def test_a_rate_that_stays_and_cools_down(folder):
    config = replace(tiny_run(folder), steps=100, warm_up=10, cool_down=20, learning_rate=1.0)
    assert config.rate(4) == pytest.approx(0.5)
    assert config.rate(10) == config.rate(80) == 1
    assert config.rate(90) == pytest.approx(0.5)
    assert config.rate(99) == pytest.approx(0.05)


def test_context_is_added_to_weights_that_have_none(folder, tmp_path):
    """Training starts from the results of the loaded weights, and the context learns."""
    start, out = tmp_path / "start.safetensors", tmp_path / "run"
    save_weights(tiny_network(), start)
    network = replace(tiny_config(), context=ContextConfig(layers=1, width=8, heads=2))
    config = replace(tiny_run(folder), start_from=str(start), network=network)
    before = dualrc.train.loop._network(config)
    plain, larger = tiny_network().state_dict(), before.state_dict()
    assert all(torch.equal(plain[name], larger[name]) for name in plain)
    train(config, out, device="cpu")
    after = load_weights(out / "weights.safetensors")
    assert after.config.context == network.context
    assert after.context.out.weight.abs().sum() > 0
    # A run that continues from these weights keeps their context.
    again = replace(tiny_run(folder), start_from=str(out / "weights.safetensors"))
    assert dualrc.train.loop._network(again).config.context == network.context


@pytest.mark.parametrize(("channels", "width"), [(4, 2), (8, 3), (3, 5), (8, 8), (5, 12)])
def test_the_consensus_of_training_is_the_defined_one_with_its_gradients(channels, width):
    torch.manual_seed(0)
    consensus = Consensus(ConsensusConfig(channels=(channels, 1)))
    for parameter in consensus.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    scores = torch.rand(2, 3, 4, 5, width, requires_grad=True)
    weights, biases = list(consensus.weights), list(consensus.biases)
    expected, found = consensus(scores), two_layers(scores, weights, biases, torch.float32)
    torch.testing.assert_close(found, expected)
    inputs, direction = [scores, *consensus.parameters()], torch.rand_like(expected)
    for one, other in zip(
        *(torch.autograd.grad((x * direction).sum(), inputs) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    half = TrainingEngine().consensus(scores, consensus)
    assert (half - expected).abs().max() < 0.02 * expected.max()


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 4)])
def test_fast_upsampling_has_the_gradient_of_interpolation(size):
    upsample = FastUpsample()
    x = rand(0, 2, 3, *size).double().requires_grad_()
    weight = rand(1, 2, 3, 2 * size[0], 2 * size[1]).double()
    expected = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    found = upsample(x)
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad((values * weight).sum(), x)[0] for values in (found, expected))
    torch.testing.assert_close(*gradients)
    with torch.autocast("cpu", torch.bfloat16):
        assert upsample(x.bfloat16()).dtype == torch.bfloat16


def test_the_training_engine_prepares_a_copy_of_the_backbone():
    backbone = make_backbone(tiny_config().backbone)
    prepared = TrainingEngine().prepare(backbone)
    assert isinstance(prepared.upsample, FastUpsample) and not isinstance(backbone.upsample, FastUpsample)
    assert prepared.state_dict().keys() == backbone.state_dict().keys()
    images = rand(0, 1, 3, 48, 80)
    for ours, theirs in zip(prepared.eval()(images), backbone.eval()(images), strict=True):
        assert torch.equal(ours, theirs)


def test_the_papers_schedule():
    config = read_toml(TrainConfig, CONFIGS / "paper.toml")
    # 15,070 pairs, 16 per step.
    epoch = 942
    assert config.steps == 15 * epoch
    assert [config.rate(n * epoch) for n in (0, 4, 5, 10, 14)] == [0.01, 0.01, 0.005, 0.0025, 0.0025]
    assert read_toml(TrainConfig, CONFIGS / "published.toml").rate(0) == 0.001
    ours = read_toml(TrainConfig, CONFIGS / "default-1.toml")
    assert ours.rate(0) < ours.rate(ours.warm_up) == ours.learning_rate
    assert ours.rate(ours.steps) == pytest.approx(0, abs=1e-9)


def paper_run(folder, trunk, **changes) -> TrainConfig:
    network = NetworkConfig(
        preset="paper",
        backbone=ResNetConfig(channels=256),
        fine=FineConfig(reading="corner", query_share=0.5, subpixel=False),
    )
    return tiny_run(
        folder, network=network, trunk=trunk, pairs=2, points=16, steps=2, optimizer="adam", average=0.0, **changes
    )


@pytest.mark.parametrize("loss", ["paper", "published"])
def test_the_papers_network_trains_but_for_its_trunk(folder, tmp_path, loss):
    torch.manual_seed(0)
    trunk = ResNet(conv5=False)
    torch.save(trunk.state_dict() | {"fc.weight": torch.zeros(1)}, tmp_path / "resnet101.pth")
    train(paper_run(folder, str(tmp_path / "resnet101.pth"), loss=loss), tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["network"]
    for name, tensor in trunk.state_dict().items():
        assert torch.equal(state[f"backbone.trunk.{name}"], tensor), name
    fresh = dualrc.train.loop._network(paper_run(folder, str(tmp_path / "resnet101.pth"), loss=loss))
    moved = [n for n, p in fresh.named_parameters() if p.requires_grad and not torch.equal(p, state[n])]
    assert {name.split(".")[0] for name in moved} == {"backbone", "consensus"}


def test_the_papers_network_needs_its_trunk(folder):
    with pytest.raises(ConfigError, match="torchvision's file"):
        paper_run(folder, None)
    with pytest.raises(ConfigError, match="trunk needs a network with a ResNet"):
        tiny_run(folder, trunk="resnet101.pth")


@pytest.mark.parametrize("preset", ["ncnet", "sparse-ncnet"])
@pytest.mark.parametrize("loss", ["weak", "paper"])
def test_the_rivals_train_their_consensus(folder, tmp_path, preset, loss):
    """With a ResNet-50 from a safetensors file: the result can match, and a second run continues from it."""
    network = PRESETS[preset][0]
    network = replace(
        network,
        backbone=replace(network.backbone, network="resnet50", stride_on="1x1"),
        consensus=replace(network.consensus, initialization="identity"),
    )
    torch.manual_seed(0)
    trunk = ResNet("resnet50", stride_on="1x1")
    save_file(trunk.state_dict(), tmp_path / "trunk.safetensors")
    options = {"network": network, "loss": loss, "optimizer": "adam", "average": 0.0}
    config = tiny_run(folder, trunk=str(tmp_path / "trunk.safetensors"), pairs=2, points=16, steps=2, **options)
    figures = train(config, tmp_path / "run", device="cpu")
    assert all(np.isfinite(value) for value in figures.values())
    expected = {"positive", "negative"} if loss == "weak" else {"keypoint", "orthogonal"}
    assert figures.keys() == expected | {"loss", "within_8px", "within_16px", "within_32px"}
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["network"]
    for name, tensor in trunk.state_dict().items():
        assert torch.equal(state[f"backbone.trunk.{name}"], tensor), name
    fresh = dualrc.train.loop._network(config)
    learnt = {name: parameter for name, parameter in fresh.named_parameters() if parameter.requires_grad}
    assert all(name.startswith("consensus") for name in learnt)
    assert any(not torch.equal(parameter, state[name]) for name, parameter in learnt.items())
    matcher = dualrc.load(preset, weights=tmp_path / "run" / "weights.safetensors", device="cpu")
    assert len(matcher.match(texture(0, 96, 96), texture(0, 96, 96))) > 0


def test_losses_that_do_not_fit_the_network(folder):
    resnet = replace(PRESETS["ncnet"][0], backbone=TrunkConfig(network="resnet50"))
    with pytest.raises(ConfigError, match="two pairs per part"):
        tiny_run(folder, network=resnet, trunk="trunk.pth", loss="weak", pairs=1)
    with pytest.raises(ConfigError, match="no sub-pixel refinement"):
        dualrc.train.loop._network(tiny_run(folder, network=resnet, trunk="trunk.pth", loss="matching"))
    with pytest.raises(ConfigError, match="is a DualRC-Net"):
        dualrc.train.loop._network(tiny_run(folder, loss="weak", pairs=2))


def test_conv5_is_trained_if_the_trunk_ends_with_conv4(folder, tmp_path):
    torch.manual_seed(0)
    trunk = ResNet("resnet50")
    save_file(trunk.state_dict(), tmp_path / "trunk.safetensors")
    paper = PRESETS["paper"][0]
    network = replace(paper, backbone=ResNetConfig(kind="resnet50", fusion="e", channels=256))
    config = tiny_run(
        folder, network=network, trunk=str(tmp_path / "trunk.safetensors"), loss="paper", train_conv5=True
    )
    made = dualrc.train.loop._network(config)
    assert torch.equal(made.backbone.trunk.layer3[5].conv3.weight, trunk.layer3[5].conv3.weight)
    for name, parameter in made.backbone.trunk.named_parameters():
        assert parameter.requires_grad == name.startswith("layer4."), name
    with pytest.raises(DualRCError, match="layer4"):
        dualrc.train.loop._network(replace(config, train_conv5=False))
    with pytest.raises(ConfigError, match="train_conv5 needs"):
        replace(config, network=replace(network, backbone=ResNetConfig(kind="resnet50")))


def test_the_training_engine_computes_the_coarse_tensor():
    network = tiny_network(subpixel=False)
    features = [network.extract(rand(seed, 2, 3, 64, 64)) for seed in (0, 1)]
    expected = network.coarse_tensor(*features)
    network.engine = TrainingEngine()
    found = network.coarse_tensor(*features)
    assert torch.allclose(found, expected, rtol=0.1, atol=0.01 * expected.max().item())
    # The engine computes in bfloat16, so an equal result would mean that it was not used.
    assert not torch.equal(found, expected)


def test_the_training_engine_computes_the_context():
    torch.manual_seed(0)
    context = Context(ContextConfig(layers=1, width=32, heads=2), 8)
    torch.nn.init.normal_(context.out.weight, std=0.1)
    coarse, valid = (rand(0, 2, 8, 4, 6), rand(1, 2, 8, 5, 3)), (None, None)
    expected = Engine().context(context, coarse, valid)
    found = TrainingEngine().context(context, coarse, valid)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32 and not torch.equal(ours, theirs)
        assert (ours - theirs).abs().max() < 0.05 * (expected[0] - coarse[0]).abs().max()


def test_keypoint_losses_are_means_over_pairs(folder):
    network = tiny_network(subpixel=False)
    maker = PhotoPairs(read_photos([folder], canvas=160), size=64, points=20, motion=PhotoMotion(), device=CPU)
    batch = maker.make(4, torch.Generator().manual_seed(0))
    # One pair has no valid points.
    batch = replace(batch, valid=batch.valid & (torch.arange(4) != 1)[:, None])
    features = [network.extract(images) for images in (batch.images0, batch.images1)]
    for form in ("paper", "published"):
        found = keypoint_losses(network, *features, batch, form)
        totals = []
        for number in (0, 2, 3):
            valid = batch.valid[number]
            pair = [Features(coarse=f.coarse[number, None], fine=f.fine[number, None]) for f in features]
            points = batch.points0[number][valid], batch.points1[number][valid]
            totals.append(keypoint_losses(network, *pair, point_batch(*points), form).total)
        assert found.total.item() == pytest.approx(torch.stack(totals).mean().item())
        assert found.logged.keys() == {"keypoint", "orthogonal", "within_1px", "within_3px", "within_5px"}
    nothing = keypoint_losses(network, *features, replace(batch, valid=batch.valid & False), "paper")
    assert nothing.total == 0
    nothing.total.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in network.parameters())


def test_positions_that_are_not_valid_do_not_matter(folder):
    network = tiny_network(subpixel=False)
    maker = PhotoPairs(read_photos([folder], canvas=160), size=64, points=20, motion=PhotoMotion(), device=CPU)
    batch = maker.make(3, torch.Generator().manual_seed(0))
    features = [network.extract(images) for images in (batch.images0, batch.images1)]
    far = [torch.where(batch.valid[..., None], points, -1e5) for points in (batch.points0, batch.points1)]
    moved = replace(batch, points0=far[0], points1=far[1])
    assert not batch.valid.all()
    for form in ("paper", "published"):
        one, other = (keypoint_losses(network, *features, each, form) for each in (batch, moved))
        assert one.total.item() == other.total.item()
        assert {k: v.item() for k, v in one.logged.items()} == {k: v.item() for k, v in other.logged.items()}


def test_pairs_of_different_things_teach_only_distrust(folder):
    maker = PhotoPairs(
        read_photos([folder], canvas=160), size=64, points=40, motion=PhotoMotion(unrelated=0.25), device=CPU
    )
    batch = maker.make(8, torch.Generator().manual_seed(0))
    assert not batch.valid[:2].any()
    assert batch.absent0[:2].all() and batch.absent1[:2].all()
    assert torch.equal(batch.images1[:2], batch.images1[2:4])
    assert batch.valid[2:].any(1).all()


def test_still_pairs_only_shift(folder):
    motion = PhotoMotion(still=1.0, layers=0, unrelated=0.0)
    maker = PhotoPairs(read_photos([folder], canvas=160), size=96, points=60, motion=motion, device=CPU)
    batch = maker.make(6, torch.Generator().manual_seed(0))
    for number in range(6):
        shift = (batch.points1 - batch.points0)[number][batch.valid[number]]
        assert len(shift) > 20
        # Perspective causes small differences.
        assert shift.std(0).max() < 1.0
        assert shift.abs().max() < 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_photographs_of_many_gigabytes_are_picked_right_on_a_gpu():
    # More than 2^31 pixels.
    count, side = 2900, 512
    canvases = torch.zeros(count, 3, side, side, dtype=torch.uint8)
    canvases += torch.arange(count, dtype=torch.int64).remainder(251).to(torch.uint8)[:, None, None, None]
    photos = Photos(canvases=canvases, sizes=torch.full((count, 2), side), broken=())
    maker = PhotoPairs(photos, size=64, points=8, motion=PhotoMotion(), device=torch.device("cuda"))
    random = torch.Generator(device="cuda").manual_seed(0)
    index = torch.randint(count, (64,), generator=torch.Generator(device="cuda").manual_seed(0), device="cuda")
    picked, _ = maker._photos(64, random)
    assert torch.equal(picked[:, 0, 5, 7].long(), index % 251)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_batch_is_the_one_that_would_be_made(folder):
    device = torch.device("cuda")
    maker = PhotoPairs(read_photos([folder], canvas=160), size=64, points=8, motion=PhotoMotion(), device=device)
    recorded = Batches(TrainConfig(data=(PhotosConfig(paths=("a",)),), seed=3, pairs=4), [maker], device)
    for step in range(3):
        _, seed = recorded._draw(step, 0)
        made = maker.make(4, torch.Generator(device=device).manual_seed(seed))
        assert torch.allclose(recorded.get(step, [0]).images0, made.images0, atol=1e-5)
