"""Somebody's COLMAP database gets matches: for its keypoints, or with keypoints of ours."""

import json
import re
import sqlite3
import sys
from dataclasses import replace

import numpy as np
import pytest
from adapter_data import HEIGHT, WIDTH, correct, images, pair
from collection_data import run_on_a_full_disk
from PIL import Image
from typer.testing import CliRunner

from dualrc import cli
from dualrc.adapters.colmap_database import MatchDatabaseConfig, match_database
from dualrc.collection.config import CollectionConfig
from dualrc.colmap import colmap_points, from_colmap_points
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import cam1_from_cam0, direction_error_deg, rotation_error_deg
from dualrc.scenes import correspond

pycolmap = pytest.importorskip("pycolmap")
CONFIG = CollectionConfig(device="cpu", workers=1)
NAMES = ("a.png", "b.png")


def make(folder, keypoints=(), names=NAMES):
    """Images, and a database of them with these keypoints, in our pixels."""
    (folder / "images").mkdir(exist_ok=True)
    path = folder / "database.db"
    camera = pycolmap.Camera.create_from_model_name(1, "SIMPLE_RADIAL", 1.2 * WIDTH, WIDTH, HEIGHT)
    with pycolmap.Database.open(path) as database:
        number = database.write_camera(camera)
        for name in names:
            database.write_image(pycolmap.Image(name=name, camera_id=number))
        for count, points in enumerate(keypoints, start=1):
            database.write_keypoints(count, colmap_points(points).astype(np.float32))
    for name, image in zip(names, images(), strict=False):
        Image.fromarray(image).save(folder / "images" / name)
    return path


def known_keypoints():
    """Points of image 0, where they are in image 1, and strays in both that have no partner."""
    rng = np.random.default_rng(5)
    points0 = rng.uniform((20, 20), (WIDTH - 20, HEIGHT - 20), (400, 2))
    truth = correspond(*pair(), points0)
    seen = truth.visible.numpy()
    points0, points1 = points0[seen], truth.points1.numpy()[seen]
    count = len(points0)
    strays = rng.uniform((0, 0), (WIDTH - 1, HEIGHT - 1), (2, 30, 2))
    order = rng.permutation(count)
    # Image 1 has them in another order.
    return np.vstack([points0, strays[0]]), np.vstack([points1[order], strays[1]]), np.argsort(order), count


def read(path, pairs=((1, 2),)):
    with pycolmap.Database.open(path) as database:
        keypoints = [np.asarray(database.read_keypoints(number))[:, :2] - 0.5 for number in (1, 2)]
        return (
            keypoints,
            [database.read_matches(*ids).astype(int) for ids in pairs],
            database.num_verified_image_pairs(),
        )


def test_its_own_keypoints_are_matched(tmp_path):
    points0, points1, partner, count = known_keypoints()
    path = make(tmp_path, (points0, points1))
    config = MatchDatabaseConfig(keep_keypoints=True, collection=CONFIG)
    done = match_database(path, tmp_path / "images", config, quiet=True)
    assert (done.images, done.pairs, done.matched, done.skipped, done.failed) == (2, 1, 1, 0, {})
    (kept0, kept1), (found,), verified = read(path)
    assert np.allclose(kept0, points0, atol=1e-4) and np.allclose(kept1, points1, atol=1e-4)
    assert len(found) == done.matches and verified == done.verified == 1
    real = found[found[:, 0] < count]
    right = partner[real[:, 0]] == real[:, 1]
    assert right.mean() > 0.9 and right.sum() > 0.4 * count
    assert len(set(found[:, 0])) == len(set(found[:, 1])) == len(found)
    # A second run has nothing to do; one that is told to overwrite finds the same again.
    again = match_database(path, tmp_path / "images", config, quiet=True)
    assert (again.matched, again.skipped, again.matches) == (0, 1, done.matches)
    more = MatchDatabaseConfig(keep_keypoints=True, overwrite=True, verify=False, collection=CONFIG)
    assert match_database(path, tmp_path / "images", more, quiet=True).matched == 1
    assert np.array_equal(read(path)[1][0], found)


