"""Tests of the pixel convention: known motions are recovered on every path without bias."""

import numpy as np
import pytest
import torch
from conftest import View, oracle_matcher, same_matches

from dualrc.config import CompactConfig, ResNetConfig
from dualrc.errors import ImageError
from dualrc.image import Scale, mask_to_cells, network_size, spread, to_input
from dualrc.matches import Matches, Warp
from dualrc.pixels import (
    FINE_STRIDE,
    RATIO,
    STRIDE,
    cell_to_pixel,
    in_image,
    pixel_grid,
    pixel_to_cell,
    pixel_to_unit,
    resize_points,
)

MARGIN = 20  # at the border, resizing bends the colour ramps


def well_inside(points, view: View):
    return ((points > MARGIN) & (points < np.array([view.width, view.height]) - 1 - MARGIN)).all(-1)


def errors(points0, points1, view0: View, view1: View):
    """Return errors (n, 2) in pixels of image 1, for points away from both borders."""
    keep = well_inside(points0, view0) & well_inside(points1, view1)
    assert keep.sum() >= 100
    return points1[keep] - view1.from_scene(view0.to_scene(points0[keep]))


# Different sizes, so that cells of the two images meet at every fraction of a cell. In the later pairs the ratio
# of an image to its network input is far from 1, which reveals a missing half pixel.
PAIRS = {
    "odd sizes": (View(333, 250, (20, 60)), View(370, 275, (12.4, 51.7)), 1024),
    "portrait": (View(333, 250, (20, 60)), View(263, 333, (51.3, 31.7), (1.0, 0.97)), 1024),
    "large to small": (View(999, 711, (30, 40), (1 / 3, 1 / 3)), View(320, 240, (25.3, 51.6), (0.93, 0.96)), 320),
    "small to large": (View(320, 240, (25.3, 51.6), (0.93, 0.96)), View(999, 711, (30, 40), (1 / 3, 1 / 3)), 320),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    view0, view1, max_size = PAIRS[request.param]
    return view0, view1, oracle_matcher(max_size=max_size), view0.image(1), view1.image(2)


def assert_unbiased(error, view1: View):
    """Check that there is no bias along either axis, in units of the scene; a fine cell covers about four."""
    median = np.median(error * view1.step, axis=0)
    assert np.abs(median).max() < 0.05, median
    # Single points too: hardly any error exceeds a quarter of a cell.
    assert np.quantile(np.abs(error * view1.step), 0.95) < 1.2


def test_match_has_no_bias(pair):
    view0, view1, matcher, image0, image1 = pair
    matches = matcher.match(image0, image1)
    assert (matches.size0, matches.size1) == ((view0.width, view0.height), (view1.width, view1.height))
    assert len(matches) > 1000
    assert_unbiased(errors(matches.points0, matches.points1, view0, view1), view1)
    # Other calls that give the same matches give the same pixels.
    features = matcher.features(image0), matcher.features(image1)
    assert same_matches(matches, matcher.match_features(*features))


def test_match_many_has_no_bias():
    view0, view1, max_size = PAIRS["large to small"]
    matcher = oracle_matcher(max_size=max_size)
    images = view0.image(1), view1.image(2)
    for matches in matcher.match_many([images, images]):
        assert_unbiased(errors(matches.points0, matches.points1, view0, view1), view1)


def test_match_points_has_no_bias(pair):
    view0, view1, matcher, image0, image1 = pair
    points = np.random.default_rng(0).uniform(0, (view0.width - 1, view0.height - 1), (3000, 2)).astype(np.float32)
    found = matcher.match_points(image0, image1, points)
    assert np.array_equal(found.points0, points)
    there = found.scores > 0
    assert_unbiased(errors(points[there], found.points1[there], view0, view1), view1)


def test_warp_has_no_bias(pair):
    view0, view1, matcher, image0, image1 = pair
    warp = matcher.warp(image0, image1)
    assert warp.points1.shape == (view0.height, view0.width, 2) and warp.size1 == (view1.width, view1.height)
    sure = warp.certainty > 0
    grid = pixel_grid((view0.width, view0.height))
    assert_unbiased(errors(grid[sure], warp.points1[sure], view0, view1), view1)


@pytest.mark.parametrize("shift", [(8, -4), (5, -3), (1, 0), (2.5, 6.75), (-7.3, 3.6)])
def test_a_shifted_image_matches_with_that_shift(oracle, shift):
    view0 = View(256, 192, (40, 60))
    view1 = View(256, 192, (40 + shift[0], 60 + shift[1]))
    images = view0.image(1), view1.image(2)
    matches = oracle.match(*images)
    warp = oracle.warp(*images)
    points = pixel_grid((256, 192))[30:160:3, 30:220:3].reshape(-1, 2)
    asked = oracle.match_points(*images, points)
    sure = warp.certainty > 0
    for error in (
        errors(matches.points0, matches.points1, view0, view1),
        errors(pixel_grid((256, 192))[sure], warp.points1[sure], view0, view1),
        errors(asked.points0, asked.points1, view0, view1),
    ):
        # All cells meet at the same fraction here, and a soft-argmax over nine cells is slightly biased.
        assert np.abs(np.median(error, axis=0)).max() < 0.25


def test_whole_cells_are_exact_without_refinement():
    matcher = oracle_matcher(subpixel=False)
    view0, view1 = View(160, 128, (40, 60)), View(160, 128, (48, 56))
    matches = matcher.match(view0.image(1), view1.image(2))
    error = errors(matches.points0, matches.points1, view0, view1)
    assert np.abs(error).max() < 1e-4
    # Centers of cells with stride 4, in pixels with the first center at (0, 0).
    assert np.allclose(matches.points0 % 4, 1.5, atol=1e-4)


@pytest.mark.parametrize("sizes", [(176, 288), (304, 176)])
def test_sizes_of_the_network_do_not_move_points(sizes):
    matcher = oracle_matcher(max_zoom=1)  # these sizes, whatever their ratio
    view0, view1 = View(333, 250, (20, 60)), View(370, 275, (12.4, 51.7))
    features = [
        matcher.features(v.image(i), size=s) for i, (v, s) in enumerate(zip((view0, view1), sizes, strict=True))
    ]
    matches = matcher.match_features(*features)
    assert np.abs(np.median(errors(matches.points0, matches.points1, view0, view1), axis=0)).max() < 0.15


def test_scale_known_answers():
    scale = Scale(image_size=(640, 240), input_size=(320, 480))
    corners = np.array([[-0.5, -0.5], [639.5, 239.5], [0, 0], [319.5, 119.5]])
    expected = np.array([[-0.5, -0.5], [319.5, 479.5], [-0.25, 0.5], [159.5, 239.5]])
    assert np.allclose(scale.to_network(corners), expected)
    assert np.allclose(scale.to_image(expected), corners)


def test_cells_to_pixels():
    assert cell_to_pixel(torch.tensor([[0.0, 0.0], [1.0, 2.5]]), FINE_STRIDE).tolist() == [[1.5, 1.5], [5.5, 11.5]]


@pytest.mark.parametrize(
    ("size", "long_side", "max_size", "expected"),
    [
        ((1600, 1200), None, 1600, (1600, 1200)),
        ((1600, 1200), None, 1024, (1024, 768)),
        ((1000, 700), None, 1024, (992, 688)),
        ((4000, 3000), None, 1600, (1600, 1200)),
        ((640, 480), 1280, 1024, (1280, 960)),  # `size` is exact, up or down, whatever max_size
        ((640, 480), 320, 1024, (320, 240)),
        ((333, 250), None, 1024, (320, 240)),
        ((250, 333), 320, 1024, (240, 320)),
        ((32, 32), None, 1024, (32, 32)),
        ((47, 33), None, 1024, (32, 32)),
        ((3, 3000)[::-1], 3000, 1024, None),
        ((15, 4000), None, 1024, None),
        ((31, 400), 1600, 1024, None),  # a side below 32 px is an error even where it would be enlarged
        ((40, 4000), None, 1024, (32, 4000)),  # a strip keeps its short side
        ((40, 4000), 1024, 1024, None),  # the network would see 10 px
        ((6848, 320), None, 1024, (4736, 208)),  # as far as a square's pixels go
        ((4096, 1024), None, 1024, (1024, 256)),
        ((1, 1), None, 1024, None),
    ],
)
def test_network_size(size, long_side, max_size, expected):
    if expected is None:
        with pytest.raises(ImageError, match="too small or too thin"):
            network_size(size, long_side=long_side, max_size=max_size)
    else:
        assert network_size(size, long_side=long_side, max_size=max_size) == expected


def test_to_input_keeps_the_center_and_normalizes():
    image = np.zeros((64, 96, 3), np.uint8)
    image[:, :, 0] = np.arange(96) * 2  # red grows by 2 a pixel
    image[:, :, 1] = np.arange(64)[:, None]
    same = to_input(torch.from_numpy(image)[None], (96, 64))
    assert same.shape == (1, 3, 64, 96)
    red = same[0, 0] * 0.229 * 255 + 0.485 * 255
    assert torch.allclose(red[10], torch.arange(96) * 2.0, atol=1e-3)
    assert torch.allclose(same[0, 2], torch.tensor(-0.406 / 0.225).expand(64, 96), atol=1e-5)
    half = to_input(torch.from_numpy(image)[None], (48, 32))
    red = half[0, 0] * 0.229 * 255 + 0.485 * 255
    # Network pixel x lies at (x + 0.5) * 2 - 0.5 in the image.
    assert torch.allclose(red[5, 4:-4], 2 * ((torch.arange(48) + 0.5) * 2 - 0.5)[4:-4], atol=1e-3)


def test_the_paper_s_networks_see_images_that_are_not_smoothed():
    """Images are resized as in the published evaluation: every second pixel of a grid vanishes or fills the image."""
    assert not ResNetConfig.antialias and CompactConfig.antialias
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 96, 128, 3), dtype=np.uint8))
    smoothed, published = (to_input(pixels, (32, 32), antialias=flag) for flag in (True, False))
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    images = (pixels.permute(0, 3, 1, 2) / 255 - mean) / deviation
    expected = torch.nn.functional.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    assert torch.allclose(published, expected, atol=1e-5)
    assert published.std() > 1.5 * smoothed.std()


