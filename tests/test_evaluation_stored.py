"""Tests of stored results: every layout gives the same matches, and a damaged file affects only its pair."""

import io
import shutil

import numpy as np
import pytest
from conftest import texture
from evaluation_data import write_hpatches
from PIL import Image
from rich.console import Console

from dualrc.errors import ConfigError, DataError, ImageError
from dualrc.evaluation import evaluate
from dualrc.evaluation.matchers import MatcherSettings, make_matchers
from dualrc.matches import Matches

POINTS0 = np.array([[3.0, 4.0], [10.0, 20.0], [30.5, 7.25]])
POINTS1 = POINTS0 + np.array([5.0, -2.0])
SCORES = np.array([0.5, 0.9, 0.7])


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "data" / "v_wall"
    folder.mkdir(parents=True)
    for name in ("1.ppm", "2.ppm"):
        Image.fromarray(texture(0, 96, 80)).save(folder / name)
    return folder / "1.ppm", folder / "2.ppm"


def stored(place):
    (matcher,) = make_matchers([f"stored:{place}"], MatcherSettings())
    return matcher


def assert_same(found):
    assert np.allclose(found.points0, POINTS0[[1, 2, 0]]) and np.allclose(found.points1, POINTS1[[1, 2, 0]])
    assert np.allclose(found.scores, [0.9, 0.7, 0.5])
    assert (found.size0, found.size1) == ((96, 80), (96, 80))


