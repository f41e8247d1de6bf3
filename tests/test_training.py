"""Tests of training: correct correspondences, decreasing losses, and runs that resume."""

import io
import json
import math
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import GOLDEN, point_batch, rand, texture, tiny_config, tiny_network
from PIL import Image
from test_golden import COUNTS, golden, reference
from torch.nn import functional as F

import dualrc.data.photos
from dualrc.data import PhotoPairs, PhotosConfig, read_photos
from dualrc.data.light import _compressed, relight
from dualrc.data.photo_pairs import _foreshortening, _Layer, _read, _with_mosaics, _with_smaller
from dualrc.data.photos import PhotoMotion
from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.losses import keypoint_losses
from dualrc.losses.keypoint import KeypointMaps, keypoint_loss, keypoint_maps, orthogonal_loss
from dualrc.model.checkpoint import convert_published, load_weights, save_weights
from dualrc.toml import from_dict, read_toml, to_dict
from dualrc.train import TrainConfig, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write twelve photos of several sizes, and one that cannot be read."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(12):
        Image.fromarray(texture(number, 150 + 7 * number, 140)).save(folder / f"{number:02}.png")
    (folder / "broken.jpg").write_bytes(b"nothing")
    return folder


def test_photos_come_from_folders_and_tar_files(folder, tmp_path):
    photos = read_photos([folder], canvas=256)
    assert photos.canvases.shape == (12, 3, 256, 256)
    assert photos.sizes[1].tolist() == [157, 140]
    assert [name.endswith("broken.jpg") for name in photos.broken] == [True]
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
        member = tarfile.TarInfo("notes.txt")
        archive.addfile(member, io.BytesIO())
    same = read_photos([tmp_path / "shard.tar"], canvas=256)
    assert torch.equal(same.canvases, photos.canvases)
    assert same.broken == ("broken.jpg",)
    assert len(read_photos([folder], canvas=100, limit=3).sizes) == 3


def test_no_photos_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(DataError, match="check the paths"):
        read_photos([tmp_path])
    with pytest.raises(DataError, match="does not exist"):
        read_photos([tmp_path / "missing"])
    (tmp_path / "notes.tar").write_text("not a tar file")
    with pytest.raises(DataError, match="neither a folder nor a complete tar file"):
        read_photos([tmp_path / "notes.tar"])


