"""Cameras from files, COLMAP's and ours."""

import json

import numpy as np
import pytest

from dualrc.colmap import read_cameras
from dualrc.errors import DataError

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
    # COLMAP's centre of a 640 x 480 picture is (320, 240), ours is (319.5, 239.5).
    assert np.array_equal(camera.K, [[fx, 0, 319.5], [0, fy, 239.5], [0, 0, 1]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 SIMPLE_RADIAL 640 480 500 320 240 0.01", "undistort the pictures first"),
        ("1 OPENCV 640 480 500 500 320 240 0 0 0 1e-9", "undistort the pictures first"),
        ("1 OPENCV_FISHEYE 640 480 500 500 320 240 0 0 0 0", "OPENCV_FISHEYE is not supported; undistort"),
        ("1 PINHOLE 640 480 500 320 240", "PINHOLE has 4 parameters, not 3"),
        ("1 PINHOLE 640 480 -500 500 320 240", "positive focal"),
        ("1 PINHOLE wide 480 500 500 320 240", "line 3: not a camera"),
        ("1 PINHOLE", "line 3: not a camera"),
        ("", "holds no camera"),
    ],
)
def test_unusable_cameras_are_refused(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read_cameras(cameras_txt(tmp_path, line), ["a.jpg"])


def test_two_cameras_serve_two_pictures_in_order(tmp_path):
    path = cameras_txt(tmp_path, "9 SIMPLE_PINHOLE 640 480 900 320 240", "2 SIMPLE_PINHOLE 640 480 200 320 240")
    cameras = read_cameras(path, ["a.jpg", "b.jpg"])
    assert [camera.focal_px for camera in cameras.values()] == [200, 900]
    with pytest.raises(DataError, match=r"2 cameras for 3 pictures; put COLMAP's images\.txt beside it"):
        read_cameras(path, ["a.jpg", "b.jpg", "c.jpg"])


def test_names_are_resolved_through_images_txt(tmp_path):
    path = cameras_txt(tmp_path, "1 SIMPLE_PINHOLE 640 480 100 320 240", "2 SIMPLE_PINHOLE 640 480 200 320 240")
    # The first picture has no points, so an empty line stands for them; a name may hold spaces.
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
    # (0, 0, 0, 1) turns by 180 degrees about z.
    assert np.allclose(cameras["right/c.jpg"].cam_from_world, np.column_stack([np.diag([-1, -1, 1]), [1, 2, 3]]))
    with pytest.raises(DataError, match=r"several pictures called c\.jpg"):
        read_cameras(path, ["c.jpg"])
    with pytest.raises(DataError, match=r"no camera for d\.jpg"):
        read_cameras(path, ["d.jpg"])


def test_broken_images_txt(tmp_path):
    path = cameras_txt(tmp_path, "1 SIMPLE_PINHOLE 640 480 100 320 240")
    images = tmp_path / "images.txt"
    for line in ("1 1 0 0 0", "1 0 0 0 0 0 0 0 1 a.jpg", "1 1 0 0 x 0 0 0 1 a.jpg"):
        images.write_text(line + "\n\n")
        with pytest.raises(DataError, match="line 1: not a picture"):
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
