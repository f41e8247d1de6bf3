"""Tests of HPatches from files to tables: known answers, bad input, resumption, and the measured baseline."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from evaluation_data import SHARED, run_evaluation, write_hpatches, write_matchers

from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.evaluation.hpatches import EXCLUDED, HPatches, HPatchesSettings, parse_crop, published

pytest.importorskip("cv2", reason="OpenCV is not installed: pip install 'dualrc[baselines]'")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_matchers(folder)
    return write_hpatches(folder / "hpatches")


def run(data, out, *names, roots=None, top=1000, **settings):
    roots = (data,) if roots is None else roots
    return run_evaluation("hpatches", roots, out, data.parent, names, top=top, **settings)


def open_hpatches(root):
    return HPatches(HPatchesSettings(roots=(root,), out=root.parent / "out"))


def overall(content, index=0):
    return content["results"][index].figures[0].groups["overall"]


def test_an_oracle_is_perfect_and_a_broken_matcher_is_not(data, tmp_path):
    content, text = run(data, tmp_path, "homography_oracle", "broken", "nothing", top=None)
    best, broken, nothing = (overall(content, index) for index in range(3))
    assert best.mma == (1.0,) * 10
    assert best.homography_auc == pytest.approx((1, 1, 1), abs=1e-3)
    assert best.matches == best.correct == 1000
    # 2000 were requested.
    assert content["results"][0].figures[1].groups["overall"].matches == 1200
    assert content["results"][0].figures[1].groups["overall"].coverage == pytest.approx(1)
    assert max(broken.mma) < 0.05
    assert max(broken.homography_auc) < 0.05
    assert nothing.mma == (0.0,) * 10
    assert (nothing.matches, nothing.coverage, nothing.pairs) == (0, 0, 10)
    assert nothing.homography_auc == (0, 0, 0)
    assert set(content["results"][0].figures[0].groups) == {"overall", "illumination", "viewpoint"}
    assert "matchers:broken" in text


def test_what_is_written(data, tmp_path):
    run(data, tmp_path / "out", "homography_oracle", top=None)
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["results"][0]["figures"][0]["groups"]["overall"]["mma"] == [1.0] * 10
    assert written["results"][0]["config"]["name"] == "homography_oracle"
    assert written["protocol"]["tops"] == [1000, 2000]
    page = (tmp_path / "out" / "report.html").read_text()
    # The page is self-contained.
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("<img") == 2 + 5
    assert len(page) < 3_000_000
    figures = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"mma_top1000.png", "mma_top2000.png", "01_matchers_homography_oracle_best_pairs.png"} <= figures


def test_infinite_errors_are_null_in_json(data, tmp_path):
    run(data, tmp_path, "nothing")
    written = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert written["results"][0]["figures"][0]["pairs"][0]["corner_error_px"] is None


def test_matches_are_exported_once_and_scored_again(data, tmp_path):
    run(data, tmp_path, "homography_oracle")
    content, text = run(data, tmp_path, "homography_oracle", top=100)
    assert "10 pairs were in" in text
    assert overall(content).matches == 100
    # Each config has its own store, and the message names the older one.
    content, text = run(data, tmp_path, "homography_oracle", crop=(8, 0))
    assert "made with another config" in text
    assert len(list(tmp_path.glob("matches-*.sqlite"))) == 2


def test_a_crop_moves_the_truth_along_and_unmasks_a_shared_grid(data, tmp_path):
    still = (data / "i_day",)
    plain, _ = run(data, tmp_path / "a", "same_grid", "sift-ratio", roots=still)
    cropped, _ = run(data, tmp_path / "b", "same_grid", "sift-ratio", roots=still, crop=(9, 6))
    assert overall(plain).mma[0] == 1
    assert overall(cropped).mma[9] == 0
    assert overall(plain, 1).mma[2] > 0.97
    assert overall(cropped, 1).mma[2] > 0.97
    nothing_left, _ = run(data, tmp_path / "c", "same_grid", roots=still, crop=(400, 0))
    assert len(nothing_left["results"][0].failures) == 5
    assert "leaves none" in next(iter(nothing_left["results"][0].failures.values()))


def test_images_in_other_formats(tmp_path):
    for suffix in (".ppm", ".jpg"):
        root = write_hpatches(tmp_path / suffix[1:], ["v_wall"], suffix=suffix)
        assert [pair.path1.suffix for pair in open_hpatches(root).pairs] == [suffix] * 5


def test_sequences_that_the_protocol_leaves_out(tmp_path):
    root = write_hpatches(tmp_path / "h", ["v_wall", "i_dc", "v_talent"])
    benchmark = open_hpatches(root)
    assert {pair.group for pair in benchmark.pairs} == {"v_wall"}
    assert [note.split()[0] for note in benchmark.notes] == ["i_dc", "v_talent"]
    assert len(EXCLUDED) == 8


def test_broken_data_is_named_and_counted(data, tmp_path):
    root = write_hpatches(tmp_path / "h", ["v_wall"])
    (root / "v_wall" / "2.png").write_text("not an image")
    (root / "v_wall" / "3.png").unlink()
    (root / "v_wall" / "H_1_4").unlink()
    (root / "v_wall" / "H_1_5").write_text("1 0 0 0 1 0 0 0")
    content, text = run(data, tmp_path / "out", "homography_oracle", roots=(root,))
    assert len(content["results"][0].failures) == 2
    # Two failures count as 0, two pairs have no ground truth.
    assert overall(content).pairs == 3
    assert overall(content).mma[9] == pytest.approx(1 / 3)
    for words in ("v_wall 1-4 is not scored", "v_wall 1-5 is not scored", "2 of 3 pairs could not be matched"):
        assert words in text
    # After the repair, only the failed pairs are matched again.
    fresh = write_hpatches(tmp_path / "fresh", ["v_wall"])
    for k in (2, 3):
        (root / "v_wall" / f"{k}.png").write_bytes((fresh / "v_wall" / f"{k}.png").read_bytes())
    content, text = run(data, tmp_path / "out", "homography_oracle", roots=(root,))
    assert "1 pairs were in" in text and "2 new" in text
    assert overall(content).mma[9] == 1


def test_functions_that_fail_are_named_and_counted(data, tmp_path):
    content, text = run(data, tmp_path, "failing", "wrong_shape")
    assert "10 of 10 pairs could not be matched" in text
    assert "no luck today" in text
    assert overall(content).mma == (0.0,) * 10
    assert "points1 has shape (4, 2)" in next(iter(content["results"][1].failures.values()))


def test_roots_that_are_none(data, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        run(data, tmp_path, "nothing", roots=(tmp_path / "nowhere",))
    with pytest.raises(DataError, match=r"no sequences i_\* or v_\*"):
        run(data, tmp_path, "nothing", roots=(tmp_path,))
    with pytest.raises(DataError, match="The sequence i_day is in"):
        run(data, tmp_path, "nothing", roots=(data, data))
    (tmp_path / "empty" / "v_empty").mkdir(parents=True)
    with pytest.raises(DataError, match="no pair with a homography"):
        run(data, tmp_path, "nothing", roots=(tmp_path / "empty",))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cameras.json").write_text("{}")
    with pytest.raises(DataError, match="evaluate pose"):
        run(data, tmp_path, "nothing", roots=(tmp_path / "other",))


def test_settings_that_make_no_sense(data, tmp_path):
    for wrong in ({"top": 0}, {"crop": (-1, 0)}, {"roots": ()}):
        with pytest.raises(ConfigError):
            run(data, tmp_path, "nothing", **wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="Cannot create the folder"):
        run(data, tmp_path / "file", "nothing")
    for name in ("figures", "results.json/x", "report.html/x"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("")
        words = r"Cannot create the folder .*figures .*a file is in its place" if name == "figures" else "is a folder"
        with pytest.raises(OutputError, match=words):
            run(data, tmp_path / "out", "nothing")
        # No pair was matched before the error.
        assert not list((tmp_path / "out").glob("*.sqlite"))
        shutil.rmtree(tmp_path / "out")
    assert parse_crop("3,4") == (3, 4)
    for text in ("3", "3,x", "3,4,5", ""):
        with pytest.raises(ConfigError, match="X,Y"):
            parse_crop(text)


STUCK = """
import time
from pathlib import Path

