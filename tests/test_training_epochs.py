"""Epochs, validation sets and the choice of the weights that a run leaves."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import texture, tiny_config
from PIL import Image
from test_training_runs import CONFIGS, logged

from dualrc.config import PRESETS
from dualrc.data import FilePairs, PairsFileConfig, PhotosConfig, open_pairs
from dualrc.data.pairs import LazyPair, PairSample
from dualrc.errors import ConfigError
from dualrc.model.checkpoint import load_weights
from dualrc.toml import from_dict, read_toml, to_dict
from dualrc.train import TrainConfig, train
from dualrc.train.batches import Batches

CPU = torch.device("cpu")


def numbered_pairs(count: int, broken: tuple[int, ...] = ()) -> list[LazyPair]:
    """Return pairs of flat images whose gray level is their number."""

    def load(number: int) -> PairSample:
        image, points = np.full((64, 64, 3), number, np.uint8), np.random.default_rng(0).uniform(0, 63, (16, 2))
        return PairSample(image0=image, image1=image, points0=points[: 0 if number in broken else None], points1=points)

    return [LazyPair(name=str(number), load=partial(load, number)) for number in range(count)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Ten training pairs and three validation pairs: an image and itself."""
    folder = tmp_path_factory.mktemp("pairs")
    points = np.random.default_rng(0).uniform(4, 59, (40, 2))
    for name, numbers in (("training", range(10)), ("validation", range(10, 13))):
        lines = []
        for number in numbers:
            Image.fromarray(texture(number, 64, 64)).save(folder / f"{number}.png")
            values = " ".join(f"{x:.2f} {y:.2f} {x:.2f} {y:.2f}" for x, y in points)
            lines.append(f"{number}.png {number}.png {values}\n")
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


def source(folder, name: str) -> PairsFileConfig:
    return PairsFileConfig(file=str(folder / f"{name}.txt"), images=str(folder))


def run(folder, **changes) -> TrainConfig:
    settings = {"size": 64, "pairs": 4, "points": 32, "steps": 5, "warm_up": 0, "precision": "float32"}
    settings |= {"network": tiny_config(subpixel_hidden=16), "validate_every": 5, "validation_batches": 1}
    return TrainConfig(**{"data": (source(folder, "training"),), **settings, **changes})


def gray_levels(batch) -> list[int]:
    return (batch.images0[:, 0, 0, 0] * 0.229 * 255 + 0.485 * 255).round().int().tolist()


@pytest.mark.parametrize("parts", [1, 2])
def test_an_epoch_has_every_pair_once(parts):
    numbered = numbered_pairs(7)
    source = PairsFileConfig(file="", images="")
    maker = FilePairs(numbered, source, size=64, points=8)
    config = TrainConfig(data=(source,), seed=3, pairs=4, parts=parts, draw="epochs")
    batches = Batches(config, [maker], CPU)
    seen = []
    for step in range(7):
        batch = batches.get(step, range(parts))
        assert len(batch.images0) == 4
        seen += gray_levels(batch)
    batches.close()
    maker.close()
    epochs = [seen[start : start + 7] for start in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_another_pair_stands_in_for_a_broken_one():
    maker = FilePairs(numbered_pairs(5, broken=(2,)), PairsFileConfig(file="", images=""), size=64, points=8)
    batch = maker.make_in_order(0, 5, seed=0)
    maker.close()
    assert len(batch.images0) == 5
    assert list(maker.skipped) == ["2"]


def test_the_pairs_that_stand_in_for_broken_ones_vary():
    maker = FilePairs(
        numbered_pairs(40, broken=tuple(range(20, 40))), PairsFileConfig(file="", images=""), size=64, points=8
    )
    batches = [maker.make_in_order(first, 4, seed=0) for first in range(0, 40, 4)]
    maker.close()
    seen = Counter(level for batch in batches for level in gray_levels(batch))
    assert sum(seen.values()) == 40 and seen.keys() == set(range(20))
    # A fixed stand-in for each place in a batch would repeat at most four pairs.
    assert sum(count > 1 for count in seen.values()) > 8


def test_without_a_validation_set_a_tenth_is_held_out(pairs):
    opened = open_pairs(source(pairs, "training"), size=64, points=8)
    assert (len(opened.training.source), len(opened.held_out.source)) == (9, 1)
    opened.close()


def test_with_a_validation_set_all_pairs_are_trained_on(pairs, tmp_path, monkeypatch):
    opened = open_pairs(source(pairs, "training"), size=64, points=8, hold_out=False)
    assert len(opened.training.source) == 10
    opened.close()
    loaded: Counter[str] = Counter()
    load = FilePairs._cut
    monkeypatch.setattr(
        FilePairs, "_cut", lambda self, sample, rng: (loaded.update([sample.image0.stem]), load(self, sample, rng))[1]
    )
    config = run(pairs, draw="epochs", steps=5, validation=(source(pairs, "validation"),))
    train(config, tmp_path, device="cpu")
    # Five steps of four pairs are two epochs of ten; two more steps may have been prepared.
    assert min(loaded[str(number)] for number in range(10)) >= 2
    assert sum(loaded[str(number)] for number in range(10, 13)) == 4


def test_the_best_weights_are_kept(pairs, tmp_path):
    settings = {"validation": (source(pairs, "validation"),), "halve_every": 1000, "average": 0.0, "validate_every": 4}
    config = run(pairs, **settings, learning_rate=0.3, clip=0.0, optimizer="adam", steps=8)
    train(replace(config, keep="best"), tmp_path / "best", device="cpu", minutes=0)
    train(replace(config, keep="best"), tmp_path / "best", device="cpu")
    losses = {
        step: value for step, value in logged(tmp_path / "best", "held_out_loss").items() if step % 4 == 0 or step == 1
    }
    best = min(losses, key=losses.get)
    assert best != 8, losses
    train(replace(config, steps=best), tmp_path / "same", device="cpu")
    train(config, tmp_path / "last", device="cpu")
    kept, same, last = (
        load_weights(tmp_path / n / "weights.safetensors").state_dict() for n in ("best", "same", "last")
    )
    assert all(torch.equal(kept[name], same[name]) for name in kept)
    assert not all(torch.equal(kept[name], last[name]) for name in kept)


def test_epochs_need_a_list_of_pairs(pairs, tmp_path):
    photos = PhotosConfig(paths=(str(pairs),))
    for data in ((photos,), (source(pairs, "training"), source(pairs, "validation"))):
        with pytest.raises(ConfigError, match='draw = "epochs" needs one'):
            run(pairs, draw="epochs", data=data)


@pytest.mark.parametrize("name", ["paper.toml", "published.toml", "ncnet.toml"])
def test_the_papers_runs_use_all_pairs_in_epochs_and_keep_the_best(name):
    config = read_toml(TrainConfig, CONFIGS / name)
    assert (config.draw, config.keep) == ("epochs", "best")
    assert [data.file for data in config.validation] == ["pairs/validation_pairs.txt"]
    assert (config.validation_batches - 1) * config.pairs < 14_638 <= config.validation_batches * config.pairs
    # The network is that of the preset, with the published initialization of the consensus.
    assert config.network == PRESETS[config.network.preset][0]
    assert config.network.consensus.initialization == "uniform"
    assert from_dict(TrainConfig, to_dict(config)) == config
