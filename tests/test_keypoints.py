"""Tests of keypoints: points that differ between pairs become one point per image."""

import numpy as np
import pytest
from collection_data import apart, fill_store, make_matches, make_scene

from dualrc.collection.keypoints import MergeConfig, _cluster, merge
from dualrc.collection.store import MatchStore
from dualrc.collection.tracks import Tracks
from dualrc.errors import ConfigError, DataError

NAMES = ("a.jpg", "b.jpg", "c.jpg")


def test_three_images_give_tracks_of_three(tmp_path):
    scene = apart(make_scene(NAMES), 6)
    count = len(scene.xyz)
    assert count > 100
    with fill_store(tmp_path / "m.sqlite", scene, noise=0.2) as store:
        merged = merge(store)
        next_of = {names: dict(merged.indexed(*names).indices.tolist()) for names in merged.pairs}
    assert all(len(merged.keypoints[name]) == count for name in NAMES)
    assert min(len(found) for found in next_of.values()) > 0.97 * count
    closed = sum(
        next_of["b.jpg", "c.jpg"].get(second) == next_of["a.jpg", "c.jpg"].get(first, -1)
        for first, second in next_of["a.jpg", "b.jpg"].items()
    )
    assert closed > 0.95 * count


@pytest.mark.parametrize(("sweeps", "share"), [(0, 0.6), (3, 0.9)])
def test_places_are_better_than_those_of_single_matches(tmp_path, sweeps, share):
    """Five images: four matches meet in a keypoint. Sweeps also use the positions in the other images."""
    noise = 0.2
    scene = apart(make_scene("abcde"), 6)
    with fill_store(tmp_path / "m.sqlite", scene, noise) as store:
        merged = merge(store, MergeConfig(sweeps=sweeps))
    squares = []
    for name, pixels in scene.pixels.items():
        squares.append((np.linalg.norm(merged.keypoints[name].points[:, None] - pixels, axis=2) ** 2).min(1))
    # A single match has an error of noise * sqrt(2), over x and y together.
    assert np.sqrt(np.mean(np.concatenate(squares))) < share * noise * np.sqrt(2)


def test_each_pair_on_other_points_of_a_surface_still_gives_one_point(tmp_path):
    """Matches of a plane, shifted differently in each pair: the keypoints of a track must be one point of the plane."""
    rng = np.random.default_rng(1)
    grid = np.stack(np.meshgrid(np.arange(20, 300, 6.0), np.arange(20, 220, 6.0)), axis=-1).reshape(-1, 2)
    maps = {
        "a.jpg": np.eye(3),
        "b.jpg": np.array([[1.2, 0.1, -9], [-0.1, 1.1, 4], [2e-4, 1e-4, 1]]),
        "c.jpg": np.array([[0.9, -0.2, 30], [0.15, 1.0, -6], [-1e-4, 2e-4, 1]]),
    }

    def place(name, points):
        moved = np.c_[points, np.ones(len(points))] @ maps[name].T
        return moved[:, :2] / moved[:, 2:]

    apart_px = {}
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        for name0, name1 in (("a.jpg", "b.jpg"), ("a.jpg", "c.jpg"), ("b.jpg", "c.jpg")):
            points = grid + rng.uniform(-0.8, 0.8, grid.shape)
            store.put(name0, name1, make_matches(place(name0, points), place(name1, points)))
        for sweeps in (0, 3):
            merged = merge(store, MergeConfig(sweeps=sweeps))
            off = []
            for names in merged.pairs:
                on_plane = [
                    place_back(maps[name], points)
                    for name, points in zip(names, matched_points(merged, *names), strict=True)
                ]
                off.append(np.linalg.norm(on_plane[0] - on_plane[1], axis=1))
            apart_px[sweeps] = np.median(np.concatenate(off))
    assert apart_px[0] > 0.3
    assert apart_px[3] < 0.15 * apart_px[0]


