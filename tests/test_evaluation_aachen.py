"""Tests of Aachen Day-Night in both published layouts, with an oracle, a broken matcher, and damaged datasets."""

import io
import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from aachen_data import (
    DATABASE,
    DAY_QUERIES,
    NEW_NIGHT_QUERY,
    NIGHT_QUERIES,
    SEQUENCE,
    SHOTS,
    SIZE,
    write_matchers,
    write_truth,
    write_v1_0,
    write_v1_1,
)
from collection_data import run_on_a_full_disk
from evaluation_data import SHARED, write_cameras_json, write_hpatches
from PIL import ExifTags, Image
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("pycolmap", reason="pycolmap is not installed")

from dualrc.cli import app
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation import evaluate
from dualrc.evaluation.aachen import THRESHOLDS, Aachen, AachenSettings, GroupScore, QueryScore
from dualrc.evaluation.aachen_data import read_aachen
from dualrc.evaluation.data_files import read_published
from dualrc.geometry import Camera, rotation_error_deg
from dualrc.localize import read_poses
from dualrc.matches import Matches

WRITERS = {"v1.0": write_v1_0, "v1.1": write_v1_1}
QUERIES = tuple(name for name in SHOTS if name.startswith("query/"))
NIGHT_LIST = "queries/night_time_queries_with_intrinsics.txt"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write the matchers, the true poses, and a dataset in each layout."""
    folder = tmp_path_factory.mktemp("aachen")
    write_matchers(folder)
    write_truth(folder / "truth.txt", QUERIES)
    for version, write in WRITERS.items():
        (folder / version).mkdir()
        write(folder / version)
    return folder


@pytest.fixture
def root(data, tmp_path):
    """Return a copy of v1.0 that a test may damage."""
    return Path(shutil.copytree(data / "v1.0", tmp_path / "root"))


def run(data, root, out, *names, truth=True, **settings):
    """Return the results, and everything that was printed."""
    matchers = tuple(name if name == "dualrc" else f"{data / 'matchers.py'}:{name}" for name in names)
    truth_file = data / "truth.txt" if truth else None
    printed = io.StringIO()
    console = Console(width=160, file=printed)
    options = {"roots": (root,), "matchers": matchers, "out": out, "truth": truth_file, **settings}
    content = evaluate("aachen", screen=console, messages=console, **options)
    return content, " ".join(printed.getvalue().split())


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("version", WRITERS)
def test_an_oracle_is_perfect_and_a_broken_matcher_is_not(data, tmp_path, version):
    content, text = run(data, data / version, tmp_path, "oracle", "broken")
    oracle, broken = (result.figures for result in content["results"])
    night = oracle.conditions["night"]
    assert content["protocol"]["version"] == version
    assert night.queries == night.localized == night.scored == (2 if version == "v1.0" else 3)
    assert night.shares == (1, 1, 1)
    # The limit is the precision of 2D points in float32.
    assert night.median_error_m < 1e-4 and night.median_error_deg < 1e-3
    assert oracle.map.points > 400 and oracle.map.error_px < 0.1
    assert broken.conditions["night"].shares == (0, 0, 0)
    assert broken.conditions["night"].localized == 0
    assert "DualRC-Net (paper) night 98 79.6 88.8 100.0" in text
    assert "matchers:oracle night" in text and "Queries that were not localized matcher query reason" in text
    assert {path.name for path in tmp_path.iterdir()} >= {"report.html", "results.json", "figures"}
    assert (tmp_path / "figures" / "aachen_recall.png").is_file()
    assert not list(tmp_path.glob(".scoring-*"))


def test_the_submission_is_as_the_service_wants_it(data, tmp_path):
    content, text = run(data, data / "v1.1", tmp_path, "blind_at_night", truth=False)
    path = tmp_path / "Aachen_v1_1_eval_[matchers_blind_at_night].txt"
    assert path.name in text
    (line,) = path.read_text().splitlines()
    name, *values = line.split()
    assert name == Path(DAY_QUERIES[0]).name and len(values) == 7
    assert np.linalg.norm([float(value) for value in values[:4]]) == pytest.approx(1)
    true, found = SHOTS[DAY_QUERIES[0]].view.cam_from_world, read_poses(path)[name]
    assert np.linalg.norm(found[:, 3] - true[:, 3]) < 1e-4
    assert rotation_error_deg(found[:, :3], true[:, :3]) < 1e-3
    scores = content["results"][0].figures
    assert scores.conditions["day"].localized == 1 and scores.conditions["night"].localized == 0
    assert scores.conditions["night"].shares == () and "The ground truth is not public" in text
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["results"][0]["figures"]["queries"][0]["error_m"] is None


@pytest.mark.slow
@pytest.mark.parametrize("version", WRITERS)
def test_the_shipped_weights_localize_by_day_and_by_night(data, tmp_path, version):
    content, _ = run(data, data / version, tmp_path, "dualrc", size=320)
    night = content["results"][0].figures.conditions["night"]
    assert night.localized == night.queries
    assert night.shares[0] == 1 and night.median_error_m < 0.2


def test_both_layouts_hold_the_same_cameras(data):
    old, new = read_aachen(data / "v1.0"), read_aachen(data / "v1.1")
    assert set(old.database) == set(DATABASE)
    assert set(new.database) == {*DATABASE, *SEQUENCE}
    for name in DATABASE:
        a, b, view = old.database[name], new.database[name], SHOTS[name].view
        assert a.cam_from_world == pytest.approx(b.cam_from_world, abs=1e-8)
        assert a.cam_from_world == pytest.approx(view.cam_from_world, abs=1e-8)
        assert pytest.approx(view.K, abs=1e-9) == a.K == pytest.approx(b.K, abs=1e-9)


def test_images_where_the_published_code_has_them(root):
    (root / "database_and_query").mkdir()
    (root / "images" / "images_upright").rename(root / "database_and_query" / "images_upright")
    assert all(pair.path0.is_file() and pair.path1.is_file() for pair in read_aachen(root).pairs)


def test_each_pair_is_matched_once_and_has_its_query_first(data):
    found = read_aachen(data / "v1.1")
    names = [frozenset((pair.name0, pair.name1)) for pair in found.pairs]
    assert len(names) == len(set(names)) == 15 + 3 * 6 + 5
    assert all(pair.path0.is_file() and pair.path1.is_file() for pair in found.pairs)
    assert all(not pair.name1.startswith("query/") for pair in found.pairs)
    assert sorted(found.queries[NEW_NIGHT_QUERY].candidates) == sorted((*DATABASE, *SEQUENCE))
    assert len(found.queries[DAY_QUERIES[0]].candidates) == 5


@pytest.mark.parametrize("name", [DATABASE[0], DATABASE[3], NIGHT_QUERIES[1], SEQUENCE[0]])
def test_distortion_is_undone_exactly(name):
    shot, rng = SHOTS[name], np.random.default_rng(0)
    model, width, height, *params = shot.intrinsics.split()
    camera = Camera.from_colmap(model, (int(width), int(height)), [float(value) for value in params])
    points = rng.uniform((0, 0), SIZE, (200, 2))
    undone = camera.undistort(points)
    assert np.abs(undone - shot.undistort(points)).max() < 1e-6
    assert np.abs(shot.distort(undone) - points).max() < 1e-6
    assert (np.abs(undone - points).max() > 1) == (shot.k != 0)


def test_a_lens_sees_nothing_beyond_its_edge():
    camera = Camera.from_colmap("SIMPLE_RADIAL", (320, 240), [300.0, 160.0, 120.0, -0.2])
    assert np.isnan(camera.undistort(np.array([[1e4, 1e4]]))).all()


def test_images_that_are_stored_on_their_side(data, root, tmp_path):
    """An EXIF rotation changes the matcher's input, but not the pose of the stored image."""
    name = NIGHT_QUERIES[0]
    path = root / "images" / "images_upright" / name
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    with Image.open(path) as image:
        image.save(path, exif=exif, quality=95)
    benchmark = Aachen(AachenSettings(roots=(root,), out=tmp_path))
    pair = next(pair for pair in benchmark.pairs if pair.name0 == name)
    stored = np.array([[10.0, 20.0], [300.0, 200.0]])
    # Rotated clockwise.
    upright = np.stack([SIZE[1] - 1 - stored[:, 1], stored[:, 0]], axis=1)
    matches = Matches(
        points0=upright, points1=stored, scores=np.ones(2), size0=SIZE[::-1], size1=SIZE, info={"seen0": (160, 240)}
    )
    found = benchmark.undistort(pair, matches)
    assert found.points0 == pytest.approx(SHOTS[name].undistort(stored), abs=1e-4)
    assert found.points1 == pytest.approx(SHOTS[pair.name1].undistort(stored), abs=1e-4)
    assert found.size0 == SIZE and found.info == {"network_size0": (160, 240)}


