"""Tests of localization: poses are exact where the matches are."""

import numpy as np
import pytest
from localize_data import (
    NAMES,
    QUERY,
    SIZE,
    Oracle,
    camera_of,
    errors,
    make_world,
    write_images,
    write_model,
    write_rgbd,
)
from PIL import ExifTags, Image

from dualrc.config import MatcherConfig
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import Camera, Lens, absolute_pose
from dualrc.localize import (
    Correspondences,
    LocalizeConfig,
    Localizer,
    ModelMap,
    RgbdMap,
    read_map,
)
from dualrc.matcher.follow import follow
from dualrc.matches import Matches

pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")


@pytest.fixture
def world(tmp_path):
    return make_world(tmp_path)


def test_the_pose_is_exact_where_the_matches_are(world, tmp_path):
    found = Localizer(Oracle(), world).localize(tmp_path / "images" / QUERY)
    assert max(errors(found)) < 1e-3
    assert found.camera.source == "the map's" and np.allclose(found.camera.K, camera_of(QUERY).K)
    assert list(found.candidates) == list(NAMES) and min(found.candidates.values()) > 30
    assert found.inliers == sum(found.candidates.values()) > 0.9 * found.correspondences
    assert found.position_deviation < 1e-3 and found.rotation_deviation_deg < 1e-2
    assert found.confidence > 0.9


@pytest.mark.parametrize("half_px", [0.0, 1.0])
def test_a_wrong_half_pixel_would_show(tmp_path, half_px):
    images = write_images(tmp_path / "images")
    world = read_map(write_model(tmp_path / "model", half_px=half_px), images)
    found = Localizer(Oracle(), world).localize(images / QUERY, camera=camera_of(QUERY))
    assert max(errors(found)) > 0.02
    slipped = Localizer(Oracle(slip_px=0.5), read_map(write_model(tmp_path / "model"), images))
    assert max(errors(slipped.localize(images / QUERY))) > 0.02


def test_images_on_their_side(tmp_path):
    turned = ("b.png", QUERY)
    images = write_images(tmp_path / "images", turned=turned)
    world = read_map(write_model(tmp_path / "model", turned=turned), images)
    found = Localizer(Oracle(), world).localize(images / QUERY)
    assert max(errors(found)) < 1e-3 and found.candidates["b.png"] > 30
    assert found.camera.size == SIZE and found.camera.source == "the map's"


def test_rgbd(tmp_path):
    world = read_map(write_rgbd(tmp_path / "rgbd"))
    assert isinstance(world, RgbdMap)
    found = Localizer(Oracle(), world).localize(tmp_path / "rgbd" / "images" / QUERY)
    # Depth is rounded to a millimeter.
    assert errors(found)[0] < 0.01 and errors(found)[1] < 2e-3
    assert found.inliers > 200


def test_a_depth_map_that_is_missing_costs_only_its_frame(tmp_path):
    folder = write_rgbd(tmp_path / "rgbd")
    (folder / "depth" / "a.png").unlink()
    localizer = Localizer(Oracle(), read_map(folder))
    found = localizer.localize(folder / "images" / QUERY)
    assert errors(found)[1] < 2e-3 and found.candidates["a.png"] == 0
    assert "does not exist" in localizer.broken["a.png"]


def test_an_unknown_focal_length_is_estimated(tmp_path):
    images = write_images(tmp_path / "images")
    world = read_map(write_model(tmp_path / "model", focals={"b.png": 1.05}), images)
    # If cameras of one size differ, none of them is used for the query.
    found = Localizer(Oracle(), world).localize(images / QUERY)
    assert found.camera.source == "focal length estimated with the pose"
    assert found.camera.focal_px == pytest.approx(camera_of(QUERY).focal_px, rel=1e-4)
    assert max(errors(found)) < 2e-3
    exif = Image.Exif()
    exif[ExifTags.IFD.Exif] = {ExifTags.Base.FocalLength: 4.2}
    with Image.open(images / QUERY) as image:
        image.save(images / QUERY, exif=exif)
    told = Localizer(Oracle(), world).localize(images / QUERY).camera.source
    assert told == "focal length estimated with the pose, as EXIF has no sensor size"


