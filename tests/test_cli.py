"""Tests of the command line: outputs, messages and errors."""

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.main import get_command

from dualrc import Matches, cli
from dualrc.collection.config import CollectionConfig
from dualrc.config import CompactConfig, FineConfig, NetworkConfig
from dualrc.matcher.extract import choose_device, devices
from dualrc.model.checkpoint import bundled, save_weights
from dualrc.model.dualrc import make_network
from dualrc.ops.native import library

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A tiny untrained network of the preset `default`."""
    torch.manual_seed(0)
    backbone = CompactConfig(widths=(8, 8, 16, 16, 16), depths=(1, 1, 1, 1), coarse_channels=16, fine_channels=16)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_weights(make_network(NetworkConfig(preset="default", backbone=backbone, fine=FineConfig())), path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> tuple[Path, Path]:
    """Write an image of smooth noise, and the same image shifted by 16 pixels."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).integers(0, 255, (24, 30, 3), dtype=np.uint8)
    large = Image.fromarray(noise).resize((176, 160), Image.Resampling.BICUBIC)
    paths = folder / "a.png", folder / "b.png"
    large.crop((0, 0, 160, 128)).save(paths[0])
    large.crop((16, 0, 176, 128)).save(paths[1])
    return paths


@pytest.mark.parametrize("ending", [".npz", ".json", ".csv"])
def test_match_writes_and_draws(run, weights, images, tmp_path, ending):
    out, drawing = tmp_path / f"m{ending}", tmp_path / "m.png"
    status, screen, errors = run("match", *images, "-o", out, "--draw", drawing, "--weights", weights, "--top", 50)
    assert status == 0, errors
    matches = Matches.load(out)
    assert 0 < len(matches) <= 50
    assert matches.size0 == matches.size1 == (160, 128)
    assert f"{len(matches)} matches" in screen
    assert matches.info["network"]["preset"] == "default"
    with Image.open(drawing) as image:
        assert image.size[0] > 160
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".csv.json")) == sorted(
        ["m.png", f"m{ending}"]
    )


def test_match_in_little_memory(run, weights, images, tmp_path):
    out = tmp_path / "m.json"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        status, screen, errors = run(
            "match", *images, "-o", out, "--weights", weights, "--size", 1600, "--max-memory", 0.1
        )
    assert status == 0, errors
    width, height = Matches.load(out).info["network_size0"]
    assert width < 1600 and f"network input {width}x{height}" in screen
    note = " ".join(errors.split())
    assert f"Note: A pair of 1600x1280 does not fit into 0.1 GiB of memory; it is matched at {width}x{height}." in note
    status, _, errors = run("match", *images, "--weights", weights, "--max-memory", 0.0001)
    assert status == 1 and "give more max_memory" in errors
    status, _, errors = run("match", *images, "--weights", weights, "--max-memory", 0)
    assert status == 1 and "must be above 0" in errors


def test_estimate_is_saved_with_the_matches(run, weights, images, tmp_path):
    out = tmp_path / "m.json"
    status, screen, errors = run("match", *images, "-o", out, "--weights", weights, "--estimate", "homography")
    assert status == 0, errors
    content = json.loads(out.read_text())
    matrix = np.array(content["estimate"]["matrix"])
    assert matrix.shape == (3, 3)
    assert sum(content["inliers"]) > 10
    assert "homography" in screen
    assert "inliers" in screen
    # The second image is the first one shifted by 16 pixels.
    moved = matrix @ [80, 64, 1]
    assert moved[:2] / moved[2] == pytest.approx([64, 64], abs=1.0)


def test_essential_takes_cameras(run, weights, images, tmp_path):
    cameras = tmp_path / "cameras.json"
    camera = {"width": 160, "height": 128, "K": [[150, 0, 80], [0, 150, 64], [0, 0, 1]]}
    cameras.write_text(json.dumps({"a.png": camera, "b.png": camera}))
    arguments = ("match", *images, "--weights", weights, "--cameras", cameras)
    status, screen, errors = run(*arguments, "--estimate", "essential")
    assert status == 0, errors
    assert "essential" in screen
    status, _, errors = run(*arguments)
    assert status == 1
    assert "--estimate essential" in errors


