"""Tests of RGB-D frames and MegaDepth: rendered images in those formats, compared with exact geometry."""

import pickle
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from typer.testing import CliRunner

from dualrc.cli import app
from dualrc.data import MegaDepthConfig, RgbdConfig, open_pairs
from dualrc.data.arrays import read_arrays
from dualrc.data.megadepth import (
    MegaDepthRecipe,
    MegaDepthScene,
    join_scenes,
    megadepth_pairs,
    read_depth_h5,
    write_scenes,
)
from dualrc.data.pairsfile import read_pairs
from dualrc.data.rgbd import rgbd_pairs
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import Camera, read_depth_m, read_rgbd, reproject, sample_depth, unproject
from dualrc.scenes import correspond, look_at, make_scene, render

HOLOLENS = ROOT.parent / "shared" / "data" / "rgbd" / "hololens"
SIZE = (128, 96)
NAMES = [f"view {i}.png" for i in range(4)]
RECIPE = MegaDepthRecipe(scene_pairs=5, pairs_per_scene=3, points=20)


@pytest.fixture(scope="module")
def renderings():
    """Render four views of a scene; the last one looks away from the others."""
    scene = make_scene(1, texture_size=64)
    eyes = [(-3, -9, 2.2), (0, -9.5, 2.5), (2.5, -9, 2.0)]
    views = [look_at(eye, (0.2 * i, 2, 1.5), size=SIZE) for i, eye in enumerate(eyes)]
    views.append(look_at((0, -9, 2), (0, -30, 1.0), size=SIZE))
    return [render(scene, view, supersample=1) for view in views]


@pytest.fixture(scope="module")
def rgbd_master(renderings, tmp_path_factory):
    root = tmp_path_factory.mktemp("rgbd")
    (root / "images").mkdir()
    (root / "depth").mkdir()
    np.savetxt(root / "K.txt", renderings[0].view.K)
    lines = []
    for name, rendering in zip(NAMES, renderings, strict=True):
        Image.fromarray(rendering.image.numpy()).save(root / "images" / name)
        millimetres = np.round(rendering.depth.numpy() * 1000)
        Image.fromarray(np.where(millimetres < 65536, millimetres, 0).astype(np.uint16)).save(root / "depth" / name)
        world_from_cam = np.linalg.inv(np.vstack([rendering.view.cam_from_world, [0, 0, 0, 1]]))
        lines.append(f"{name} {' '.join(f'{value:.9g}' for value in world_from_cam.ravel())}")
    (root / "world_from_cam.txt").write_text("\n".join(lines))
    return root


@pytest.fixture
def rgbd(rgbd_master, tmp_path):
    return shutil.copytree(rgbd_master, tmp_path / "rgbd")


def write_scene_info(path, renderings, *, overlap, names, depths):
    """Write a file like D2-Net's preprocessing: a missing image is None in all lists, cameras are COLMAP's."""
    count = len(names)
    intrinsics, poses = np.empty(count, dtype=object), np.empty(count, dtype=object)
    for i, name in enumerate(names):
        if name is not None:
            intrinsics[i] = renderings[i].view.K + np.array([[0, 0, 0.5], [0, 0, 0.5], [0, 0, 0]])
            poses[i] = np.vstack([renderings[i].view.cam_from_world, [0, 0, 0, 1]])
    np.savez(
        path,
        image_paths=np.array(names, dtype=object),
        depth_paths=np.array(depths, dtype=object),
        intrinsics=intrinsics,
        poses=poses,
        overlap_matrix=overlap,
        points3D_id_to_2D=np.array([{1: (2.0, 3.0)}] * count, dtype=object),
    )


@pytest.fixture(scope="module")
def megadepth_master(renderings, tmp_path_factory):
    """Write scene 0001 with six valid pairs and 0002 with two; image 3 of both is missing."""
    import h5py

    root = tmp_path_factory.mktemp("megadepth")
    (root / "scene_info").mkdir()
    for scene in ("0001", "0002"):
        (root / scene / "images").mkdir(parents=True)
        (root / scene / "depths").mkdir()
        names, depths = [None] * 4, [None] * 4
        for i in range(3):
            names[i], depths[i] = f"{scene}/images/{i}.jpg", f"{scene}/depths/{i}.h5"
            Image.fromarray(renderings[i].image.numpy()).save(root / names[i], quality=95)
            with h5py.File(root / depths[i], "w") as file:
                depth = renderings[i].depth.numpy()
                # MegaDepth's mark for pixels of which only the order of depth is known.
                depth[0, 0] = -1
                file["depth"] = depth
        overlap = np.full((4, 4), 0.9 if scene == "0001" else 0.5)
        overlap[0, 1] = overlap[1, 0] = 0.8
        write_scene_info(root / "scene_info" / f"{scene}.npz", renderings, overlap=overlap, names=names, depths=depths)
    return root


