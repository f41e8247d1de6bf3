"""Resizing without torch, with the same results as `dualrc.image.resize`."""

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualrc.types import ImageArray, Size


def resize(pixels: ImageArray, size: Size, *, antialias: bool = True) -> npt.NDArray[np.float32]:
    """Resize to (width, height): uint8 (h w 3) to float32 (3 height width) in 0 to 255."""
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
    if (pixels.shape[1], pixels.shape[0]) == size:
        return planes
    if not antialias:
        return _interpolate(planes, size)
    # Pillow and torch use the same triangle filter. On floats, Pillow does not round between the two axes.
    return np.stack([np.asarray(Image.fromarray(plane).resize(size, Image.Resampling.BILINEAR)) for plane in planes])


def _interpolate(planes: npt.NDArray[np.float32], size: Size) -> npt.NDArray[np.float32]:
    """Interpolate planes (3 h w) bilinearly between the nearest pixels, at any ratio."""
    for axis, length in ((1, size[1]), (2, size[0])):
        own = planes.shape[axis]
        place = np.clip((np.arange(length) + 0.5) * (own / length) - 0.5, 0, None)
        before = np.minimum(place.astype(np.int64), own - 1)
        share = np.float32(place - before).reshape([-1 if number == axis else 1 for number in range(3)])
        low, high = (planes.take(index, axis=axis) for index in (before, np.minimum(before + 1, own - 1)))
        planes = low + (high - low) * share
    return planes
