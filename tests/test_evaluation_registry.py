"""Tests of the registry: a benchmark declared in this file runs through the pipeline and the command line."""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pytest
import typer
from conftest import texture
from evaluation_data import run_evaluation
from PIL import Image
from typer.testing import CliRunner

from dualrc.cli.benchmarks import declared_options, make_command
from dualrc.draw import draw_dots
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation import BENCHMARKS, Benchmark, evaluate, register
from dualrc.evaluation.aachen import AachenSettings
from dualrc.evaluation.benchmark import COST_COLUMNS, OneNetworkSettings, Option, recognize
from dualrc.evaluation.export import Pair
from dualrc.evaluation.hpatches import HPatchesSettings
from dualrc.evaluation.inloc import InLocSettings
from dualrc.evaluation.inloc_poses import MIN_INLIERS, PAPER_MIN_INLIERS
from dualrc.evaluation.report import Report, Table, share
from dualrc.image import read

MATCHERS = """
def three_right(path0, path1):
    points = [[10, 10], [20, 30], [40, 20], [50, 50]]
    return points, [[13, 10], [23, 30], [43, 20], [50, 50]], [0.9, 0.8, 0.7, 0.6]
"""


@dataclass(frozen=True, kw_only=True)
class ShiftSettings(OneNetworkSettings):
    shift_px: Annotated[int, Option("columns by which image 1 is moved; without it, 3.")] = 3
    masks: Annotated[tuple[Path, ...], Option("images to leave out.", flags=("--without",))] = ()

    paper: ClassVar = {"top": 2}
    differences: ClassVar = "The published evaluation moves images, too."


@dataclass(frozen=True, kw_only=True)
class ShiftScore:
    correct: float
    matches: int


class Shift(Benchmark):
    """Pairs of an image and a shifted copy."""

    name = "shift"
    summary = "shift scores matches of images that are moved."
    example = "data/shift --shift-px 3"
    settings_class = ShiftSettings
    recognized_by = ("moved-*.png",)
    one_root = True

    def __init__(self, settings, messages=None):
        super().__init__(settings, messages)
        (root,) = settings.roots
        left_out = {path.name for path in settings.masks}
        for path in sorted(path for path in root.glob("moved-*.png") if path.name not in left_out):
            self.pairs.append(
                Pair(name0="still.png", name1=path.name, path0=root / "still.png", path1=path, group="all")
            )
        if not self.pairs:
            raise DataError(f"{root} has no moved images; give another folder.")
        self.protocol = {"shift": settings.shift_px, "pairs": len(self.pairs)}

    def _correct(self, matches):
        return np.abs(matches.points1 - matches.points0 - [self.settings.shift_px, 0]).max(axis=1, initial=0) < 1

    def score(self, matcher, get):
        flags = [self._correct(get(pair).top(self.top)) for pair in self.pairs]
        return ShiftScore(correct=float(np.mean(np.concatenate(flags))), matches=sum(map(len, flags)))

    def report(self, results):
        rows = [[r.matcher, share(r.figures.correct), *r.cost.cells(r.figures.matches)] for r in results]
        table = Table(title="Moved images", columns=["matcher", "correct", *COST_COLUMNS], rows=rows)
        return Report(tables=[table], notes=["This data set is small."], content={"seen": "here"})

    def ranking(self, result):
        return [(pair, "as it is") for pair in self.pairs]

    def draw(self, pair, matches):
        return draw_dots(read(pair.path0), read(pair.path1), matches, self._correct(matches))


@pytest.fixture
def registered():
    register(Shift)
    yield
    del BENCHMARKS[Shift.name]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "matchers.py").write_text(MATCHERS)
    (tmp_path / "data").mkdir()
    for name in ("still", "moved-1", "moved-2"):
        Image.fromarray(texture(0, 96, 80)).save(tmp_path / "data" / f"{name}.png")
    return tmp_path / "data"


def call(*arguments):
    """Call the command with the benchmarks that are registered now."""
    app = typer.Typer()
    app.command()(make_command())
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def read_help() -> str:
    return " ".join(re.sub("[│╭╮╰╯─]", " ", call("--help").output).split())


def test_a_new_benchmark_goes_through_the_whole_evaluation(registered, data, tmp_path):
    content, text = run_evaluation("shift", (data,), tmp_path / "out", tmp_path, ["three_right"])
    assert content["results"][0].figures == ShiftScore(correct=0.75, matches=8)
    assert "Moved images" in text and ".750" in text and "Note: This data set is small." in text
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["benchmark"] == "shift" and written["protocol"] == {"shift": 3, "pairs": 2}
    assert written["settings"]["shift_px"] == 3 and written["seen"] == "here"
    assert "moved-2.png: as it is" in (tmp_path / "out" / "report.html").read_text()
    assert len(list((tmp_path / "out" / "figures").iterdir())) == 2
    # The same matches with another score.
    content, text = run_evaluation("shift", (data,), tmp_path / "out", tmp_path, ["three_right"], shift_px=0, top=4)
    assert content["results"][0].figures.correct == 0.25
    assert "2 pairs were in" in text and "0 new" in text