def test_a_second_run_matches_nothing_again(data, tmp_path):
    run(data, data / "v1.0", tmp_path, "nothing")
    _, text = run(data, data / "v1.0", tmp_path, "nothing", truth=False, top=300)
    assert "20 pairs were in" in text and "0 new" in text
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "matchers.py").write_text((data / "matchers.py").read_text() + "\n# another config\n")
    _, text = run(changed, data / "v1.0", tmp_path, "nothing", truth=False)
    assert "was made with another config or dataset and is not used" in text


def test_what_is_wrong_with_a_query_is_named_and_counts_as_failure(data, root, tmp_path):
    list_path, extra = root / NIGHT_LIST, "query/night/milestone/IMG_1.jpg"
    lines = list_path.read_text().splitlines()
    broken = lines[1].replace("SIMPLE_RADIAL", "SIMPLE_RADIANT")
    alone = lines[0].replace(NIGHT_QUERIES[0], "query/night/nexus5x/alone.jpg")
    list_path.write_text("\n".join([lines[0], broken, alone]) + "\n")
    with (root / "image_pairs_to_match.txt").open("a") as file:
        file.write(f"{extra} {DATABASE[0]}\n")
    truth = tmp_path / "truth.txt"
    lines = (data / "truth.txt").read_text().splitlines()
    pose = lines[0].split(maxsplit=1)[1]
    truth.write_text("\n".join([*lines, f"IMG_1.jpg {pose}", f"alone.jpg {pose}"]) + "\n")
    quiet, matchers = Console(file=io.StringIO()), (f"{data / 'matchers.py'}:oracle",)
    options = {"roots": (root,), "matchers": matchers, "out": tmp_path / "out", "truth": truth}
    figures = evaluate("aachen", screen=quiet, messages=quiet, **options)["results"][0].figures
    reasons = {Path(query.name).name: query.reason for query in figures.queries}
    assert reasons.pop(Path(NIGHT_QUERIES[0]).name) is None
    assert "SIMPLE_RADIANT" in reasons.pop(Path(NIGHT_QUERIES[1]).name)
    assert "no intrinsics in queries/night_time_queries" in reasons.pop("IMG_1.jpg")
    assert "add candidates" in reasons.pop("alone.jpg")
    assert not reasons
    night = figures.conditions["night"]
    assert (night.queries, night.localized, night.scored) == (4, 1, 4)
    assert night.shares == (0.25, 0.25, 0.25)


