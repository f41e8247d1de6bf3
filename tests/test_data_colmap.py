"""Tests of pairs from COLMAP models: of rendered images, and of a real reconstruction."""

import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import ExifTags, Image
from typer.testing import CliRunner

from dualrc.cli import app
from dualrc.data import ColmapConfig, open_pairs
from dualrc.data.colmap import colmap_pairs
from dualrc.data.pairsfile import read_pairs
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import cam1_from_cam0, epipolar_distance_px, fundamental_from_pose, read_cameras_json
from dualrc.scenes import correspond, look_at, make_scene, render

pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")

STRECHA = ROOT.parent / "shared" / "data" / "strecha"
SIZE = (128, 96)
NAMES = ["a.png", "b.png", "deep/c.png", "away.png"]


@pytest.fixture(scope="module")
def renderings():
    scene = make_scene(1, texture_size=64)
    eyes = [(-2, -9, 2.2), (0, -9.5, 2.5), (2, -9, 2.0)]
    views = [look_at(eye, (0, 2, 1.5), size=SIZE) for eye in eyes]
    views.append(look_at((0, -9, 2), (0, -30, 1.0), size=SIZE))
    return [render(scene, view, supersample=1) for view in views]


@pytest.fixture(scope="module")
def folder(renderings, tmp_path_factory):
    """Write a model as COLMAP does: tracks of points of the first three images, in COLMAP's pixels."""
    root = tmp_path_factory.mktemp("colmap")
    (root / "images" / "deep").mkdir(parents=True)
    (root / "model").mkdir()
    rng = np.random.default_rng(0)
    keypoints, tracks = [[] for _ in NAMES], []
    for first in range(3):
        points = rng.uniform(0, np.array(SIZE) - 1, (300, 2))
        found = [correspond(renderings[first], rendering, points) for rendering in renderings]
        for number in range(len(points)):
            seen = [i for i in range(4) if found[i].visible[number]]
            if len(seen) < 2:
                continue
            places = {i: found[i].points1[number].numpy() for i in seen}
            tracks.append((triangulated(places, renderings), [(i + 1, len(keypoints[i])) for i in seen]))
            for i, place in places.items():
                # COLMAP's half pixel.
                keypoints[i].append(place + 0.5)
    made = pycolmap.Reconstruction()
    K = renderings[0].view.K
    params = [K[0, 0], K[1, 1], K[0, 2] + 0.5, K[1, 2] + 0.5]
    camera = pycolmap.Camera(camera_id=1, model="PINHOLE", width=SIZE[0], height=SIZE[1], params=params)
    made.add_camera_with_trivial_rig(camera)
    for i, (name, rendering) in enumerate(zip(NAMES, renderings, strict=True)):
        Image.fromarray(rendering.image.numpy()).save(root / "images" / name)
        places = np.array(keypoints[i]).reshape(-1, 2)
        image = pycolmap.Image(name=name, keypoints=places, camera_id=1, image_id=i + 1)
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(rendering.view.cam_from_world))
    for xyz, elements in tracks:
        made.add_point3D(xyz, pycolmap.Track([pycolmap.TrackElement(*element) for element in elements]))
    made.write_binary(str(root / "model"))
    return root


def triangulated(places, renderings):
    """Triangulate a point (3,) by linear least squares."""
    rows = []
    for i, (x, y) in places.items():
        P = renderings[i].view.K @ renderings[i].view.cam_from_world
        rows += [x * P[2] - P[0], y * P[2] - P[1]]
    point = np.linalg.svd(np.array(rows))[2][-1]
    return point[:3] / point[3]


def test_tracks_are_correspondences(folder, renderings):
    pairs = colmap_pairs(folder / "model", folder / "images")
    assert [pair.name for pair in pairs] == ["a.png b.png", "a.png deep/c.png", "b.png deep/c.png"]
    for pair in pairs:
        sample, names = pair.load(), pair.name.split()
        assert len(sample.points0) >= 50
        first, second = (renderings[NAMES.index(name)] for name in names)
        truth = correspond(first, second, sample.points0)
        error = np.linalg.norm(truth.points1.numpy() - sample.points1, axis=1)
        assert np.median(error) < 1e-6
        # A point found from another image may lie exactly on an edge.
        assert (error < 0.5).mean() > 0.97
        assert sample.image0 == folder / "images" / names[0] and sample.image1.is_file()


