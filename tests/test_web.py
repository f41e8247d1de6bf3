"""The service over real HTTP: every endpoint, with answers checked against the matcher's own."""

import io
import json
import sqlite3
import struct
import sys
import time
from dataclasses import replace

import numpy as np
import pycolmap
import pytest
from collection_data import run_on_a_full_disk
from conftest import same_matches
from PIL import Image
from web_data import encode, events, pair_of, refused, scene, serving, upload, write_model

from dualrc import geometry
from dualrc.image import Scale
from dualrc.matches import Estimate, Matches
from dualrc.types import UNSET
from dualrc.web import pairs, schemas
from dualrc.web.reconstruction import Reconstruction
from dualrc.web.schemas import MatchOptions
from dualrc.web.wire import grid_of, unpack_warp


@pytest.fixture(scope="module")
def served():
    with serving() as served:
        yield served


@pytest.fixture
def http(served):
    with served.http() as http:
        yield http


def loaded(content: bytes, tmp_path, name: str = "m.npz") -> Matches:
    (tmp_path / name).write_bytes(content)
    return Matches.load(tmp_path / name)


def test_health_info_and_openapi(http, served):
    assert http.get("/healthz").json()["status"] == "ok"
    info = http.get("/v1/info").json()
    assert (
        info["device"] == "cpu"
        and info["qualities"] == ["standard", "high", "search"]
        and info["reconstruction"] is None
    )
    assert [one["name"] for one in info["examples"]] == ["town", "wall", "unrelated"]
    described = http.get("/openapi.json").json()
    paths = described["paths"]
    assert {"/v1/match", "/v1/images", "/v1/points", "/v1/warp", "/v1/pairs/{number}", "/v1/collections"} <= set(paths)
    assert all(method["summary"] for path in paths.values() for method in path.values())
    content = paths["/v1/match"]["post"]["requestBody"]["content"]
    assert "threshold_px" in content["application/json"]["schema"]["properties"]
    form = content["multipart/form-data"]["schema"]
    assert form["required"] == ["image0", "image1"] and "null" not in json.dumps(form)
    assert "securitySchemes" not in described["components"]


def documented(http, method: str, path: str, ids: dict[str, str] | None = None, **content):
    """Send a request and check its response against /openapi.json; returns the response."""
    described = http.get("/openapi.json").json()
    answer = http.request(method, path.format(**(ids or {})), **content)
    told = described["paths"][path.partition("?")[0]][method.lower()]["responses"][str(answer.status_code)]
    if "content" in told:
        kind = answer.headers["content-type"].partition(";")[0]
        name = told["content"][kind]["schema"].get("$ref", "").rpartition("/")[2]
        assert name or kind != "application/json"
        if name:
            getattr(schemas, name).model_validate_json(answer.content)
    return answer


def test_responses_are_as_documented(http, model_folder):
    images = [
        documented(http, "POST", "/v1/images", files={"file": encode(image)}).json()["id"] for image in pair_of(4)
    ]
    ids = {"number": images[0]}
    documented(http, "GET", "/v1/images/{number}", ids)
    documented(http, "GET", "/v1/images/{number}/view", ids)
    body = {"image0": images[0], "image1": images[1]}
    options = {**body, "covariance": True, "estimate": "essential"}
    pair = {"number": documented(http, "POST", "/v1/match", json=options).json()["pair"]}
    for form in ("json", "npz", "csv", "colmap"):
        documented(http, "GET", "/v1/pairs/{number}?format=" + form, pair)
    for kind in ("homography", "fundamental", "essential"):
        documented(http, "POST", "/v1/pairs/{number}/estimate", pair, json={"kind": kind})
    documented(http, "GET", "/v1/pairs/{number}/warp", pair)
    documented(http, "POST", "/v1/warp", json=body)
    documented(http, "POST", "/v1/points", json={**body, "points": [[9, 9], [-99, 0]]})
    started = documented(http, "POST", "/v1/collections", json={"images": images}).json()
    documented(http, "GET", "/v1/jobs/{number}/events", {"number": started["job"]})
    documented(http, "GET", "/v1/jobs/{number}", {"number": started["job"]})
    documented(http, "GET", "/v1/collections/{number}", {"number": started["collection"]})
    documented(http, "POST", "/v1/match?wait=false", json=body)
    documented(http, "POST", "/v1/examples/{name}", {"name": "wall"})
    documented(http, "DELETE", "/v1/images/{number}", ids)
    for path in ("/healthz", "/metrics", "/v1/info"):
        assert documented(http, "GET", path).status_code == 200
    # Errors.
    for path in (
        "/v1/images/{number}",
        "/v1/images/{number}/view?max_side=1",
        "/v1/pairs/{number}",
        "/v1/reconstruction",
    ):
        assert documented(http, "GET", path, {"number": "x"}).status_code in (404, 422)
    for content in ({}, {"files": {"image0": b"x", "image1": b"x"}}, {"json": {**body, "size": 5}}):
        assert documented(http, "POST", "/v1/match", **content).status_code in (415, 422)
    folder, _ = model_folder
    with serving(reconstruction=Reconstruction(folder / "out", folder / "photos")) as served, served.http() as shown:
        for path in ("", "/points", "/points/{index}", "/images/{number}/view"):
            answer = documented(shown, "GET", "/v1/reconstruction" + path, {"index": "7", "number": "1"})
            assert answer.status_code == 200


