"""Tests of configs: TOML round trips, and errors that name each wrong setting."""

import dataclasses
import re

import pytest

from dualrc.config import (
    PRESETS,
    CompactConfig,
    ConsensusConfig,
    FineConfig,
    MatcherConfig,
    NetworkConfig,
    ResNetConfig,
    check_bounds,
    preset,
)
from dualrc.data import ScenesConfig
from dualrc.errors import ConfigError
from dualrc.extras import require
from dualrc.toml import first_difference, from_dict, read_toml, to_dict, to_toml

CONFIGS = [
    *(network for network, _ in PRESETS.values()),
    *(matcher for _, matcher in PRESETS.values()),
    MatcherConfig(size=640, top=5, min_score=0.25, max_memory=2),
    NetworkConfig(
        preset="mine",
        backbone=ResNetConfig(fusion="e", channels=256),
        consensus=ConsensusConfig(kernel_sizes=(5, 5, 5), channels=(16, 16, 1)),
        fine=FineConfig(temperature=0.05, subpixel_hidden=64),
    ),
    NetworkConfig(preset="mine", backbone=CompactConfig(widths=(1, 2, 3, 4, 5))),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_round_trip(tmp_path, config):
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert read_toml(type(config), tmp_path / "config.toml") == config
    assert from_dict(type(config), to_dict(config)) == config


def test_presets():
    network, matcher = preset("paper")
    assert (network.preset, network.backbone) == ("paper", ResNetConfig(fusion="a", channels=1024))
    assert network.fine == FineConfig(reading="corner", query_share=0.5, temperature=0.0, subpixel=False)
    assert network.consensus == ConsensusConfig(kernel_sizes=(3, 3), channels=(16, 1), initialization="uniform")
    assert matcher.max_size == 1600
    network, matcher = preset("default")
    assert network.preset == "default" and isinstance(network.backbone, CompactConfig) and network.fine.subpixel
    assert network.fine.reading == "center" and network.fine.query_share == 1.0
    assert matcher.max_size == 1024 and matcher.top is None
    with pytest.raises(ConfigError, match="no preset 'best'; choose one of default, paper"):
        preset("best")


def test_configs_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MatcherConfig().top = 3
    with pytest.raises(TypeError):
        MatcherConfig(640)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (MatcherConfig, {"tops": 3}, "Unknown setting tops; choose one of .*top"),
        (
            NetworkConfig,
            {"preset": "x", "backbone": {"kind": "compact", "width": 3}},
            r"Unknown setting backbone\.width",
        ),
        (
            NetworkConfig,
            {"preset": "x", "backbone": {"kind": "vgg"}},
            "backbone.kind must be one of 'resnet101', 'resnet50', 'compact', 'trunk'",
        ),
        (NetworkConfig, {"preset": "x", "backbone": {}}, "backbone.kind must be one of"),
        (NetworkConfig, {"preset": "x"}, "backbone is missing"),
        (NetworkConfig, {"preset": 3, "backbone": {"kind": "compact"}}, "preset = 3 must be of type str"),
        (NetworkConfig, {"preset": "x", "backbone": "resnet101"}, "backbone = 'resnet101'"),
        (MatcherConfig, {"top": "3"}, "top = '3' must be of type int"),
        (MatcherConfig, {"top": 3.5}, "top = 3.5 must be of type int"),
        (MatcherConfig, {"top": True}, "top = True must be of type int"),
        (MatcherConfig, {"min_score": "high"}, "min_score = 'high' must be of type float"),
        (MatcherConfig, {"min_score": True}, "min_score = True must be of type float"),
        (ResNetConfig, {"channels": 512}, "channels = 512 must be one of 256, 1024"),
        (ResNetConfig, {"channels": 256.0}, "channels = 256.0 must be one of 256, 1024"),
        (ResNetConfig, {"fusion": "f"}, "fusion = 'f' must be one of 'a', 'b'"),
        (FineConfig, {"subpixel": 1}, "subpixel = 1 must be of type bool"),
        (ConsensusConfig, {"channels": 16}, "channels = 16 must be a list"),
        (ConsensusConfig, {"channels": [16, "1"]}, "channels = '1' must be of type int"),
        (CompactConfig, {"widths": [1, 2, 3]}, "widths = .* must have 5 entries"),
    ],
)
def test_wrong_settings_are_refused_by_name(kind, values, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(kind, values)


def test_none_and_whole_numbers_are_taken():
    assert from_dict(MatcherConfig, {"top": None, "min_score": 1}) == MatcherConfig(min_score=1.0)
    assert isinstance(from_dict(MatcherConfig, {"min_score": 1}).min_score, float)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Cannot read"),
        (b"top = ", "not valid TOML"),
        (b"\xff", "not valid TOML"),
        (b"tops = 3", "Unknown setting tops"),
    ],
)
def test_files_that_do_not_do(tmp_path, content, message):
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_toml(MatcherConfig, path)


@pytest.mark.parametrize("wrong", [{"query_share": 0.0}, {"query_share": 1.5}, {"temperature": -0.1}])
def test_fine_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FineConfig(**wrong)


@dataclasses.dataclass
class Numbers:
    a: float | None = 1
    b: float | None = 2


def test_bounds_are_told_with_the_value():
    check_bounds(Numbers(), "a", "b", at_least=1, at_most=2)
    check_bounds(Numbers(a=None), "a", above=5)
    for changes, bounds, told in (
        ({"a": 0}, {"at_least": 1}, "a = 0 must be at least 1."),
        ({"b": 2}, {"above": 0, "below": 2}, "b = 2 must be above 0 and below 2."),
        ({"a": float("inf")}, {"above": 0}, "a = inf must be above 0 and finite."),
        ({"a": None, "b": float("nan")}, {"at_most": 0.5}, "b = nan must be at most 0.5 and finite."),
        ({"a": 0}, {"at_least": 1, "unit": "pixels"}, "a = 0 must be at least 1 pixels."),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            check_bounds(Numbers(**changes), "a", "b", **bounds)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: MatcherConfig(size=10), "size = 10 must be at least 32 pixels."),
        (lambda: MatcherConfig(max_memory=0), "max_memory = 0 must be above 0 GiB."),
        (lambda: MatcherConfig(max_memory=float("inf")), "max_memory = inf must be above 0 GiB and finite."),
        (lambda: ScenesConfig(image_size=(10, 100)), "every entry must be at least 64 pixels."),
        (
            lambda: FineConfig(temperature=-1),
            "temperature = -1 must be finite and not negative; 0 gives the plain cosine.",
        ),
    ],
)
def test_bounds_are_told_with_their_unit_and_meaning(make, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        make()


def test_the_first_difference_has_its_full_name():
    assert first_difference({"a": {"b": 1}, "c": [1]}, {"c": [1], "a": {"b": 1}}) is None
    assert first_difference({"a": {"b": 1, "z": 0}}, {"a": {"b": 2}}) == "a.b is 1 there and 2 now"
    assert first_difference({}, {"a": None, "b": 3}) == "b is None there and 3 now"


def test_a_missing_extra_is_named():
    assert require("json", "colmap", "Nothing").dumps([]) == "[]"
    with pytest.raises(ConfigError, match=r"Dreams need no_such_module .*: pip install 'dualrc\[colmap\]'"):
        require("no_such_module", "colmap", "Dreams")
