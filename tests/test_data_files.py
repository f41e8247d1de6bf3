"""Tests of pairs files, and of batches from image pairs."""

import numpy as np
import pytest
import torch
from conftest import View, texture
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dualrc.data import PairsFileConfig, open_pairs
from dualrc.data.open import DataConfig
from dualrc.data.pairs import LazyPair, PairSample
from dualrc.data.pairsfile import PairLine, format_line, parse_line, read_pairs, write_pairs
from dualrc.data.views import CutConfig, FilePairs
from dualrc.errors import ConfigError, DataError
from dualrc.image import _DEVIATION, _MEAN
from dualrc.toml import from_dict

# Two images of the oracle's scene: red encodes X and green encodes Y, so colors give the position in the scene.
VIEW0 = View(160, 120)
VIEW1 = View(120, 150, origin=(30.0, -0.0), step=(1.0, 0.75))


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def common_points(count=400, seed=0):
    """Return corresponding points of VIEW0 and VIEW1, all inside of both."""
    places = np.random.default_rng(seed).uniform((31, 1), (148, 110), (count, 2))
    return VIEW0.from_scene(places), VIEW1.from_scene(places)


def scene_of(images, points):
    """Return the positions in the scene that the colors (b 3 h w) at points (b n 2) encode."""
    colors = images[:, :2] * torch.tensor(_DEVIATION[:2]).view(1, 2, 1, 1) + torch.tensor(_MEAN[:2]).view(1, 2, 1, 1)
    size = images.shape[3]
    unit = (points + 0.5) / size * 2 - 1
    read = torch.nn.functional.grid_sample(colors, unit[:, None], align_corners=False, padding_mode="border")
    return (read[:, :, 0].transpose(1, 2) * 255 - 8) / 240 * 400


def check_same_places(batch):
    """A color level is 1.7 units of the scene: single points are inaccurate, but the mean of many is accurate."""
    there0, there1 = scene_of(batch.images0, batch.points0), scene_of(batch.images1, batch.points1)
    difference, place = (there0 - there1)[batch.valid], batch.points0[batch.valid]
    assert difference.norm(dim=1).max() < 4
    # Neither a shift nor a change of scale, in any half of the image.
    for axis in (0, 1):
        for half in (place[:, axis] < 48, place[:, axis] >= 48):
            assert half.sum() > 10 and difference[half].mean(0).abs().max() < 0.35


@pytest.fixture
def folder(tmp_path):
    """Write images and a pairs file with one pair."""
    Image.fromarray(VIEW0.image()).save(tmp_path / "a.png")
    Image.fromarray(VIEW1.image(1)).save(tmp_path / "b.png")
    points0, points1 = common_points()
    line = PairLine(name0="a.png", name1="b.png", points0=points0, points1=points1)
    write_pairs(tmp_path / "pairs.txt", [format_line(line)])
    return tmp_path


def maker_of(folder, *, size=96, points=64, **config):
    config = PairsFileConfig(file=str(folder / "pairs.txt"), images=str(folder), **config)
    return open_pairs(config, size=size, points=points).training


# The format.


def test_a_published_line():
    line = parse_line("a/1.jpg b/2.jpg 1 2 3.5 4 5 6 7 8\n")
    assert (line.name0, line.name1) == ("a/1.jpg", "b/2.jpg")
    assert line.points0.tolist() == [[1, 2], [5, 6]] and line.points1.tolist() == [[3.5, 4], [7, 8]]
    assert len(parse_line("a.jpg b.jpg").points0) == 0
    # Numbers in excess of a multiple of four are part of a name.
    assert parse_line("1 2 0 0 1 1").name1 == "2"


def test_names_with_spaces_are_told_by_their_endings():
    line = parse_line("my photo 1.jpg the other one.PNG 1 2 3 4")
    assert (line.name0, line.name1) == ("my photo 1.jpg", "the other one.PNG")
    for text in ("my photo other 1 2 3 4", "a.jpg b.jpg c.jpg 1 2 3 4", "a.jpg 1 2 3 4", "", "a.jpg b.jpg 1 2 3"):
        with pytest.raises(DataError, match="image0 image1 x0 y0 x1 y1"):
            parse_line(text)
    with pytest.raises(DataError, match="finite"):
        parse_line("a.jpg b.jpg 1 2 nan 4")


@given(
    st.lists(st.tuples(*[st.floats(-1e4, 1e4)] * 4), max_size=5),
    st.sampled_from(["a.jpg", "x y.jpg", "0001/2.png", "1", "é.tif"]),
)
def test_what_is_written_is_read(values, name):
    array = np.array(values).reshape(-1, 4)
    pair = PairLine(name0=name, name1="b.jpg", points0=array[:, :2], points1=array[:, 2:])
    again = parse_line(format_line(pair))
    assert (again.name0, again.name1) == (name, "b.jpg")
    assert np.abs(again.points0 - pair.points0).max(initial=0) <= 5.1e-4
    assert np.abs(again.points1 - pair.points1).max(initial=0) <= 5.1e-4