def test_methods_of_a_route(http):
    for path in ("/healthz", "/v1/info", "/app.js"):
        head, got = http.head(path), http.get(path)
        assert head.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == got.headers["content-length"]
    for method, path, allowed in (
        ("GET", "/v1/match", "POST"),
        ("POST", "/v1/info", "GET, HEAD"),
        ("PUT", "/v1/images/x", "GET, DELETE, HEAD"),
        ("POST", "/app.js", "GET, HEAD"),
    ):
        answer = http.request(method, path)
        refused(answer, 405, "wrong_method")
        assert answer.headers["allow"] == allowed
    refused(http.get("/v1/info/"), 404, "not_found")


def test_images_are_kept_described_viewed_and_deleted(http):
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side
    number = upload(http, encode(scene(1), "JPEG", exif=exif), "../../etc/passwd.jpg")
    found = http.get(f"/v1/images/{number}").json()
    assert (found["width"], found["height"]) == (128, 160) and found["name"] == "passwd.jpg"
    assert 3590 < found["expires_s"] <= 3600
    view = http.get(f"/v1/images/{number}/view", params={"max_side": 80})
    assert view.headers["content-type"] == "image/jpeg" and Image.open(io.BytesIO(view.content)).size == (64, 80)
    assert Image.open(io.BytesIO(http.get(f"/v1/images/{number}/view").content)).size == (128, 160)
    refused(http.get(f"/v1/images/{number}/view", params={"max_side": 100_000}), 422, "bad_field")
    assert http.delete(f"/v1/images/{number}").status_code == 204
    refused(http.get(f"/v1/images/{number}/view"), 404, "unknown_id")
    refused(http.delete(f"/v1/images/{number}"), 404, "unknown_id")


def test_matches_are_the_matchers_own(http, served, tmp_path):
    images = pair_of(2)
    ids = [upload(http, image) for image in images]
    own = served.matcher.match(*images)
    asked = {"image0": ids[0], "image1": ids[1]}
    answer = http.post("/v1/match", json=asked)
    result = answer.json()
    assert result["count"] == len(own) > 50 and result["pair"] == answer.headers["X-Pair"]
    assert np.allclose(result["points0"], own.points0, atol=1e-4)
    assert np.allclose(result["points1"], own.points1, atol=1e-4)
    assert np.allclose(result["scores"], own.scores, atol=1e-6)
    assert result["pair_score"] == pytest.approx(own.pair_score, abs=1e-6)
    assert (result["size0"], result["size1"], result["network_size0"]) == ([160, 128], [160, 128], [160, 128])
    assert result["estimate"] is None and result["verdict"]["level"] == "unsure" and result["seconds"] >= 0
    assert result["commands"]["shell"] == "dualrc match a.png a.png -o matches.npz"

    exact = loaded(http.post("/v1/match", params={"format": "npz"}, json=asked).content, tmp_path)
    assert same_matches(exact, own) and exact.pair_score == pytest.approx(own.pair_score)
    again = http.get(f"/v1/pairs/{result['pair']}").json()
    assert again["points1"] == result["points1"]
    rows = http.get(f"/v1/pairs/{result['pair']}", params={"format": "csv"})
    assert rows.headers["content-type"].startswith("text/csv") and rows.text.startswith("x0,y0,x1,y1,score")
    assert same_matches(loaded(rows.content, tmp_path, "m.csv"), own)