def test_images_that_are_missing_or_of_another_size(data, root, tmp_path):
    images = root / "images" / "images_upright"
    (images / NIGHT_QUERIES[0]).unlink()
    (images / DATABASE[0]).write_bytes(b"not an image")
    Image.new("RGB", (100, 80)).save(images / DATABASE[1])
    content, text = run(data, root, tmp_path / "out", "oracle")
    result = content["results"][0]
    assert len(read_aachen(root).database) == 4
    assert f"The database image {DATABASE[1]} is not used: The intrinsics are for 320x240 pixels" in text
    reasons = {query.name: query.reason for query in result.figures.queries}
    assert reasons == {NIGHT_QUERIES[0]: "None of its pairs could be matched.", NIGHT_QUERIES[1]: None}
    # All pairs of the file that is not an image, and of the missing query.
    assert len(result.failures) == 3 + 1 + 4
    assert "8 of 14 pairs could not be matched" in text


def test_a_query_of_another_size_is_not_matched(root):
    Image.new("RGB", (100, 80)).save(root / "images" / "images_upright" / NIGHT_QUERIES[0])
    found = read_aachen(root)
    assert "100x80" in found.queries[NIGHT_QUERIES[0]].reason and len(found.queries[NIGHT_QUERIES[0]].candidates) == 5
    assert not any(pair.name0 == NIGHT_QUERIES[0] for pair in found.pairs)


