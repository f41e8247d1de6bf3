"""Search over simulated views."""

import numpy as np
import pytest
import torch
from test_quality import made_matches, photograph, share_right, shipped, similarity

from dualrc.geometry import apply_homography
from dualrc.matcher.views import see
from dualrc.matcher.viewsearch import Simulated, affine_view, simulated_views, verified_weight
from dualrc.matches import Matches

__all__ = ["photograph", "shipped"]


def through(image: np.ndarray, view) -> np.ndarray:
    return see(torch.from_numpy(np.array(image)), image.shape[1::-1], view)[0].numpy()


def test_a_tilt_shrinks_along_its_direction_only():
    view = affine_view((400, 300), 400, Simulated(4.0, 30.0, 0.0))
    center = (np.array(view.size) - 1) / 2
    along = np.array((np.cos(np.pi / 6), np.sin(np.pi / 6)))
    across = np.array((-along[1], along[0]))
    places = apply_homography(view.picture_from_view, center + np.array([(0, 0), along, across]))
    assert np.allclose(places[0], (199.5, 149.5))
    assert np.allclose(places[1] - places[0], 4 * along)
    assert np.allclose(places[2] - places[0], across)


def test_a_turn_rotates_the_whole_image():
    view = affine_view((400, 300), 200, Simulated(1.0, 0.0, 90.0))
    assert view.size == (144, 192)
    image = np.zeros((300, 400, 3), np.uint8)
    image[:150] = 255
    seen = through(image, view)
    # The upper half turns to the right.
    assert seen[:, 80:].mean() > 250
    assert seen[:, :64].mean() < 5


def test_an_image_too_small_for_a_tilt_has_no_view():
    assert affine_view((200, 100), 480, Simulated(4.0, 0.0, 0.0)) is None


def test_foreshortened_views_do_not_alias():
    stripes = np.zeros((320, 320, 3), np.uint8)
    stripes[:, ::2] = 255
    seen = through(stripes, affine_view((320, 320), 320, Simulated(4.0, 0.0, 0.0))).astype(int)
    assert np.abs(seen[:, 4:-4] - 128).max() < 16
    # Across the stripes nothing is averaged.
    kept = through(stripes, affine_view((320, 320), 320, Simulated(4.0, 90.0, 0.0))).astype(int)
    assert kept[20:60, 50:-50].std() > 100


def test_both_images_are_tilted_and_only_one_is_turned():
    views = list(simulated_views())
    tilts = {number: [view for image, view in views if image == number and view.tilt > 1] for number in (0, 1)}
    assert tilts[0] == tilts[1] and len(tilts[0]) == 12
    assert sorted(view.turn_deg for image, view in views if view.tilt == 1) == [90, 180, 270]


def test_matches_that_agree_weigh_more():
    H = similarity((150, 100), 20, 0.8, (140, 90))
    right, mixed, wrong = (verified_weight(made_matches(H, outliers=share)) for share in (0.0, 0.5, 1.0))
    assert right > mixed > 2 * wrong
    assert verified_weight(Matches.none({})) == 0


@pytest.mark.parametrize("swapped", [False, True])
def test_a_search_finds_what_a_second_look_can_not(photograph, shipped, swapped):
    view = affine_view((480, 360), 480, Simulated(6.0, 60.0, 90.0))
    there, images = np.linalg.inv(view.picture_from_view), (photograph, through(photograph, view))
    if swapped:
        there, images = view.picture_from_view, images[::-1]
    assert share_right(shipped.match(*images, quality="high")[:300], there) < 0.3
    found = shipped.match(*images, quality="search")
    # In pixels of the frontal image a pixel of the other one is six long.
    assert share_right(found[:300], there, px=18.0 if swapped else 3.0) > 0.9
    assert found.size0 == images[0].shape[1::-1] and (np.diff(found.scores) <= 0).all()