def test_settings_reach_the_matcher(http, served, tmp_path):
    images = pair_of(3)
    ids = [upload(http, image) for image in images]
    for settings in ({"top": 20}, {"size": 96}, {"quality": "high", "top": 40}, {"min_score": 0.01}):
        body = {"image0": ids[0], "image1": ids[1], **settings}
        answer = http.post("/v1/match", params={"format": "npz"}, json=body)
        assert answer.status_code == 200, answer.text
        own = served.matcher.match(*images, **settings)
        assert same_matches(loaded(answer.content, tmp_path), own), settings


def test_covariances_are_the_matchers_own(http, served, tmp_path):
    images = pair_of(3)
    own = served.matcher.match(*images, covariance=True, top=50)
    assert own.covariance is not None and np.isfinite(own.covariance).all()
    files = {f"image{number}": (f"{number}.png", encode(image)) for number, image in enumerate(images)}
    result = http.post("/v1/match", files=files, data={"covariance": "true", "top": "50"}).json()
    assert np.allclose(result["covariance"], own.covariance, atol=1e-6)
    for form in ("npz", "csv"):
        content = http.get(f"/v1/pairs/{result['pair']}", params={"format": form}).content
        assert np.allclose(loaded(content, tmp_path, f"m.{form}").covariance, own.covariance)
    pair = served.service.pairs.get(result["pair"])
    # Points, scores and covariances, in float32.
    assert pair.bytes >= 50 * 4 * (2 + 2 + 1 + 4)
    plain = http.post("/v1/match", files=files, data={"top": "50"}).json()
    assert plain["covariance"] is None and plain["points1"] == result["points1"] and plain["tilted"] is False


def test_two_files_at_once(http, served, tmp_path):
    images = pair_of(4)
    files = {f"image{number}": (f"{number} b.png", encode(image)) for number, image in enumerate(images)}
    fields = {"top": "30", "estimate": "homography", "threshold_px": "3"}
    answer = http.post("/v1/match", files=files, data=fields)
    result = answer.json()
    assert answer.status_code == 200 and result["count"] == 30 and result["name1"] == "1 b.png"
    assert result["commands"]["shell"] == (
        "dualrc match '0 b.png' '1 b.png' --top 30 --estimate homography --threshold 3 -o matches.npz"
    )
    assert "threshold_px=3" in result["commands"]["python"]
    # They are kept like uploads.
    assert http.get(f"/v1/images/{result['image0']}").status_code == 200
    refused(http.post("/v1/match", files={"image0": files["image0"]}), 422, "no_file")
    refused(http.post("/v1/match", files=files, data={"top": "many"}), 422, "bad_field")
    refused(http.post("/v1/match", files=files, data={"speed": "7"}), 422, "bad_field")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "bad_field"),
        ([], "bad_field"),
        ({"image0": "a", "image1": "b", "top": 0}, "bad_field"),
        ({"image0": "a", "image1": "b", "quality": "best"}, "bad_field"),
        ({"image0": "a", "image1": "b", "size": 100}, "bad_field"),
        ({"image0": "a", "image1": "b", "path": "/etc/passwd"}, "bad_field"),
        ({"image0": "a", "image1": "b", "threshold_px": -1}, "bad_field"),
        ({"image0": "/etc/passwd", "image1": "../x"}, "unknown_id"),
    ],
)
def test_bad_fields_are_named(http, body, code):
    refused(http.post("/v1/match", json=body), 404 if code == "unknown_id" else 422, code)


def test_a_body_that_is_no_json(http):
    headers = {"content-type": "application/json"}
    refused(http.post("/v1/match", content=b"{", headers=headers), 422, "bad_json")
    assert "not a JSON object" in refused(http.post("/v1/match", json=[1]), 422, "bad_field")
    refused(http.post("/v1/match", content=b"[" * 100_000, headers=headers), 422, "bad_json")
    refused(http.post("/v1/match", content=b'{"min_score": NaN}', headers=headers), 422, "bad_field")
    refused(http.post("/v1/images", content=b"x"), 415, "not_multipart")
    multipart = {"content-type": "multipart/form-data; boundary=x"}
    refused(http.post("/v1/images", content=b"garbage", headers=multipart), 422, "bad_form")
    refused(http.get("/v1/nothing"), 404, "not_found")
    refused(http.put("/v1/match"), 405, "wrong_method")