def test_sift_keypoints_of_colmap_are_matched_and_mapped(tmp_path):
    """COLMAP extracts the keypoints, dualrc matches them, and COLMAP places the images."""
    (tmp_path / "images").mkdir()
    for name, image in zip(NAMES, images(), strict=True):
        Image.fromarray(image).save(tmp_path / "images" / name)
    path = tmp_path / "database.db"
    options = pycolmap.FeatureExtractionOptions()
    options.num_threads, options.use_gpu = 1, False
    mode = pycolmap.CameraMode.PER_IMAGE
    pycolmap.extract_features(path, tmp_path / "images", camera_mode=mode, extraction_options=options)
    with pycolmap.Database.open(path) as database:
        before = [np.asarray(database.read_keypoints(number)) for number in (1, 2)]
        for image, rendering in zip(database.read_all_images(), pair(), strict=True):
            camera = pycolmap.Camera(model="SIMPLE_PINHOLE", width=WIDTH, height=HEIGHT, camera_id=image.camera_id)
            camera.params = [rendering.view.K[0, 0], WIDTH / 2, HEIGHT / 2]
            camera.has_prior_focal_length = True
            database.update_camera(camera)
    assert all(len(points) > 200 for points in before)
    config = MatchDatabaseConfig(keep_keypoints=True, collection=CONFIG)
    done = match_database(path, tmp_path / "images", config, quiet=True)
    (points0, points1), (found,), verified = read(path)
    # Keypoints and descriptors are as they were.
    with pycolmap.Database.open(path) as database:
        assert database.num_descriptors() == sum(map(len, before))
        assert all(np.array_equal(database.read_keypoints(n), points) for n, points in zip((1, 2), before, strict=True))
    assert len(found) == done.matches > 100 and verified == 1
    assert correct(points0[found[:, 0]], points1[found[:, 1]]) > 0.88
    (tmp_path / "sparse").mkdir()
    mapping = pycolmap.IncrementalPipelineOptions(min_model_size=2, num_threads=1, ba_refine_focal_length=False)
    # By default, points of two images are dropped.
    mapping.triangulation.ignore_two_view_tracks = False
    (model,) = pycolmap.incremental_mapping(path, tmp_path / "images", tmp_path / "sparse", mapping).values()
    assert model.num_reg_images() == 2 and model.num_points3D() > 50
    assert model.compute_mean_reprojection_error() < 1
    found = cam1_from_cam0(*(model.find_image_with_name(name).cam_from_world().matrix() for name in NAMES))
    wanted = cam1_from_cam0(*(rendering.view.cam_from_world for rendering in pair()))
    errors = rotation_error_deg(found[:, :3], wanted[:, :3]), direction_error_deg(found[:, 3], wanted[:, 3])
    assert max(errors) < 1, errors


def test_unsure_matches_of_kept_keypoints_are_left_out(tmp_path):
    """A keypoint without a counterpart has a match of low score, with an unrelated keypoint near it."""
    rng = np.random.default_rng(2)
    # No keypoint has a counterpart, but every match has a keypoint within the radius.
    points0, points1 = rng.uniform((0, 0), (WIDTH - 1, HEIGHT - 1), (2, 3000, 2))
    path = make(tmp_path, (points0, points1))

    def run(**options):
        given = {"keep_keypoints": True, "overwrite": True, "verify": False, "collection": CONFIG, **options}
        match_database(path, tmp_path / "images", MatchDatabaseConfig(**given), quiet=True)
        found = read(path)[1][0]
        return found, correct(points0[found[:, 0]], points1[found[:, 1]])

    (every, share), (sure, better) = run(min_score=0), run()
    assert len(sure) < len(every) and better > share + 0.05
    assert np.array_equal(run(min_score=0.5)[0], sure)
    # The minimum score of the collection counts too.
    surer = run(collection=replace(CONFIG, min_score=0.9))[0]
    assert 0 < len(surer) < len(sure) and set(map(tuple, surer)) <= set(map(tuple, sure))


def test_a_run_goes_on_and_an_unreadable_image_is_named(tmp_path):
    points0, points1, *_ = known_keypoints()
    path = make(tmp_path, (points0, points1, points0[:5]), names=(*NAMES, "c.png"))
    (tmp_path / "images" / "c.png").write_bytes(b"no image")
    # As if the first run had been killed after its first pair.
    with pycolmap.Database.open(path) as database:
        database.write_matches(1, 3, np.array([[0, 0]], np.uint32))
    config = MatchDatabaseConfig(keep_keypoints=True, verify=False, collection=CONFIG)
    done = match_database(path, tmp_path / "images", config, quiet=True)
    assert (done.pairs, done.matched, done.skipped) == (3, 1, 1)
    assert list(done.failed) == [("b.png", "c.png")] and "c.png" in done.failed["b.png", "c.png"]
    assert read(path, ((1, 3),))[1][0].tolist() == [[0, 0]]


