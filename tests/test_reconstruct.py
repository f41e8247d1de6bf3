"""Tests of reconstruction, with matches that are known to be correct."""

import json
from dataclasses import asdict, replace

import numpy as np
import pycolmap
import pytest
from collection_data import Scene, apart, make_matches, make_scene
from collection_data import fill_store as fill
from conftest import ROOT
from docs_data import documented_keys
from PIL import ExifTags, Image

from dualrc import cli
from dualrc.collection.config import CollectionConfig
from dualrc.collection.matching import _Run
from dualrc.collection.reconstruct import ReconstructConfig, reconstruct
from dualrc.collection.store import MatchStore
from dualrc.colmap import read_model
from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.geometry import Lens, cam1_from_cam0, direction_error_deg, rotation_error_deg
from dualrc.matcher import load

NAMES = tuple(f"town/{number} ü.png" for number in range(6))
STRECHA = ROOT.parent / "shared" / "data" / "strecha"


@pytest.fixture(scope="module")
def scene():
    return apart(make_scene(NAMES, count=250, size=(640, 480)), 8)


def settings(weights, **changes):
    collection = CollectionConfig(weights=weights, device="cpu", workers=1, pairs="exhaustive")
    return ReconstructConfig(collection=collection, **changes)


def store_config(weights):
    """Return the config of a store of matches by these weights, so that a run finds all of its pairs."""
    config = settings(weights).collection
    matcher = load(weights=weights, device="cpu", size=None, top=config.top, min_score=config.min_score)
    return _Run(ROOT, [], config, matcher, quiet=True).depends_on


def prepare(folder, scene, weights, noise=0.05):
    """Write images, a camera file, and the matches of all pairs."""
    grey = np.random.default_rng(0).integers(80, 200, (480, 640, 3), dtype=np.uint8)
    content = {}
    for name, camera in scene.cameras.items():
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grey).save(folder / "images" / name)
        content[name] = {"width": camera.width, "height": camera.height, "K": camera.K.tolist()}
        content[name] |= {"model": camera.lens.model, "distortion": camera.lens.distortion}
    (folder / "cameras.json").write_text(json.dumps(content))
    (folder / "out").mkdir()
    fill(folder / "out" / "matches.sqlite", scene, noise, config=store_config(weights)).close()
    return folder / "images", folder / "out"


@pytest.fixture(scope="module")
def made(tmp_path_factory, scene, weights):
    folder = tmp_path_factory.mktemp("made")
    images, out = prepare(folder, scene, weights)
    config = settings(weights, cameras=folder / "cameras.json", hloc=True)
    return folder, reconstruct(images, out, config, quiet=True)


def test_all_images_are_placed_where_they_were_taken(made, scene):
    folder, summary = made
    assert (summary.registered, summary.images, summary.left_out, summary.models) == (6, 6, (), 1)
    assert summary.points > 0.95 * len(scene.xyz)
    assert summary.track_length > 5.5
    assert summary.reprojection_error_px < 0.2
    assert summary.cameras == "6 from the file"
    model = read_model(folder / "out" / "model", folder / "images")
    errors = []
    for name in NAMES[1:]:
        found = cam1_from_cam0(model.images[NAMES[0]].cam_from_world, model.images[name].cam_from_world)
        wanted = cam1_from_cam0(scene.cameras[NAMES[0]].cam_from_world, scene.cameras[name].cam_from_world)
        errors.append((rotation_error_deg(found[:, :3], wanted[:, :3]), direction_error_deg(found[:, 3], wanted[:, 3])))
    assert np.max(errors) < 0.1
    # Cameras from a file are kept fixed.
    assert np.allclose(model.images[NAMES[0]].camera.K, scene.cameras[NAMES[0]].K)


