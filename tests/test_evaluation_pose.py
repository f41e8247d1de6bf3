"""Tests of two-view pose in the three layouts, with an oracle, a broken matcher, and malicious indexes."""

import json
import pickle
import sys

import numpy as np
import pytest
from evaluation_data import (
    SHARED,
    megadepth_index,
    run_evaluation,
    write_cameras_json,
    write_hpatches,
    write_matchers,
    write_megadepth,
    write_scannet,
)
from PIL import ExifTags, Image

from dualrc.errors import ConfigError, DataError
from dualrc.evaluation.baselines import opencv_relative_pose
from dualrc.evaluation.pose import OPENCV_MAGSAC, OPENCV_RANSAC, POSELIB
from dualrc.evaluation.pose_data import read_index, read_pose_data
from dualrc.geometry import Camera, transform_points
from dualrc.matches import Matches
from dualrc.metrics import pose_error_deg

WRITERS = {"cameras.json": write_cameras_json, "megadepth": write_megadepth, "scannet": write_scannet}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write the matchers and one dataset in each layout."""
    folder = tmp_path_factory.mktemp("pose")
    write_matchers(folder)
    for layout, write in WRITERS.items():
        (folder / layout).mkdir()
        write(folder / layout)
    return folder


def run(data, root, out, *names, **settings):
    return run_evaluation("pose", (root,), out, data, names, **settings)


@pytest.mark.parametrize("layout", WRITERS)
def test_an_oracle_is_perfect_and_a_broken_matcher_is_not(data, tmp_path, layout):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    content, text = run(data, data / layout, tmp_path, "pose_oracle", "broken")
    oracle, broken = (result.figures.overall for result in content["results"])
    assert content["protocol"]["layouts"] == [layout]
    assert set(oracle.auc) == {POSELIB, OPENCV_RANSAC, OPENCV_MAGSAC}
    assert min(auc for aucs in oracle.auc.values() for auc in aucs) > 0.98
    assert oracle.epipolar_share > 0.99
    assert max(aucs[0] for aucs in broken.auc.values()) < 0.2
    assert "PoseLib" in text and "USAC_MAGSAC" in text
    assert {path.name for path in tmp_path.iterdir()} >= {"report.html", "results.json", "figures"}


def test_zero_matches_count_as_failures(data, tmp_path):
    content, _ = run(data, data / "scannet", tmp_path, "nothing")
    score = content["results"][0].figures.overall
    assert score.pairs == 4
    assert score.auc[POSELIB] == (0, 0, 0)
    assert score.not_estimated[POSELIB] == 4
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["results"][0]["figures"]["pairs"][0]["errors_deg"][POSELIB] is None


def test_without_opencv_poselib_scores_alone(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    content, text = run(data, data / "scannet", tmp_path, "pose_oracle")
    assert list(content["results"][0].figures.overall.auc) == [POSELIB]
    assert "OpenCV's estimators are left out" in text
    with pytest.raises(ConfigError, match=r"pip install 'dualrc\[baselines\]'"):
        run(data, data / "scannet", tmp_path, "sift")


def test_the_layouts_hold_the_same_poses(data):
    truths = [list(read_pose_data(data / layout).pairs.values()) for layout in ("megadepth", "scannet")]
    for megadepth, scannet in zip(*truths, strict=True):
        assert megadepth.cam1_from_cam0 == pytest.approx(scannet.cam1_from_cam0, abs=1e-6)
        camera, same = megadepth.cameras((320, 240), (320, 240))[0], scannet.cameras((320, 240), (320, 240))[0]
        assert np.allclose(camera.K, same.K, atol=1e-3)


def test_scannet_poses_from_files_where_the_index_has_none(data, tmp_path):
    write_scannet(tmp_path, rel_pose=False)
    there, here = (list(read_pose_data(root).pairs.values()) for root in (data / "scannet", tmp_path))
    for a, b in zip(there, here, strict=True):
        assert a.cam1_from_cam0 == pytest.approx(b.cam1_from_cam0, abs=1e-6)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_raw_pickles_of_any_age(tmp_path, protocol):
    path = tmp_path / "index.npz"
    path.write_bytes(pickle.dumps(megadepth_index(), protocol=protocol))
    index = read_index(path)
    assert index["image_paths"][1] == "Undistorted_SfM/0015/images/0001.jpg"
    assert index["poses"][2] == pytest.approx(megadepth_index()["poses"][2])
    assert index["image_paths"][4] is None
    assert index["pair_infos"][0][0] == (0, 1)


def test_real_npz_files_with_objects_in_them(tmp_path):
    arrays = {key: value for key, value in megadepth_index().items() if key != "pair_infos"}
    np.savez(tmp_path / "index.npz", **arrays, count=np.arange(3))
    index = read_index(tmp_path / "index.npz")
    assert index["image_paths"][0] == "Undistorted_SfM/0015/images/0000.jpg"
    assert index["count"].tolist() == [0, 1, 2]


class Malicious:
    """Runs a command when it is unpickled without restrictions."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.target}",)


