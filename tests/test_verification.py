"""Tests of verification in a courtyard with equal opposite walls: look-alikes are dropped, true pairs are kept."""

import importlib.util
import json
import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from collection_data import make_matches
from conftest import ROOT

from dualrc import geometry
from dualrc.collection import coverage
from dualrc.collection.rotations import RotationGraph
from dualrc.collection.store import MatchStore
from dualrc.collection.trusted import TrustedPairs, chained_pose
from dualrc.collection.two_view_geometry import PairCheck, TwoViews, load_pair
from dualrc.collection.verification import verify_pairs
from dualrc.geometry import Camera, cam1_from_cam0, fundamental_from_pose, sampson_distance_px, transform_points
from dualrc.scenes import look_at

SIZE = (640, 480)
# Half a turn about the vertical axis.
TURN = np.diag([-1.0, -1.0, 1.0])


def courtyard(count=12, fov_deg=90.0):
    """Return points (n, 3) of round walls with some relief, and cameras inside that look outward."""
    rng = np.random.default_rng(0)
    angle, distance = rng.uniform(0, np.pi, 5000), rng.uniform(9, 12, 5000)
    half = np.column_stack([distance * np.cos(angle), distance * np.sin(angle), rng.uniform(-3, 5, 5000)])
    cameras = {}
    for number, place in enumerate(np.linspace(0, 2 * np.pi, count, endpoint=False)):
        outward = np.array([np.cos(place), np.sin(place), 0])
        beside = np.array([-np.sin(place), np.cos(place), 0])
        eye = 3 * outward + rng.uniform(-0.5, 0.5) * beside + np.array([0, 0, rng.uniform(0, 1)])
        view = look_at(eye, eye + outward + rng.uniform(-0.1, 0.1) * beside, size=SIZE, fov_deg=fov_deg)
        cameras[f"{number:02}.jpg"] = Camera(
            width=SIZE[0], height=SIZE[1], K=view.K, cam_from_world=view.cam_from_world, source="file"
        )
    return np.concatenate([half, half @ TURN.T]), cameras


def see(camera, xyz):
    """Project points to an image; NaN outside of it."""
    pixels = camera.project(transform_points(camera.cam_from_world, xyz))
    inside = ((pixels >= 0) & (pixels <= np.array(SIZE) - 1)).all(1)
    return np.where(inside[:, None], pixels, np.nan)


def pair_matches(rng, camera0, camera1, xyz, wrong_share, count=600):
    """Return matches with small noise, and random wrong matches; points must be visible in both images."""
    here, there = see(camera0, xyz), see(camera1, xyz)
    # The first points come first in every pair, because some places are always easier to match.
    both = np.flatnonzero(np.isfinite(here + there).all(1))[: round((1 - wrong_share) * count)]
    noise = 0.1 * rng.standard_normal((2, len(both), 2))
    wrong = rng.uniform(0, np.array(SIZE) - 1, (2, count - len(both), 2))
    points0, points1 = (
        np.concatenate([side[both] + noise[k], wrong[k]]).astype(np.float32) for k, side in enumerate((here, there))
    )
    scores = np.concatenate([rng.uniform(0.3, 1, len(both)), rng.uniform(0, 0.3, len(wrong[0]))]).astype(np.float32)
    return make_matches(points0, points1, scores, size=SIZE)


def fill(path, xyz, cameras, *, alike=0.75, true=0.1, changed=None):
    """Fill a store in which opposite images have matches between equal walls."""
    rng, store, kinds = np.random.default_rng(1), MatchStore(path, {}), {}
    names, half = list(cameras), len(cameras) // 2
    for name0, name1 in combinations(names, 2):
        apart = (names.index(name1) - names.index(name0)) % len(names)
        apart = min(apart, len(names) - apart)
        if apart >= half - 1:
            # The opposite side, as image 1 would see it in a courtyard that is rotated by half a turn.
            turned = cameras[name1].cam_from_world @ np.block([[TURN, np.zeros((3, 1))], [np.zeros((1, 3)), 1]])
            other = Camera(width=SIZE[0], height=SIZE[1], K=cameras[name1].K, cam_from_world=turned)
            matches, kinds[name0, name1] = pair_matches(rng, cameras[name0], other, xyz, alike), "alike"
        else:
            wrong = (changed or {}).get((name0, name1), true if apart < 3 else 1.0)
            matches = pair_matches(rng, cameras[name0], cameras[name1], xyz, wrong)
            seen = np.isfinite(see(cameras[name0], xyz) + see(cameras[name1], xyz)).all(1).sum()
            kinds[name0, name1] = "true" if wrong < 1 and seen > 80 else "nothing"
        store.put(name0, name1, matches)
    return store, kinds