def test_global_mapping_places_them_too(tmp_path, scene, weights):
    images, out = prepare(tmp_path, scene, weights)
    # The working folder of a killed run.
    (out / ".mapping-killed").mkdir()
    summary = reconstruct(
        images, out, settings(weights, cameras=tmp_path / "cameras.json", mapper="global"), quiet=True
    )
    assert not [*out.glob(".mapping*")]
    assert (summary.registered, summary.mapper, summary.models) == (6, "global", 1)
    assert summary.points > 0.9 * len(scene.xyz) and summary.reprojection_error_px < 0.2
    model = read_model(out / "model", images)
    for name in NAMES[1:]:
        found = cam1_from_cam0(model.images[NAMES[0]].cam_from_world, model.images[name].cam_from_world)
        wanted = cam1_from_cam0(scene.cameras[NAMES[0]].cam_from_world, scene.cameras[name].cam_from_world)
        assert rotation_error_deg(found[:, :3], wanted[:, :3]) < 0.1
        assert direction_error_deg(found[:, 3], wanted[:, 3]) < 0.2
    assert np.allclose(model.images[NAMES[0]].camera.K, scene.cameras[NAMES[0]].K)
    assert json.loads((out / "summary.json").read_text())["config"]["mapper"] == "global"
    with pytest.raises(ConfigError, match="choose incremental or global"):
        settings(weights, mapper="glomap")


def test_given_lenses_stand_as_they_are(tmp_path, scene, weights):
    """Images with strong distortion are registered as accurately as those of a pinhole camera."""
    bent = Lens("OPENCV", (-0.2, 0.05, 0.01, -0.004))
    through = Scene(scene.xyz, {name: replace(camera, lens=bent) for name, camera in scene.cameras.items()})
    images, out = prepare(tmp_path, through, weights)
    summary = reconstruct(images, out, settings(weights, cameras=tmp_path / "cameras.json"), quiet=True)
    assert summary.registered == 6 and summary.points > 0.95 * len(scene.xyz) and summary.reprojection_error_px < 0.2
    model = read_model(out / "model", images)
    assert model.images[NAMES[0]].camera.lens == bent
    for name in NAMES[1:]:
        found = cam1_from_cam0(model.images[NAMES[0]].cam_from_world, model.images[name].cam_from_world)
        wanted = cam1_from_cam0(scene.cameras[NAMES[0]].cam_from_world, scene.cameras[name].cam_from_world)
        assert rotation_error_deg(found[:, :3], wanted[:, :3]) < 0.1
        assert direction_error_deg(found[:, 3], wanted[:, 3]) < 0.2


def test_everything_is_written(made):
    folder, summary = made
    out = folder / "out"
    written = json.loads((out / "summary.json").read_text())
    # Summary is what --json prints, with the folder of the model.
    figures = asdict(summary)
    assert {*figures, "model"} == documented_keys("reconstruct")
    assert json.loads(json.dumps(figures)).items() <= written.items() and written["images"] == 6
    assert written["matches"]["weights"] and written["versions"]["pycolmap"] == pycolmap.__version__
    assert written["config"]["keypoints"]["radius"] > 0 and written["image_folder"] == "../images"
    assert set(written["seconds"]) == {"matching", "verification", "keypoints", "database", "hloc", "mapping"}
    assert (out / "points.ply").read_bytes().startswith(b"ply\n")
    with Image.open(out / "model.png") as image:
        assert min(image.size) > 300 and len(image.convert("L").getcolors()) > 20
    assert {"features.h5", "matches.h5", "pairs.txt", "database.db", "matches.sqlite"} <= {
        p.name for p in out.iterdir()
    }
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_a_pair_that_does_not_fit_the_others_is_dropped_and_named(tmp_path, scene, weights):
    images, out = prepare(tmp_path, scene, weights)
    first, last = NAMES[0], NAMES[-1]
    with MatchStore(out / "matches.sqlite") as store:
        # The matches of another pair have a geometry that fits perfectly, but belong to other images.
        store.put(first, last, store.get(NAMES[1], NAMES[2]))
    summary = reconstruct(images, out, settings(weights, cameras=tmp_path / "cameras.json"), quiet=True)
    assert (summary.registered, summary.verification.pairs, summary.verification.kept) == (6, 15, 14)
    assert sum(summary.verification.dropped.values()) == 1
    (dropped,) = (pair for pair in json.loads((out / "pairs.json").read_text()) if not pair["kept"])
    assert {dropped["name0"], dropped["name1"]} == {first, last} and dropped["cause"] and dropped["reason"]
    with pycolmap.Database.open(out / "database.db") as database:
        assert database.num_verified_image_pairs() == 14


def test_a_second_run_gives_the_same_from_the_store(made, weights, capfd):
    folder, summary = made
    config = settings(weights, cameras=folder / "cameras.json")
    again = reconstruct(folder / "images", folder / "out", config, quiet=True)
    assert (again.registered, again.points) == (summary.registered, summary.points)
    # COLMAP's log does not reach the terminal.
    assert capfd.readouterr().err == ""