class Indirect:
    """Evaluates a text when it is unpickled without restrictions."""

    def __reduce__(self):
        return eval, ("1 + 1",)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    target = tmp_path / "owned"
    content = {"pair_infos": [Malicious(target)], "image_paths": []}
    (tmp_path / "bad.npz").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(DataError, match="system, which is not allowed"):
        read_index(tmp_path / "bad.npz")
    with pytest.raises(DataError, match="not allowed"):
        read_pose_data(tmp_path)
    assert not target.exists()
    (tmp_path / "bad.npz").write_bytes(pickle.dumps({"x": Indirect()}, protocol=protocol))
    with pytest.raises(DataError, match="eval, which is not allowed"):
        read_index(tmp_path / "bad.npz")


def test_a_malicious_pickle_inside_a_real_npz_is_refused(tmp_path):
    target = tmp_path / "owned"
    np.savez(tmp_path / "bad.npz", pair_infos=np.array([Malicious(target), None], dtype=object))
    with pytest.raises(DataError, match="not allowed"):
        read_index(tmp_path / "bad.npz")
    assert not target.exists()


def test_indexes_that_are_none(tmp_path):
    for name, content in (("empty", b""), ("noise", bytes(range(256))), ("list", pickle.dumps([1, 2]))):
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            read_index(path)
    with pytest.raises(DataError, match="nowhere"):
        read_index(tmp_path / "nowhere.npz")


