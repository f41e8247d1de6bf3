"""Tests against the published implementation, through `convert_published` and the network."""

import importlib.util
from functools import cache

import numpy as np
import pytest
import torch
from conftest import ENGINES, GOLDEN, make_engine

from dualrc.matcher import load
from dualrc.model.checkpoint import convert_published, load_weights
from dualrc.ops import memory

pytestmark = pytest.mark.skipif(
    not (GOLDEN / "reference.npz").exists(), reason=f"golden vectors are not at {GOLDEN}: ../shared is absent"
)
COUNTS = {"c1024": 77, "c256": 31}


@cache
def golden():
    spec = importlib.util.spec_from_file_location("golden", GOLDEN / "golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def reference() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "reference.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="session", params=COUNTS)
def converted(request, tmp_path_factory):
    """Return the tag and its converted weights; c256 is a checkpoint of several GPUs, with the prefix `module.`."""
    folder = tmp_path_factory.mktemp("golden")
    content = golden().checkpoint(request.param)
    if request.param == "c256":
        content["state_dict"] = {f"module.{name}": tensor for name, tensor in content["state_dict"].items()}
    torch.save(content, folder / "published.pth.tar")
    config = convert_published(folder / "published.pth.tar", folder / "paper.safetensors")
    assert config.preset == "paper" and config.backbone.fusion == "a"
    assert config.backbone.channels == int(request.param[1:])
    (folder / "published.pth.tar").unlink()  # hundreds of megabytes
    yield request.param, folder / "paper.safetensors"
    (folder / "paper.safetensors").unlink()


@pytest.fixture(scope="session")
def computed(converted):
    """Return the tag, the network, and its features of images A and B."""
    tag, path = converted
    network = load_weights(path)
    with torch.inference_mode():
        features = [network.extract(golden().image(*image)) for image in (golden().IMAGE_A, golden().IMAGE_B)]
    return tag, network, features


def assert_close(values: torch.Tensor, expected: np.ndarray):
    assert values.shape == expected.shape
    assert np.abs(values.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_features(computed):
    tag, _, (a, b) = computed
    assert_close(a.coarse[0], reference()[f"{tag}_coarse_A"])
    for features, name in ((a, "A"), (b, "B")):
        index = torch.from_numpy(reference()[f"{tag}_fine_index_{name}"]).long()
        assert_close(features.fine[0].flatten(1)[:, index], reference()[f"{tag}_fine_{name}"])


@pytest.fixture(params=[name for name in ENGINES if not name.startswith("triton")])
def engine(request, computed):
    """Return the network with every CPU engine."""
    computed[1].engine = make_engine(request.param)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("limit", [2**29, 2**20])
def test_coarse_tensor(computed, limit):
    tag, network, (a, b) = computed
    with torch.inference_mode(), memory.working_memory(limit):
        assert_close(network.coarse_tensor(a, b)[0], reference()[f"{tag}_corr4d"])


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("limit", [2**29, 2**20])
def test_matches(computed, limit):
    tag, network, (a, b) = computed
    with torch.inference_mode(), memory.working_memory(limit):
        found = network.match(a, b)
    expected, scores = reference()[f"{tag}_matches"], reference()[f"{tag}_scores"]
    assert len(found.scores) == len(expected) == COUNTS[tag]
    # The vectors put the corner of the first pixel at (0, 0), our convention its center.
    ours = np.concatenate([found.points0.numpy(), found.points1.numpy()], axis=1) + 0.5
    assert {*map(tuple, ours.tolist())} == {*map(tuple, expected.tolist())}
    by_place = {tuple(place): score for place, score in zip(expected.tolist(), scores, strict=True)}
    for place, score in zip(ours.tolist(), found.scores.tolist(), strict=True):
        assert score == pytest.approx(by_place[tuple(place)], abs=1e-5)
    assert (found.scores.diff() <= 0).all()


def test_the_paper_preset_takes_the_file(converted):
    _, path = converted
    assert load("paper", weights=path, device="cpu").network.config.fine.query_share == 0.5
