"""Tests of InLoc: exact published results, the pipeline on rooms with ground truth, and damaged files."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import tiny_network
from evaluation_data import SHARED, run_evaluation, write_hpatches, write_matchers
from inloc_data import FLOORS, write_inloc
from typer.testing import CliRunner

from dualrc.cli import app
from dualrc.errors import ConfigError, DataError, WeightsError
from dualrc.evaluation.data_files import read_published
from dualrc.evaluation.dense_verification import render_points, verify
from dualrc.evaluation.inloc import ALL, CURVE_M, THRESHOLDS_M, InLoc, InLocSettings
from dualrc.evaluation.inloc_data import (
    CandidatePose,
    find_folders,
    pose_rows,
    read_alignment,
    read_candidates,
    read_cutout,
    read_references,
    read_result_list,
    read_scan,
    write_result_list,
)
from dualrc.evaluation.inloc_poses import PoseEstimator, points_at
from dualrc.geometry import Camera
from dualrc.image import read
from dualrc.localize.results import read_poses
from dualrc.model.checkpoint import file_hash, save_weights

scipy_io = pytest.importorskip("scipy.io", reason="SciPy is not installed")

# Percent within 0.25, 0.5 and 1 m on DUC1 and DUC2, as published.
PUBLISHED = {
    "DualRC-Net": ("dualrcnet_shortlist_1600_partial", (42.4, 67.7, 80.3), (46.6, 67.2, 85.5)),
    "NCNet": ("ncnet_shortlist_neurips18", (43.4, 64.6, 77.8), (45.0, 62.6, 73.3)),
    "Sparse-NCNet": ("sparsencnet_shortlist_3200_hard_soft", (47.0, 67.2, 79.8), (43.5, 64.9, 80.2)),
    "DensePV": ("densePV_top10_shortlist_cvpr18", (40.9, 58.1, 70.2), (35.9, 54.2, 69.5)),
}
LIST = "densePE_top100_shortlist_cvpr18.mat"
SIZE = (320, 240)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write the matchers, and the dataset in data."""
    folder = tmp_path_factory.mktemp("inloc")
    write_matchers(folder)
    write_inloc(folder / "data")
    return folder


@pytest.fixture(scope="module")
def scored(data):
    """Score the oracle and the broken matcher on the whole dataset."""
    return run_evaluation("inloc", (data / "data",), data / "out", data, ("pose_oracle", "broken"))


@pytest.fixture
def changed(data, tmp_path):
    """Return a copy of the dataset that a test may damage."""
    return shutil.copytree(data / "data", tmp_path / "data")


def first_candidate(root):
    """Return the first query, and its first candidate on the same floor."""
    query, candidates = next(iter(read_candidates(root / LIST).items()))
    return query, next(name for name in candidates if name.startswith("DUC1"))


def scan_of(folders, cutout):
    return read_scan(folders.scan(cutout), folders.points(cutout).parent)


def score_list(path, truth=None):
    return InLoc(InLocSettings(results=(path,), truth=truth, out=path.parent))


@pytest.mark.parametrize("method", PUBLISHED)
def test_published_results_to_the_digit(method):
    if not (SHARED / "inloc").is_dir():
        pytest.skip("the published lists are not in ../shared/data/inloc")
    name, *expected = PUBLISHED[method]
    benchmark = score_list(SHARED / "inloc" / f"{name}.mat", SHARED / "inloc" / "DUC_refposes_all.mat")
    floors = benchmark.stored_results()[0].figures.floors
    assert [floors[floor].queries for floor in ("DUC1", "DUC2", ALL)] == [198, 131, 329]
    for floor, percents in zip(FLOORS, expected, strict=True):
        assert tuple(round(100 * share, 1) for share in floors[floor].within) == percents
    for floor, curve in read_published("inloc_published.json")[method].items():
        assert floors[floor].curve == pytest.approx(curve, abs=6e-5)
    assert not benchmark.notes


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_published_curves_in_the_package(method):
    curves = read_published("inloc_published.json")[method]
    for floor, percents in zip(FLOORS, PUBLISHED[method][1:], strict=True):
        assert len(curves[floor]) == len(CURVE_M) and curves[floor] == sorted(curves[floor])
        shown = [curves[floor][CURVE_M.index(threshold)] for threshold in THRESHOLDS_M]
        assert tuple(round(100 * share, 1) for share in shown) == percents