def test_roots_that_are_none(data, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_pose_data(tmp_path / "nowhere")
    with pytest.raises(DataError, match="not a dataset for poses"):
        read_pose_data(tmp_path)
    with pytest.raises(DataError, match="evaluate hpatches"):
        run(data, write_hpatches(tmp_path / "h", ["v_wall"]), tmp_path / "out", "nothing")
    with pytest.raises(ConfigError, match="crop"):
        run(data, data / "scannet", tmp_path / "out", "nothing", crop=(1, 1))
    with pytest.raises(DataError, match="Two roots have the pair"):
        run_evaluation("pose", (data / "scannet", data / "scannet"), tmp_path / "out", data, ["nothing"])


def test_incomplete_data_sets(data, tmp_path):
    root = write_scannet(tmp_path / "s")
    (root / "intrinsics.npz").unlink()
    with pytest.raises(DataError, match=r"no intrinsics\.npz"):
        read_pose_data(root)
    np.savez(root / "intrinsics.npz", scene0001_00=np.eye(3))
    with pytest.raises(DataError, match=r"no pair that can be scored.*has no scene0707_00"):
        read_pose_data(root)
    np.savez(root / "test.npz", name=np.zeros((3, 2), int))
    with pytest.raises(DataError, match="name has 4 columns"):
        read_pose_data(root)
    (tmp_path / "m").mkdir()
    index = megadepth_index()
    index["pair_infos"].append(((0, 4), 0.2, None))
    (tmp_path / "m" / "0015.npz").write_bytes(pickle.dumps(index))
    with pytest.raises(DataError, match="an index but no images"):
        read_pose_data(tmp_path / "m")


def test_missing_images_and_entries_are_named_and_counted(data, tmp_path):
    root = write_megadepth(tmp_path / "m" if (tmp_path / "m").mkdir() is None else tmp_path)
    index = megadepth_index()
    index["pair_infos"].append(((0, 4), 0.2, None))
    next(root.glob("*/*.npz")).write_bytes(pickle.dumps(index))
    (root / "Undistorted_SfM" / "0015" / "images" / "0003.jpg").write_text("broken")
    content, text = run(data, root, tmp_path / "out", "pose_oracle")
    assert "pair 0 4 is not scored: it has no image" in text
    assert "1 of 4 pairs could not be matched" in text
    assert content["results"][0].figures.overall.auc[POSELIB][0] == pytest.approx(0.75, abs=0.01)


def bad_matrices():
    nan, zero = np.eye(3, 4), np.zeros((3, 4))
    nan[1, 3] = np.nan
    return {"nan": nan, "zero": zero, "mirrored": np.diag([-1.0, 1, 1, 1])[:3], "same place": np.eye(3, 4)}


def test_bad_poses_are_found_when_reading(data, tmp_path):
    root = write_scannet(tmp_path / "s")
    with np.load(root / "test.npz") as arrays:
        names, poses = arrays["name"], arrays["rel_pose"]
    bad = list(bad_matrices().values())
    np.savez(
        root / "test.npz", name=np.concatenate([names] * 2), rel_pose=np.concatenate([[b.ravel() for b in bad], poses])
    )
    found = read_pose_data(root)
    assert len(found.pairs) == 4 and len(found.notes) == 4
    for note, words in zip(
        found.notes, ("not finite", "no valid rotation", "no valid rotation", "no translation"), strict=True
    ):
        assert "scene0707_00/color/" in note and "is not scored: " in note and words in note
    content, text = run(data, root, tmp_path / "out", "pose_oracle")
    assert not content["results"][0].failures
    assert content["results"][0].figures.overall.auc[POSELIB][0] > 0.98
    assert "is not scored" in text


@pytest.mark.parametrize("K", [np.full((3, 3), np.nan), np.zeros((3, 3)), np.diag([-1.0, 1, 1])])
def test_bad_intrinsics_are_found_when_reading(tmp_path, K):
    root = tmp_path / "m"
    root.mkdir()
    write_megadepth(root)
    index = megadepth_index()
    index["intrinsics"][3] = K
    next(root.glob("*/*.npz")).write_bytes(pickle.dumps(index))
    found = read_pose_data(root)
    assert len(found.pairs) == 3
    assert [note.split(":")[0] for note in found.notes] == ["0015_0.3_0.5.npz, pair 2 3 is not scored"]
    np.savez(write_scannet(tmp_path / "s") / "intrinsics.npz", scene0707_00=K)
    with pytest.raises(DataError, match=r"no pair that can be scored\. scene0707_00/color/15\.jpg .* is not scored: K"):
        read_pose_data(tmp_path / "s")


def test_a_scene_with_bad_cameras_does_not_stop_the_others(tmp_path):
    root = write_cameras_json(tmp_path)
    whole = read_pose_data(root)
    (root / "village").mkdir()
    bad = {"0.png": {"width": 4, "height": 4, "K": [[0, 0, 0]] * 3}}
    (root / "village" / "cameras.json").write_text(json.dumps(bad))
    found = read_pose_data(root)
    assert len(found.pairs) == len(whole.pairs)
    assert "village is not scored: " in found.notes[0]


def test_images_of_another_shape_are_not_scored(data, tmp_path):
    root = write_scannet(tmp_path)
    file = root / "scene0707_00" / "color" / "600.jpg"
    with Image.open(file) as image:
        # A stretch of 2.1 %.
        image.resize((320, 235)).save(file)
    found = read_pose_data(root)
    assert len(found.pairs) == 3
    assert "585.jpg scene0707_00/color/600.jpg is not scored: K is for an image of 640x480" in found.notes[0]
    with Image.open(file) as image:
        # The size of ScanNet's original images.
        image.resize((1296, 968)).save(file)
    assert len(read_pose_data(root).pairs) == 4
    truth = next(iter(found.pairs.values()))
    with pytest.raises(DataError, match="aspect ratio"):
        truth.cameras((320, 240), (240, 320))
    # A rotated image is read upright.
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with Image.open(file) as image:
        image.transpose(Image.Transpose.ROTATE_90).save(file, exif=exif)
    assert len(read_pose_data(root).pairs) == 4


def corrupt(kind, path):
    """Write an .npz file with a certain kind of damage."""
    np.savez_compressed(path, pair_infos=np.arange(1000))
    data = bytearray(path.read_bytes())
    # Start of the compressed bytes.
    start = 30 + len("pair_infos.npy") + int.from_bytes(data[28:30], "little")
    directory = data.index(b"PK\x01\x02")
    if kind == "checksum":
        data[directory + 16] ^= 0xFF
    elif kind == "compressed":
        data[start : start + 40] = b"\xff" * 40
    elif kind == "method":
        data[8], data[directory + 10] = 99, 99
    elif kind == "encrypted":
        data[6] |= 1
        data[directory + 8] |= 1
    elif kind == "header":
        data[:4] = b"XXXX"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["checksum", "compressed", "method", "encrypted", "header"])
