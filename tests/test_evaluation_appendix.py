"""Tests of the paper's appendix: scores equal those of HPatches, gaps are reported, and nothing runs twice."""

import html
import io
import json
import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_network
from evaluation_data import run_evaluation, write_hpatches, write_matchers
from PIL import Image
from rich.console import Console

from dualrc import cli
from dualrc.collection.store import MatchStore
from dualrc.config import PRESETS, ResNetConfig
from dualrc.draw import _BAD, _GOOD
from dualrc.errors import ConfigError, DataError, WeightsError
from dualrc.evaluation import costs, evaluate
from dualrc.evaluation.appendix_tables import compare_channels, compare_costs, compare_fusion, compare_sizes
from dualrc.evaluation.benchmark import Result
from dualrc.evaluation.export import Pair
from dualrc.evaluation.hpatches import HPatches, HPatchesSettings, published
from dualrc.evaluation.matchers import WeightsFile, read_networks
from dualrc.evaluation.report import share
from dualrc.matches import Matches
from dualrc.metrics import match_errors_px
from dualrc.model.checkpoint import save_weights
from dualrc.model.dualrc import make_network

SIZES = (128, 64)
PAIRS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write data, user matchers, and weights of two tiny networks and of two untrained variants of the paper."""
    folder = tmp_path_factory.mktemp("appendix")
    write_matchers(folder)
    write_hpatches(folder / "data")
    for name in ("i_day", "v_wall"):
        # Two pairs of each sequence suffice.
        for k in (3, 4, 5):
            (folder / "data" / name / f"H_1_{k}").unlink()
    for seed in (0, 1):
        save_weights(tiny_network(seed=seed), folder / f"tiny{seed}.safetensors")
    for fusion in ("a", "e"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = replace(PRESETS["paper"][0], backbone=ResNetConfig(fusion=fusion, channels=256))
            save_weights(make_network(config), folder / f"{fusion}256.safetensors", dtype=torch.float16)
    return folder


def run(folder, out, *weights, **settings):
    """Return the content of results.json, and everything that was printed."""
    printed = io.StringIO()
    console = Console(width=140, file=printed)
    paths = tuple(folder / f"{name}.safetensors" for name in weights)
    options = {"roots": (folder / "data",), "weights": paths, "out": out, **settings}
    content = evaluate("appendix", screen=console, messages=console, **options)
    return content, " ".join(printed.getvalue().split())


def page_tables(out) -> dict[str, list[list[str]]]:
    """Return the tables of report.html by title, without their headers."""
    page = (out / "report.html").read_text()
    found = re.findall(r"<h2>([^<]*)</h2><div class=\"wide\">.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    rows = {title: re.findall(r"<tr>(.*?)</tr>", body) for title, body in found}
    return {
        html.unescape(title): [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>([^<]*)</td>", row)] for row in r]
        for title, r in rows.items()
    }


@pytest.fixture(scope="module")
def sized(folder, tmp_path_factory):
    """Evaluate a tiny network at two sizes, and an oracle."""
    out = tmp_path_factory.mktemp("sized")
    oracle = f"{folder / 'matchers.py'}:homography_oracle"
    content, text = run(folder, out, "tiny0", sizes=SIZES, matchers=(oracle,))
    return out, content, text


@pytest.fixture(scope="module")
def varied(folder, tmp_path_factory):
    """Evaluate two variants of the paper at one size."""
    out = tmp_path_factory.mktemp("varied")
    content, text = run(folder, out, "a256", "e256", sizes=(64,))
    return out, content, text


def test_sizes_hold_the_scores_of_hpatches_itself(folder, sized, tmp_path):
    out, content, _ = sized
    rows = page_tables(out)["Image size and map size, best 2000 matches"]
    for row, result, size in zip(rows, content["results"], SIZES, strict=False):
        weights = folder / "tiny0.safetensors"
        own, _ = run_evaluation("hpatches", [folder / "data"], tmp_path, folder, ["dualrc"], weights=weights, size=size)
        groups = own["results"][0].figures[1].groups
        assert result.figures[1].groups == groups
        mma = groups["overall"].mma
        expected = [share(mma[px - 1]) for px in (1, 3, 5, 10)]
        expected += [share(groups[kind].mma[2]) for kind in ("illumination", "viewpoint")]
        assert row[:3] == [f"default, {size} px", str(size), str(size // 4)]
        assert row[3:9] == expected
        assert row[9] == f"{groups['overall'].matches:.0f}"
    # The comparison below is meaningful only for nontrivial scores.
    assert 0 < mma[9] < 1
    assert rows[2][0] == "matchers:homography_oracle"
    assert rows[2][3:7] == ["1.000"] * 4


def test_variants_hold_the_scores_of_hpatches_itself(folder, varied, tmp_path):
    out, content, text = varied
    tables = page_tables(out)
    fusion, channels = tables["Fusion variants, 256 channels, 64 px"], tables["256 against 1024 channels, 64 px"]
    assert [row[0] for row in fusion] == [f"({letter}) 256" for letter in "abcde"]
    assert [row[0] for row in channels] == ["(a) 1024", "(a) 256", "(e) 1024", "(e) 256"]
    settings = {"preset": "paper", "weights": folder / "e256.safetensors", "size": 64}
    own, _ = run_evaluation("hpatches", [folder / "data"], tmp_path, folder, ["dualrc"], top=1000, **settings)
    mma = own["results"][0].figures[0].groups["overall"].mma
    assert fusion[4][1:6] == channels[3][1:6] == ["1000", *(share(mma[px - 1]) for px in (1, 3, 5, 10))]
    assert content["results"][1].figures[0].groups["overall"].mma == mma
    assert fusion[0][1:6] != fusion[4][1:6]
    for row in (*fusion[1:4], channels[0], channels[2]):
        assert row[1:] == ["missing", *["-"] * 9]
    assert "Fusion variants, 256 channels, 64 px: no weights were passed for (b) 256, (c) 256, (d) 256." in text
    assert "no weights were passed for (a) 1024, (e) 1024." in text
    assert [network.variant for network in content["networks"]] == [("a", 256), ("e", 256)]


def test_everything_is_on_the_page_and_in_files(sized, varied):
    out = sized[0]
    page = (out / "report.html").read_text()
    assert len(page_tables(out)) == 4
    # Three plots of sizes and one of costs; two pairs, 500, 2000 and 6000 matches, of two matchers.
    assert page.count("<img") == 4 + 12
    assert not re.search(r'(src|href)="(?!data:)', page)
    figures = {path.stem for path in (out / "figures").iterdir()}
    assert {"sizes_same_image", "sizes_same_map", "sizes_smaller", "costs"} <= figures
    assert "01_best500_i_day_1-6_default_128_px" in figures
    assert "12_best6000_v_wall_1-6_matchers_homography_oracle" in figures
    written = json.loads((out / "results.json").read_text())
    assert [result["matcher"] for result in written["results"]] == [
        *(f"default, {size} px" for size in SIZES),
        "matchers:homography_oracle",
    ]
    assert written["networks"][0]["weights_hash"] == written["results"][0]["config"]["weights"]
    assert len(written["stores"]) == 3
    for plot in ("fusion", "channels", "costs"):
        with Image.open(varied[0] / "figures" / f"{plot}.png") as image:
            assert image.width > 800 and len(image.getcolors(1 << 20)) > 20
    # No figure was drawn.
    assert not (out / "figures" / "fusion.png").exists()


def test_images_show_right_and_wrong_matches(folder, sized):
    out, content, _ = sized
    H = np.loadtxt(folder / "data" / "v_wall" / "H_1_6")
    with MatchStore(out / content["stores"][0]) as store:
        matches = store.get("v_wall/1.png", "v_wall/6.png")
    page = (out / "report.html").read_text()
    for count, number in ((500, 3), (2000, 7), (6000, 11)):
        best = matches.top(count)
        correct = int((match_errors_px(best, H) <= 3).sum())
        assert 0 < correct < len(best)
        words = f"default, 128 px, v_wall/1.png and v_wall/6.png: {correct}/{len(best)} correct within 3 px"
        assert words in page
        with Image.open(out / "figures" / f"{number:02d}_best{count}_v_wall_1-6_default_128_px.png") as image:
            assert count_color(image, _GOOD) > 10 and count_color(image, _BAD) > 10
    # The oracle has no wrong matches.
    with Image.open(out / "figures" / "04_best500_v_wall_1-6_matchers_homography_oracle.png") as image:
        assert count_color(image, _GOOD) > 1000 and count_color(image, _BAD) == 0


def count_color(image, color) -> int:
    return int((np.asarray(image.convert("RGB")) == color).all(axis=-1).sum())


def test_costs_are_of_each_network_and_size(sized, varied):
    rows = page_tables(sized[0])["Time and memory"]
    assert [row[:3] for row in rows[:2]] == [["default", str(size), str(size // 4)] for size in SIZES]
    assert [row[-1] for row in rows[:2]] == ["128x96", "64x48"]
    assert rows[2] == ["DualRC-Net, published", "800", "200", "2.05 s", "1.20 GiB", "-", ""]
    for content in (sized[1], varied[1]):
        for entry in content["costs"]:
            measured = entry["measured"]
            assert 0 < measured.seconds < 60
            # On a CPU the libraries are included.
            least = 0 if torch.cuda.is_available() else 50 * 2**20
            assert least < measured.loaded_bytes < measured.memory_bytes < 4 * 2**30
    # The weights of ResNet-101 alone take 100 MiB or more, half of that in float16.
    tiny, large = sized[1]["costs"][0]["measured"], varied[1]["costs"][0]["measured"]
    assert large.loaded_bytes > tiny.loaded_bytes + 40 * 2**20


def test_nothing_is_matched_or_measured_twice(folder, sized, monkeypatch):
    out, before, _ = sized
    known = json.loads((out / "costs.json").read_text())
    tasks, real = [], costs.measure
    monkeypatch.setattr(costs, "measure", lambda task: tasks.append(task) or real(task))
    content, text = run(folder, out, "tiny0", "tiny1", sizes=SIZES[:1])
    assert f"{PAIRS} pairs were in" in text and "0 new" in text
    # Stores of other sizes are not reported as outdated.
    assert "another config" not in text
    assert [task.network.weights.stem for task in tasks] == ["tiny1"]
    assert content["results"][0].figures == before["results"][0].figures
    again = json.loads((out / "costs.json").read_text())
    assert len(again) == 3 and all(again[key] == known[key] for key in known)
    # Two files of one variant are distinguished by their paths.
    names = [result.matcher for result in content["results"]]
    assert names[0].endswith("tiny0.safetensors, 128 px") and names[1].endswith("tiny1.safetensors")
    assert names[1].startswith("default, ")
    assert "The same map size is not compared: that needs 128 and 64 px; add --size 64." in text
    assert "Smaller images are not compared" in text


def test_weights_that_won_t_do_are_refused_before_anything_is_matched(folder, tmp_path):
    whole = (folder / "tiny0.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    (tmp_path / "text.safetensors").write_text("not weights")
    changed = whole.replace(rb"\"fine_channels\": 16", rb"\"fine_channels\": 24")
    assert changed != whole
    (tmp_path / "other.safetensors").write_bytes(changed)
    for name, words in (
        ("cut", "corrupt"),
        ("text", "not a safetensors file"),
        ("nowhere", "does not exist"),
        ("other", "does not fit the network"),
    ):
        bad = (folder / "tiny0.safetensors", tmp_path / f"{name}.safetensors")
        with pytest.raises(WeightsError, match=words):
            run(folder, tmp_path / "out", sizes=SIZES, weights=bad)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(whole)
    with pytest.raises(ConfigError, match="have the same weights; pass each once"):
        run(folder, tmp_path / "out", weights=(folder / "tiny0.safetensors", copy))
    with pytest.raises(WeightsError, match="has no weights for the preset 'paper'; give a weights file"):
        run(folder, tmp_path / "out", preset="paper")
    assert not list((tmp_path / "out").glob("*.sqlite"))


def test_without_weights_the_package_s_own_are_compared():
    (network,) = read_networks(())
    assert network.label == "default" and network.variant is None


def test_data_and_settings_that_won_t_do(folder, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        run(folder, tmp_path, "tiny0", roots=(tmp_path / "nowhere",))
    with pytest.raises(DataError, match=r"no sequences i_\* or v_\*"):
        run(folder, tmp_path, "tiny0", roots=(tmp_path,))
    for wrong, words in (
        ({"roots": ()}, "No dataset was passed"),
        ({"top": 0}, "leaves no matches to score"),
        ({"sizes": (128, 16)}, "at least 32"),
        ({"sizes": ()}, "at least 32"),
        ({"matchers": ("dualrc",)}, "pass --weights"),
        ({"device": "toaster"}, "toaster"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(folder, tmp_path, "tiny0", **wrong)
    for text, words in (
        ("v_wall/1.png v_wall/9.png", "line 1: 'v_wall/9.png' is not in the folder"),
        ("v_wall/2.png v_wall/6.png", "v_wall/2.png and v_wall/6.png have no homography"),
        ("", "lists no pairs"),
    ):
        (tmp_path / "pairs.txt").write_text(text)
        with pytest.raises(DataError, match=words):
            run(folder, tmp_path, "tiny0", pairs=tmp_path / "pairs.txt")
    assert not list(tmp_path.glob("*.sqlite"))


def test_broken_images_are_counted_and_the_rest_goes_on(folder, tmp_path):
    root = write_hpatches(tmp_path / "data")
    (root / "i_day" / "1.png").write_text("not an image")
    (root / "v_wall" / "H_1_4").unlink()
    (tmp_path / "pairs.txt").write_text("i_day/1.png i_day/2.png\nv_wall/1.png v_wall/3.png\n")
    settings = {"roots": (root,), "sizes": (64,), "pairs": tmp_path / "pairs.txt"}
    content, text = run(folder, tmp_path / "out", "tiny0", **settings)
    assert len(content["results"][0].failures) == 5
    assert content["results"][0].figures[0].groups["illumination"].mma == (0.0,) * 10
    assert "5 of 9 pairs could not be matched" in text
    assert "v_wall 1-4 is not scored" in text
    assert "i_day/1.png and i_day/2.png are not drawn" in text
    # The measured pair is one that could be matched.
    assert content["costs"][0]["measured"] is not None
    drawn = sorted(path.stem for path in (tmp_path / "out" / "figures").glob("0*"))
    assert drawn == [
        f"0{number}_best{count}_v_wall_1-3_default_64_px" for number, count in enumerate((500, 2000, 6000), start=1)
    ]


# Comparisons of scores from known matches.


@pytest.fixture(scope="module")
def appendix(folder):
    return HPatches(HPatchesSettings(roots=(folder / "data",), out=folder / "out"))


def scores(benchmark, error_px: float, name: str):
    """Return scores of matches that all have this error."""

    def get(pair):
        x, y = np.meshgrid(np.arange(40, 280, 40.0), np.arange(40, 200, 40.0))
        points0 = np.stack([x.ravel(), y.ravel()], axis=1)
        there = np.c_[points0, np.ones(len(points0))] @ benchmark.homographies[pair].T
        points1 = there[:, :2] / there[:, 2:] + [error_px, 0]
        return Matches(
            points0=points0.astype(np.float32),
            points1=points1.astype(np.float32),
            scores=np.ones(len(points0), np.float32),
            size0=(320, 240),
            size1=(320, 240),
        )

    return Result(matcher=name, figures=benchmark.score(name, get))


def network(fusion: str, channels: int, name: str = "") -> WeightsFile:
    config = replace(PRESETS["paper"][0], backbone=ResNetConfig(fusion=fusion, channels=channels))
    label = f"({fusion}) {channels}{name}"
    return WeightsFile(label=label, config=config, weights=Path(f"{label}.safetensors"), weights_hash=label)


def test_the_paper_s_whole_set_of_variants(appendix):
    given = [network(letter, 1024) for letter in "edcba"] + [network("a", 256), network("e", 256)]
    results = {n: scores(appendix, 0.5 + index, n.label) for index, n in enumerate(given)}
    fusion = compare_fusion(appendix, results, 1600)
    assert fusion.tables[0].title == "Fusion variants, 1024 channels, 1600 px"
    assert [row[0] for row in fusion.tables[0].rows] == [f"({letter}) 1024" for letter in "abcde"]
    # Errors from 0.5 px for (e) to 4.5 px for (a): correct from the next whole threshold on.
    assert [row[2:6] for row in fusion.tables[0].rows] == [
        [".000", ".000", "1.000", "1.000"],
        [".000", ".000", "1.000", "1.000"],
        [".000", "1.000", "1.000", "1.000"],
        [".000", "1.000", "1.000", "1.000"],
        ["1.000", "1.000", "1.000", "1.000"],
    ]
    channels = compare_channels(appendix, results, 1600)
    assert [row[0] for row in channels.tables[0].rows] == ["(a) 1024", "(a) 256", "(e) 1024", "(e) 256"]
    assert [row[5] for row in channels.tables[0].rows] == ["1.000"] * 4
    assert fusion.notes == channels.notes == []
    assert list(fusion.figures) == ["fusion"] and list(channels.figures) == ["channels"]


def test_which_variants_are_compared(appendix):
    two_runs = [network("a", 1024, ", x/weights"), network("a", 1024, ", y/weights")]
    given = [*two_runs, network("c", 1024), network("c", 256)]
    results = {n: scores(appendix, 0, n.label) for n in given}
    rows = [row[0] for row in compare_fusion(appendix, results, 800).tables[0].rows]
    assert rows == ["(a) 1024, x/weights", "(a) 1024, y/weights", "(b) 1024", "(c) 1024", "(d) 1024", "(e) 1024"]
    # (c) is passed with both numbers of channels; (a) and (e) are compared in the paper.
    channels = compare_channels(appendix, results, 800)
    assert [row[0][:8].strip(",") for row in channels.tables[0].rows] == [
        *("(a) 1024", "(a) 1024", "(a) 256"),
        *("(c) 1024", "(c) 256", "(e) 1024", "(e) 256"),
    ]
    assert channels.notes == [
        "256 against 1024 channels, 800 px: no weights were passed for (a) 256, (e) 1024, (e) 256."
    ]
    # Several files of one variant count once.
    several = [network("a", 256, f", {name}/weights") for name in "xyz"] + [network("a", 1024), network("b", 1024)]
    compared = compare_fusion(appendix, {n: scores(appendix, 0, n.label) for n in several}, 800)
    assert compared.tables[0].title == "Fusion variants, 1024 channels, 800 px"
    nothing = compare_fusion(appendix, {}, 800)
    assert [row[1] for row in nothing.tables[0].rows] == ["missing"] * 5 and nothing.figures == {}


def test_published_curves_stand_beside_the_paper_s_sizes(appendix):
    by_size = {size: scores(appendix, 0, f"default, {size} px") for size in (1600, 1200, 800)}
    compared = compare_sizes(appendix, by_size, [])
    rows = {row[0]: row for row in compared.tables[0].rows}
    sparse = "Sparse-NCNet, 1600 px, hard + soft, best 2000"
    curves = published()[sparse]
    assert rows[f"{sparse}, published"][1:9] == [
        *("1600", "200"),
        *(share(curves["overall"][px - 1]) for px in (1, 3, 5, 10)),
        *(share(curves[kind][2]) for kind in ("illumination", "viewpoint")),
    ]
    # Their map sizes differ.
    assert [name for name in rows if "800 px" in name] == ["default, 800 px"]
    assert list(compared.figures) == ["sizes_same_image", "sizes_same_map", "sizes_smaller"]
    # NCNet ran at 1600 px without the last stride of its backbone, despite its label in the paper.
    assert rows["NCNet, 1600 px, relocalized, best 2000, published"][1:3] == ["1600", "200"]
    assert compared.notes == [
        "The paper labels the curve of NCNet at 1600 px NCNet (3200 H), but its data is for 1600 px."
    ]
    # At half the size other published curves apply; comparisons that are impossible are left out.
    compared = compare_sizes(appendix, {800: by_size[800]}, [])
    assert {row[0] for row in compared.tables[0].rows[1:]} == {
        *("NCNet, 800 px, best 2000, published", "Sparse-NCNet, 800 px, best 2000, published"),
    }
    assert {row[2] for row in compared.tables[0].rows[1:]} == {"100"}
    assert list(compared.figures) == ["sizes_same_image"]


def test_costs_that_could_not_be_measured(folder):
    compared = compare_costs({(network("a", 1024), 1600): None})
    assert compared.tables[0].rows[0] == ["(a) 1024", "1600", "400", "failed", "-", "-", "-"]
    assert compared.figures == {}


@pytest.fixture
def task(folder):
    path0, path1 = (folder / "data" / "v_wall" / f"{number}.png" for number in (1, 2))
    pair = Pair(name0=path0.name, name1=path1.name, path0=path0, path1=path1, group="v_wall")
    (network,) = read_networks([folder / "tiny0.safetensors"])
    return costs.Task(network=network, size=64, pair=pair, device="cpu", top=100)


def test_costs_are_measured_where_the_package_is_not_installed(task, tmp_path, monkeypatch):
    real = metadata.version

    def version(name: str) -> str:
        if name == "dualrc":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    measured, notes = costs.measure_all([task], tmp_path, Console(quiet=True))
    assert notes == [] and measured[0] is not None and measured[0].seen == (64, 48)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process can't tell its own peak from its parent's")
def test_memory_is_that_of_the_new_process_alone(task):
    # 1 GiB, which a forked process would count too.
    ballast = np.ones(2**30, dtype=np.uint8)
    measured = costs.measure(task)
    assert measured.memory_bytes < 0.9 * 2**30 < ballast.nbytes
    assert measured.seen == (64, 48)


def test_processes_that_fail_are_named_and_the_others_go_on(task, tmp_path, monkeypatch):
    broken = replace(task, pair=replace(task.pair, path0=tmp_path / "broken.png"))
    (tmp_path / "broken.png").write_text("not an image")
    console = Console(file=io.StringIO())
    (tmp_path / "costs.json").write_text("{")
    measured, notes = costs.measure_all([broken], tmp_path, console)
    assert measured == [None]
    # The console breaks long paths.
    told = "".join(console.file.getvalue().split())
    assert "costs.jsoncannotberead;timeandmemoryaremeasuredagain" in told
    assert "at 64 px: the process failed" in notes[0] and "broken.png" in notes[0]
    # No result was stored, so the next run tries again.
    assert (tmp_path / "costs.json").read_text() == "{"
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DataError, match=r"killed \(signal 9\), probably for lack of memory; give smaller sizes"):
        costs.measure(task)


def test_the_command_line(folder, tmp_path, monkeypatch, capsys):
    def call(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["dualrc", "evaluate", *map(str, arguments)])
        monkeypatch.setattr(cli.common, "messages", Console(stderr=True, width=200))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 1
        error = capsys.readouterr().err.strip()
        assert error.count("\n") == 0
        return error

    data, weights = folder / "data", folder / "tiny0.safetensors"
    both = ("--weights", weights, "--weights", folder / "nowhere.safetensors")
    out = ("--out", tmp_path / "out")
    assert "nowhere.safetensors does not exist" in call("appendix", data, *both, *out)
    assert "--weights was passed 2 times; hpatches accepts it once" in call("hpatches", data, *both, *out)
    assert "--size was passed 2 times" in call("hpatches", data, "--size", 64, "--size", 96, *out)
    assert "--pairs is an option of appendix only; omit it" in call("hpatches", data, "--pairs", "x.txt", *out)
    assert "--crop is an option of hpatches only; omit it" in call("appendix", data, "--crop", "1,1", *out)
    assert "at least 32" in call("appendix", data, "--size", 64, "--size", 16, *out)
    assert "does not exist" in call("appendix", tmp_path / "nowhere", *out)