def pose_at(x, turn_deg=0.0):
    cos, sin = np.cos(np.radians(turn_deg)), np.sin(np.radians(turn_deg))
    R = np.array([[cos, 0, sin], [0, 1, 0], [-sin, 0, cos]])
    return np.column_stack([R, -R @ [x, 0.0, 0.0]])


def candidate(name, pose):
    return CandidatePose(candidate=name, cam_from_world=None if pose is None else pose_rows(pose))


def write_references(path, floors):
    entries = {}
    for floor, poses in floors.items():
        column = np.empty((1, len(poses)), dtype=[("queryname", object), ("P", object)])
        for index, (query, pose) in enumerate(poses.items()):
            column[0, index] = (query, pose)
        entries[f"{floor}_RefList"] = column
    scipy_io.savemat(path, entries)


def test_what_counts_as_localized(tmp_path):
    names = {"near": "DUC1", "far": "DUC1", "turned": "DUC1", "floor": "DUC2", "none": "DUC1", "missing": "DUC1"}
    write_references(tmp_path / "ref.mat", {"DUC1": dict.fromkeys(names, pose_at(0.0))})
    poses = {
        "near": pose_at(0.2, 9.9),
        "far": pose_at(0.6),
        "turned": pose_at(0.1, 10.1),
        "floor": pose_at(0.0),
        "none": None,
    }
    results = {query: [candidate(f"{names[query]}/001/DUC_cutout_001_0_0.jpg", pose)] for query, pose in poses.items()}
    write_result_list(tmp_path / "mine.mat", results)
    benchmark = score_list(tmp_path / "mine.mat", tmp_path / "ref.mat")
    figures = benchmark.stored_results()[0].figures
    assert figures.floors["DUC1"].within == pytest.approx((1 / 6, 1 / 6, 2 / 6))
    assert figures.floors["DUC1"].without_pose == 2
    assert {s.query for s in figures.queries if np.isfinite(s.error_m)} == {"near", "far"}
    assert "1 queries are not in the list and count as failures: missing" in benchmark.notes[0]
    # No published result is comparable.
    assert len(benchmark.report(benchmark.stored_results()).tables) == 1


def test_a_list_survives_writing(tmp_path):
    first = candidate("DUC1/001/DUC_cutout_001_0_-30.jpg", pose_at(1.0, 30.0))
    second = candidate("DUC2/002/DUC_cutout_002_330_0.jpg", None)
    written = [replace(first, inliers=7, verified=2.5), replace(second, inliers=3)]
    write_result_list(tmp_path / "list.mat", {"IMG_1.JPG": written})
    assert read_result_list(tmp_path / "list.mat") == {"IMG_1.JPG": (first, second)}
    stored = scipy_io.loadmat(tmp_path / "list.mat")["ImgList"][0, 0]
    assert stored["topNscore"].tolist() == [[2.5, 3.0]]
    assert np.isnan(stored["P"][0, 1]).all()


def test_an_oracle_is_perfect_and_a_broken_matcher_is_not(scored, data):
    content, text = scored
    oracle, broken = (result.figures for result in content["results"])
    for floor in (*FLOORS, ALL):
        assert oracle.floors[floor].within == (1.0, 1.0, 1.0)
        assert broken.floors[floor].within[1] == 0
    assert max(score.distance_m for score in oracle.queries) < 0.02
    assert max(score.rotation_deg for score in oracle.queries) < 0.3
    assert "DualRC-Net, published" in text and "42.4 / 67.7 / 80.3" in text
    names = {path.name for path in (data / "out").iterdir()}
    assert names >= {"report.html", "results.json", "poses-matchers_pose_oracle.txt", "results-matchers_broken.mat"}
    assert (data / "out" / "figures" / "inloc_recall.png").is_file()


