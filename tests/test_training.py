"""Training: pairs with true correspondences, losses that fall, runs that can be resumed."""

import io
import tarfile

import numpy as np
import pytest
import torch
from conftest import texture, tiny_config
from PIL import Image
from torch.nn import functional as F

import dualrc.data.photos
from dualrc.config import from_dict, to_dict
from dualrc.data import PhotoPairs, read_photos
from dualrc.data.light import relight
from dualrc.data.photos import PhotoMotion
from dualrc.errors import ConfigError, DataError
from dualrc.train import TrainConfig, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve photographs of several sizes, and one that can't be read."""
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


@pytest.fixture
def unlit(monkeypatch):
    """Pairs without any change of light, so that colours can be compared."""
    monkeypatch.setattr(dualrc.data.photos, "relight", lambda images, random: images)


def color_error(batch, shift: float) -> float:
    """Median difference of colours between corresponding points, picture 1 read `shift` pixels aside."""
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


def test_what_a_layer_hides_is_absent(folder, unlit):
    """Nothing moves but the layers: background points correspond to themselves unless something is in front."""
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
    return TrainConfig(
        photos=(str(folder),), network=network, precision="float32", validate_every=3, **{**settings, **changes}
    )


def test_a_stopped_run_goes_on_as_if_never_stopped(folder, tmp_path):
    config = tiny_run(folder)
    whole = train(config, tmp_path / "whole", device="cpu")
    train(config, tmp_path / "parts", device="cpu", minutes=0)  # stops after one step
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