def test_pairs_are_chosen_by_overlap(folder):
    common = {pair.name: len(pair.load().points0) for pair in colmap_pairs(folder / "model", folder / "images")}
    best = max(common, key=common.get)
    fewer = colmap_pairs(folder / "model", folder / "images", min_common=common[best])
    assert [pair.name for pair in fewer] == [best]
    with pytest.raises(DataError, match=r"share .* lower min_common or min_overlap"):
        colmap_pairs(folder / "model", folder / "images", min_common=10_000)
    with pytest.raises(DataError, match="lower"):
        colmap_pairs(folder / "model", folder / "images", min_overlap=1.0)


def test_batches_go_on_without_an_image(folder, tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes((folder / "images" / name).read_bytes())
    (tmp_path / "deep" / "c.png").write_bytes(b"half")
    config = ColmapConfig(model=str(folder / "model"), images=str(tmp_path), crop=0.6)
    maker = open_pairs(config, size=64, points=32).training
    batch = maker.make(8, torch.Generator().manual_seed(0))
    assert batch.valid.sum(1).min() >= 8
    assert set(maker.skipped) == {"a.png deep/c.png", "b.png deep/c.png"}
    assert "c.png is empty or not an image" in maker.report()
    maker.close()


def test_an_image_on_its_side(folder, renderings, tmp_path):
    """COLMAP used b.png as it is stored; our points refer to the upright image."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    for name in ("a.png", "b.png"):
        with Image.open(folder / "images" / name) as image:
            image.save(tmp_path / name, exif=exif if name == "b.png" else Image.Exif())
    plain = colmap_pairs(folder / "model", folder / "images")[0].load()
    turned = colmap_pairs(folder / "model", tmp_path)[0].load()
    assert np.allclose(turned.points0, plain.points0)
    assert np.allclose(turned.points1, np.array(SIZE) - 1 - plain.points1)


def test_folders_that_hold_no_model(folder, tmp_path):
    with pytest.raises(DataError):
        colmap_pairs(tmp_path, folder / "images")
    with pytest.raises(DataError, match="image folder"):
        colmap_pairs(folder / "model", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="min_overlap"):
        ColmapConfig(model="m", images="i", min_overlap=2.0)


def test_command(folder, renderings, tmp_path):
    out = tmp_path / "pairs.txt"
    arguments = ["pairs", "colmap", str(folder / "model"), "--images", str(folder / "images"), "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--points", "40"])
    assert done.exit_code == 0, done.output
    source = read_pairs(out, folder / "images")
    assert len(source) == 3
    sample = source[1].load()
    assert sample.image1 == folder / "images" / "deep/c.png" and len(sample.points0) == 40
    truth = correspond(renderings[0], renderings[2], sample.points0)
    assert np.median(np.linalg.norm(truth.points1.numpy() - sample.points1, axis=1)) < 1e-3
    first = out.read_text()
    CliRunner().invoke(app, [*arguments, "--points", "40"])
    assert out.read_text() == first


@pytest.mark.slow
@pytest.mark.skipif(not STRECHA.is_dir(), reason="needs ../shared/data/strecha")
def test_a_reconstruction_of_photographs_agrees_with_their_true_cameras(tmp_path):
    images, database = tmp_path / "images", tmp_path / "database.db"
    images.mkdir()
    for path in sorted((STRECHA / "fountain-P11" / "images").iterdir())[2:8]:
        shutil.copy(path, images)
    pycolmap.extract_features(database, images, camera_mode=pycolmap.CameraMode.SINGLE)
    pycolmap.match_exhaustive(database)
    (tmp_path / "sparse").mkdir()
    models = pycolmap.incremental_mapping(database, images, tmp_path / "sparse")
    assert models[0].num_reg_images() == 6
    pairs = colmap_pairs(tmp_path / "sparse" / "0", images)
    cameras = read_cameras_json(STRECHA / "fountain-P11" / "cameras.json")
    assert len(pairs) >= 10
    errors = []
    for pair in pairs:
        sample = pair.load()
        camera0, camera1 = (cameras[image.name] for image in (sample.image0, sample.image1))
        pose = cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world)
        F = fundamental_from_pose(pose, camera0, camera1)
        errors.append(np.median(epipolar_distance_px(F, sample.points0, sample.points1)))
    assert max(errors) < 1.0 and np.median(errors) < 0.5, errors
