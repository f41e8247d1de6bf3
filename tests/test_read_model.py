"""Tests of reading COLMAP models in our convention."""

import numpy as np
import pytest
from PIL import ExifTags, Image

from dualrc.colmap import read_model
from dualrc.colmap.records import read_cameras_bin, read_images_bin
from dualrc.errors import DataError
from dualrc.geometry import Lens, transform_points

pycolmap = pytest.importorskip("pycolmap", reason="pycolmap is not installed")

SIZE = (64, 48)
# Points of the stored image in our pixels, and their depths.
POINTS = np.array([(10.0, 5.0), (50.25, 7.5), (33.0, 40.0), (3.0, 44.0)])
DEPTHS = np.array([4.0, 5.0, 6.0, 7.0])
POSE = np.array([[0.6, -0.8, 0, 0.3], [0.8, 0.6, 0, -0.2], [0, 0, 1, 1.5]])
K = np.array([[100.0, 0, 29.5], [0, 110, 19.5], [0, 0, 1]])
WORLD = (np.c_[POINTS, np.ones(4)] @ np.linalg.inv(K).T * DEPTHS[:, None] - POSE[:, 3]) @ POSE[:, :3]


def write_model(folder, *, names=("a.png",), binary=True, model="PINHOLE", params=(100, 110, 30, 20)):
    """Write images from one position that all observe POINTS; the last two observations have no 3D point."""
    folder.mkdir(exist_ok=True)
    made = pycolmap.Reconstruction()
    camera = pycolmap.Camera(camera_id=3, model=model, width=SIZE[0], height=SIZE[1], params=list(map(float, params)))
    made.add_camera_with_trivial_rig(camera)
    # COLMAP's half pixel, added here.
    keypoints = np.concatenate([POINTS + 0.5, [(20.0, 20.0), (21.0, 21.0)]])
    for number, name in enumerate(names, start=1):
        image = pycolmap.Image(name=name, keypoints=keypoints, camera_id=3, image_id=number)
        made.add_image_with_trivial_frame(image, pycolmap.Rigid3d(POSE))
    for index, place in enumerate(WORLD):
        elements = [pycolmap.TrackElement(number + 1, index) for number in range(len(names))]
        made.add_point3D(place, pycolmap.Track(elements))
    (made.write_binary if binary else made.write_text)(str(folder))
    return folder


def write_image(path, orientation=1):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", SIZE).save(path, exif=exif)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "text"])
def test_points_cameras_and_poses(tmp_path, binary):
    model = read_model(write_model(tmp_path / "model", names=("b.png", "deep/a.png"), binary=binary))
    assert list(model.images) == ["b.png", "deep/a.png"]
    image = model.images["deep/a.png"]
    assert image.size == image.camera.size == SIZE
    assert np.allclose(image.points, POINTS, atol=1e-9) and image.points.dtype == np.float64
    assert np.allclose(image.camera.K, K)
    assert np.allclose(image.cam_from_world, POSE) and np.allclose(image.camera.cam_from_world, POSE)
    assert image.point_ids.dtype == np.int64 and np.all(np.diff(model.point_ids) > 0)
    assert np.allclose(model.xyz_of(image.point_ids), WORLD)
    assert np.allclose(image.camera.project(transform_points(image.cam_from_world, model.xyz)), POINTS)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_images_that_lie_on_their_side(tmp_path, orientation):
    write_image(tmp_path / "a.png", orientation)
    model = read_model(write_model(tmp_path / "model"), images=tmp_path)
    image = model.images["a.png"]
    width, height = SIZE
    x, y = POINTS.T
    upright = {
        1: (x, y),
        3: (width - 1 - x, height - 1 - y),
        # Rotated clockwise: the top row becomes the right column.
        6: (height - 1 - y, x),
        8: (y, width - 1 - x),
    }
    assert image.size == image.camera.size == (SIZE if orientation in (1, 3) else SIZE[::-1])
    assert np.allclose(image.points, np.stack(upright[orientation], axis=1))
    seen = transform_points(image.cam_from_world, model.xyz_of(image.point_ids))
    assert np.allclose(image.camera.project(seen), image.points)
    assert np.allclose(image.camera.cam_from_world, image.cam_from_world)


@pytest.mark.parametrize(
    ("model", "params"),
    [("SIMPLE_RADIAL", (100, 30, 20, 0.1)), ("OPENCV_FISHEYE", (100, 110, 30, 20, 0, 0, 0, 0))],
)
def test_a_lens_that_distorts(tmp_path, model, params):
    write_image(tmp_path / "a.png", 6)
    image = read_model(write_model(tmp_path / "model", model=model, params=params), images=tmp_path).images["a.png"]
    assert image.camera.lens == Lens(model, params[-1:] if model == "SIMPLE_RADIAL" else params[-4:])
    assert image.camera.size == image.size == SIZE[::-1]
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]])
    assert np.allclose(image.cam_from_world, turn @ POSE)
    assert np.allclose(image.points[0], (SIZE[1] - 1 - 5, 10))


def test_only_registered_images(tmp_path):
    made = pycolmap.Reconstruction(str(write_model(tmp_path / "model", names=("a.png", "b.png"))))
    made.deregister_frame(made.images[2].frame_id)
    made.write(str(tmp_path / "model"))
    model = read_model(tmp_path / "model")
    assert list(model.images) == ["a.png"]


def test_images_that_are_missing_are_taken_as_stored(tmp_path):
    model = read_model(write_model(tmp_path / "model"), images=tmp_path / "nowhere")
    assert np.allclose(model.images["a.png"].points, POINTS)


def test_a_model_without_points(tmp_path):
    made = pycolmap.Reconstruction(str(write_model(tmp_path / "model")))
    for number in list(made.points3D):
        made.delete_point3D(number)
    made.write(str(tmp_path / "model"))
    model = read_model(tmp_path / "model")
    assert model.xyz.shape == (0, 3) and model.images["a.png"].points.shape == (0, 2)


def test_what_is_no_model(tmp_path):
    with pytest.raises(DataError, match="not a folder; pass the folder that contains"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no COLMAP model .*do not exist"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", ["cameras.bin", "images.bin", "points3D.bin"])
def test_a_model_whose_copy_broke_off(tmp_path, name):
    path = write_model(tmp_path / "model", names=("a.png", "b.png")) / name
    whole = path.read_bytes()
    for length in (0, 5, 8, 9, 20, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"{name} is truncated or damaged .*copy or export"):
            read_model(tmp_path / "model")
    path.write_bytes(whole)
    assert list(read_model(tmp_path / "model").images) == ["a.png", "b.png"]


def test_binary_records_are_those_that_pycolmap_reads(tmp_path):
    write_model(tmp_path, names=("a.png", "deep/é.png"))
    model = pycolmap.Reconstruction(str(tmp_path))
    cameras = read_cameras_bin(tmp_path / "cameras.bin")
    assert {number: (c.model, c.width, c.height, list(c.params)) for number, c in cameras.items()} == {
        number: (c.model_name, c.width, c.height, list(c.params)) for number, c in model.cameras.items()
    }
    images = {image.name: image for image in read_images_bin(tmp_path / "images.bin")}
    assert len(images) == model.num_images() > 0
    for image in model.images.values():
        assert images[image.name].camera_id == image.camera_id
        assert np.allclose(images[image.name].cam_from_world, image.cam_from_world().matrix())
    with pytest.raises(DataError, match="truncated or damaged"):
        read_cameras_bin(tmp_path / "no.bin")