def test_a_map_without_points_fails_every_query(data, tmp_path):
    content, text = run(data, data / "v1.0", tmp_path, "nothing")
    figures = content["results"][0].figures
    assert figures.map.points == 0 and figures.conditions["night"].shares == (0, 0, 0)
    assert "0 correspondences are too few" in text
    assert (tmp_path / "Aachen_eval_[matchers_nothing].txt").read_text() == ""


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("3D-models/aachen_cvpr2018_db.nvm", r"is not Aachen Day-Night: no 3D-models/aachen_cvpr2018_db.nvm"),
        ("3D-models/database_intrinsics.txt", r"database_intrinsics.txt does not exist; download the published file"),
        ("images", r"has no images in images/images_upright; unpack them there"),
        ("queries", r"has no queries: neither queries/day_time_queries"),
        ("image_pairs_to_match.txt", r"The list of pairs .*image_pairs_to_match.txt does not exist"),
        (".", r"does not exist; check the path"),
    ],
)
def test_incomplete_roots(data, root, remove, message):
    target = root / remove
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with pytest.raises(DataError, match=message):
        read_aachen(root)


def test_roots_of_other_benchmarks(tmp_path):
    write_hpatches(tmp_path / "hpatches")
    write_cameras_json(tmp_path / "pose")
    (tmp_path / "inloc" / "database" / "cutouts").mkdir(parents=True)
    for name in ("hpatches", "pose", "inloc"):
        with pytest.raises(DataError, match=f"it looks like {name}: run `dualrc evaluate {name}` on it"):
            read_aachen(tmp_path / name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("NVM_V3", "NVM_V4", "has no number of images"),
        ("NVM_V3 \n\n5", "NVM_V3 \n\n500", "is truncated: it has fewer than its 500 images"),
        (f"{DATABASE[2]} ", f"x y z\n{DATABASE[2]} ", "line 6: not an image with its pose"),
    ],
)
def test_broken_nvm_files(root, old, new, message):
    edit(root / "3D-models" / "aachen_cvpr2018_db.nvm", old, new)
    with pytest.raises(DataError, match=message):
        read_aachen(root)


def test_a_database_image_without_intrinsics_is_named(root):
    edit(root / "3D-models" / "database_intrinsics.txt", f"{DATABASE[2]} ", "db/other.jpg ")
    found = read_aachen(root)
    assert DATABASE[2] not in found.database and len(found.database) == 4
    assert any(f"The database image {DATABASE[2]} is not used" in note for note in found.notes)
    assert any("listed pairs have no two usable images" in note for note in found.notes)
    assert all(DATABASE[2] not in (pair.name0, pair.name1) for pair in found.pairs)


@pytest.mark.parametrize("file", ["cameras.bin", "images.bin"])
def test_broken_colmap_models(data, tmp_path, file):
    root = Path(shutil.copytree(data / "v1.1", tmp_path / "root"))
    path = root / "3D-models" / "aachen_v_1_1" / file
    content = path.read_bytes()
    for cut in range(0, len(content), 37):
        path.write_bytes(content[:cut])
        with pytest.raises(DataError, match="damaged"):
            read_aachen(root)
    path.write_bytes(struct.pack("<Q", 2**60) + content[8:])
    with pytest.raises(DataError, match="damaged"):
        read_aachen(root)


def test_lists_of_pairs_that_are_none(root):
    (root / "image_pairs_to_match.txt").write_text(f"{DATABASE[0]} {DATABASE[1]}\n{DATABASE[0]}\n")
    with pytest.raises(DataError, match=r"line 2: 'db/1.jpg' is not two images"):
        read_aachen(root)
    (root / "image_pairs_to_match.txt").write_text(f"{DATABASE[0]} {DATABASE[1]}\n")
    with pytest.raises(DataError, match="no candidates for any query"):
        read_aachen(root)


def test_both_versions_in_one_folder(data, tmp_path):
    root = Path(shutil.copytree(data / "v1.1", tmp_path / "root"))
    shutil.copytree(data / "v1.0", root, dirs_exist_ok=True)
    # The lists of v1.0 overwrite those of v1.1.
    for file in ("day", "night"):
        name = f"queries/{file}_time_queries_with_intrinsics.txt"
        shutil.copy(data / "v1.1" / name, root / name)
    found = read_aachen(root)
    assert found.version == "v1.1" and set(found.database) == {*DATABASE, *SEQUENCE}
    assert any("v1.1 is used" in note for note in found.notes)