def matched_points(merged, *names):
    """Return the keypoints of both images that the matches of a pair join."""
    indices = merged.indexed(*names).indices
    return [merged.keypoints[name].points[indices[:, side]] for side, name in enumerate(names)]


def place_back(matrix, points):
    moved = np.c_[points, np.ones(len(points))] @ np.linalg.inv(matrix).T
    return moved[:, :2] / moved[:, 2:]


def test_chains_do_not_melt_into_one():
    chain = np.stack([np.arange(0, 100, 0.5), np.full(200, 7.0)], axis=1)
    centers = _cluster(chain, np.ones(200), radius=2.0)
    assert 100 / 5 <= len(centers) <= 100 / 2
    assert np.diff(np.sort(centers[:, 0])).min() > 1
    assert np.abs(centers[:, 1] - 7).max() < 0.01


def test_a_cluster_is_where_its_points_are_and_not_on_a_grid():
    rng = np.random.default_rng(0)
    truth = np.array([[10.37, 20.91], [15.83, 20.13], [40.2, 3.77]])
    points = np.repeat(truth, 400, axis=0) + 0.3 * rng.standard_normal((1200, 2))
    centers = _cluster(points, np.ones(1200), radius=2.0)
    assert len(centers) == 3
    assert np.linalg.norm(centers[:, None] - truth, axis=2).min(0).max() < 0.06


def test_matches_are_one_to_one_and_the_best_wins(tmp_path):
    scene = apart(make_scene(("a", "b"), count=100), 12)
    here, there = scene.pixels["a"], scene.pixels["b"]
    rows = len(here)
    # A second match from a point near each point of the first image to the same place; every other one has a better
    # score.
    better = np.where(np.arange(rows) % 2 == 0, 0.9, 0.1)
    points0, points1 = np.concatenate([here, here + 0.3]), np.concatenate([there, there + 0.3])
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a", "b", make_matches(points0, points1, np.concatenate([np.full(rows, 0.5), better])))
        merged = merge(store)
        found = merged.indexed("a", "b")
        assert all(len(np.unique(column)) == len(column) for column in found.indices.T)
        assert len(found.indices) == rows
        assert np.allclose(found.scores, np.sort(np.maximum(better, 0.5))[::-1])


def test_wrong_matches_do_not_stay(tmp_path):
    scene = apart(make_scene(("a", "b"), count=200), 8)
    rng = np.random.default_rng(0)
    wrong = [rng.uniform(0, 240, (100, 2)) for _ in range(2)]
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        points = [np.concatenate([scene.pixels[name], stray]) for name, stray in zip("ab", wrong, strict=True)]
        store.put("a", "b", make_matches(*points))
        points0, _ = matched_points(merge(store), "a", "b")
    truth = scene.pixels["a"]
    right = np.linalg.norm(points0[:, None] - truth, axis=2).min(1) < 1.5
    assert right.sum() > 0.9 * len(truth) and (~right).sum() < 15


def test_an_empty_store_has_no_keypoints(tmp_path):
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        merged = merge(store)
        assert merged.keypoints == {} and merged.pairs == []
        statistics = merged.statistics()
    assert (statistics.keypoints, statistics.matches) == (0, 0)


def test_a_failed_pair_and_an_empty_one_leave_the_others_alone(tmp_path):
    scene = apart(make_scene(("a", "b"), count=100), 8)
    with fill_store(tmp_path / "m.sqlite", scene) as store:
        store.put("a", "broken", make_matches(np.zeros((0, 2)), np.zeros((0, 2)), error="broken can't be read"))
        store.put("b", "blank", make_matches(np.zeros((0, 2)), np.zeros((0, 2))))
        merged = merge(store)
        assert set(merged.keypoints) == {"a", "b", "blank"}
        assert merged.pairs == [("a", "b"), ("b", "blank")]
        assert len(merged.keypoints["blank"]) == 0
        assert len(merged.indexed("b", "blank").indices) == 0
        assert len(merged.indexed("a", "b").indices) == len(scene.xyz)


