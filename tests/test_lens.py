"""Tests of cameras with distortion: COLMAP's models, and all functions that take a camera."""

import json
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from lens_data import COEFFICIENTS, photograph
from PIL import ExifTags, Image

import dualrc
from dualrc import scenes
from dualrc.collection.cameras import choose_cameras, describe_cameras
from dualrc.colmap import colmap_camera, read_cameras, read_model
from dualrc.errors import DataError
from dualrc.evaluation.dense_verification import render_points
from dualrc.evaluation.pose import _epipolar_estimate
from dualrc.evaluation.pose_data import read_pose_data
from dualrc.geometry import (
    Camera,
    Lens,
    absolute_pose,
    cam1_from_cam0,
    camera_from_exif,
    direction_error_deg,
    estimate,
    fundamental_from_pose,
    pose_distance_px,
    read_cameras_json,
    read_rgbd,
    reproject,
    rotation_error_deg,
    sampson_distance_px,
    transform_points,
)
from dualrc.localize import read_poses
from dualrc.matches import Matches

pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")

SIZE = (640, 480)
K = np.array([[500.0, 0, 315.0], [0, 500, 245.0], [0, 0, 1]])
PINCUSHION = (0.3, -0.1, -0.01, 0.005)
TURN = np.array([[0.0, -1], [1, 0]])
POSE0 = scenes.look_at((-1, -8, 1), (0, 0, 0), size=SIZE).cam_from_world
POSE1 = scenes.look_at((1.5, -8.5, 0), (0.3, 0, 0), size=SIZE, roll_deg=5).cam_from_world


def camera_with(model, pose=None, **changes):
    own = np.diag([500.0, 500 if Lens.layout(model)[0] == 1 else 510, 1])
    own[:2, 2] = K[:2, 2]
    lens = Lens(model, COEFFICIENTS[model])
    return Camera(**{"width": SIZE[0], "height": SIZE[1], "K": own, "lens": lens, "cam_from_world": pose} | changes)


def theirs(camera):
    """Return pycolmap's camera, with names and numbers written here independently."""
    made = pycolmap.Camera.create_from_model_name(1, camera.lens.model, 1.0, *camera.size)
    focals = camera.K[[0, 1], [0, 1]][: len(made.focal_length_idxs())]
    made.params = [*focals, *(camera.K[:2, 2] + 0.5), *camera.lens.distortion]
    return made


def random_pixels(count=300, seed=0):
    return np.random.default_rng(seed).uniform((-0.5, -0.5), (SIZE[0] - 0.5, SIZE[1] - 0.5), (count, 2))


def test_all_models_of_colmap_are_known_but_the_sphere():
    assert set(pycolmap.CameraModelId.__members__) - {"INVALID", "EQUIRECTANGULAR"} == set(COEFFICIENTS)
    with pytest.raises(DataError, match=r"EQUIRECTANGULAR is not supported; undistort the images, or give one of"):
        Lens("EQUIRECTANGULAR")


@pytest.mark.parametrize("model", COEFFICIENTS)
def test_rays_and_pixels_are_colmaps(model):
    camera, pixels = camera_with(model), random_pixels()
    rays, other = camera.rays(pixels), theirs(camera)
    assert np.abs(rays[:, :2] - other.cam_from_img(pixels + 0.5)).max() < 1e-9
    assert np.abs(camera.project(rays * 3) - pixels).max() < 1e-6
    assert np.abs(camera.project(rays) - (np.array(other.img_from_cam(rays)) - 0.5)).max() < 1e-6
    assert camera.lens.distorts == (model not in ("PINHOLE", "SIMPLE_PINHOLE"))
    assert (np.abs(camera.undistort(pixels) - pixels).max() > 1) == camera.lens.distorts


