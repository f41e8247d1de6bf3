"""Tests of COLMAP's database and hloc's files, in their pixel conventions."""

import re
import sys

import h5py
import numpy as np
import pycolmap
import pytest
from collection_data import apart, fill_store, make_matches, make_scene, run_on_a_full_disk
from PIL import ExifTags, Image, ImageOps

from dualrc.collection.cameras import choose_cameras, describe_cameras, is_known
from dualrc.collection.export import write_database, write_hloc
from dualrc.collection.keypoints import MergeConfig, merge
from dualrc.collection.store import MatchStore
from dualrc.colmap import colmap_camera, colmap_points, quiet_colmap
from dualrc.errors import DataError, OutputError
from dualrc.geometry import Camera, cam1_from_cam0, sampson_distance_px

NAMES = ("a.png", "b.png", "c.png", "d.png")
# Transformation of an upright image to its stored form, by EXIF orientation.
STORED = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}


def write_image(path, size=(320, 240), orientation=1, dot=None, **tags):
    """Write a black image with one white pixel; its upright size is given."""
    image = Image.new("RGB", size)
    if dot is not None:
        image.putpixel(dot, (255, 255, 255))
    if STORED[orientation] is not None:
        image = image.transpose(STORED[orientation])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif.get_ifd(ExifTags.IFD.Exif).update({getattr(ExifTags.Base, tag): value for tag, value in tags.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, exif=exif)
    return path


def export(folder, names=NAMES, noise=0.0, orientations=None, **scene_settings):
    """Return a scene, its merged matches, and their database."""
    scene = apart(make_scene(names, **scene_settings), 6)
    for name, orientation in zip(names, orientations or [1] * len(names), strict=True):
        write_image(folder / "images" / name, scene.cameras[name].size, orientation)
    store = fill_store(folder / "m.sqlite", scene, noise)
    merged = merge(store)
    write_database(folder / "database.db", merged, folder / "images", scene.cameras, poses_of(scene, merged))
    return scene, merged, store


def poses_of(scene, merged):
    """Return the relative pose of each pair."""
    return {names: cam1_from_cam0(*(scene.cameras[name].cam_from_world for name in names)) for names in merged.pairs}


def read_keypoints(database, name):
    with pycolmap.Database.open(database) as opened:
        return opened.read_keypoints(opened.read_image_with_name(name).image_id)[:, :2]


def test_the_database_gives_our_keypoints_and_matches_back(tmp_path):
    names = ("a.png", "sub/a.png", "sub/ü ö 写真.png")
    _, merged, store = export(tmp_path, names)
    with store, pycolmap.Database.open(tmp_path / "database.db") as database:
        numbers = {image.name: image.image_id for image in database.read_all_images()}
        assert set(numbers) == set(names)
        for name in names:
            found = database.read_keypoints(numbers[name])[:, :2]
            assert np.array_equal(found, (merged.keypoints[name].points.astype(np.float64) + 0.5).astype(np.float32))
        for names01 in merged.pairs:
            indices = merged.indexed(*names01).indices
            pair = [numbers[name] for name in names01]
            assert np.array_equal(database.read_matches(*pair), indices)
            verified = database.read_two_view_geometry(*pair)
            assert len(verified.inlier_matches) > 0.95 * len(indices)
        assert database.num_verified_image_pairs() == 3


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_points_of_turned_images_are_where_they_are_stored(tmp_path, orientation):
    path = write_image(tmp_path / "a.png", (64, 48), orientation, dot=(50, 7))
    with Image.open(path) as image:
        row, column = np.argwhere(np.asarray(image)[..., 0])[0]
        upright_row, upright_column = np.argwhere(np.asarray(ImageOps.exif_transpose(image))[..., 0])[0]
    assert (upright_column, upright_row) == (50, 7)
    assert np.allclose(colmap_points([[50, 7]], path), [[column + 0.5, row + 0.5]])


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_turned_image_in_the_database_still_maps(tmp_path, orientation):
    """Cameras and keypoints are rotated together: known poses of the stored images triangulate to the true points."""
    scene, _, store = export(tmp_path, noise=0.0, orientations=[1, orientation, 1, orientation])
    store.close()
    turn = {3: [[-1, 0, 0], [0, -1, 0], [0, 0, 1]], 6: [[0, 1, 0], [-1, 0, 0], [0, 0, 1]]}
    turn[8] = np.transpose(turn[6])
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        for name in ("b.png", "d.png"):
            image = database.read_image_with_name(name)
            camera = database.read_camera(image.camera_id)
            with Image.open(tmp_path / "images" / name) as opened:
                assert (camera.width, camera.height) == opened.size
            stored = np.array(turn[orientation]) @ scene.cameras[name].cam_from_world
            seen = stored[:, :3] @ scene.xyz.T + stored[:, 3:]
            wanted = camera.img_from_cam(seen.T)
            found = database.read_keypoints(image.image_id)[:, :2]
            assert np.linalg.norm(found[:, None] - wanted, axis=2).min(1).max() < 0.05


def test_known_points_triangulate_without_bias(tmp_path):
    """A missing half pixel in points or cameras would move the points by some centimeters."""
    scene, _, store = export(tmp_path)
    store.close()
    focal = scene.cameras["a.png"].focal_px
    half_pixel_m = 0.5 * 12 / focal

    def triangulate(database):
        posed = pycolmap.Reconstruction()
        with pycolmap.Database.open(database) as opened:
            for camera in opened.read_all_cameras():
                posed.add_camera_with_trivial_rig(camera)
            for image in opened.read_all_images():
                bare = pycolmap.Image(name=image.name, camera_id=image.camera_id, image_id=image.image_id)
                pose = pycolmap.Rigid3d(scene.cameras[image.name].cam_from_world)
                posed.add_image_with_trivial_frame(bare, pose)
        (tmp_path / "out").mkdir(exist_ok=True)
        with quiet_colmap(pycolmap):
            made = pycolmap.triangulate_points(posed, database, tmp_path / "images", tmp_path / "out")
        found = np.array([point.xyz for point in made.points3D.values()])
        nearest = np.linalg.norm(found[:, None] - scene.xyz, axis=2).argmin(1)
        return found - scene.xyz[nearest]

    errors = triangulate(tmp_path / "database.db")
    assert len(errors) > 0.9 * len(scene.xyz)
    assert np.linalg.norm(errors.mean(0)) < 0.05 * half_pixel_m
    assert np.median(np.linalg.norm(errors, axis=1)) < 0.002
    # Check that the test can fail: points without the half pixel.
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        for image in database.read_all_images():
            database.update_keypoints(image.image_id, database.read_keypoints(image.image_id)[:, :2] - 0.5)
    assert np.linalg.norm(triangulate(tmp_path / "database.db").mean(0)) > 0.3 * half_pixel_m


def test_a_known_camera_stands_as_it_is_with_its_half_pixel(tmp_path):
    K = np.array([[500, 0, 150.0], [0, 510, 130.0], [0, 0, 1]])
    camera = Camera(width=320, height=240, K=K, source="file")
    made = colmap_camera(camera, write_image(tmp_path / "a.png"), known=True)
    assert made.model_name == "PINHOLE" and made.params.tolist() == [500, 510, 150.5, 130.5]
    assert made.has_prior_focal_length
    # Upright 240 wide and 320 high, stored rotated: x of the stored image is y of the upright one.
    upright = Camera(width=240, height=320, K=np.array([[510, 0, 109.0], [0, 500, 150.0], [0, 0, 1]]), source="file")
    made = colmap_camera(upright, write_image(tmp_path / "b.png", (240, 320), 6), known=True)
    assert (made.width, made.height) == (320, 240)
    assert np.allclose(made.params, [500, 510, 150.5, 130.5])


def test_images_without_known_cameras_share_one_for_each_size(tmp_path):
    scene = apart(make_scene(NAMES), 6)
    exif = {"FocalLengthIn35mmFilm": 30}
    write_image(tmp_path / "a.png")
    write_image(tmp_path / "b.png")
    write_image(tmp_path / "c.png", orientation=3)
    write_image(tmp_path / "d.png", **exif)
    cameras = choose_cameras(tmp_path, NAMES)
    assert [camera.source for camera in cameras.values()] == ["guess", "guess", "guess", "exif"]
    assert not any(is_known(camera) for camera in cameras.values())
    assert describe_cameras(cameras) == (
        "3 unknown focal length, one per image size, refined; 1 focal length from EXIF, refined"
    )
    with fill_store(tmp_path / "m.sqlite", scene) as store:
        merged = merge(store)
        write_database(tmp_path / "database.db", merged, tmp_path, cameras, poses_of(scene, merged))
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        used = {image.name: database.read_camera(image.camera_id) for image in database.read_all_images()}
    assert len({camera.camera_id for camera in used.values()}) == 2
    assert used["a.png"].camera_id == used["c.png"].camera_id
    assert used["a.png"].params.tolist() == [1.2 * 320, 160, 120, 0]
    assert not used["a.png"].has_prior_focal_length and used["d.png"].has_prior_focal_length


def test_cameras_of_a_file_are_found_by_name_and_checked(tmp_path):
    for name in ("x/a.png", "y/a.png"):
        write_image(tmp_path / name)
    entry = '{"width": 320, "height": 240, "K": [[%d, 0, 160], [0, 400, 120], [0, 0, 1]]}'
    file = tmp_path / "cameras.json"
    file.write_text(f'{{"x/a.png": {entry % 400}, "y/a.png": {entry % 500}}}')
    cameras = choose_cameras(tmp_path, ["x/a.png", "y/a.png"], file)
    assert [camera.K[0, 0] for camera in cameras.values()] == [400, 500]
    assert describe_cameras(cameras) == "2 from the file"
    file.write_text(f'{{"x/a.png": {entry.replace("320", "640") % 400}}}')
    with pytest.raises(DataError, match="is for 640x240 pixels, not 320x240"):
        choose_cameras(tmp_path, ["x/a.png"], file)


def test_colmaps_cameras_are_turned_with_images_of_subfolders(tmp_path):
    write_image(tmp_path / "x" / "a.png", (240, 320), 6)
    (tmp_path / "cameras.txt").write_text("1 PINHOLE 320 240 500 510 150.5 130.5\n")
    camera = choose_cameras(tmp_path, ["x/a.png"], tmp_path / "cameras.txt")["x/a.png"]
    assert camera.size == (240, 320) and (camera.K[0, 0], camera.K[1, 1]) == (510, 500)


def test_hloc_reads_what_we_write(tmp_path):
    names = ("a.png", "sub/a.png", "sub/ü 写.png")
    _, merged, store = export(tmp_path, names, orientations=[1, 1, 3])
    with store:
        write_hloc(tmp_path, merged, tmp_path / "images")
        with h5py.File(tmp_path / "features.h5") as features, h5py.File(tmp_path / "matches.h5") as matches:
            points = {name: features[name]["keypoints"][:] for name in names}
            assert features["sub/a.png"]["image_size"][:].tolist() == [320, 240]
            assert len(features["a.png"]["scores"]) == len(points["a.png"])
            for name0, name1 in merged.pairs:
                group = matches[name0.replace("/", "-")][name1.replace("/", "-")]
                matches0, scores0 = group["matches0"][:], group["matching_scores0"][:]
                assert matches0.dtype == np.int32 and len(matches0) == len(scores0) == len(points[name0])
                rows = np.flatnonzero(matches0 >= 0)
                wanted = merged.indexed(name0, name1).indices
                assert np.array_equal(np.stack([rows, matches0[rows]], axis=1), wanted[np.argsort(wanted[:, 0])])
                assert (scores0[rows] > 0).all() and (scores0[matches0 < 0] == 0).all()
    assert np.array_equal(points["a.png"], merged.keypoints["a.png"].points)
    # Rotated by 180 degrees: the first pixel is stored last.
    upright = merged.keypoints["sub/ü 写.png"].points
    assert np.allclose(points["sub/ü 写.png"], np.array([319, 239]) - upright, atol=1e-4)
    assert (tmp_path / "pairs.txt").read_text(encoding="utf-8").splitlines()[0] == "a.png sub/a.png"


def test_more_keypoints_than_16_bits_count(tmp_path):
    grid = np.stack(np.meshgrid(np.arange(182) * 6.0, np.arange(182) * 6.0), axis=-1).reshape(-1, 2)
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a.png", "b.png", make_matches(grid, grid * 1.01 + 3, size=(1120, 1120)))
        merged = merge(store, MergeConfig(sweeps=0))
        write_hloc(tmp_path, merged, tmp_path)
    with h5py.File(tmp_path / "matches.h5") as matches:
        matches0 = matches["a.png/b.png/matches0"][:]
    assert len(matches0) == 182**2 and matches0.max() == 182**2 - 1 and (matches0 >= 0).all()


def test_names_that_hloc_can_not_tell_apart_are_refused(tmp_path):
    scene = apart(make_scene(("a-b.png", "a/b.png"), count=60), 8)
    with fill_store(tmp_path / "m.sqlite", scene) as store, pytest.raises(DataError, match="rename one"):
        write_hloc(tmp_path, merge(store), tmp_path)
    assert not (tmp_path / "features.h5").exists()


def test_a_database_is_whole_or_not_there(tmp_path):
    scene, merged, store = export(tmp_path)
    before = read_keypoints(tmp_path / "database.db", "a.png")
    with store, pytest.raises(KeyError):
        write_database(tmp_path / "database.db", merged, tmp_path / "images", {}, {})
    assert np.array_equal(read_keypoints(tmp_path / "database.db", "a.png"), before)
    with pytest.raises(OutputError, match="does not exist"):
        write_database(tmp_path / "nowhere" / "database.db", merged, tmp_path / "images", scene.cameras, {})
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


LIMITED = """
import resource, sys
from pathlib import Path
import test_export
from dualrc.errors import OutputError
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
scene, merged, store = test_export.export(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    poses = test_export.poses_of(scene, merged)
    test_export.write_database(folder / "database.db", merged, folder / "images", scene.cameras, poses)
except OutputError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of file sizes")
@pytest.mark.parametrize("limit", [2_000, 60_000, 110_000])
def test_a_full_disk_is_one_clear_line_and_keeps_the_database(tmp_path, limit):
    """pycolmap aborts the process if a transaction cannot be committed."""
    assert re.fullmatch(
        r"Cannot write \S+database\.db \(.+\); free disk space, or write elsewhere\.\n",
        run_on_a_full_disk(LIMITED, tmp_path, limit),
    )
    assert len(read_keypoints(tmp_path / "database.db", "a.png")) and not [*tmp_path.glob(".*")]


def test_a_store_without_matches_makes_an_empty_database(tmp_path):
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        write_database(tmp_path / "database.db", merge(store), tmp_path, {}, {})
        write_hloc(tmp_path, merge(store), tmp_path)
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        assert database.num_images() == 0


def test_geometries_of_verified_pairs_are_those_of_the_stored_images(tmp_path):
    """With given poses nothing is estimated again, even for an image that is stored rotated."""
    scene = apart(make_scene(NAMES), 6)
    for name, orientation in zip(NAMES, (1, 6, 3, 8), strict=True):
        write_image(tmp_path / name, scene.cameras[name].size, orientation)
    with fill_store(tmp_path / "m.sqlite", scene) as store:
        merged = merge(store)
        # Files that a killed process left beside an earlier database.
        (tmp_path / "database.db-wal").write_bytes(b"left over")
        write_database(tmp_path / "database.db", merged, tmp_path, scene.cameras, poses_of(scene, merged))
        assert not (tmp_path / "database.db-wal").exists()
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        numbers = {image.name: image.image_id for image in database.read_all_images()}
        for name0, name1 in merged.pairs:
            made = database.read_two_view_geometry(numbers[name0], numbers[name1])
            points0, points1 = (
                database.read_keypoints(numbers[name])[made.inlier_matches[:, side], :2]
                for side, name in enumerate((name0, name1))
            )
            assert len(points0) > 100
            assert sampson_distance_px(made.F, points0, points1).max() < 0.1
