"""Tests of homographies, cameras and two-view models: known answers and edge cases."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

from dualrc.errors import ConfigError, DataError, ImageError
from dualrc.geometry import (
    Camera,
    apply_homography,
    cam1_from_cam0,
    camera_from_exif,
    corner_error_px,
    crop_homography,
    direction_error_deg,
    epipolar_distance_px,
    essential_from_pose,
    estimate,
    fundamental_from_pose,
    homography_grid,
    pose_from_quaternion,
    quaternion_from_rotation,
    read_cameras_json,
    relative_pose,
    resize_homography,
    rotation_error_deg,
    rotation_from_quaternion,
    sample_bilinear,
    sampson_distance_px,
    transform_points,
)
from dualrc.matches import Matches
from dualrc.pixels import pixel_grid

STRECHA = Path(__file__).resolve().parents[2] / "shared" / "data" / "strecha" / "fountain-P11"
KINDS = ("homography", "fundamental", "essential")
SIZE = (1000, 800)
H = np.array([[0.9, 0.1, 10], [-0.1, 1.1, 5], [1e-4, 2e-5, 1]])


def rotation(axis, degrees):
    x, y, z = np.asarray(axis, dtype=float) / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = np.radians(degrees)
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


POSE = np.column_stack([rotation((1, 2, -0.5), 13), np.array([-1, 0.1, 0.2]) / np.linalg.norm([-1, 0.1, 0.2])])


def make_matches(points0, points1, size0=SIZE, size1=SIZE, scores=None):
    scores = np.ones(len(points0)) if scores is None else scores
    return Matches(points0=points0, points1=points1, scores=scores, size0=size0, size1=size1)


def scene_matches(camera0, camera1, *, count=200, noise_px=0.0, wrong=0, seed=0):
    rng = np.random.default_rng(seed)
    points0 = rng.uniform(0, 1, (count, 2)) * (np.array(camera0.size) - 1)
    points1 = camera1.project(transform_points(POSE, camera0.rays(points0) * rng.uniform(3, 9, (count, 1))))
    points1[:wrong] = rng.uniform(0, 1, (wrong, 2)) * (np.array(camera1.size) - 1)
    points1 += rng.normal(0, 1, points1.shape) * noise_px
    return make_matches(points0, points1, camera0.size, camera1.size)


# Homographies


def test_apply_homography_translates_and_divides():
    assert apply_homography([[1, 0, 3], [0, 1, -2], [0, 0, 2]], [[1, 4]]) == pytest.approx(np.array([[2, 1]]))


def test_apply_homography_at_infinity_and_empty():
    to_infinity = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 0]])
    mapped = apply_homography(to_infinity, [[0, 5], [0, 0], [2, 4], [np.nan, 0]])
    assert np.isinf(mapped[0, 1])
    assert np.isnan(mapped[[1, 3]]).any(axis=1).all()
    assert mapped[2] == pytest.approx([1, 2])
    assert apply_homography(np.eye(3), np.zeros((0, 2))).shape == (0, 2)


def test_resize_keeps_the_outer_edges():
    mapped = apply_homography(resize_homography((100, 50), (200, 25)), [[-0.5, -0.5], [99.5, 49.5], [0, 0]])
    assert mapped == pytest.approx(np.array([[-0.5, -0.5], [199.5, 24.5], [0.5, -0.25]]))


def test_crop_moves_its_first_pixel_to_zero():
    assert apply_homography(crop_homography(7, 3), [[7, 3]]) == pytest.approx(np.zeros((1, 2)))


def test_corner_error():
    assert corner_error_px(H, 5 * H, SIZE) == pytest.approx(0, abs=1e-9)
    assert corner_error_px(np.eye(3), [[1, 0, 3], [0, 1, 4], [0, 0, 1]], SIZE) == pytest.approx(5)
    assert corner_error_px(np.eye(3), np.zeros((3, 3)), SIZE) == np.inf


def test_homography_grid_inverts_and_stops_at_the_horizon():
    grid = homography_grid(H, SIZE, (30, 20))
    assert apply_homography(H, grid.reshape(-1, 2)).reshape(20, 30, 2) == pytest.approx(pixel_grid((30, 20)))
    tilted = np.array([[1, 0, 0], [0, 1, 0], [0, 0.1, 1.0]])  # y -> 10 as y -> infinity: rows below see nothing
    grid = homography_grid(tilted, (20, 20), (20, 20))
    assert np.isfinite(grid[:10]).all()
    assert np.isnan(grid[11:]).all()
    with pytest.raises(DataError, match="singular"):
        homography_grid(np.zeros((3, 3)), (2, 2), (2, 2))


def test_sample_bilinear():
    image = np.array([[[0], [10]], [[20], [30]]], dtype=np.uint8)
    values = sample_bilinear(image, np.array([[0, 0], [0.5, 0], [0.5, 0.5], [9, 9], [np.nan, 0]]))
    assert values[:, 0] == pytest.approx([0, 5, 15, 30, 0])


# Cameras and poses


def test_project_and_rays_are_inverse():
    camera = Camera(width=640, height=480, K=np.array([[500, 2, 300], [0, 510, 200], [0, 0, 1]]))
    points = np.array([[0, 0], [639, 479], [300, 200.0]])
    assert camera.project(camera.rays(points) * 7) == pytest.approx(points)
    assert camera.project([[0, 0, 1]]) == pytest.approx(np.array([[300, 200]]))
    assert np.isnan(camera.project([[0, 0, -1], [1, 1, 0]])).all()


def test_centred_camera_and_resizing():
    camera = Camera.from_focal((640, 480), 500)
    assert camera.K[:2, 2] == pytest.approx([319.5, 239.5])
    half = camera.resized((320, 240))
    assert half.size == (320, 240)
    assert np.allclose(half.K, Camera.from_focal((320, 240), 250).K)


@pytest.mark.parametrize(
    "K", [np.eye(2), np.diag([-1, 1, 1]), np.full((3, 3), np.nan), 2 * np.eye(3), np.zeros((3, 3))]
)
def test_broken_intrinsics_are_refused(K):
    with pytest.raises(DataError, match="K is not"):
        Camera(width=10, height=10, K=K)


def test_relative_pose_of_two_cameras():
    world0 = np.column_stack([rotation((0, 1, 0), 30), [1, 2, 3]])
    world1 = np.column_stack([rotation((1, 1, 0), -50), [0, -1, 2]])
    points = np.random.default_rng(0).normal(size=(5, 3))
    moved = transform_points(cam1_from_cam0(world0, world1), transform_points(world0, points))
    assert moved == pytest.approx(transform_points(world1, points))
    with pytest.raises(DataError, match="3x4"):
        cam1_from_cam0(np.eye(3), world1)


@pytest.mark.parametrize("degrees", [0, 1e-6, 0.1, 45, 90, 179.9])
def test_pose_errors_in_degrees(degrees):
    turn = rotation((1, 2, 3), degrees)
    base = rotation((0, 0, 1), 77)
    assert rotation_error_deg(turn @ base, base) == pytest.approx(degrees, rel=1e-5, abs=1e-9)
    direction = rotation((0, 0, 1), degrees) @ [1, 0, 0]
    assert direction_error_deg([5, 0, 0], direction) == pytest.approx(degrees, abs=1e-9)
    folded = direction_error_deg([5, 0, 0], -direction, either_sign=True)
    assert folded == pytest.approx(min(degrees, 180 - degrees), abs=1e-9)


def test_opposite_and_zero_directions():
    assert direction_error_deg([1, 0, 0], [-2, 0, 0]) == pytest.approx(180)
    assert np.isnan(direction_error_deg([0, 0, 0], [1, 0, 0]))
    assert rotation_error_deg(np.eye(3), np.diag([1, -1, -1])) == pytest.approx(180)


def test_cameras_json_round_trip(tmp_path):
    path = tmp_path / "cameras.json"
    K = [[500, 0, 320], [0, 500, 240], [0, 0, 1]]
    entries = {
        "a.jpg": {"width": 640, "height": 480, "K": K, "cam_from_world": POSE.tolist()},
        "b.jpg": {"width": 640, "height": 480, "K": K, "distortion": [0, 0]},
    }
    path.write_text(json.dumps(entries))
    cameras = read_cameras_json(path)
    assert cameras["a.jpg"].size == (640, 480)
    assert cameras["a.jpg"].cam_from_world == pytest.approx(POSE)
    assert cameras["b.jpg"].cam_from_world is None
    assert cameras["b.jpg"].source == "file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[]", "contains no cameras"),
        ('{"a": 3}', "not a camera"),
        ('{"a": {"width": 3, "height": 3}}', "'K' is missing"),
        ('{"a": {"width": 3, "height": 3, "K": [[1]]}}', "a: K is not"),
        ('{"a": {"width": 3, "height": 3, "K": [[1,0,0],[0,1,0],[0,0,1]], "distortion": [0.1]}}', "no model"),
    ],
)
def test_broken_cameras_json(tmp_path, text, message):
    path = tmp_path / "cameras.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_cameras_json(path)


def test_missing_cameras_json(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_cameras_json(tmp_path / "none.json")


def photo(path, tags, *, size=(400, 300), orientation=1):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif.get_ifd(ExifTags.IFD.Exif).update(tags)
    Image.new("RGB", size).save(path, exif=exif)
    return path


def test_exif_film_equivalent_goes_by_the_diagonal(tmp_path):
    camera = camera_from_exif(photo(tmp_path / "a.jpg", {ExifTags.Base.FocalLengthIn35mmFilm: 50}))
    assert camera is not None
    assert camera.focal_px == pytest.approx(50 / np.hypot(36, 24) * 500)
    assert camera.K[:2, 2] == pytest.approx([199.5, 149.5])
    assert camera.source == "exif"


def test_exif_camera_is_that_of_the_upright_image(tmp_path):
    camera = camera_from_exif(photo(tmp_path / "a.jpg", {ExifTags.Base.FocalLengthIn35mmFilm: 50}, orientation=6))
    assert camera is not None
    assert camera.size == (300, 400)
    assert camera.K[:2, 2] == pytest.approx([149.5, 199.5])


def test_exif_focal_plane_resolution_of_a_resized_image(tmp_path):
    tags = {
        ExifTags.Base.FocalLength: IFDRational(20, 1),
        ExifTags.Base.FocalPlaneXResolution: IFDRational(1000, 1),  # per cm: 100 pixels per mm
        ExifTags.Base.FocalPlaneResolutionUnit: 3,
        ExifTags.Base.ExifImageWidth: 800,
    }
    camera = camera_from_exif(photo(tmp_path / "a.jpg", tags))
    assert camera is not None
    assert camera.focal_px == pytest.approx(20 * 100 / 2)


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {ExifTags.Base.FocalLengthIn35mmFilm: 0},
        {ExifTags.Base.FocalLength: IFDRational(20, 1)},
        {ExifTags.Base.FocalLength: IFDRational(20, 1), ExifTags.Base.FocalPlaneXResolution: IFDRational(0, 0)},
        {ExifTags.Base.FocalLengthIn35mmFilm: 60000},
    ],
)
def test_exif_that_does_not_tell(tmp_path, tags):
    assert camera_from_exif(photo(tmp_path / "a.jpg", tags)) is None


def test_exif_of_what_is_no_image(tmp_path):
    path = tmp_path / "a.jpg"
    with pytest.raises(ImageError, match="does not exist"):
        camera_from_exif(path)
    path.write_text("no image")
    with pytest.raises(ImageError, match=r"Cannot read .* as an image"):
        camera_from_exif(path)


# Epipolar geometry


def test_essential_and_fundamental_from_pose():
    camera0, camera1 = Camera.from_focal(SIZE, 800), Camera.from_focal((640, 480), 600)
    matches = scene_matches(camera0, camera1)
    E, F = essential_from_pose(POSE), fundamental_from_pose(POSE, camera0, camera1)
    rays0, rays1 = camera0.rays(matches.points0), camera1.rays(matches.points1)
    assert np.abs(np.sum(rays1 @ E * rays0, axis=1)).max() < 1e-6
    assert np.linalg.norm(E) == pytest.approx(np.sqrt(2))
    assert sampson_distance_px(F, matches.points0, matches.points1).max() < 1e-3
    assert not fundamental_from_pose(np.eye(3, 4), camera0, camera1).any()


def test_distances_of_a_sideways_motion():
    # Rows correspond to rows: the epipolar line of (x, y) is y1 = y, and a vertical offset is the distance.
    F = np.array([[0, 0, 0], [0, 0, -1], [0, 1, 0]])
    assert epipolar_distance_px(F, [[5, 10]], [[300, 14]]) == pytest.approx([4])
    assert sampson_distance_px(F, [[5, 10]], [[300, 14]]) == pytest.approx([4 / np.sqrt(2)])
    assert np.isnan(sampson_distance_px(np.zeros((3, 3)), [[5, 10]], [[300, 14]])).all()


# Robust estimation


def test_estimates_a_homography_among_wrong_matches():
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, 800, (300, 2))
    points1 = apply_homography(H, points0) + rng.normal(0, 0.3, (300, 2))
    points1[:150] = rng.uniform(0, 800, (150, 2))
    found = estimate(make_matches(points0, points1), "homography")
    assert found.matrix is not None
    assert found.matrix[2, 2] == 1
    assert corner_error_px(found.matrix, H, SIZE) < 1
    assert found.inliers[150:].all()
    assert found.inliers[:150].sum() < 5


def test_estimates_a_fundamental_matrix():
    camera = Camera.from_focal(SIZE, 800)
    found = estimate(scene_matches(camera, camera, noise_px=0.3, wrong=60), "fundamental")
    assert found.matrix is not None
    clean = scene_matches(camera, camera, seed=1)
    assert np.median(sampson_distance_px(found.matrix, clean.points0, clean.points1)) < 0.3
    assert found.inliers[60:].mean() > 0.98


def test_estimates_a_relative_pose_with_known_cameras():
    # An off-center principal point reveals a wrong pixel convention in the call of PoseLib.
    camera0 = Camera(width=1000, height=800, K=np.array([[800, 0, 450], [0, 820, 380], [0, 0, 1]]), source="file")
    camera1 = Camera(width=640, height=480, K=np.array([[600, 1, 330], [0, 600, 250], [0, 0, 1]]), source="exif")
    matches = scene_matches(camera0, camera1, noise_px=0.2, wrong=60)
    found = estimate(matches, "essential", camera0=camera0, camera1=camera1)
    pose = found.pose.cam1_from_cam0
    assert rotation_error_deg(pose[:, :3], POSE[:, :3]) < 0.1
    assert direction_error_deg(pose[:, 3], POSE[:, 3]) < 0.5
    assert np.linalg.norm(pose[:, 3]) == pytest.approx(1)
    assert found.matrix == pytest.approx(essential_from_pose(pose))
    assert found.info["cameras"] == "image 0: file, image 1: exif"
    assert found.info["parallax_px"] > 10
    assert estimate(matches, "fundamental").pose is None
    json.dumps(found.info)


def test_relative_pose_without_noise_is_exact():
    camera = Camera.from_focal(SIZE, 800)
    pose = relative_pose(scene_matches(camera, camera), camera, camera)
    assert pose is not None
    assert rotation_error_deg(pose.R, POSE[:, :3]) < 1e-3
    assert direction_error_deg(pose.t, POSE[:, 3]) < 1e-2
    assert relative_pose(make_matches(np.zeros((3, 2)), np.zeros((3, 2))), camera, camera) is None


@pytest.mark.parametrize("size1", [SIZE, SIZE[::-1]])
def test_estimates_a_shared_focal_length(size1):
    camera0, camera1 = Camera.from_focal(SIZE, 900), Camera.from_focal(size1, 900)
    found = estimate(scene_matches(camera0, camera1, noise_px=0.1, wrong=30), "essential")
    assert found.info["cameras"].startswith("estimated focal length ")
    assert found.info["K0"][0][0] == pytest.approx(900, rel=0.05)
    assert rotation_error_deg(found.pose.R, POSE[:, :3]) < 1


def test_guesses_where_sizes_differ_and_shares_where_they_agree():
    camera0, camera1 = Camera.from_focal(SIZE, 1200), Camera.from_focal((500, 400), 600)
    matches = scene_matches(camera0, camera1)
    found = estimate(matches, "essential")
    assert found.info["cameras"] == "guessed"
    assert found.info["K1"][0][0] == pytest.approx(600)
    one = estimate(matches, "essential", camera0=camera0)
    assert one.info["cameras"] == "image 0: given, image 1: guessed"
    same = scene_matches(camera0, camera0)
    for cameras in ({"camera0": camera0}, {"camera1": camera0}):
        shared = estimate(same, "essential", **cameras)
        assert "that of image" in shared.info["cameras"]
        assert shared.info["K0"] == shared.info["K1"]


def test_camera_of_another_size_or_unknown_size_is_refused():
    camera = Camera.from_focal((500, 400), 600)
    points = np.zeros((9, 2))
    with pytest.raises(DataError, match="500 x 400"):
        estimate(make_matches(points, points), "essential", camera0=camera)
    with pytest.raises(DataError, match="size of image 1"):
        estimate(make_matches(points, points, size1=(0, 0)), "essential")


def test_estimates_are_repeatable_and_leave_the_order_of_scores_alone():
    camera = Camera.from_focal(SIZE, 800)
    matches = scene_matches(camera, camera, noise_px=0.5, wrong=100)
    scores = np.random.default_rng(0).random(len(matches))
    matches = make_matches(matches.points0, matches.points1, scores=scores)
    for kind in KINDS:
        first, second = estimate(matches, kind), estimate(matches, kind)
        assert np.array_equal(first.matrix, second.matrix)
        assert np.array_equal(first.inliers, second.inliers)
    assert estimate(matches, "fundamental").inliers[100:].mean() > 0.95


def test_nan_rows_are_outliers():
    camera = Camera.from_focal(SIZE, 800)
    matches = scene_matches(camera, camera)
    points1 = matches.points1.copy()
    points1[::3] = np.nan
    points1[1::3] = apply_homography(H, matches.points0[1::3])
    points1[2::3] = apply_homography(H, matches.points0[2::3])
    found = estimate(make_matches(matches.points0, points1), "homography")
    assert not found.inliers[::3].any()
    assert found.inliers[1::3].all()


def degenerate_cases():
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 800, (50, 2))
    line = np.outer(np.arange(50.0), [5, 3])
    one = np.tile([[100.0, 50.0]], (50, 1))
    centre = np.tile([[499.5, 399.5]], (50, 1))
    return {
        "none": (points[:0], points[:0]),
        "one": (points[:1], points[:1]),
        "three": (points[:3], points[:3]),
        "all NaN": (points * np.nan, points),
        "infinite": (points * np.inf, points),
        "one point": (one, one + 7),
        "principal point": (centre, centre),
        "a line": (line, line + 3),
        "to one point": (points, one),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", degenerate_cases())
@pytest.mark.parametrize("size1", [SIZE, (900, 800)])
def test_degenerate_matches_have_no_model(kind, case, size1, capfd):
    points0, points1 = degenerate_cases()[case]
    found = estimate(make_matches(points0, points1, size1=size1), kind)
    assert found.matrix is None
    assert found.inliers.shape == (len(points0),)
    assert not found.inliers.any()
    assert found.info["reason"]
    json.dumps(found.info)
    assert capfd.readouterr() == ("", "")


def test_four_exact_matches_make_a_homography_but_not_with_three_on_a_line():
    corners = np.array([[0, 0], [900, 0], [900, 700], [0, 700.0]])
    found = estimate(make_matches(corners, apply_homography(H, corners)), "homography")
    assert found.matrix == pytest.approx(H, abs=1e-3)
    bent = np.array([[0, 0], [100, 100], [200, 200], [300, 0.0]])
    straightened = np.array([[0, 0], [100, 150], [200, 200], [300, 0.0]])
    assert estimate(make_matches(bent, straightened), "homography").matrix is None


def test_an_image_matched_with_itself_has_no_relative_pose():
    points = np.random.default_rng(0).uniform(0, 800, (100, 2))
    same = make_matches(points, points)
    found = estimate(same, "essential")
    assert found.matrix is None
    assert "share one center" in found.info["reason"]
    assert found.pose is None
    assert np.allclose(estimate(same, "homography").matrix, np.eye(3), atol=1e-6)


def test_few_chance_inliers_can_be_refused():
    rng = np.random.default_rng(0)
    matches = make_matches(rng.uniform(0, 800, (100, 2)), rng.uniform(0, 800, (100, 2)))
    assert estimate(matches, "fundamental", min_inliers=30, max_iterations=500).matrix is None


def test_unknown_settings_are_refused():
    matches = make_matches(np.zeros((0, 2)), np.zeros((0, 2)))
    with pytest.raises(ConfigError, match="choose one of homography"):
        estimate(matches, "affine")
    for threshold_px in (0, -1, np.nan):
        with pytest.raises(ConfigError, match="threshold_px"):
            estimate(matches, "homography", threshold_px=threshold_px)


@pytest.mark.skipif(not STRECHA.is_dir(), reason="needs shared/data/strecha beside the repository")
def test_real_cameras_agree_with_their_poses():
    cameras = read_cameras_json(STRECHA / "cameras.json")
    camera0, camera1 = cameras["0003.jpg"], cameras["0004.jpg"]
    true_pose = cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world)
    rng = np.random.default_rng(0)
    points0 = rng.uniform(0, 1000, (100, 2))
    points1 = camera1.project(transform_points(true_pose, camera0.rays(points0) * rng.uniform(5, 9, (100, 1))))
    pose = relative_pose(make_matches(points0, points1, camera0.size, camera1.size), camera0, camera1)
    assert pose is not None
    assert rotation_error_deg(pose.R, true_pose[:, :3]) < 0.01
    assert direction_error_deg(pose.t, true_pose[:, 3]) < 0.05


def test_quaternions_and_rotations():
    assert rotation_from_quaternion([2, 0, 0, 0]) == pytest.approx(np.eye(3))
    quarter = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]])  # about z
    assert rotation_from_quaternion([1, 0, 0, 1]) == pytest.approx(quarter)
    assert quaternion_from_rotation(quarter) == pytest.approx(np.sqrt([0.5, 0, 0, 0.5]), abs=1e-12)
    for half in (np.diag([1.0, -1, -1]), np.diag([-1.0, 1, -1]), np.diag([-1.0, -1, 1])):
        assert rotation_from_quaternion(quaternion_from_rotation(half)) == pytest.approx(half)
    assert pose_from_quaternion([1, 0, 0, 1, 7, 8, 9]) == pytest.approx(np.column_stack([quarter, [7, 8, 9]]))
    with pytest.raises(ValueError, match="length 0"):
        rotation_from_quaternion([0, 0, 0, 0])


def test_without_poselib_the_error_says_how_to_get_it(monkeypatch):
    """PyPI has no wheels of it for Linux on aarch64."""
    monkeypatch.setitem(sys.modules, "poselib", None)
    points = np.random.default_rng(0).uniform(0, 100, (20, 2))
    for kind in KINDS:
        with pytest.raises(ConfigError, match=r"needs PoseLib .*: pip install poselib"):
            estimate(
                Matches(points0=points, points1=points, scores=np.ones(20), size0=(100, 100), size1=(100, 100)), kind
            )
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['poselib'] = None; import dualrc.cli, dualrc.geometry"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
