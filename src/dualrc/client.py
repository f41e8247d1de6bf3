"""Client of `dualrc serve`, with the methods and results of a local matcher.

with Client("http://127.0.0.1:8000") as client:
    matches = client.match("a.jpg", "b.jpg", top=2000)
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualrc.config import Quality
from dualrc.errors import ConfigError, DataError, DualRCError, ImageError
from dualrc.extras import require
from dualrc.files import parse_json
from dualrc.formats import encoded
from dualrc.geometry import sample_bilinear
from dualrc.image import ImageInput, read
from dualrc.matches import EstimateKind, Matches, Warp
from dualrc.pixels import pixel_grid, resize_points
from dualrc.types import Size
from dualrc.web.wire import unpack_warp

Progress = Callable[[Mapping[str, Any]], None]
# Maximum long side of a warp grid that the server accepts.
_LARGEST_GRID = 4096
# HTTP statuses of unusable images.
_IMAGE_STATUS = (413, 415)


class ServiceError(DualRCError):
    """Error of a server that cannot be reached or rejected a request."""

    def __init__(self, message: str, *, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, kw_only=True)
class RemoteImage:
    """Image stored on a server; methods of the client accept it in place of an image."""

    id: str
    name: str
    # Width and height of the upright image.
    size: Size


Remote = ImageInput | RemoteImage


class Client:
    """Connection to a server; close it, or use it in a `with` block."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        token: str | None = None,
        *,
        timeout_s: float = 300.0,
        retries: int = 5,
    ) -> None:
        """Prepare a client; `retries` is the maximum number of repetitions of a request while the server is busy."""
        self._httpx = require("httpx", "web", "Clients of the service")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not the address of a server; give one that begins with http:// or https://.")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # The proxy settings of the environment do not apply to this server.
        self._http = self._httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)
        self.url, self._retries = url, retries

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def info(self) -> dict[str, Any]:
        """Return the versions, the device and the limits of the server."""
        return self._send("GET", "/v1/info").json()

    def upload(self, image: ImageInput, *, name: str | None = None) -> RemoteImage:
        """Upload an image for repeated use; files are sent unchanged, arrays as PNG."""
        content, own = _encoded(image)
        files = {"file": (name or own, content)}
        answer = self._send("POST", "/v1/images", files=files).json()
        return RemoteImage(id=answer["id"], name=answer["name"], size=(answer["width"], answer["height"]))

    def delete(self, image: RemoteImage) -> None:
        """Delete an image before it expires."""
        self._send("DELETE", f"/v1/images/{image.id}")

    def match(
        self,
        image0: Remote,
        image1: Remote,
        *,
        size: int | None = None,
        top: int | None = None,
        min_score: float = 0.0,
        quality: Quality = "standard",
        covariance: bool = False,
        estimate: EstimateKind | None = None,
        threshold_px: float = 2.0,
        progress: Progress | None = None,
    ) -> Matches:
        """Return the matches of two images, best first, as `Matcher.match` does.

        `progress` is called with the data of each progress event. An exception that it raises cancels the job.
        """
        body: dict[str, Any] = {"quality": quality, "min_score": min_score, "threshold_px": threshold_px}
        body |= {"top": top, "size": size, "covariance": covariance, "estimate": estimate}
        with self._uploaded(image0, image1) as images:
            body |= {"image0": images[0].id, "image1": images[1].id}
            if progress is None:
                answer = self._send("POST", "/v1/match", params={"format": "npz"}, json=body)
            else:
                job = self._send("POST", "/v1/match", params={"wait": "false"}, json=body).json()["job"]
                answer = self._send("GET", self._follow(job, progress), params={"format": "npz"})
        with tempfile.TemporaryDirectory(prefix="dualrc-client-") as folder:
            path = Path(folder) / "matches.npz"
            path.write_bytes(answer.content)
            return Matches.load(path)

    def match_points(
        self, image0: Remote, image1: Remote, points0: npt.ArrayLike, *, min_score: float = 0.0
    ) -> Matches:
        """Find points of image 0 in image 1: one row per point, with NaN and score 0 if it is not found."""
        points = np.asarray(points0, dtype=np.float32)
        points = points.reshape(0, 2) if points.size == 0 else points
        if points.ndim != 2 or points.shape[1] != 2:
            raise DataError(f"Points have shape (n, 2), one (x, y) a row, not {points.shape}.")
        with self._uploaded(image0, image1) as images:
            body = {"image0": images[0].id, "image1": images[1].id, "points": points.tolist(), "min_score": min_score}
            answer = self._send("POST", "/v1/points", json=body).json()
        found = [(np.nan, np.nan) if place is None else place for place in answer["points1"]]
        return Matches(
            points0=points,
            points1=np.array(found, dtype=np.float32).reshape(-1, 2),
            scores=np.array(answer["scores"], dtype=np.float32),
            size0=images[0].size,
            size1=images[1].size,
            info={"server": self.url},
        )

    def warp(self, image0: Remote, image1: Remote, *, min_score: float = 0.0, max_side: int | None = None) -> Warp:
        """Return the position in image 1 of every pixel of image 0, with a certainty.

        With `max_side`, the server sends a coarser grid, which the client interpolates.
        """
        with self._uploaded(image0, image1) as images:
            size0, size1 = images[0].size, images[1].size
            side = min(max_side or max(size0), _LARGEST_GRID)
            body = {"image0": images[0].id, "image1": images[1].id, "max_side": side, "min_score": min_score}
            points1, certainty, _ = unpack_warp(self._send("POST", "/v1/warp", json=body).content)
        if certainty.shape != size0[::-1]:
            grid = (certainty.shape[1], certainty.shape[0])
            places = resize_points(pixel_grid(size0).astype(np.float64), size0, grid)
            # Pixels at the image border lie outside the centers of the cells.
            places = places.clip(0, np.array(grid) - 1)
            known: Any = np.concatenate([points1, certainty[..., None]], axis=2)
            sampled = sample_bilinear(known, places).astype(np.float32)
            # A pixel next to an unknown cell is unknown, too.
            certainty = np.where(np.isnan(sampled).any(axis=2), 0, sampled[..., 2]).astype(np.float32)
            points1 = np.where(certainty[..., None] > 0, sampled[..., :2], np.nan).astype(np.float32)
        return Warp(points1=points1, certainty=certainty, size1=size1)

    @contextmanager
    def _uploaded(self, *images: Remote) -> Iterator[list[RemoteImage]]:
        """Yield images on the server; those that had to be uploaded are deleted afterwards."""
        with ExitStack() as stack:
            uploaded = []
            for given in images:
                image = given if isinstance(given, RemoteImage) else self.upload(given)
                uploaded.append(image)
                if image is not given:
                    stack.callback(self._discard, image)
            yield uploaded

    def _discard(self, image: RemoteImage) -> None:
        # An image that cannot be deleted expires on the server.
        with suppress(DualRCError):
            self.delete(image)

    def _follow(self, job: str, progress: Progress) -> str:
        """Report the progress of a job and return the address of its result."""
        try:
            # A short job may be done before its events are read.
            progress({"state": "queued", "position": 0, "stage": "", "fraction": 0.0})
            for name, data in self._events(job):
                if name == "progress":
                    progress(data)
                elif name == "done":
                    return str(data["result"])
                elif name == "failed":
                    raise _error(500, data)
                else:
                    break
        except BaseException:
            self._send("DELETE", f"/v1/jobs/{job}")
            raise
        raise ServiceError("The job was cancelled, or the server stopped; send the request again.", code="cancelled")

    def _events(self, job: str) -> Iterator[tuple[str, dict[str, Any]]]:
        with self._http.stream("GET", f"/v1/jobs/{job}/events") as answer:
            if answer.status_code >= 400:
                answer.read()
                raise _problem(answer)
            name = ""
            for line in answer.iter_lines():
                key, _, value = line.partition(": ")
                if key == "event":
                    name = value
                elif key == "data":
                    yield name, parse_json(value)

    def _send(self, method: str, path: str, **content: Any) -> Any:
        """Send a request, and repeat it while the server is busy."""
        for attempt in range(self._retries + 1):
            try:
                answer = self._http.request(method, path, **content)
            except self._httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
                raise ServiceError(f"{self.url} can't be reached ({reason}); start it with `dualrc serve`.") from error
            if answer.status_code not in (429, 503) or attempt == self._retries:
                break
            time.sleep(_seconds(answer.headers.get("Retry-After")))
        if answer.status_code >= 400:
            raise _problem(answer)
        return answer


def _encoded(image: ImageInput) -> tuple[bytes, str]:
    """Return the content of an image file, and its name."""
    if isinstance(image, (str, Path)):
        try:
            return Path(image).read_bytes(), Path(image).name
        except OSError as error:
            raise ImageError(f"{image} can't be read ({error.strerror}); check the path.") from error
    return encoded(Image.fromarray(read(image)), "PNG", compress_level=1), "image.png"


def _problem(answer: Any) -> DualRCError:
    try:
        content = parse_json(answer.content)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "error" not in content:
        content = {"error": f"The server answered with status {answer.status_code}; is it dualrc's?", "code": ""}
    return _error(answer.status_code, content)


def _error(status: int, content: Mapping[str, Any]) -> DualRCError:
    message, code = str(content.get("error", "")), str(content.get("code", ""))
    if status in _IMAGE_STATUS or code in ("not_an_image", "too_small", "too_many_pixels"):
        return ImageError(message)
    if status == 422:
        return ConfigError(message)
    return ServiceError(message, status=status, code=code)


def _seconds(asked: str | None) -> float:
    """Return the seconds to wait before the next attempt."""
    try:
        return min(max(float(asked or 1), 0.1), 30.0)
    except ValueError:
        return 1.0
