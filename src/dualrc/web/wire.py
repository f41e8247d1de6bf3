"""Binary format of warps, used between the service and its clients."""

import numpy as np

from dualrc.errors import DataError
from dualrc.matches import Warp
from dualrc.types import FloatArray, Size

# Size of the header, in bytes.
_HEADER = 16


def grid_of(size: Size, max_side: int) -> Size:
    """Return the size of a grid over an image, with at most one cell per pixel and `max_side` along the long side."""
    ratio = min(1.0, max_side / max(size))
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


def pack_warp(warp: Warp, size0: Size) -> bytes:
    """Return a warp as little-endian bytes: uint32 sizes of the grid and of image 0, then float32 (x, y, certainty)."""
    height, width = warp.certainty.shape
    header = np.array([width, height, *size0], dtype="<u4")
    return header.tobytes() + np.concatenate([warp.points1, warp.certainty[..., None]], axis=2).astype("<f4").tobytes()


def unpack_warp(packed: bytes) -> tuple[FloatArray, FloatArray, Size]:
    """Return points (h, w, 2), certainty (h, w) and the size of image 0 from the output of `pack_warp`."""
    if len(packed) < _HEADER:
        raise DataError("The warp is truncated; request it again.")
    width, height, width0, height0 = (int(value) for value in np.frombuffer(packed[:_HEADER], dtype="<u4"))
    if len(packed) != _HEADER + 12 * width * height:
        raise DataError("The warp is truncated; request it again.")
    values = np.frombuffer(packed[_HEADER:], dtype="<f4").reshape(height, width, 3)
    return values[..., :2].copy(), values[..., 2].copy(), (width0, height0)
