"""pycolmap, an extra."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Before pycolmap: the other way round, Pillow's PNG writer breaks.
from PIL import Image as _  # noqa: F401

from dualrc.extras import require


def import_pycolmap() -> Any:
    """The module pycolmap, or an error that says how to get it."""
    return require("pycolmap", "colmap", "COLMAP's models")


@contextmanager
def quiet_colmap(pycolmap: Any) -> Iterator[None]:
    """Keep COLMAP from writing its log to the screen; errors come as exceptions."""
    before = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = int(pycolmap.logging.FATAL.value)
    try:
        yield
    finally:
        pycolmap.logging.minloglevel = before
