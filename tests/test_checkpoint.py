"""Tests of weights files: round trips, rejected files, and malicious pickles."""

import argparse
import json
import pickle
from pathlib import Path

import pytest
import torch
from conftest import rand, tiny_network
from safetensors.torch import load_file, save_file

import dualrc
from dualrc.config import CompactConfig, ConsensusConfig, NetworkConfig
from dualrc.errors import ConfigError, OutputError, WeightsError
from dualrc.model.checkpoint import (
    bundled,
    convert_published,
    file_hash,
    load_imagenet_trunk,
    load_weights,
    read_config,
    save_weights,
)
from dualrc.toml import to_dict


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.safetensors"
    save_weights(tiny_network(), path)
    return path


def rewrite(path: Path, *, metadata=None, drop=(), **tensors) -> None:
    """Write a weights file with other tensors or another header."""
    state = load_file(path)
    header = {"format": "dualrc-1", "network": json.dumps(to_dict(read_config(path)))}
    state = {name: tensor for name, tensor in state.items() if name not in drop} | tensors
    save_file(state, path, metadata=header if metadata is None else metadata)


def test_round_trip(file):
    network, loaded = tiny_network(), load_weights(file)
    assert loaded.config == network.config and not loaded.training
    for name, tensor in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    images = rand(0, 1, 3, 32, 48)
    with torch.no_grad():
        assert torch.equal(network.extract(images).fine, loaded.extract(images).fine)


def test_half_precision_storage(file, tmp_path):
    half = tmp_path / "half.safetensors"
    save_weights(tiny_network(), half, dtype=torch.float16)
    assert half.stat().st_size < 0.7 * file.stat().st_size
    stored = load_file(half)
    assert stored["backbone.fine.weight"].dtype == torch.float16
    assert stored["backbone.stem.1.num_batches_tracked"].dtype == torch.int64
    loaded = load_weights(half).state_dict()
    for name, tensor in tiny_network().state_dict().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.allclose(loaded[name].float(), tensor.float(), atol=1e-3, rtol=1e-3)


def test_the_files_config_wins(tmp_path):
    config = NetworkConfig(
        preset="default",
        backbone=CompactConfig(widths=(4, 4, 6, 8, 8), depths=(0, 1, 0, 1), coarse_channels=5, fine_channels=6),
        consensus=ConsensusConfig(kernel_sizes=(3, 1, 5), channels=(2, 3, 1)),
    )
    save_weights(dualrc.model.dualrc.make_network(config), tmp_path / "own.safetensors")
    matcher = dualrc.load(weights=tmp_path / "own.safetensors", device="cpu", top=5)
    assert matcher.network.config == config == read_config(tmp_path / "own.safetensors")
    assert matcher.config.top == 5
    assert matcher.info["weights"] == file_hash(tmp_path / "own.safetensors")
    assert json.loads(json.dumps(matcher.info))["network"]["backbone"]["fine_channels"] == 6


def test_another_preset_is_an_error_that_names_both(file):
    with pytest.raises(WeightsError, match="'default', not 'paper'"):
        dualrc.load("paper", weights=file)


def test_unknown_preset_and_settings_are_refused(file):
    with pytest.raises(ConfigError, match=r"'nonsense'.*default, paper"):
        dualrc.load("nonsense")
    for wrong, meant in (("topp", "top"), ("thread", "threads"), ("devices", "device")):
        with pytest.raises(ConfigError, match=rf"Unknown setting {wrong}; did you mean {meant}\?"):
            dualrc.load(weights=file, **{wrong: 3})
    with pytest.raises(ConfigError, match=r"Unknown setting color; choose one of preset, .*threads, .*max_zoom"):
        dualrc.load(weights=file, color=3)
    with pytest.raises(ConfigError, match="top = 'many'"):
        dualrc.load(weights=file, top="many")
    with pytest.raises(ConfigError, match="nodevice"):
        dualrc.load(weights=file, device="nodevice")
    with pytest.raises(ConfigError, match="float8"):
        dualrc.load(weights=file, device="cpu", precision="float8")


def test_a_preset_without_weights_says_so():
    assert bundled("paper") is None
    with pytest.raises(WeightsError, match=r"no weights for the preset 'paper'.*weights="):
        dualrc.load("paper")


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "truncated", "cut header", "long name"])
def test_broken_files(file, kind):
    content = file.read_bytes()
    if kind == "missing":
        file.unlink()
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "long name":
        file = file.with_name("x" * 300)
    else:
        broken = {"empty": b"", "text": b"hello " * 50, "truncated": content[:-100], "cut header": content[:200]}
        file.write_bytes(broken[kind])
    for read in (read_config, load_weights):
        with pytest.raises(WeightsError, match=r"; .*\.$"):
            read(file)
    with pytest.raises(WeightsError):
        dualrc.load(weights=file)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"format": "dualrc-1"},
        {"format": "other", "network": "{}"},
        {"format": "dualrc-1", "network": "not json"},
        {"format": "dualrc-1", "network": "5"},
        {"format": "dualrc-1", "network": "{}"},
        {"format": "dualrc-1", "network": '{"preset": "default", "backbone": {"kind": "vgg"}}'},
    ],
    ids=str,
)
def test_headers_that_say_nothing(file, metadata):
    rewrite(file, metadata=metadata)
    with pytest.raises(WeightsError, match=r"tiny\.safetensors"):
        load_weights(file)


