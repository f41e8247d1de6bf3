"""Storage of uploaded images: files in a temporary folder, with limits on number, size and age."""

import re
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from dualrc.config import MIN_SIDE
from dualrc.errors import ImageError
from dualrc.formats import encoded, open_image
from dualrc.image import read
from dualrc.types import ImageArray, Size
from dualrc.web.cache import Cache
from dualrc.web.problems import Problem, from_error, known
from dualrc.web.settings import MIB, ServerConfig

# Maximum length of an image name.
_LONGEST_NAME = 120
# Maximum number of images that are decoded at the same time.
_DECODERS = 2
# Seconds after which a client should try again when the storage is full.
_FULL_RETRY_S = 10


@dataclass(kw_only=True, eq=False)
class Upload:
    """Image that was uploaded by a client or belongs to an example."""

    id: str
    # Name given by the client; it is never used as a path.
    name: str
    path: Path
    # Width and height of the upright image.
    size: Size
    # Size of the file, in bytes.
    bytes: int
    client: str
    # Whether the image belongs to an example; it does not expire, and clients cannot delete it.
    shared: bool = False
    used: float = field(default_factory=time.monotonic)
    # Number of jobs that use the image.
    holds: int = 0

    def describe(self) -> dict[str, object]:
        """Return the JSON of an image."""
        return {"id": self.id, "name": self.name, "width": self.size[0], "height": self.size[1]}


