"""Tests of NCNet: against its published code, through `convert_published`, and its parts, entry by entry."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import ncnet_data as data
import numpy as np
import pytest
import torch
from conftest import DEVICE, ENGINES, make_engine, plain_consensus, rand, texture, tiny_matcher
from PIL import Image
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from dualrc.bench.methods import IMAGES, BenchSettings, Stage, Task, make_method
from dualrc.bench.results import describe_search, stage_work
from dualrc.cli import app
from dualrc.config import PRESETS, ConsensusConfig
from dualrc.data.pairs import PairBatch
from dualrc.evaluation.matchers import MatcherSettings, make_matchers
from dualrc.image import Scale, resize, to_tensor
from dualrc.losses import weak_losses
from dualrc.matcher import Matcher
from dualrc.matcher.features import stack
from dualrc.measure import held, in_new_process, peak, reset_peak
from dualrc.model import checkpoint
from dualrc.model.checkpoint import convert_published, load_weights, save_weights
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import max_pool, normalize
from dualrc.model.dualrc import make_network
from dualrc.model.ncnet import NCNet, SparseNCNet
from dualrc.model.network import Features
from dualrc.ops import memory
from dualrc.pixels import pixel_grid

CPU_ENGINES = [name for name in ENGINES if not name.startswith("triton")]


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(data.FILE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Return the converted checkpoints by the kernels of the consensus."""
    folder, trunk, found = tmp_path_factory.mktemp("ncnet"), data.trunk_state(), {}
    torch.save(data.checkpoint("places", trunk), folder / "ncnet.pth.tar")
    config = convert_published(folder / "ncnet.pth.tar", folder / "ncnet.safetensors")
    assert config == PRESETS["ncnet"][0]
    found["places"] = load_weights(folder / "ncnet.safetensors")
    for path in folder.iterdir():
        path.unlink()  # a hundred megabytes each
    for tag in ("three", "five"):  # the same without the files
        content = data.checkpoint(tag, trunk)
        config, state = checkpoint._converted(content["args"], content["state_dict"], "")
        assert (config.consensus.kernel_sizes, config.consensus.channels) == data.CONSENSUS[tag]
        found[tag] = make_network(config)
        checkpoint._fill(found[tag], state, "")
    return found


def coarser(network, **changes) -> NCNet:
    """Return the same weights at stride 16, without pooling."""
    config = network.config
    backbone, ncnet = replace(config.backbone, stride=16), replace(config.ncnet, pool=1, **changes)
    made = make_network(replace(config, backbone=backbone, ncnet=ncnet))
    made.load_state_dict(network.state_dict())
    return made


def assert_close(values, expected, tolerance=2e-5):
    assert tuple(values.shape) == expected.shape
    assert np.abs(values.numpy() - expected).max() <= tolerance * np.abs(expected).max()


@torch.inference_mode()
@pytest.mark.parametrize("stride", [8, 16])
def test_features(networks, stride):
    network = networks["places"] if stride == 8 else coarser(networks["places"])
    assert_close(network.extract(data.image(*data.IMAGE_A)).fine[0, data.CHANNELS], golden()[f"features_{stride}"])


# The C kernels cover the consensus of the model for places; torch runs the others.
CASES = [("places", name) for name in CPU_ENGINES]
CASES += [(tag, name) for tag in ("three", "five") for name in ("definition", "torch")]


@torch.inference_mode()
@pytest.mark.parametrize("limit", [2**29, 2**18])
@pytest.mark.parametrize(("tag", "engine"), CASES)
def test_tensor_and_matches(networks, tag, limit, engine):
    network = networks[tag]
    network.engine = make_engine(engine)
    features = [network.extract(data.image(*image)) for image in (data.IMAGE_A, data.IMAGE_B)]
    with memory.working_memory(limit):
        assert_close(network.coarse_tensor(*features)[0], golden()[f"{tag}_2_tensor"])
        found = network.match(*features)
    assert_matches(found, golden()[f"{tag}_2_matches"])