def test_a_pair_of_two_images_keeps_its_places(tmp_path):
    scene = apart(make_scene(("a", "b"), count=150), 8)
    with fill_store(tmp_path / "m.sqlite", scene) as store:
        points0, points1 = matched_points(merge(store), "a", "b")
    distances = np.linalg.norm(points0[:, None].astype(float) - scene.pixels["a"], axis=2)
    assert distances.min(1).max() < 0.02
    assert np.abs(points1 - scene.pixels["b"][distances.argmin(1)]).max() < 0.02


def test_a_pair_the_other_way_round_is_the_same_pair(tmp_path):
    scene = apart(make_scene(("a", "b"), count=200), 8)
    here, there = scene.pixels["a"], scene.pixels["b"]
    half = len(here) // 2
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a", "b", make_matches(here[:half], there[:half]))
        store.put("b", "a", make_matches(there[half:], here[half:]))
        merged = merge(store)
        assert merged.pairs == [("a", "b")]
        assert len(merged.indexed("a", "b").indices) == len(here)


def test_only_the_named_pairs_are_merged(tmp_path):
    with fill_store(tmp_path / "m.sqlite", apart(make_scene(NAMES, count=100), 8)) as store:
        merged = merge(store, pairs=[("a.jpg", "b.jpg"), ("a.jpg", "gone.jpg"), ("a.jpg", "b.jpg")])
    assert merged.pairs == [("a.jpg", "b.jpg")]
    assert set(merged.keypoints) == {"a.jpg", "b.jpg"}


def test_points_that_are_no_numbers_are_left_out(tmp_path):
    scene = apart(make_scene(("a", "b"), count=100), 8)
    here = scene.pixels["a"].copy()
    here[:5] = np.nan
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a", "b", make_matches(here, scene.pixels["b"]))
        assert len(merge(store).indexed("a", "b").indices) == len(here) - 5


def test_the_radius_follows_the_size_that_the_network_saw(tmp_path):
    scene = apart(make_scene(("a", "b"), count=50), 8)
    sizes = {"network_size0": [160, 112], "network_size1": [320, 240]}
    with MatchStore(tmp_path / "m.sqlite", {}) as store:
        store.put("a", "b", make_matches(scene.pixels["a"], scene.pixels["b"], **sizes))
        merged = merge(store, MergeConfig(radius=0.5))
    assert merged.keypoints["a"].radius_px == 4
    assert merged.keypoints["b"].radius_px == 2


def test_statistics_tell_how_far_points_moved(tmp_path):
    scene = apart(make_scene(NAMES, count=200), 8)
    with fill_store(tmp_path / "m.sqlite", scene, noise=0.2) as store:
        statistics = merge(store).statistics()
    assert statistics.keypoints == 3 * len(scene.xyz)
    assert 2.8 < statistics.images_per_keypoint <= 3
    assert 0.05 < statistics.moved_median_px < statistics.moved_95_px < 1


def test_two_runs_are_the_same(tmp_path):
    with fill_store(tmp_path / "m.sqlite", make_scene(NAMES, count=200), noise=0.2) as store:
        first, second = merge(store), merge(store)
    assert all(np.array_equal(first.keypoints[name].points, second.keypoints[name].points) for name in NAMES)


def test_a_pair_that_is_not_there_is_an_error(tmp_path):
    with fill_store(tmp_path / "m.sqlite", make_scene(("a", "b"))) as store, pytest.raises(DataError, match="match it"):
        merge(store).indexed("a", "z")


@pytest.mark.parametrize("settings", [{"radius": 0}, {"radius": 3}, {"max_error": -1}, {"sweeps": -1}])
def test_settings_without_meaning_are_refused(settings):
    with pytest.raises(ConfigError):
        MergeConfig(**settings)


