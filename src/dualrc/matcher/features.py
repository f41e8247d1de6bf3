"""Features of images, and images that wait for their features."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.image import ImageInput, Scale
from dualrc.model.network import Features
from dualrc.pixels import FINE_STRIDE
from dualrc.texture import CELLS, LEAST_DEVIATION, Seen
from dualrc.types import BoolArray, ImageArray, Size

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ImageFeatures:
    """Features of an image, ready to be matched with many others."""

    # Feature maps with a batch size of one.
    maps: Features
    # Size of the image and of the network input; converts points between them.
    scale: Scale
    # (height, width) of the image; None if the whole image is matched.
    mask: BoolArray | None
    # Identifies the weights, because features of different networks cannot be compared.
    made_by: str
    # The image as the network saw it, uint8 (h w 3). The search over scales resamples it.
    pixels: Tensor

    def __repr__(self) -> str:
        return "ImageFeatures({}x{}, seen as {}x{})".format(*self.scale.image_size, *self.scale.input_size)

    @property
    def size(self) -> Size:
        """(width, height) of the image."""
        return self.scale.image_size

    @cached_property
    def seen(self) -> Seen:
        """The texture of the image."""
        return Seen(textured_cells(self.pixels.float().mean(-1)[None])[0].cpu().numpy(), self.scale)

    @property
    def bytes(self) -> int:
        """Memory of the features in bytes."""
        maps = self.maps
        tensors = [tensor for tensor in (maps.coarse, maps.fine, maps.light, self.pixels) if tensor is not None]
        # Coarse and fine map of NCNet may be the same tensor.
        return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def textured_cells(gray: Tensor) -> Tensor:
    """Return what `has_texture` returns, for gray levels on any device: (b h w) -> (b h/4 w/4)."""
    # Without the mid-gray, squares are small and float32 suffices.
    gray = gray - 128
    cells = F.avg_pool2d(torch.stack([gray, gray.square()]), FINE_STRIDE)
    mean, square = F.avg_pool2d(cells, CELLS, stride=1, padding=CELLS // 2, count_include_pad=False)
    return square - mean.square() > LEAST_DEVIATION**2


Matchable = ImageInput | ImageFeatures
FeaturePair = tuple[ImageFeatures, ImageFeatures]


@dataclass(kw_only=True, eq=False)
class PendingImage:
    """An image that waits for its features."""

    scale: Scale
    # (h w 3) A tensor is on the device.
    pixels: ImageArray | Tensor | None = None
    features: ImageFeatures | None = None

    @property
    def bytes(self) -> int:
        """Memory of pixels and features in bytes."""
        return (0 if self.pixels is None else self.pixels.nbytes) + (
            0 if self.features is None else self.features.bytes
        )

    def known(self) -> ImageFeatures:
        """Return the features, which must be present."""
        assert self.features is not None
        return self.features


def shapes(pair: tuple[PendingImage, PendingImage]) -> tuple[Size, ...]:
    """Return the sizes of the network input; pairs with equal sizes can form a batch."""
    return tuple(item.scale.input_size for item in pair)


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield chunks of at most `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """Return the numbers of the items with each key, in the order of their first item."""
    groups: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def stack(features: list[Features]) -> Features:
    """Stack features of images of the same shape into one batch."""
    if len(features) == 1:
        return features[0]
    valid, masks = None, [f.valid for f in features if f.valid is not None]
    if masks:
        whole = torch.ones_like(masks[0])
        valid = torch.cat([whole if f.valid is None else f.valid for f in features])
    lights = [f.light for f in features if f.light is not None]
    return Features(
        coarse=torch.cat([f.coarse for f in features]),
        fine=torch.cat([f.fine for f in features]),
        valid=valid,
        light=torch.cat(lights) if len(lights) == len(features) else None,
    )
