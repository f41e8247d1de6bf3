"""Warps as bytes, for the way between service and clients."""

import numpy as np

from dualrc.errors import DataError
from dualrc.matches import Warp
from dualrc.types import FloatArray, Size

# Bytes.
_HEADER = 16


def grid_of(size: Size, max_side: int) -> Size:
    """Cells of a grid over an image: its own pixels, or fewer, with at most this many along the long side."""
    ratio = min(1.0, max_side / max(size))
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


def pack_warp(warp: Warp, size0: Size) -> bytes:
    """A warp as bytes, little endian: uint32 grid width and height, width and height of image 0; float32 triples."""
    height, width = warp.certainty.shape
    header = np.array([width, height, *size0], dtype="<u4")
    return header.tobytes() + np.concatenate([warp.points1, warp.certainty[..., None]], axis=2).astype("<f4").tobytes()


def unpack_warp(packed: bytes) -> tuple[FloatArray, FloatArray, Size]:
    """Points (h, w, 2), certainty (h, w) and the size of image 0, from what `pack_warp` made."""
    if len(packed) < _HEADER:
        raise DataError("The warp is cut off; ask for it again.")
    width, height, width0, height0 = (int(value) for value in np.frombuffer(packed[:_HEADER], dtype="<u4"))
    if len(packed) != _HEADER + 12 * width * height:
        raise DataError("The warp is cut off; ask for it again.")
    values = np.frombuffer(packed[_HEADER:], dtype="<f4").reshape(height, width, 3)
    return values[..., :2].copy(), values[..., 2].copy(), (width0, height0)