def test_tensors_that_do_not_fit_are_named(file):
    save_again = file.read_bytes()
    rewrite(file, drop=("consensus.biases.0",))
    with pytest.raises(WeightsError, match=r"lacks consensus\.biases\.0;"):
        load_weights(file)
    rewrite(file, drop=("backbone.fine.weight", "backbone.fine.bias"))
    with pytest.raises(WeightsError, match=r"lacks backbone\.fine\.bias and 2 more"):
        load_weights(file)
    file.write_bytes(save_again)
    rewrite(file, **{"backbone.extra": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"unknown backbone\.extra;"):
        load_weights(file)
    file.write_bytes(save_again)
    rewrite(file, **{"backbone.fine.bias": torch.zeros(3)})
    with pytest.raises(WeightsError, match=r"different shape of backbone\.fine\.bias;"):
        load_weights(file)


def test_saving_where_nothing_can_be_written(tmp_path):
    with pytest.raises(OutputError):
        save_weights(tiny_network(), tmp_path / "nowhere" / "w.safetensors")
    with pytest.raises(OutputError):
        save_weights(tiny_network(), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Malicious:
    """A pickle that creates a file when it is loaded without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("plain", [True, False])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, plain):
    source, trace = tmp_path / "evil.pth.tar", tmp_path / "trace"
    content = {"state_dict": {}, "args": Malicious(trace)}
    if plain:
        source.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, source)
    for read in (
        lambda: convert_published(source, tmp_path / "out.safetensors"),
        lambda: load_imagenet_trunk(torch.nn.Linear(1, 1), source),
    ):
        with pytest.raises(WeightsError, match="not a PyTorch checkpoint"):
            read()
    assert not trace.exists() and not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x80\x02.", b"PK\x03\x04broken", bytes(range(256)), pickle.dumps([1, 2]), pickle.dumps({"a": 1})],
    ids=repr,
)
def test_files_that_are_no_checkpoints(tmp_path, content):
    (tmp_path / "in.pth").write_bytes(content)
    with pytest.raises(WeightsError):
        convert_published(tmp_path / "in.pth", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_missing_checkpoint(tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        convert_published(tmp_path / "none.pth", tmp_path / "out.safetensors")


CONSENSUS = {
    "NeighConsensus.conv.0.weight": torch.zeros(3, 16, 1, 3, 3, 3),
    "NeighConsensus.conv.2.weight": torch.zeros(3, 1, 16, 3, 3, 3),
}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "lacks the layers"),
        (CONSENSUS, "lacks the layers"),
        (CONSENSUS | {"FeatureExtraction.last_layer_block.weight": torch.zeros(512, 512, 3, 3)}, "512 fine channels"),
        ({"FeatureExtraction.last_layer_block.weight": 5, **CONSENSUS}, "no state_dict of tensors"),
        (
            CONSENSUS
            | {
                "FeatureExtraction.fine_layer_block.weight": torch.zeros(1, 1, 1, 1).expand(256, 256, 3, 3),
                "FeatureExtraction.inner_block_list.7.weight": torch.zeros(1),
            },
            "does not fit|lacks",
        ),
    ],
)
def test_checkpoints_of_other_networks(tmp_path, state, message):
    content = {"state_dict": state, "args": argparse.Namespace(backbone="vgg")}
    torch.save(content, tmp_path / "in.pth")
    with pytest.raises(WeightsError, match=message):
        convert_published(tmp_path / "in.pth", tmp_path / "out.safetensors")


def test_deep_consensus_layers_keep_their_order(tmp_path):
    """With six layers, conv.10 comes after conv.8, not after conv.1."""
    from dualrc.model.checkpoint import _converted

    state = {"FeatureExtraction.fine_layer_block.weight": torch.zeros(256, 1)}
    for layer, channels in enumerate((2, 3, 4, 5, 6, 1)):
        state[f"NeighConsensus.conv.{2 * layer}.weight"] = torch.zeros(3, channels, 1, 3, 3, 3)
    config, _ = _converted(None, state, "file")
    assert config.consensus.channels == (2, 3, 4, 5, 6, 1)


def test_consensus_tensors_that_do_not_fit_are_refused_as_unknown():
    from dualrc.model.checkpoint import _converted

    first = torch.zeros(3, 1, 1, 3, 3, 3)
    state = {"FeatureExtraction.fine_layer_block.weight": torch.zeros(256, 1), "NeighConsensus.conv.0.weight": first}
    strange = {"NeighConsensus.conv.2.weight": torch.zeros(3, 3), "NeighConsensus.conv.4.bias": torch.zeros(1)}
    config, weights = _converted(None, state | strange, "file")
    assert config.consensus.channels == (1,)
    assert strange.keys() <= weights.keys()