def test_a_tar_file_cut_short_is_an_error_with_a_remedy(folder, tmp_path):
    with tarfile.open(tmp_path / "shard.tar.gz", "w:gz") as archive:
        archive.add(folder, "photos")
    data = (tmp_path / "shard.tar.gz").read_bytes()
    (tmp_path / "shard.tar.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="complete tar file"):
        read_photos([tmp_path / "shard.tar.gz"])


def test_damaged_images_in_a_tar_file_are_left_out(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300 * 300)
    bomb = io.BytesIO()
    Image.new("RGB", (640, 640)).save(bomb, "PNG")
    whole = (folder / "00.png").read_bytes()
    contents = {"bomb.png": bomb.getvalue(), "cut.png": whole[: len(whole) // 2], "empty.jpg": b"", "good.png": whole}
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere.png"
        archive.addfile(link)
    photos = read_photos([tmp_path / "shard.tar"], canvas=256)
    assert photos.broken == ("bomb.png", "cut.png", "empty.jpg", "link.png")
    assert len(photos.sizes) == 1


def test_photos_are_taken_only_so_far_ahead():
    taken = []
    hold = threading.Event()
    items = (taken.append(number) or number for number in range(20))
    with ThreadPoolExecutor(2) as pool:
        results = dualrc.data.photos._in_order(pool, lambda x: hold.wait(10) and x * x, items, most=5)
        threading.Timer(0.05, hold.set).start()
        assert next(results) == 0
        assert taken == [0, 1, 2, 3, 4]
        assert list(results) == [number**2 for number in range(1, 20)]


@pytest.fixture
def unlit(monkeypatch):
    """Make pairs without photometric changes, so that colors can be compared."""
    monkeypatch.setattr(dualrc.data.photo_pairs, "light", lambda images, *numbers: images)


def color_error(batch, shift: float) -> float:
    """Return the median color difference between corresponding points, with image 1 read `shift` pixels aside."""
    size = batch.images0.shape[3]

    def read(images, points):
        return F.grid_sample(images, ((points + 0.5) / size * 2 - 1)[:, None], align_corners=False)[:, :, 0]

    error = (read(batch.images0, batch.points0) - read(batch.images1, batch.points1 + shift)).abs().mean(1)
    return float(error[batch.valid].median())


def test_corresponding_points_show_the_same(folder, unlit):
    maker = PhotoPairs(read_photos([folder], canvas=256), size=160, points=200, motion=PhotoMotion(), device=CPU)
    batch = maker.make(12, torch.Generator().manual_seed(0))
    assert 0.3 < batch.valid.float().mean() < 0.95
    assert not (batch.valid & (batch.absent0 | batch.absent1)).any()
    assert batch.absent0.any()
    assert batch.absent1.any()
    assert color_error(batch, 0) < 0.6 * min(color_error(batch, -0.5), color_error(batch, 0.5))
    inside = (batch.points1[batch.valid] >= 0) & (batch.points1[batch.valid] <= 159)
    assert inside.all()


@pytest.mark.parametrize(
    "motion",
    [
        PhotoMotion(tilt_deg=75, tilted=1, mosaic=0, layers=0, octaves=0, still=0, shift=0.05),
        PhotoMotion(repeated=1, mosaic=0, layers=0, tilt_deg=40, tilted=0.5, shift=0.05),
    ],
    ids=["tilted", "repeated"],
)
def test_wide_pairs_show_the_same(folder, unlit, motion):
    maker = PhotoPairs(read_photos([folder], canvas=256), size=160, points=400, motion=motion, device=CPU)
    batch = maker.make(16, torch.Generator().manual_seed(0))
    assert batch.valid.float().mean() > 0.2
    assert color_error(batch, 0) < 0.7 * min(color_error(batch, -0.5), color_error(batch, 0.5))


def test_a_tilt_shrinks_one_direction():
    """Seen from 60 degrees, a plane has half its length in the direction of the tilt; its area is normalized."""
    matrices = _foreshortening(torch.tensor([[math.radians(60), 0], [0, math.radians(60)], [0, 0]]))
    expected = [torch.diag(torch.tensor(d)) for d in ([2**0.5, 0.5**0.5], [0.5**0.5, 2**0.5], [1.0, 1.0])]
    torch.testing.assert_close(matrices, torch.stack(expected))


def test_other_sensors_change_tones_and_not_places():
    images = torch.from_numpy(texture(0, 64, 64)).permute(2, 0, 1)[None].repeat(40, 1, 1, 1) / 255
    plain, other = (relight(images, torch.Generator().manual_seed(0), share) for share in (0.0, 1.0))
    assert other.min() >= 0
    assert other.max() <= 1
    gray = images[0].mean(0).flatten()

    def correlation(lit):
        rows = [torch.stack([gray, image.mean(0).flatten()]) for image in lit]
        return torch.stack([torch.corrcoef(pair)[0, 1] for pair in rows]).nan_to_num()

    assert (correlation(plain) < -0.2).float().mean() < 0.1
    assert 0.1 < (correlation(other) < -0.2).float().mean() < 0.6


def test_what_a_layer_hides_is_absent(folder, unlit):
    """Only the layers move: background points correspond to themselves unless a layer occludes them."""
    still = PhotoMotion(rotation_deg=0, any_rotation=0, octaves=0, perspective=0, shift=0.3, bend=0, layers=1)
    maker = PhotoPairs(read_photos([folder], canvas=256), size=96, points=400, motion=still, device=CPU)
    batch = maker.make(20, torch.Generator().manual_seed(3))
    assert color_error(batch, 0) < 0.5 * color_error(batch, 1)


def test_batches_repeat(folder):
    maker = PhotoPairs(read_photos([folder], canvas=256), size=64, points=10, motion=PhotoMotion(), device=CPU)
    one, two = (maker.make(2, torch.Generator().manual_seed(5)) for _ in range(2))
    other = maker.make(2, torch.Generator().manual_seed(6))
    assert torch.equal(one.images0, two.images0)
    assert torch.equal(one.points1, two.points1)
    assert not torch.equal(one.images0, other.images0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_batches_are_the_same(folder, backend):
    motion = PhotoMotion(tilt_deg=60, tilted=0.5, repeated=0.5, unrelated=0.25)
    maker = PhotoPairs(
        read_photos([folder], canvas=128), size=64, points=21, motion=motion, device=CPU, sensors=0.3, clean=True
    )
    expected = maker.make(4, torch.Generator().manual_seed(1))
    maker._compute = torch.compile(maker._batch, dynamic=False, fullgraph=True, backend=backend)
    found = maker.make(4, torch.Generator().manual_seed(1))
    for one, other in zip(found.tensors(), expected.tensors(), strict=True):
        assert one.stride() == other.stride()
        # Compression rounds, so a few blocks may differ by a level.
        assert ((one.float() - other.float()).abs() > 1e-3).float().mean() < 1e-3


@pytest.mark.parametrize(("mosaic", "layers", "points"), [(0.0, 0, 1), (1.0, 1, 2), (0.3, 3, 7)])
def test_batches_of_any_number_of_mosaics_layers_and_points(folder, mosaic, layers, points):
    motion = PhotoMotion(mosaic=mosaic, layers=layers)
    maker = PhotoPairs(read_photos([folder], canvas=128), size=64, points=points, motion=motion, device=CPU)
    batch = maker.make(3, torch.Generator().manual_seed(0))
    assert batch.images0.shape == batch.images1.shape == (3, 3, 64, 64)
    assert batch.points0.shape == batch.points1.shape == (3, points, 2)
    assert batch.valid.shape == batch.absent0.shape == batch.absent1.shape == (3, points)
    assert batch.images0.isfinite().all() and not batch.absent0[:, points // 2 :].any()


def test_mosaics_are_nine_tiles_and_come_first():
    tiles = torch.arange(18, dtype=torch.uint8)[:, None, None, None].expand(18, 3, 16, 16)
    photos, sizes = torch.full((1, 3, 24, 24), 99, dtype=torch.uint8), torch.tensor([[20.0, 24.0]])
    canvases, sizes = _with_mosaics(tiles, photos, sizes)
    assert sizes.tolist() == [[48, 48], [48, 48], [20, 24]]
    assert canvases[1, 0, 8::16, 8::16].tolist() == [[9, 10, 11], [12, 13, 14], [15, 16, 17]]
    assert (canvases[2, :, :24, :24] == 99).all() and (canvases[2, :, 24:] == 0).all()


@pytest.mark.parametrize("spacing", [1.0, 2.0, 3.0])
def test_where_a_photo_is_scaled_down_its_smaller_versions_are_read(spacing):
    """Each version is read as if it were alone, up to the borders of the photo."""
    image, places = rand(0, 1, 3, 32, 32), 31 * torch.rand(1, 2, 50, 2, generator=torch.Generator().manual_seed(0))
    layer = _Layer(_with_smaller(image), torch.tensor([[[[32.0, 32.0]]]]), torch.eye(3).expand(1, 2, 3, 3))
    factor = {1.0: 1, 2.0: 2, 3.0: 4}[spacing]
    small = F.avg_pool2d(image, factor)
    unit = (places + 0.5) / 32 * 2 - 1
    expected = F.grid_sample(small, unit, padding_mode="border", align_corners=False)
    torch.testing.assert_close(_read(layer, places, torch.full((1, 2), spacing)), expected, atol=1e-4, rtol=1e-4)


def test_blocks_are_transformed_and_rounded():
    """A known cosine survives compression, and a faint one is lost."""
    column = torch.cos(math.pi / 8 * (torch.arange(16) % 8 + 0.5) * 2)
    for amplitude, kept in ((0.3, True), (0.001, False)):
        image = (0.5 + amplitude * column).expand(1, 3, 16, 16)
        found = _compressed(image, torch.full((1, 1, 1, 1), 0.05))
        spread = (found - found.mean()).abs().max() / amplitude
        assert (0.8 < spread < 1.2) if kept else spread < 1e-3


def test_light_changes_colours_and_not_places():
    images = torch.from_numpy(texture(0, 64, 64)).permute(2, 0, 1)[None].expand(16, -1, -1, -1) / 255
    lit = relight(images, torch.Generator().manual_seed(0))
    assert lit.shape == images.shape
    assert lit.min() >= 0
    assert lit.max() <= 1
    flat, lit_flat = images.mean(1).flatten(1), lit.mean(1).flatten(1)
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(flat.numpy(), lit_flat.numpy(), strict=True)]
    assert np.median(correlation) > 0.6
    assert (lit - images).abs().mean() > 0.05


def tiny_run(folder, **changes) -> TrainConfig:
    settings = {"size": 64, "pairs": 2, "points": 32, "steps": 6, "warm_up": 2, "validation_batches": 1}
    network = tiny_config(subpixel_hidden=16)
    data = PhotosConfig(paths=(str(folder),), canvas=160)
    return TrainConfig(data=(data,), network=network, precision="float32", validate_every=3, **{**settings, **changes})


def test_a_stopped_run_goes_on_as_if_never_stopped(folder, tmp_path):
    config = tiny_run(folder)
    whole = train(config, tmp_path / "whole", device="cpu")
    # Stops after one step.
    train(config, tmp_path / "parts", device="cpu", minutes=0)
    pieces = train(config, tmp_path / "parts", device="cpu")
    assert pieces == pytest.approx(whole, rel=1e-5)
    assert (tmp_path / "parts" / "weights.safetensors").exists()


def test_a_checkpoint_of_another_config_is_refused(folder, tmp_path):
    train(tiny_run(folder), tmp_path, device="cpu", minutes=0)
    with pytest.raises(ConfigError, match="another config"):
        train(tiny_run(folder, seed=1), tmp_path, device="cpu")


def test_a_run_is_described_by_toml(folder):
    config = tiny_run(folder)
    assert from_dict(TrainConfig, to_dict(config)) == config


def test_a_run_leaves_its_config_and_versions_and_says_what_it_left_out(folder, tmp_path, caplog):
    config = tiny_run(folder)
    train(config, tmp_path, device="cpu", minutes=0)
    assert read_toml(TrainConfig, tmp_path / "config.toml") == config
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions.keys() == {"dualrc", "torch", "numpy", "lightning", "python", "platform", "device", "processes"}
    assert versions["device"] == "cpu"
    assert f"too small: 1 ({folder / 'broken.jpg'})" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data", ()),
        ("size", 100),
        ("size", 48),
        ("pairs", 0),
        ("points", 0),
        ("steps", 0),
        ("validate_every", 0),
        ("validation_batches", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("clip", -1.0),
        ("warm_up", -1),
        ("weight_decay", -0.1),
        ("average", 1.0),
    ],
)
def test_settings_without_meaning_are_refused_by_name(folder, name, value):
    with pytest.raises(ConfigError, match=name):
        replace(tiny_run(folder), **{name: value})


@pytest.mark.parametrize("device", ["tpux", "meta", "cuda:99"])
def test_a_device_that_is_not_there(folder, tmp_path, device):
    with pytest.raises(ConfigError, match=f"The device '{device}' cannot be used .*; choose cpu, cuda or mps") as info:
        train(tiny_run(folder), tmp_path, device=device)
    assert "\n" not in str(info.value)


def test_lightning_missing(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.fabric", None)
    with pytest.raises(ConfigError, match=r"pip install 'dualrc\[train\]'"):
        train(tiny_run(folder), tmp_path, device="cpu")


@pytest.mark.parametrize("content", [b"", b"nothing", None])
def test_a_broken_checkpoint_is_named(folder, tmp_path, content):
    if content is None:
        torch.save({"step": 3}, tmp_path / "checkpoint.pt")
    else:
        (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(DataError, match=r"checkpoint\.pt is damaged .*; delete it, or choose another folder") as info:
        train(tiny_run(folder), tmp_path, device="cpu")
    assert "\n" not in str(info.value)


def test_out_that_can_not_be_a_folder(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OutputError, match=r"Cannot create the folder .*; choose another one"):
            train(tiny_run(folder), out, device="cpu")


def test_a_network_without_subpixel_refinement_can_not_be_trained(folder, tmp_path):
    network = tiny_network(subpixel=False)
    save_weights(network, tmp_path / "plain.safetensors")
    with pytest.raises(ConfigError, match=r"plain\.safetensors has no sub-pixel"):
        train(tiny_run(folder, start_from=str(tmp_path / "plain.safetensors")), tmp_path / "run", device="cpu")


def maps(scores, target) -> KeypointMaps:
    return KeypointMaps(scores=torch.tensor(scores), target=torch.tensor(target))


def test_the_papers_losses_of_known_maps():
    perfect = maps([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert keypoint_loss(perfect, perfect) == 0
    assert orthogonal_loss(perfect, perfect) == 0
    # S - S_gt is (0 0 0), (1 -1 0), of norm sqrt 2; both keypoints match the first cell, so S S^T is all ones.
    twice = maps([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert keypoint_loss(twice, perfect) == pytest.approx(2**0.5)
    assert orthogonal_loss(perfect, twice) == pytest.approx(2**0.5)
    # The norm is that of the whole matrix: two rows of norms 3 and 4 give 5, not 7.
    far = maps([[3.0, 0.0], [0.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]])
    assert keypoint_loss(far, far) == 10
    assert orthogonal_loss(far, far) == pytest.approx(2 * (81 + 256) ** 0.5)


def test_a_target_is_bilinear_and_blurred():
    network = tiny_network()
    features = network.extract(rand(0, 1, 3, 64, 64))
    # The center of cell (5, 3); half a cell to the right of it.
    points = torch.tensor([[21.5, 13.5], [23.5, 13.5]])
    batch = point_batch(points, points)
    one, other = keypoint_maps(network, features, features, batch)
    assert torch.equal(one.target, other.target)
    target = one.target.view(2, 16, 16) * 16
    kernel = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]])
    assert torch.equal(target[0, 2:5, 4:7], kernel)
    assert torch.equal(target[1, 2:5, 4:8], (F.pad(kernel, (0, 1)) + F.pad(kernel, (1, 0))) / 2)
    assert target.sum((1, 2)).tolist() == [16, 16]
    loss = keypoint_losses(network, features, features, batch, "paper")
    assert loss.total == loss.logged["keypoint"] + 0.05 * loss.logged["orthogonal"]
    loss.total.backward()
    assert all(p.grad.isfinite().all() for p in network.consensus.parameters())


@pytest.mark.skipif(
    not (GOLDEN / "reference.npz").exists(), reason=f"golden vectors are not at {GOLDEN}: ../shared is absent"
)
@pytest.mark.parametrize("tag", COUNTS)
def test_the_published_loss(tag, tmp_path):
    torch.save(golden().checkpoint(tag), tmp_path / "published.pth.tar")
    convert_published(tmp_path / "published.pth.tar", tmp_path / "paper.safetensors")
    # The file has hundreds of megabytes.
    (tmp_path / "published.pth.tar").unlink()
    network = load_weights(tmp_path / "paper.safetensors")
    (tmp_path / "paper.safetensors").unlink()
    # The vectors put the corner of the first pixel at (0, 0), our convention its center.
    points = [torch.from_numpy(reference()[f"{tag}_{name}"][:, :2]) - 0.5 for name in ("src", "dst")]
    with torch.inference_mode():
        features = [network.extract(golden().image(*image)) for image in (golden().IMAGE_A, golden().IMAGE_B)]
        loss = keypoint_losses(network, *features, point_batch(*points), "published")
    values = [float(value) for value in (loss.total, loss.logged["keypoint"], loss.logged["orthogonal"])]
    assert values == pytest.approx(reference()[f"{tag}_loss"], rel=1e-6)
