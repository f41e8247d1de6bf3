"""Reading of images in advance, so that decoding overlaps with work on the GPU."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar

from dualrc.image import read
from dualrc.types import ImageArray

T = TypeVar("T")


class ReadAhead:
    """Reads announced images in background threads."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
        self._waiting: dict[Path, Future[ImageArray]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def ask(self, path: Path) -> None:
        """Announce that this image is needed soon."""
        if path not in self._waiting:
            self._waiting[path] = self._pool.submit(read, path)

    def take(self, path: Path) -> ImageArray:
        """Return the image, read in advance or now; raise the exception of reading, if any."""
        future = self._waiting.pop(path, None)
        return read(path) if future is None else future.result()

    def drop(self, path: Path) -> None:
        """Cancel the announcement of an image."""
        future = self._waiting.pop(path, None)
        if future is not None:
            future.cancel()


def look_ahead(items: Iterable[T], count: int) -> Iterator[tuple[T, list[T]]]:
    """Yield each item with the items that newly enter a window of `count` items ahead; the first item gets all."""
    rest = iter(items)
    seen = list(islice(rest, count + 1))
    new = seen
    while seen:
        yield seen[0], new
        new = list(islice(rest, 1))
        seen = seen[1:] + new
