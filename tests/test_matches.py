"""Tests of matches: filters, and files that restore exactly what was saved."""

import json
from dataclasses import replace

import numpy as np
import pytest

import dualrc
from dualrc.errors import DataError, OutputError
from dualrc.matches import Estimate, Matches, RelativePose, Warp, files, inside_mask

ENDINGS = (".npz", ".json", ".csv")


def make(count: int = 7, estimate: Estimate | None = None, **changes) -> Matches:
    rng = np.random.default_rng(count)
    fields = {
        "points0": rng.uniform(-0.5, 2000, (count, 2)).astype(np.float32),
        "points1": rng.uniform(-0.5, 0.1, (count, 2)).astype(np.float32),
        "scores": np.sort(rng.uniform(0, 2, count).astype(np.float32))[::-1],
        "size0": (640, 480),
        "size1": (333, 250),
        "estimate": estimate,
        "info": {"dualrc": "0.1.0", "matcher": {"top": None}, "list": [1, 2.5]},
    }
    return Matches(**(fields | changes))


def fitted(count: int, *, matrix=True) -> Estimate:
    return Estimate(
        kind="fundamental",
        matrix=np.random.default_rng(1).standard_normal((3, 3)) / 3 if matrix else None,
        inliers=np.arange(count) % 3 == 0,
        info={"threshold_px": 2.0},
    )