@pytest.mark.parametrize("model", COEFFICIENTS)
def test_parameters_go_to_colmap_and_back(model, tmp_path):
    camera = camera_with(model)
    kind, params = camera.to_colmap()
    assert kind == model and np.allclose(params, theirs(camera).params)
    (tmp_path / "cameras.txt").write_text(f"# one\n1 {kind} 640 480 {' '.join(map(str, params))}\n")
    found = read_cameras(tmp_path / "cameras.txt", ["a.jpg"])["a.jpg"]
    assert found.lens == camera.lens and np.allclose(found.K, camera.K) and found.source == "file"
    # Stretched images have two focal lengths, which some models lack.
    stretched = camera.resized((640, 400))
    kind, params = stretched.to_colmap()
    again = Camera.from_colmap(kind, stretched.size, params)
    pixels = np.random.default_rng(0).uniform(0, (639, 399), (50, 2))
    assert np.allclose(again.rays(pixels), stretched.rays(pixels))


@pytest.mark.parametrize("model", COEFFICIENTS)
def test_an_image_on_its_side_has_its_lens_turned(model, tmp_path):
    exif = Image.Exif()
    # Rotated clockwise.
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", SIZE).save(tmp_path / "a.jpg", exif=exif)
    stored = camera_with(model)
    kind, params = stored.to_colmap()
    (tmp_path / "cameras.txt").write_text(f"1 {kind} 640 480 {' '.join(map(str, params))}\n")
    camera = read_cameras(tmp_path / "cameras.txt", ["a.jpg"], tmp_path)["a.jpg"]
    pixels = random_pixels(50)
    turned = np.stack([SIZE[1] - 1 - pixels[:, 1], pixels[:, 0]], axis=1)
    assert camera.size == SIZE[::-1]
    assert np.allclose(camera.rays(turned)[:, :2], stored.rays(pixels)[:, :2] @ TURN.T)
    back = colmap_camera(camera, tmp_path / "a.jpg", known=True)
    assert (back.model_name, back.width, back.height) == (kind, *SIZE) and np.allclose(back.params, params)


def test_what_the_lens_does_not_see():
    camera = Camera(width=640, height=480, K=K, lens=Lens("SIMPLE_RADIAL", (-0.2,)))
    # The model reverses at r^2 = 1 / 0.6, and passes through the center again.
    assert np.isnan(camera.project([[2.0, 0, 1], [0, 9, 1], [0, 0, -1], [np.nan, 0, 1]])).all()
    assert np.isfinite(camera.project([[1.2, 0, 1], [0, 0, 1]])).all()
    assert np.isnan(camera.rays([[1e4, 0], [np.nan, 3]])[:, :2]).all()
    fisheye = Camera(width=640, height=480, K=np.diag([100.0, 100, 1]), lens=Lens("FISHEYE"))
    assert np.isfinite(fisheye.rays([[150.0, 0]])).all() and np.isnan(fisheye.rays([[160.0, 0]])[:, :2]).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 SIMPLE_RADIAL 640 480 500 320 240", r"camera 1: SIMPLE_RADIAL has 4 parameters, not 3"),
        ("1 OPENCV 640 480 500 500 320 240 0 0 nan 0", "not finite"),
        ("1 EQUIRECTANGULAR 640 480 640 480", "EQUIRECTANGULAR is not supported"),
    ],
)
def test_cameras_that_are_none(tmp_path, line, message):
    (tmp_path / "cameras.txt").write_text(line)
    with pytest.raises(DataError, match=message):
        read_cameras(tmp_path / "cameras.txt", ["a.jpg"])


def test_cameras_json_has_a_model_and_its_coefficients(tmp_path):
    entry = {"width": 640, "height": 480, "K": K.tolist(), "model": "RADIAL", "distortion": [0.1, -0.02]}
    path = tmp_path / "cameras.json"
    path.write_text(json.dumps({"a": entry, "b": {**entry, "model": "PINHOLE", "distortion": []}}))
    cameras = read_cameras_json(path)
    assert cameras["a"].lens == Lens("RADIAL", (0.1, -0.02)) and not cameras["b"].lens.distorts
    for change, message in (
        ({"distortion": [0.1]}, r"a: RADIAL has 2 \(k1, k2\) distortion coefficients, not 1"),
        ({"model": "NONE"}, "a: The camera model NONE is not supported"),
    ):
        path.write_text(json.dumps({"a": entry | change}))
        with pytest.raises(DataError, match=message):
            read_cameras_json(path)
    del entry["model"]
    path.write_text(json.dumps({"a": entry}))
    with pytest.raises(DataError, match="its distortion has no model; name a COLMAP model"):
        read_cameras_json(path)