import matchers


def stuck(path0, path1):
    calls = Path(__file__).parent / "calls.txt"
    with calls.open("a") as file:
        file.write(f"{path1}\\n")
    if calls.read_text().count("\\n") == 5:  # until it is killed
        time.sleep(600)
    return matchers.homography_oracle(path0, path1)
"""


def test_kill_9_and_then_only_what_is_missing(data, tmp_path):
    write_matchers(tmp_path)
    (tmp_path / "stuck.py").write_text(STUCK)
    calls = tmp_path / "calls.txt"
    arguments = ["evaluate", "hpatches", data, "--matcher", f"{tmp_path / 'stuck.py'}:stuck", "--out", tmp_path / "out"]
    command = [sys.executable, "-m", "dualrc", *map(str, arguments)]
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "80"}
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while (not calls.exists() or calls.read_text().count("\n") < 5) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert calls.read_text().count("\n") == 5
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # The pair that was running when the process died is matched again.
    assert calls.read_text().count("\n") == 5 + 6
    assert "4 pairs were in" in done.stderr
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["results"][0]["figures"][0]["groups"]["overall"]["mma"] == [1.0] * 10


def test_a_mistake_on_the_command_line_is_one_line(tmp_path):
    command = [sys.executable, "-m", "dualrc", "evaluate", "hpatches", str(tmp_path / "nowhere"), "--matcher", "sift"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert "does not exist" in done.stderr


def test_published_curves():
    curves = published()
    assert len(curves) == 16
    assert all(len(curve) == 10 and max(curve) <= 1 for method in curves.values() for curve in method.values())
    ours = curves["DualRC-Net, 1600 px, best 1000"]
    mean = (52 * ours["illumination"][2] + 56 * ours["viewpoint"][2]) / 108
    assert ours["overall"][2] == pytest.approx(mean, abs=1e-3)
    reference = SHARED / "reference" / "hpatches_mma.json"
    if reference.exists():
        stored = json.loads(reference.read_text())["methods"]
        assert sorted(c["overall"] for c in curves.values()) == sorted(c["overall"] for c in stored.values())


@pytest.mark.skipif(not (SHARED / "oxford").is_dir(), reason="../shared/data with hpatches and oxford is not here")
def test_root_sift_agrees_with_an_independent_measurement(data, tmp_path):
    content, _ = run(data, tmp_path, "sift-ratio", roots=(SHARED / "hpatches", SHARED / "oxford"), top=1000)
    score = overall(content)
    assert np.array(score.mma)[[0, 2, 4]] == pytest.approx([0.456, 0.689, 0.727], abs=0.02)
    assert score.matches == pytest.approx(374, rel=0.02)
    assert score.pairs == 30