@pytest.fixture
def megadepth(megadepth_master, tmp_path):
    return shutil.copytree(megadepth_master, tmp_path / "megadepth")


def check_against_geometry(sample, rendering0, rendering1):
    """Check points against rays cast into the scene, and that occluded points are occluded."""
    assert len(sample.points0) > 500
    for points, others, first, second in (
        (sample.points0, sample.points1, rendering0, rendering1),
        (sample.points1, sample.points0, rendering1, rendering0),
    ):
        truth = correspond(first, second, points)
        error = np.linalg.norm(truth.points1.numpy() - others, axis=1)
        assert np.median(error) < 0.1
        # The rest lies on edges between surfaces.
        assert (error < 1).mean() > 0.98
        assert truth.visible.double().mean() > 0.97
    for hidden, first, second in (
        (sample.hidden0, rendering0, rendering1),
        (sample.hidden1, rendering1, rendering0),
    ):
        assert len(hidden) > 20
        assert correspond(first, second, hidden).visible.double().mean() < 0.05


# Depth maps.


def plane_depth(camera, normal, offset):
    """Return the depth of the plane normal . x = offset, in the camera's frame."""
    x, y = np.meshgrid(np.arange(camera.width), np.arange(camera.height))
    rays = camera.rays(np.column_stack([x.ravel(), y.ravel()]))
    return (offset / (rays @ normal)).reshape(camera.height, camera.width)


def test_depth_of_a_slanted_plane_is_exact_between_pixels():
    camera = Camera.from_focal((40, 30), 35.0)
    normal = np.array([0.2, -0.3, 1.0])
    depth = plane_depth(camera, normal, 4.0)
    points = np.random.default_rng(0).uniform(0, [39, 29], (50, 2))
    expected = 4.0 / (camera.rays(points) @ normal)
    assert np.allclose(sample_depth(depth, points, camera.size), expected, rtol=1e-12)


def test_a_smaller_depth_map_is_read_at_the_same_places():
    camera = Camera.from_focal((80, 60), 70.0)
    small = camera.resized((40, 30))
    normal = np.array([0.1, 0.2, 1.0])
    points = np.random.default_rng(1).uniform(2, [77, 57], (50, 2))
    expected = 3.0 / (camera.rays(points) @ normal)
    assert np.allclose(sample_depth(plane_depth(small, normal, 3.0), points, camera.size), expected, rtol=1e-12)


def test_no_depth_beside_holes_between_surfaces_and_outside():
    depth = np.ones((4, 6))
    depth[:, 3:] = 2.0
    depth[1, 1] = 0
    points = [[0, 0], [0.5, 0.5], [1, 1], [2.5, 0], [3, 0], [5, 3], [5.4, 3.4], [5.6, 3], [np.nan, 0]]
    known = sample_depth(depth, points, (6, 4))
    assert np.array_equal(known, [1, np.nan, np.nan, np.nan, 2, 2, 2, np.nan, np.nan], equal_nan=True)


def test_a_point_before_another_camera_is_seen_and_one_behind_a_wall_is_hidden():
    pose0, pose1 = np.eye(4)[:3], np.eye(4)[:3].copy()
    # One meter to the right.
    pose1[0, 3] = -1.0
    K = Camera.from_focal((21, 21), 10.0).K
    camera0 = Camera(width=21, height=21, K=K, cam_from_world=pose0)
    camera1 = Camera(width=21, height=21, K=K, cam_from_world=pose1)
    far, near = np.full((21, 21), 5.0), np.full((21, 21), 2.0)
    found = reproject([[10, 10], [0, 10], [1, 10]], far, camera0, far, camera1)
    assert np.allclose(found.points1, [[8, 10], [-2, 10], [-1, 10]])
    assert found.seen.tolist() == [True, False, False]
    assert found.hidden.tolist() == [False, True, True]
    behind = reproject([[10, 10]], far, camera0, near, camera1)
    assert not behind.seen[0] and behind.hidden[0]
    before = reproject([[10, 10]], near, camera0, far, camera1)
    # The maps disagree, so the point is neither seen nor occluded.
    assert not before.seen[0] and not before.hidden[0]
    nothing = reproject([[10, 10]], np.zeros((21, 21)), camera0, far, camera1)
    assert not nothing.seen[0] and not nothing.hidden[0] and np.isnan(nothing.points1).all()
    assert np.allclose(unproject(camera1, [[10, 10]], [5.0]), [[1, 0, 5]])
    with pytest.raises(DataError, match="no pose"):
        unproject(Camera.from_focal((8, 8), 8.0), [[1, 1]], [1.0])


