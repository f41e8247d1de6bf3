"""Tests of camera files, COLMAP's and ours."""

import json

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from dualrc.colmap import read_cameras
from dualrc.errors import DataError
from dualrc.geometry import transform_points
from dualrc.image import read_header

HEADER = "# Camera list with one line of data per camera:\n#   CAMERA_ID, MODEL, WIDTH, HEIGHT, PARAMS[]\n"


def cameras_txt(folder, *lines):
    path = folder / "cameras.txt"
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("line", "fx", "fy"),
    [
        ("1 SIMPLE_PINHOLE 640 480 500 320 240", 500, 500),
        ("1 PINHOLE 640 480 500 510 320 240", 500, 510),
        ("1 SIMPLE_RADIAL 640 480 500 320 240 0", 500, 500),
        ("1 RADIAL 640 480 500 320 240 0 0.0", 500, 500),
        ("1 OPENCV 640 480 500 510 320 240 0 0 0 0", 500, 510),
        ("1 FULL_OPENCV 640 480 500 510 320 240 0 0 0 0 0 0 0 0", 500, 510),
    ],
)
def test_the_half_pixel_is_taken_off(tmp_path, line, fx, fy):
    cameras = read_cameras(cameras_txt(tmp_path, line), ["a.jpg", "b.jpg", "c.jpg"])
    assert list(cameras) == ["a.jpg", "b.jpg", "c.jpg"]
    camera = cameras["c.jpg"]
    assert camera.size == (640, 480)
    assert camera.source == "file"
    # COLMAP's center of a 640 x 480 image is (320, 240), ours is (319.5, 239.5).
    assert np.array_equal(camera.K, [[fx, 0, 319.5], [0, fy, 239.5], [0, 0, 1]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 EQUIRECTANGULAR 640 480 640 480", "EQUIRECTANGULAR is not supported; undistort"),
        ("1 PINHOLE 640 480 500 320 240", "PINHOLE has 4 parameters, not 3"),
        ("1 PINHOLE 640 480 -500 500 320 240", "positive focal"),
        ("1 PINHOLE wide 480 500 500 320 240", "line 3: not a camera"),
        ("1 PINHOLE", "line 3: not a camera"),
        ("", "has no camera"),
    ],
)
def test_unusable_cameras_are_refused(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read_cameras(cameras_txt(tmp_path, line), ["a.jpg"])


def test_two_cameras_serve_two_images_in_order(tmp_path):
    path = cameras_txt(tmp_path, "9 SIMPLE_PINHOLE 640 480 900 320 240", "2 SIMPLE_PINHOLE 640 480 200 320 240")
    cameras = read_cameras(path, ["a.jpg", "b.jpg"])
    assert [camera.focal_px for camera in cameras.values()] == [200, 900]
    with pytest.raises(DataError, match=r"2 cameras for 3 images; put COLMAP's images\.txt beside it"):
        read_cameras(path, ["a.jpg", "b.jpg", "c.jpg"])


def test_names_are_resolved_through_images_txt(tmp_path):
    path = cameras_txt(tmp_path, "1 SIMPLE_PINHOLE 640 480 100 320 240", "2 SIMPLE_PINHOLE 640 480 200 320 240")
    # The first image has no points, so its second line is empty; a name may have spaces.
    (tmp_path / "images.txt").write_text(
        "# Image list\n"
        "1 1 0 0 0 0.5 0 2 2 left/a b.jpg\n\n"
        "2 0 0 0 2 1 2 3 1 right/c.jpg\n10 20 -1 30 40 7\n"
        "3 1 0 0 0 0 0 0 1 other/c.jpg\n\n"
    )
    cameras = read_cameras(path, ["photos/a b.jpg", "right/c.jpg"])
    assert cameras["photos/a b.jpg"].focal_px == 200
    assert np.array_equal(cameras["photos/a b.jpg"].cam_from_world, np.column_stack([np.eye(3), [0.5, 0, 2]]))
    assert cameras["right/c.jpg"].focal_px == 100
    # (0, 0, 0, 1) rotates by 180 degrees about z.
    assert np.allclose(cameras["right/c.jpg"].cam_from_world, np.column_stack([np.diag([-1, -1, 1]), [1, 2, 3]]))
    with pytest.raises(DataError, match=r"several images called c\.jpg"):
        read_cameras(path, ["c.jpg"])
    with pytest.raises(DataError, match=r"no camera for d\.jpg"):
        read_cameras(path, ["d.jpg"])


def test_broken_images_txt(tmp_path):
    path = cameras_txt(tmp_path, "1 SIMPLE_PINHOLE 640 480 100 320 240")
    images = tmp_path / "images.txt"
    for line in ("1 1 0 0 0", "1 0 0 0 0 0 0 0 1 a.jpg", "1 1 0 0 x 0 0 0 1 a.jpg"):
        images.write_text(line + "\n\n")
        with pytest.raises(DataError, match="line 1: not an image"):
            read_cameras(path, ["a.jpg"])
    images.write_text("1 1 0 0 0 0 0 0 7 a.jpg\n\n")
    with pytest.raises(DataError, match="has no camera 7"):
        read_cameras(path, ["a.jpg"])


def test_our_json_keeps_its_pixels(tmp_path):
    path = tmp_path / "cameras.json"
    K = [[500, 0, 319.5], [0, 500, 239.5], [0, 0, 1]]
    path.write_text(json.dumps({"a.jpg": {"width": 640, "height": 480, "K": K}}))
    assert np.array_equal(read_cameras(path, ["folder/a.jpg"])["folder/a.jpg"].K, K)
    with pytest.raises(DataError, match=r"no camera for b\.jpg"):
        read_cameras(path, ["a.jpg", "b.jpg"])


@pytest.mark.parametrize(
    ("name", "message"), [("cameras.bin", "cameras.json or"), ("none.txt", "not exist"), ("none.json", "not exist")]
)
def test_other_files_are_refused(tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        read_cameras(tmp_path / name, ["a.jpg"])


def test_binary_content_in_a_text_file(tmp_path):
    path = tmp_path / "cameras.txt"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match="as text"):
        read_cameras(path, ["a.jpg"])


def write_oriented(path, orientation, size=(64, 48), dot=(50, 7)):
    """Write a black image with one white pixel, stored so that its EXIF orientation rotates it."""
    image = Image.new("RGB", size)
    image.putpixel(dot, (255, 255, 255))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image.save(path, exif=exif)
    return path


def pixel_of(camera, point_world):
    return camera.project(transform_points(camera.cam_from_world, [point_world]))[0]


@pytest.mark.parametrize("ending", ["png", "tif"])
@pytest.mark.parametrize(
    ("orientation", "size", "pixel", "K"),
    [
        (1, (64, 48), (50, 7), [[100, 0, 29.5], [0, 110, 19.5], [0, 0, 1]]),
        (3, (64, 48), (13, 40), [[100, 0, 33.5], [0, 110, 27.5], [0, 0, 1]]),
        (6, (48, 64), (40, 50), [[110, 0, 27.5], [0, 100, 29.5], [0, 0, 1]]),
        (8, (48, 64), (7, 13), [[110, 0, 19.5], [0, 100, 33.5], [0, 0, 1]]),
    ],
)
def test_cameras_are_turned_upright_with_their_images(tmp_path, orientation, size, pixel, K, ending):
    file = write_oriented(tmp_path / f"a.{ending}", orientation)
    path = cameras_txt(tmp_path, "1 PINHOLE 64 48 100 110 30 20")
    (tmp_path / "images.txt").write_text(f"1 0.8 0.1 -0.5 0.3 0.2 -0.4 3 1 a.{ending}\n\n")
    # The name is not relative to the working directory, so no file is found.
    stored = read_cameras(path, [f"a.{ending}"])[f"a.{ending}"]
    point = np.linalg.solve(stored.cam_from_world[:, :3], 5 * stored.rays([(50, 7)])[0] - stored.cam_from_world[:, 3])
    assert pixel_of(stored, point) == pytest.approx((50, 7))

    camera = read_cameras(path, [str(file)])[str(file)]
    assert camera.size == size == read_header(file).upright_size
    assert np.allclose(camera.K, K)
    assert pixel_of(camera, point) == pytest.approx(pixel)
    assert np.linalg.det(camera.cam_from_world[:, :3]) == pytest.approx(1)
    # The same position as that of the white pixel in the upright image.
    with Image.open(file) as image:
        row, column = np.argwhere(np.asarray(ImageOps.exif_transpose(image))[..., 0])[0]
    assert (column, row) == pixel


def test_one_camera_serves_images_that_lie_differently(tmp_path):
    upright, turned = write_oriented(tmp_path / "a.png", 1), write_oriented(tmp_path / "b.png", 6)
    path = cameras_txt(tmp_path, "1 PINHOLE 64 48 100 110 30 20")
    cameras = read_cameras(path, [str(upright), str(turned)])
    assert [camera.size for camera in cameras.values()] == [(64, 48), (48, 64)]
    assert cameras[str(turned)].cam_from_world is None


@pytest.mark.parametrize("orientation", [2, 4, 5, 7])
def test_mirrored_images_are_refused(tmp_path, orientation):
    image = write_oriented(tmp_path / "a.png", orientation)
    with pytest.raises(DataError, match=rf"a\.png is mirrored by its EXIF orientation {orientation}.*save it upright"):
        read_cameras(cameras_txt(tmp_path, "1 PINHOLE 64 48 100 110 30 20"), [str(image)])


def test_cameras_that_are_upright_already_stay(tmp_path):
    image = write_oriented(tmp_path / "a.png", 6)
    camera = read_cameras(cameras_txt(tmp_path, "1 PINHOLE 48 64 110 100 28 30"), [str(image)])[str(image)]
    assert np.array_equal(camera.K, [[110, 0, 27.5], [0, 100, 29.5], [0, 0, 1]])
    K = [[110, 0, 27.5], [0, 100, 29.5], [0, 0, 1]]
    (tmp_path / "cameras.json").write_text(json.dumps({"a.png": {"width": 48, "height": 64, "K": K}}))
    assert np.array_equal(read_cameras(tmp_path / "cameras.json", [str(image)])[str(image)].K, K)


def test_headers_of_files_that_are_no_images(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    for path in (tmp_path / "text.png", tmp_path / "nowhere.png", tmp_path):
        assert read_header(path) is None
