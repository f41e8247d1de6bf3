"""Tests of distillation: features of a frozen ResNet-50 as targets of coarse features."""

import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, texture, tiny_config
from PIL import Image
from safetensors.torch import load_file, save_file

import dualrc.train.loop
from dualrc.data import PairBatch, PhotosConfig, open_pairs
from dualrc.errors import ConfigError, WeightsError
from dualrc.losses import distillation_loss
from dualrc.model.backbone import ResNet
from dualrc.model.checkpoint import load_weights, save_weights
from dualrc.model.dualrc import make_network
from dualrc.ops.training import TrainingEngine
from dualrc.train import TrainConfig, train
from dualrc.train.config import TeacherConfig
from dualrc.train.step import TrainingStep
from dualrc.train.teacher import Teacher, centered_conv4, make_teacher


@pytest.fixture(scope="module")
def trunk():
    torch.manual_seed(0)
    network = ResNet("resnet50")
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return network


@pytest.fixture(scope="module")
def file(trunk, tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    share = make_teacher(trunk, [torch.rand(2, 3, 64, 64) for _ in range(3)], path, channels=6)
    assert 0.1 < share < 1
    return path


def test_the_loss_is_zero_where_half_of_a_unit_vector_is_the_target():
    target = torch.nn.functional.normalize(torch.randn(2, 3, 4, 5), dim=1)
    own = torch.nn.functional.normalize(torch.randn(2, 7, 4, 5), dim=1)
    assert distillation_loss(torch.cat([own, target], 1) * 5, target).item() == pytest.approx(0, abs=1e-6)
    # Without own features, the unit vector is the target: (1 - sqrt(1/2))^2.
    alone = distillation_loss(torch.cat([own * 0, target], 1), target)
    assert alone.item() == pytest.approx((1 - 0.5**0.5) ** 2, abs=1e-6)
    # Opposite features: (sqrt(1/2) + sqrt(1/2))^2.
    assert distillation_loss(torch.cat([own, -target], 1), target).item() == pytest.approx(2, abs=1e-5)


def test_a_teacher_gives_unit_vectors_that_move_with_the_image(file):
    teacher = Teacher(TeacherConfig(file=str(file)))
    images = torch.rand(1, 3, 480, 480)
    targets = teacher(images)
    assert targets.shape == (1, 6, 30, 30)
    assert torch.allclose(targets.norm(dim=1), torch.ones(1, 30, 30), atol=1e-5)
    moved = teacher(images[:, :, 16:, 32:])
    # Cells whose receptive field does not reach a border.
    assert torch.allclose(moved[:, :, 13:16, 13:15], targets[:, :, 14:17, 15:17], atol=1e-3)
    # A mirrored image has mirrored centers of cells: the content of a cell is centered, not in its corner.
    left, right = torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, 64, 64)
    left[..., 24], right[..., 39] = 1, 1
    strongest = [(teacher(x) - teacher(x * 0)).square().sum(1)[0, 2].argmax().item() for x in (left, right)]
    assert strongest[0] + strongest[1] == 3


def test_the_batch_norms_of_a_teacher_are_folded(file, trunk):
    """Its features are those of the network in the file, projected."""
    teacher, images = Teacher(TeacherConfig(file=str(file))), torch.rand(1, 3, 64, 64)
    found = teacher(images)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in teacher.modules())
    plain = centered_conv4(trunk, images)
    features = torch.einsum("kc,bchw->bkhw", teacher.projection, plain - teacher.mean[:, None, None])
    smooth = torch.nn.functional.avg_pool2d(features, 3, 1, 1, count_include_pad=False)
    assert torch.allclose(found, torch.nn.functional.normalize(smooth, dim=1), atol=5e-3)


def test_a_file_without_a_projection_is_refused(trunk, tmp_path):
    save_file(trunk.state_dict(), tmp_path / "trunk.safetensors")
    with pytest.raises(WeightsError, match="make-teacher"):
        Teacher(TeacherConfig(file=str(tmp_path / "trunk.safetensors")))


def test_a_teacher_needs_the_matching_loss(file, photos):
    with pytest.raises(ConfigError, match="matching"):
        TrainConfig(data=(PhotosConfig(paths=(str(photos),)),), teacher=TeacherConfig(file=str(file)), loss="paper")


def test_batches_have_the_images_before_the_change_of_light_if_asked(photos):
    config = PhotosConfig(paths=(str(photos),), canvas=128)
    plain, clean = (open_pairs(config, size=64, points=8, clean=asked).training for asked in (False, True))
    batch, full = (maker.make(2, torch.Generator().manual_seed(0)) for maker in (plain, clean))
    assert batch.clean0 is None and len(full.tensors()) == len(batch.tensors()) + 2
    assert torch.equal(batch.images0, full.images0) and not torch.equal(full.images0, full.clean0)
    assert torch.equal(PairBatch.of(full.tensors()).swapped().clean1, full.clean0)


