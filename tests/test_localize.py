"""Tests of localization: poses are exact where the matches are."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, tiny_network
from docs_data import documented_keys
from PIL import ExifTags, Image
from typer.testing import CliRunner

from dualrc import scenes
from dualrc.cli import app
from dualrc.config import MatcherConfig
from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.geometry import Camera, Lens, absolute_pose, rotation_error_deg
from dualrc.localize import (
    Correspondences,
    LocalizeConfig,
    Localizer,
    ModelMap,
    ResultsFile,
    RgbdMap,
    localize_all,
    missing,
    read_map,
    read_poses,
    results_config,
    write_poses,
)
from dualrc.matcher import Matcher, load
from dualrc.matcher.follow import follow
from dualrc.matches import Matches

pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")

SIZE = (128, 96)
NAMES = ("a.png", "b.png", "c.png")
QUERY = "q.png"
EYES = {"a.png": (-3, -11, 3), "b.png": (0, -11.5, 3.5), "c.png": (3, -11, 2.5), QUERY: (1.2, -10, 3)}
# Upright from stored, for EXIF orientation 6.
TURN = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])


@lru_cache(maxsize=1)
def renderings():
    scene = scenes.make_scene(1, texture_size=64)
    views = {name: scenes.look_at(eye, (0, 2, 1.5), size=SIZE, fov_deg=50) for name, eye in EYES.items()}
    return {name: scenes.render(scene, view, supersample=1) for name, view in views.items()}


def camera_of(name):
    view = renderings()[name].view
    return Camera(width=SIZE[0], height=SIZE[1], K=view.K, cam_from_world=view.cam_from_world)


def seen_points(name, count=150):
    """Return pixels (n, 2) of an image and their 3D positions (n, 3) in the world."""
    rendering, random = renderings()[name], np.random.default_rng(len(name))
    pixels = random.integers(0, SIZE, (count, 2))
    depth = rendering.depth.numpy()[pixels[:, 1], pixels[:, 0]]
    pixels, depth = pixels[depth > 0].astype(float), depth[depth > 0].astype(float)
    camera, pose = camera_of(name), rendering.view.cam_from_world
    return pixels, (camera.rays(pixels) * depth[:, None] - pose[:, 3]) @ pose[:, :3]


class Oracle(Matcher):
    """A matcher that knows the scene; its features are those of a real network for the image of that name."""

    def __init__(self, *, few=None, slip_px=0.0):
        super().__init__(tiny_network(), MatcherConfig(), device="cpu")
        self.few, self.slip_px = few, slip_px
        self.extracted, self._names = [], {}

    def features(self, image, **settings):
        made = super().features(image, **settings)
        self.extracted.append(Path(image).name)
        self._names[id(made)] = (Path(image).name, made)
        return made

    def match_points(self, image0, image1, points0, **settings):
        rendering0, rendering1 = (renderings()[self._names[id(image)][0]] for image in (image0, image1))
        truth = scenes.correspond(rendering0, rendering1, points0)
        points1, scores = truth.points1.numpy() + self.slip_px, truth.visible.numpy().astype(float)
        if self.few is not None:
            scores[self.few :] = 0
        points1 = np.where(scores[:, None] > 0, points1, np.nan)
        return Matches(points0=points0, points1=points1, scores=scores, size0=SIZE, size1=SIZE)

    def match_features(self, features0, features1, **settings):
        points0 = np.random.default_rng(0).uniform((0, 0), np.array(SIZE) - 1, (400, 2))
        found = self.match_points(features0, features1, points0)
        return found[found.scores > 0]


def write_images(folder, *, turned=()):
    folder.mkdir(exist_ok=True)
    for name, rendering in renderings().items():
        image, exif = Image.fromarray(rendering.image.numpy()), Image.Exif()
        if name in turned:
            image, exif[ExifTags.Base.Orientation] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(folder / name, exif=exif)
    return folder


def write_model(folder, *, turned=(), half_px=0.5, distortion=0.0, focals=(), bent=()):
    """Write a COLMAP model of all images but the query, with COLMAP's half pixel added here."""
    folder.mkdir(exist_ok=True)
    made, tracks = pycolmap.Reconstruction(), []
    for number, name in enumerate(NAMES, start=1):
        (points, xyz), camera = seen_points(name), camera_of(name)
        K, pose, size = camera.K, camera.cam_from_world, SIZE
        center = K[:2, 2]
        if name in turned:
            points = np.stack([points[:, 1], SIZE[0] - 1 - points[:, 0]], axis=1)
            center = np.array([center[1], SIZE[0] - 1 - center[0]])
            pose, size = TURN.T @ pose, SIZE[::-1]
        focal = K[0, 0] * dict(focals).get(name, 1)
        params = [focal, *(center + half_px), dict(bent).get(name, distortion)]
        made.add_camera_with_trivial_rig(
            pycolmap.Camera(camera_id=number, model="SIMPLE_RADIAL", width=size[0], height=size[1], params=params)
        )
        image = pycolmap.Image(name=name, keypoints=points + half_px, camera_id=number, image_id=number)
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(pose))
        tracks += [(place, number, index) for index, place in enumerate(xyz)]
    for place, number, index in tracks:
        made.add_point3D(place, pycolmap.Track([pycolmap.TrackElement(number, index)]))
    made.write(str(folder))
    return folder


