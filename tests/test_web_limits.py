"""Limits and safety of the service: bad files, sizes, tokens, hosts, what is kept and for how long."""

import io
import socket
import struct
import threading
import time
import zlib
from contextlib import suppress
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from conftest import tiny_matcher
from PIL import Image
from web_data import GatedMatcher, encode, pair_of, refused, scene, serving, upload

from dualrc.errors import ConfigError
from dualrc.web.cache import Cache
from dualrc.web.security import HEADERS
from dualrc.web.server import Connection, is_loopback, listen
from dualrc.web.settings import ServerConfig
from dualrc.web.uploads import clean_name

LIMIT = 300_000  # bytes of a file


@pytest.fixture(scope="module")
def served():
    with serving(max_bytes=LIMIT, max_pixels=1_000_000, max_json=50_000, max_points=100) as served:
        yield served


@pytest.fixture
def http(served):
    with served.http() as http:
        yield http


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that claims a size, whatever data it has."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b"")


GOOD = encode(scene(0))
# Each with the status and the code of the answer.
BAD_FILES = {
    "empty": (b"", 415, "not_an_image"),
    "text": (b"just some words\n" * 100, 415, "not_an_image"),
    "html": (b"<!doctype html><script>alert(1)</script>", 415, "not_an_image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not_an_image"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415, "not_an_image"),
    "zip": (b"PK\x03\x04" + b"\0" * 200, 415, "not_an_image"),
    "truncated": (GOOD[: len(GOOD) // 2], 415, "not_an_image"),
    "truncated jpeg": (encode(scene(0), "JPEG")[:2000], 415, "not_an_image"),
    "header only": (GOOD[:40], 415, "not_an_image"),
    "no pixels behind a header": (png_header(900, 900, b"\0" * 100), 415, "not_an_image"),
    "one pixel": (encode(np.zeros((1, 1, 3), np.uint8)), 422, "too_small"),
    "a line": (encode(np.zeros((2, 900, 3), np.uint8)), 422, "too_small"),
    "20,000 px": (png_header(20_000, 20_000), 413, "too_many_pixels"),
    "more than a million": (png_header(1001, 1000), 413, "too_many_pixels"),
    # 30 kB that would become 30 GB.
    "bomb": (png_header(100_000, 100_000, b"\0" * 30_000_000), 413, "too_many_pixels"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused(http, served, name):
    content, status, code = BAD_FILES[name]
    assert len(content) < LIMIT
    before = len(served.service.images)
    words = refused(http.post("/v1/images", files={"file": ("x.png", content)}), status, code)
    assert str(served.service.images.folder) not in words
    files = {"image0": ("a.png", GOOD), "image1": ("x.png", content)}
    refused(http.post("/v1/match", files=files), status, code)
    # Nobody would know the id of the good image.
    assert len(served.service.images) == before == len(list(served.service.images.folder.iterdir()))


def test_a_long_strip_is_kept_and_refused_where_it_is_too_thin(http):
    strip = np.tile(scene(3, 1000, 33), (1, 20, 1))  # 20,000 pixels long
    number = upload(http, encode(strip, "JPEG", quality=30))
    assert http.get(f"/v1/images/{number}").json()["width"] == 20_000
    answer = http.post("/v1/match", json={"image0": number, "image1": number, "size": 4096})
    assert "too small or too thin" in refused(answer, 422, "too_small")


def test_files_of_many_kinds_are_read(http):
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM"):
        upload(http, encode(scene(1), kind))
    grey, deep = Image.fromarray(scene(1)).convert("L"), Image.fromarray(np.full((64, 64), 30_000, np.uint16))
    for image in (grey, deep, Image.new("RGBA", (64, 64), (1, 2, 3, 4)), Image.new("P", (64, 64))):
        target = io.BytesIO()
        image.save(target, "PNG")
        upload(http, target.getvalue())


def test_too_many_bytes_are_refused_while_they_come(http, served):
    content = np.random.default_rng(0).bytes(LIMIT + 1)
    refused(http.post("/v1/images", files={"file": ("x.png", content)}), 413, "too_many_bytes")
    folder = served.service.images.folder
    before = len(list(folder.iterdir()))
    sent = 0

    def endless():
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="x.png"\r\n\r\n'
        while sent < 100 * LIMIT:
            sent += 65536
            yield b"\0" * 65536

    headers = {"content-type": "multipart/form-data; boundary=x"}
    # Or the connection is closed while we are writing.
    with suppress(httpx.TransportError):
        refused(http.post("/v1/images", content=endless(), headers=headers), 413, "too_many_bytes")
    assert sent < 40 * LIMIT and len(list(folder.iterdir())) == before
    # Announced: refused before anything is read.
    refused(http.post("/v1/images", files={"file": ("x.png", content * 8)}), 413, "too_many_bytes")
    refused(http.post("/v1/points", content=b" " * 60_000), 413, "too_many_bytes")
    points = {"image0": "a", "image1": "b", "points": [[1, 2]] * 101}
    refused(http.post("/v1/points", json=points), 422, "too_many_points")


def test_every_answer_has_the_safety_headers(http):
    number = upload(http, GOOD)
    for answer in (
        http.get("/healthz"),
        http.get(f"/v1/images/{number}/view"),
        http.get("/v1/images/none"),
        http.get("/metrics"),
        http.get("/"),
        http.get("/nothing.js"),
        http.get("/v1/info", headers={"host": "evil.example"}),
    ):
        assert all(answer.headers[name] == value for name, value in HEADERS.items())
        assert answer.headers["X-Request-ID"] and "access-control-allow-origin" not in answer.headers
        assert answer.headers["Cache-Control"]
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy


def test_pages_of_others_are_refused(http):
    # DNS rebinding: another name for this address.
    refused(http.get("/v1/info", headers={"host": "evil.example:80"}), 421, "wrong_host")
    for host in ("", "[", "[::1"):
        refused(http.get("/v1/info", headers={"host": host}), 421, "wrong_host")
    assert http.get("/v1/info", headers={"host": "localhost:9"}).status_code == 200
    # A form of another page.
    files = {"file": ("a.png", GOOD)}
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
    ):
        refused(http.post("/v1/images", files=files, headers=headers), 403, "wrong_origin")
    own = str(http.base_url).rstrip("/")
    assert http.post("/v1/images", files=files, headers={"origin": own}).status_code == 201
    assert http.options("/v1/images", headers={"origin": own}).headers.get("access-control-allow-origin") is None


def test_no_file_of_the_server_is_read(http):
    for path in (
        "/../../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/../app.py",
        "/app.py",
    ):
        assert http.get(path).status_code == 404
    for number in ("..", "../x", "%2fetc%2fpasswd", "a" * 5000):
        assert http.get(f"/v1/images/{number}/view").status_code == 404


def test_names_are_only_names():
    assert clean_name("C:\\images\\a.jpg") == "a.jpg" and clean_name("/etc/../b.png") == "b.png"
    assert clean_name(None) == clean_name("") == clean_name("\n\t\0") == "image"
    # As browsers and httpx send a quotation mark.
    assert clean_name("a%22b.jpg") == 'a"b.jpg'
    assert len(clean_name("x" * 1000 + ".png")) == 120 and clean_name("ü 写.png") == "ü 写.png"


def test_the_token_guards_everything_but_the_page():
    with serving(token="correct horse") as served, served.http() as http:
        assert http.get("/healthz").status_code == 200
        assert http.get("/").status_code in (200, 404)
        for path in ("/v1/info", "/metrics", "/v1/images/x", "/v1/reconstruction"):
            answer = http.get(path)
            refused(answer, 401, "token")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for given in ("Bearer wrong horse", "Basic correct horse", "correct horse", "Bearer correct horsf"):
            refused(http.get("/v1/info", headers={"authorization": given}), 401, "token")
        refused(http.post("/v1/images", files={"file": ("a.png", GOOD)}), 401, "token")
        paths = http.get("/openapi.json").json()["paths"]
        assert "security" not in paths["/healthz"]["get"] and paths["/v1/info"]["get"]["security"] == [{"token": []}]
        http.headers["authorization"] = "Bearer correct horse"
        assert http.get("/v1/info").status_code == 200 and upload(http, GOOD)
    with pytest.raises(ConfigError, match="8 characters"):
        ServerConfig(token="short")
    with pytest.raises(ConfigError, match="positive"):
        ServerConfig(max_images=0)


def test_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.3.2.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "example.org", "")))
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="another --port"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="--host"):
        listen("256.1.1.1", 0)