def write(path, **arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    # Numpy would add .npz to some of these names.
    with path.open("wb") as file:
        np.savez(file, **arrays)


@pytest.mark.parametrize("name", ["v_wall/1_2.npz.exp", "v_wall-1_2.npz.exp", "v_wall/1.ppm_2.ppm.npz", "1_2.npz"])
def test_pairs_as_ncnet_and_dualrc_net_write_them(tmp_path, images, name):
    """Pixels start at the corner of the first one, and files are named by sequence."""
    write(tmp_path / "own" / name, keypoints_A=POINTS0 + 0.5, keypoints_B=POINTS1 + 0.5, scores=SCORES)
    assert_same(stored(tmp_path / "own").match(*images))
    assert_same(stored(tmp_path / "own").match(*images[::-1]).swapped())


def test_pairs_as_the_published_codes_write_them_for_aachen(tmp_path, images):
    """A pair has indices and scores; the keypoints of an image lie beside it."""
    name = "v_wall-1.ppm--v_wall-2.ppm.exp"
    matches = np.column_stack([[2, 0, 1], [0, 1, 2], SCORES])
    write(tmp_path / "matches" / name, matches=matches)
    for path, points in ((images[0], POINTS0[[1, 2, 0]]), (images[1], POINTS1)):
        write(path.with_name(f"{path.name}.exp"), keypoints=points + 0.5)
    assert_same(stored(f"{tmp_path}/matches:exp").match(*images))
    assert_same(stored(f"{tmp_path}/matches:exp").match(*images[::-1]).swapped())
    images[1].with_name("2.ppm.exp").unlink()
    with pytest.raises(DataError, match=r"v_wall-1\.ppm--v_wall-2\.ppm\.exp is damaged.*2\.ppm\.exp"):
        stored(f"{tmp_path}/matches:exp").match(*images)


def test_pairs_of_our_own(tmp_path, images):
    (tmp_path / "own" / "v_wall").mkdir(parents=True)
    made = Matches(points0=POINTS0, points1=POINTS1, scores=SCORES, size0=(1, 1), size1=(1, 1))
    made.save(tmp_path / "own" / "v_wall" / "1_2.npz")
    assert_same(stored(tmp_path / "own").match(*images))


def test_pairs_as_superglue_writes_them(tmp_path, images):
    others = np.concatenate([POINTS1[::-1], [[0, 0]]])
    keypoints0 = np.concatenate([[[9.0, 9.0]], POINTS0])
    arrays = {"matches": np.array([-1, 2, 1, 0]), "match_confidence": np.concatenate([[0], SCORES])}
    write(tmp_path / "own" / "v_wall" / "1_2_matches.npz", keypoints0=keypoints0, keypoints1=others, **arrays)
    assert_same(stored(tmp_path / "own").match(*images))


@pytest.mark.parametrize("ending", ["d2-net", "r2d2"])
def test_keypoints_with_descriptors_are_matched_mutually(tmp_path, images, ending):
    """Files lie beside the images, with x, y and scale, from several methods."""
    descriptors = np.eye(4, dtype=np.float32)[:3] * 7
    scale = np.ones((3, 1))
    for path, points in zip(images, (POINTS0, POINTS1[::-1]), strict=True):
        mine = descriptors if points is POINTS0 else descriptors[::-1]
        for other in ("d2-net", "r2d2"):
            moved = points if other == ending else points + 9
            write(path.with_name(f"{path.name}.{other}"), keypoints=np.hstack([moved, scale]), descriptors=mine)
    found = stored(f"{tmp_path}/data:{ending}").match(*images)
    assert len(found) == 3 and np.allclose(found.scores, 1)
    assert np.allclose(found.points1 - found.points0, (5, -2)) and {*found.points0[:, 0]} == {*POINTS0[:, 0]}
    with pytest.raises(ConfigError, match=r"several results of v_wall-1.ppm.*stored:FOLDER:d2-net"):
        stored(tmp_path / "data")


@pytest.mark.parametrize("with_matches", [True, False])
def test_hloc_files(tmp_path, images, with_matches):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    own = tmp_path / "own"
    own.mkdir()
    with h5py.File(own / "features.h5", "w") as file:
        for name, points in (("v_wall/1.ppm", POINTS0), ("v_wall/2.ppm", np.concatenate([[[1, 1]], POINTS1]))):
            group = file.create_group(name)
            group["keypoints"] = points.astype(np.float32)
            group["descriptors"] = np.eye(4, dtype=np.float32)[4 - len(points) :].T
    if with_matches:
        with h5py.File(own / "matches.h5", "w") as file:
            group = file.create_group("v_wall-1.ppm/v_wall-2.ppm")
            group["matches0"], group["matching_scores0"] = np.array([1, 2, 3]), SCORES
        assert_same(stored(own).match(*images))
        broken = shutil.copytree(own, tmp_path / "broken")
        with h5py.File(broken / "matches.h5", "a") as file:
            file["v_wall-1.ppm/v_wall-2.ppm/matches0"][0] = 99
        with pytest.raises(DataError, match=r"matches\.h5, v_wall-1\.ppm/v_wall-2\.ppm, is damaged"):
            stored(broken).match(*images)
    else:
        found = stored(own / "features.h5").match(*images)
        assert np.allclose(found.points0, POINTS0) and np.allclose(found.points1, POINTS1)


def test_an_image_without_keypoints_has_no_matches(tmp_path, images):
    for path in images:
        write(path.with_name(f"{path.name}.d2-net"), keypoints=np.zeros((0, 3)), descriptors=np.zeros((0, 8)))
    assert len(stored(tmp_path / "data").match(*images)) == 0


def test_a_file_is_not_taken_for_two_pairs(tmp_path, images):
    """Without the sequence in its name, 1_2.npz would apply to every sequence."""
    write(tmp_path / "own" / "1_2.npz", keypoints_A=POINTS0, keypoints_B=POINTS1, scores=SCORES)
    shutil.copytree(images[0].parent, tmp_path / "data" / "v_other")
    matcher = stored(tmp_path / "own")
    matcher.match(*images)
    with pytest.raises(DataError, match="folders with the names of the image folders"):
        matcher.match(tmp_path / "data" / "v_other" / "1.ppm", tmp_path / "data" / "v_other" / "2.ppm")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"keypoints_A": POINTS0, "keypoints_B": POINTS1[:2], "scores": SCORES}, "points1 has shape"),
        ({"keypoints_A": POINTS0, "keypoints_B": POINTS1}, "no scores"),
        ({"nonsense": POINTS0}, "it has nonsense instead of keypoints_A"),
        ({"keypoints_A": np.array([None, {}])}, "it has keypoints_A instead|pickle"),
        ("cut", "damaged"),
    ],
)
def test_broken_files(tmp_path, images, arrays, words):
    path = tmp_path / "own" / "v_wall" / "1_2.npz"
    if arrays == "cut":
        write(path, keypoints_A=POINTS0, keypoints_B=POINTS1, scores=SCORES)
        path.write_bytes(path.read_bytes()[:300])
    else:
        write(path, **arrays)
    with pytest.raises(DataError, match=words) as caught:
        stored(tmp_path / "own").match(*images)
    assert "1_2.npz" in str(caught.value) and str(caught.value).endswith("; write it again.")