def test_models_are_fitted_without_matching_again(http, served):
    images = pair_of(5)
    ids = [upload(http, image) for image in images]
    pair = http.post("/v1/match", json={"image0": ids[0], "image1": ids[1], "min_score": 0.0}).json()["pair"]
    kept = served.service.pairs.get(pair).matches
    done = served.service.jobs.outcomes["done"]
    for kind in ("homography", "fundamental", "essential"):
        body = {"kind": kind, "threshold_px": 4, "top": 60}
        model = http.post(f"/v1/pairs/{pair}/estimate", json=body).json()
        own = geometry.estimate(kept.top(60), kind, threshold_px=4)
        assert model["kind"] == kind and len(model["inliers"]) == len(kept)
        assert model["inlier_count"] == int(own.inliers.sum()) == sum(model["inliers"])
        assert not any(model["inliers"][60:]) or not np.all(np.diff(kept.scores) <= 0)
        if own.matrix is None:
            assert model["matrix"] is None and any("No model" in words for words in model["warnings"])
        else:
            assert np.allclose(model["matrix"], own.matrix)
    assert served.service.jobs.outcomes["done"] == done
    refused(http.post(f"/v1/pairs/{pair}/estimate", json={"kind": "affine"}), 422, "bad_field")


def test_files_can_contain_a_model(http, tmp_path):
    ids = [upload(http, image, "a.png") for image in pair_of(5)]
    result = http.post("/v1/match", json={"image0": ids[0], "image1": ids[1]}).json()
    address, body = f"/v1/pairs/{result['pair']}", {"threshold_px": 3.5, "min_score": 1e-30}
    model = http.post(f"{address}/estimate", json={"kind": "homography", **body}).json()
    query = {"estimate": "homography", **body}
    files = {form: http.get(address, params={"format": form, **query}) for form in ("json", "npz", "csv", "colmap")}
    told = files["json"].json()
    assert told["count"] == result["count"] and told["commands"] == model.pop("commands")
    assert told["estimate"] == model and 0 < model["inlier_count"] < told["count"] - 30
    stored = loaded(files["npz"].content, tmp_path)
    assert stored.estimate.inliers.tolist() == model["inliers"]
    assert np.allclose(stored.estimate.matrix, model["matrix"])
    assert files["csv"].text.splitlines()[0].endswith(",inlier")
    (tmp_path / "database.db").write_bytes(files["colmap"].content)
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        assert len(database.read_two_view_geometry(1, 2).inlier_matches) == model["inlier_count"]
    assert told["commands"]["shell"].endswith("--min-score 1e-30 --estimate homography --threshold 3.5 -o matches.npz")
    assert "estimate(matches.above(1e-30), 'homography', threshold_px=3.5)" in told["commands"]["python"]
    # The result itself is as it was.
    assert http.get(address).json()["estimate"] is None
    refused(http.get(address, params={"estimate": "affine"}), 422, "bad_field")


def test_the_fundamental_matrix_of_an_essential_one_is_in_pixels():
    rng = np.random.default_rng(0)
    xyz = rng.uniform((-2, -2, 4), (2, 2, 8), (60, 3))
    K = np.array([[500.0, 0, 160], [0, 500, 120], [0, 0, 1]])
    shifted = xyz + np.array([0.5, 0.1, 0.2])
    points0, points1 = ((K @ (points / points[:, 2:]).T).T[:, :2] for points in (xyz, shifted))
    matches = Matches(points0=points0, points1=points1, scores=np.ones(60), size0=(320, 240), size1=(320, 240))
    camera = geometry.Camera(width=320, height=240, K=K)
    model = geometry.estimate(matches, "essential", camera0=camera, camera1=camera)
    F = np.array(pairs.fundamental(model))
    ones = np.ones((60, 1))
    errors = np.einsum("ni,ij,nj->n", np.hstack([points1, ones]), F, np.hstack([points0, ones]))
    lines = np.hstack([points0, ones]) @ F.T
    assert np.abs(errors / np.linalg.norm(lines[:, :2], axis=1)).max() < 0.1  # pixels
    assert pairs.describe_estimate(model)["fundamental"] == F.tolist()
    nothing = Estimate(kind="essential", matrix=None, inliers=np.zeros(60, bool))
    assert pairs.fundamental(nothing) is None