def test_true_poses_of_others(data, tmp_path):
    (tmp_path / "truth.txt").write_text("other.jpg 1 0 0 0 0 0 0\n")
    settings = AachenSettings(roots=(data / "v1.0",), out=tmp_path, truth=tmp_path / "truth.txt")
    with pytest.raises(DataError, match="has none of the queries"):
        Aachen(settings)
    (tmp_path / "truth.txt").write_text("")
    with pytest.raises(DataError, match="has none of the queries"):
        Aachen(settings)
    write_truth(tmp_path / "truth.txt", NIGHT_QUERIES[:1])
    partly = Aachen(settings)
    assert any("1 queries have no ground truth" in note for note in partly.notes)


def test_errors_at_the_thresholds_count_and_beyond_do_not():
    def query(error_m, error_deg):
        lost = None if np.isfinite(error_m) else "lost"
        return QueryScore(
            name="", condition="", reason=lost, candidates=1, correspondences=1, inliers=1,
            error_m=error_m, error_deg=error_deg,
        )  # fmt: skip

    exact = GroupScore.of([query(*limits) for limits in THRESHOLDS])
    assert exact.shares == pytest.approx((1 / 3, 2 / 3, 1))
    beyond = [
        query(0.51, 1),
        query(0.1, 2.01),
        query(0.9, 5.01),
        query(5.01, 1),
        query(1, 10.01),
        query(np.inf, np.inf),
    ]
    assert GroupScore.of(beyond).shares == pytest.approx((0, 2 / 6, 3 / 6))
    assert GroupScore.of([]).shares == ()


def test_the_paper_s_table():
    published = read_published("aachen_published.json")
    assert published["DualRC-Net"] == [79.6, 88.8, 100.0] and len(published) == 6


def test_the_command(data, tmp_path):
    done = CliRunner().invoke(
        app,
        [
            *("evaluate", "aachen", str(data / "v1.0"), "--matcher", f"{data / 'matchers.py'}:oracle"),
            *("--truth", str(data / "truth.txt"), "--out", str(tmp_path / "out")),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "100.0" in done.output and (tmp_path / "out" / "Aachen_eval_[matchers_oracle].txt").is_file()
    with pytest.raises(ConfigError, match="--truth is an option of inloc and aachen only; omit it"):
        evaluate("pose", roots=(tmp_path,), out=tmp_path, truth=tmp_path)
    with pytest.raises(ConfigError, match="one ROOT"):
        evaluate("aachen", roots=(tmp_path, tmp_path), out=tmp_path)


@pytest.mark.slow
def test_a_camera_of_a_real_scene_left_out(tmp_path):
    """The numbers in docs/benchmarks.md come from the same script, at the default size of the preset."""
    if not (SHARED / "strecha").is_dir():
        pytest.skip("the multi-view scenes are not here")
    import subprocess
    import sys

    script = Path(__file__).parents[1] / "benchmarks" / "aachen.py"
    options = ["--scene", "Herz-Jesus-P8", "--size", "480", "--work", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(script), str(SHARED / "strecha"), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "Herz-Jesus-P8" in line and "│" in line)
    queries, localized = (int(cell) for cell in row.split("│")[2:4])
    assert queries == localized == 8
    assert row.split("│")[-2].strip().endswith("100.0%")


LIMITED = """
import resource, sys
from pathlib import Path
import test_export
from dualrc.errors import OutputError
from dualrc.evaluation.triangulation import triangulate
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
scene, merged, store = test_export.export(folder)
(folder / "work").mkdir()
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    triangulate(scene.cameras, merged, folder / "work", lambda *_: None)
except OutputError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of file sizes")
@pytest.mark.parametrize("limit", [2_000, 110_000])
def test_a_full_disk_is_one_clear_line(tmp_path, limit):
    """pycolmap aborts the process if a transaction cannot be committed."""
    assert run_on_a_full_disk(LIMITED, tmp_path, limit).startswith("Cannot write ")