def true_share(store, check, cameras):
    camera0, camera1 = (cameras[name] for name in check.names)
    F = fundamental_from_pose(cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world), camera0, camera1)
    matches = load_pair(store, check.names)
    return np.mean(sampson_distance_px(F, matches.points0, matches.points1)[check.inlier_flags()] < 3)


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    xyz, cameras = courtyard()
    # A true pair with few correct matches, which only other pairs can verify.
    hard = {("00.jpg", "02.jpg"): 0.85}
    store, kinds = fill(tmp_path_factory.mktemp("courtyard") / "m.sqlite", xyz, cameras, changed=hard)
    with store:
        yield store, kinds, cameras, verify_pairs(store, store.names(), cameras)


def test_images_of_opposite_walls_that_look_alike_are_no_pair(verified):
    store, kinds, cameras, found = verified
    alike = [found.checks[names] for names, kind in kinds.items() if kind == "alike"]
    # Inlier counts alone would accept them.
    assert len(alike) >= 10 and all(check.inliers > 90 for check in alike)
    assert not any(check.kept for check in alike)
    assert all(true_share(store, check, cameras) > 0.9 for check in found.kept)


def test_true_pairs_are_kept_also_if_most_of_their_matches_are_wrong(verified):
    store, kinds, cameras, found = verified
    assert [names for names, kind in kinds.items() if kind == "true" and not found.checks[names].kept] == []
    hard = found.checks["00.jpg", "02.jpg"]
    assert hard.kept and hard.share < 0.3 and true_share(store, hard, cameras) > 0.9


def test_every_dropped_pair_says_why(verified):
    *_, found = verified
    assert len(found.kept) + len(found.dropped) == len(found.checks) == 66
    assert all(check.cause and check.reason for check in found.dropped)
    summary = found.summary()
    assert summary.pairs == 66 and summary.kept + sum(summary.dropped.values()) == 66
    assert summary.dropped["other pairs contradict its rotation"] >= 10 and summary.look_alikes == 0
    assert "differs by" in next(check.reason for check in found.dropped if "rotation" in check.cause)
    written = json.loads(json.dumps([check.to_dict() for check in found.checks.values()]))
    assert {"name0", "name1", "kept", "cause", "reason", "inliers", "pair_score"} <= written[0].keys()


def test_unknown_focal_lengths_are_found_before_pairs_are_judged(tmp_path):
    xyz, cameras = courtyard()
    guessed = {name: Camera.from_focal(SIZE, 1.2 * 640, source="guess") for name in cameras}
    with fill(tmp_path / "m.sqlite", xyz, cameras)[0] as store:
        found = verify_pairs(store, store.names(), guessed)
        shares = [true_share(store, check, cameras) for check in found.kept]
    truth = cameras["00.jpg"].focal_px
    assert abs(truth / (1.2 * 640) - 1) > 0.3
    assert found.cameras["00.jpg"].focal_px == pytest.approx(truth, rel=0.03)
    assert found.cameras["00.jpg"].source == "guess"
    assert len(shares) >= 20 and min(shares) > 0.9