@pytest.mark.parametrize("name", ["two words", "line\nbreak.jpg", "two  spaces.jpg", "a.jpg b.jpg", ""])
def test_names_that_could_not_be_read_are_not_written(tmp_path, name):
    pair = PairLine(name0=name, name1="b.jpg", points0=np.ones((1, 2)), points1=np.ones((1, 2)))
    (tmp_path / "pairs.txt").write_text("old")
    with pytest.raises(DataError, match="rename"):
        write_pairs(tmp_path / "pairs.txt", map(format_line, [pair]))
    assert (tmp_path / "pairs.txt").read_text() == "old"


def test_files_that_are_missing_or_empty(tmp_path):
    with pytest.raises(DataError, match="image folder"):
        read_pairs(tmp_path / "pairs.txt", tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist"):
        read_pairs(tmp_path / "pairs.txt", tmp_path)
    (tmp_path / "pairs.txt").write_text("\n \n")
    with pytest.raises(DataError, match="empty"):
        read_pairs(tmp_path / "pairs.txt", tmp_path)
    (tmp_path / "pairs.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="as text"):
        read_pairs(tmp_path / "pairs.txt", tmp_path)


# Batches.


@pytest.mark.parametrize("crop", [None, 1.0, 0.4])
def test_points_show_the_same_place_to_a_fraction_of_a_pixel(folder, crop):
    maker = maker_of(folder, crop=crop)
    batch = maker.make(6, random())
    assert batch.images0.shape == batch.images1.shape == (6, 3, 96, 96)
    assert batch.valid.shape == (6, 64) and batch.valid.sum(1).min() >= 32
    check_same_places(batch)
    if crop == 0.4:
        assert batch.absent0.any() and batch.absent1.any()
    assert not (batch.valid & (batch.absent0 | batch.absent1)).any()
    maker.close()


def test_whole_images_are_stretched_by_the_pixel_convention(folder):
    maker = maker_of(folder, points=400)
    batch = maker.make(1, random())
    points0, _ = common_points()
    expected = (points0 + 0.5) * np.array([96 / 160, 96 / 120]) - 0.5
    found = batch.points0[0][batch.valid[0]].numpy()
    nearest = np.abs(found[:, None] - expected[None]).max(2).min(1)
    assert nearest.max() < 1e-3 and len(found) == 400
    maker.close()


def test_hidden_points_and_those_that_the_cut_takes_are_absent():
    points0, points1 = common_points()
    hidden0 = np.array([[5.0, 5.0], [6.0, 90.0]])
    sample = PairSample(image0=VIEW0.image(), image1=VIEW1.image(), points0=points0, points1=points1, hidden0=hidden0)
    source = [LazyPair(name="the pair", load=lambda: sample)]
    maker = FilePairs(source, CutConfig(), size=96, points=64)
    batch = maker.make(1, random())
    expected = torch.tensor((hidden0 + 0.5) * np.array([96 / 160, 96 / 120]) - 0.5).float()
    assert torch.allclose(batch.points0[batch.absent0], expected)
    assert not batch.absent1.any() and batch.valid.sum() == 62
    maker.close()
    maker = FilePairs(source, CutConfig(crop=0.3), size=96, points=64)
    for seed in range(5):
        batch = maker.make(1, random(seed))
        # A point that is absent in the view of image 1 lies outside of that view.
        lost = scene_of(batch.images0, batch.points0)[batch.absent0]
        corners = scene_of(batch.images1, torch.tensor([[[0.0, 0.0], [95.0, 95.0]]]))[0]
        known = torch.tensor(VIEW0.to_scene(hidden0)).float()
        # Points that the sample itself marks as occluded are excluded.
        far = (lost[:, None] - known).norm(dim=2).min(1).values > 3
        inner = (lost > corners[0] + 2).all(1) & (lost < corners[1] - 2).all(1)
        assert not (inner & far).any()
    maker.close()


def equal(a, b):
    return all(map(torch.equal, a.tensors(), b.tensors()))


@pytest.mark.parametrize("light", [False, True])
def test_the_same_generator_state_makes_the_same_batch(folder, light):
    maker, generator = maker_of(folder, crop=0.5, light=light), random()
    batches = [maker.make(2, generator) for _ in range(4)]
    assert not equal(batches[0], batches[1])
    again = maker_of(folder, crop=0.5, light=light)
    generator = random()
    states = []
    for batch in batches:
        states.append(generator.get_state())
        assert equal(again.make(2, generator), batch)
    # The batches prepared ahead are no longer valid.
    generator.set_state(states[1])
    assert equal(maker.make(2, generator), batches[1])
    # Other code uses the generator in between.
    for _ in range(6):
        generator.set_state(states[2])
        assert equal(maker.make(2, generator), batches[2])
        torch.rand(3, generator=generator)
    maker.close()
    again.close()


def test_what_can_t_be_used_is_left_out_by_name_and_the_rest_goes_on(folder):
    good = (folder / "pairs.txt").read_text().strip()
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:900])
    (folder / "text.png").write_text("hello")
    numbers = good.split(" ", 2)[2]
    bad = [
        f"a.png missing.png {numbers}",
        f"cut.png b.png {numbers}",
        f"text.png b.png {numbers}",
        "a.png b.png 1 2 3 4",
        "a.png b.png 1 2 3 four",
        "a.png b.png " + "900 900 900 900 " * 20,
    ]
    (folder / "pairs.txt").write_text("\n".join([*bad[:3], good, *bad[3:]]))
    maker = maker_of(folder)
    batch = maker.make(16, random())
    assert batch.valid.sum(1).min() == 64
    assert set(maker.skipped) == {f"pairs.txt, line {n}" for n in (1, 2, 3, 5, 6, 7)}
    assert "missing.png does not exist" in maker.skipped["pairs.txt, line 1"]
    assert "1 corresponding points are too few" in maker.skipped["pairs.txt, line 5"]
    assert "0 corresponding points inside of the images" in maker.skipped["pairs.txt, line 7"]
    assert maker.report().startswith("Left out as unusable: 6 (pairs.txt, line ")
    # Pairs that are known to be broken do not change the batches.
    assert equal(batch, maker.make(16, random()))
    maker.close()
    (folder / "pairs.txt").write_text("\n".join(bad))
    maker = maker_of(folder)
    with pytest.raises(
        DataError, match=r"None of the 6 pairs can be used; correct the data\. The first, pairs.txt, line"
    ):
        maker.make(2, random())
    maker.close()