def test_mask_cells_have_their_center_on_the_mask():
    mask = np.zeros((48, 64), bool)
    mask[10, 21] = True  # the pixel under the centre of cell (row 2, column 5): 9.5 and 21.5, rounded half up
    mask[10, 22] = True
    cells = mask_to_cells(mask, (64, 48), (64, 48), 4)
    assert cells.shape == (12, 16)
    assert np.argwhere(cells).tolist() == [[2, 5]]
    # At half the size, cells cover 8 pixels, and the cell at row 1, column 3 has its center at (27.5, 11.5).
    mask = np.zeros((48, 64), bool)
    mask[12, 28] = True
    assert np.argwhere(mask_to_cells(mask, (64, 48), (32, 24), 4)).tolist() == [[1, 3]]
    # Each axis has its own ratio.
    mask = np.zeros((48, 64), bool)
    mask[14, 28] = True
    assert np.argwhere(mask_to_cells(mask, (64, 48), (32, 48), 4)).tolist() == [[3, 3]]


def test_spread_reads_every_pixel_between_cells():
    scale = Scale(image_size=(96, 40), input_size=(48, 32))
    cells = cell_to_pixel(torch.from_numpy(pixel_grid((12, 8))), 4)
    motion = torch.tensor([3.0, -2.0])
    certainty = torch.full((8, 12), 0.5)
    certainty[3:5, 4:6] = 0  # a hole
    points = torch.where(certainty[:, :, None] > 0, cells + motion, torch.tensor(torch.nan))
    points = points.nan_to_num(nan=1e6)
    places, sure = spread(points, certainty, scale, 4)
    assert places.shape == (40, 96, 2) and sure.shape == (40, 96)
    expected = scale.to_network(pixel_grid((96, 40))) + motion.numpy()
    assert np.abs(places - expected).max() < 1e-4
    assert (sure == 0).any() and sure.max() == 0.5
    assert sure[19, 39] == 0 and sure[0, 0] == 0.5


