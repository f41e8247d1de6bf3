"""Images: from files and arrays to network inputs, and from network outputs back to pixels.

Reading an image does not import torch, because `dualrc.onnx` works without it. Functions on tensors import it.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt
from PIL import Image

from dualrc.config import MIN_SIDE
from dualrc.errors import DataError, ImageError
from dualrc.formats import SUFFIXES, leave_out, open_image, read_exif, undecodable, upright, warn_once
from dualrc.pixels import STRIDE, cell_to_pixel, pixel_grid, pixel_to_unit, resize_points
from dualrc.types import BoolArray, FloatArray, ImageArray, Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ImageInput = Union[str, Path, Image.Image, npt.NDArray[Any], "Tensor"]

# Short side of the network input of a strip in pixels, if the pixel budget allows it.
SHORT_SIDE = 256
# EXIF orientations that swap width and height.
_SIDEWAYS = (5, 6, 7, 8)
_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Resizing of an image to the network input, both (width, height)."""

    image_size: Size
    input_size: Size

    def to_network(self, points: FloatArray) -> FloatArray:
        """Map image pixels (... 2) to network-input pixels."""
        return resize_points(points, self.image_size, self.input_size)

    def to_image(self, points: FloatArray) -> FloatArray:
        """Map network-input pixels (... 2) to image pixels."""
        return resize_points(points, self.input_size, self.image_size)


def read(image: ImageInput) -> ImageArray:
    """Read an image, upright and as RGB: uint8 (height, width, 3).

    Arrays are (h, w), (h, w, 1), (h, w, 3) or (h, w, 4). Tensors are (h, w) or (c, h, w). Floats range from 0 to 1.
    """
    if isinstance(image, (str, Path)):
        return _read_file(Path(image))
    if isinstance(image, Image.Image):
        return _to_rgb(image, str(getattr(image, "filename", "") or "The image"))
    # Without torch imported, this cannot be a tensor.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(image, torch.Tensor):
        tensor = image.detach().cpu()
        # numpy has no bfloat16.
        array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        if array.ndim == 4 and len(array) == 1:
            array = array[0]
        return _from_array(array.transpose(1, 2, 0) if array.ndim == 3 else array)
    if isinstance(image, np.ndarray):
        return _from_array(image)
    raise ImageError(f"Give an image as a path, PIL image, array or tensor, not as {type(image).__name__}.")