def box(count=400):
    return np.random.default_rng(1).uniform((-3, -2, -2), (3, 2, 2), (count, 3))


def seen_by(camera0, camera1, *, noise_px=0.0, wrong=0):
    """Return matches of points in a box; the last ones are wrong."""
    rng = np.random.default_rng(2)
    points = [camera.project(transform_points(camera.cam_from_world, box())) for camera in (camera0, camera1)]
    points = [at + noise_px * rng.standard_normal(at.shape) for at in points]
    points[1][len(points[1]) - wrong :] = rng.uniform(0, SIZE, (wrong, 2))
    return Matches(points0=points[0], points1=points[1], scores=np.ones(len(points[0])), size0=SIZE, size1=SIZE)


def pose_error_deg(pose, truth):
    return max(rotation_error_deg(pose.R, truth[:, :3]), direction_error_deg(pose.t, truth[:, 3]))


@pytest.mark.parametrize("model", COEFFICIENTS)
def test_an_essential_matrix_through_any_lens(model):
    # The second lens has the opposite distortion: a common distortion would look like a part of the motion.
    camera0, camera1 = camera_with(model, POSE0), camera_with("OPENCV", POSE1, lens=Lens("OPENCV", PINCUSHION))
    matches, truth = seen_by(camera0, camera1, noise_px=0.2, wrong=100), cam1_from_cam0(POSE0, POSE1)
    found = estimate(matches, "essential", camera0=camera0, camera1=camera1, threshold_px=1.0)
    assert pose_error_deg(found.pose, truth) < 0.4
    assert found.inliers[:300].mean() > 0.99 and found.inliers[300:].mean() < 0.1
    assert found.info["lens1"] == {"model": "OPENCV", "distortion": list(PINCUSHION)}
    assert ("lens0" in found.info) == camera0.lens.distorts and found.warnings == ()
    # Without distortion, with K only.
    plain = estimate(matches, "essential", camera0=camera0.pinhole, camera1=camera1.pinhole, threshold_px=1.0)
    assert pose_error_deg(plain.pose, truth) > 1


def test_distances_are_in_pixels_of_the_image_as_it_is():
    """A wide fisheye stretches undistorted pixels several times at its edge."""
    camera0, camera1 = camera_with("OPENCV_FISHEYE", POSE0), camera_with("SIMPLE_RADIAL", POSE1)
    pose, matches = cam1_from_cam0(POSE0, POSE1), seen_by(camera0, camera1)
    assert np.nanmax(pose_distance_px(pose, camera0, camera1, matches.points0, matches.points1)) < 1e-3
    # The epipolar curve through a point of image 1, traced by moving its 3D point along the ray of camera 0.
    places = transform_points(POSE0, box())
    along = camera1.project(transform_points(cam1_from_cam0(POSE0, POSE1), places * 1.0001)) - matches.points1
    across = np.stack([-along[:, 1], along[:, 0]], axis=1) / np.linalg.norm(along, axis=1, keepdims=True)
    moved = matches.points1 + 0.7 * across
    distances = pose_distance_px(pose, camera0, camera1, matches.points0, moved, in_image1=True)
    assert np.allclose(distances, 0.7, atol=0.02)
    # For pinhole cameras these are the distances from the fundamental matrix.
    pinholes, points1 = (camera0.pinhole, camera1.pinhole), matches.points1 + 1.5
    F = fundamental_from_pose(pose, *pinholes)
    expected = sampson_distance_px(F, matches.points0, points1)
    assert np.allclose(pose_distance_px(pose, *pinholes, matches.points0, points1), expected)