def test_training_with_a_teacher_approaches_its_features(file, photos, tmp_path):
    network = tiny_config(subpixel_hidden=16)
    config = TrainConfig(
        data=(PhotosConfig(paths=(str(photos),), canvas=128),),
        network=replace(network, backbone=replace(network.backbone, coarse_channels=24)),
        teacher=TeacherConfig(file=str(file), weight=30.0),
        size=64,
        pairs=4,
        points=16,
        steps=30,
        warm_up=1,
        learning_rate=3e-3,
        precision="float32",
        average=0.5,
        validate_every=30,
        validation_batches=1,
    )
    first = train(replace(config, steps=1, validate_every=1), tmp_path / "first", device="cpu")
    last = train(config, tmp_path / "last", device="cpu")
    assert last["teacher"] < 0.8 * first["teacher"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_the_parts_of_a_step_compile_without_a_break(file, photos):
    """Each part is one graph, with the same loss and gradients."""
    config = tiny_config(subpixel_hidden=16)
    config = replace(config, backbone=replace(config.backbone, coarse_channels=24, contrast=True))
    torch.manual_seed(0)
    network = make_network(config).train()
    network.engine = TrainingEngine()
    network.backbone = network.engine.prepare(network.backbone)
    data = PhotosConfig(paths=(str(photos),), canvas=128)
    settings = TrainConfig(data=(data,), teacher=TeacherConfig(file=str(file)), precision="float32")
    batch = open_pairs(data, size=64, points=8, clean=True).training.make(2, torch.Generator().manual_seed(0))
    results = []
    for compiled in (False, True):
        step = TrainingStep(network, settings, Teacher(settings.teacher))
        if compiled:
            step.extract, step.loss, step.teach = (
                torch.compile(part, dynamic=False, fullgraph=True, backend="aot_eager")
                for part in (step.extract, step.loss, step.teach)
            )
        loss, logged = step(1, *batch.tensors())
        results.append([loss, *logged.values(), *torch.autograd.grad(loss, list(network.parameters()))])
    for one, other in zip(*results, strict=True):
        # The consensus has bfloat16 gradients.
        assert (one - other).abs().max() <= 1e-2 * other.abs().max() + 1e-6


def test_weights_to_start_from_are_enlarged_without_changing_what_they_do(tmp_path, photos):
    torch.manual_seed(1)
    old = make_network(tiny_config())
    save_weights(old, tmp_path / "old.safetensors")
    backbone = old.config.backbone
    depths = (*backbone.depths[:3], backbone.depths[3] + 2)
    wanted = replace(
        old.config, backbone=replace(backbone, depths=depths, coarse_channels=backbone.coarse_channels + 8)
    )
    config = TrainConfig(
        data=(PhotosConfig(paths=(str(photos),)),), network=wanted, start_from=str(tmp_path / "old.safetensors")
    )
    new = dualrc.train.loop._started(config).eval()
    assert new.config == wanted
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        coarse, fine = load_weights(tmp_path / "old.safetensors").backbone(images)
        larger, same = new.backbone(images)
    assert torch.allclose(fine, same, atol=1e-6)
    assert torch.allclose(coarse, larger[:, : coarse.shape[1]], atol=1e-6)
    assert 0 < larger[:, coarse.shape[1] :].norm() < 0.5 * coarse.norm()
    # A smaller config does not shrink the network.
    smaller = replace(config, network=replace(wanted, backbone=replace(backbone, depths=(0, 0, 0, 0))))
    assert dualrc.train.loop._started(smaller).config == old.config


def test_whitening_scales_the_components(trunk, tmp_path):
    batches, rows = [torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))], {}
    for whitening in (0.0, 0.5):
        path = tmp_path / f"{whitening}.safetensors"
        make_teacher(trunk, batches, path, channels=6, whitening=whitening)
        rows[whitening] = load_file(path)["projection"]
    assert torch.allclose(rows[0.0] @ rows[0.0].T, torch.eye(6), atol=1e-5)
    # The last component has the largest variance and keeps its scale; the others are enlarged.
    lengths = rows[0.5].norm(dim=1)
    assert lengths[-1] == pytest.approx(1, abs=1e-5) and (lengths.diff() < 0).all()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number in range(12):
        Image.fromarray(texture(number, 128, 128)).save(folder / f"{number:02}.png")
    return folder


def test_the_script_writes_a_teacher(trunk, photos, tmp_path):
    save_file(trunk.state_dict(), tmp_path / "trunk.safetensors")
    command = [sys.executable, ROOT / "scripts/make-teacher", tmp_path / "trunk.safetensors", photos]
    command += ["--out", tmp_path / "teacher.safetensors", "--count", "6", "--size", "96"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "6 photographs" in answer.stdout
    assert Teacher(TeacherConfig(file=str(tmp_path / "teacher.safetensors"))).projection.shape == (128, 1024)


def test_the_benchmark_times_a_step_and_its_parts(file, photos, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("train_step_script", ROOT / "benchmarks" / "train_step.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    options = ["--device", "cpu", "--compile", "off", "--size", "64", "--pairs", "2", "--rounds", "1", "--repeat", "1"]
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--photos", str(photos), "--canvas", "128", *options])
    before = torch.get_float32_matmul_precision()
    script.main()
    torch.set_float32_matmul_precision(before)
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("making pairs", "losses", "training, pairs a second"))
    assert "2 pairs of 64 px on cpu" in printed and "teacher" not in printed