@torch.inference_mode()
@pytest.mark.parametrize("engine", [name for name in ENGINES if name.startswith("triton")])
@pytest.mark.parametrize("half", [False, *([True] if DEVICE == "cuda" else [])])
def test_the_tensor_in_triton(engine, half):
    """Triton agrees with the definition, on a GPU or interpreted; repeated on a GPU, because graphs are captured."""
    config = PRESETS["ncnet"][0]
    network = NCNet(config, backbone=PatchBackbone(), consensus=Consensus(ConsensusConfig())).eval()
    # On the CPU, because convolutions of a GPU may round float32 to TF32.
    features = [network.extract(rand(seed, 1, 3, 64, 48)) for seed in (0, 1)]
    expected, matches = network.coarse_tensor(*features)[0], network.match(*features)
    network.to(DEVICE)
    network.engine = make_engine(engine)
    network.engine.warm_up(network, torch.float32)
    for _ in range(4 if DEVICE == "cuda" else 1):
        features = [network.extract(rand(seed, 1, 3, 64, 48).to(DEVICE)) for seed in (0, 1)]
        if half:
            features = [Features(coarse=f.coarse.half(), fine=f.fine.half()) for f in features]
        assert_close(network.coarse_tensor(*features)[0].cpu(), expected.numpy(), 1e-2 if half else 1e-4)
        assert len(network.match(*features).scores) == pytest.approx(len(matches.scores), abs=3 * half)


@torch.inference_mode()
@pytest.mark.parametrize("softmax", [False, True])
def test_without_pooling(networks, softmax):
    network = coarser(networks["places"], softmax=softmax)
    features = [network.extract(data.image(*image)) for image in (data.IMAGE_A, data.IMAGE_B)]
    assert_close(network.coarse_tensor(*features)[0], golden()["places_1_tensor"])
    assert_matches(network.match(*features), golden()["places_1_matches" + "_softmax" * softmax])


def test_the_weak_loss(networks):
    """The loss of two pairs, and of the same pairs with their images 0 exchanged."""
    network = coarser(networks["places"])
    images = [torch.cat([data.image(96, 96, seed) for seed in seeds]) for seeds in ((3, 4), (5, 6))]
    points, yes = torch.zeros(2, 1, 2), torch.ones(2, 1, dtype=torch.bool)
    with torch.no_grad():
        features = [network.extract(image) for image in images]
    truth = {"points0": points, "points1": points, "valid": yes, "absent0": ~yes, "absent1": ~yes}
    losses = weak_losses(network, *features, PairBatch(images0=images[0], images1=images[1], **truth))
    assert losses.total.item() == pytest.approx(golden()["weak_loss"].item(), abs=1e-6)
    losses.total.backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.consensus.parameters())
    network.zero_grad(set_to_none=True)


def assert_matches(found, expected):
    # The vectors put the corner of the first pixel at (0, 0), our convention its center.
    ours = np.concatenate([found.points0.numpy(), found.points1.numpy()], axis=1) + 0.5
    assert len(ours) == len(expected)
    by_place = {tuple(np.round(row[:4], 3).tolist()): row[4] for row in expected.astype(np.float64)}
    assert {*map(tuple, ours.tolist())} == by_place.keys()
    for place, score in zip(ours.tolist(), found.scores.tolist(), strict=True):
        assert score == pytest.approx(by_place[tuple(place)], rel=2e-5)
    assert (found.scores.diff() <= 0).all()


