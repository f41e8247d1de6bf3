"""Tests of the types of public calls, as an editor and a type checker see them."""

import inspect
import typing

import pytest
from conftest import ROOT

import dualrc
from dualrc.config import MatcherConfig, MatcherOptions

SNIPPET = """
import dualrc

matcher = dualrc.load(max_size=640, top=100, quality="high", min_score=0.1, max_zoom=2.0, max_memory=None)
for match in matcher.match("a.jpg", "b.jpg"):
    x: float = match.x0 + match.score
one: dualrc.Match = matcher.match("a.jpg", "b.jpg")[0]
some: dualrc.Matches = matcher.match("a.jpg", "b.jpg")[:10]
dualrc.panorama(["a.jpg", "b.jpg"]).save("c.png")

dualrc.load(max_sise=640)
dualrc.load(top="many")
dualrc.load(quality="best")
"""


def test_settings_of_load_are_the_fields_of_the_config():
    assert typing.get_type_hints(MatcherOptions) == typing.get_type_hints(MatcherConfig)
    settings = inspect.signature(dualrc.load).parameters["settings"]
    assert settings.kind is inspect.Parameter.VAR_KEYWORD and settings.annotation == typing.Unpack[MatcherOptions]


# Fast with the cache of scripts/test's own run of mypy; otherwise it takes a minute.
def test_a_type_checker_finds_wrong_settings(tmp_path):
    api = pytest.importorskip("mypy.api")
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    config, cache = str(ROOT / "pyproject.toml"), str(ROOT / ".mypy_cache")
    report, _, status = api.run(["--config-file", config, "--cache-dir", cache, str(file)])
    wrong = [line.partition("snippet.py:")[2] for line in report.splitlines() if ": error:" in line]
    assert status == 1 and [line.split(":")[0] for line in wrong] == ["11", "12", "13"], report