def test_a_given_camera_and_exif_come_first(world, tmp_path):
    path = tmp_path / "images" / QUERY
    found = Localizer(Oracle(), world).localize(path, camera=camera_of(QUERY))
    assert found.camera.source == "given" and max(errors(found)) < 1e-3
    exif = Image.Exif()
    # The map's camera is refined, so EXIF counts only if it differs: this focal length is 41 mm.
    for film_mm, source in ((40, "the map's"), (60, "exif")):
        exif[ExifTags.IFD.Exif] = {ExifTags.Base.FocalLengthIn35mmFilm: film_mm}
        with Image.open(path) as image:
            image.save(path, exif=exif)
        assert Localizer(Oracle(), world).localize(path).camera.source == source


def test_the_maps_camera_is_shared_with_its_lens(tmp_path):
    images = write_images(tmp_path / "images")
    world = read_map(write_model(tmp_path / "model", distortion=0.01), images)
    camera = world.camera(SIZE)
    assert camera.lens == Lens("SIMPLE_RADIAL", (0.01,)) and camera.source == "the map's"
    assert world.camera((100, 100)) is None
    # A difference of less than a pixel at the edge counts as the same lens.
    close = read_map(write_model(tmp_path / "close", distortion=0.01, bent={"b.png": 0.012}), images)
    assert close.camera(SIZE).lens == camera.lens
    assert read_map(write_model(tmp_path / "other", distortion=0.01, bent={"b.png": 0.2}), images).camera(SIZE) is None


def test_too_few_matches_and_wrong_cameras_are_said(world, tmp_path):
    path = tmp_path / "images" / QUERY
    found = Localizer(Oracle(few=3), world).localize(path)
    assert found.cam_from_world is None and found.confidence == 0 and found.inliers == 0
    assert found.reason == f"{found.correspondences} correspondences are too few: a pose needs 12"
    found = Localizer(Oracle(), world).localize(path, camera=Camera.from_focal((64, 48), 60))
    assert "for 64 x 48 pixels but the image has 128 x 96" in found.reason
    Image.new("RGB", (64, 64)).save(tmp_path / "images" / "a.png")
    localizer = Localizer(Oracle(), world)
    assert max(errors(localizer.localize(path))) < 1e-3
    assert "64 x 64 pixels, but 128 x 96 in the map" in localizer.broken["a.png"]


@pytest.mark.parametrize(("known", "right"), [(True, 0), (True, 25), (False, 96)])
def test_support_that_chance_gives_is_no_pose(world, known, right):
    """Wrong dense matches err together, patch by patch, and some patches agree with some pose."""
    random, camera = np.random.default_rng(3), Camera.from_focal((640, 480), 700)
    middles = np.stack(np.meshgrid(np.arange(20, 640, 40), np.arange(20, 480, 40)), axis=-1).reshape(-1, 2)
    depths, order = random.uniform(4, 8, len(middles)), np.arange(len(middles))
    # Some patches show their own part of the map, the others that of another patch.
    order[right:] = right + random.permutation(len(middles) - right)
    points, xyz = [], []
    for number, shown in enumerate(order):
        steps = random.uniform(-8, 8, (20, 2))
        points.append(middles[number] + steps)
        rays = camera.rays(middles[shown] + steps)
        xyz.append(rays * depths[shown])
    count = 20 * len(middles)
    found = Correspondences(
        points=np.concatenate(points),
        xyz=np.concatenate(xyz),
        scores=np.ones(count),
        point_ids=np.arange(count),
        images=np.zeros(count, np.int64),
    )
    given = camera if known else None
    pose = Localizer(Oracle(), world).pose(found, (640, 480), camera=given, names=["a"])
    if right:
        assert pose.inliers >= 20 * right and np.allclose(pose.cam_from_world, np.eye(3, 4), atol=1e-3)
    else:
        # RANSAC alone takes it for a pose.
        assert absolute_pose(found.points, found.xyz, camera=given).inliers.sum() >= 12
        assert pose.cam_from_world is None and pose.inliers == 0 and pose.confidence == 0
        assert "of 192 places, agree with a pose" in pose.reason


