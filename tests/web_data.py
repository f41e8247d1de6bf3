"""A real server for tests: uvicorn on a free port in a thread, and what is sent to it."""

import asyncio
import io
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import numpy as np
import pycolmap
from collection_data import Scene, make_scene
from conftest import texture, tiny_matcher
from PIL import Image

from dualrc import colmap
from dualrc.web.app import create_app
from dualrc.web.server import Server, listen, url_of
from dualrc.web.settings import ServerConfig


@dataclass
class Served:
    """A running server."""

    url: str
    app: object
    matcher: object

    @property
    def service(self):
        return self.app.state.service

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)


@contextmanager
def serving(matcher=None, *, reconstruction=None, **limits):
    """Serve while the block runs."""
    matcher = matcher or tiny_matcher()
    hosts = limits.pop("hosts", ("127.0.0.1", "localhost"))
    app = create_app(matcher, ServerConfig(hosts=hosts, **limits), reconstruction=reconstruction, prepare=False)
    with listen("127.0.0.1", 0) as listener:
        ready = threading.Event()
        server = Server(app, started=ready.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            assert ready.wait(30)
            app.state.examples._size = (96, 64)  # quick to render
            yield Served(url_of(listener), app, matcher)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


class GatedMatcher:
    """A matcher that waits, in the middle of a match, until it is let go."""

    def __init__(self, inner) -> None:
        self._inner, self.entered, self.gate = inner, threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def match_features(self, *features, **options):
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        return self._inner.match_features(*features, **options)


def scene(seed: int, width: int = 160, height: int = 128) -> np.ndarray:
    return texture(seed, width, height)


def pair_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two overlapping cuts of one texture."""
    whole = texture(seed, 192, 144)
    return whole[:128, :160].copy(), whole[16:, 32:].copy()


def encode(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, kind, **options)
    return target.getvalue()


def upload(http: httpx.Client, pixels, name: str = "a.png") -> str:
    content = pixels if isinstance(pixels, bytes) else encode(pixels)
    answer = http.post("/v1/images", files={"file": (name, content)})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def refused(answer: httpx.Response, status: int, code: str) -> str:
    """The sentence of a refusal."""
    assert (answer.status_code, answer.json().get("code")) == (status, code), answer.text
    return answer.json()["error"]


def events(http: httpx.Client, job: str):
    """The names and data of a job's events, as they come."""
    with http.stream("GET", f"/v1/jobs/{job}/events") as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        name = None
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])


def write_model(folder) -> Scene:
    """What `dualrc reconstruct` leaves in folder/out, of photos in folder/photos: three views of the same points."""
    made = make_scene(["a.png", "b.png", "c.png"], count=20)
    reconstruction = colmap.posed_reconstruction(made.cameras)
    pixels = made.pixels
    for number, name in enumerate(made.cameras, start=1):
        points = [pycolmap.Point2D(place + 0.5) for place in pixels[name]]
        reconstruction.images[number].points2D = pycolmap.Point2DList(points)
    for index, xyz in enumerate(made.xyz):
        elements = [pycolmap.TrackElement(number, index) for number in (1, 2, 3)]
        reconstruction.add_point3D(xyz, pycolmap.Track(elements), np.array([index, 2, 3], dtype=np.uint8))
    (folder / "out" / "model").mkdir(parents=True)
    reconstruction.write_binary(folder / "out" / "model")
    (folder / "photos").mkdir()
    for name in made.cameras:
        Image.fromarray(scene(1, 320, 240)).save(folder / "photos" / name)
    return made