def test_images_and_results_expire():
    with serving(keep_s=1.5) as served, served.http() as http:
        number = upload(http, GOOD)
        result = http.post("/v1/match", json={"image0": number, "image1": number, "top": 5}).json()
        assert http.get(f"/v1/pairs/{result['pair']}").status_code == 200
        deadline = time.monotonic() + 20
        # The sweeper removes them without being asked.
        while len(served.service.images) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not list(served.service.images.folder.iterdir())
        refused(http.get(f"/v1/images/{number}"), 404, "unknown_id")
        refused(http.get(f"/v1/pairs/{result['pair']}"), 404, "unknown_id")
        folder = served.service.images.folder
    assert not folder.exists()


def test_disk_and_memory_are_bounded():
    size = len(encode(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)))
    limits = {"max_images": 5, "max_disk": 4 * size, "result_bytes": 9000, "feature_bytes": 100_000}
    with serving(pixel_bytes=30_000, **limits) as served, served.http() as http:
        ids = []
        for seed in range(9):
            pixels = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)
            ids.append(upload(http, pixels))
            http.post("/v1/match", json={"image0": ids[-1], "image1": ids[-1], "top": 5})
            service = served.service
            assert len(service.images) <= 5 and service.images.disk_bytes <= 4 * size + 200
            assert service.features.size <= 100_000 and service.pairs.size <= 9000
            assert service.images.pixel_bytes <= 30_000 * 1.25
        # The least recently used went first.
        assert http.get(f"/v1/images/{ids[-1]}").status_code == 200
        assert http.get(f"/v1/images/{ids[0]}").status_code == 404