def test_written_results_score_the_same_and_match_the_references(scored, data, tmp_path):
    content, _ = scored
    references = read_references(data / "data" / "DUC_refposes_all.mat")
    stored = data / "out" / "results-matchers_pose_oracle.mat"
    arguments = ["evaluate", "inloc", "--results", str(stored), "--truth", str(data / "data" / "DUC_refposes_all.mat")]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "again")])
    assert done.exit_code == 0, done.output
    again = json.loads((tmp_path / "again" / "results.json").read_text())["results"][0]["figures"]["floors"]
    assert again[ALL]["curve"] == pytest.approx(content["results"][0].figures.floors[ALL].curve)
    poses = read_poses(data / "out" / "poses-matchers_pose_oracle.txt")
    for query, reference in {**references["DUC1"], **references["DUC2"]}.items():
        # DUC2 is 100 m from the origin.
        assert poses[query] == pytest.approx(reference, abs=0.05 if query < "IMG_0740" else 0.5)


def test_a_second_run_does_nothing_again(scored, data):
    file = data / "out" / "poses.jsonl"
    # A killed process leaves an incomplete line.
    file.write_bytes(file.read_bytes() + b'\n{"key": "torn')
    before = file.read_bytes()
    content, text = run_evaluation("inloc", (data / "data",), data / "out", data, ("broken",))
    assert "pairs were in" in text and "0 new" in text
    assert content["results"][0].figures == scored[0]["results"][1].figures
    assert file.read_bytes() == before


def test_text_lists_are_the_same_as_published_ones(data, tmp_path):
    published_list = read_candidates(data / "data" / LIST)
    path = tmp_path / "pairs.txt"
    path.write_text(
        "# query and cut-out\n"
        + "".join(
            f"query/iphone7/{query} database/cutouts/{name}\n"
            for query, names in published_list.items()
            for name in names
        )
    )
    assert read_candidates(path) == published_list


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a.JPG\n", "line 1: not a query and a cutout"),
        ("a.JPG cutout.jpg\n", "line 1: not a query and a cutout"),
        ("a.JPG DUC1/001/cutout.jpg\n", "is not the name of a cutout"),
        ("a.JPG ../../DUC_cutout_001_0_0.jpg\n", "is outside of the folder"),
        ("# nothing\n", "has no candidates"),
    ],
)
def test_text_lists_that_say_nothing(tmp_path, text, reason):
    (tmp_path / "pairs.txt").write_text(text)
    with pytest.raises(DataError, match=reason):
        read_candidates(tmp_path / "pairs.txt")