def test_places_that_hold_nothing(tmp_path, images):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("")
    for place, words in (("nowhere", "do not exist"), ("empty", "no stored results"), ("text.txt", "neither a folder")):
        with pytest.raises(ConfigError, match=words):
            stored(tmp_path / place)
    with pytest.raises(ConfigError, match=r"that end with \.r2d2"):
        stored(f"{tmp_path}/data:r2d2")
    write(tmp_path / "own" / "v_wall" / "1_3.npz", keypoints_A=POINTS0, keypoints_B=POINTS1, scores=SCORES)
    with pytest.raises(DataError, match=r"no matches of .*: neither 1_2\.npz, nor keypoints and descriptors of 1\.ppm"):
        stored(tmp_path / "own").match(*images)
    with pytest.raises(ImageError):
        stored(tmp_path / "own").match(images[0], tmp_path / "missing.png")


def test_evaluation_of_stored_results_counts_what_is_missing(tmp_path):
    """Exact matches score 1; pairs with a missing or damaged file are failures with a reason."""
    root = write_hpatches(tmp_path / "h", ["v_wall"])
    grid = np.stack(np.meshgrid(np.arange(4, 320, 8), np.arange(4, 240, 8)), axis=-1).reshape(-1, 2)
    for k in (2, 3, 4, 5):
        H = np.loadtxt(root / "v_wall" / f"H_1_{k}")
        there = np.c_[grid, np.ones(len(grid))] @ H.T
        write(
            tmp_path / "own" / "v_wall" / f"1_{k}.npz.method",
            keypoints_A=grid + 0.5,
            keypoints_B=there[:, :2] / there[:, 2:] + 0.5,
            scores=np.ones(len(grid)),
        )
    (tmp_path / "own" / "v_wall" / "1_5.npz.method").write_bytes(b"PK nothing")
    console = Console(file=io.StringIO(), width=200)
    options = {"roots": (root,), "matchers": (f"stored:{tmp_path}/own",), "out": tmp_path / "out", "top": 1000}
    (result,) = evaluate("hpatches", screen=console, messages=console, **options)["results"]
    assert result.matcher == "own" and result.cost.seconds_per_pair is None
    pairs = result.figures[0].pairs
    assert [pair.accuracy[0] for pair in pairs] == pytest.approx([1, 1, 1, 0, 0])
    assert list(result.failures) == ["v_wall/1.png v_wall/5.png", "v_wall/1.png v_wall/6.png"]
    assert "damaged" in result.failures["v_wall/1.png v_wall/5.png"]
    assert "neither 1_6.npz" in result.failures["v_wall/1.png v_wall/6.png"]
    # Other files mean another config, so that old matches are not scored again.
    before = stored(tmp_path / "own").config
    write(tmp_path / "own" / "v_wall" / "1_6.npz.method", keypoints_A=grid, keypoints_B=grid, scores=np.ones(len(grid)))
    assert stored(tmp_path / "own").config != before
