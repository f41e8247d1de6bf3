"""Images, and areas of images, without texture."""

import shutil
from importlib.resources import files

import numpy as np
import pytest
from test_quality import photograph, shipped

import dualrc
from dualrc.texture import has_texture

__all__ = ["photograph", "shipped"]


def blank(level: float, noise: float = 0.0, seed: int = 0, size: tuple[int, int] = (200, 160)) -> np.ndarray:
    gray = level + np.random.default_rng(seed).normal(0, noise, (size[1], size[0], 1)) if noise else level
    return np.broadcast_to(np.clip(gray, 0, 255), (size[1], size[0], 3)).astype(np.uint8)


@pytest.mark.parametrize("quality", ["standard", "high", "search"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_two_blank_images_have_no_matches_and_a_warning(shipped, noise, quality):
    found = shipped.match(blank(60, noise), blank(180, noise, seed=1), quality=quality)
    assert len(found) == 0 and found.pair_score < 0.01
    assert found.info["warning"].startswith("Image 0 has almost no texture")


def test_a_blank_image_beside_a_photograph(shipped, photograph):
    found = shipped.match(photograph, blank(128, 0.5, size=(480, 360)))
    assert len(found) == 0 and found.info["warning"].startswith("Image 1 has almost no texture")


def test_few_matches_that_agree_by_chance(shipped):
    found = shipped.match(blank(128, size=(320, 240)), blank(128, 70.0, size=(320, 240)))
    assert len(found) == 0 and found.info["warning"].startswith("Image 0 has almost no texture")


@pytest.mark.parametrize("max_zoom", [1, 4])
def test_blank_images_without_a_calibration(shipped, tmp_path, max_zoom):
    weights = shutil.copy(files("dualrc") / "weights" / "default.safetensors", tmp_path)
    found = dualrc.load(weights=weights, device="cpu", max_zoom=max_zoom).match(blank(60), blank(180))
    assert found.info["calibration"] is None
    assert found.info["warning"].startswith("Image 0 has almost no texture")


def test_blank_halves_are_no_evidence(shipped):
    images = []
    for seed, level in ((0, 200), (1, 90)):
        image = blank(128, 20.0, seed=seed).copy()
        image[:, 100:] = level
        images.append(image)
    found = shipped.match(*images)
    assert found.pair_score < 0.3
    # Neighborhoods on the edge of the blank half have texture.
    assert (found.points0[:, 0] < 112).all()


def test_an_image_matches_itself_where_it_has_texture(shipped, photograph):
    scene = photograph.copy()
    scene[:120] = 230
    found = shipped.match(scene, scene)
    assert found.pair_score > 0.9 and len(found) > 500
    assert (found.points0[:, 1] > 108).all()


@pytest.mark.parametrize(("height", "width"), [(32, 48), (36, 20), (8, 8), (4, 100)])
def test_texture_is_the_deviation_in_neighborhoods_of_cells(height, width):
    """Compared with plain loops over cells, with neighborhoods that end at the border."""
    rng = np.random.default_rng(height)
    gray = rng.normal(100, rng.choice([0.5, 1.9, 2.1, 6.0], (height // 4, width // 4)).repeat(4, 0).repeat(4, 1))
    found = has_texture(gray)
    assert found.shape == (height // 4, width // 4)
    for row in range(height // 4):
        for column in range(width // 4):
            around = gray[max(row - 2, 0) * 4 : (row + 3) * 4, max(column - 2, 0) * 4 : (column + 3) * 4]
            assert found[row, column] == (around.var() > 4)


@pytest.mark.parametrize("size", [(480, 352), (160, 96), (32, 32)])
def test_texture_of_features_is_that_of_the_gray_levels(shipped, photograph, size):
    image = np.ascontiguousarray(photograph[: size[1], : size[0]])
    image[: size[1] // 2, : size[0] // 3] = 90
    features = shipped.features(image, size=None)
    gray = features.pixels.numpy().astype(np.float64).mean(2)
    assert not features.seen.textured.all()
    np.testing.assert_array_equal(features.seen.textured, has_texture(gray))