def assert_equal(a: Matches, b: Matches):
    for name in ("points0", "points1", "scores"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype == np.float32 and np.array_equal(x, y, equal_nan=True), name
    assert (a.size0, a.size1, a.info) == (b.size0, b.size1, b.info)
    assert (a.estimate is None) == (b.estimate is None)
    if a.estimate is not None:
        assert (a.estimate.kind, a.estimate.info) == (b.estimate.kind, b.estimate.info)
        assert np.array_equal(a.estimate.inliers, b.estimate.inliers) and b.estimate.inliers.dtype == bool
        assert (a.estimate.matrix is None) == (b.estimate.matrix is None)
        assert (a.estimate.pose is None) == (b.estimate.pose is None)
        if a.estimate.pose is not None:
            assert np.array_equal(a.estimate.pose.cam1_from_cam0, b.estimate.pose.cam1_from_cam0)
        if a.estimate.matrix is not None:
            assert np.array_equal(a.estimate.matrix, b.estimate.matrix)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("kind", ["plain", "estimate", "no model"])
def test_round_trip(tmp_path, ending, count, kind):
    matches = make(count, None if kind == "plain" else fitted(count, matrix=kind == "estimate"))
    matches.save(tmp_path / f"m{ending}")
    assert_equal(matches, Matches.load(tmp_path / f"m{ending}"))
    expected = {f"m{ending}"} | ({"m.csv.json"} if ending == ".csv" else set())
    assert {path.name for path in tmp_path.iterdir()} == expected


POSE = np.column_stack([np.array([[0.6, -0.8, 0], [0.8, 0.6, 0], [0, 0, 1]]), [0, 0.6, 0.8]])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_relative_pose_survives(tmp_path, ending):
    estimate = replace(fitted(3), kind="essential", pose=RelativePose(cam1_from_cam0=POSE))
    make(3, estimate).save(tmp_path / f"m{ending}")
    loaded = Matches.load(tmp_path / f"m{ending}")
    assert_equal(make(3, estimate), loaded)
    assert np.array_equal(loaded.estimate.pose.R, POSE[:, :3]) and np.array_equal(loaded.estimate.pose.t, POSE[:, 3])
    assert loaded[:2].estimate.pose is not None


@pytest.mark.parametrize("ending", ENDINGS)
def test_rows_without_counterpart_survive(tmp_path, ending):
    matches = make(3, points1=np.array([[1, 2], [np.nan, np.nan], [3, 4]]), scores=np.array([1, 0, 0.5]))
    matches.save(str(tmp_path / f"m{ending}"))
    assert_equal(matches, Matches.load(str(tmp_path / f"m{ending}")))


def test_json_is_what_every_reader_takes(tmp_path):
    make(2, points1=np.full((2, 2), np.nan)).save(tmp_path / "m.json")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    content = json.loads((tmp_path / "m.json").read_text(), parse_constant=refuse)
    assert content["points1"] == [[None, None]] * 2 and content["size0"] == [640, 480]


def test_csv_columns(tmp_path):
    make(2).save(tmp_path / "m.csv")
    assert (tmp_path / "m.csv").read_text().splitlines()[0] == "x0,y0,x1,y1,score"
    make(2, fitted(2)).save(tmp_path / "m.csv")
    lines = (tmp_path / "m.csv").read_text().splitlines()
    assert lines[0] == "x0,y0,x1,y1,score,inlier" and [line[-2:] for line in lines[1:]] == [",1", ",0"]


def test_a_csv_alone_is_enough(tmp_path):
    (tmp_path / "m.csv").write_text("x0,y0,x1,y1,score\n1,2,3.5,4,0.5\n")
    matches = Matches.load(tmp_path / "m.csv")
    assert matches.points1.tolist() == [[3.5, 4]] and matches.size0 == (0, 0)


@pytest.mark.parametrize("ending", [".NPZ", ".Json", ".CSV"])
def test_endings_in_capitals(tmp_path, ending):
    make(3).save(tmp_path / f"M{ending}")
    assert_equal(make(3), Matches.load(tmp_path / f"M{ending}"))
    assert all(path.name.startswith("M") for path in tmp_path.iterdir())


BROKEN = [
    ("m.npz", b""),
    ("m.npz", b"not a zip"),
    ("m.npz", b"PK\x03\x04 but broken"),
    ("m.json", b""),
    ("m.json", b"{"),
    ("m.json", b"[]"),
    ("m.json", b"{}"),
    ("m.json", b'{"points0": [[1]], "points1": [[1, 2]], "scores": [1], "size0": [1, 1], "size1": [1, 1], "info": {}}'),
    ("m.json", b'{"points0": 5, "points1": 5, "scores": 5, "size0": 5, "size1": 5, "info": 5}'),
    ("m.json", b"\xff\xfe"),
    ("m.csv", b""),
    ("m.csv", b"a,b\n1,2\n"),
    ("m.csv", b"x0,y0,x1,y1,score\n1,2,3\n"),
    ("m.csv", b"x0,y0,x1,y1,score\n1,2,3,4,word\n"),
    ("m.csv", b"x0,y0,x1,y1,score\n1,2,3,4,\x00\n"),
]


@pytest.mark.parametrize(("name", "content"), BROKEN, ids=str)
def test_broken_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        Matches.load(tmp_path / name)


@pytest.mark.parametrize("ending", ENDINGS)
def test_damaged_files(tmp_path, ending):
    """Truncated or changed files give matches or a DataError, never another error."""
    path = tmp_path / f"m{ending}"
    make(5, fitted(5)).save(path)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for attempt in range(60):
        damaged = bytearray(content[: rng.integers(len(content))] if attempt % 2 else content)
        if not attempt % 2:
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            Matches.load(path)
        except DataError:
            refused += 1
    assert refused > 20


def test_arrays_of_another_file(tmp_path):
    np.savez(tmp_path / "m.npz", points0=np.zeros(3))
    with pytest.raises(DataError):
        Matches.load(tmp_path / "m.npz")
    np.savez(tmp_path / "m.npz", points0=np.array([object()]), points1=0, scores=0, header=0)
    with pytest.raises(DataError):  # a pickled object is not read
        Matches.load(tmp_path / "m.npz")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        Matches.load(tmp_path / "none.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(DataError):
        Matches.load(tmp_path / "folder.npz")
    with pytest.raises(DataError, match=r"\.npz, \.json or \.csv"):
        Matches.load(tmp_path / "m.txt")


@pytest.mark.parametrize("name", ["m.txt", "m", "folder/m.npz", "taken.npz"])
def test_outputs_that_cannot_be(tmp_path, name):
    (tmp_path / "taken.npz").mkdir()
    with pytest.raises(OutputError):
        make().save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.npz"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_saving_replaces_the_old_file_whole_or_not_at_all(tmp_path, ending, monkeypatch):
    path = tmp_path / f"m{ending}"
    make(3).save(path)
    make(5).save(path)
    assert len(Matches.load(path)) == 5
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def failing(matches, temporary):
        temporary.write_text("half of the")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(files._WRITERS, ending, failing)
    with pytest.raises(OutputError, match="No space left"):
        make(6).save(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_csv_whose_second_file_cannot_be_is_not_written(tmp_path):
    (tmp_path / "m.csv.json").mkdir()
    with pytest.raises(OutputError):
        make().save(tmp_path / "m.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["m.csv.json"]


def test_filters():
    matches = make(6, fitted(6), scores=np.array([0.5, 0.9, 0.1, 0.9, 0.3, 0.2]))
    assert matches.top(3).scores.tolist() == pytest.approx([0.9, 0.9, 0.5])
    assert np.array_equal(matches.top(2).points0, matches.points0[[1, 3]])  # equals keep their order
    assert len(matches.top(0)) == 0 and len(matches.top(99)) == 6 and len(matches.top(-1)) == 0
    assert len(matches.above(0.3)) == 4  # at least this score
    assert matches.above(0.9).estimate.inliers.tolist() == [False, True]
    assert len(matches[:2]) == 2 and matches[np.array([5, 0])].scores.tolist() == pytest.approx([0.2, 0.5])
    assert len(matches[matches.scores > 5]) == 0
    assert matches[:3].info == matches.info and matches[:3].size1 == (333, 250)


def test_inside_masks():
    points = np.array([[0, 0], [1.4, 1.6], [1.6, 0.4], [-0.4, -0.4], [-0.6, 0], [2.4, 1.4], [2.6, 1]], np.float32)
    mask = np.zeros((2, 3), bool)
    mask[0, 0] = mask[0, 2] = mask[1, 2] = True
    expected = [True, False, True, True, False, True, False]
    assert inside_mask(points, mask).tolist() == expected
    matches = make(7, points0=points, points1=points[::-1].copy())
    assert len(matches.inside(mask0=mask)) == 4 and len(matches.inside(mask1=mask)) == 4
    both = [a and b for a, b in zip(expected, expected[::-1], strict=True)]
    assert len(matches.inside(mask, mask.astype(int).tolist())) == sum(both)
    assert len(matches.inside()) == 7


def test_points_beyond_all_numbers_are_outside():
    points = np.array([[np.nan, 0], [np.inf, 1], [1, -np.inf], [1e30, 0], [0, 0]], np.float32)
    assert inside_mask(points, np.ones((2, 2), bool)).tolist() == [False] * 4 + [True]
    with pytest.raises(DataError, match="two axes"):
        inside_mask(points, np.ones((2, 2, 1), bool))


def test_swapped():
    matches = make(4, fitted(4))
    swapped = matches.swapped()
    assert np.array_equal(swapped.points0, matches.points1) and swapped.size0 == matches.size1
    assert swapped.estimate is None
    assert np.array_equal(swapped.swapped().points0, matches.points0)


def test_the_dictionary_of_other_libraries():
    matches = make(4)
    content = matches.to_dict()
    assert set(content) == {"keypoints0", "keypoints1", "confidence", "image_size0", "image_size1"}
    assert content["keypoints0"] is matches.points0 and content["confidence"].shape == (4,)
    assert content["image_size0"].tolist() == [640, 480]


@pytest.mark.parametrize(
    "changes",
    [
        {"points0": np.zeros((6, 2))},
        {"points1": np.zeros((7, 3))},
        {"scores": np.zeros((7, 1))},
        {"points0": np.zeros(7)},
    ],
)
def test_shapes_are_checked(changes):
    with pytest.raises(DataError, match="shape"):
        make(7, **changes)
    with pytest.raises(DataError, match="inlier flags"):
        make(7, fitted(6))


def test_arrays_become_float32():
    matches = make(2, points0=[[1, 2], [3, 4]], scores=[1, 0.5], size0=np.array([5, 6]))
    assert matches.points0.dtype == matches.scores.dtype == np.float32
    assert matches.size0 == (5, 6) and type(matches.size0[0]) is int


def test_warp_holds_its_arrays():
    warp = Warp(points1=np.zeros((2, 3, 2)), certainty=np.zeros((2, 3)), size1=(4, 5))
    assert warp.size1 == (4, 5)


def test_a_pair_is_judged_by_its_best_hundred():
    def pair(scores):
        points = np.zeros((len(scores), 2))
        return Matches(points0=points, points1=points, scores=scores, size0=(9, 9), size1=(9, 9))

    assert Matches.none({}).pair_score == 0
    assert pair([0.2] * 300 + [0.7] * 100).pair_score == pytest.approx(0.7)
    assert pair([0.5] * 10).pair_score == pytest.approx(0.005)
    assert pair([0.25] * 50 + [0.01] * 50).pair_score == pytest.approx(0.09)


def test_matches_are_iterated_and_indexed():
    matches = make(3)
    rows = list(matches)
    assert len(rows) == 3 and all(isinstance(row, dualrc.Match) for row in rows)
    assert rows[1].score == matches.scores[1] and (rows[1].x0, rows[1].y0) == tuple(matches.points0[1].tolist())
    assert (rows[2].x1, rows[2].y1) == tuple(matches.points1[2].tolist())
    for x0, y0, x1, y1, score in matches[:1]:
        assert (x0, y0, x1, y1, score) == rows[0]
    assert matches[0] == rows[0] and matches[np.int64(-1)] == rows[-1]
    with pytest.raises(IndexError):
        _ = matches[3]
    assert len(matches[[2, 0]]) == 2 and len(matches[np.array([True, False, True])]) == 2
    assert list(Matches.none({})) == []


def test_what_is_shown_of_results_is_one_line():
    matrix, flags = np.eye(3), np.array([True, True, False])
    estimate = Estimate(kind="homography", matrix=matrix, inliers=flags)
    assert repr(estimate) == "Estimate(homography, 2 of 3 matches agree)"
    failed = Estimate(kind="essential", matrix=None, inliers=flags, info={"reason": "too few"})
    assert repr(failed) == "Estimate(essential: none, too few)"
    certainty = np.array([[0.5, 0, 0.2, 0]], np.float32)
    warp = Warp(points1=np.zeros((1, 4, 2), np.float32), certainty=certainty, size1=(30, 20))
    assert repr(warp) == "Warp(4x1 to 30x20, 50% of the pixels found)"
    assert "\n" not in repr(make(3))


def test_opencv_takes_the_matches():
    cv2 = pytest.importorskip("cv2")
    shift = np.array([30.25, -12.5], np.float32)
    points0 = np.random.default_rng(3).uniform(40, 200, (40, 2)).astype(np.float32)
    points1 = points0 + shift
    points1[7] = np.nan
    scores = np.linspace(1, 0.1, 40, dtype=np.float32)
    matches = make(40, points0=points0, points1=points1, scores=scores, size0=(320, 240), size1=(320, 240))
    keypoints0, keypoints1, found = matches.to_cv2()
    assert len(keypoints0) == len(keypoints1) == len(found) == 39
    assert [m.queryIdx for m in found] == [m.trainIdx for m in found] == list(range(39))
    assert [m.distance for m in found] == sorted(m.distance for m in found)
    assert np.isclose(keypoints0[3].response, scores[3]) and np.isclose(found[3].distance, 1 - scores[3])
    # What OpenCV's users do with them.
    there = cv2.KeyPoint.convert([keypoints1[m.trainIdx] for m in found])
    H, inliers = cv2.findHomography(cv2.KeyPoint.convert([keypoints0[m.queryIdx] for m in found]), there)
    assert np.allclose(H, [[1, 0, shift[0]], [0, 1, shift[1]], [0, 0, 1]], atol=1e-3) and inliers.all()
    blank = np.zeros((240, 320, 3), np.uint8)
    assert cv2.drawMatches(blank, keypoints0, blank, keypoints1, found, None).shape == (240, 640, 3)
    assert make(0).to_cv2() == ([], [], [])


def test_a_notebook_shows_matches_as_lines_between_frames():
    from xml.etree import ElementTree

    rng = np.random.default_rng(0)
    fields = {"points0": rng.uniform(0, 400, (300, 2)), "points1": rng.uniform(0, 200, (300, 2))}
    shown = make(300, **fields, size0=(400, 500), size1=(300, 200))._repr_html_()
    assert "Matches(300 of 400x500 and 300x200" in shown and "best 200" in shown
    svg = ElementTree.fromstring(shown[shown.index("<svg") :])
    lines = list(svg.iter("{http://www.w3.org/2000/svg}line"))
    assert len(lines) == 200
    _, _, width, height = (float(value) for value in svg.attrib["viewBox"].split())
    for line in lines:
        x0, x1, y0, y1 = (float(line.attrib[key]) for key in ("x1", "x2", "y1", "y2"))
        assert 0 <= x0 <= x1 <= width and 0 <= y0 <= height and 0 <= y1 <= height
    assert "<svg" in make(0)._repr_html_() and "<svg" not in make(3, size0=(0, 0))._repr_html_()
    missing = make(3, points1=np.full((3, 2), np.nan, np.float32))._repr_html_()
    assert "nan" not in missing.lower()


def test_a_notebook_shows_a_warp_as_colors():
    import io

    from PIL import Image

    grid = np.stack(np.meshgrid(np.arange(900), np.arange(600)), axis=2).astype(np.float32)
    points1 = 1.1 * grid + 5
    points1[:100] = np.nan
    certainty = np.where(np.isfinite(points1[:, :, 0]), 0.9, 0).astype(np.float32)
    shown = np.asarray(
        Image.open(io.BytesIO(Warp(points1=points1, certainty=certainty, size1=(990, 660))._repr_png_()))
    )
    assert shown.shape == (200, 300, 3)
    assert not shown[:33].any() and shown[40:].any(axis=2).all()
    # A zoom moves opposite sides apart: their colors differ.
    assert np.abs(shown[120, 10].astype(int) - shown[120, 290]).max() > 60
    nothing = Warp(points1=np.full((9, 9, 2), np.nan), certainty=np.zeros((9, 9)), size1=(9, 9))
    assert nothing._repr_png_()