@pytest.mark.parametrize("model", COEFFICIENTS)
def test_an_absolute_pose_through_any_lens(model):
    camera, xyz = camera_with(model), box()
    pixels = camera.project(transform_points(POSE1, xyz))
    pixels[::4] = random_pixels(len(pixels[::4]))
    exact = absolute_pose(pixels, xyz, camera=camera, threshold_px=2.0)
    assert rotation_error_deg(exact.cam_from_world[:, :3], POSE1[:, :3]) < 1e-5
    assert np.linalg.norm(exact.cam_from_world - POSE1) < 1e-5
    assert exact.camera.lens == camera.lens and exact.inliers.sum() >= 300
    # The covariance is correct: it uses the derivatives through the lens.
    noisy = pixels + 0.5 * np.random.default_rng(3).standard_normal(pixels.shape)
    found = absolute_pose(noisy, xyz, camera=camera, threshold_px=3.0)
    deviation = np.sqrt(np.trace(found.covariance[3:, 3:]))
    true_center = -POSE1[:, :3].T @ POSE1[:, 3]
    assert np.linalg.norm(found.center - true_center) < 4 * deviation < 0.1


def test_a_guess_and_a_motion_without_parallax_are_said(tmp_path):
    camera0 = Camera(width=640, height=480, K=K, cam_from_world=POSE0)
    turned = scenes.look_at((-1, -8, 1), (1.5, 0, 0), size=SIZE, roll_deg=3).cam_from_world
    rotated = replace(camera0, cam_from_world=turned)
    for noise_px in (0.1, 1.0, 2.0):
        matches = seen_by(camera0, rotated, noise_px=noise_px, wrong=120)
        found = estimate(matches, "essential", camera0=camera0, camera1=rotated)
        assert found.rotation_only and found.info["rotation_only"] and "hardly any parallax" in found.warnings[0]
        moved = replace(camera0, cam_from_world=POSE1)
        apart = seen_by(camera0, moved, noise_px=noise_px, wrong=120)
        there = estimate(apart, "essential", camera0=camera0, camera1=moved)
        assert not there.rotation_only and there.warnings == ()
    kept = matches.with_estimate(found)
    for name in ("m.npz", "m.json", "m.csv"):
        kept.save(tmp_path / name)
        read = Matches.load(tmp_path / name).estimate
        assert read.rotation_only and read.warnings == found.warnings
    # Images of two sizes share no focal length that could be estimated.
    other = replace(matches, size1=(800, 480))
    guessed = estimate(other, "essential")
    assert guessed.info["cameras"] == "guessed"
    assert guessed.warnings[0].startswith("The focal length of both images is a guess")
    one = estimate(other, "essential", camera0=camera0)
    assert one.warnings[0].startswith("The focal length of image 1 is a guess")


