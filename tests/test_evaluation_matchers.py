"""Matchers under evaluation: how they are named, made and checked."""

import numpy as np
import pytest
from conftest import texture, tiny_network
from evaluation_data import run_evaluation, write_hpatches, write_matchers
from PIL import Image

from dualrc.errors import ConfigError, WeightsError
from dualrc.evaluation.matchers import MatcherSettings, make_matchers
from dualrc.model.checkpoint import file_hash, save_weights


@pytest.fixture
def pictures(tmp_path):
    picture = texture(0, 96, 80)
    for name, pixels in (("a.png", picture), ("b.png", picture[3:, 5:])):
        Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path / "a.png", tmp_path / "b.png"


def test_sift_stands_for_two_matchers(pictures):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    ratio, mutual = make_matchers(["sift"], MatcherSettings())
    assert (ratio.name, mutual.name) == ("sift-ratio", "sift-mutual")
    for matcher in (ratio, mutual):
        found = matcher.match(*pictures)
        assert len(found) > 10
        shift = found.points0 - found.points1
        assert np.median(shift, axis=0) == pytest.approx([5, 3], abs=0.1)
        assert (np.diff(found.scores) <= 0).all()
        assert found.info["seen1"] == (91, 77)
        assert found.info["seconds"] > 0
    assert len(ratio.match(*pictures)) <= len(mutual.match(*pictures))


def test_sift_on_resized_pictures_speaks_the_pictures_own_pixels(pictures):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    (matcher,) = make_matchers(["sift-ratio"], MatcherSettings(size=192))
    found = matcher.match(*pictures)
    assert found.info["seen0"] == (192, 160)
    assert found.size0 == (96, 80)
    assert np.median(found.points0 - found.points1, axis=0) == pytest.approx([5, 3], abs=0.3)


def test_sift_on_a_picture_without_features(tmp_path):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    Image.new("RGB", (64, 48), "gray").save(tmp_path / "flat.png")
    for matcher in make_matchers(["sift"], MatcherSettings()):
        assert len(matcher.match(tmp_path / "flat.png", tmp_path / "flat.png")) == 0


def test_dualrc_with_a_weights_file(tmp_path):
    save_weights(tiny_network(), tmp_path / "tiny.safetensors")
    root = write_hpatches(tmp_path / "h", ["v_wall"])
    settings = {"weights": tmp_path / "tiny.safetensors", "device": "cpu", "size": 64, "top": 20}
    content, text = run_evaluation("hpatches", (root,), tmp_path / "out", tmp_path, ["dualrc"], **settings)
    result = content["results"][0]
    assert result.config["weights"] == file_hash(tmp_path / "tiny.safetensors")
    assert result.config["matcher"]["size"] == 64
    assert result.cost.resolution == "64x48"
    assert result.cost.seconds_per_pair > 0
    assert result.figures[0].groups["overall"].matches == 20
    assert not result.failures
    # Other weights are another config: their matches go into another store.
    save_weights(tiny_network(seed=1), tmp_path / "tiny.safetensors")
    _, text = run_evaluation("hpatches", (root,), tmp_path / "out", tmp_path, ["dualrc"], **settings)
    assert "made with another config" in text
    assert len(list((tmp_path / "out").glob("matches-dualrc-*.sqlite"))) == 2


def test_weights_that_are_missing_stop_the_run_at_once(tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        make_matchers(["dualrc"], MatcherSettings(weights=tmp_path / "nowhere.safetensors"))


def test_names_that_are_none(tmp_path):
    file = write_matchers(tmp_path)
    (tmp_path / "wrong.py").write_text("this is not Python")
    (tmp_path / "text.txt").write_text("")
    for spec, words in (
        ("orb", "There is no matcher 'orb'"),
        (f"{tmp_path}/nowhere.py:match", "does not exist"),
        (f"{file}:absent", "has no function 'absent'"),
        (f"{file}:np", "has no function 'np'"),
        (f"{tmp_path}/wrong.py:match", "can't be imported"),
        (f"{tmp_path}/text.txt:match", "not a Python file"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_matchers([spec], MatcherSettings())
    with pytest.raises(ConfigError, match="twice"):
        make_matchers([f"{file}:broken", f"{file}:broken"], MatcherSettings())


def test_a_function_may_return_lists_or_tensors(tmp_path, pictures):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def lists(a, b):\n    return [[1, 2]], [[3, 4]], [0.5]\n"
        "def tensors(a, b):\n    return torch.ones(4, 2), torch.ones(4, 2, requires_grad=True), torch.ones(4)\n"
    )
    lists, tensors = make_matchers([f"{tmp_path}/own.py:lists", f"{tmp_path}/own.py:tensors"], MatcherSettings())
    assert lists.match(*pictures).points1.tolist() == [[3, 4]]
    assert len(tensors.match(*pictures)) == 4
