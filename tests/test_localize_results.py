"""Tests of localization runs: results on disk, changed images, killed runs, and the command."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT
from docs_data import documented_keys
from localize_data import QUERY, Oracle, camera_of, make_world, renderings, write_images, write_model, write_rgbd
from typer.testing import CliRunner

from dualrc.cli import app
from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.geometry import Lens, rotation_error_deg
from dualrc.localize import (
    LocalizeConfig,
    Localizer,
    ResultsFile,
    localize_all,
    missing,
    read_map,
    read_poses,
    results_config,
    write_poses,
)
from dualrc.matcher import load

pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")


@pytest.fixture
def world(tmp_path):
    return make_world(tmp_path)


def queries_of(images, *more):
    (images / "broken.jpg").write_text("not an image")
    return {name: images / name for name in ("a.png", "broken.jpg", "b.png", QUERY, *more)}


def test_results_are_kept_and_read_back(world, tmp_path):
    queries = queries_of(tmp_path / "images", "nowhere.png")
    localizer, out = Localizer(Oracle(), world), tmp_path / "out.json"
    results = ResultsFile(out, results_config(localizer), info=localizer.matcher.info)
    done = dict(localize_all(localizer, queries, results))
    assert list(done) == list(queries)
    content = json.loads(out.read_text())
    assert content["config"]["localize"] == {"candidates": 10, "threshold_px": 4.0, "min_inliers": 12}
    assert content["config"]["map"]["images"] == 3 and "torch" in content["info"]
    again = ResultsFile(out, results_config(localizer))
    for name, found in done.items():
        assert again[name].reason == found.reason and again[name].candidates == found.candidates
    assert np.array_equal(again[QUERY].cam_from_world, done[QUERY].cam_from_world)
    assert np.array_equal(again[QUERY].covariance, done[QUERY].covariance)
    assert again[QUERY].camera.source == "the map's"
    assert "not an image" in again["broken.jpg"].reason and "does not exist" in again["nowhere.png"].reason
    poses = read_poses(tmp_path / "out.txt")
    assert list(poses) == ["a.png", "b.png", QUERY]
    assert np.allclose(poses[QUERY], done[QUERY].cam_from_world, atol=1e-9)
    # A second run retries only unreadable images.
    assert missing(localizer, queries, again) == ["broken.jpg", "nowhere.png"]
    # Simulates a process that died between writing its two files.
    (tmp_path / "out.txt").unlink()
    assert list(dict(localize_all(localizer, queries, again))) == ["broken.jpg", "nowhere.png"]
    assert list(read_poses(tmp_path / "out.txt")) == list(poses)
    with pytest.raises(DataError, match=r"another config \(localize\.candidates is 10 there and 3 now\); write to"):
        ResultsFile(out, results_config(Localizer(Oracle(), world, LocalizeConfig(candidates=3))))


def append(path) -> None:
    """Change the content of a file, but not its pixels and its name."""
    path.write_bytes(path.read_bytes() + b" ")


def test_changed_images_are_localized_again(world, tmp_path):
    images, out = tmp_path / "images", tmp_path / "out.json"
    queries = {name: images / name for name in ("a.png", QUERY)}
    one = LocalizeConfig(candidates=1)

    def run() -> list[str]:
        localizer = Localizer(Oracle(), world, one, descriptors=tmp_path / "map.npz")
        return list(dict(localize_all(localizer, queries, ResultsFile(out, results_config(localizer)))))

    assert run() == ["a.png", QUERY] and run() == []
    append(images / QUERY)
    assert run() == [QUERY] and run() == []
    # A changed map image affects itself as a query, the queries matched with it, and its descriptor.
    [candidate] = json.loads(out.read_text())["queries"][QUERY]["candidates"]
    append(images / candidate)
    assert QUERY in run() and run() == []
    localizer = Localizer(Oracle(), world, one, descriptors=tmp_path / "map.npz")
    append(images / "c.png")
    localizer.prepare()
    assert localizer.matcher.extracted == ["c.png"]


def test_a_changed_depth_map_is_noticed(tmp_path):
    folder, out = write_rgbd(tmp_path / "rgbd"), tmp_path / "out.json"
    world, queries = read_map(folder), {QUERY: folder / "images" / QUERY}

    def run() -> list[str]:
        localizer = Localizer(Oracle(), world)
        return list(dict(localize_all(localizer, queries, ResultsFile(out, results_config(localizer)))))

    assert run() == [QUERY] and run() == []
    append(folder / "depth" / "a.png")
    assert run() == [QUERY] and run() == []


def test_other_cameras_and_other_maps_are_no_old_results(world, tmp_path):
    """Results depend on the cameras that were given, and on the coordinates of the map."""
    queries, out = {QUERY: tmp_path / "images" / QUERY}, tmp_path / "out.json"
    localizer = Localizer(Oracle(), world)

    def run(cameras=None) -> list[str]:
        results = ResultsFile(out, results_config(localizer))
        outdated = missing(localizer, queries, results, cameras=cameras)
        assert list(dict(localize_all(localizer, queries, results, cameras=cameras))) == outdated
        return outdated

    camera = camera_of(QUERY)
    assert run() == [QUERY] and run() == []
    for given in (camera, replace(camera, lens=Lens("SIMPLE_RADIAL", (0.1,))), camera.pinhole):
        assert run({QUERY: given}) == [QUERY] and run({QUERY: given}) == []
    assert json.loads(out.read_text())["queries"][QUERY]["camera"]["source"] == "given"
    assert run({}) == [QUERY] and run() == []
    # The same map in another unit has as many points and images.
    model = pycolmap.Reconstruction(tmp_path / "model")
    model.transform(pycolmap.Sim3d(2.0, pycolmap.Rotation3d(), np.zeros(3)))
    model.write(tmp_path / "model")
    scaled = Localizer(Oracle(), read_map(tmp_path / "model", tmp_path / "images"))
    with pytest.raises(DataError, match=r"another config \(map\.content is '\w+' there and '\w+' now\); write to"):
        ResultsFile(out, results_config(scaled))


def test_results_without_a_hash_are_kept_without_reading_the_map(world, tmp_path):
    queries = {QUERY: tmp_path / "images" / QUERY}
    localizer = Localizer(Oracle(), world)
    results = ResultsFile(tmp_path / "out.json", results_config(localizer))
    results.put(QUERY, localizer.localize(queries[QUERY]))
    localizer.content = None  # type: ignore[method-assign, assignment]
    assert missing(localizer, queries, results) == []


def test_one_run_at_a_time_writes_results(world, tmp_path):
    localizer = Localizer(Oracle(), world)
    queries = {name: tmp_path / "images" / name for name in ("a.png", "b.png")}
    first, second = (ResultsFile(tmp_path / "out.json", results_config(localizer)) for _ in range(2))
    running = localize_all(localizer, queries, first)
    next(running)
    refused = []

    def try_it() -> None:
        try:
            list(localize_all(localizer, queries, second))
        except OutputError as error:
            refused.append(str(error))

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert len(refused) == 1 and "Another run" in refused[0]
    assert len(list(running)) == 1
    # The file was opened before the first run wrote to it, and is read again now.
    assert list(localize_all(localizer, queries, second)) == [] and list(second) == ["a.png", "b.png"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_localize_results import *
folder, count = Path(sys.argv[2]), int(sys.argv[3])
localizer = Localizer(Oracle(), read_map(folder / "model", folder / "images"))
real = localizer.pose
def pose(*args, **kwargs):
    global count
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    count -= 1
    return real(*args, **kwargs)
localizer.pose = pose
results = ResultsFile(folder / "out.json", results_config(localizer))
for _ in localize_all(localizer, queries_of(folder / "images"), results): pass
"""


