"""Tests of matchers in evaluations: names, construction and checks."""

import io
import sys
from typing import ClassVar

import numpy as np
import pytest
from conftest import texture, tiny_network
from evaluation_data import run_evaluation, write_hpatches, write_matchers
from PIL import Image
from rich.console import Console

from dualrc.collection.store import MatchStore
from dualrc.errors import ConfigError, DataError, DualRCError, ImageError, OutputError, WeightsError
from dualrc.evaluation import evaluate
from dualrc.evaluation.export import Pair, export
from dualrc.evaluation.matchers import MatcherSettings, make_matchers
from dualrc.matches import Matches
from dualrc.model.checkpoint import file_hash, save_weights


@pytest.fixture
def images(tmp_path):
    image = texture(0, 96, 80)
    for name, pixels in (("a.png", image), ("b.png", image[3:, 5:])):
        Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path / "a.png", tmp_path / "b.png"


def test_sift_stands_for_two_matchers(images):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    ratio, mutual = make_matchers(["sift"], MatcherSettings())
    assert (ratio.name, mutual.name) == ("sift-ratio", "sift-mutual")
    for matcher in (ratio, mutual):
        found = matcher.match(*images)
        assert len(found) > 10
        shift = found.points0 - found.points1
        assert np.median(shift, axis=0) == pytest.approx([5, 3], abs=0.1)
        assert (np.diff(found.scores) <= 0).all()
        assert found.info["seen1"] == (91, 77)
        assert found.info["seconds"] > 0
    assert len(ratio.match(*images)) <= len(mutual.match(*images))


def test_sift_on_resized_images_speaks_the_images_own_pixels(images):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    (matcher,) = make_matchers(["sift-ratio"], MatcherSettings(size=192))
    found = matcher.match(*images)
    assert found.info["seen0"] == (192, 160)
    assert found.size0 == (96, 80)
    assert np.median(found.points0 - found.points1, axis=0) == pytest.approx([5, 3], abs=0.3)


def test_sift_on_an_image_without_features(tmp_path):
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
    # Other weights mean another config, and another store.
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
        (f"{tmp_path}/wrong.py:match", "cannot be imported"),
        (f"{tmp_path}/text.txt:match", "not a Python file"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            make_matchers([spec], MatcherSettings())
    with pytest.raises(ConfigError, match="twice"):
        make_matchers([f"{file}:broken", f"{file}:broken"], MatcherSettings())


def test_a_function_may_return_lists_or_tensors(tmp_path, images):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def lists(a, b):\n    return [[1, 2]], [[3, 4]], [0.5]\n"
        "def tensors(a, b):\n    return torch.ones(4, 2), torch.ones(4, 2, requires_grad=True), torch.ones(4)\n"
    )
    lists, tensors = make_matchers([f"{tmp_path}/own.py:lists", f"{tmp_path}/own.py:tensors"], MatcherSettings())
    assert lists.match(*images).points1.tolist() == [[3, 4]]
    assert len(tensors.match(*images)) == 4


OWN = """
from __future__ import annotations

from dataclasses import dataclass

from beside import POINTS


@dataclass
class Config:
    count: int = 2


def match(a, b):
    from lazy import SCORES

    return POINTS, POINTS, SCORES[: Config().count]
"""


