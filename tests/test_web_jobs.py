"""Several clients at once, cancellation, restarts, and the client in Python."""

import importlib.util
import io
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import ROOT, same_matches, tiny_matcher
from PIL import Image
from web_data import GatedMatcher, encode, events, pair_of, refused, scene, serving, upload

from dualrc import cli
from dualrc.client import Client, ServiceError, _seconds
from dualrc.errors import ConfigError, DataError, ImageError
from dualrc.web.wire import unpack_warp

CLIENTS = 8


@pytest.fixture(scope="module")
def served():
    with serving(max_client_jobs=64) as served:
        yield served


def test_clients_at_once_never_mix(served, tmp_path):
    """Each client has images of its own, and every answer is what the matcher itself finds for them."""
    failures: list[str] = []
    truth = [served.matcher.match(*pair_of(seed), top=200) for seed in range(CLIENTS)]

    def work(seed: int) -> None:
        try:
            with Client(served.url) as client:
                images = [client.upload(image) for image in pair_of(seed)]
                for number in range(5):
                    # Sent again now and then, so that uploads and matches are interleaved.
                    given = pair_of(seed) if number == 3 else images
                    found = client.match(*given, top=200)
                    if not same_matches(found, truth[seed]):
                        failures.append(f"client {seed}, request {number}: other matches")
        except Exception as error:
            failures.append(f"client {seed}: {error!r}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failures


def test_memory_stays_flat(served):
    """Many requests leave nothing behind but what the limits allow."""
    from dualrc.web.metrics import resident_bytes

    files = {f"image{number}": (f"{number}.png", encode(image)) for number, image in enumerate(pair_of(1))}
    with served.http() as http:

        def ask(count: int) -> float:
            for _ in range(count):
                pair = http.post("/v1/match", files=files, data={"top": "50"}).json()
                for image in (pair["image0"], pair["image1"]):
                    http.delete(f"/v1/images/{image}")
            return resident_bytes()

        before = ask(10)
        after = ask(30)
    assert after - before < 30e6
    for pair, size, _ in served.service.pairs._values.values():
        # What is kept is what is counted.
        arrays = pair.matches.points0, pair.matches.points1, pair.matches.scores
        assert all(array.base is None for array in arrays) and pair.matches.whole is None
        assert sum(array.nbytes for array in arrays) < size
    jobs = served.service.jobs
    assert jobs.depth == jobs.running == 0 and not [1 for job in jobs._jobs.values() if job.work or job.pair]


def test_cancelling():
    matcher = GatedMatcher(tiny_matcher())
    with serving(matcher) as served, served.http() as http:
        ids = [upload(http, image) for image in pair_of(1)]
        body = {"image0": ids[0], "image1": ids[1], "estimate": "homography"}
        first, second, third = (
            http.post("/v1/match", params={"wait": "false"}, json=body).json()["job"] for _ in range(3)
        )
        assert matcher.entered.acquire(timeout=30)
        assert http.get(f"/v1/jobs/{first}").json()["state"] == "running"
        assert http.get(f"/v1/jobs/{third}").json()["position"] == 2
        # A queued one ends at once, and the others move up.
        assert http.delete(f"/v1/jobs/{second}").status_code == 204
        assert list(events(http, second)) == [("cancelled", {})]
        assert http.get(f"/v1/jobs/{third}").json()["position"] == 1
        # A running one ends when its work comes to a point where it may stop, and keeps no result.
        http.delete(f"/v1/jobs/{first}")
        matcher.gate.release()
        assert list(events(http, first))[-1] == ("cancelled", {})
        matcher.gate.release()
        assert list(events(http, third))[-1][0] == "done"
        assert served.service.jobs.outcomes == {"cancelled": 2, "done": 1}
        assert all(image.holds == 0 for image in map(served.service.images.get, ids))
        refused(http.delete("/v1/jobs/none"), 404, "unknown_id")


@pytest.mark.parametrize("end", ["cancel", "limit"])
def test_a_long_match_ends_between_two_steps(monkeypatch, end):
    matcher = tiny_matcher()
    entered, gate, extract = threading.Semaphore(0), threading.Semaphore(0), matcher.extract

    def gated(items):
        entered.release()
        assert gate.acquire(timeout=30)
        extract(items)

    with serving(matcher) as served, served.http() as http:
        # Not uploads: their features would be extracted in the background.
        add = served.service.images.add
        ids = [add(io.BytesIO(encode(scene(seed))), "a.png", "test").id for seed in (1, 2)]
        monkeypatch.setattr(matcher, "extract", gated)
        asked = {"image0": ids[0], "image1": ids[1], "quality": "search", "size": 128}
        body = {"params": {"wait": "false"}, "json": asked}
        job = http.post("/v1/match", **body).json()["job"]
        for step in (1, 2, 3):
            assert entered.acquire(timeout=30)
            told = http.get(f"/v1/jobs/{job}").json()
            assert told["stage"] == "matching" and told["step"] >= step - 1
            if step < 3:
                gate.release()
        if end == "cancel":
            http.delete(f"/v1/jobs/{job}")
        else:
            served.service.jobs.get(job).limit_s = 0.001
        gate.release()
        last = list(events(http, job))[-1]
        assert last == ("cancelled", {}) if end == "cancel" else last[1]["code"] == "too_late"
        # The views that are left are not matched.
        assert not entered.acquire(blocking=False)
        # The next job starts at once.
        following = http.post("/v1/match", params={"wait": "false"}, json={**asked, "quality": "high"}).json()["job"]
        assert entered.acquire(timeout=30)
        http.delete(f"/v1/jobs/{following}")
        gate.release()
        assert list(events(http, following))[-1] == ("cancelled", {})


def test_a_client_that_goes_away_cancels_its_job():
    matcher = GatedMatcher(tiny_matcher())
    with serving(matcher) as served, served.http() as http:
        ids = [upload(http, image) for image in pair_of(1)]
        import httpx

        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/match", json={"image0": ids[0], "image1": ids[1], "estimate": "homography"}, timeout=0.5)
        assert matcher.entered.acquire(timeout=30)
        deadline = time.monotonic() + 20
        (job,) = served.service.jobs._jobs.values()
        while not job.cancelled and time.monotonic() < deadline:
            time.sleep(0.02)
        matcher.gate.release()
        while job.state == "running" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert job.state == "cancelled"


def test_single_matches_go_before_a_collection():
    matcher = GatedMatcher(tiny_matcher())
    with serving(matcher) as served, served.http() as http:
        ids = [upload(http, scene(seed)) for seed in range(3)]
        started = http.post("/v1/collections", json={"images": ids}).json()
        assert matcher.entered.acquire(timeout=30)
        body = {"image0": ids[0], "image1": ids[1]}
        single = http.post("/v1/match", params={"wait": "false"}, json=body).json()["job"]
        matcher.gate.release()  # the collection's first pair
        matcher.gate.release()  # then the single one
        assert list(events(http, single))[-1][0] == "done"
        # Its first pair is there already, the others are not.
        scores = np.array(http.get(f"/v1/collections/{started['collection']}").json()["scores"], dtype=float)
        assert np.isfinite(scores).sum() == 2
        assert http.get(f"/v1/jobs/{started['job']}").json()["total"] == 3
        http.delete(f"/v1/jobs/{started['job']}")
        matcher.gate.release()
        assert list(events(http, started["job"]))[-1][0] == "cancelled"


def test_pairs_are_matched_together_where_the_device_gains():
    """On a GPU, jobs of the same kind that wait are given to the matcher at once."""
    matcher = GatedMatcher(tiny_matcher())
    batches: list[int] = []
    with serving(matcher, batch=4) as served, served.http() as http:
        service = served.service

        def together(works):
            batches.append(len(works))
            return service._match_together(works)

        service.jobs._together = together
        ids = [[upload(http, image) for image in pair_of(seed)] for seed in range(4)]
        jobs = []
        for number, (image0, image1) in enumerate([ids[3], *ids[:3]]):
            body = {"image0": image0, "image1": image1, "top": 50}
            jobs.append(http.post("/v1/match", params={"wait": "false"}, json=body).json()["job"])
            assert number or matcher.entered.acquire(timeout=30)
        matcher.gate.release()
        for job, seed in zip(jobs, (3, 0, 1, 2), strict=True):
            done = list(events(http, job))[-1]
            found = service.pairs.get(done[1]["result"].split("/")[-1]).matches
            own = tiny_matcher().match(*pair_of(seed), top=50)
            assert done[0] == "done" and same_matches(found, own)
        assert batches == [3]
        text = http.get("/metrics").text
        assert 'dualrc_batches_total{pairs="1"} 1\n' in text and 'dualrc_batches_total{pairs="3"} 1\n' in text


def test_the_queue_is_measured_without_http(monkeypatch):
    """benchmarks/serve.py --in-process: every answer is the matcher's own, with batches and without."""
    spec = importlib.util.spec_from_file_location("serve_script", ROOT / "benchmarks" / "serve.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve_script", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "SIZE", (160, 128))
    found = script.run_in_process(tiny_matcher(), 4, 0.5, 50, batch=3, rounds=1)
    assert found["passed"] and found["wrong"] == 0 and found["total"] >= 16 and not found["errors"]
    assert max(found["batches_by_size"]) in (2, 3)

    # An answer that belongs to another client is noticed.
    matcher = tiny_matcher()
    many = matcher.match_many
    monkeypatch.setattr(matcher, "match_many", lambda pairs, **options: [*many(pairs, **options)][::-1])
    found = script.run_in_process(matcher, 4, 0.5, 50, batch=3, rounds=1)
    assert not found["passed"] and found["wrong"] > 0


def test_the_queue_needs_no_http_packages():
    """A machine without the extra `web` can run the service's queue."""
    code = """
import sys
import dualrc.web.service
print(*{"fastapi", "httpx", "pydantic", "starlette", "uvicorn"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_job_that_breaks_is_told_without_a_trace(caplog):
    class Broken(GatedMatcher):
        def match_features(self, *features, **options):
            raise RuntimeError("secret /path")

    with serving(Broken(tiny_matcher())) as served, served.http() as http:
        ids = [upload(http, image) for image in pair_of(1)]
        words = refused(http.post("/v1/match", json={"image0": ids[0], "image1": ids[1]}), 500, "failed")
        assert "secret" not in words
        # The worker goes on.
        points = {"image0": ids[0], "image1": ids[1], "points": [[5, 5]]}
        assert http.post("/v1/points", json=points).status_code == 200


def test_the_client_is_a_matcher_elsewhere(served, tmp_path):
    image0, image1 = pair_of(20)
    Image.fromarray(image0).save(tmp_path / "a.png")
    with Client(served.url) as client:
        assert client.info()["device"] == "cpu" and "Client(" in repr(client)
        kept = client.upload(image1, name="b.png")
        assert kept.size == (160, 128) and kept.name == "b.png"
        told = []
        found = client.match(tmp_path / "a.png", kept, top=100, estimate="homography", progress=told.append)
        own = served.matcher.match(image0, image1, top=100)
        assert same_matches(found, own) and found.estimate.kind == "homography" and told[0]["state"] == "queued"
        assert found.pair_score == pytest.approx(own.pair_score)
        points = [[40.0, 30.0], [-9.0, 4.0]]
        rows, own_rows = client.match_points(image0, kept, points), served.matcher.match_points(image0, image1, points)
        assert np.allclose(rows.points1, own_rows.points1, atol=1e-4, equal_nan=True) and rows.size1 == (160, 128)
        warp, own_warp = client.warp(image0, kept), served.matcher.warp(image0, image1)
        assert np.array_equal(warp.points1, own_warp.points1, equal_nan=True) and warp.size1 == own_warp.size1
        assert np.array_equal(warp.certainty, own_warp.certainty)
        coarse = client.warp(image0, kept, max_side=80)
        both = np.isfinite(coarse.points1).all(axis=2) & np.isfinite(own_warp.points1).all(axis=2)
        assert coarse.certainty.shape == (128, 160) and both.mean() > 0.1
        # Arrays of finished jobs are not kept with them, nor features of images that are gone.
        service = served.service
        assert not [
            1 for job in service.jobs._jobs.values() if job.result and not {"pair", "collection"} & set(job.result)
        ]
        assert all(key[0] in service.images for key in service.features._values)
        # What the client sent by itself, it removed.
        count = len(served.service.images)
        client.match(image0, kept, top=5)
        assert len(served.service.images) == count
        client.delete(kept)
        with pytest.raises(ServiceError, match="unknown or has expired") as gone:
            client.match(image0, kept)
        assert gone.value.status == 404 and gone.value.code == "unknown_id"


def test_the_client_says_what_is_wrong(served, tmp_path):
    (tmp_path / "x.png").write_text("no image")
    with Client(served.url, retries=0) as client:
        with pytest.raises(ImageError, match=r"x\.png is empty or not"):
            client.upload(tmp_path / "x.png")
        with pytest.raises(ImageError, match="check the path"):
            client.upload(tmp_path / "none.png")
        with pytest.raises(ConfigError, match="top"):
            client.match(*pair_of(1), top=-1)
        with pytest.raises(DataError, match=r"shape \(n, 2\)"):
            client.match_points(*pair_of(1), [1, 2, 3])

        def stop(_):
            raise KeyError("enough")

        before = served.service.jobs.outcomes["done"]
        with pytest.raises(KeyError):
            client.match(*pair_of(1), progress=stop)
        assert before <= served.service.jobs.outcomes["done"]
    with pytest.raises(ServiceError, match="can't be reached"), Client("http://127.0.0.1:9", retries=0) as client:
        client.info()
    with pytest.raises(ConfigError, match="http://"):
        Client("localhost:8000")
    with pytest.raises(DataError, match="truncated"):
        unpack_warp(b"12")
    assert _seconds(None) == 1 and _seconds("0") == 0.1 and _seconds("999") == 30 and _seconds("soon") == 1


def test_a_busy_server_is_asked_again(served, monkeypatch):
    """The client waits as long as it is told, and then gets its answer."""
    waited = []
    monkeypatch.setattr("dualrc.client.time.sleep", waited.append)
    matcher = GatedMatcher(tiny_matcher())
    with serving(matcher, max_client_jobs=1) as busy, busy.http() as http, Client(busy.url, retries=2) as client:
        ids = [upload(http, image) for image in pair_of(1)]
        http.post("/v1/match", params={"wait": "false"}, json={"image0": ids[0], "image1": ids[1]})
        assert matcher.entered.acquire(timeout=30)
        with pytest.raises(ServiceError, match="jobs waiting") as refused:
            client.match(*pair_of(1))
        assert refused.value.status == 429 and waited == [1.0, 1.0]
        matcher.gate.release()


@contextmanager
def started(**environment: str):
    """`dualrc serve` in a process of its own: the process, and the address that it prints."""
    command = [sys.executable, "-m", "dualrc", "serve", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, cwd=ROOT, **pipes) as process:
        try:
            line = process.stdout.readline()
            assert "Serving on cpu: http://" in line, line
            yield process, line.split()[-1]
        finally:
            process.kill()


def test_a_server_is_stopped_and_started_again(tmp_path):
    environment = {"TMPDIR": str(tmp_path), "DUALRC_TOKEN": "a-long-secret"}
    with started(**environment) as (process, page):
        url, _, token = page.partition("#token=")
        assert token == "a-long-secret"
        with pytest.raises(ServiceError, match="token"), Client(url) as client:
            client.info()
        with Client(url, token) as client:
            kept = client.upload(scene(1))
            assert list(tmp_path.glob("dualrc-serve-*/*"))
            assert len(client.match(kept, kept, top=10)) == 10
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=60)
        assert process.returncode == 0 and "Stopped; uploads are removed." in out
        assert '"route": "/v1/match"' in log and "Traceback" not in log and token not in log
        assert not list(tmp_path.glob("dualrc-serve-*"))
    with started(**environment) as (process, page):
        with Client(page.partition("#")[0], token) as client, pytest.raises(ServiceError, match="expired"):
            client.match(kept, kept)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in log and not list(tmp_path.glob("dualrc-serve-*"))


def test_the_command_refuses_what_is_not_safe(monkeypatch, capsys, tmp_path):
    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["dualrc", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code != 0
        return capsys.readouterr().err

    assert "token" in run("--host", "0.0.0.0")
    # Megapixels, not pixels.
    assert "178" in run("--max-pixels", "30000000")
    assert "8 characters" in run("--token", "short", "--port", "0")
    assert "--images belongs to a reconstruction" in " ".join(run("--images", str(tmp_path)).split())
    assert "is not a folder" in " ".join(run(str(tmp_path / "none")).split())
    assert "another --host" in " ".join(run("--host", "203.0.113.7", "--token", "long enough", "--port", "0").split())