def test_turned_photographs_are_read_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = Image.fromarray(VIEW0.image())
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.png", exif=exif)
    Image.fromarray(VIEW1.image()).save(tmp_path / "b.png")
    points0, points1 = common_points()
    write_pairs(
        tmp_path / "pairs.txt", [format_line(PairLine(name0="a.png", name1="b.png", points0=points0, points1=points1))]
    )
    maker = maker_of(tmp_path)
    batch = maker.make(1, random())
    check_same_places(batch)
    maker.close()


def test_large_images_and_greys_are_images_too(tmp_path):
    Image.fromarray(texture(0, 700, 500)[:, :, 0]).save(tmp_path / "a.png")
    Image.fromarray(texture(1, 300, 33)).save(tmp_path / "b.png")
    points = np.random.default_rng(0).uniform(0, 32, (50, 2))
    write_pairs(
        tmp_path / "pairs.txt", [format_line(PairLine(name0="a.png", name1="b.png", points0=points, points1=points))]
    )
    maker = maker_of(tmp_path, size=64, crop=0.5, light=True)
    batch = maker.make(2, random())
    assert batch.images0.isfinite().all() and batch.valid.sum(1).min() >= 8
    maker.close()


# Configs.


def test_configs_are_told_apart_by_their_kind():
    from dataclasses import make_dataclass

    holder = make_dataclass("Holder", [("data", tuple[DataConfig, ...])], frozen=True)
    values = [
        {"kind": "pairs", "file": "p.txt", "images": "i", "crop": 0.5},
        {"kind": "scenes", "pool": 3, "image_size": [64, 64]},
        {"kind": "colmap", "model": "m", "images": "i", "min_overlap": 0.5},
        {"kind": "megadepth", "root": "r", "split": "validation"},
        {"kind": "rgbd", "root": "r", "light": True},
    ]
    read = from_dict(holder, {"data": values}).data
    assert [config.kind for config in read] == [value["kind"] for value in values]
    assert read[0] == PairsFileConfig(file="p.txt", images="i", crop=0.5)
    assert read[1].image_size == (64, 64)
    with pytest.raises(ConfigError, match="Unknown setting"):
        from_dict(holder, {"data": [{"kind": "rgbd", "root": "r", "file": "x"}]})


def test_settings_without_meaning(folder):
    for settings in ({"crop": 0.0}, {"crop": 1.5}, {"min_points": 0}):
        with pytest.raises(ConfigError):
            maker_of(folder, **settings)
    with pytest.raises(ConfigError, match="multiple of 8"):
        maker_of(folder, size=100, light=True)
