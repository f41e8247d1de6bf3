"""Tests against the published implementation with generated weights; test_golden.py has more of them."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ENGINES, make_engine
from published_data import SIZES, image, weight

from dualrc.model.checkpoint import convert_published, load_weights

BACKBONES = {"c1024": "resnet101fpn_3_1024_4", "c256": "resnet101fpn_3_256_4"}
COUNTS = {"c1024": 10, "c256": 6}


@pytest.fixture(scope="module", params=BACKBONES)
def computed(request, tmp_path_factory):
    """Return the published results by name, and the converted network with its features of both images."""
    tag, folder = request.param, tmp_path_factory.mktemp("published")
    with np.load(Path(__file__).parent / "data" / "published.npz") as arrays:
        published = {name.removeprefix(f"{tag}_"): arrays[name] for name in arrays if name.startswith(f"{tag}_")}
    state = {}
    for line in published["names"].tolist():
        name, *shape = line.split()
        state[name] = torch.from_numpy(weight(name, tuple(map(int, shape))))
    settings = {"ncons_kernel_sizes": [3, 3], "ncons_channels": [16, 1], "multi_gpu": False}
    args = argparse.Namespace(backbone=BACKBONES[tag], **settings)
    torch.save({"epoch": 1, "state_dict": state, "args": args}, folder / "published.pth.tar")
    convert_published(folder / "published.pth.tar", folder / "paper.safetensors")
    network = load_weights(folder / "paper.safetensors")
    for file in folder.iterdir():  # hundreds of megabytes
        file.unlink()
    with torch.inference_mode():
        features = [network.extract(image(*size)) for size in SIZES]
    return tag, published, network, features


def assert_close(values: torch.Tensor, expected: np.ndarray) -> None:
    assert values.shape == expected.shape
    assert np.abs(values.numpy() - expected).max() <= 1e-5 * np.abs(expected).max()


def test_fine_features(computed):
    _, published, _, (features, _) = computed
    rows = features.fine[0].flatten(1)[torch.from_numpy(published["channels"])]
    assert_close(rows[:, torch.from_numpy(published["positions"])], published["fine"])


@pytest.mark.parametrize("name", [name for name in ENGINES if not name.startswith("triton")])
def test_coarse_tensor_and_matches(computed, name):
    tag, published, network, features = computed
    network.engine = make_engine(name)
    with torch.inference_mode():
        assert_close(network.coarse_tensor(*features)[0], published["coarse_tensor"])
        found = network.match(*features)
    assert len(found.scores) == len(published["scores"]) == COUNTS[tag]
    # As published, the corner of the first pixel is at (0, 0); in our convention its center is.
    places = torch.cat([found.points0, found.points1], dim=1) + 0.5
    ours = dict(zip(map(tuple, places.tolist()), found.scores.tolist(), strict=True))
    theirs = dict(zip(map(tuple, published["matches"].tolist()), published["scores"].tolist(), strict=True))
    assert ours.keys() == theirs.keys()
    assert [ours[place] for place in theirs] == pytest.approx(list(theirs.values()), abs=1e-5)
