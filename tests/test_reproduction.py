"""The script that trains and compares the systems of the paper, on its smallest case."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, rand, texture
from evaluation_data import write_cameras_json, write_hpatches
from PIL import Image
from safetensors.torch import save_file

import dualrc.train.loop
from dualrc.model.backbone import ResNet
from dualrc.model.checkpoint import load_weights
from dualrc.model.dualrc import make_network

SCRIPT = ROOT / "benchmarks" / "reproduction.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def script():
    """Return the script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("reproduction")


@pytest.fixture(scope="module")
def systems(script):
    """Return the module of systems and training."""
    return sys.modules["reproduction_systems"]


def run(*arguments: object) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory, script, systems) -> Path:
    """Two systems, trained for two steps with a random trunk, and evaluated: one in this process, one by the script."""
    folder = tmp_path_factory.mktemp("reproduction")
    (folder / "photos").mkdir()
    for number in range(12):
        Image.fromarray(texture(number, 160, 150)).save(folder / "photos" / f"{number:02}.png")
    torch.manual_seed(0)
    trunk, photos = folder / "trunk.safetensors", folder / "photos"
    save_file(ResNet("resnet50", stride_on="1x1").state_dict(), trunk)
    hpatches, scenes = write_hpatches(folder / "hpatches"), write_cameras_json(folder / "scenes")
    system, sizes = systems.ALL["a-256"], {"steps": 2, "size": 64, "pairs": 2, "points": 16}
    training = systems.Training(photos=(str(photos),), trunk=str(trunk), **sizes, device="cpu")
    systems.run_training(systems.Run(system=system, rate=1e-3, name="a-256"), folder / "runs", training, math.inf)
    before = (folder / "runs" / "a-256" / "checkpoint.pt").stat().st_mtime_ns
    only = ("--only", "a-256", "ncnet", "--device", "cpu", "--rates", 1e-3)
    small = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    printed = run("train", folder / "runs", "--photos", photos, "--trunk", trunk, *only, *small)
    assert "ncnet: training took" in printed and "training, 1 in all" in printed
    # The other run was finished.
    assert (folder / "runs" / "a-256" / "checkpoint.pt").stat().st_mtime_ns == before
    data = script.Data(hpatches=(hpatches,), scenes=(scenes,), every=2, sizes=(96,), timed=((96, 64),), device="cpu")
    for name in ("a-256", "ncnet"):
        script.run_accuracy(systems.ALL[name], folder / "runs", data)
        script.run_costs(systems.ALL[name], folder / "runs", data)
    options = ("--hpatches", hpatches, "--scenes", scenes, "--size", 96, "--timed", "96x64", "--every", 2)
    printed = run("evaluate", folder / "runs", *options, "--only", "a-256", "ncnet", "--device", "cpu")
    # Nothing is left to measure.
    assert "accuracy, 0 in all" in printed and "| DualRC-Net (a), 256 | `paper` | 96 |" in printed
    return folder / "runs"


def test_results_have_accuracy_costs_and_curves_of_every_system(runs):
    results = json.loads((runs / "results.json").read_text())
    assert [system["name"] for system in results["systems"]] == ["ncnet", "a-256"]
    for system in results["systems"]:
        scored = system["hpatches"]["96"]["2000"]
        assert scored.keys() == {"overall", "illumination", "viewpoint"}
        assert len(scored["overall"]["mma"]) == 10 and 0 <= scored["overall"]["mma"][9] <= 1
        assert system["pose"]["pairs"] > 1 and len(system["pose"]["auc"]) == 3
        assert {row["pair"] for row in system["costs"]} == {"illumination", "viewpoint", "multi-view"}
        assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in system["costs"])
        assert [step for step, _ in system["curve"]] == [1, 2]
    # The consensus has 16 kernels and biases, then one kernel over 16 channels and a bias.
    assert results["systems"][0]["parameters"] == 16 * 81 + 16 + 16 * 81 + 1
    assert results["training"]["steps"] == 2 and set(results["training"]["rates"].values()) == {1e-3}