def test_who_keeps_most_makes_room():
    with serving(max_images=4) as served:
        images = served.service.images
        first = images.add(io.BytesIO(GOOD), "a", "quiet")
        others = [images.add(io.BytesIO(GOOD), "b", "greedy") for _ in range(3)]
        images.add(io.BytesIO(GOOD), "c", "greedy")
        assert first.id in images and others[0].id not in images
        # What a job needs stays.
        with images.hold(*(upload for upload in [first, *others[1:]])):
            images.add(io.BytesIO(GOOD), "d", "greedy")
            assert all(upload.id in images for upload in [first, *others[1:]])


def test_full_queues_say_when_to_come_back():
    matcher = GatedMatcher(tiny_matcher())
    with serving(matcher, max_queue=3, max_client_jobs=2) as served, served.http() as http:
        ids = [upload(http, image) for image in pair_of(1)]
        body = {"image0": ids[0], "image1": ids[1], "top": 5}
        jobs = [http.post("/v1/match", params={"wait": "false"}, json=body).json()["job"]]
        assert matcher.entered.acquire(timeout=30)
        jobs.append(http.post("/v1/match", params={"wait": "false"}, json=body).json()["job"])
        answer = http.post("/v1/match", json=body)
        refused(answer, 429, "too_many_jobs")
        assert int(answer.headers["Retry-After"]) >= 1
        # Other clients have their own share, until the queue is full.
        service = served.service
        images = service.images.get(ids[0]), service.images.get(ids[1])
        from dualrc.web.problems import Problem
        from dualrc.web.schemas import MatchOptions

        for number in range(2):
            service.match(f"10.0.0.{number}", images, MatchOptions())
        with pytest.raises(Problem) as full:
            service.match("10.0.0.9", images, MatchOptions())
        assert (full.value.status, full.value.code) == (503, "queue_full") and full.value.headers["Retry-After"]
        for _ in range(8):
            matcher.gate.release()
        assert http.get(f"/v1/jobs/{jobs[1]}/events").text.count("event: done") == 1
        assert http.post("/v1/match", json=body).status_code == 200


def test_a_job_that_takes_too_long_is_ended():
    matcher = GatedMatcher(tiny_matcher())
    with serving(matcher, limit_s=0.3) as served, served.http() as http:
        ids = [upload(http, image) for image in pair_of(1)]
        answers = []
        body = {"image0": ids[0], "image1": ids[1], "estimate": "homography"}
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/match", json=body)))
        thread.start()
        assert matcher.entered.acquire(timeout=30)
        time.sleep(0.4)
        matcher.gate.release()
        thread.join(30)
        refused(answers[0], 504, "too_late")


