"""Tests of many pairs: in order, in batches, each image read once, and errors limited to their pair."""

import itertools
import threading

import numpy as np
import pytest
import torch
from conftest import View, match_set, texture, tiny_matcher
from PIL import Image

from dualrc.errors import ImageError
from dualrc.image import read
from dualrc.matcher import many, prefetch
from dualrc.matcher.budget import NoMemoryError
from dualrc.model.dualrc import Features

VIEW0, VIEW1 = View(203, 150, (60, 80)), View(190, 161, (66.4, 75.2), (0.95, 0.97))


@pytest.mark.parametrize("batch", [1, 3])
def test_many_pairs_come_in_order(tmp_path, batch, monkeypatch):
    matcher = tiny_matcher()
    monkeypatch.setattr(many, "batch_size", lambda matcher, pair: batch)  # larger than 1 only where there is a GPU
    sizes = [(96, 64), (96, 64), (64, 64), (96, 64), (96, 64)]
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        Image.fromarray(texture(number, *size)).save(path)
    pairs = [
        (paths[0], paths[1]),
        (paths[1], paths[3]),
        (paths[3], paths[4]),
        (paths[4], paths[0]),
        (paths[0], paths[2]),
    ]
    pairs.append((str(paths[2]), Image.open(paths[4])))
    results = list(matcher.match_many(iter(pairs)))
    pairs[-1][1].close()
    assert len(results) == 6
    for pair, result in zip(pairs[:5], results, strict=False):
        alone = matcher.match(*pair)
        assert match_set(result) == match_set(alone) and len(alone) > 0
        assert result.scores == pytest.approx(alone.scores, abs=1e-5)


@pytest.mark.parametrize("beside", [None, "features", "no memory"])
def test_many_pairs_of_different_sizes_are_matched_as_single_ones(beside, monkeypatch):
    """Nothing of one size may leak into another, in whatever order they come.

    Beside a GPU, the images of the next pair are extracted while a pair is matched, if there is enough memory.
    """
    matcher, scene, extracted = tiny_matcher(), texture(0, 160, 144), list[int]()
    if beside:
        monkeypatch.setattr(many, "batch_size", lambda matcher, pair: 3)
        extract = matcher.extract

        def extract_or_fail(items):
            items = [item for item in items if item.features is None]
            extracted.append(len(items))
            if beside == "no memory" and len(extracted) == 2:
                raise NoMemoryError
            extract(items)

        monkeypatch.setattr(matcher, "extract", extract_or_fail)
    sizes = [(96, 64), (49, 131), (144, 160), (64, 64), (97, 65), (96, 64), (143, 33)]
    pairs = [(scene[:h0, :w0], scene[3 : h1 + 3, :w1]) for (h0, w0), (h1, w1) in itertools.pairwise(sizes)]
    found = list(matcher.match_many(pairs))
    # The first pair, and the next one beside it. Each later pair is extracted already, and the next one beside it.
    expected = {None: [], "features": [2, 2, 0, 2, 0, 2], "no memory": [2, 2, 2, 2, 0, 2]}
    assert extracted[:6] == expected[beside]
    for pair, result in zip(pairs, found, strict=True):
        alone = matcher.match(*pair)
        assert len(alone) > 0 and result.info == alone.info
        for name in ("points0", "points1", "scores"):
            assert np.array_equal(getattr(result, name), getattr(alone, name))


