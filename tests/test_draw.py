"""Tests of drawings: proportions, positions, and unusual input."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dualrc import draw
from dualrc.errors import ConfigError, DataError, ImageError, OutputError
from dualrc.matches import Estimate, Matches, Warp
from dualrc.pixels import cell_to_pixel, pixel_grid

CAPTION = draw._CAPTION_PX
GAP = draw._GAP_PX


def gray(width, height, value=128):
    return np.full((height, width, 3), value, dtype=np.uint8)


def texture(width, height, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def make_matches(points0, points1, size0, size1, scores=None, estimate=None):
    points0, points1 = np.reshape(points0, (-1, 2)), np.reshape(points1, (-1, 2))
    scores = np.linspace(1, 0.1, len(points0)) if scores is None else scores
    return Matches(points0=points0, points1=points1, scores=scores, size0=size0, size1=size1, estimate=estimate)


def changed(image, background=128):
    """Return which pixels of the canvas, without its caption, were drawn on."""
    return np.any(image[:-CAPTION] != background, axis=2)


def test_a_match_is_drawn_between_its_points():
    matches = make_matches([100, 120], [50, 200], (400, 300), (400, 300))
    image = draw.draw_matches(gray(400, 300), gray(400, 300), matches)
    assert image.shape == (300 + CAPTION, 400 + GAP + 400, 3)
    assert image.dtype == np.uint8
    drawn = changed(image)
    drawn[:, 400 : 400 + GAP] = False
    rows, columns = np.nonzero(drawn)
    assert (columns.min(), columns.max()) == (pytest.approx(100, abs=5), pytest.approx(456, abs=5))
    assert drawn[120, 100]
    assert drawn[200, 406 + 50]
    assert (rows.min(), rows.max()) == (pytest.approx(120, abs=5), pytest.approx(200, abs=5))


def test_no_match_leaves_the_photographs_exactly_as_they_are():
    image0, image1 = texture(400, 300), texture(300, 300, seed=1)
    image = draw.draw_matches(image0, image1, make_matches([], [], (400, 300), (300, 300)))
    assert np.array_equal(image[:300, :400], image0)
    assert np.array_equal(image[:300, 400 + GAP :], image1)
    assert (image[300:] < 128).any()  # the caption


def test_different_sizes_share_a_height_without_distortion():
    matches = make_matches([0, 0], [0, 0], (400, 300), (60, 90))
    image = draw.draw_matches(gray(400, 300), gray(60, 90), matches)
    assert image.shape == (300 + CAPTION, 400 + GAP + 200, 3)


def test_panoramas_are_stacked():
    image = draw.draw_matches(gray(900, 300), gray(450, 150), make_matches([], [], (900, 300), (450, 150)))
    assert image.shape == (300 + GAP + 300 + CAPTION, 900, 3)


@pytest.mark.parametrize("sizes", [((6000, 200), (200, 6000)), ((3000, 3000), (30, 20)), ((1, 1), (5000, 1))])
def test_any_sizes_fit_the_canvas(sizes):
    (width0, height0), (width1, height1) = sizes
    matches = make_matches([0, 0], [0, 0], *sizes)
    image = draw.draw_matches(gray(width0, height0), gray(width1, height1), matches)
    assert image.shape[0] <= draw._HEIGHT_PX + CAPTION
    assert image.shape[1] <= draw._WIDTH_PX + 2
    image = draw.draw_matches(gray(width1, height1), gray(width0, height0), matches.swapped())
    assert image.shape[0] <= draw._HEIGHT_PX + CAPTION


def test_points_that_are_nan_or_outside_are_left_out():
    points = [[np.nan, 5], [-50, 5], [500, 5], [np.inf, 5]]
    matches = make_matches(points, np.full((4, 2), 20), (400, 300), (400, 300))
    image = draw.draw_matches(gray(400, 300), gray(400, 300), matches)
    assert not changed(image)[:, :400].any()
    dots = draw.draw_dots(gray(400, 300), gray(400, 300), matches, np.ones(4, dtype=bool))
    assert not changed(dots)[:, :400].any()


def test_the_limit_keeps_good_matches_from_all_over_the_image():
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.uniform(0, 50, (900, 2)), rng.uniform(350, 399, (100, 2))])
    scores = np.concatenate([np.full(900, 0.9), np.full(100, 0.5)])
    matches = make_matches(points, points, (400, 400), (400, 400), scores)
    order = draw._spread(matches, np.ones(1000, dtype=bool), 20)
    assert len(order) == len(set(order)) == 20
    assert 5 <= np.sum(order >= 900) <= 15
    assert np.all(np.diff(matches.scores[order]) >= 0)  # the best are drawn last
    assert len(draw._spread(matches, np.ones(1000, dtype=bool), None)) == 1000
    assert len(draw._spread(matches, np.ones(1000, dtype=bool), 0)) == 0


def test_score_colors_run_from_the_first_to_the_last():
    first, last = (tuple(bytes.fromhex(draw._SCORE_COLORS[index])) for index in (0, -1))
    assert draw._score_colors(np.array([0.2, 0.8])) == [first, last]
    assert draw._score_colors(np.array([0.3, 0.3])) == [last, last]
    assert draw._score_colors(np.array([])) == []


@pytest.mark.parametrize(
    ("count", "drawn", "text"),
    [(0, 0, "no matches"), (1, 1, "1 match"), (5, 5, "5 matches"), (20000, 200, "200 of 20,000 matches")],
)
def test_captions_count(count, drawn, text):
    matches = make_matches(np.zeros((count, 2)), np.zeros((count, 2)), (9, 9), (9, 9))
    assert draw._summary(matches, drawn) == text


def test_inliers_are_green_and_outliers_red():
    flags = np.array([True, False])
    estimate = Estimate(kind="homography", matrix=np.eye(3), inliers=flags)
    points = [[50, 50], [50, 250]]
    matches = make_matches(points, points, (400, 300), (400, 300), estimate=estimate)
    image = draw.draw_matches(gray(400, 300), gray(400, 300), matches, colors="inliers").astype(int)
    assert image[50, 50, 1] > image[50, 50, 0] + 50
    assert image[250, 50, 0] > image[250, 50, 1] + 50
    assert draw._summary(matches, 2) == "2 matches, 1 agree with the homography"
    without = make_matches(points, points, (400, 300), (400, 300))
    with pytest.raises(DataError, match="with_estimate"):
        draw.draw_matches(gray(400, 300), gray(400, 300), without, colors="inliers")


def test_dots_are_green_and_red_in_both_images():
    points = np.array([[50, 50], [200, 250]])
    matches = make_matches(points, points, (400, 300), (400, 300))
    image = draw.draw_dots(gray(400, 300), gray(400, 300), matches, [True, False])
    for left in (0, 400 + GAP):
        assert tuple(image[50, left + 50]) == draw._GOOD
        assert tuple(image[250, left + 200]) == draw._BAD
    with pytest.raises(DataError, match="one flag per match"):
        draw.draw_dots(gray(400, 300), gray(400, 300), matches, [True])
    empty = make_matches([], [], (400, 300), (400, 300))
    assert draw.draw_dots(gray(400, 300), gray(400, 300), empty, []).shape[1] == 806


def test_the_image_must_be_the_matched_one():
    matches = make_matches([], [], (300, 400), (400, 300))
    with pytest.raises(DataError, match="Image 0 has 400 x 300 pixels but the matches are for 300 x 400"):
        draw.draw_matches(gray(400, 300), gray(400, 300), matches)
    unknown = make_matches([], [], (0, 0), (0, 0))
    assert draw.draw_matches(gray(400, 300), gray(400, 300), unknown).size


def test_images_are_whatever_the_matcher_takes(tmp_path):
    matches = make_matches([[10, 20]], [[30, 40]], (400, 300), (400, 300))
    expected = draw.draw_matches(gray(400, 300), gray(400, 300), matches)
    Image.fromarray(gray(400, 300)).save(tmp_path / "a.png")
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), gray(400, 300)[:, :, 0], gray(400, 300) / 255):
        assert np.array_equal(draw.draw_matches(image, gray(400, 300), matches), expected)
    with pytest.raises(ImageError, match="not an image"):
        draw.draw_matches(gray(0, 5), gray(9, 9), make_matches([], [], (0, 0), (0, 0)))


def test_colors_are_known_ones():
    with pytest.raises(ConfigError, match="score or inliers"):
        draw.draw_matches(gray(9, 9), gray(9, 9), make_matches([], [], (0, 0), (0, 0)), colors="rainbow")


def test_a_warp_is_drawn_as_it_is():
    points = np.stack(np.meshgrid(np.arange(40.0), np.arange(30.0)), axis=-1)
    warp = Warp(points1=points, certainty=np.ones((30, 40)), size1=(40, 30))
    images = gray(40, 30), gray(40, 30)
    assert np.array_equal(draw.draw_warp(*images, warp), draw.draw_warp(*images, points, certainty=warp.certainty))
    assert np.array_equal(draw.draw_flow(*images, warp), draw.draw_flow(*images, points, warp.certainty))


SHIFT = np.array([[1, 0, 16], [0, 1, 8], [0, 0, 1.0]])  # image 0 at (x, y) is image 1 at (x + 16, y + 8)


def shifted_pair():
    large = texture(100, 80)
    return large[8:, 16:], large


@pytest.mark.parametrize("mode", ["blend", "checkerboard"])
def test_a_true_homography_leaves_no_seam(mode):
    image0, image1 = shifted_pair()
    assert np.abs(draw.draw_warp(image0, image1, SHIFT, mode=mode).astype(int) - image1).max() <= 1


@pytest.mark.parametrize("mode", ["blend", "checkerboard"])
def test_true_dense_points_leave_no_seam(mode):
    image0, image1 = shifted_pair()
    points1 = pixel_grid((84, 72)) + np.array([16, 8])
    assert np.abs(draw.draw_warp(image0, image1, points1, mode=mode).astype(int) - image0).max() <= 1


def test_blend_mixes_only_where_there_is_something_to_lay_over():
    image = draw.draw_warp(gray(50, 40, 200), gray(100, 80, 100), SHIFT)
    assert (image[8:48, 16:66] == 150).all()
    assert (image[:8] == 100).all()
    assert (image[:, 66:] == 100).all()


def test_certainty_fades_and_nan_shows_nothing():
    points1 = pixel_grid((300, 240))
    points1[:, :10] = np.nan
    certainty = np.ones((240, 300))
    certainty[:100] = 0
    image = draw.draw_flow(gray(300, 240, 50), gray(300, 240, 80), points1, certainty)
    assert (image[:240, :300] == 50).all()
    pulled = image[:240, 300 + GAP :]
    assert (pulled[:100] == 255).all()
    assert (pulled[:, :10] == 255).all()
    assert (pulled[100:, 10:] == 80).all()
    over = draw.draw_warp(gray(300, 240, 50), gray(300, 240, 80), points1, certainty=certainty)
    assert (over[:100] == 50).all()
    assert (over[100:, 10:] == 65).all()


def test_a_coarse_warp_is_shown_in_full_size():
    image = texture(320, 256)
    coarse = cell_to_pixel(pixel_grid((80, 64)), 4)
    drawing = draw.draw_flow(image, image, coarse)
    inner = np.s_[8:248, 8:312]
    assert np.abs(drawing[:256, 320 + GAP :][inner].astype(int) - image[inner]).max() <= 2


def test_warps_of_wrong_shape_are_refused():
    with pytest.raises(DataError, match="homography"):
        draw.draw_warp(gray(9, 9), gray(9, 9), np.zeros((4, 4)))
    with pytest.raises(DataError, match="certainty"):
        draw.draw_flow(gray(9, 9), gray(9, 9), np.zeros((9, 9, 2)), np.zeros((8, 9)))
    with pytest.raises(DataError, match="singular"):
        draw.draw_warp(gray(9, 9), gray(9, 9), np.zeros((3, 3)))


def test_matplotlib_is_not_imported():
    code = "import sys, dualrc.draw; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.JPEG"])
def test_save(tmp_path, name):
    draw.save(gray(30, 20, 99), tmp_path / name)
    with Image.open(tmp_path / name) as image:
        assert image.size == (30, 20)
        assert np.abs(np.asarray(image).astype(int) - 99).max() <= 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_save_refuses_other_endings_and_folders(tmp_path):
    with pytest.raises(OutputError, match=r"\.png or \.jpg"):
        draw.save(gray(3, 3), tmp_path / "a.gif")
    with pytest.raises(OutputError, match="does not exist"):
        draw.save(gray(3, 3), tmp_path / "none" / "a.png")


def test_drawings_show_themselves_in_a_notebook(tmp_path):
    matches = make_matches([[10, 10]], [[20, 20]], (60, 40), (60, 40))
    warp = Warp(points1=pixel_grid((60, 40)), certainty=np.ones((40, 60), np.float32), size1=(60, 40))
    images = gray(60, 40), texture(60, 40)
    for drawn in (
        draw.draw_matches(*images, matches),
        draw.draw_dots(*images, matches, [True]),
        draw.draw_warp(*images, warp),
        draw.draw_flow(*images, warp),
    ):
        with Image.open(io.BytesIO(drawn._repr_png_())) as image:
            assert np.array_equal(np.asarray(image), drawn)
    assert drawn[:, :, 0]._repr_png_() is None and (drawn / 2)._repr_png_() is None
    drawn.save(tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 100
    clear = np.zeros((8, 8, 4), np.uint8).view(draw.Drawing)
    clear.save(tmp_path / "clear.png")
    clear.save(tmp_path / "clear.jpg")
    with Image.open(tmp_path / "clear.png") as image, Image.open(tmp_path / "clear.jpg") as flat:
        assert image.mode == "RGBA" and image.getextrema()[3] == (0, 0)
        assert flat.getextrema()[0] == (255, 255)  # on white


PNG_AFTER_PYCOLMAP = """
import sys
import numpy as np
from dualrc.colmap import import_pycolmap
import_pycolmap()
from dualrc import draw
draw.save(np.zeros((64, 64, 3), np.uint8), sys.argv[1])
"""
PYCOLMAP_FIRST = """
import sys
import pycolmap
import numpy as np
from dualrc import draw
from dualrc.errors import OutputError
image = np.zeros((64, 64, 3), np.uint8)
assert image.view(draw.Drawing)._repr_png_() is None
try:
    draw.save(image, sys.argv[1])
except OutputError as error:
    print(error)
"""


def test_pngs_are_written_beside_pycolmap(tmp_path):
    """If pycolmap is imported before Pillow, writing PNG fails: our import order avoids it, and users get an error."""
    pytest.importorskip("pycolmap", reason="needs the extra colmap")
    path = tmp_path / "a.png"
    subprocess.run([sys.executable, "-c", PNG_AFTER_PYCOLMAP, path], check=True)
    assert path.stat().st_size > 50
    other = tmp_path / "b.png"
    told = subprocess.run([sys.executable, "-c", PYCOLMAP_FIRST, other], check=True, capture_output=True, text=True)
    assert "before pycolmap" in told.stdout and not other.exists()