def test_a_header_that_does_not_end_closes_the_connection(monkeypatch):
    monkeypatch.setattr(Connection, "header_s", 0.6)
    matcher = GatedMatcher(tiny_matcher())
    with serving(matcher) as served, served.http() as http:
        address = (http.base_url.host, http.base_url.port)

        def lifetime(line: bytes, first: bytes = b"") -> float:
            """Seconds until the server closes a connection that sends the line again and again."""
            start, ended = time.monotonic(), False
            with socket.create_connection(address, timeout=0.1) as client, suppress(ConnectionError):
                client.sendall(first)
                while not ended and time.monotonic() < start + 20:
                    if line:
                        client.sendall(line)
                    with suppress(TimeoutError):
                        ended = not client.recv(1000)
            return time.monotonic() - start

        assert 0.5 < lifetime(b"") < 10
        assert 0.5 < lifetime(b"X") < 10
        # The rest of a body after the response.
        header = b"POST /v1/images HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        assert 0.5 < lifetime(b"X", header) < 10
        # The second request of a connection has the same limit.
        with socket.create_connection(address, timeout=10) as client, suppress(ConnectionError):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(65536)
            start = time.monotonic()
            client.sendall(b"GET /healthz")
            assert client.recv(100) == b"" and 0.5 < time.monotonic() - start < 8
        # A complete request may take longer, and so may the time to the next one.
        ids = [upload(http, image) for image in pair_of(0)]
        threading.Timer(1.5, matcher.gate.release).start()
        assert http.post("/v1/match", json={"image0": ids[0], "image1": ids[1]}).status_code == 200
        time.sleep(1)
        assert http.get("/healthz").status_code == 200


def test_an_upload_that_does_not_end_is_refused():
    header = b"POST /v1/images HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    with serving(upload_s=0.5) as served, served.http() as http:
        address = (http.base_url.host, http.base_url.port)
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(header + b"Content-Length: 1000\r\n\r\n--x\r\n")
            answer = b""
            while part := client.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"too_slow"' in answer
        assert not list(served.service.images.folder.iterdir())


def test_metrics_and_the_access_log(http, served, caplog):
    number = upload(http, GOOD)
    with caplog.at_level("INFO", logger="dualrc.web.access"):
        http.get(f"/v1/images/{number}/view")
        for method in ("BREW", "WHEN"):
            http.request(method, "/v1/info")
        text = http.get("/metrics").text
    import json

    # The note of an earlier request may come after its response.
    note = next(note for note in map(json.loads, caplog.messages) if note["route"] == "/v1/images/{number}/view")
    assert note["status"] == 200 and note["bytes"] > 500
    assert number not in "".join(caplog.messages)  # who knows an id has the image
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    assert values['dualrc_requests_total{route="/v1/images",method="POST",status="201"}'] >= 1
    # A label for each name that a client makes up would fill the memory.
    assert 'method="other"' in text and "BREW" not in text
    assert values["dualrc_images"] == len(served.service.images) and values["process_resident_memory_bytes"] > 1e7
    buckets = [
        value for name, value in values.items() if name.startswith('dualrc_request_seconds_bucket{route="/v1/images"')
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == values['dualrc_request_seconds_count{route="/v1/images"}']
    assert values['dualrc_jobs_total{outcome="done"}'] == served.service.jobs.outcomes["done"]


def test_the_cache_counts_its_bytes():
    cache: Cache[str, bytes] = Cache(10, len)
    cache.put("a", b"1234")
    cache.put("b", b"1234")
    assert cache.get("a") and cache.size == 8
    cache.put("c", b"1234")  # b was used least recently
    assert cache.get("b") is None and cache.size == 8
    cache.put("d", b"x" * 11)
    assert cache.get("d") is None and len(cache) == 2
    cache.put("a", b"1")
    assert cache.size == 5
    cache.discard(lambda key: key == "a")
    assert cache.size == 4 and cache.make("c", lambda: b"") == b"1234" and cache.make("e", lambda: b"12") == b"12"


def test_unused_values_expire(monkeypatch):
    cache: Cache[str, bytes] = Cache(2, len, keep_s=10, keep=1)
    now = [0.0]
    # Only the clock of the cache: the event loop of a running server would sleep for hours.
    monkeypatch.setattr("dualrc.web.cache.time", SimpleNamespace(monotonic=lambda: now[0]))
    cache.put("a", b"1")
    cache.put("b", b"2")
    now[0] = 9
    assert cache.get("a") == b"1"
    now[0] = 11
    cache.expire()
    assert len(cache) == 1 and cache.get("b") is None and cache.get("a") == b"1"
    # The latest value stays, even if it alone exceeds the limit.
    cache.put("c", b"123")
    assert len(cache) == 1 and cache.get("c") == b"123"