# RGB-D folders.


def test_rgbd_pairs_agree_with_the_scene(rgbd, renderings):
    pairs, broken = rgbd_pairs(rgbd, min_overlap=0.2)
    assert broken == {}
    names = [pair.name for pair in pairs]
    assert f"{NAMES[0]} {NAMES[1]}" in names and not any(NAMES[3] in name for name in names)
    for pair in pairs:
        sample = pair.load()
        first, second = (renderings[NAMES.index(image.name)] for image in (sample.image0, sample.image1))
        check_against_geometry(sample, first, second)


def test_rgbd_batches(rgbd):
    maker = open_pairs(RgbdConfig(root=str(rgbd), min_overlap=0.2), size=64, points=32).training
    batch = maker.make(3, torch.Generator().manual_seed(0))
    assert batch.images0.shape == (3, 3, 64, 64) and batch.valid.sum(1).min() >= 24
    maker.close()


def test_broken_rgbd_folders(rgbd):
    with pytest.raises(DataError, match="does not exist"):
        read_rgbd(rgbd / "nowhere")
    poses = rgbd / "world_from_cam.txt"
    lines = poses.read_text()
    for text, message in (
        ("", "empty"),
        ("view 0.png 1 2 3\n", "line 1: not a pose"),
        (f"{lines}\nx.png {'1 ' * 16}", "line 5: not a pose.*rotation"),
        (f"a.png {'nan ' * 16}", "line 1: not a pose"),
    ):
        poses.write_text(text)
        with pytest.raises(DataError, match=message):
            read_rgbd(rgbd)
    poses.write_text(lines)
    (rgbd / "K.txt").write_text("1 2 3")
    with pytest.raises(DataError, match="has 3 numbers; write 9"):
        read_rgbd(rgbd)
    (rgbd / "K.txt").unlink()
    with pytest.raises(DataError, match=r"K\.txt does not exist"):
        read_rgbd(rgbd)


def test_half_copied_rgbd_folder(rgbd):
    (rgbd / "depth" / NAMES[0]).unlink()
    (rgbd / "depth" / NAMES[3]).write_bytes(b"\x89PNG\r\n")
    pairs, broken = rgbd_pairs(rgbd, min_overlap=0.2)
    assert set(broken) == {NAMES[0], NAMES[3]}
    assert [pair.name for pair in pairs] == [f"{NAMES[1]} {NAMES[2]}"]
    maker = open_pairs(RgbdConfig(root=str(rgbd), min_overlap=0.2), size=64, points=32).training
    assert "Left out as unusable: 2" in maker.report() and f"{NAMES[0]} does not exist" in maker.report()
    maker.close()
    for name in NAMES:
        (rgbd / "depth" / name).unlink(missing_ok=True)
    with pytest.raises(DataError, match="No frame"):
        rgbd_pairs(rgbd)
    for name in NAMES:
        (rgbd / "images" / name).unlink()
    with pytest.raises(DataError, match="Cannot read any of the images"):
        rgbd_pairs(rgbd)


def test_depth_files_that_are_none(tmp_path):
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(tmp_path / "rgb.png")
    with pytest.raises(DataError, match="one 16-bit channel"):
        read_depth_m(tmp_path / "rgb.png")
    Image.fromarray(np.full((4, 4), 1500, dtype=np.uint16)).save(tmp_path / "depth.png")
    assert (read_depth_m(tmp_path / "depth.png") == 1.5).all()