@pytest.mark.parametrize(
    ("score", "level"), [(0.99, "same"), (0.9, "same"), (0.5, "unsure"), (0.1, "unsure"), (0.02, "different")]
)
def test_the_verdict_follows_the_pair_score(score, level):
    assert pairs.verdict(score, calibrated=True)["level"] == level
    assert pairs.verdict(score, calibrated=False)["level"] == "unsure"


def test_names_are_quoted_in_commands():
    from web_data import tiny_matcher

    image = pair_of(1)[0]
    matches = tiny_matcher().match(image, image, top=5)
    upload = type("Named", (), {"id": "x", "name": "-rf ~; $(x).png"})()
    made = pairs.Pair(
        images=(upload, upload), matches=matches, settings=MatchOptions(size=96), seconds=0.0, device="cpu"
    )
    shell = pairs.commands(made)["shell"]
    assert shell.startswith("dualrc match './-rf ~; $(x).png' './-rf ~; $(x).png' --size 96")
    compile(pairs.commands(made)["python"], "x", "exec")


def test_a_warp_is_the_matchers_own_at_the_centers_of_cells(http, served):
    images = pair_of(6)
    ids = [upload(http, image) for image in images]
    pair = http.post("/v1/match", json={"image0": ids[0], "image1": ids[1]}).json()["pair"]
    for direction, order in (("01", (0, 1)), ("10", (1, 0))):
        params = {"direction": direction, "max_side": 160}
        answer = http.get(f"/v1/pairs/{pair}/warp", params=params)
        assert struct.unpack("<4I", answer.content[:16]) == (160, 128, 160, 128)
        points1, certainty, size = unpack_warp(answer.content)
        own = served.matcher.warp(images[order[0]], images[order[1]])
        assert size == (160, 128)
        assert np.array_equal(points1, own.points1, equal_nan=True) and np.array_equal(certainty, own.certainty)
    # A coarser grid.
    answer = http.post("/v1/warp", json={"image0": ids[0], "image1": ids[1], "max_side": 40})
    points1, certainty, _ = unpack_warp(answer.content)
    features = [served.matcher.features(image) for image in images]
    scale = Scale(image_size=(40, 32), input_size=features[0].scale.input_size)
    own = served.matcher.warp(replace(features[0], scale=scale), features[1])
    assert np.array_equal(points1, own.points1, equal_nan=True) and certainty.shape == (32, 40)
    assert grid_of((4000, 3), 512) == (512, 1)
    refused(http.get(f"/v1/pairs/{pair}/warp", params={"direction": "11"}), 422, "bad_field")
    # Its images may be gone before the result is.
    http.delete(f"/v1/images/{ids[0]}")
    refused(http.get(f"/v1/pairs/{pair}/warp"), 404, "unknown_id")


def made_pair(uploads, info, settings=None, **arrays) -> pairs.Pair:
    """Return a result without matching."""
    empty = Matches.none(info)
    matches = replace(empty, size0=uploads[0].size, size1=uploads[1].size, **arrays)
    settings = settings or MatchOptions()
    return pairs.Pair(images=tuple(uploads), matches=matches, settings=settings, seconds=0.0, device="cpu")


def wait_until_done(job) -> None:
    deadline = time.monotonic() + 60
    while job.state != "done" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert job.state == "done"


@pytest.mark.parametrize(
    ("info", "settings"), [({"tilted": True}, MatchOptions()), ({}, MatchOptions(quality="search")), ({}, None)]
)
def test_the_warp_of_a_pair_follows_matches_of_other_views(http, served, info, settings):
    uploads = [served.service.images.get(upload(http, image)) for image in pair_of(6)]
    # A square that is half as wide in image 1.
    x, y = np.meshgrid(np.arange(20.0, 100, 4), np.arange(20.0, 100, 4))
    points0 = np.stack([x.ravel(), y.ravel()], axis=1)
    points1, scores = points0 * [0.5, 1] + [30, 5], np.full(len(points0), 2.0)
    pair = made_pair(uploads, info, settings, points0=points0, points1=points1, scores=scores)
    for order, motion, shift in (((0, 1), [0.5, 1], [30, 5]), ((1, 0), [2, 1], [-60, -5])):
        job = served.service.warp("test", (uploads[order[0]], uploads[order[1]]), (160, 128), pair=pair)
        wait_until_done(job)
        places, certainty, _ = unpack_warp(job.result["bytes"])
        rows, columns = np.nonzero(certainty == 2)
        if settings is None:
            assert len(rows) == 0
            continue
        there = np.stack([columns, rows], axis=1)
        first = pair.matches.points0 if order == (0, 1) else pair.matches.points1
        inside = np.all((there >= first.min(0)) & (there <= first.max(0)), axis=1)
        assert inside.sum() == np.prod(np.ptp(first, axis=0) + 1)
        errors = np.abs(places[rows, columns] - (there * motion + shift)).max(1)
        assert errors[inside].max() < 0.2 and errors.max() < 2
        # The warp of the network is kept farther from all matches.
        assert not np.any(certainty[:10] == 2) and not np.any(certainty[:, -10:] == 2)


