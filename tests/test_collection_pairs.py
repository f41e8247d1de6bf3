"""Tests of the choice and the order of pairs, and of workers that die."""

import itertools

import numpy as np
import pytest
from conftest import ROOT, texture

import dualrc
from dualrc.collection import pairs
from dualrc.collection.config import CollectionConfig
from dualrc.collection.executor import Event, carry_out
from dualrc.collection.plan import Plan, in_blocks, in_chunks
from dualrc.collection.retrieval import global_descriptor, most_similar
from dualrc.collection.worker import Failure
from dualrc.errors import ConfigError, DataError
from dualrc.image import find_images
from dualrc.matches import Matches

NAMES = [f"{number:02d}.jpg" for number in range(10)]


def test_images_of_a_folder(tmp_path):
    for name in (
        "b.JPG",
        "a/é ü.png",
        "a/b.jpg",
        "c/d/e.tiff",
        "note.txt",
        ".hidden.jpg",
        "a/.thumbs/x.jpg",
        "._b.JPG",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.jpg").mkdir()
    assert find_images(tmp_path) == ["a/b.jpg", "a/é ü.png", "b.JPG", "c/d/e.tiff"]


def test_folders_without_images(tmp_path):
    with pytest.raises(DataError, match="contains no images; give"):
        find_images(tmp_path)
    with pytest.raises(DataError, match="is not a folder; give"):
        find_images(tmp_path / "nowhere")
    (tmp_path / "a\nb.jpg").touch()
    with pytest.raises(DataError, match="rename"):
        find_images(tmp_path)


def test_exhaustive_and_sequential():
    assert pairs.exhaustive(["b", "a", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert pairs.sequential(["a", "b", "c", "d"], 2) == [("a", "b"), ("a", "c"), ("b", "c"), ("b", "d"), ("c", "d")]
    assert pairs.sequential(["a"], 2) == []


def circle(count: int) -> np.ndarray:
    """Return descriptors of a camera that returns to its starting point."""
    angle = np.arange(count) / count * 2 * np.pi
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def test_sequential_closes_loops():
    found = pairs.sequential(NAMES, 2, circle(10), loops=1)
    assert set(found) - set(pairs.sequential(NAMES, 2)) >= {("00.jpg", "09.jpg")}
    apart = [int(b[:2]) - int(a[:2]) for a, b in found]
    # Distances along the circle.
    assert all(min(steps, 10 - steps) <= 3 for steps in apart)


def test_retrieval_takes_the_nearest_and_each_pair_once():
    found = pairs.retrieval(NAMES, circle(10), 2)
    expected = {tuple(sorted((NAMES[i], NAMES[(i + 1) % 10]))) for i in range(10)}
    assert set(found) == expected and len(found) == 10


def test_most_similar_at_its_edges():
    unit = np.eye(4, dtype=np.float32)
    assert most_similar(unit, unit, 1)[:, 0].tolist() == [0, 1, 2, 3]
    assert most_similar(unit[:2], unit, 9).shape == (2, 4)
    assert most_similar(unit, unit[:1], 3).tolist() == [[0]] * 4
    assert most_similar(unit[:0], unit, 3).shape == (0, 3)
    many = np.random.default_rng(0).standard_normal((3000, 8)).astype(np.float32)
    assert (most_similar(many, many, 1)[:, 0] == np.arange(3000)).all()


def test_descriptors_tell_images_apart():
    matcher = dualrc.load(device="cpu")
    images = [texture(seed, 128, 96) for seed in range(5)]
    # The same scene, brighter and slightly shifted.
    again = [np.roll(np.clip(image.astype(int) + 10, 0, 255).astype(np.uint8), 3, axis=1) for image in images]
    known, asked = ([global_descriptor(matcher.features(p)) for p in group] for group in (images, again))
    assert np.allclose(np.linalg.norm(known, axis=1), 1, atol=1e-5) and known[0].dtype == np.float32
    assert most_similar(np.array(asked), np.array(known), 1)[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_retrieval_finds_the_scene_among_others():
    """With the bundled network on real scenes, the two most similar images show the same scene."""
    data = ROOT.parent / "shared" / "data"
    if not data.is_dir():
        pytest.skip("needs ../shared/data")
    paths = [*data.glob("strecha/*/images/*.jpg"), *data.glob("hpatches/*/*.ppm"), *data.glob("oxford/*/*.ppm")]
    scenes = [str(path).split("/images/")[0].rsplit("/", 1 if path.suffix == ".ppm" else 0)[0] for path in paths]
    chosen = [i for i, _ in enumerate(paths) if scenes[:i].count(scenes[i]) < 4]
    matcher = dualrc.load(device="cpu", size=192)
    vectors = np.array([global_descriptor(matcher.features(paths[i])) for i in chosen])
    found = most_similar(vectors, vectors, 3)
    right = [scenes[chosen[i]] == scenes[chosen[j]] for i, row in enumerate(found) for j in row if i != j]
    assert len(set(scenes)) >= 4 and np.mean(right) > 0.9


def write(tmp_path, text: str):
    path = tmp_path / "pairs.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_pairs_of_a_text_file(tmp_path):
    names = ["a.jpg", "b/it's é.jpg", "c d.jpg", "e.jpg"]
    text = '# two a line\na.jpg e.jpg\n\n"c d.jpg" a.jpg\nb/it\'s é.jpg\tc d.jpg\r\n'
    text += '  e.jpg   "b/it\'s é.jpg"\ne.jpg a.jpg\n'
    found = pairs.from_file(names, write(tmp_path, text))
    assert found == [
        ("a.jpg", "e.jpg"),
        ("a.jpg", "c d.jpg"),
        ("b/it's é.jpg", "c d.jpg"),
        ("b/it's é.jpg", "e.jpg"),
    ]


NASTY = (
    "a.jpg",
    "a b.jpg",
    " a b.jpg",
    "c.jpg a.jpg",
    '"q".jpg',
    "#1.jpg",
    "# 2.jpg",
    "é\u2028ü.jpg",
    "d/e f/g.jpg",
    "'.jpg",
)


def test_what_is_written_is_read(tmp_path):
    """Any names without control characters (see find_images) survive writing and reading."""
    expected = pairs.exhaustive(NASTY)
    pairs.write_pairs(tmp_path / "pairs.txt", expected)
    assert pairs.from_file(NASTY, tmp_path / "pairs.txt") == expected
    plain = [("b.jpg", "c/d.jpg"), ("b.jpg", "e.jpg")]
    pairs.write_pairs(tmp_path / "pairs.txt", plain)
    # In the format of COLMAP and hloc.
    assert (tmp_path / "pairs.txt").read_text() == "b.jpg c/d.jpg\nb.jpg e.jpg\n"


def test_names_with_spaces_and_nothing_around_them(tmp_path):
    """Files of earlier versions are read if a line can mean only one pair."""
    names = ["IMG 1.jpg", "IMG 2.jpg", "x.jpg"]
    text = write(tmp_path, "IMG 1.jpg IMG 2.jpg\nx.jpg IMG 1.jpg\n# IMG 1.jpg\n")
    assert pairs.from_file(names, text) == [("IMG 1.jpg", "IMG 2.jpg"), ("IMG 1.jpg", "x.jpg")]
    with pytest.raises(DataError, match=r"line 1: 'a b c' is not a pair of images; separate two names by a tab"):
        pairs.from_file(["a", "b c", "a b", "c"], write(tmp_path, "a b c\n"))


@pytest.mark.parametrize(
    "text", ["a.jpg\n", "a.jpg b.jpg c.jpg\n", "a.jpg a.jpg\n", "a.jpg\tx.jpg\n", "a.jpg x y.jpg", "", "# none\n"]
)
def test_text_files_that_are_no_pairs(tmp_path, text):
    with pytest.raises(DataError, match=r"pairs.txt"):
        pairs.from_file(["a.jpg", "b.jpg"], write(tmp_path, text))


def choose(names, how, describe=None, **changes):
    config = CollectionConfig(**({"pairs": str(how), "neighbors": 2, "overlap": 2, "loops": 1} | changes))
    return pairs.choose(names, config, describe or (lambda: pytest.fail("no need")))


def test_choosing(tmp_path):
    assert choose(NAMES, "auto") == choose(NAMES, "exhaustive") == pairs.exhaustive(NAMES)
    assert choose(NAMES, "sequential", loops=0) == pairs.sequential(NAMES, 2)
    # All images are neighbors: no loops and no descriptors are needed.
    assert choose(NAMES[:3], "sequential") == pairs.exhaustive(NAMES[:3])
    assert choose(["a.jpg", "b.jpg"], write(tmp_path, "b.jpg a.jpg")) == [("a.jpg", "b.jpg")]
    with pytest.raises(ConfigError, match=r"pairs = 'random' is neither.*exhaustive"):
        choose(NAMES, "random")
    # An unreadable image has no descriptor and no pairs.
    described = dict(zip(NAMES[1:], circle(9), strict=True))
    for how in ("retrieval", "sequential"):
        found = choose(NAMES, how, lambda: described)
        assert found and all(NAMES[0] not in pair for pair in found)
    assert choose(NAMES, "retrieval", dict) == []
    many = [f"{number:03d}.jpg" for number in range(100)]
    assert choose(many, "auto", lambda: dict(zip(many, circle(100), strict=True))) == pairs.retrieval(
        many, circle(100), 2
    )


def test_pairs_that_see_the_same_points(tmp_path):
    pycolmap = pytest.importorskip("pycolmap")
    options = pycolmap.SyntheticDatasetOptions()
    options.num_rigs, options.num_cameras_per_rig, options.num_frames_per_rig, options.num_points3D = 1, 1, 5, 40
    model = pycolmap.synthesize_dataset(options)
    model.write(str(tmp_path))
    names = sorted(image.name for image in model.images.values())
    points = {image.name: {p.point3D_id for p in image.points2D if p.has_point3D()} for image in model.images.values()}
    found = pairs.covisible(names, tmp_path, 1)
    best = {
        name: max((len(points[name] & points[other]), other) for other in names if other != name)[0] for name in names
    }
    for name in names:
        shared = [len(points[a] & points[b]) for a, b in found if name in (a, b)]
        assert max(shared) == best[name]
    assert len(found) == len(set(found)) <= len(names) and all(a < b for a, b in found)
    assert len(pairs.covisible(names, tmp_path, 99)) == 10
    with pytest.raises(DataError, match="has no image of the model"):
        pairs.covisible(["other.jpg"], tmp_path, 3)


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("kind", ["exhaustive", "sequential", "two", "none"])
def test_blocks_hold_every_pair_once_and_share_images(size, kind):
    names = [f"{number:03d}" for number in range(60)]
    asked = {
        "exhaustive": pairs.exhaustive(names),
        "sequential": pairs.sequential(names, 5),
        "two": pairs.exhaustive(names[:20]) + pairs.exhaustive(names[30:50]),
        "none": [],
    }[kind]
    blocks = in_blocks(asked, size)
    assert sorted(itertools.chain(*blocks)) == sorted(asked)
    assert all(1 <= len(block) <= size for block in blocks)
    if size == 64 and asked:
        images = sum(len({name for pair in block for name in pair}) for block in blocks)
        assert images < 0.45 * len(asked)


@pytest.mark.parametrize("kept", [6, 16, 40])
def test_whatever_the_number_of_images_kept_few_are_read_twice(kept):
    asked = pairs.exhaustive([f"{number:03d}" for number in range(100)])
    latest: dict[str, None] = {}
    reads = 0
    for name in itertools.chain(*itertools.chain(*in_blocks(asked, 64))):
        reads += name not in latest
        latest.pop(name, None)
        latest[name] = None
        if len(latest) > kept:
            del latest[next(iter(latest))]
    assert reads < 3 * len(asked) / kept


def test_chunks():
    assert in_chunks(["a", "b", "c"], 2) == [[("a",), ("b",)], [("c",)]]
    assert in_chunks([], 2) == []


class Deadly:
    """Executor whose workers die at some items a given number of times, and otherwise return their task."""

    def __init__(self, count: int, deaths: dict[tuple[str, ...], int], at_once: int = 1) -> None:
        self.count, self.at_once, self.deaths = count, at_once, dict(deaths)
        self.events = [Event(worker=worker, kind="ready", value=0) for worker in range(count)]
        self.died = 0

    def give(self, worker, items):
        for start in range(0, len(items), self.at_once):
            batch = items[start : start + self.at_once]
            if guilty := [item for item in batch if self.deaths.get(item, 0) > 0]:
                self.deaths[guilty[0]] -= 1
                self.died += 1
                self.events += [
                    Event(worker=worker, kind="died", value="killed"),
                    Event(worker=worker, kind="ready", value=0),
                ]
                return
            self.events += [Event(worker=worker, kind="result", value=(item, Matches.none({}))) for item in batch]
        self.events.append(Event(worker=worker, kind="ready", value=len(items)))

    def next(self):
        return self.events.pop(0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("at_once", [1, 8])
def test_what_workers_die_of_is_tried_again_and_then_given_up(count, at_once):
    asked = pairs.exhaustive(NAMES)
    unlucky, deadly = asked[20], asked[21]
    executor = Deadly(count, {unlucky: 1, deadly: 99}, at_once)
    results = []
    carry_out(
        executor,
        Plan(in_blocks(asked, 16), at_once=at_once),
        set(),
        lambda item, result: results.append((item, result)),
    )
    # Each item once.
    assert sorted(item for item, _ in results) == sorted(asked)
    failed = {item: result for item, result in results if isinstance(result, Failure)}
    assert set(failed) == {deadly} and "killed" in failed[deadly].reason
    assert executor.died <= 5


def test_workers_that_can_not_live_end_the_run():
    class Hopeless(Deadly):
        def next(self):
            return Event(worker=0, kind="died", value="out of memory")

    with pytest.raises(ConfigError, match=r"out of memory.*fewer"):
        carry_out(Hopeless(2, {}), Plan([[("a", "b")]], at_once=1), set(), lambda item, result: None)