def test_many_reads_each_image_once(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        Image.fromarray(texture(number, 64, 48)).save(path)
    calls = []
    monkeypatch.setattr(prefetch, "read", lambda path: calls.append(path) or read(path))
    matcher = tiny_matcher()
    assert len(list(matcher.match_many([(paths[0], paths[1]), (paths[0], paths[2]), (paths[1], paths[2])]))) == 3
    assert calls == [paths[0], paths[1], paths[2]]
    calls.clear()
    small = tiny_matcher(max_memory=0.1)  # only two are kept
    assert len(list(small.match_many([(paths[0], paths[1]), (paths[0], paths[2]), (paths[1], paths[2])]))) == 3
    assert len(calls) == 4


def test_many_reads_ahead_beside_a_gpu(tmp_path, monkeypatch):
    """Threads read images ahead, and images of one size are extracted and matched together."""
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for number, path in enumerate(paths):
        Image.fromarray(texture(number, 64 if number < 3 else 96, 48)).save(path)
    paths.append(tmp_path / "none.png")
    pairs = [*itertools.combinations(paths, 2)]
    matcher = tiny_matcher()
    expected = list(matcher.match_many(pairs, errors="empty"))
    monkeypatch.setattr(many, "pairs_ahead", lambda matcher: 3)
    monkeypatch.setattr(many, "batch_size", lambda matcher, pair: 3)
    readers = []
    monkeypatch.setattr(prefetch, "read", lambda path: readers.append(threading.current_thread().name) or read(path))
    found = list(matcher.match_many(iter(pairs), errors="empty"))
    assert any(name.startswith("read") for name in readers)
    assert [len(f) for f in found] == [len(f) for f in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.info.get("error") == other.info.get("error")
        assert one.points1 == pytest.approx(other.points1, abs=1e-3)


def test_many_pairs_fall_back_to_single_ones(monkeypatch):
    """If a batch does not fit into memory, its pairs are matched one by one."""
    matcher = tiny_matcher()
    images = [texture(number, 64, 48) for number in range(4)]
    pairs = [(images[0], image) for image in images[1:]]
    expected = list(matcher.match_many(pairs))
    match, sizes = matcher.network.match, []

    def short_of_memory(features0, features1, **rest):
        sizes.append(len(features0.coarse))
        if sizes[-1] > 1:
            raise MemoryError
        return match(features0, features1, **rest)

    monkeypatch.setattr(matcher.network, "match", short_of_memory)
    monkeypatch.setattr(many, "batch_size", lambda matcher, pair: 3)
    found = list(matcher.match_many(pairs))
    assert sizes == [3, 1, 1, 1]
    assert [len(f) for f in found] == [len(f) for f in expected]


def test_images_come_into_view_once():
    seen = list(prefetch.look_ahead(range(5), 2))
    assert seen == [(0, [0, 1, 2]), (1, [3]), (2, [4]), (3, []), (4, [])]
    assert list(prefetch.look_ahead([], 2)) == []
    assert list(prefetch.look_ahead([7, 8], 0)) == [(7, [7]), (8, [8])]


def test_many_takes_features_and_their_masks(oracle):
    images = VIEW0.image(1), VIEW1.image(2)
    mask = np.zeros((150, 203), bool)
    mask[:, :100] = True
    features = [oracle.features(images[0], mask=mask), oracle.features(images[1])]
    (masked,) = oracle.match_many([tuple(features)])
    assert 0 < len(masked) < len(oracle.match(*images)) and (masked.points0[:, 0] < 99.5).all()


def test_many_with_a_bad_image(tmp_path):
    matcher = tiny_matcher()
    good, bad = texture(0, 64, 48), tmp_path / "none.png"
    pairs = [(good, good), (good, bad), (good, good)]
    results = list(matcher.match_many(pairs, errors="empty"))
    assert [len(r) > 0 for r in results] == [True, False, True]
    assert "none.png does not exist" in results[1].info["error"] and "error" not in results[0].info
    with pytest.raises(ImageError, match=r"none\.png"):
        list(matcher.match_many(pairs))
    assert list(matcher.match_many([])) == []


def test_what_came_before_a_broken_image_is_not_lost(oracle, tmp_path):
    images = VIEW0.image(1), VIEW1.image(2)
    (tmp_path / "text.jpg").write_text("nothing")
    results = oracle.match_many([images, images, (images[0], tmp_path / "text.jpg"), images])
    assert len(next(results)) == len(next(results)) > 0
    with pytest.raises(ImageError, match=r"text\.jpg"):
        next(results)


def stacked(features: list) -> Features:
    return Features(
        coarse=torch.cat([f.maps.coarse for f in features]),
        fine=torch.cat([f.maps.fine for f in features]),
        light=torch.cat([f.maps.light for f in features]),
    )


def test_a_stacked_batch_is_its_pairs(oracle):
    views = [View(128, 96, (60 + 7 * i, 80 - 3 * i)) for i in range(4)]
    features = [oracle.features(view.image(i)) for i, view in enumerate(views)]
    found = oracle.network.match(stacked(features[:3]), stacked(features[1:]))
    assert found.pair.tolist() == sorted(found.pair.tolist())
    for number in range(3):
        alone = oracle.network.match(features[number].maps, features[number + 1].maps)
        chosen = found.pair == number
        rows = torch.cat([found.points0, found.points1], 1)[chosen]
        single = torch.cat([alone.points0, alone.points1], 1)
        ours, theirs = ({tuple(row) for row in (1000 * r).round().long().tolist()} for r in (rows, single))
        assert len(ours & theirs) >= 0.99 * len(ours | theirs)  # to a thousandth of a pixel
        assert torch.allclose(found.scores[chosen].sort().values, alone.scores.sort().values, atol=1e-5)
    few = oracle.network.match(stacked(features[:3]), stacked(features[1:]), top=7)
    assert few.pair.bincount().tolist() == [7, 7, 7]
