"""Tests of metrics with known answers."""

import numpy as np
import pytest

from dualrc.geometry import crop_homography
from dualrc.matches import Matches
from dualrc.metrics import area_under_curve, coverage, match_errors_px, pose_error_deg, share_within

IDENTITY = np.eye(3)


def matches(points0, points1) -> Matches:
    points0, points1 = (np.array(points, dtype=float).reshape(-1, 2) for points in (points0, points1))
    return Matches(points0=points0, points1=points1, scores=np.ones(len(points0)), size0=(100, 80), size1=(100, 80))


def test_errors_of_a_known_shift():
    found = matches([[10, 10], [20, 30]], [[13, 14], [20, 30]])
    assert match_errors_px(found, IDENTITY).tolist() == [5, 0]
    moved = matches([[10, 10]], [[7, 8]])
    assert match_errors_px(moved, crop_homography(3, 2)).tolist() == [0]


def test_errors_of_points_that_are_nowhere_are_infinite():
    found = matches([[np.nan, 0], [1, 1]], [[0, 0], [np.inf, 1]])
    assert np.isinf(match_errors_px(found, IDENTITY)).all()
    to_infinity = np.array([[1.0, 0, 0], [0, 1, 0], [1, 0, 0]])
    assert np.isinf(match_errors_px(matches([[0, 5]], [[0, 5]]), to_infinity)).all()


def test_shares_within_thresholds():
    assert share_within([0.5, 1, 2.5, np.inf], [1, 2, 3]).tolist() == [0.5, 0.5, 0.75]
    assert share_within([0], [1]).tolist() == [1]
    assert share_within([1.01], [1]).tolist() == [0]
    assert share_within([np.nan], [1]).tolist() == [0]
    assert share_within([], [1, 3]).tolist() == [0, 0]
    assert share_within([1, np.inf], [5]).tolist() == [0.5]


def test_area_under_curve():
    assert area_under_curve([0, 0, 0], [5, 10]).tolist() == [1, 1]
    assert area_under_curve([], [5]).tolist() == [0]
    assert area_under_curve([np.inf, np.nan], [5]).tolist() == [0]
    # One case: linear to (2, 1), then constant to 5: a triangle of area 1 and a rectangle of 3, divided by 5.
    assert area_under_curve([2], [5])[0] == pytest.approx(4 / 5)
    # Two cases, one of which failed: the curve ends at one half.
    assert area_under_curve([2, np.inf], [5])[0] == pytest.approx(2 / 5)
    assert area_under_curve([7], [5])[0] == 0
    assert area_under_curve([5], [5])[0] == pytest.approx(0.5)


def test_area_does_not_depend_on_the_order():
    errors = [3.0, 1.0, 8.0, np.inf, 0.2]
    assert area_under_curve(errors, [5, 10]) == pytest.approx(area_under_curve(sorted(errors), [5, 10]))


def test_pose_error():
    turn = np.radians(10)
    pose = np.array([[1.0, 0, 0, 1], [0, np.cos(turn), -np.sin(turn), 0], [0, np.sin(turn), np.cos(turn), 0]])
    truth = np.eye(3, 4)
    truth[:, 3] = (1, 0, 0)
    assert pose_error_deg(truth, truth) == 0
    assert pose_error_deg(pose, truth) == pytest.approx(10)
    truth[:, 3] = (np.cos(np.radians(30)), np.sin(np.radians(30)), 0)
    assert pose_error_deg(pose, truth) == pytest.approx(30)
    pose[:, 3] *= -2  # neither the length nor the sign of a translation can be known
    assert pose_error_deg(pose, truth) == pytest.approx(30)
    truth[:, 3] = 0
    assert pose_error_deg(pose, truth) == np.inf


def test_coverage():
    centres = np.stack(np.meshgrid(np.arange(5, 100, 10), np.arange(4, 80, 8)), axis=-1).reshape(-1, 2)
    assert coverage(centres, IDENTITY, (100, 80), (100, 80)) == 1
    assert coverage(centres[:25], IDENTITY, (100, 80), (100, 80)) == 0.25
    assert coverage(np.repeat(centres[:1], 9, axis=0), IDENTITY, (100, 80), (100, 80)) == 0.01
    assert coverage(np.zeros((0, 2)), IDENTITY, (100, 80), (100, 80)) == 0
    assert coverage([[np.nan, 3]], IDENTITY, (100, 80), (100, 80)) == 0
    # Image 1 shows only the right half: the grid covers that half.
    half = crop_homography(50, 0)
    assert coverage(centres[centres[:, 0] < 50], half, (100, 80), (50, 80)) == 0
    assert coverage(centres, half, (100, 80), (50, 80)) == pytest.approx(0.5)
    # No overlap at all, and images that could not be read.
    assert coverage(centres, crop_homography(500, 0), (100, 80), (50, 80)) == 0
    assert coverage(centres, IDENTITY, (0, 0), (0, 0)) == 0