def test_rgbd_command(rgbd, renderings, tmp_path):
    out = tmp_path / "pairs.txt"
    (rgbd / "images" / NAMES[2]).unlink()
    done = CliRunner().invoke(
        app, ["pairs", "rgbd", str(rgbd), "--out", str(out), "--min-overlap", "0.2", "--points", "30"]
    )
    assert done.exit_code == 0, done.output
    assert "Left out" in done.output and "view 2.png" in done.output
    source = read_pairs(out, rgbd / "images")
    sample = source[0].load()
    assert (sample.image0.name, sample.image1.name) == (NAMES[0], NAMES[1])
    truth = correspond(renderings[0], renderings[1], sample.points0)
    assert np.median(np.linalg.norm(truth.points1.numpy() - sample.points1, axis=1)) < 0.1


@pytest.mark.skipif(not HOLOLENS.is_dir(), reason="needs ../shared/data/rgbd/hololens")
def test_hololens_correspondences_look_alike():
    """Depth and poses agree with OpenCV's SIFT to a pixel or two in the median."""
    cv2 = pytest.importorskip("cv2")
    frames = read_rgbd(HOLOLENS)[:6]
    sift, matcher, errors = cv2.SIFT_create(), cv2.BFMatcher(), []
    for frame0, frame1 in pairwise(frames):
        (keys0, words0), (keys1, words1) = (
            sift.detectAndCompute(cv2.imread(str(frame.image), 0), None) for frame in (frame0, frame1)
        )
        found = [a for a, b in matcher.knnMatch(words0, words1, k=2) if a.distance < 0.7 * b.distance]
        points0 = np.array([keys0[match.queryIdx].pt for match in found])
        points1 = np.array([keys1[match.trainIdx].pt for match in found])
        depths = read_depth_m(frame0.depth), read_depth_m(frame1.depth)
        there = reproject(points0, depths[0], frame0.camera, depths[1], frame1.camera)
        errors += np.linalg.norm(there.points1 - points1, axis=1)[there.seen].tolist()
    assert len(errors) > 200
    assert np.median(errors) < 2


# MegaDepth.


def test_megadepth_pairs_agree_with_the_scene(megadepth, renderings):
    scene = MegaDepthScene(megadepth, megadepth / "scene_info" / "0001.npz", RECIPE)
    assert scene.split == "training"
    assert sorted(scene.pairs) == [(i, j) for i in range(3) for j in range(3) if i != j]
    for pair in [(0, 1), (2, 1)]:
        check_against_geometry(scene.load(pair), renderings[pair[0]], renderings[pair[1]])


def test_megadepth_splits(megadepth):
    training, _ = megadepth_pairs(megadepth, "training", RECIPE)
    validation, _ = megadepth_pairs(megadepth, "validation", RECIPE)
    assert len(training) == 3 and all("0001" in pair.name for pair in training)
    # Exactly half is not enough: only the pair with 0.8 counts, in both directions.
    assert sorted(pair.name for pair in validation) == [
        "0002/images/0.jpg 0002/images/1.jpg",
        "0002/images/1.jpg 0002/images/0.jpg",
    ]
    with pytest.raises(DataError, match=r"no pairs for training"):
        # These scenes are too small for the recipe of the paper.
        megadepth_pairs(megadepth, "training", MegaDepthRecipe())
    maker = open_pairs(MegaDepthConfig(root=str(megadepth), split="validation"), size=64, points=16).training
    assert maker.make(2, torch.Generator().manual_seed(0)).valid.any(1).all()
    maker.close()


def test_megadepth_files_are_the_same_every_time_and_agree_with_the_scene(megadepth, renderings, tmp_path):
    texts = []
    for workers in (1, 2):
        out = tmp_path / f"out {workers}"
        results = list(write_scenes(megadepth, out, RECIPE, workers=workers))
        assert [(r.name, r.split, r.pairs, r.broken) for r in results] == [
            ("0001", "training", 3, ()),
            ("0002", "validation", 2, ()),
        ]
        assert join_scenes(out, results) == {"training": 3, "validation": 2}
        texts.append((out / "training_pairs.txt").read_text() + (out / "validation_pairs.txt").read_text())
    assert texts[0] == texts[1]
    source = read_pairs(tmp_path / "out 1" / "training_pairs.txt", megadepth)
    for number in range(3):
        sample = source[number].load()
        assert len(sample.points0) == 20
        first, second = (renderings[int(image.stem)] for image in (sample.image0, sample.image1))
        truth = correspond(first, second, sample.points0)
        assert np.median(np.linalg.norm(truth.points1.numpy() - sample.points1, axis=1)) < 0.1