def write_v73(path, arrays):
    """Write version 7.3 of MATLAB: HDF5 after a header of 512 bytes, reversed axes, cells as references."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, value in arrays.items():
            if isinstance(value, list):
                cells = [file.create_dataset(f"#refs#/{i}", data=v.T) for i, v in enumerate(value)]
                file.create_dataset(name, data=np.array([[c.ref] for c in cells], dtype=h5py.ref_dtype))
            else:
                file.create_dataset(name, data=value.T)
    header = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + (0x0200).to_bytes(2, "little") + b"IM"
    with path.open("r+b") as file:
        file.write(header)


def test_cutouts_and_scans_of_matlab_73(data, changed):
    _, name = first_candidate(data / "data")
    before, after = (find_folders(root) for root in (data / "data", changed))
    xyz, rgb = scan_of(before, name)
    content = scipy_io.loadmat(before.points(name))
    write_v73(after.points(name), {key: content[key] for key in ("XYZcut", "RGBcut")})
    columns = [column[:, None] for column in (*xyz.T, np.zeros(len(xyz)), *rgb.T)]
    write_v73(after.scan(name), {"A": columns})
    assert np.array_equal(read_cutout(after.points(name)), read_cutout(before.points(name)), equal_nan=True)
    again = scan_of(after, name)
    assert np.array_equal(again[0], xyz) and np.array_equal(again[1], rgb)


def test_without_the_scan_its_cutouts_serve(data, changed):
    _, name = first_candidate(data / "data")
    xyz, rgb = scan_of(find_folders(data / "data"), name)
    shutil.rmtree(changed / "database" / "scans")
    again, colors = scan_of(find_folders(changed), name)
    assert len(xyz) == len(again) and np.isfinite(again).all()
    # The columns contain the cutouts one after the other, by angle; here they are sorted by name.
    assert np.array_equal(np.sort(xyz.sum(axis=1)), np.sort(again.sum(axis=1)))
    assert rgb.sum() == colors.sum()


def test_places_between_points_at_edges_and_where_nothing_is():
    x, y = np.meshgrid(np.arange(6.0), np.arange(4.0))
    xyz = np.stack([x, y, np.full_like(x, 50.0)], axis=-1).astype(np.float32)
    # Another surface, at twice the distance.
    xyz[:, 3:] *= 2
    xyz[0, 0] = np.nan
    points = [[1.25, 2.5], [2.4, 1.0], [2.6, 1.0], [0.4, 0.0], [0.6, 0.0], [-0.6, 1.0], [5.4, 3.4]]
    found = points_at(xyz, points, (6, 4))
    assert found[0] == pytest.approx([1.25, 2.5, 50])
    assert found[1] == pytest.approx([2, 1, 50]) and found[2] == pytest.approx([6, 2, 100])
    assert np.isnan(found[3]).all() and found[4] == pytest.approx([1, 0, 50])
    assert np.isnan(found[5]).all() and found[6] == pytest.approx([10, 6, 100])
    # At twice the size, the same position has another pixel.
    assert points_at(xyz, [[2 * 1.25 + 0.5, 2 * 2.5 + 0.5]], (12, 8))[0] == pytest.approx([1.25, 2.5, 50])


def test_the_focal_length_is_inlocs_unless_a_camera_is_known(changed):
    assert find_folders(changed).camera("IMG_0731.JPG", (4032, 3024)).focal_px == pytest.approx(4032 * 28 / 36)
    K = [[300, 0, 150], [0, 300, 110], [0, 0, 1]]
    cameras = {"IMG_0731.JPG": {"width": 320, "height": 240, "K": K}}
    (changed / "query" / "iphone7" / "cameras.json").write_text(json.dumps(cameras))
    folders = find_folders(changed)
    assert folders.camera("IMG_0731.JPG", (640, 480)).focal_px == pytest.approx(600)
    assert folders.camera("IMG_0732.JPG", (320, 240)).focal_px == pytest.approx(320 * 28 / 36)


def test_the_alignment_is_the_one_after_refinement(data):
    _, name = first_candidate(data / "data")
    path = find_folders(data / "data").alignment(name)
    numbers = [line.split() for line in path.read_text().splitlines() if len(line.split()) == 4]
    assert read_alignment(path) == pytest.approx(np.array(numbers[4:7], dtype=float))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("before\n1 0 0 0\n0 1 0 0\n0 0 1 0\n0 0 0 1\n", "4 of 8 rows"),
        ("\n".join(["1 0 0 0", "0 1 0 0", "0 0 1 0", "0 0 0 1"] + ["1 0 0 0"] * 4), "last row"),
        ("\n".join(["1 0 0 0"] * 7 + ["0 0 0 1"]), "no valid rotation"),
        ("\n".join(["1 0 0 nan"] * 7 + ["0 0 0 1"]), "not finite"),
    ],
)
def test_alignments_that_are_none(tmp_path, text, reason):
    (tmp_path / "trans.txt").write_text(text)
    with pytest.raises(DataError, match=reason):
        read_alignment(tmp_path / "trans.txt")


def test_the_nearest_point_hides_the_others():
    camera = Camera.from_focal((40, 30), 40.0)
    xyz = np.array([[0, 0, 4], [0, 0, 2], [0, 0, -2], [9, 0, 1], [0.5, 0.25, 2]], dtype=np.float32)
    rgb = np.array([[1, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, 0], [5, 0, 0]], dtype=np.uint8)
    image, seen = render_points(xyz, rgb, camera, np.eye(3, 4))
    assert seen.sum() == 2
    assert image[15, 20, 0] == 2 and image[20, 30, 0] == 5


def test_verification_prefers_the_true_pose(data):
    root = data / "data"
    query, name = first_candidate(root)
    folders = find_folders(root)
    truth = read_references(root / "DUC_refposes_all.mat")["DUC1"][query]
    xyz, rgb = scan_of(folders, name)
    photograph, camera = read(folders.queries / query), folders.camera(query, SIZE)
    floor_from_scan = np.vstack([read_alignment(folders.alignment(name)), [0, 0, 0, 1]])

    def similar(turn_deg, x):
        moved = np.vstack([pose_at(x, turn_deg), [0, 0, 0, 1]]) @ np.vstack([truth, [0, 0, 0, 1]]) @ floor_from_scan
        return verify(photograph, camera, moved[:3], xyz, rgb)

    right = similar(0, 0)
    assert right > 1.2 * max(similar(4, 0), similar(0, 0.4), similar(60, 0))
    away = np.column_stack([np.eye(3), [0, 0, -1e4]])
    assert verify(photograph, camera, away, xyz, rgb) == 0


def test_verification_finds_the_right_pose_among_wrong_ones(data, tmp_path):
    root = data / "data"
    query, name = first_candidate(root)
    truth = read_references(root / "DUC_refposes_all.mat")["DUC1"][query]
    wrong = np.column_stack([truth[:, :3], truth[:, 3] + [0.5, 0, 0]])
    tried = {
        query: [
            CandidatePose(candidate=name, inliers=500, cam_from_world=pose_rows(wrong)),
            CandidatePose(candidate=name, inliers=20, cam_from_world=pose_rows(truth)),
            CandidatePose(candidate=name, reason="no luck"),
        ]
    }
    folders = find_folders(root)
    steps = []
    poses = PoseEstimator(folders, tmp_path / "poses.jsonl")
    found = poses.verify(tried, {query: folders.queries / query}, lambda *step: steps.append(step))[query]
    assert found[1].verified > found[0].verified > 0 and found[2].verified is None
    assert steps and not poses.broken
    again = PoseEstimator(folders, tmp_path / "poses.jsonl")
    assert again.verify(tried, {query: tmp_path / "gone.JPG"}, lambda *step: None)[query] == found


def test_the_whole_path_with_verification(data, tmp_path):
    settings = {"verify": True, "candidates": 3}
    content, text = run_evaluation("inloc", (data / "data",), tmp_path, data, ("pose_oracle",), **settings)
    figures = content["results"][0].figures
    assert figures.floors[ALL].within == (1.0, 1.0, 1.0)
    assert "dense pose verification" in text
    assert all(one.verified for score in figures.queries for one in score.candidates if one.pose is not None)


def test_broken_files_are_named_and_the_run_goes_on_and_resumes(data, changed, tmp_path):
    query, name = first_candidate(changed)
    folders = find_folders(changed)
    whole = folders.points(name).read_bytes()
    folders.points(name).write_bytes(whole[: len(whole) // 2])
    (folders.queries / "IMG_0741.JPG").write_bytes(b"no image")
    folders.alignment("DUC1/002/DUC_cutout_002_0_0.jpg").unlink()
    settings = {"verify": True, "candidates": 4}
    content, text = run_evaluation("inloc", (changed,), tmp_path / "out", data, ("pose_oracle",), **settings)
    result = content["results"][0]
    by_query = {score.query: score for score in result.figures.queries}
    assert len(by_query) == 6
    reasons = {one.candidate: one.reason for one in by_query[query].candidates}
    assert "XYZcut" in reasons[name] and "download the published file" in reasons[name]
    assert any("DUC_trans_002.txt does not exist" in (reason or "") for reason in reasons.values())
    assert by_query["IMG_0741.JPG"].lost and by_query["IMG_0741.JPG"].error_m == float("inf")
    assert len(result.failures) == 4 and "could not be matched and count as failures" in text
    assert "files cannot be used, and their candidates give no pose" in text
    assert result.figures.floors["DUC2"].within == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert result.figures.floors["DUC2"].without_pose == 1
    # The next run uses the repaired file.
    folders.points(name).write_bytes(whole)
    shutil.copy(data / "data" / "query" / "iphone7" / "IMG_0741.JPG", folders.queries)
    content, text = run_evaluation("inloc", (changed,), tmp_path / "out", data, ("pose_oracle",), **settings)
    assert "4 new" in text
    assert content["results"][0].figures.floors["DUC2"].within == (1.0, 1.0, 1.0)
    assert all(
        one.reason is None for one in content["results"][0].figures.queries[0].candidates if one.candidate == name
    )


def test_another_image_in_the_cutouts_place_is_no_scan(data, changed):
    _, name = first_candidate(changed)
    path = find_folders(changed).points(name)
    scipy_io.savemat(path, {"XYZcut": np.zeros((4, 4))})
    with pytest.raises(DataError, match="points have the shape"):
        read_cutout(path)
    scipy_io.savemat(path, {"other": np.zeros((4, 4))})
    with pytest.raises(DataError, match="it has no XYZcut"):
        read_cutout(path)


def test_roots_that_are_not_inloc(data, tmp_path):
    def refused(reason, *roots, **inloc):
        with pytest.raises((DataError, ConfigError), match=reason):
            run_evaluation("inloc", roots, tmp_path / "out", data, ("broken",), **inloc)

    refused("does not exist", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("it is not InLoc; pass another folder", tmp_path / "empty")
    refused("evaluate hpatches", write_hpatches(tmp_path / "hpatches", names=("v_wall",)))
    (tmp_path / "aachen" / "3D-models").mkdir(parents=True)
    refused("evaluate aachen", tmp_path / "aachen")
    refused("one ROOT", data / "data", tmp_path)
    refused("candidates = 0 leaves no pairs", data / "data", candidates=0)
    refused("No dataset was passed")
    assert not (tmp_path / "out").exists()


def test_roots_that_are_not_complete(data, changed, tmp_path):
    def refused(reason):
        with pytest.raises(DataError, match=reason):
            run_evaluation("inloc", (changed,), tmp_path / "out", data, ("broken",))

    shutil.copy(changed / LIST, changed / "other_shortlist.mat")
    refused("has several lists")
    (changed / "other_shortlist.mat").unlink()
    (changed / LIST).rename(tmp_path / "list.mat")
    refused("has no list of candidates .*--shortlist")
    (tmp_path / "list.mat").rename(changed / LIST)
    write_references(changed / "DUC_refposes_all.mat", {"DUC1": {"other.JPG": pose_at(0.0)}})
    refused("has no pose of any query")
    (changed / "DUC_refposes_all.mat").write_bytes(b"MATLAB 5.0 no more")
    refused("is not a file of reference poses, or damaged")
    (changed / "DUC_refposes_all.mat").unlink()
    shutil.rmtree(changed / "database" / "alignments")
    refused("is incomplete: database/alignments is missing")


def test_without_references_poses_are_only_written(data, changed, tmp_path):
    (changed / "DUC_refposes_all.mat").unlink()
    settings = {"candidates": 2}
    content, text = run_evaluation("inloc", (changed,), tmp_path / "out", data, ("pose_oracle",), **settings)
    assert "nothing is scored" in text and content["results"][0].figures.floors == {}
    assert len(read_poses(tmp_path / "out" / "poses-matchers_pose_oracle.txt")) == 6


def test_queries_beyond_the_list_and_the_references_are_named(data, changed, tmp_path):
    listed = read_result_list(changed / LIST)
    del listed["IMG_0731.JPG"]
    listed["IMG_9999.JPG"] = listed["IMG_0732.JPG"]
    write_result_list(changed / LIST, listed)
    settings = {"candidates": 3}
    content, text = run_evaluation("inloc", (changed,), tmp_path / "out", data, ("pose_oracle",), **settings)
    assert "1 queries have no reference pose and are not scored: IMG_9999.JPG" in text
    assert "1 queries have no candidates and count as failures: IMG_0731.JPG" in text
    assert content["results"][0].figures.floors["DUC1"].within == pytest.approx((2 / 3, 2 / 3, 2 / 3))


def test_stored_results_need_references_and_poses(data, changed, tmp_path):
    path, truth = data / "data" / LIST, data / "data" / "DUC_refposes_all.mat"
    with pytest.raises(ConfigError, match=r"--truth DUC_refposes_all\.mat"):
        score_list(path)
    write_references(tmp_path / "ref.mat", {"DUC1": {"other.JPG": pose_at(0.0)}})
    with pytest.raises(DataError, match="none of the queries"):
        score_list(path, tmp_path / "ref.mat")
    with pytest.raises(DataError, match=r"not a list of candidates \(ImgList\)"):
        score_list(truth, truth)
    with pytest.raises(DataError, match="does not exist"):
        score_list(tmp_path / "gone.mat", truth)
    bare = np.empty((1, 1), dtype=[("queryname", object), ("topNname", object)])
    bare[0, 0] = ("IMG_0731.JPG", np.array([["DUC1/001/DUC_cutout_001_0_0.jpg"]], dtype=object))
    scipy_io.savemat(tmp_path / "bare.mat", {"ImgList": bare})
    with pytest.raises(DataError, match="candidates without poses"):
        score_list(tmp_path / "bare.mat", truth)
    with pytest.raises(ConfigError, match="rename one"):
        InLocSettings(results=(path, changed / LIST), truth=truth, out=tmp_path)


def test_options_of_inloc_are_refused_elsewhere(data, tmp_path):
    with pytest.raises(ConfigError, match="--verify is an option of inloc only; omit it"):
        run_evaluation("pose", (tmp_path,), tmp_path, data, ("broken",), verify=True)


def test_several_weights_are_compared_in_one_table(data, tmp_path):
    """Networks are compared as in the paper's appendix."""
    files = [tmp_path / f"{seed}.safetensors" for seed in (0, 1)]
    for seed, file in enumerate(files):
        save_weights(tiny_network(seed=seed), file)
    settings = {"weights": tuple(files), "candidates": 1, "size": 64, "device": "cpu"}
    content, _ = run_evaluation("inloc", (data / "data",), tmp_path / "out", data, ("dualrc",), **settings)
    assert [result.matcher for result in content["results"]] == [f"default, {path}" for path in files]
    hashes = [result.config["weights"] for result in content["results"]]
    assert hashes == [file_hash(path) for path in files]
    with pytest.raises(WeightsError):
        run_evaluation("inloc", (data / "data",), tmp_path, data, ("dualrc",), weights=(files[0], tmp_path / "none"))


@pytest.mark.slow
def test_the_shipped_weights_localize(data, tmp_path):
    settings = {"candidates": 4}
    content, _ = run_evaluation("inloc", (data / "data",), tmp_path, data, ("dualrc",), **settings, device="cpu")
    figures = content["results"][0].figures
    assert figures.floors[ALL].within[1] >= 5 / 6
    assert figures.floors[ALL].without_pose == 0