def test_the_warp_of_a_zoomed_pair_is_computed_at_its_scale(http, served):
    images = pair_of(6)
    service = served.service
    uploads = [service.images.get(upload(http, image)) for image in images]
    features = [served.matcher.features(image) for image in images]
    for zoom, larger in ((2.0, 1), (0.5, 0)):
        job = service.warp("test", tuple(uploads), (40, 32), pair=made_pair(uploads, {"zoom": zoom}))
        wait_until_done(job)
        leveled = list(features)
        # Things are twice as large there.
        leveled[larger] = served.matcher.features(images[larger], size=80)
        scale = Scale(image_size=(40, 32), input_size=leveled[0].scale.input_size)
        own = served.matcher.warp(replace(leveled[0], scale=scale), leveled[1])
        assert np.array_equal(unpack_warp(job.result["bytes"])[0], own.points1, equal_nan=True)


def test_points_are_found_in_their_order(http, served):
    images = pair_of(7)
    ids = [upload(http, image) for image in images]
    points = [[50.5, 40.25], [-100, 3], [100, 60]]
    answer = http.post("/v1/points", json={"image0": ids[0], "image1": ids[1], "points": points}).json()
    own = served.matcher.match_points(*images, points)
    assert answer["points1"][1] is None and answer["scores"][1] == 0
    for place, expected in zip(answer["points1"], own.points1, strict=True):
        assert place is None if np.isnan(expected).any() else np.allclose(place, expected, atol=1e-4)
    empty = http.post("/v1/points", json={"image0": ids[0], "image1": ids[1], "points": []})
    assert empty.json() == {"points1": [], "scores": []}