def street():
    """Return points (n, 3) of two walls of three houses, the house in both middles, and cameras."""
    rng = np.random.default_rng(0)
    houses = [rng.uniform((-3, -3, 6), (3, 3, 7), (700, 3)) for _ in range(5)]
    # The walls are far apart.
    walls = []
    for wall, row in enumerate(((1, 0, 2), (3, 0, 4))):
        moves = [np.array([6 * place + 1000 * wall, 0, 0]) for place in (-1, 0, 1)]
        points = np.concatenate([houses[number] + move for number, move in zip(row, moves, strict=True)])
        walls.append(rng.permutation(points))
    cameras = {}
    for number in range(6):
        center = np.array([(number % 3) - 1 + 1000 * (number // 3), 0.2 * number, 0])
        pose = np.column_stack([np.eye(3), -center])
        K = np.array([[250.0, 0, 320], [0, 250, 240], [0, 0, 1]])
        cameras[f"{number}.jpg"] = Camera(width=640, height=480, K=K, cam_from_world=pose, source="file")
    return walls, houses[0], cameras


def test_copies_of_a_house_among_other_houses_are_no_pair(tmp_path):
    walls, house, cameras = street()
    rng, names = np.random.default_rng(0), list(cameras)
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        for (i, name0), (j, name1) in combinations(enumerate(names), 2):
            camera0, camera1 = cameras[name0], cameras[name1]
            if i // 3 == j // 3:
                store.put(name0, name1, pair_matches(rng, camera0, camera1, walls[i // 3], 0.1))
            else:
                # The house in the middle is the same, and its copy has no other matches.
                near = camera1.cam_from_world + np.column_stack([np.zeros((3, 3)), [1000, 0, 0]])
                moved = Camera(width=640, height=480, K=camera1.K, cam_from_world=near)
                store.put(name0, name1, pair_matches(rng, camera0, moved, house, 0.1, count=500))
        found = verify_pairs(store, store.names(), cameras)
    copies = [check for check in found.checks.values() if (check.names[0] < "3.jpg") != (check.names[1] < "3.jpg")]
    assert len(copies) == 9 and all(check.share > 0.8 and check.together > 0.8 for check in copies)
    assert not any(check.kept for check in copies) and max(check.cover for check in copies) < 0.7
    assert len(found.kept) == 6 and min(check.cover for check in found.kept) > 0.9
    assert found.summary().look_alikes == 9


def test_coverage_of_what_both_images_show():
    walls, _, cameras = street()
    camera0, camera1 = cameras["0.jpg"], cameras["2.jpg"]
    pose = cam1_from_cam0(camera0.cam_from_world, camera1.cam_from_world)
    pixels = np.stack([see(camera0, walls[0]), see(camera1, walls[0])])
    both = np.isfinite(pixels).all((0, 2))
    cells = [coverage.cells_of(side[np.isfinite(side).all(1)], SIZE) > 0 for side in pixels]
    nothing = np.zeros_like(cells[0])

    def cover(rows, cells0=cells[0], cells1=cells[1]):
        matches = make_matches(pixels[0][rows].astype(np.float32), pixels[1][rows].astype(np.float32), size=SIZE)
        return coverage.cover(matches, pose, camera0, camera1, cells0, cells1)

    # Matches end where one of the images ends.
    assert cover(both) > 0.95
    left = both & (pixels[0][:, 0] < np.median(pixels[0][both, 0]))
    assert cover(left) == pytest.approx(0.5, abs=0.1)
    # Other pairs match nothing there.
    assert cover(left, nothing) == cover(left, cells1=nothing) == 1.0


def test_the_pose_over_a_third_image():
    rng = np.random.default_rng(0)
    xyz = rng.uniform((-2, -2, 5), (2, 2, 9), (50, 3))
    eyes = ((0, 0, 0), (1, 0.5, 0), (-1, 1, 0.5))
    poses = [look_at(eye, (0, 0.2, 9), size=SIZE).cam_from_world for eye in eyes]
    rays = [points / points[:, 2:] for points in (transform_points(pose, xyz) for pose in poses)]
    first, second, wanted = (cam1_from_cam0(poses[a], poses[b]) for a, b in ((0, 1), (1, 2), (0, 2)))
    depths0, depths1, sines = geometry.ray_depths(first, rays[0], rays[1])
    assert np.allclose(depths0, transform_points(poses[0], xyz)[:, 2])
    assert np.allclose(depths1, transform_points(poses[1], xyz)[:, 2]) and (sines > 0).all()
    # The lengths of the translations of pairs are unknown.
    first[:, 3] /= np.linalg.norm(first[:, 3])
    second[:, 3] /= np.linalg.norm(second[:, 3])
    found = chained_pose(first, second, *rays)
    wanted[:, 3] /= np.linalg.norm(wanted[:, 3])
    assert np.allclose(found, wanted, atol=1e-6)
    assert chained_pose(first, second, *(each[:5] for each in rays)) is None


def four_views(tmp_path, special):
    """Return a store of four images of a relief in which a pair has matches of its own, and the cameras.

    `special`: function that returns the matches of 0.jpg and 1.jpg, which have two third images.
    """
    rng, store = np.random.default_rng(0), MatchStore(tmp_path / "m.sqlite", {})
    xyz, cameras = rng.uniform((-6, -4, 6), (6, 4, 9), (4000, 3)), {}
    for number, (x, y) in enumerate(((-1, 0), (1, 0.2), (-0.3, -0.8), (0.4, 0.9))):
        pose = np.column_stack([np.eye(3), [-x, -y, 0]])
        K = np.array([[320.0, 0, 319.5], [0, 320, 239.5], [0, 0, 1]])
        cameras[f"{number}.jpg"] = Camera(width=640, height=480, K=K, cam_from_world=pose, source="file")
    for name0, name1 in combinations(cameras, 2):
        if (name0, name1) == ("0.jpg", "1.jpg"):
            store.put(name0, name1, special(rng, xyz, cameras[name0], cameras[name1]))
        else:
            store.put(name0, name1, pair_matches(rng, cameras[name0], cameras[name1], xyz, 0.05, count=1200))
    return store, cameras


def moved_matches(rng, camera0, camera1, xyz, move, wrong):
    """Return matches whose positions in image 1 are moved by `move` (n, 2), and `wrong` random ones."""
    points0, points1 = (see(camera, xyz) for camera in (camera0, camera1))
    random = rng.uniform(0, np.array(SIZE) - 1, (2, wrong, 2))
    return make_matches(
        np.concatenate([points0, random[0]]).astype(np.float32),
        np.concatenate([points1 + move, random[1]]).astype(np.float32),
        size=SIZE,
    )


def seen_by_both(xyz, camera0, camera1):
    """Return the points (n, 3) that both images show."""
    return xyz[np.isfinite(see(camera0, xyz) + see(camera1, xyz)).all(1)]


def test_inexact_matches_are_inliers_of_the_poses_over_third_images(tmp_path):
    """Too few matches of the pair are exact for a geometry of its own."""

    def inexact(rng, xyz, camera0, camera1):
        points = seen_by_both(xyz, camera0, camera1)[:50]
        return moved_matches(rng, camera0, camera1, points, 3 * rng.standard_normal((50, 2)), wrong=300)

    store, cameras = four_views(tmp_path, inexact)
    with store:
        check = verify_pairs(store, store.names(), cameras).checks["0.jpg", "1.jpg"]
        assert check.kept and check.confirmed_only and check.inliers >= 30
        assert check.inlier_flags()[50:].sum() <= 2
    wanted = cam1_from_cam0(cameras["0.jpg"].cam_from_world, cameras["1.jpg"].cam_from_world)
    assert geometry.direction_error_deg(check.pose[:, 3], wanted[:, 3]) < 1


def test_matches_that_contradict_the_poses_over_third_images_are_no_inliers(tmp_path):
    """Cycles are inexact: they confirm matches that are all 7 pixels off, and have a geometry of their own."""

    def shifted(rng, xyz, camera0, camera1):
        points = seen_by_both(xyz, camera0, camera1)[:120]
        return moved_matches(rng, camera0, camera1, points, (0, 7), wrong=300)

    store, cameras = four_views(tmp_path, shifted)
    with store:
        found = verify_pairs(store, store.names(), cameras)
    check = found.checks["0.jpg", "1.jpg"]
    assert not check.kept and check.inliers < 30 and check.cause == "other pairs do not confirm it"
    assert len(found.kept) == 5


def test_a_geometry_that_most_confirmed_matches_contradict_is_replaced(tmp_path):
    """Most matches of the pair fit a camera that is tilted by one degree; most confirmed ones are exact."""
    tilt = np.deg2rad(1)
    R = np.array([[1, 0, 0], [0, np.cos(tilt), -np.sin(tilt)], [0, np.sin(tilt), np.cos(tilt)]])

    def half(rng, xyz, camera0, camera1):
        points = seen_by_both(xyz, camera0, camera1)
        middle = np.abs(see(camera0, points)[:, 1] - 240) < 100
        # Other pairs have only the first points.
        tilted = np.concatenate([points[middle][:120], points[middle][-330:]])
        wrong_camera1 = replace(camera1, cam_from_world=R @ camera1.cam_from_world)
        parts = [(points[~middle][:250], camera1), (tilted, wrong_camera1)]
        points0, points1 = (
            np.concatenate([see(camera or other, part) for part, other in parts]) for camera in (camera0, None)
        )
        return make_matches(points0.astype(np.float32), points1.astype(np.float32), size=SIZE)

    store, cameras = four_views(tmp_path, half)
    names = "0.jpg", "1.jpg"
    with store:
        own = TwoViews(store, [names], cameras).estimate(names)
        check = verify_pairs(store, store.names(), cameras).checks[names]
        assert own.clear and true_share(store, own, cameras) < 0.2
        assert check.kept and check.inliers >= 240 and true_share(store, check, cameras) > 0.95


def test_trusted_pairs_use_the_inliers_that_they_have_now(tmp_path):
    names = ("a", "b")
    points = np.array([[10.0, 10], [100, 100]], np.float32)
    camera = Camera.from_focal(SIZE, 500)
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put(*names, make_matches(points, points + 5, size=SIZE))
        trusted = TrustedPairs(TwoViews(store, [names], dict.fromkeys(names, camera)))
        check = PairCheck(names=names, matches=2, inliers=1, flags=np.packbits([True, False]))
        trusted.add(check)
        assert np.allclose(trusted.carry(points, "a", "b"), [[15, 15], [np.nan, np.nan]], equal_nan=True)
        assert np.allclose(trusted.carry(points + 5, "b", "a"), [[10, 10], [np.nan, np.nan]], equal_nan=True)
        trusted.remove(names)
        trusted.add(replace(check, flags=np.packbits([False, True])))
        assert np.allclose(trusted.carry(points, "a", "b"), [[np.nan, np.nan], [105, 105]], equal_nan=True)
        assert np.allclose(trusted.carry(points + 5, "b", "a"), [[np.nan, np.nan], [100, 100]], equal_nan=True)
        # Other inliers of a pair that is still trusted.
        trusted.add(replace(check, inliers=2, flags=np.packbits([True, True])))
        assert np.allclose(trusted.carry(points, "a", "b"), points + 5)
    assert trusted.third_images(("a", "c")) == []


@pytest.mark.parametrize(("wrong", "kept"), [(0.2, True), (0.97, False)])
def test_two_images_alone_are_a_pair_if_their_matches_are_clear(tmp_path, wrong, kept):
    xyz, cameras = courtyard()
    two = dict(list(cameras.items())[:2])
    matches = pair_matches(np.random.default_rng(0), *two.values(), xyz, wrong)
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put(*two, matches)
        (check,) = verify_pairs(store, store.names(), two).checks.values()
    assert check.kept == kept and bool(check.cause) != kept


def test_pairs_without_matches_are_dropped(tmp_path):
    _, cameras = courtyard(count=3)
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("00.jpg", "01.jpg", make_matches(np.zeros((0, 2)), np.zeros((0, 2)), size=SIZE))
        store.put("01.jpg", "02.jpg", make_matches(np.full((40, 2), 5.0), np.full((40, 2), 5.0), size=SIZE))
        found = verify_pairs(store, store.names(), cameras)
    assert not found.kept and all(check.cause == "too few matches agree" for check in found.dropped[:1])


def test_rotations_fit_all_pairs_but_wrong_ones():
    from scipy.spatial.transform import Rotation

    rng = np.random.default_rng(0)
    rotations = Rotation.random(8, random_state=0).as_matrix()
    edges = {}
    for a, b in combinations(range(7), 2):
        noise = Rotation.from_rotvec(0.01 * rng.standard_normal(3)).as_matrix()
        edges[str(a), str(b)] = noise @ rotations[b] @ rotations[a].T, 1.0
    edges["1", "5"] = Rotation.random(random_state=3).as_matrix(), 1.5
    graph = RotationGraph(edges)
    for a, b in combinations(range(7), 2):
        wanted = rotations[b] @ rotations[a].T
        assert geometry.rotation_error_deg(graph.between(str(a), str(b)), wanted) < 1.0
    assert graph.between("0", "7") is None and graph.between("7", "7") is None
    assert RotationGraph({}).between("0", "1") is None


def test_the_graph_of_rotations_has_the_indices_that_every_scipy_reads(monkeypatch):
    csgraph = pytest.importorskip("scipy.sparse.csgraph")
    spanning_tree = csgraph.minimum_spanning_tree

    def strict(graph):
        """Like SciPy 1.13, which raises an error for int64 indices."""
        assert graph.tocsr().indices.dtype == np.int32
        return spanning_tree(graph)

    monkeypatch.setattr(csgraph, "minimum_spanning_tree", strict)
    assert np.allclose(RotationGraph({("0", "1"): (TURN, 1.0)}).between("0", "1"), TURN)


def test_a_direction_for_a_known_rotation():
    rng = np.random.default_rng(0)
    xyz = rng.uniform((-2, -2, 4), (2, 2, 9), (300, 3))
    pose = np.column_stack([look_at((1, 2, 0.5), (0, 0, 9), size=SIZE).cam_from_world[:, :3], [0.6, 0.0, 0.8]])
    # In front of camera 1; camera 0 has the same orientation.
    xyz = xyz @ pose[:, :3]
    seen = [transform_points(p, xyz) for p in (np.column_stack([pose[:, :3], np.zeros(3)]), pose)]
    rays0, rays1 = (points / points[:, 2:] for points in seen)
    rays1[:100, :2] += 0.3 * rng.standard_normal((100, 2))
    found = geometry.estimate_direction(rays0, rays1, np.eye(3), 1e-3)
    assert geometry.direction_error_deg(found, pose[:, 3]) < 0.05 and found @ pose[:, 3] > 0
    assert geometry.estimate_direction(rays0[:3], rays1[:3], np.eye(3), 1e-3) is None


def test_one_focal_length_of_many_pairs_and_none_of_few():
    _, cameras = courtyard()
    views = list(cameras.values())[:5]
    fundamentals = [
        fundamental_from_pose(cam1_from_cam0(a.cam_from_world, b.cam_from_world), a, b)
        for a, b in combinations(views, 2)
    ]
    assert geometry.shared_focal_px(fundamentals, SIZE) == pytest.approx(views[0].focal_px, rel=0.02)
    assert geometry.shared_focal_px(fundamentals[:2], SIZE) is None


def test_cameras_that_look_at_one_point_leave_the_focal_length_open():
    """If the optical axes intersect, every focal length fits; noise in F must not select one."""
    K = np.array([[350.0, 0, (SIZE[0] - 1) / 2], [0, 350, (SIZE[1] - 1) / 2], [0, 0, 1]])
    poses, fundamentals, random = [], [], np.random.default_rng(0)
    for angle in np.linspace(-0.4, 0.4, 5):
        c, s = np.cos(angle), np.sin(angle)
        # On a circle of radius 10 around the point, facing it.
        poses.append(np.array([[c, 0, s, 0], [0, 1, 0, 0], [-s, 0, c, 10]]))
    for pose0, pose1 in combinations(poses, 2):
        E = geometry.essential_from_pose(cam1_from_cam0(pose0, pose1))
        F = np.linalg.inv(K).T @ E @ np.linalg.inv(K)
        fundamentals.append(F * (1 + 0.01 * random.standard_normal((3, 3))))
    assert geometry.shared_focal_px(fundamentals, SIZE) is None


@pytest.fixture
def script(monkeypatch):
    """benchmarks/reconstruct.py as a module."""
    return load_script("reconstruct")


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rendered_courtyards_have_the_layout_of_the_benchmarks(tmp_path, script):
    load_script("courtyard").write_scene(tmp_path / "courtyard-1", 1, 3, (64, 48), 70.0, texture_size=32)
    ((folder, cameras),) = script.find_scenes(tmp_path).items()
    assert folder.name == "courtyard-1" and list(cameras) == ["00.png", "01.png", "02.png"]
    axes = [camera.cam_from_world[2, :3] for camera in cameras.values()]
    # They look all around, each outward from the middle.
    assert min(a @ b for a, b in combinations(axes, 2)) < 0
    assert all(
        axis @ (-camera.cam_from_world[:, :3].T @ camera.cam_from_world[:, 3]) > 0
        for axis, camera in zip(axes, cameras.values(), strict=True)
    )


def test_the_benchmark_refuses_a_layout_that_it_does_not_know(tmp_path, script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reconstruct.py", str(tmp_path), "--work", str(tmp_path / "work")])
    with pytest.raises(SystemExit, match=r"No scene was found: .* must have scenes as SCENE/images"):
        script.main()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cameras.json").write_text("{}")
    with pytest.raises(SystemExit, match="has no folder named images"):
        script.main()