def test_a_kill_loses_only_the_query_in_work(world, tmp_path):
    queries = queries_of(tmp_path / "images")
    command = [sys.executable, "-c", KILLED, str(ROOT / "tests"), str(tmp_path), "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    localizer = Localizer(Oracle(), world)
    results = ResultsFile(tmp_path / "out.json", results_config(localizer))
    assert list(results) == ["a.png", "broken.jpg", "b.png"]
    assert [name for name, _ in localize_all(localizer, queries, results)] == ["broken.jpg", QUERY]
    fresh = ResultsFile(tmp_path / "fresh.json", results_config(localizer))
    dict(localize_all(localizer, queries, fresh))
    assert (tmp_path / "fresh.txt").read_text() == (tmp_path / "out.txt").read_text()


@pytest.mark.parametrize("key", ["width", "K", "model", "source"])
def test_a_damaged_camera_is_a_damaged_result(world, tmp_path, key):
    localizer, out = Localizer(Oracle(), world), tmp_path / "out.json"
    ResultsFile(out, {}).put(QUERY, localizer.localize(tmp_path / "images" / QUERY))
    content = json.loads(out.read_text())
    content["queries"][QUERY]["camera"][key] = "damaged"
    if key == "source":
        del content["queries"][QUERY]["camera"][key]
    out.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"q\.png: not a result \(.+\); delete the file and localize again"):
        ResultsFile(out, {})[QUERY]


def test_files_that_are_no_results(tmp_path):
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"format": "x"}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="not a file of localizations"):
            ResultsFile(tmp_path / name, {})
    (tmp_path / "d.txt").write_text("somebody's list")
    with pytest.raises(OutputError, match=r"d\.txt exists"):
        ResultsFile(tmp_path / "d.json", {})
    with pytest.raises(OutputError, match=r"ends in \.json"):
        ResultsFile(tmp_path / "a.txt", {})
    with pytest.raises(OutputError, match="does not exist"):
        ResultsFile(tmp_path / "nowhere" / "a.json", {})


