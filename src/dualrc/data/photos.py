"""Single photos for training: reading them, and settings for pairs made from them."""

import io
import itertools
import lzma
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dualrc.config import check_bounds
from dualrc.errors import ConfigError, DataError, ImageError
from dualrc.formats import SUFFIXES, open_image
from dualrc.image import read
from dualrc.types import ImageArray

# Maximum size of a photo in a tar file.
_MOST_BYTES = 1 << 28
# Maximum number of photos in the queues of the decoder; a whole tar file would fill the memory.
_MOST_WAITING = 64

T = TypeVar("T")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Photos in the upper left corners of square canvases."""

    # (n, 3, s, s) uint8.
    canvases: Tensor
    # (n, 2), (width, height).
    sizes: Tensor
    # Names of photos that are unreadable or too small.
    broken: tuple[str, ...]


def read_photos(roots: Sequence[str | Path], *, canvas: int = 512, limit: int | None = None) -> Photos:
    """Read photos from folders and tar files; larger ones are scaled down to the canvas."""
    images: list[ImageArray] = []
    sizes, broken = [], []
    sources = itertools.islice(_sources(roots), limit)
    # Decoding releases the global interpreter lock.
    with ThreadPoolExecutor() as pool:
        for name, pixels in _in_order(pool, lambda source: (source[0], _read_small(*source, canvas)), sources):
            if pixels is None:
                broken.append(name)
                continue
            height, width = pixels.shape[:2]
            images.append(np.pad(pixels, ((0, canvas - height), (0, canvas - width), (0, 0)), mode="edge"))
            sizes.append((width, height))
    if not images:
        raise DataError(f"No photos could be read from {', '.join(map(str, roots))}; check the paths.")
    canvases = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Photos(canvases=canvases, sizes=torch.tensor(sizes), broken=tuple(broken))


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], Result], items: Iterable[T], most: int = _MOST_WAITING
) -> Iterator[Result]:
    """Like pool.map, but with a limited number of pending results."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _read_small(name: str, source: Path | bytes, canvas: int) -> ImageArray | None:
    """Read a photo, scaled down to the canvas; None if it is unreadable or too small to cut views from."""
    try:
        pixels = read(source) if isinstance(source, Path) else read(open_image(io.BytesIO(source), name))
    # A broken photo among many is skipped.
    except ImageError:
        return None
    height, width = pixels.shape[:2]
    scale = canvas / max(height, width)
    if scale < 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    return pixels if min(pixels.shape[:2]) >= 64 else None


def _sources(roots: Sequence[str | Path]) -> Iterator[tuple[str, Path | bytes]]:
    """Yield names and images of folders and tar files, in the order of their names or of the file."""
    for root in map(Path, roots):
        if root.is_dir():
            for path in sorted(root.rglob("*")):
                if path.suffix.lower() in SUFFIXES:
                    yield str(path), path
        elif root.is_file():
            yield from _members(root)
        else:
            raise DataError(f"{root} does not exist; pass a folder of photos or a tar file.")


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the images in a tar file.

    Nothing is unpacked to disk, so names are harmless. Links, sparse files and files of more than 256 MiB come without
    content, and count as broken.
    """
    try:
        with path.open("rb") as compressed, _BoundedTar.open(fileobj=compressed) as archive:
            for member in archive:
                if member.name.lower().endswith(SUFFIXES) and not member.isdir():
                    plain = member.isreg() and not member.issparse() and member.size <= _MOST_BYTES
                    file = archive.extractfile(member) if plain else None
                    yield member.name, b"" if file is None else file.read()
    except (tarfile.TarError, OSError, EOFError, ValueError, MemoryError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path} is neither a folder nor a complete tar file; pass a folder of photos or another tar file."
        ) from error


class _BoundedTar(tarfile.TarFile):
    """A tar file that rejects headers which claim gigabytes."""

    def __init__(self, name: Any, mode: Any, fileobj: Any, **options: Any) -> None:
        super().__init__(name, mode, _Bounded(fileobj), **options)


class _Bounded:
    """A file that limits the size of a single read to that of an image."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int) -> bytes:
        """Read the next bytes."""
        if size > _MOST_BYTES:
            raise tarfile.ReadError("a header is too long")
        return bytes(self._file.read(size))


@dataclass(frozen=True, kw_only=True)
class PhotoMotion:
    """Random motion between the two images of a pair."""

    # Standard deviation of the usual rotation.
    rotation_deg: float = 30.0
    # Share of pairs with a rotation by any angle.
    any_rotation: float = 0.3
    # Standard deviation of the change of scale, in octaves.
    octaves: float = 0.85
    # Standard deviation of the anisotropic stretch of a view.
    stretch: float = 0.16
    # Standard deviation of the perspective: relative change of scale across a view.
    perspective: float = 0.3
    # Standard deviation of the shift, as a share of half the image side.
    shift: float = 0.25
    # Number of occluding photos with their own motion.
    layers: int = 2
    # Share of pairs whose background is deformed smoothly.
    bend: float = 0.5
    # Share of pairs whose background only shifts by a few pixels, as if the lighting had changed.
    still: float = 0.2
    # Share of pairs whose background is a mosaic of nine photos, which keeps wide views sharp.
    mosaic: float = 0.5
    # Share of pairs of unrelated images, which have no correct matches.
    unrelated: float = 0.06
    # Maximum tilt of the background in one of the images.
    tilt_deg: float = 0.0
    # Share of pairs with a tilt, of any angle up to the maximum.
    tilted: float = 0.0
    # Share of pairs whose background has a repetitive pattern.
    repeated: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, "any_rotation", "bend", "still", "mosaic", "unrelated", at_least=0, at_most=1)
        check_bounds(self, "tilted", "repeated", at_least=0, at_most=1)
        check_bounds(self, "tilt_deg", at_least=0, at_most=80)


@dataclass(frozen=True, kw_only=True)
class PhotosConfig:
    """Pairs synthesized from single photos."""

    # Selects this source.
    kind: Literal["photos"] = "photos"
    # Share of the pairs, relative to the other sources.
    share: float = 1.0
    # Folders and tar files.
    paths: tuple[str, ...]
    # Motion between the two images of a pair.
    motion: PhotoMotion = field(default_factory=PhotoMotion)
    # Larger photos are scaled down to this side.
    canvas: int = 512
    # Share of images that simulate the tones and channels of another sensor or season.
    sensors: float = 0.0

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("paths is empty; add at least one folder or tar file of photos.")
        check_bounds(self, "share", above=0)
        check_bounds(self, "sensors", at_least=0, at_most=1)
        if self.canvas < 64 or self.canvas % 8:
            raise ConfigError(f"canvas = {self.canvas} is not valid; pass a multiple of 8 of at least 64.")