def find_images(root: str | Path) -> list[str]:
    """Return the sorted names of images in a folder and its subfolders, relative to it, with "/" as separator.

    Hidden files are skipped, because some systems store thumbnails and metadata next to images under similar names.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a folder of images.")
    paths = (path.relative_to(root) for path in root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    names = sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    names, left_out = leave_out(names, root)
    if not names:
        raise DataError(left_out or f"{root} contains no images; give a folder with {', '.join(SUFFIXES)} files.")
    if left_out:
        warn_once(left_out)
    for name in names:
        # Control characters break lists of names, and surrogates cannot be stored as text.
        if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in name):
            raise DataError(f"The file name {name!r} contains characters that are not text; rename the file.")
    return names


@dataclass(frozen=True, kw_only=True)
class Header:
    """Header of an image file, read without decoding the image."""

    stored_size: Size
    # EXIF orientation, 1 to 8.
    orientation: int = 1
    # EXIF tags of the camera.
    tags: Mapping[int, Any] = field(default_factory=dict)

    @property
    def upright_size(self) -> Size:
        """(width, height) of the image as `read` returns it."""
        return self.stored_size[::-1] if self.orientation in _SIDEWAYS else self.stored_size


def read_header(path: str | Path) -> Header | None:
    """Read size, orientation and EXIF tags of an image file; None if it is missing or unreadable."""
    try:
        with open_image(path, str(path)) as image:
            size, exif = image.size, read_exif(image, str(path))
    except (ImageError, OSError, ValueError):
        # OSError and ValueError come from invalid file names.
        return None
    if image.format == "TIFF" and exif.orientation in _SIDEWAYS:
        # Pillow reports the upright size of such a TIFF.
        size = size[::-1]
    return Header(stored_size=size, orientation=exif.orientation, tags=exif.tags)


def network_size(size: Size, *, long_side: int | None, max_size: int) -> Size:
    """Return the (width, height) of the network input for an image of this size.

    Without `long_side`, the long side is at most `max_size`. A strip gets a longer side, so that its short side stays
    usable, but at most as many pixels as a square of `max_size`.
    """
    longest = max(size)
    if long_side is None:
        short = min(SHORT_SIDE, max_size / 4)
        strip = min(short / min(size), max_size / math.sqrt(size[0] * size[1]))
        ratio = min(1.0, max(max_size / longest, strip))
    else:
        ratio = long_side / longest
    # The small term avoids losing a whole cell to rounding, as in 1024/1024.0000001.
    width, height = (int(side * ratio + 1e-6) // STRIDE * STRIDE for side in size)
    if min(size) < MIN_SIDE or min(width, height) < MIN_SIDE:
        remedy = "use a larger image" if min(size) < MIN_SIDE else "give a larger size"
        raise ImageError(
            f"The image of {size[0]}x{size[1]} pixels is too small or too thin: the network input would be "
            f"{width}x{height}, and each side must be at least {MIN_SIDE}; {remedy}."
        )
    return width, height


def to_tensor(image: ImageArray) -> "Tensor":
    """Convert an image to a tensor that shares its memory if possible."""
    import torch

    # Read-only arrays, such as np.asarray(PIL image), are copied, because torch warns about them.
    return torch.from_numpy(np.require(image, requirements=["C", "W"]))


def to_input(pixels: "Tensor", size: Size, *, antialias: bool = True) -> "Tensor":
    """Resize to (width, height) and normalize: uint8 (b h w 3) -> float32 (b 3 height width)."""
    return normalize_colors(resize(pixels, size, antialias=antialias) / 255)


def resize(pixels: "Tensor", size: Size, *, antialias: bool = True) -> "Tensor":
    """Resize to (width, height): uint8 (b h w 3) -> float32 (b 3 height width) from 0 to 255."""
    from torch.nn import functional as F

    images = pixels.permute(0, 3, 1, 2).float()
    if tuple(images.shape[:1:-1]) != size:
        images = F.interpolate(
            images, size=(size[1], size[0]), mode="bilinear", antialias=antialias, align_corners=False
        )
    return images


def normalize_colors(images: "Tensor", mean_deviation: "tuple[Tensor, Tensor] | None" = None) -> "Tensor":
    """Subtract ImageNet's mean and divide by its deviation: (b 3 h w) from 0 to 1, channels-last in memory.

    `mean_deviation`: precomputed `normal_rows`, for compiled functions, which ignore caches.
    """
    mean, deviation = mean_deviation or normal_rows(images.device, images.shape[3])
    # Whole rows are faster than single pixels.
    rows = images.permute(0, 2, 3, 1).flatten(2)
    return (rows - mean).div_(deviation).unflatten(2, (-1, 3)).permute(0, 3, 1, 2)


@lru_cache(maxsize=256)
def normal_rows(device: "torch.device", width: int) -> "tuple[Tensor, Tensor]":
    """Return ImageNet's mean and deviation for a row of `width` pixels, copied to a device once."""
    import torch

    with torch.inference_mode(False):
        mean, deviation = (torch.tensor(colors, device=device).repeat(width) for colors in (_MEAN, _DEVIATION))
    return mean, deviation