def test_a_new_benchmark_is_on_the_command_line(registered, data, tmp_path):
    matcher = f"{tmp_path / 'matchers.py'}:three_right"
    options = ("--matcher", matcher, "--shift-px", 0, "--without", "moved-1.png", "--out", tmp_path / "out")
    done = call("shift", data, *options)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "results.json").read_text())["protocol"] == {"shift": 0, "pairs": 1}
    help_text = read_help()
    assert "shift scores matches of images that are moved." in help_text
    assert "dualrc evaluate shift data/shift --shift-px 3" in help_text
    assert "shift: columns by which image 1 is moved" in help_text


def test_options_that_a_benchmark_does_not_take(registered, data, tmp_path):
    for arguments, words in (
        (("shift", data, "--crop", "1,1"), "--crop is an option of hpatches only; omit it."),
        (("shift", data, "--truth", "x"), "--truth is an option of inloc and aachen only; omit it."),
        (("hpatches", data, "--shift-px", 0), "--shift-px is an option of shift only; omit it."),
        (("shift", data, "--size", 64, "--size", 96), "--size was passed 2 times; shift accepts it once."),
        (("shift", data, data), "shift has one folder; pass one ROOT."),
        (("shift", data, "--top", 0), "leaves no matches to score"),
        (("shift",), "No dataset was passed; pass its folder."),
        (("hpatches", data), "it looks like shift: run `dualrc evaluate shift` on it."),
    ):
        done = call(*arguments, "--out", tmp_path / "out")
        assert isinstance(done.exception, ConfigError | DataError), done.output
        assert words in str(done.exception) and "\n" not in str(done.exception)
    with pytest.raises(ConfigError, match="--sharp is an option of no benchmark"):
        evaluate("shift", roots=(data,), out=tmp_path, sharp=True)


def test_a_benchmark_that_is_removed_is_gone(data, tmp_path):
    with pytest.raises(ConfigError, match="There is no benchmark 'shift'; choose one of hpatches, hard, pose"):
        evaluate("shift", roots=(data,), out=tmp_path)
    assert "--shift-px" not in call("--help").output
    assert call("shift", data).exit_code == 2
    assert recognize(data, "hpatches") is None


def test_the_paper_s_protocol(tmp_path):
    """The protocol sets only settings that no option sets."""
    given = {"roots": (tmp_path,), "out": tmp_path, "protocol": "paper"}
    assert HPatchesSettings.of(given).size == 1600
    assert HPatchesSettings.of({**given, "size": 800}).size == 800
    inloc = InLocSettings.of(given)
    assert (inloc.size, inloc.top, inloc.verify, inloc.min_inliers) == (1600, 2000, True, PAPER_MIN_INLIERS)
    assert InLocSettings(roots=(tmp_path,), out=tmp_path).min_inliers == MIN_INLIERS > PAPER_MIN_INLIERS
    # Options that repeat a default are options, too.
    own = InLocSettings.of({**given, "min_inliers": MIN_INLIERS, "verify": False})
    assert (own.min_inliers, own.verify) == (MIN_INLIERS, False)
    aachen = AachenSettings.of(given)
    assert (aachen.size, aachen.top) == (1600, 8000)
    with pytest.raises(ConfigError, match="no protocol 'papers'; choose own or paper"):
        HPatchesSettings(roots=(tmp_path,), out=tmp_path, protocol="papers")
    with pytest.raises(ConfigError, match="The paper has no protocol for this benchmark"):
        OneNetworkSettings.of(given)


def test_the_report_names_differences_from_the_published_evaluation(registered, data, tmp_path):
    for protocol, count in (("own", 8), ("paper", 4)):
        content, text = run_evaluation("shift", (data,), tmp_path, tmp_path, ["three_right"], protocol=protocol)
        assert content["results"][0].figures.matches == count
        assert (ShiftSettings.differences in content["notes"]) == (protocol == "paper")
        assert (ShiftSettings.differences in text) == (protocol == "paper")
    assert all(settings.differences for settings in (HPatchesSettings, InLocSettings, AachenSettings))


def test_the_registry_and_the_command_line_agree():
    app = typer.Typer()
    app.command()(make_command())
    command = typer.main.get_command(app)
    on_the_command_line = {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
    declared = {flag for b in BENCHMARKS.values() for flag in declared_options(b.settings_class)}
    assert on_the_command_line - {"--help", "--install-completion", "--show-completion"} == declared
    help_text = read_help()
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.name == name
        settings = {field.name for field in fields(benchmark.settings_class)}
        # Every setting is an option, with one default.
        assert settings == {"roots", *(d.setting for d in declared_options(benchmark.settings_class).values())}
        assert benchmark.summary in help_text and f"dualrc evaluate {name} {benchmark.example}" in help_text