def test_a_broken_index_is_told_in_one_line_and_does_not_stop_other_layouts(data, tmp_path, kind):
    path = corrupt(kind, tmp_path / "stray.npz")
    with pytest.raises(DataError, match=r"stray\.npz is not an index, or damaged") as caught:
        read_index(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"stray\.npz is not an index, or damaged"):
        read_pose_data(tmp_path)
    for write in (write_cameras_json, write_scannet):
        found = read_pose_data(write(tmp_path))
        assert len(found.pairs) in (4, 6)
        assert "stray.npz" in found.notes[0]


@pytest.mark.parametrize("method", ["RANSAC", "USAC_MAGSAC"])
def test_poses_of_far_scenes_are_found(method):
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    rng = np.random.default_rng(0)
    camera = Camera.from_focal((4000, 3000), 4000)
    truth = np.column_stack([np.eye(3), [-1, 0.1, 0.2]])
    points = np.column_stack([rng.uniform(-0.4, 0.4, (500, 2)), np.ones(500)]) * rng.uniform(100, 400, (500, 1))
    matches = Matches(
        points0=camera.project(points),
        points1=camera.project(transform_points(truth, points)),
        scores=np.ones(500),
        size0=camera.size,
        size1=camera.size,
    )
    pose = opencv_relative_pose(matches, camera, camera, method=method, threshold_px=0.5)
    assert pose is not None
    assert pose_error_deg(pose, truth) < 1
    # The points are in front of the cameras.
    assert pose[:, 3] @ truth[:, 3] > 0


def test_pairs_may_be_chosen(tmp_path):
    root = write_cameras_json(tmp_path)
    assert len(read_pose_data(root).pairs) == 6
    (root / "town" / "pairs.txt").write_text("0000.png 0001.png\n\n0003.png 0001.png\n")
    names = [(pair.path0.stem, pair.path1.stem) for pair in read_pose_data(root).pairs]
    assert names == [("0000", "0001"), ("0003", "0001")]
    (root / "town" / "pairs.txt").write_text("0000.png nobody.png\n")
    with pytest.raises(DataError, match="line 1"):
        read_pose_data(root)


def strecha(tmp_path, scene):
    root = SHARED / "strecha" / scene
    if not root.is_dir():
        pytest.skip("../shared/data/strecha is not here")
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    content, _ = run(tmp_path, root, tmp_path / "out", "sift-ratio")
    return content["results"][0].figures.overall


@pytest.mark.slow
def test_root_sift_on_herz_jesus(tmp_path):
    score = strecha(tmp_path, "Herz-Jesus-P8")
    assert score.pairs == 28
    assert score.auc[POSELIB][0] == pytest.approx(0.937, abs=0.02)


@pytest.mark.slow
def test_root_sift_on_fountain(tmp_path):
    score = strecha(tmp_path, "fountain-P11")
    assert score.pairs == 55
    assert score.auc[POSELIB][0] == pytest.approx(0.931, abs=0.02)
    # The estimators differ by many points, which is why results name them.
    assert score.auc[POSELIB][0] - score.auc[OPENCV_RANSAC][0] > 0.02