def test_tables_and_charts_are_made_from_the_results(runs, tmp_path, script):
    printed = script.tables(json.loads((runs / "results.json").read_text()))
    rows = [line for line in printed.splitlines() if line.startswith("| NCNet | `paper` |")]
    assert len(rows) == 4
    assert "| DualRC-Net, 1600 px, best 2000 |" in printed
    environment = {**ENVIRONMENT, "FIGURES": str(tmp_path), "REPRODUCTION": str(runs / "results.json")}
    command = [sys.executable, str(ROOT / "docs" / "figures"), "reproduction"]
    subprocess.run(command, env=environment, check=True)
    names = {"reproduction-rivals.png", "reproduction-variants.png", "reproduction-training.png"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_systems_whose_training_has_not_ended_are_left_out(runs, tmp_path, systems):
    assert "ncnet" not in systems.unfinished(runs) and systems.unfinished(runs)["ncnet-weak"] == 0
    stopped = tmp_path / "runs"
    shutil.copytree(runs, stopped, ignore=shutil.ignore_patterns("checkpoint.pt"))
    # As if training had been stopped after its first step; accuracy and costs had been measured before.
    log = stopped / "ncnet" / "log.csv"
    lines = [line for line in log.read_text().splitlines() if line.startswith("1,")]
    log.write_text("\n".join([*lines, "1,held_out_loss,4.5\n"]))
    printed = run("evaluate", stopped, "--only", "a-256", "ncnet", "--device", "cpu")
    results = json.loads((stopped / "results.json").read_text())
    assert [system["name"] for system in results["systems"]] == ["a-256"] and results["unfinished"]["ncnet"] == 1
    rows = [line for line in printed.splitlines() if line.startswith("| NCNet | `paper` |")]
    assert rows == ["| NCNet | `paper` | 1 of 2 steps |"]


def test_a_derived_system_is_finished_with_its_source(tmp_path, systems):
    (tmp_path / "training.json").write_text(json.dumps({"steps": 9}))
    for name, step in (("a-1024", 9), ("a-1024-matching", 8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text(f"5,held_out_loss,1.0\n{step},held_out_loss,0.5\n")
    found = systems.unfinished(tmp_path)
    assert found["a-1024-matching"] == found["a-1024-matching-cells"] == 8
    assert not found.keys() & {"a-1024", "a-1024-resnet101", "a-1024-untrained"}


def test_the_cost_of_a_larger_trunk_does_not_change_the_features(systems):
    torch.manual_seed(0)
    network = make_network(systems.SYSTEMS[0].network)
    larger = systems.with_resnet101(network)
    image = rand(0, 1, 3, 64, 48)
    with torch.inference_mode():
        ours, theirs = network.extract(image), larger.extract(image)
    assert torch.allclose(ours.coarse, theirs.coarse) and torch.allclose(ours.fine, theirs.fine)
    assert len(larger.backbone.trunk.layer3) == 23


def test_the_untrained_network_is_that_from_which_training_starts(systems, runs):
    system = systems.ALL["a-256"]
    trained = load_weights(runs / "a-256" / "weights.safetensors")
    settings = {"steps": 2, "size": 64, "pairs": 2, "points": 16, "device": "cpu"}
    training = systems.Training(photos=("photos",), trunk=str(runs.parent / "trunk.safetensors"), **settings)
    torch.manual_seed(0)
    start, found = dualrc.train.loop._network(training.config(system, 1e-3)), systems.untrained(trained)
    for name, tensor in start.state_dict().items():
        assert torch.allclose(found.state_dict()[name], tensor, rtol=1e-3, atol=1e-3), name
    assert not torch.equal(found.backbone.fine.weight, trained.backbone.fine.weight)


def test_systems_differ_only_in_network_loss_and_rate(systems):
    settings = {"photos": ("photos",), "trunk": "trunk.safetensors", "steps": 600, "size": 400, "pairs": 16}
    training = systems.Training(**settings, points=128, device=None)
    configs = [training.config(system, 1e-3) for system in systems.SYSTEMS]
    common = {(c.data, c.seed, c.steps, c.size, c.pairs, c.points, c.optimizer, c.trunk) for c in configs}
    assert len(common) == 1
    assert {c.network.consensus for c in configs} == {configs[0].network.consensus}
    fusions = {(c.network.backbone.fusion, c.network.backbone.channels) for c in configs if c.network.ncnet is None}
    assert fusions == {*((fusion, 1024) for fusion in "abcde"), ("a", 256)}


def test_the_rate_with_the_lowest_finite_loss_is_chosen(systems, tmp_path):
    tried = [systems.Run(system=systems.SYSTEMS[0], rate=rate, name=f"{rate:g}") for rate in (1e-2, 1e-3, 1e-4, 1e-5)]
    for run, loss in zip(tried, ("nan", "3.5", "2.5"), strict=False):
        (tmp_path / run.name).mkdir()
        (tmp_path / run.name / "log.csv").write_text(f"5,held_out_loss,1.0\n9,held_out_loss,{loss}\n")
    assert systems.best_rate(tried, tmp_path) == 1e-4