def write_rgbd(folder):
    write_images(folder / "images" if folder.mkdir() is None else folder)
    (folder / "depth").mkdir()
    lines = []
    for name in NAMES:
        depth = np.round(renderings()[name].depth.numpy() * 1000).astype(np.uint16)
        Image.fromarray(depth).save(folder / "depth" / name)
        whole = np.vstack([renderings()[name].view.cam_from_world, [0, 0, 0, 1]])
        lines.append(" ".join([name, *map(str, np.linalg.inv(whole).ravel())]))
    (folder / "world_from_cam.txt").write_text("\n".join(lines))
    np.savetxt(folder / "K.txt", renderings()[NAMES[0]].view.K)
    return folder


def errors(found):
    """Return the errors (degrees, meters) of a pose of the query."""
    true, pose = renderings()[QUERY].view.cam_from_world, found.cam_from_world
    centers = [-p[:, :3].T @ p[:, 3] for p in (true, pose)]
    return rotation_error_deg(true[:, :3], pose[:, :3]), float(np.linalg.norm(centers[0] - centers[1]))


@pytest.fixture
def world(tmp_path):
    return read_map(write_model(tmp_path / "model"), write_images(tmp_path / "images"))


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
from test_localize import *
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


# The absolute pose only.

CAMERA = Camera(width=640, height=480, K=np.array([[500.0, 0, 310], [0, 520, 235], [0, 0, 1]]))
POSE = np.array([[0.6, -0.8, 0, 0.1], [0.8, 0.6, 0, 0.2], [0, 0, 1, 6]])


def sample(seed, *, count=300, noise_px=0.0, wrong=0.0, camera=CAMERA, offset=0.0):
    random = np.random.default_rng(seed)
    xyz = random.uniform(-2, 2, (count, 3))
    points = camera.project(xyz @ POSE[:, :3].T + POSE[:, 3]) + random.normal(0, noise_px, (count, 2))
    is_wrong = np.arange(count) < wrong * count
    points[is_wrong] = random.uniform(0, 480, (is_wrong.sum(), 2))
    return points, xyz + offset, ~is_wrong


@pytest.mark.parametrize("known", [True, False])
def test_absolute_pose_among_outliers(known):
    camera = CAMERA if known else Camera.from_focal((640, 480), 700)
    points, xyz, right = sample(1, wrong=0.6, camera=camera)
    found = absolute_pose(points, xyz, camera=camera if known else None, size=(640, 480))
    assert np.allclose(found.cam_from_world, POSE, atol=1e-6)
    assert np.all(found.inliers[right]) and found.inliers.sum() < right.sum() + 10
    assert found.camera.focal_px == pytest.approx(camera.focal_px)
    assert np.allclose(found.center, -POSE[:, :3].T @ POSE[:, 3], atol=1e-6)
    again = absolute_pose(points, xyz, camera=camera if known else None, size=(640, 480))
    assert np.array_equal(again.cam_from_world, found.cam_from_world)


def test_absolute_pose_far_from_the_origin():
    points, xyz, _ = sample(2, offset=1e6)
    found = absolute_pose(points, xyz, camera=CAMERA)
    assert np.allclose(found.center, -POSE[:, :3].T @ POSE[:, 3] + 1e6, atol=1e-6)


def test_the_covariance_says_how_far_poses_are_off():
    squared = []
    for seed in range(30):
        points, xyz, _ = sample(seed, noise_px=0.7, wrong=0.2)
        found = absolute_pose(points, xyz, camera=CAMERA)
        off = found.center + POSE[:, :3].T @ POSE[:, 3]
        squared.append(off @ off / np.trace(found.covariance[3:, 3:]))
        assert np.linalg.eigvalsh(found.covariance).min() > 0
    assert 0.7 < np.sqrt(np.mean(squared)) < 1.4


def test_poses_that_are_open():
    points, xyz, _ = sample(3)
    line = np.linspace(-1, 1, 50)[:, None] * [1.0, 0.5, 0.2]
    on_line = CAMERA.project(line @ POSE[:, :3].T + POSE[:, 3])
    assert absolute_pose(on_line, line, camera=CAMERA).cam_from_world is None
    repeated = absolute_pose(np.repeat(points[:2], 50, axis=0), np.repeat(xyz[:2], 50, axis=0), camera=CAMERA)
    assert repeated.cam_from_world is None and repeated.reason
    random = np.random.default_rng(0).uniform(0, 480, points.shape)
    for camera in (CAMERA, None):
        found = absolute_pose(random, xyz, camera=camera, size=(640, 480), max_iterations=300)
        assert "no pose agrees with 12 of 300" in found.reason and not found.inliers.any()
    assert "0 correspondences are too few" in absolute_pose([], [], camera=CAMERA).reason
    points[:295] = np.nan
    assert "5 correspondences are too few" in absolute_pose(points, xyz, camera=CAMERA).reason
    with pytest.raises(DataError, match="give one pixel per point"):
        absolute_pose(points, xyz[:3], camera=CAMERA)
    with pytest.raises(DataError, match="The camera and the size of its image are both unknown"):
        absolute_pose(points, xyz)


def test_a_model_map_has_no_images_without_points(world):
    assert isinstance(world, ModelMap) and list(world.names) == list(NAMES)