def test_a_colmap_database_holds_the_pair(http, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    first, second = pair_of(8)
    ids = [upload(http, encode(first, "JPEG", exif=exif), "p.jpg"), upload(http, second, "p.jpg")]
    result = http.post("/v1/match", json={"image0": ids[0], "image1": ids[1], "estimate": "homography"}).json()
    answer = http.get(f"/v1/pairs/{result['pair']}", params={"format": "colmap"})
    assert answer.status_code == 200, answer.text
    (tmp_path / "database.db").write_bytes(answer.content)
    assert sqlite3.connect(tmp_path / "database.db").execute("select count(*) from images").fetchone() == (2,)
    with pycolmap.Database.open(tmp_path / "database.db") as database:
        found = {image.name: image.image_id for image in database.read_all_images()}
        assert set(found) == {"0-p.jpg", "1-p.jpg"}
        keypoints = [database.read_keypoints(found[f"{number}-p.jpg"])[:, :2] for number in (0, 1)]
        indices = database.read_matches(found["0-p.jpg"], found["1-p.jpg"])
        inliers = database.read_two_view_geometry(found["0-p.jpg"], found["1-p.jpg"]).inlier_matches
    assert len(indices) == result["count"] and len(inliers) == result["estimate"]["inlier_count"]
    # COLMAP counts pixels of the stored image, which lies on its side, and from 0.5.
    x, y = np.array(result["points0"]).T
    stored = np.stack([y, 127 - x], axis=1) + 0.5
    assert np.allclose(keypoints[0][indices[:, 0]], stored, atol=1e-3)
    assert np.allclose(keypoints[1][indices[:, 1]], np.array(result["points1"]) + 0.5, atol=1e-3)


LIMITED = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from collection_data import make_matches
from PIL import Image
from dualrc.errors import OutputError
from dualrc.web.exports import export
from dualrc.web.problems import from_error
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
Image.new("RGB", (320, 240)).save(folder / "a.png")
points = np.random.default_rng(0).uniform(0, 200, (5000, 2))
image = SimpleNamespace(name="a.png", path=folder / "a.png", size=(320, 240))
pair = SimpleNamespace(matches=make_matches(points, points), images=[image, image])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    export(pair, "colmap")
except OutputError as error:
    problem = from_error(error)
    print(problem.status, problem.message)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of file sizes")
@pytest.mark.parametrize("limit", [60_000, 200_000])
def test_a_full_disk_does_not_end_the_service(tmp_path, limit):
    """pycolmap aborts the process if a transaction cannot be committed."""
    answer = run_on_a_full_disk(LIMITED, tmp_path, limit)
    # The answer names no path of the server.
    assert answer.startswith("507 The server cannot write the result") and "/" not in answer


def test_a_job_tells_its_progress(http):
    ids = [upload(http, image) for image in pair_of(9)]
    answer = http.post("/v1/match", params={"wait": "false"}, json={"image0": ids[0], "image1": ids[1]})
    assert answer.status_code == 202
    job = answer.json()["job"]
    found = list(events(http, job))
    assert found[-1][0] == "done" and all(name == "progress" for name, _ in found[:-1])
    assert all(0 <= data["fraction"] <= 1 and data["step"] >= 0 for _, data in found[:-1])
    assert http.get(found[-1][1]["result"]).json()["count"] > 0
    assert http.get(f"/v1/jobs/{job}").json() == {"event": "done", **found[-1][1]}
    # Who comes late gets the last event.
    assert list(events(http, job)) == found[-1:]
    refused(http.get("/v1/jobs/nothing/events"), 404, "unknown_id")


def test_a_collection_gives_all_pairs(http, served):
    images = [pair_of(10)[0], pair_of(10)[1], scene(11)]
    ids = [upload(http, image, f"{number}.png") for number, image in enumerate(images)]
    started = http.post("/v1/collections", json={"images": ids}).json()
    found = list(events(http, started["job"]))
    assert found[-1] == ("done", {"result": f"/v1/collections/{started['collection']}"})
    assert all(data["total"] == 3 for name, data in found if name == "progress" and "total" in data)
    collection = http.get(f"/v1/collections/{started['collection']}").json()
    assert [one["name"] for one in collection["images"]] == ["0.png", "1.png", "2.png"]
    scores = np.array(collection["scores"], dtype=float)
    assert np.array_equal(scores, scores.T, equal_nan=True) and np.isnan(np.diag(scores)).all()
    assert set(collection["pairs"]) == {"0,1", "0,2", "1,2"}
    for key, number in collection["pairs"].items():
        i, j = map(int, key.split(","))
        own = served.matcher.match(images[i], images[j], top=1000)
        assert scores[i, j] == pytest.approx(own.pair_score, abs=1e-6)
        assert http.get(f"/v1/pairs/{number}").json()["count"] == len(own)
    refused(http.post("/v1/collections", json={"images": ids[:1]}), 422, "bad_field")
    refused(http.post("/v1/collections", json={"images": [ids[0], ids[0]]}), 422, "bad_collection")
    refused(http.post("/v1/collections", json={"images": ["x", "y"]}), 404, "unknown_id")
    refused(http.get("/v1/collections/x"), 404, "unknown_id")


def test_a_collection_does_not_search_tilted_views(http, served, monkeypatch):
    """Most of its pairs have nothing in common; a single pair is searched as the matcher is set up."""
    tilts, match_features = [], served.matcher.match_features

    def told(*features, max_tilt, **options):
        tilts.append(max_tilt)
        return match_features(*features, max_tilt=max_tilt, **options)

    monkeypatch.setattr(served.matcher, "match_features", told)
    ids = [upload(http, image) for image in pair_of(12)]
    list(events(http, http.post("/v1/collections", json={"images": ids}).json()["job"]))
    http.post("/v1/match", json={"image0": ids[0], "image1": ids[1]})
    assert tilts == [1, UNSET]


def test_examples_are_rendered_once(http):
    refused(http.get("/v1/examples/town/view/0"), 503, "not_ready")
    first = http.post("/v1/examples/unrelated").json()
    assert first["truth"] is False and (first["image0"]["width"], first["image0"]["height"]) == (96, 64)
    town = http.post("/v1/examples/town").json()
    assert town["truth"] is True and town["image0"]["id"] == first["image0"]["id"] != town["image1"]["id"]
    assert http.get("/v1/examples/town/view/0", params={"max_side": 48}).status_code == 200
    # They belong to all: nobody deletes them.
    assert http.delete(f"/v1/images/{town['image0']['id']}").status_code == 204
    assert http.get(f"/v1/images/{town['image0']['id']}").status_code == 200
    refused(http.post("/v1/examples/castle"), 404, "unknown_example")
    refused(http.get("/v1/examples/town/view/2"), 422, "bad_field")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("town")
    return folder, write_model(folder)


def test_a_reconstruction_is_shown(model_folder):
    folder, made = model_folder
    with serving(reconstruction=Reconstruction(folder / "out", folder / "photos")) as served, served.http() as http:
        assert http.get("/v1/info").json()["reconstruction"] == {"name": "out", "images": 3, "points": 20}
        described = http.get("/v1/reconstruction").json()
        assert [image["name"] for image in described["images"]] == ["a.png", "b.png", "c.png"]
        for image in described["images"]:
            camera = made.cameras[image["name"]]
            assert np.allclose(image["cam_from_world"], camera.cam_from_world)
            assert np.allclose(image["camera"]["K"], camera.K) and image["camera"]["width"] == 320
        packed = http.get(described["points_url"]).content
        (count,) = struct.unpack("<I", packed[:4])
        assert count == described["count"] == 20 and len(packed) == 4 + count * (12 + 3 + 4)
        xyz = np.frombuffer(packed, "<f4", 3 * count, 4).reshape(-1, 3)
        rgb = np.frombuffer(packed, np.uint8, 3 * count, 4 + 12 * count).reshape(-1, 3)
        lengths = np.frombuffer(packed, "<u4", count, 4 + 15 * count)
        assert np.allclose(xyz, made.xyz, atol=1e-5) and rgb[:, 0].tolist() == list(range(20)) and (lengths == 3).all()
        point = http.get("/v1/reconstruction/points/7").json()
        assert np.allclose(point["xyz"], made.xyz[7], atol=1e-5) and point["rgb"] == [7, 2, 3]
        assert [(seen["image"], seen["name"]) for seen in point["track"]] == [
            ("0", "a.png"),
            ("1", "b.png"),
            ("2", "c.png"),
        ]
        for seen in point["track"]:
            assert np.allclose((seen["x"], seen["y"]), made.pixels[seen["name"]][7], atol=2e-3)
        view = http.get("/v1/reconstruction/images/1/view", params={"max_side": 160})
        assert Image.open(io.BytesIO(view.content)).size == (160, 120)
        refused(http.get("/v1/reconstruction/points/20"), 404, "unknown_id")
        refused(http.get("/v1/reconstruction/images/9/view"), 404, "unknown_id")
        refused(http.get("/v1/reconstruction/images/..%2f..%2fetc/view"), 404, "not_found")
        refused(http.get("/v1/reconstruction/images/a.png/view"), 422, "bad_field")


def test_a_server_without_reconstruction_or_images_says_so(http, model_folder):
    refused(http.get("/v1/reconstruction"), 404, "no_reconstruction")
    alone = Reconstruction(model_folder[0] / "out")
    assert not alone.describe()["views"] and json.dumps(alone.describe())
    with pytest.raises(Exception, match="--images FOLDER"):
        alone.view(0, 100)


def test_the_images_of_a_reconstruction_are_found(tmp_path):
    write_model(tmp_path)
    out, summary = tmp_path / "out", tmp_path / "out" / "summary.json"
    summary.write_text(json.dumps({"image_folder": "../photos"}))
    found = Reconstruction(out)
    assert found.folder == tmp_path / "photos" and found.view(0, 100)[:2] == b"\xff\xd8"
    (tmp_path / "others").mkdir()
    assert Reconstruction(out, tmp_path / "others").folder == tmp_path / "others"
    for content in (
        '{"image_folder": "../gone"}',
        '{"image_folder": 3}',
        '["image_folder"]',
        '{"image_folder": "a\\u0000b"}',
        "no JSON",
    ):
        summary.write_text(content)
        assert Reconstruction(out).folder is None
    # A folder of images inside of the reconstruction comes first.
    summary.write_text(json.dumps({"image_folder": "../photos"}))
    (out / "images").mkdir()
    assert Reconstruction(out).folder == out / "images"
