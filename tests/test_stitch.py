"""Tests of warped images and panoramas."""

import numpy as np
import pytest
from conftest import texture
from PIL import Image
from typer.testing import CliRunner

import dualrc
from dualrc import stitch
from dualrc.cli import app
from dualrc.errors import ConfigError, DataError
from dualrc.geometry import crop_homography, resize_homography
from dualrc.matches import Estimate, Warp
from dualrc.pixels import pixel_grid
from dualrc.scenes import Light, look_at, make_scene, render


def ramp(width, height):
    """Return an image whose colors encode the position."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([x, y, 0 * x], axis=-1).astype(np.uint8)


def test_an_image_in_the_frame_of_another():
    H = np.array([[1.0, 0, -20], [0, 1, 10], [0, 0, 1]])
    seen = dualrc.warp_image(ramp(200, 150), H, (120, 100))
    assert seen.shape == (100, 120, 4) and seen.dtype == np.uint8
    assert not seen[:10, :, 3].any() and (seen[10:, :, 3] == 255).all()
    x, y = np.meshgrid(np.arange(120), np.arange(10, 100))
    assert np.array_equal(seen[10:, :, 0], x + 20) and np.array_equal(seen[10:, :, 1], y - 10)
    estimate = Estimate(kind="homography", matrix=H, inliers=np.ones(4, bool))
    assert np.array_equal(dualrc.warp_image(ramp(200, 150), estimate, (120, 100)), seen)


def test_an_image_shrinks_without_aliasing():
    stripes = np.zeros((240, 240, 3), np.uint8)
    stripes[:, ::2] = 255
    seen = stitch.warp_image(stripes, resize_homography((240, 240), (60, 60)), (60, 60))
    assert np.ptp(seen[5:-5, 5:-5, 0]) < 12 and abs(float(seen[..., 0].mean()) - 127.5) < 3


def test_an_image_by_a_dense_warp():
    points = pixel_grid((90, 60)) + np.float32([15, 5])
    certainty = np.full((60, 90), 0.8, np.float32)
    certainty[:, :30] = 0.05
    seen = stitch.warp_image(ramp(120, 80), Warp(points1=points, certainty=certainty, size1=(120, 80)))
    assert seen.shape == (60, 90, 4) and not seen[:, :30, 3].any() and (seen[:, 30:, 3] == 255).all()
    assert seen[20, 50].tolist() == [65, 25, 0, 255]
    points[:, 40:] = np.nan  # where nothing is known
    seen = stitch.warp_image(ramp(120, 80), Warp(points1=points, certainty=certainty, size1=(120, 80)))
    assert not seen[:, 40:, 3].any()


def test_what_cannot_be_warped():
    with pytest.raises(ConfigError, match="give its size"):
        stitch.warp_image(ramp(20, 20), np.eye(3))
    with pytest.raises(DataError, match="no homography"):
        stitch.warp_image(ramp(20, 20), Estimate(kind="homography", matrix=None, inliers=np.zeros(0, bool)), (9, 9))
    with pytest.raises(DataError, match=r"shape \(3, 3\)"):
        stitch.warp_image(ramp(20, 20), np.eye(4), (9, 9))
    warp = Warp(points1=pixel_grid((9, 9)), certainty=np.ones((9, 9), np.float32), size1=(30, 30))
    with pytest.raises(DataError, match="give image 1"):
        stitch.warp_image(ramp(20, 20), warp)
    with pytest.raises(DataError, match="at least two"):
        stitch.panorama([ramp(20, 20)])
    with pytest.raises(ConfigError, match="reference = 5"):
        stitch.panorama([ramp(40, 40), ramp(40, 40)], reference=5)


@pytest.fixture(scope="module")
def turned():
    """Return three images from one place, with a rotated camera and different exposures."""
    scene = make_scene(3, texture_size=256)
    aims, exposures = (-2.0, 0.0, 2.0), (1.1, 0.95, 1.0)
    views = [look_at((4.0, -9.0, 3.0), (x, 2.5, 1.8), size=(320, 240), fov_deg=40) for x in aims]
    fov_deg = 2 * np.degrees(np.arctan(2 * np.tan(np.radians(20))))  # the same focal length
    wide = look_at((4.0, -9.0, 3.0), (0.0, 2.5, 1.8), size=(640, 300), fov_deg=fov_deg)
    images = [
        np.asarray(render(scene, view, Light(exposure=exposure), supersample=2).image)
        for view, exposure in zip(views, exposures, strict=True)
    ]
    return images, np.asarray(render(scene, wide, Light(exposure=1.0), supersample=2).image)


@pytest.fixture(scope="module")
def shipped():
    return dualrc.load(device="cpu")


def test_a_panorama_shows_what_one_wide_image_shows(turned, shipped):
    images, truth = turned
    # An image that does not belong to the others is left out.
    with pytest.warns(UserWarning, match="overlap with no other: 3"):
        joined = dualrc.panorama([*images, texture(1, 320, 240)], matcher=shipped, reference=1)
    assert isinstance(joined, dualrc.draw.Drawing) and joined.shape[2] == 4
    assert joined.shape[1] > 440 and joined.shape[0] >= 240
    # The panorama has the frame of the middle image, so the wide image differs from it only by a shift.
    matches = shipped.match(np.asarray(joined), truth, top=1000)
    shift = np.median(matches.points1 - matches.points0, axis=0)
    assert np.abs(matches.points1 - matches.points0 - shift).max(axis=1)[:500].mean() < 1.0
    placed = stitch.warp_image(np.asarray(joined)[..., :3], crop_homography(*-shift), (640, 300))
    alpha = stitch.warp_image(np.repeat(np.asarray(joined)[..., 3:], 3, axis=2), crop_homography(*-shift), (640, 300))
    known = (alpha[..., 0] == 255) & (placed[..., 3] == 255)
    difference = np.abs(placed[..., :3].astype(float) - truth)[known].mean()
    assert known.mean() > 0.5 and difference < 14


def test_images_that_join_nothing(shipped):
    with pytest.raises(DataError, match="No two of these images could be joined"):
        stitch.panorama([texture(1, 160, 128), texture(2, 160, 128)], matcher=shipped)


def test_images_too_wide_for_a_plane():
    frames = {0: np.eye(3), 1: np.array([[1.0, 0, 300], [0, 1, 0], [-1 / 250, 0, 1]])}
    with pytest.raises(DataError, match="too wide an angle"):
        stitch._canvas(frames, {0: (320, 240), 1: (320, 240)}, 10**7)


def test_a_large_panorama_is_shrunk():
    frames = {0: np.eye(3), 1: np.array([[1.0, 0, 300], [0, 1, 0], [0, 0, 1]])}
    placed, size = stitch._canvas(frames, {0: (320, 240), 1: (320, 240)}, 20_000)
    assert size[0] * size[1] <= 20_000 and size[0] / size[1] == pytest.approx(620 / 240, rel=0.02)
    assert np.allclose(placed[0][:2, :2], np.diag([size[0] / 620, size[1] / 240]))


def test_the_command_line(turned, tmp_path):
    paths = []
    for number, pixels in enumerate(turned[0]):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(pixels).save(paths[-1])
    done = CliRunner().invoke(app, ["panorama", *paths[:2], "-o", str(tmp_path / "all.png"), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    with Image.open(tmp_path / "all.png") as image:
        assert image.mode == "RGBA" and image.width > 380
    for by in ("homography", "dense"):
        out = tmp_path / f"{by}.png"
        done = CliRunner().invoke(app, ["warp", *paths[:2], "-o", str(out), "--by", by, "--device", "cpu"])
        assert done.exit_code == 0, done.output
        with Image.open(out) as image:
            assert image.size == (320, 240) and 0.3 < (np.asarray(image)[..., 3] > 0).mean() < 0.95