class ImageStore:
    """Images by unguessable id."""

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self.folder, self.config = folder, config
        self._uploads: dict[str, Upload] = {}
        # Called with the id of every image that is removed.
        self.removed: Callable[[str], None] = lambda _: None
        self._lock = threading.RLock()
        self._decoding = threading.BoundedSemaphore(_DECODERS)
        self._pixels: Cache[str, ImageArray] = Cache(config.pixel_bytes, lambda pixels: pixels.nbytes)
        self._views: Cache[tuple[str, int], bytes] = Cache(config.pixel_bytes // 4, len)

    def __len__(self) -> int:
        return len(self._uploads)

    @property
    def disk_bytes(self) -> int:
        """Total size of the files, in bytes."""
        with self._lock:
            return sum(upload.bytes for upload in self._uploads.values())

    @property
    def pixel_bytes(self) -> int:
        """Memory of decoded images and views, in bytes."""
        return self._pixels.size + self._views.size

    def add(self, file: IO[bytes], name: str | None, client: str, *, shared: bool = False) -> Upload:
        """Store a file if it is an image within the limits; the header is checked before decoding."""
        number, name = secrets.token_urlsafe(18), clean_name(name)
        # The suffix is fixed and does not come from the client.
        path = self.folder / f"{number}.image"
        with path.open("wb") as target:
            shutil.copyfileobj(file, target, MIB)
        try:
            if (count := path.stat().st_size) > self.config.max_bytes:
                raise too_many_bytes(self.config.max_bytes)
            pixels = self._decode(path, name)
            upload = Upload(
                id=number, name=name, path=path, size=pixels.shape[1::-1], bytes=count, client=client, shared=shared
            )
            with self._lock:
                self._make_room(upload)
                self._uploads[number] = upload
            self._pixels.put(number, pixels)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return upload

    def __contains__(self, number: str) -> bool:
        """Return whether an image exists, without marking it as used."""
        return number in self._uploads

    def get(self, number: str) -> Upload:
        """Return the image with this id and mark it as used."""
        with self._lock:
            self.expire()
            upload = known(self._uploads.get(number), "image")
            upload.used = time.monotonic()
            return upload

    def describe(self, upload: Upload) -> dict[str, object]:
        """Return the JSON of an image with the seconds until it expires."""
        unused_s = 0.0 if upload.shared else time.monotonic() - upload.used
        return {**upload.describe(), "expires_s": round(max(0.0, self.config.keep_s - unused_s))}

    @contextmanager
    def hold(self, *uploads: Upload) -> Iterator[None]:
        """Prevent the removal of images inside a `with` block."""
        with self._lock:
            for upload in uploads:
                upload.holds += 1
        try:
            yield
        finally:
            with self._lock:
                for upload in uploads:
                    upload.holds -= 1
                    upload.used = time.monotonic()

    def delete(self, number: str) -> None:
        """Remove an image, unless it belongs to an example."""
        upload = self.get(number)
        if not upload.shared:
            self._remove(upload)

    def expire(self) -> None:
        """Remove expired images."""
        with self._lock:
            oldest = time.monotonic() - self.config.keep_s
            for upload in [one for one in self._uploads.values() if one.used < oldest and _removable(one)]:
                self._remove(upload)

    def pixels(self, upload: Upload) -> ImageArray:
        """Return the pixels of the upright image, from the cache if possible."""
        return self._pixels.make(upload.id, lambda: self._decode(upload.path, upload.name))

    def view(self, upload: Upload, max_side: int) -> bytes:
        """Return the upright image as JPEG, with a long side of at most `max_side` pixels."""
        return self._views.make((upload.id, max_side), lambda: to_jpeg(self.pixels(upload), max_side))

    def _decode(self, path: Path, name: str) -> ImageArray:
        try:
            with self._decoding, open_image(path, name) as image:
                width, height = image.size
                if width * height > self.config.max_pixels:
                    most = f"more than {self.config.max_pixels / 1e6:.3g} megapixels; scale it down and send it again"
                    raise Problem(413, "too_many_pixels", f"The image has {width}x{height} pixels, {most}.")
                pixels = read(image)
        except ImageError as error:
            # Messages contain the file name of the client, never a path on the server.
            renamed = ImageError(str(error).replace(str(path), name))
            renamed.__cause__ = error.__cause__
            raise from_error(renamed) from error
        if min(pixels.shape[:2]) < MIN_SIDE:
            width, height = pixels.shape[1::-1]
            message = f"{name} has {width}x{height} pixels; each side must have at least {MIN_SIDE}."
            raise Problem(422, "too_small", message)
        return pixels

    def _make_room(self, upload: Upload) -> None:
        """Remove expired images, then the least recently used images of the clients with the most images."""
        self.expire()
        while len(self._uploads) >= self.config.max_images or self.disk_bytes + upload.bytes > self.config.max_disk:
            free = [one for one in self._uploads.values() if _removable(one)]
            if not free:
                message = "All images that the server can keep are in use; try again soon."
                raise Problem(503, "storage_full", message, retry_s=_FULL_RETRY_S)
            counts = Counter(one.client for one in free)
            self._remove(min(free, key=lambda one: (-counts[one.client], one.used)))

    def _remove(self, upload: Upload) -> None:
        with self._lock:
            self._uploads.pop(upload.id, None)
        upload.path.unlink(missing_ok=True)
        self._pixels.discard(lambda key: key == upload.id)
        self._views.discard(lambda key: key[0] == upload.id)
        self.removed(upload.id)


def clean_name(name: str | None) -> str:
    """Return the last part of a file name, without control characters and shortened if necessary."""
    # Browsers send a quotation mark in a name as %22.
    last = re.split(r"[/\\]", name or "")[-1].replace("%22", '"')
    plain = "".join(character for character in last if character.isprintable()).strip()
    return plain[-_LONGEST_NAME:] or "image"


def too_many_bytes(most: int, what: str = "upload", remedy: str = "send a smaller file") -> Problem:
    """Return the problem of an upload or a body that is too large."""
    return Problem(413, "too_many_bytes", f"The {what} has more than {most / MIB:.3g} MiB; {remedy}.")


def to_jpeg(pixels: ImageArray, max_side: int) -> bytes:
    """Return a JPEG with a long side of at most `max_side` pixels."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if (ratio := max_side / max(image.size)) < 1:
        width, height = (max(1, round(side * ratio)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BOX if ratio < 0.25 else Image.Resampling.BICUBIC)
    return encoded(image, "JPEG", quality=92, subsampling=0)


def _removable(upload: Upload) -> bool:
    return upload.holds == 0 and not upload.shared