def test_a_match_that_leads_past_its_keypoint_is_left_out(tmp_path):
    """Matches from a end near keypoints of b that all other pairs place elsewhere."""
    scene = apart(make_scene(("a", "b", "c", "d", "e")), 12)
    with fill_store(tmp_path / "m.sqlite", scene, noise=0.02) as store:
        pair = store.get("a", "b")
        moved = pair.points1.copy()
        moved[:10] += 0.9
        store.put("a", "b", make_matches(pair.points0, moved, pair.scores))
        before, after = (len(merge(store, MergeConfig(sweeps=sweeps)).indexed("a", "b").rows) for sweeps in (0, 3))
    assert before - 12 <= after <= before - 8


def joined_tracks(links):
    """Return the sets of keypoints (name, index) that links ((name, name), (n, 2)) connect."""
    track_of = {}
    for names, indices in links:
        for pair in indices.tolist():
            merged = set()
            for member in zip(names, pair, strict=True):
                merged |= track_of.get(member, {member})
            track_of.update(dict.fromkeys(merged, merged))
    return {id(track): track for track in track_of.values()}.values()


def test_a_link_between_two_points_of_one_image_is_refused():
    tracks = Tracks({"a": 3, "b": 2, "c": 2})
    assert tracks.join("a", "b", np.array([[0, 0], [1, 1]])).tolist() == [True, True]
    assert tracks.join("b", "c", np.array([[0, 0]])).tolist() == [True]
    # Over b and c, the second point of a would join the first one; the third is free.
    assert tracks.join("a", "c", np.array([[1, 0], [2, 1]])).tolist() == [False, True]
    assert tracks.join("a", "c", np.array([[0, 0]])).tolist() == [True]
    assert tracks.join("a", "b", np.zeros((0, 2), np.int64)).tolist() == []


def test_tracks_of_random_links_have_one_point_per_image_and_nothing_more_could_be_joined():
    rng = np.random.default_rng(0)
    names, count = "abcdef", 40
    tracks, kept, refused = Tracks(dict.fromkeys(names, count)), [], []
    for name0, name1 in [(i, j) for i in names for j in names if i < j]:
        here = rng.permutation(count)[:25]
        # Most links connect the same index.
        there = np.where(rng.random(25) < 0.8, here, rng.permutation(count)[:25])
        indices = np.stack([here, there], axis=1)[np.unique(there, return_index=True)[1]]
        agree = tracks.join(name0, name1, indices)
        kept.append(((name0, name1), indices[agree]))
        refused.append(((name0, name1), indices[~agree]))
    found = joined_tracks(kept)
    assert all(len({name for name, _ in track}) == len(track) for track in found)
    assert max(map(len, found)) == len(names)
    of = {member: track for track in found for member in track}
    for pair, indices in refused:
        for ends in (list(zip(pair, row, strict=True)) for row in indices.tolist()):
            first, second = (of.get(end, {end}) for end in ends)
            assert {name for name, _ in first} & {name for name, _ in second}


def test_no_track_of_merged_matches_has_two_points_of_an_image(tmp_path):
    """Ten matches of a pair are swapped; over the third image, each would join two points."""
    scene = apart(make_scene(NAMES), 12)
    with fill_store(tmp_path / "m.sqlite", scene, noise=0.02) as store:
        pair = store.get("a.jpg", "c.jpg")
        swapped = pair.points1.copy()
        swapped[:10] = pair.points1[9::-1]
        store.put("a.jpg", "c.jpg", make_matches(pair.points0, swapped, pair.scores))
        everything = {names: np.ones(len(scene.xyz), dtype=bool) for names in store.names()}
        links = {}
        for sweeps in (0, 3):
            merged = merge(store, MergeConfig(sweeps=sweeps), inliers=everything)
            links[sweeps] = [(names, merged.indexed(*names).indices) for names in merged.pairs]
    ambiguous = {
        sweeps: sum(len({name for name, _ in track}) < len(track) for track in joined_tracks(found))
        for sweeps, found in links.items()
    }
    assert ambiguous == {0: 5, 3: 0}
    assert sum(len(indices) for _, indices in links[3]) > 0.9 * 3 * len(scene.xyz)