def test_spread_of_nothing_stays_put():
    scale = Scale(image_size=(64, 48), input_size=(64, 48))
    places, sure = spread(torch.zeros(12, 16, 2), torch.zeros(12, 16), scale, 4)
    assert np.allclose(places, pixel_grid((64, 48)), atol=1e-4) and not sure.any()


KINDS = {"numpy": np.array, "torch": torch.tensor}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_cells_are_centered_between_their_edges(kind):
    assert (STRIDE, FINE_STRIDE, RATIO) == (16, 4, 4)
    centers = cell_to_pixel(kind([[0, 1], [2, 3]]), 4)  # the first cell covers the pixels 0 to 3
    assert centers.tolist() == [[1.5, 5.5], [9.5, 13.5]]
    assert pixel_to_cell(centers, 4).tolist() == [[0, 1], [2, 3]]
    assert pixel_to_cell(kind([-0.5, 15.5]), 16).tolist() == [-0.5, 0.5]
    assert cell_to_pixel(0.0, 16) == 7.5


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_resizing_keeps_the_outer_edges(kind):
    corners = kind([[-0.5, -0.5], [9.5, 4.5], [0.0, 2.0]])
    assert resize_points(corners, (10, 5), (20, 20)).tolist() == [[-0.5, -0.5], [19.5, 19.5], [0.5, 9.5]]
    assert resize_points(kind([[4, 3]]), (10, 5), (5, 10)).tolist() == [[1.75, 6.5]]  # whole numbers stay exact
    assert resize_points(corners[:0], (10, 5), (20, 20)).shape == (0, 2)
    assert in_image(corners, (10, 5)).tolist() == [True, True, True]
    assert in_image(kind([[float("nan"), 0], [9.6, 0], [0, -0.6], [3, 4.6]]), (10, 5)).tolist() == [False] * 4


def test_unit_coordinates_are_those_of_grid_sample():
    row = torch.arange(6.0)[None, None, None]  # an image of 6 x 1
    unit = pixel_to_unit(torch.tensor([[0.0, 0.0], [2.5, 0.0], [5.0, 0.0]]), (6, 1))
    read = torch.nn.functional.grid_sample(row, unit[None, None], align_corners=False)
    assert read.ravel().tolist() == pytest.approx([0, 2.5, 5], abs=1e-6)


def test_pixel_grid_is_x_then_y():
    grid = pixel_grid((3, 2))
    assert grid.shape == (2, 3, 2) and grid[1, 2].tolist() == [2, 1]


def test_types(oracle):
    view = View(64, 48)
    assert isinstance(oracle.match(view.image(), view.image()), Matches)
    assert isinstance(oracle.warp(view.image(), view.image()), Warp)
