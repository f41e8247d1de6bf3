"""Single photographs to train on: how they are read, and how pairs are to be made from them."""

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
from dualrc.formats import SUFFIXES, open_picture
from dualrc.image import read
from dualrc.types import ImageArray

# Of a photograph in a tar file.
_MOST_BYTES = 1 << 28
# Photographs that wait for being decoded or taken: a whole tar file would fill the memory.
_MOST_WAITING = 64

T = TypeVar("T")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Photographs in the upper left corners of square canvases."""

    # N 3 s s uint8.
    canvases: Tensor
    # N 2, (width, height).
    sizes: Tensor
    # Names of those left out: they could not be read, or are too small.
    broken: tuple[str, ...]


def read_photos(roots: Sequence[str | Path], *, canvas: int = 512, limit: int | None = None) -> Photos:
    """Photographs from folders and tar files; larger ones are scaled down to the canvas."""
    images: list[ImageArray] = []
    sizes, broken = [], []
    sources = itertools.islice(_sources(roots), limit)
    # Decoding runs beside Python.
    with ThreadPoolExecutor() as pool:
        for name, pixels in _in_order(pool, lambda source: (source[0], _read_small(*source, canvas)), sources):
            if pixels is None:
                broken.append(name)
                continue
            height, width = pixels.shape[:2]
            images.append(np.pad(pixels, ((0, canvas - height), (0, canvas - width), (0, 0)), mode="edge"))
            sizes.append((width, height))
    if not images:
        raise DataError(f"No photographs could be read from {', '.join(map(str, roots))}; check the paths.")
    canvases = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Photos(canvases=canvases, sizes=torch.tensor(sizes), broken=tuple(broken))


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], Result], items: Iterable[T], most: int = _MOST_WAITING
) -> Iterator[Result]:
    """Like pool.map, but takes only so many items before their results are taken."""
    waiting: deque[Future[Result]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _read_small(name: str, source: Path | bytes, canvas: int) -> ImageArray | None:
    """A photograph scaled down to the canvas; None if it can't be read or is too small to cut views from."""
    try:
        pixels = read(source) if isinstance(source, Path) else read(open_picture(io.BytesIO(source), name))
    # One of many is no reason to stop.
    except ImageError:
        return None
    height, width = pixels.shape[:2]
    scale = canvas / max(height, width)
    if scale < 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    return pixels if min(pixels.shape[:2]) >= 64 else None


def _sources(roots: Sequence[str | Path]) -> Iterator[tuple[str, Path | bytes]]:
    """Names and pictures of folders and tar files, in the order of their names or of the file."""
    for root in map(Path, roots):
        if root.is_dir():
            for path in sorted(root.rglob("*")):
                if path.suffix.lower() in SUFFIXES:
                    yield str(path), path
        elif root.is_file():
            yield from _members(root)
        else:
            raise DataError(f"{root} does not exist; give a folder of photographs or a tar file.")


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a tar file's pictures.

    Nothing is unpacked, so that names don't matter. Links, files with holes and those of more than 256 MiB come without
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
            f"{path} is neither a folder nor a whole tar file; give a folder of photographs or another tar file."
        ) from error


class _BoundedTar(tarfile.TarFile):
    """A tar file whose headers are not believed where they claim gigabytes."""

    def __init__(self, name: Any, mode: Any, fileobj: Any, **options: Any) -> None:
        super().__init__(name, mode, _Bounded(fileobj), **options)


class _Bounded:
    """A file of which no more is read at once than a picture may have."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int) -> bytes:
        """The next bytes."""
        if size > _MOST_BYTES:
            raise tarfile.ReadError("a header is too long")
        return bytes(self._file.read(size))


@dataclass(frozen=True, kw_only=True)
class PhotoMotion:
    """How far apart the two pictures of a pair may be."""

    # Deviation of the usual rotation.
    rotation_deg: float = 30.0
    # Share of pairs turned by any angle.
    any_rotation: float = 0.3
    # Deviation of the change of scale, in octaves.
    octaves: float = 0.85
    # Deviation of how much a view is longer one way than the other.
    stretch: float = 0.16
    perspective: float = 0.3
    # Of the picture's side.
    shift: float = 0.25
    # Occluding photographs with their own motion.
    layers: int = 2
    # Share of pairs whose background bends smoothly.
    bend: float = 0.5
    # Share of pairs whose background only shifts by a few pixels, as under another light.
    still: float = 0.2
    # Share of pairs whose background is nine photographs, so that wide views stay sharp.
    mosaic: float = 0.5
    # Share of pairs that show different things: nothing there may be trusted.
    unrelated: float = 0.06
    # The most that the background is seen from the side in one of the pictures.
    tilt_deg: float = 0.0
    # Share of pairs that are tilted, by any angle up to that.
    tilted: float = 0.0
    # Share of pairs whose background is covered by a pattern that repeats itself.
    repeated: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, "any_rotation", "bend", "still", "mosaic", "unrelated", at_least=0, at_most=1)
        check_bounds(self, "tilted", "repeated", at_least=0, at_most=1)
        check_bounds(self, "tilt_deg", at_least=0, at_most=80)


@dataclass(frozen=True, kw_only=True)
class PhotosConfig:
    """Pairs made from single photographs."""

    kind: Literal["photos"] = "photos"
    # Of the pairs, beside the other data.
    share: float = 1.0
    # Folders and tar files.
    paths: tuple[str, ...]
    motion: PhotoMotion = field(default_factory=PhotoMotion)
    # Larger photographs are scaled down to this side.
    canvas: int = 512
    # Share of pictures with the tones and channels of another sensor or season.
    sensors: float = 0.0

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("paths is empty; name at least one folder or tar file of photographs.")
        check_bounds(self, "share", above=0)
        check_bounds(self, "sensors", at_least=0, at_most=1)
        if self.canvas < 64 or self.canvas % 8:
            raise ConfigError(f"canvas = {self.canvas} must be a multiple of 8 and at least 64.")