def test_unknown_cameras_are_found_with_the_rest(tmp_path, scene, weights, capfd):
    images, out = prepare(tmp_path, scene, weights)
    summary = reconstruct(images, out, settings(weights), quiet=True)
    assert summary.registered == 6 and summary.cameras.startswith("6 unknown focal length")
    model = pycolmap.Reconstruction(out / "model")
    (camera,) = model.cameras.values()
    assert camera.focal_length == pytest.approx(scene.cameras[NAMES[0]].focal_px, rel=0.02)
    assert camera.principal_point_x == pytest.approx(scene.cameras[NAMES[0]].K[0, 2] + 0.5, abs=6)
    # COLMAP's log does not reach the terminal, not even that of the refinement at the end.
    assert capfd.readouterr().err == ""


def test_nothing_to_place_is_an_error_that_says_what_to_try(tmp_path, scene, weights):
    images, out = prepare(tmp_path, scene, weights)
    rng = np.random.default_rng(0)
    with MatchStore(out / "matches.sqlite") as store:
        for names in store.names():
            store.put(*names, make_matches(*(rng.uniform(0, 400, (9, 2)) for _ in range(2)), size=(640, 480)))
    with pytest.raises(DataError, match="could be registered; add images that overlap more"):
        reconstruct(images, out, settings(weights), quiet=True)
    assert (out / "matches.sqlite").exists() and not (out / "model").exists()


def test_a_broken_image_is_left_out_and_named(tmp_path, scene, weights):
    images, out = prepare(tmp_path, scene, weights)
    (images / "text.jpg").write_text("not an image")
    summary = reconstruct(images, out, settings(weights), quiet=True)
    assert (summary.registered, summary.images, summary.left_out) == (6, 7, ("text.jpg",))


def test_an_image_taken_out_after_matching_is_not_missed(tmp_path, scene, weights):
    images, out = prepare(tmp_path, scene, weights)
    (images / NAMES[2]).unlink()
    summary = reconstruct(images, out, settings(weights), quiet=True)
    assert (summary.registered, summary.images) == (5, 5)


def test_bad_cameras_are_refused_before_any_work(tmp_path, scene, weights):
    images, out = prepare(tmp_path, scene, weights)
    (tmp_path / "cameras.json").write_text("{}")
    with pytest.raises(DataError, match="has no camera for"):
        reconstruct(images, out, settings(weights, cameras=tmp_path / "cameras.json"), quiet=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 5
    Image.new("RGB", (640, 480)).save(images / "mirrored.png", exif=exif)
    with pytest.raises(DataError, match=r"mirrored.png is mirrored"):
        reconstruct(images, tmp_path / "new", settings(weights), quiet=True)
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path, scene, weights):
    images, _ = prepare(tmp_path, scene, weights)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError):
        reconstruct(images, tmp_path / "file", settings(weights), quiet=True)


def test_the_command_prints_a_summary(tmp_path, scene, weights, capsys, monkeypatch):
    images, out = prepare(tmp_path, scene, weights)
    arguments = [images, "--out", out, "--weights", weights, "--device", "cpu", "--cameras", tmp_path / "cameras.json"]
    monkeypatch.setattr("sys.argv", ["dualrc", "reconstruct", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "15 of 15" in printed and "reprojection error" in printed
    assert "6 of 6 images registered" in printed and "track length" in printed and "6 from the file" in printed


@pytest.mark.slow
@pytest.mark.skipif(not STRECHA.is_dir(), reason="the Strecha scenes are not in ../shared/data/strecha")
def test_real_images(tmp_path):
    """Reconstruct four neighboring images with the bundled network at a small size."""
    scene = STRECHA / "fountain-P11"
    (tmp_path / "images").mkdir()
    for number in range(3, 7):
        (tmp_path / "images" / f"{number:04}.jpg").symlink_to(scene / "images" / f"{number:04}.jpg")
    config = ReconstructConfig(collection=CollectionConfig(size=640), cameras=scene / "cameras.json")
    summary = reconstruct(tmp_path / "images", tmp_path / "out", config, quiet=True)
    assert summary.registered == 4 and summary.points > 2000 and summary.track_length > 2.5