def test_a_file_may_hold_dataclasses_and_import_what_stands_beside_it(tmp_path, images):
    before = list(sys.path)
    for folder, count in (("one", 2), ("two", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(
            OWN.replace("= 2", f"= {count}").replace("beside", f"beside_{folder}")
        )
        (tmp_path / folder / f"beside_{folder}.py").write_text(f"POINTS = [[1, 2]] * {count}")
        (tmp_path / folder / "lazy.py").write_text("SCORES = [0.5, 0.4]")
        (matcher,) = make_matchers([f"{tmp_path}/{folder}/own.py:match"], MatcherSettings())
        assert len(matcher.match(*images)) == count
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys\nsys.exit('give a\\ncheckpoint')", "SystemExit: give a checkpoint"),
        ("raise RuntimeError", r"\(RuntimeError\)"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def match(:", "SyntaxError"),
    ],
)
def test_files_that_cannot_be_imported_are_told_in_one_line(tmp_path, text, words):
    (tmp_path / "own.py").write_text(text)
    before, known = list(sys.path), set(sys.modules)
    with pytest.raises(DataError, match=rf"own\.py cannot be imported.*{words}.*correct the file") as caught:
        make_matchers([f"{tmp_path}/own.py:match"], MatcherSettings())
    assert "\n" not in str(caught.value)
    assert sys.path == before
    assert not any(name.startswith("dualrc_matcher_own") for name in set(sys.modules) - known)


RETURNED = {
    "no_scores": "points, points, None",
    "flat_scores": "points, points, 0.5",
    "column_scores": "points, points, points[:, :1]",
    "flat_points": "points[:, 0], points[:, 0], scores",
    "three_axes": "points[None], points[None], scores",
    "fewer": "points, points[:2], scores",
    "ragged": "[[1, 2], [3]], points, scores",
    "words": "'points', points, scores",
    "two": "points, points",
    "none": "None",
    "a_number": "3",
    "a_dictionary": "{'points0': points, 'points1': points, 'scores': scores}",
    "sudden_end": "sys.exit(1)",
    "failing": "1 / 0",
}


def test_whatever_a_function_does_fails_its_pair_only(tmp_path):
    lines = ["import sys", "import numpy as np"]
    for name, expression in RETURNED.items():
        lines += [f"def {name}(a, b):", "    points, scores = np.ones((3, 2)), np.ones(3)"]
        lines += ["    if b.stem != '2':", "        return points, points, scores", f"    return {expression}"]
    (tmp_path / "own.py").write_text("\n".join(lines))
    root = write_hpatches(tmp_path / "h", ["v_wall"])
    matchers = tuple(f"{tmp_path}/own.py:{name}" for name in RETURNED)
    options = {"roots": (root,), "matchers": matchers, "out": tmp_path / "out"}
    console = Console(file=io.StringIO())
    results = evaluate("hpatches", screen=console, messages=console, **options)["results"]
    for name, result in zip(RETURNED, results, strict=True):
        assert list(result.failures) == ["v_wall/1.png v_wall/2.png"]
        assert f"own:{name} " in next(iter(result.failures.values()))
        assert result.figures[0].groups["overall"].pairs == 5


@pytest.mark.parametrize("kind", [kind for kind in DualRCError.__subclasses__() if kind is not OutputError])
def test_every_error_of_a_pair_is_counted_and_the_run_goes_on(tmp_path, kind):
    class Forgetful:
        name = "forgetful"
        config: ClassVar = {}

        def match(self, path0, path1):
            if path1.stem == "2":
                raise kind("There is not enough memory; give a smaller size.")
            points = np.ones((3, 2))
            return Matches(points0=points, points1=points, scores=points[:, 0], size0=(9, 9), size1=(9, 9))

    pairs = [
        Pair(name0="1", name1=str(k), path0=tmp_path / "1.png", path1=tmp_path / f"{k}.png", group="g") for k in (2, 3)
    ]
    console = Console(file=io.StringIO())
    path = export(pairs, Forgetful(), tmp_path / "out", config={}, top=10, console=console)
    with MatchStore(path) as store:
        assert store.failures() == {("1", "2"): "There is not enough memory; give a smaller size."}
        assert len(store.get("1", "3")) == 3


def test_sift_that_opencv_gives_up_on_is_an_error_of_the_image(images):
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    (matcher,) = make_matchers(["sift-ratio"], MatcherSettings())

    class NoMemory:
        def detectAndCompute(self, image, mask):  # noqa: N802
            raise cv2.error("Failed to allocate\n9 bytes")

    matcher._sift = NoMemory()
    with pytest.raises(ImageError, match=r"cannot describe .*a\.png \(.*9 bytes\); pass a smaller size"):
        matcher.match(*images)