def photo(path, tags, size=SIZE):
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif).update(tags)
    noise = np.random.default_rng(len(path.name)).integers(0, 255, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(path, exif=exif)
    return path


def test_exif_without_a_sensor_size_is_said(tmp_path, run):
    focal = {ExifTags.Base.FocalLength: 4.2}
    paths = [photo(tmp_path / "a.jpg", focal, (160, 128)), photo(tmp_path / "b.jpg", focal, (160, 128))]
    assert camera_from_exif(paths[0]) is None
    cameras = choose_cameras(tmp_path, ["a.jpg", "b.jpg"])
    expected = "2 guessed focal length (EXIF has no sensor size), one per image size, refined"
    assert describe_cameras(cameras) == expected
    status, out, _ = run("match", *paths, "--estimate", "essential", "-o", tmp_path / "m.json", "--device", "cpu")
    assert status == 0
    assert "EXIF has a focal length of 4.2 mm but no sensor size" in " ".join(out.replace("│", " ").split())
    warnings = json.loads((tmp_path / "m.json").read_text())["estimate"]["warnings"]
    assert any("no sensor size" in warning for warning in warnings)
    photo(tmp_path / "b.jpg", {**focal, ExifTags.Base.FocalLengthIn35mmFilm: 28})
    assert describe_cameras(choose_cameras(tmp_path, ["b.jpg"])) == "1 focal length from EXIF, refined"


@lru_cache(maxsize=1)
def small_scene():
    return scenes.make_scene(3, texture_size=128)


def view(eye, target, camera):
    return replace(camera, cam_from_world=scenes.look_at(eye, target, size=camera.size).cam_from_world)


def test_rgbd_frames_with_a_lens(tmp_path):
    """Depth maps have the distortion of their images, and cameras.txt replaces K.txt."""
    camera = Camera(width=160, height=120, K=[[140, 0, 80], [0, 140, 59], [0, 0, 1]], lens=Lens("RADIAL", (-0.2, 0.05)))
    eyes, lines = {"a.png": (-0.4, -11, 3), "b.png": (0.4, -11, 3)}, []
    for folder in ("images", "depth"):
        (tmp_path / folder).mkdir()
    for name, eye in eyes.items():
        posed = view(eye, (0, 2, 1.5), camera)
        Image.fromarray(photograph(small_scene(), posed)).save(tmp_path / "images" / name)
        # A wall two units behind the origin, whose depth along the axis has a closed form.
        x, y = np.meshgrid(np.arange(160), np.arange(120))
        rays = posed.rays(np.stack([x.ravel(), y.ravel()], axis=1)) @ posed.cam_from_world[:, :3]
        depth = (2 - eye[1]) / rays[:, 1]
        Image.fromarray(np.round(depth.reshape(120, 160) * 1000).astype(np.uint16)).save(tmp_path / "depth" / name)
        whole = np.vstack([posed.cam_from_world, [0, 0, 0, 1]])
        lines.append(" ".join([name, *map(str, np.linalg.inv(whole).ravel())]))
    (tmp_path / "world_from_cam.txt").write_text("\n".join(lines))
    kind, params = camera.to_colmap()
    (tmp_path / "cameras.txt").write_text(f"# one\n1 {kind} 160 120 {' '.join(map(str, params))}\n")
    first, second = read_rgbd(tmp_path)
    assert first.camera.lens == camera.lens
    depths = [dualrc.geometry.read_depth_m(frame.depth) for frame in (first, second)]
    corners = np.array([[5.0, 5], [150, 8], [80, 60], [12, 110]])
    found = reproject(corners, depths[0], first.camera, depths[1], second.camera, max_error_px=0.1)
    assert found.seen[[0, 2, 3]].all()
    for text, message in (
        ("1 PINHOLE 10 10 5 5 5 5", "is for 10x10 pixels"),
        ("\n", "has 0 cameras"),
        ("1 A", "not a"),
    ):
        (tmp_path / "cameras.txt").write_text(text)
        with pytest.raises(DataError, match=message):
            read_rgbd(tmp_path)


def test_pose_benchmarks_through_a_lens(tmp_path):
    content = {}
    (tmp_path / "images").mkdir()
    for name, pose in (("a.png", POSE0), ("b.png", POSE1)):
        Image.new("RGB", SIZE).save(tmp_path / "images" / name)
        camera = camera_with("OPENCV", pose)
        content[name] = {
            "width": 640,
            "height": 480,
            "K": camera.K.tolist(),
            "model": "OPENCV",
            "distortion": list(camera.lens.distortion),
            "cam_from_world": pose.tolist(),
        }
    (tmp_path / "cameras.json").write_text(json.dumps(content))
    ((pair, truth),) = read_pose_data(tmp_path).pairs.items()
    matches = seen_by(camera_with("OPENCV", POSE0), camera_with("OPENCV", POSE1))
    assert _epipolar_estimate(matches, truth).inliers.all()
    assert truth.cameras(SIZE, SIZE)[0].lens == camera_with("OPENCV").lens and pair.name0.endswith("a.png")


def test_scans_are_rendered_through_the_lens():
    """InLoc verifies poses by rendering the scan through the camera."""
    camera = camera_with("OPENCV")
    xyz = np.array([[0.5, 0.3, 1], [-0.4, -0.35, 1], [0, 0, 1], [50, 0, 1]], dtype=np.float32)
    rgb = np.array([[10, 0, 0], [20, 0, 0], [30, 0, 0], [40, 0, 0]], dtype=np.uint8)
    image, seen = render_points(xyz, rgb, camera, np.eye(3, 4))
    column, row = np.round(camera.project(xyz[:3])).astype(int).T
    assert image[row, column, 0].tolist() == [10, 20, 30] and seen.sum() == 3


# The example of the README, with the bundled network.

EYES = {f"{number}.png": (9 * np.sin(a), 1 - 11 * np.cos(a), 3) for number, a in enumerate(np.linspace(-0.4, 0.4, 5))}
QUERIES = {"q0.png": (-1.6, -9.5, 3.3), "q1.png": (2.2, -9.2, 3.1)}
PHONE = Camera(
    width=400, height=304, K=[[350, 0, 199.5], [0, 350, 151.5], [0, 0, 1]], lens=Lens("SIMPLE_RADIAL", (-0.15,))
)


def test_the_two_lines_of_the_readme_through_a_lens(tmp_path, run):
    """Reconstruct photos of an unknown camera with distortion, then localize other photos of it."""
    truth = {}
    for folder, eyes in (("photos", EYES), ("new-photos", QUERIES)):
        (tmp_path / folder).mkdir()
        for name, eye in eyes.items():
            posed = view(eye, (0, 2, 1.5), PHONE)
            Image.fromarray(photograph(small_scene(), posed)).save(tmp_path / folder / name)
            truth[name] = posed.cam_from_world
    options = ("--device", "cpu", "--top", 800)
    status, *told = run("reconstruct", tmp_path / "photos", "--out", tmp_path / "town", *options, "--workers", 1)
    assert status == 0, told
    place = ("--map", tmp_path / "town" / "model", "--images", tmp_path / "photos", "--out", tmp_path / "poses.json")
    status, out, errors = run("localize", tmp_path / "new-photos", *place, "--device", "cpu")
    assert status == 0, (out, errors)
    assert "camera: the map's" in errors and "the map's" in out
    model = read_model(tmp_path / "town" / "model", tmp_path / "photos")
    lens = model.images["0.png"].camera.lens
    assert lens.model == "SIMPLE_RADIAL" and lens.distortion[0] == pytest.approx(-0.15, abs=0.03)
    entry = json.loads((tmp_path / "poses.json").read_text())["queries"]["q0.png"]["camera"]
    assert entry["source"] == "the map's" and entry["distortion"] == [lens.distortion[0]]
    # The cameras align the map to the true frame and unit.
    own = {name: image.cam_from_world for name, image in model.images.items()}
    U, _, Vt = np.linalg.svd(sum(truth[name][:, :3].T @ pose[:, :3] for name, pose in own.items()))
    ours, true = (np.array([center(poses[name]) for name in own]) for poses in (own, truth))
    spread = (ours - ours.mean(0)) @ (U @ Vt).T
    scale = np.sum(spread * (true - true.mean(0))) / np.sum(spread**2)
    found = read_poses(tmp_path / "poses.txt")
    assert found.keys() == QUERIES.keys()
    for name, pose in found.items():
        at = scale * (U @ Vt) @ (center(pose) - ours.mean(0)) + true.mean(0)
        assert rotation_error_deg(pose[:, :3] @ (U @ Vt).T, truth[name][:, :3]) < 0.5
        # The distance to the scene is about 12.
        assert np.linalg.norm(at - center(truth[name])) < 0.15


def center(pose):
    return -pose[:, :3].T @ pose[:, 3]