def bad_inputs(folder: Path) -> dict[str, Path]:
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpg").write_text("not an image")
    Image.fromarray(np.zeros((300, 300, 3), np.uint8)).save(folder / "whole.jpg")
    (folder / "truncated.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:400])
    Image.fromarray(np.zeros((1, 1, 3), np.uint8)).save(folder / "dot.png")
    Image.fromarray(np.zeros((15, 4000, 3), np.uint8)).save(folder / "thin.png")
    names = ("missing.jpg", "empty.jpg", "text.jpg", "truncated.jpg", "dot.png", "thin.png")
    return {**{name: folder / name for name in names}, "folder": folder}


@pytest.mark.parametrize(
    "name", ["missing.jpg", "empty.jpg", "text.jpg", "truncated.jpg", "dot.png", "thin.png", "folder"]
)
def test_a_bad_image_is_one_clear_line(run, weights, images, tmp_path, name):
    out = tmp_path / "m.npz"
    status, _, errors = run("match", images[0], bad_inputs(tmp_path)[name], "-o", out, "--weights", weights)
    assert status == 1
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1
    assert "Traceback" not in errors
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("-o", "nowhere/m.npz"), "does not exist"),
        (("-o", "m.xyz"), ".npz"),
        (("--draw", "m.gif"), ".png"),
        (("--weights", "missing.safetensors"), "does not exist"),
        (("--preset", "paper"), "'paper'"),
        (("--preset", "unknown"), "no preset"),
        (("--device", "abacus"), "abacus"),
        (("--size", "10"), "size"),
        (("--top", "-1"), "top"),
        (("--estimate", "homography", "--threshold", "0"), "threshold"),
        (("--estimate", "essential", "--cameras", "missing.json"), "missing.json"),
    ],
)
def test_bad_options_are_one_clear_line(run, weights, images, options, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = options if "--weights" in options else (*options, "--weights", weights)
    status, _, errors = run("match", *images, *arguments)
    assert status == 1
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1
    assert expected in errors
    assert list(tmp_path.iterdir()) == []


def test_an_image_is_not_overwritten_by_its_matches(run, weights, images):
    before = images[0].read_bytes()
    status, _, errors = run("match", *images, "--draw", images[0], "--weights", weights)
    assert status == 1
    assert "another file" in errors
    assert images[0].read_bytes() == before


def test_weights_of_another_preset_name_both(run, weights, images):
    status, _, errors = run("match", *images, "--weights", weights, "--preset", "paper")
    assert status == 1
    assert "'default'" in errors
    assert "'paper'" in errors


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_before_matching(run, weights, images, tmp_path):
    tmp_path.chmod(0o500)
    status, _, errors = run("match", *images, "-o", tmp_path / "m.npz", "--weights", weights)
    assert status == 1
    assert "not writable" in errors


def options_of(command: str) -> set[str]:
    """Return the flags of a command, in every spelling."""
    return {flag for option in get_command(cli.app).commands[command].params for flag in option.opts}


def test_commands_of_folders_take_what_matching_takes():
    assert options_of("collection") <= options_of("reconstruct")
    asked = {"--top", "--min-score", "--size", "--quality", "--preset", "--weights", "--device", "--max-memory"}
    assert all(asked <= options_of(command) for command in ("match", "collection", "reconstruct", "localize"))
    assert "--neighbors" in options_of("localize")


@pytest.mark.parametrize("name", ["gpu", "abacus", "cuda:99"])
def test_devices_that_are_not_here_are_one_clear_line(run, weights, images, name):
    if name == "gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, _, errors = run("match", *images, "--weights", weights, "--device", name)
    asked = name.replace("gpu", "cuda")
    assert status == 1 and errors.count("\n") == 1
    assert errors.startswith(f"Error: Cannot use the device '{asked}' (")
    assert errors.endswith(f"available devices: {', '.join(devices())}.\n") and "cpu" in devices()


def test_gpu_is_another_name_for_cuda(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *_, device: asked.append(str(device)) or torch.zeros(1))
    assert choose_device("gpu") == torch.device("cuda") and choose_device("gpu:1") == torch.device("cuda:1")
    assert asked == ["cuda", "cuda:1"]
    assert CollectionConfig(device="gpu").device == "cuda"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_options(tmp_path):
    program = tmp_path / "dualrc"
    program.write_text(f"#!{sys.executable}\nfrom dualrc.cli import main\nmain()\n")
    program.chmod(0o755)
    typed = "COMP_WORDS=(dualrc localize --qual) COMP_CWORD=2"
    script = f'eval "$(dualrc --show-completion bash)"; {typed}; _dualrc_completion dualrc; echo ${{COMPREPLY[@]}}'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["--quality"], done


def test_version(run):
    status, screen, _ = run("--version")
    assert status == 0
    assert screen.startswith("dualrc ")


def test_info_names_versions_presets_and_license(run):
    status, screen, _ = run("info")
    assert status == 0
    for word in ("torch", "preset default", "preset paper", "Apache-2.0", "cpu", "DUALRC_ENGINE", "reference"):
        assert word in screen


def test_info_says_what_is_wrong_with_the_engine(run, monkeypatch):
    monkeypatch.setenv("DUALRC_ENGINE", "nothing")
    status, screen, _ = run("info")
    assert status == 0 and "unset" in screen


@pytest.mark.parametrize("command", [(), ("match",), ("convert",), ("info",), ("demo",)])
def test_help_teaches(run, command):
    status, screen, _ = run(*command, "--help")
    assert status == 0
    assert "Usage" in screen


def test_convert_refuses_what_is_no_checkpoint(run, tmp_path):
    (tmp_path / "bad.pth.tar").write_bytes(b"nothing")
    status, _, errors = run("convert", tmp_path / "bad.pth.tar", tmp_path / "out.safetensors")
    assert status == 1
    assert errors.startswith("Error: ")
    assert not (tmp_path / "out.safetensors").exists()


def test_pillow_prints_nothing_about_a_damaged_file(tmp_path):
    """In a process of its own, because pytest handles all log messages."""
    Image.new("RGB", (64, 48)).save(tmp_path / "a.tiff")
    data = bytearray((tmp_path / "a.tiff").read_bytes())
    # The value of the tag SamplesPerPixel, a little-endian short.
    entry = data.find(bytes([0x15, 1, 3, 0]))
    data[entry + 8 : entry + 10] = (2048).to_bytes(2, "little")
    (tmp_path / "a.tiff").write_bytes(data)
    command = [sys.executable, "-m", "dualrc", "match", "a.tiff", "a.tiff"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: a.tiff ") and len(ended.stderr.splitlines()) == 1


@pytest.mark.skipif(bundled("default") is None, reason="the package carries no weights yet")
def test_the_demo_leaves_images_and_figures(run, tmp_path):
    status, screen, errors = run("demo", "--out", tmp_path / "demo", "--device", "cpu")
    assert status == 0, errors
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["correct_within_px"]["5"] > 0.6
    assert "within 3 px" in screen and "photographs" in screen
    photos = summary["photographs"]
    assert photos["matches"] == 2000 and photos["near_epipolar_line_within_px"]["3"] > 0.7
    photo_files = ("photo-a.jpg", "photo-b.jpg", "photo-matches.png", "photo-matches.npz")
    for name in ("a.png", "b.png", "matches.png", "correct.png", "warp.png", "matches.npz", *photo_files):
        assert (tmp_path / "demo" / name).stat().st_size > 0
    # Each step is reported when it begins, one line each.
    steps = [line.split(" s  ")[1].split()[0] for line in errors.splitlines() if " s  " in line]
    assert steps == ["Loading", "Matching", "Estimating", "Drawing", "Rendering", "Matching", "Comparing", "Drawing"]


def test_the_pose_of_the_photographs_agrees_with_sift():
    """The pose that the demo compares with is estimated again, without any network."""
    from dualrc import demo
    from dualrc.evaluation.baselines import RootSift

    pytest.importorskip("cv2")
    paths = [demo.PHOTOS / name for name in demo.PHOTO_NAMES]
    distance_px = demo.photo_distance_px(RootSift(features=8000, ratio=0.8).match(*paths))
    assert len(distance_px) > 100
    assert np.median(distance_px) < 0.5 and (distance_px < 3).mean() > 0.8


def test_the_photographs_have_no_place_or_owner():
    from dualrc import demo

    for name in demo.PHOTO_NAMES:
        assert (demo.PHOTOS / name).stat().st_size < 80_000
        with Image.open(demo.PHOTOS / name) as image:
            exif = image.getexif()
        # Make, model, and the focal length in millimeters of a 35 mm film.
        assert set(exif) == {271, 272, 34665} and set(exif.get_ifd(34665)) == {41989}


def test_the_wheel_matches_two_images(weights, images, tmp_path):
    """The wheel works in an empty environment outside of the checkout."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--no-build-isolation", "-w"]
    subprocess.run([*build, str(tmp_path), str(ROOT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("dualrc-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "dualrc/py.typed" in names
    # A compiled library is checked against the sources.
    assert "dualrc/ops/native/search.c" in names
    assert {"dualrc/photos/leuven-0.jpg", "dualrc/photos/README.md"} < set(names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert not library.available() or any(name.startswith("dualrc/ops/native/_generic") for name in names)
    assert not any(name.startswith(("tests/", "docs/")) for name in names)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    find = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    folder = Path(subprocess.run([python, "-c", find], check=True, capture_output=True, text=True).stdout.strip())
    target = ["--no-deps", "--quiet", "--target", str(folder), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *target], check=True)
    # Dependencies, in particular torch, come from this environment; the package itself must come from the wheel.
    here = subprocess.run([sys.executable, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and Path(path) != ROOT / "src"]
    (folder / "borrowed.pth").write_text("\n".join([here, *others]) + "\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = (
        "import dualrc, sys; m = dualrc.load(weights=sys.argv[1] or None, device='cpu')\n"
        "print(dualrc.__file__); print(m.engine); print(len(m.match(*sys.argv[2:4])))"
    )
    chosen = "" if bundled("default") else str(weights)
    command = [python, "-c", code, chosen, *map(str, images)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=clean)
    location, engine, count = done.stdout.split()
    # The sources are beside the library.
    assert engine.startswith("native") or not library.available()
    assert Path(location).is_relative_to(folder)
    assert int(count) > 0


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (0.000312, "0.000312 (no overlap"),
        (0.2, "0.2 (doubtful"),
        (0.7, "0.7 (the images probably"),
        (0.99987, "0.99987 ("),
    ],
)
def test_a_pair_score_has_enough_digits(score, text):
    from dualrc.cli.pair import _pair_verdict
    from dualrc.matches import Matches

    info = {"pair_score": score, "pair_model": {}}
    assert _pair_verdict(Matches.none(info)).startswith(text)
    assert "only to rank pairs" in _pair_verdict(Matches.none({}))