def test_poses_as_others_read_them(tmp_path):
    random = np.random.default_rng(0)
    poses = {}
    for number in range(20):
        axis = random.normal(size=3)
        axis /= np.linalg.norm(axis)
        # Formulas for quaternions tend to fail at half turns.
        R = 2 * np.outer(axis, axis) - np.eye(3) if number % 2 else pycolmap.Rotation3d(axis * number / 9).matrix()
        poses[f"night/ü {number}.jpg"] = np.column_stack([R, random.normal(size=3) * 1e4])
    write_poses(tmp_path / "poses.txt", poses)
    found = read_poses(tmp_path / "poses.txt")
    assert all(np.allclose(found[name], pose, rtol=1e-9, atol=1e-9) for name, pose in poses.items())
    write_poses(tmp_path / "one.txt", {"a.jpg": np.c_[np.eye(3), [1, 2, 3]]})
    assert (tmp_path / "one.txt").read_text() == "a.jpg 1 0 0 0 1 2 3\n"
    (tmp_path / "one.txt").write_text("a.jpg 1 0 0 0 1 2 3\n\nb.jpg 1 0 0\n")
    with pytest.raises(DataError, match="line 3: not a pose"):
        read_poses(tmp_path / "one.txt")


def test_the_command(tmp_path):
    """With the bundled network, results and poses are written, and failures are reported."""
    images = write_images(tmp_path / "images")
    write_model(tmp_path / "model")
    (tmp_path / "queries").mkdir()
    (images / QUERY).rename(tmp_path / "queries" / QUERY)
    (tmp_path / "queries" / "broken.jpg").write_text("not an image")
    out = tmp_path / "out.json"
    command = ["localize", str(tmp_path / "queries"), "--map", str(tmp_path / "model"), "--images", str(images)]
    done = CliRunner().invoke(app, [*command, "--out", str(out), "--candidates", "2", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "1 of 2 images localized" in done.output and "broken.jpg" in done.output
    content = json.loads(out.read_text())["queries"]
    assert f"median {content[QUERY]['inliers']:,}" in done.output
    assert set(content) == {QUERY, "broken.jpg"} and len(content[QUERY]["candidates"]) == 2
    pose = read_poses(tmp_path / "out.txt")[QUERY]
    true = renderings()[QUERY].view.cam_from_world
    assert rotation_error_deg(pose[:, :3], true[:, :3]) < 2
    done = CliRunner().invoke(app, [*command, "--out", str(out), "--candidates", "2", "--device", "cpu", "--json"])
    printed = json.loads(done.stdout)
    assert printed["images"] == 2 and printed["localized"] == 1
    [row] = [line for line in (ROOT / "docs/running.md").read_text().splitlines() if line.startswith("| `localize` |")]
    assert sorted(printed) == sorted(re.findall(r"`(\w+)`", row)[1:])
    (tmp_path / "queries" / QUERY).unlink()
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "none.json"), "--device", "cpu"])
    assert done.exit_code == 3 and "0 of 1 images localized" in done.output
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "none.json"), "--device", "cpu", "--json", "-q"])
    result = json.loads(done.stdout)
    assert set(result) == documented_keys("localize") and (result["images"], result["localized"]) == (1, 0)
    assert "exit status is 3" in " ".join(CliRunner().invoke(app, ["localize", "--help"]).output.split())


def test_options_of_matching_reach_the_matcher(tmp_path):
    """With the bundled network: `top` applies per candidate, and high quality transfers points by nearby matches."""
    images, out = write_images(tmp_path / "images"), tmp_path / "out.json"
    write_model(tmp_path / "model")
    command = ["localize", str(images / QUERY), "--map", str(tmp_path / "model"), "--images", str(images)]
    options = ["--neighbors", "2", "--top", "40", "--min-score", "0.001", "--quality", "high", "--max-memory", "1"]
    done = CliRunner().invoke(app, [*command, "--out", str(out), *options, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    assert {"top": 40, "min_score": 0.001, "quality": "high"}.items() <= content["config"]["matcher"].items()
    assert content["config"]["localize"]["candidates"] == 2
    assert "max_memory" not in content["config"]["matcher"]
    assert 12 <= content["queries"][QUERY]["correspondences"] <= 80
    pose, true = read_poses(tmp_path / "out.txt")[QUERY], renderings()[QUERY].view.cam_from_world
    assert rotation_error_deg(pose[:, :3], true[:, :3]) < 2
    localizer = Localizer(load(quality="high", device="cpu"), read_map(tmp_path / "model", images))
    with pytest.raises(ConfigError, match="pass images instead of features"):
        localizer.localize(localizer.matcher.features(images / QUERY))