def test_it_gets_keypoints_of_ours(tmp_path):
    path = make(tmp_path)
    (tmp_path / "pairs.txt").write_text("b.png a.png\n")
    arguments = ["match-colmap", str(path), "--images", str(tmp_path / "images"), "--device", "cpu", "--workers", "1"]
    run = CliRunner().invoke(cli.app, [*arguments, "--pairs", str(tmp_path / "pairs.txt"), "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    assert (result["pairs"], result["matched"], result["verified"]) == (1, 1, 1)
    (points0, points1), (found,), _ = read(path)
    assert len(found) == result["matches"] > 300
    # All matches of the pair, the unsure ones too; only kept keypoints have a minimum score.
    assert correct(points0[found[:, 0]], points1[found[:, 1]]) > 0.65
    # What is there is not given up without a word.
    with pytest.raises(DataError, match="--replace-keypoints"):
        match_database(path, tmp_path / "images", MatchDatabaseConfig(collection=CONFIG), quiet=True)
    again = MatchDatabaseConfig(replace_keypoints=True, verify=False, collection=CONFIG)
    done = match_database(path, tmp_path / "images", again, quiet=True)
    assert (done.matched, done.skipped, done.matches, done.verified) == (0, 1, result["matches"], 0)


LIMITED = """
import resource, shutil, sys
from pathlib import Path
from test_adapters_colmap import CONFIG, MatchDatabaseConfig, make, match_database
from dualrc.errors import OutputError
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
path, before = make(folder), folder / "before.db"
shutil.copyfile(path, before)
# From now on, the matches are in the store.
match_database(path, folder / "images", MatchDatabaseConfig(collection=CONFIG), quiet=True)
shutil.copyfile(before, path)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    match_database(path, folder / "images", MatchDatabaseConfig(collection=CONFIG), quiet=True)
except OutputError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of file sizes")
@pytest.mark.parametrize("limit", [40_000, 90_000, 100_000])
def test_a_full_disk_is_one_clear_line_and_keeps_the_database(tmp_path, limit):
    """pycolmap aborts the process if a transaction cannot be committed, or a vacuum fails."""
    assert re.fullmatch(
        r"Cannot write \S+database\.db \(.+\); free .+\.\n", run_on_a_full_disk(LIMITED, tmp_path, limit)
    )
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        assert database.num_images() == 2 and not database.exists_keypoints(1)


def test_points_go_to_stored_images_and_back(tmp_path):
    image = Image.fromarray(images()[0])
    exif = Image.Exif()
    exif[274] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    points = np.random.default_rng(1).uniform(0, 200, (20, 2))
    there = colmap_points(points, tmp_path / "turned.jpg")
    assert not np.allclose(there, points + 0.5)
    assert np.allclose(from_colmap_points(there, tmp_path / "turned.jpg"), points)


def test_mistakes_are_explained(tmp_path):
    path, folder = make(tmp_path), tmp_path / "images"
    keep = MatchDatabaseConfig(keep_keypoints=True, collection=CONFIG)
    with pytest.raises(DataError, match="keypoints of 0 of its 2 images; extract"):
        match_database(path, folder, keep, quiet=True)
    with pytest.raises(DataError, match="does not exist"):
        match_database(tmp_path / "none.db", folder, quiet=True)
    (folder / "b.png").rename(folder / "c.png")
    with pytest.raises(DataError, match=r"lists 'b\.png', which is not in"):
        match_database(path, folder, MatchDatabaseConfig(collection=CONFIG), quiet=True)
    (folder / "c.png").rename(folder / "b.png")
    with pytest.raises(DataError, match="not a folder"):
        match_database(path, tmp_path / "nothing", quiet=True)
    (tmp_path / "text.db").write_text("some text that is no database at all")
    with pytest.raises(DataError, match=r"database\.db"):
        match_database(tmp_path / "text.db", folder, quiet=True)
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE things (x)").connection.close()
    with pytest.raises(DataError, match="not one of COLMAP's"):
        match_database(tmp_path / "other.db", folder, quiet=True)
    (tmp_path / "pairs.txt").write_text("a.png x.png\n")
    with pytest.raises(DataError, match=r"x\.png"):
        match_database(path, folder, MatchDatabaseConfig(pairs=tmp_path / "pairs.txt"), quiet=True)
    with pytest.raises(ConfigError, match="both kept and replaced"):
        MatchDatabaseConfig(keep_keypoints=True, replace_keypoints=True)
    with pytest.raises(ConfigError, match="min_score = -1 must be at least 0"):
        MatchDatabaseConfig(min_score=-1)