def test_candidates_by_retrieval_and_features_once(world, tmp_path):
    images, matcher = tmp_path / "images", Oracle()
    (images / "b.png").write_text("broken")
    localizer = Localizer(matcher, world, LocalizeConfig(candidates=1))
    # An image is most similar to itself.
    for name in ("a.png", "c.png"):
        assert localizer.candidates(matcher.features(images / name)) == [name]
    assert list(localizer.broken) == ["b.png"]
    matcher.extracted.clear()
    assert list(localizer.localize(images / QUERY, candidates=["c.png", "a.png"]).candidates) == ["c.png", "a.png"]
    assert matcher.extracted == [QUERY]
    tight = Localizer(matcher, world, LocalizeConfig(max_memory=0))
    tight.localize(images / QUERY)
    assert max(errors(tight.localize(images / QUERY))) < 1e-3
    # No features were cached.
    assert matcher.extracted.count("a.png") == 2


def test_descriptors_of_the_map_are_kept(world, tmp_path):
    file, one = tmp_path / "map.npz", LocalizeConfig(candidates=1)
    first = Localizer(Oracle(), world, one, descriptors=file)
    first.prepare()
    assert first.matcher.extracted == list(NAMES)
    for damage, again in ((lambda: None, []), (lambda: file.write_bytes(b"PK broken"), list(NAMES))):
        damage()
        localizer = Localizer(Oracle(), world, one, descriptors=file)
        localizer.prepare()
        assert localizer.matcher.extracted == again
        query = localizer.matcher.features(tmp_path / "images" / "c.png")
        assert localizer.candidates(query) == ["c.png"]
    other = Oracle()
    other.config = MatcherConfig(size=64)
    Localizer(other, world, one, descriptors=file).prepare()
    # Descriptors of another size are not reused.
    assert other.extracted == list(NAMES)


def test_points_seen_by_several_images_are_merged():
    found = Correspondences(
        points=np.array([(10.0, 10), (11, 10), (50, 50), (20, 20), (21, 20)]),
        xyz=np.arange(15.0).reshape(5, 3),
        scores=np.array([0.6, 0.2, 0.1, 0.5, 0.5]),
        point_ids=np.array([7, 7, 7, -1, -1]),
        images=np.array([0, 1, 2, 0, 1]),
    )
    merged = found.merged(2.0)
    # Points without an id are not merged.
    assert np.allclose(merged.points, [(20, 20), (21, 20), (10.25, 10)])
    assert merged.point_ids.tolist() == [-1, -1, 7] and merged.scores.tolist() == [0.5, 0.5, 0.6]
    assert len(Correspondences.join([]).merged(1.0)) == 0


def test_maps_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="pass the folder of its images with --images"):
        read_map(write_model(tmp_path / "model"))
    with pytest.raises(DataError, match="has no COLMAP model"):
        read_map(tmp_path)
    made = pycolmap.Reconstruction(str(tmp_path / "model"))
    for number in list(made.points3D):
        made.delete_point3D(number)
    made.write(str(tmp_path / "model"))
    with pytest.raises(DataError, match="observes a 3D point"):
        read_map(tmp_path / "model", tmp_path)
    with pytest.raises(ConfigError, match="candidates = 0 must be at least 1"):
        LocalizeConfig(candidates=0)


def test_points_follow_the_matches_around_them():
    """Points follow a rotation, a stretch and a shift; a point far from all matches does not."""
    x, y = np.meshgrid(np.arange(20.0, 100, 4), np.arange(20.0, 80, 4))
    source = np.stack([x.ravel(), y.ravel()], axis=1)
    motion, shift = np.array([[0.9, -0.5], [0.6, 1.1]]), np.array([7.0, 3.0])
    scores, moved = np.linspace(1, 0.1, len(source)), source @ motion.T + shift
    # Wrong matches.
    moved[::17] += 30
    matches = Matches(points0=source, points1=moved, scores=scores, size0=SIZE, size1=SIZE)
    points = np.array([[31.3, 42.9], [70.2, 55.5], [3.0, 5.0]])
    found = follow(matches, points)
    assert np.allclose(found.points1[:2], points[:2] @ motion.T + shift, atol=0.05)
    assert np.isnan(found.points1[2]).all() and found.scores[2] == 0 and (found.scores[:2] > 0).all()
    assert np.isnan(follow(matches[:0], points).points1).all()
    # This point is 6 px from the next match, and a cell has 4 px.
    outside = np.array([[14.0, 42.0]])
    assert np.isnan(follow(matches, outside).points1).all()
    assert np.allclose(follow(matches, outside, cells=2).points1, outside @ motion.T + shift, atol=0.3)


def test_a_model_map_has_no_images_without_points(world):
    assert isinstance(world, ModelMap) and list(world.names) == list(NAMES)