def restore_colors(images: "Tensor") -> ImageArray:
    """Invert `normalize_colors`: (b 3 h w) -> uint8 (b, h, w, 3)."""
    import torch

    channels = zip(images.unbind(1), _MEAN, _DEVIATION, strict=True)
    colors = torch.stack([channel * deviation + mean for channel, mean, deviation in channels], dim=3)
    return (colors.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()


def mask_to_cells(mask: BoolArray, image: Size, network: Size, stride: int) -> BoolArray:
    """Return the cells of a map with this stride whose center lies on a true pixel of the mask: (h, w) of the map."""
    if mask.shape != (image[1], image[0]):
        raise ImageError(f"The mask has shape {mask.shape}; give the image's (height, width), {(image[1], image[0])}.")
    centers = cell_to_pixel(pixel_grid((network[0] // stride, network[1] // stride)).astype(np.float64), stride)
    nearest = np.floor(resize_points(centers, network, image) + 0.5).astype(int)
    column, row = np.clip(nearest, 0, np.array(image) - 1).transpose(2, 0, 1)
    return mask[row, column]


def spread(
    points: "Tensor", certainty: "Tensor", scale: Scale, stride: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Interpolate correspondences of cells (h w 2), in network pixels, at every image pixel: (H W 2), certainty (H W).

    Uncertain cells are filled from increasingly coarse averages of certain cells around them, and keep certainty 0.
    """
    import torch
    from torch.nn import functional as F

    height, width = certainty.shape
    cells = cell_to_pixel(torch.from_numpy(pixel_grid((width, height))), stride)
    weight = (certainty > 0).float()[None, None]
    # Average motions rather than positions, so that filled cells move with their surroundings.
    motion = (points - cells).permute(2, 0, 1)[None] * weight
    levels = [(motion, weight)]
    while max(levels[-1][1].shape[2:]) > 1:
        motion, weight = (F.avg_pool2d(x, 2, ceil_mode=True) for x in levels[-1])
        levels.append((motion, weight))
    filled = motion / weight.clamp(min=1e-6)
    for motion, weight in reversed(levels[:-1]):
        below = F.interpolate(filled, size=weight.shape[2:], mode="bilinear", align_corners=False)
        filled = torch.where(weight > 0, motion / weight.clamp(min=1e-6), below)
    # Each pixel of the image interpolates the motion of the cells around it.
    inputs = scale.to_network(pixel_grid(scale.image_size)).astype(np.float32)
    unit = pixel_to_unit(torch.from_numpy(inputs), (width * stride, height * stride))
    stacked = torch.cat([filled, certainty[None, None]], dim=1)
    sampled = F.grid_sample(stacked, unit[None], mode="bilinear", padding_mode="border", align_corners=False)[0]
    return inputs + sampled[:2].permute(1, 2, 0).numpy(), sampled[2].numpy()


def _read_file(path: Path) -> ImageArray:
    try:
        if path.is_dir():
            raise ImageError(f"{path} is a folder; give an image file.")
    except (OSError, ValueError) as error:
        # The name is too long or invalid.
        raise ImageError(f"Cannot read {path} ({error}); check the path.") from error
    with open_image(path, str(path)) as image:
        return _to_rgb(image, str(path))


def _to_rgb(image: Image.Image, name: str) -> ImageArray:
    try:
        return _decode(image, name)
    except ImageError:
        raise
    except Exception as error:
        # Decoding a damaged file can raise any exception.
        raise undecodable(name, error) from error


def _decode(image: Image.Image, name: str) -> ImageArray:
    image = upright(image, name)
    if 0 in image.size:
        raise ImageError(f"{name} has no pixels; give another image.")
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _from_array(_unit_range(np.asarray(image), integer=image.mode != "F"))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def _unit_range(array: npt.NDArray[Any], *, integer: bool) -> npt.NDArray[Any]:
    """Scale deep gray values to 0..1: 16-bit integers by their full range, floats by their maximum if above 1."""
    if integer:
        return np.clip(array, 0, 65535).astype(np.float32) / 65535
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        # Rejected later, with an error.
        return array
    return np.clip(array / max(float(array.max()), 1.0), 0, 1)


def _from_array(array: npt.NDArray[Any]) -> ImageArray:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise ImageError(
            f"An array of shape {array.shape} is not an image; give (height, width) or (height, width, 3), "
            "or a tensor (3, height, width)."
        )
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype == np.uint16:
        array = np.round(array / 257).astype(np.uint8)
    elif np.issubdtype(array.dtype, np.floating):
        array = _from_floats(array)
    elif array.dtype != np.uint8:
        raise ImageError(f"An image of {array.dtype} is ambiguous; give uint8, uint16, or floats from 0 to 1.")
    if array.shape[2] == 4:
        alpha = array[:, :, 3:].astype(np.float32) / 255
        array = np.round(array[:, :, :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array


def _from_floats(array: npt.NDArray[Any]) -> ImageArray:
    if not np.isfinite(array).all():
        raise ImageError("The image contains NaN or infinite values; replace them first.")
    low, high = float(array.min()), float(array.max())
    if low < -1e-3 or high > 1 + 1e-3:
        raise ImageError(
            f"An image of floats must range from 0 to 1, not {low:g} to {high:g}; scale it, or give uint8."
        )
    return np.round(np.clip(array, 0, 1) * 255).astype(np.uint8)