def test_megadepth_goes_on_over_what_is_broken_and_again_when_it_is_mended(megadepth, tmp_path):
    lost, bad = megadepth / "0001/depths/0.h5", megadepth / "0002/depths/1.h5"
    whole, data = lost.read_bytes(), bad.read_bytes()
    lost.unlink()
    bad.write_bytes(data[: len(data) // 2])
    (megadepth / "scene_info" / "0003.npz").write_bytes(b"not a zip file")
    done = CliRunner().invoke(app, ["pairs", "megadepth", str(megadepth), "--out", str(tmp_path / "pairs")])
    assert done.exit_code == 0, done.output
    assert "3 of 3 scenes are incomplete" in done.output
    results = {r.name: r for r in write_scenes(megadepth, tmp_path / "out", RECIPE)}
    assert results["0001"].pairs == 2 and "0.h5 does not exist" in results["0001"].broken[0]
    assert results["0002"].pairs == 0 and "1.h5 is damaged" in results["0002"].broken[0]
    assert results["0003"].split is None and "0003.npz" in results["0003"].broken[0]
    lost.write_bytes(whole)
    bad.write_bytes(data)
    results = {r.name: r for r in write_scenes(megadepth, tmp_path / "out", RECIPE)}
    assert results["0001"].pairs == 3 and results["0002"].pairs == 2
    # Complete scenes are kept.
    part = tmp_path / "out/scenes/0001-training.txt"
    part.write_text("kept\n")
    results = {r.name: r for r in write_scenes(megadepth, tmp_path / "out", RECIPE)}
    assert results["0001"].pairs == 1 and part.read_text() == "kept\n"
    with pytest.raises(ConfigError, match="another recipe"):
        list(write_scenes(megadepth, tmp_path / "out", MegaDepthRecipe(seed=1)))


def test_megadepth_leaves_out_images_whose_names_a_pairs_file_cannot_hold(megadepth, tmp_path):
    path = megadepth / "scene_info" / "0001.npz"
    with np.load(path, allow_pickle=True) as file:
        arrays = dict(file)
    arrays["image_paths"][0] = "0001/images/two  spaces.jpg"
    np.savez(path, **arrays)
    (megadepth / "0001/images/0.jpg").rename(megadepth / arrays["image_paths"][0])
    found = next(write_scenes(megadepth, tmp_path / "out", RECIPE))
    assert found.pairs == 2 and "are ambiguous in a pairs file; rename them" in found.broken[0]
    assert "spaces" not in found.part.read_text()


def test_folders_that_are_not_megadepth(tmp_path):
    with pytest.raises(DataError, match="scene_info does not exist"):
        megadepth_pairs(tmp_path, "training", RECIPE)
    (tmp_path / "scene_info").mkdir()
    with pytest.raises(DataError, match=r"no \.npz"):
        megadepth_pairs(tmp_path, "training", RECIPE)
    np.savez(tmp_path / "scene_info" / "1.npz", image_paths=np.array(["a"]))
    with pytest.raises(DataError, match=r"no pairs for training.*has no depth_paths"):
        megadepth_pairs(tmp_path, "training", RECIPE)
    (tmp_path / "x.h5").write_bytes(b"")
    with pytest.raises(DataError, match="damaged"):
        read_depth_h5(tmp_path / "x.h5")


class Evil:
    def __reduce__(self):
        return (open, ("evil.txt", "w"))


def test_npz_files_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    objects = np.empty(2, dtype=object)
    objects[0] = Evil()
    np.savez("evil.npz", image_paths=objects)
    with pytest.raises(DataError, match="not allowed"):
        read_arrays(tmp_path / "evil.npz", ["image_paths"])
    assert not (tmp_path / "evil.txt").exists()
    objects[0] = np.arange(6.0).reshape(2, 3)
    for protocol in (2, 4, 5):
        again = pickle.loads(pickle.dumps(objects, protocol))
        np.savez("good.npz", a=again, b=np.asfortranarray(np.arange(6).reshape(2, 3)))
        arrays = read_arrays(tmp_path / "good.npz", ["a", "b"])
        assert np.array_equal(arrays["a"][0], objects[0]) and arrays["a"][1] is None
        assert np.array_equal(arrays["b"], np.arange(6).reshape(2, 3))