def test_pooling_takes_the_largest_of_whole_cells():
    scores = rand(0, 1, 5, 4, 3, 4)
    pooled = max_pool(scores, 2)
    assert pooled.shape == (1, 2, 2, 1, 2)
    for a, b, d in np.ndindex(2, 2, 2):
        block = scores[0, 2 * a : 2 * a + 2, 2 * b : 2 * b + 2, :2, 2 * d : 2 * d + 2]
        assert pooled[0, a, b, 0, d] == block.max()


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_relocalization_finds_the_best_of_the_cells(engine):
    """Compared with a search cell by cell, for maps whose last row and column belong to no coarse cell."""
    fine0, fine1 = normalize(rand(1, 2, 6, 5, 7)), normalize(rand(2, 2, 6, 4, 6))
    pair, index0, index1 = torch.tensor([0, 1, 1]), torch.tensor([4, 0, 5]), torch.tensor([2, 3, 5])
    found = make_engine(engine).relocalize((fine0, fine1), pair, (index0, index1), 2, soft=False)
    for number, (p, one, other) in enumerate(zip(pair, index0, index1, strict=True)):
        cells0 = [(int(one) % 3 * 2 + x, int(one) // 3 * 2 + y) for y in (0, 1) for x in (0, 1)]
        cells1 = [(int(other) % 3 * 2 + x, int(other) // 3 * 2 + y) for y in (0, 1) for x in (0, 1)]
        products = {(a, b): float(fine0[p, :, a[1], a[0]] @ fine1[p, :, b[1], b[0]]) for a in cells0 for b in cells1}
        best = max(products, key=products.__getitem__)
        assert tuple(found[0][number].tolist()) == best[0] and tuple(found[1][number].tolist()) == best[1]


def tiny(preset: str, **ncnet):
    """Return the network of a preset on a ResNet-50, with random weights."""
    config = PRESETS[preset][0]
    config = replace(
        config,
        backbone=replace(config.backbone, network="resnet50"),
        consensus=ConsensusConfig(),
        ncnet=replace(config.ncnet, **ncnet),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make_network(config)


class PatchBackbone(nn.Module):
    """Features that discriminate positions without training: positive parts of random projections of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", rand(3, 256, 3, 8, 8))

    def forward(self, images):
        return F.conv2d(images, self.kernel - self.kernel.mean((2, 3), keepdim=True), stride=8).relu()


@pytest.fixture(scope="module", params=["ncnet", "sparse-ncnet"])
def matcher(request):
    config = PRESETS[request.param][0]
    kind = NCNet if request.param == "ncnet" else SparseNCNet
    network = kind(config, backbone=PatchBackbone(), consensus=plain_consensus())
    return Matcher(network, PRESETS[request.param][1], device="cpu")


@pytest.fixture(scope="module")
def image():
    return texture(0, 208, 160)


def test_an_image_matches_itself_and_its_shift(matcher, image):
    same = matcher.match(image, image)
    assert len(same) >= 13 * 10 and np.mean(np.abs(same.points0 - same.points1).max(1) < 1) > 0.9
    assert (np.diff(same.scores) <= 0).all() and same.info["network"]["ncnet"]["kind"] == matcher.network.config.preset
    shifted = matcher.match(image[:, :176], image[:, 32:])
    move = shifted.top(40).points0 - shifted.top(40).points1
    assert np.abs(np.median(move, axis=0) - (32, 0)).max() < 1
    assert len(matcher.match(image, image, top=7)) == 7
    # Points are those of cells of 8 pixels; the soft relocalization of Sparse-NCNet moves them by up to one.
    if matcher.network.config.preset == "ncnet":
        assert {*(same.points0.flatten() % 8).tolist()} == {3.5}


def test_batches_masks_points_and_warps(matcher, image):
    pairs = [(image, image[::-1].copy()), (image, image)]
    alone = [matcher.match(*pair) for pair in pairs]
    features = [[matcher.features(one).maps for one in pair] for pair in pairs]
    sides = [stack([pair[side] for pair in features]) for side in (0, 1)]
    with torch.inference_mode():
        together = matcher.network.match(*sides)
    assert [int((together.pair == number).sum()) for number in (0, 1)] == [len(found) for found in alone]
    assert np.allclose(together.scores[together.pair == 1].numpy(), alone[1].scores, rtol=1e-5)
    mask = np.zeros(image.shape[:2], bool)
    mask[:, :96] = True
    inside = matcher.match(image, image, mask0=mask)
    assert len(inside) > 0 and (inside.points0[:, 0] < 96).all()
    assert np.mean(np.abs(inside.points0 - inside.points1).max(1)[:60] < 1) > 0.9
    inside = matcher.match(image, image, mask1=mask)
    assert len(inside) > 0 and (inside.points1[:, 0] < 96).all()
    asked = np.array([[20.0, 30.0], [150.0, 99.0], [-9.0, 5.0]])
    found = matcher.match_points(image, image, asked)
    assert np.abs(found.points1[:2] - asked[:2]).max() < 1.5 and np.isnan(found.points1[2]).all()
    warp = matcher.warp(image, image)
    sure = warp.certainty > 0
    assert sure.mean() > 0.8 and np.median(np.abs(warp.points1 - pixel_grid((208, 160))).max(2)[sure]) < 1


def test_matchers_resize_as_their_networks_were_published(matcher):
    """Networks with the paper's backbone see images without antialiasing; `default` sees smoothed ones."""
    noise = np.random.default_rng(0).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    smoothed, published = (resize(to_tensor(noise)[None], (96, 64), antialias=flag)[0] for flag in (True, False))
    for one, expected in ((matcher, published), (tiny_matcher(), smoothed)):
        seen = one.features(noise, size=96).pixels.permute(2, 0, 1)
        assert (seen.float() - expected).abs().max() <= 0.5
    assert (smoothed - published).abs().max() > 50


def test_features_of_one_map_are_counted_once():
    network = tiny("ncnet")
    features = Matcher(network, PRESETS["ncnet"][1], device="cpu").features(texture(0, 64, 64))
    assert features.bytes == 1024 * 8 * 8 * 4 + 3 * 64 * 64  # and the image


@pytest.mark.parametrize("preset", ["ncnet", "sparse-ncnet"])
def test_weights_files_evaluation_and_commands(preset, image, tmp_path):
    """A network can be saved, loaded by its preset, matched by the command line, and evaluated with another."""
    save_weights(tiny(preset), tmp_path / "own.safetensors", dtype=torch.float16)
    for name in ("a.png", "b.png"):
        Image.fromarray(image).save(tmp_path / name)
    command = ["match", "a.png", "b.png", "--preset", preset, "--weights", "own.safetensors", "--device", "cpu"]
    done = CliRunner().invoke(app, [str(tmp_path / part) if "." in part else part for part in command])
    assert done.exit_code == 0, done.output
    (one,) = make_matchers([str(tmp_path / "own.safetensors")], MatcherSettings(device="cpu", size=96))
    assert one.name == "own" and len(one.match(tmp_path / "a.png", tmp_path / "b.png")) > 10
    settings = MatcherSettings(preset=preset, weights=tmp_path / "own.safetensors", device="cpu", size=96)
    (named,) = make_matchers(["dualrc"], settings)
    assert named.name == preset


@pytest.mark.parametrize("preset", ["ncnet", "sparse-ncnet"])
def test_every_stage_of_the_benchmark_runs(preset, tmp_path):
    """With random weights; there is no fine search to describe, but work to count."""
    save_weights(tiny(preset), tmp_path / "own.safetensors")
    settings = BenchSettings(sizes=((96, 64),), preset=preset, weights=tmp_path / "own.safetensors", batch=2)
    for name in IMAGES:
        Image.fromarray(texture(0, 96, 64)).save(tmp_path / name)
    method = make_method(Task(settings=settings, device="cpu", size=(96, 64), folder=tmp_path))
    for run in (*method.stages.values(), *method.memory_stages.values()):
        assert run() is not None
    assert describe_search(method) is None
    work = stage_work(method, None)
    assert all(part.operations > 0 and part.bytes > 0 for part in work.values())
    pairs = 4 * 6 * 4 * 6 * (2 if preset == "sparse-ncnet" else 16)  # products of cells; of NCNet before pooling
    assert work[Stage.COARSE].operations > 2 * 1024 * pairs


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are Linux's")
@pytest.mark.parametrize("preset", ["ncnet", "sparse-ncnet"])
def test_memory_of_a_pair(preset):
    """The estimate covers the measured memory, and is not far above it."""
    measured, least = in_new_process(measure_memory, preset)
    assert measured < least < 2 * measured + 64 * 2**20


def measure_memory(preset):
    cpu, image = torch.device("cpu"), texture(1, 320, 256)
    torch.set_num_threads(1)
    scale = Scale(image_size=(320, 256), input_size=(320, 256))
    matcher = Matcher(tiny(preset), PRESETS[preset][1], device="cpu")
    matcher.budget.total = least = matcher.budget.least((scale, scale))
    matcher.match(image[:64, :64], image[:64, :64])
    reset_peak(cpu)
    before = held(cpu)
    matcher.match(image, image)
    return peak(cpu) - before, least
