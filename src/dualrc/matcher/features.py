"""Pictures on their way to features, and the features."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualrc.image import ImageInput, Scale, read
from dualrc.matcher.cache import LruCache
from dualrc.matcher.prefetch import ReadAhead
from dualrc.model.network import Features
from dualrc.types import BoolArray, ImageArray, Size


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PictureFeatures:
    """A picture's features, ready to be matched with many others."""

    maps: Features  # batch of one
    scale: Scale
    mask: BoolArray | None
    made_by: str  # the weights; features of different networks can't be compared
    # The picture as the network saw it, uint8 (h w 3): what the search for another scale looks at.
    pixels: Tensor

    def __repr__(self) -> str:
        return "PictureFeatures({}x{}, seen as {}x{})".format(*self.scale.image_size, *self.scale.input_size)

    @property
    def size(self) -> Size:
        """The picture's (width, height)."""
        return self.scale.image_size

    @property
    def bytes(self) -> int:
        """Memory that the features take."""
        maps = self.maps
        tensors = [tensor for tensor in (maps.coarse, maps.fine, maps.light, self.pixels) if tensor is not None]
        # NCNet's coarse and fine map may be one.
        return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


Matchable = ImageInput | PictureFeatures


@dataclass(kw_only=True, eq=False)
class PendingImage:
    """A picture on its way to its features."""

    scale: Scale
    pixels: ImageArray | Tensor | None = None  # (h w 3); a tensor is on the device
    features: PictureFeatures | None = None

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return (0 if self.pixels is None else self.pixels.nbytes) + (
            0 if self.features is None else self.features.bytes
        )

    def known(self) -> PictureFeatures:
        """The features, which it has by now."""
        assert self.features is not None
        return self.features


class FeatureCache:
    """Pictures given by path and their features, the latest ones."""

    def __init__(self, make: Callable[[ImageArray], PendingImage], reader: ReadAhead) -> None:
        self._make, self._reader = make, reader
        self._kept: LruCache[Path, PendingImage] = LruCache()

    def ask(self, picture: Matchable) -> None:
        """This picture will be asked for soon."""
        if isinstance(picture, (str, Path)) and Path(picture) not in self._kept:
            self._reader.ask(Path(picture))

    def get(self, picture: Matchable) -> PendingImage:
        """The picture, read now if it has to be; its features come later."""
        if isinstance(picture, PictureFeatures):
            return PendingImage(scale=picture.scale, features=picture)
        if not isinstance(picture, (str, Path)):
            return self._make(read(picture))
        key = Path(picture)
        if key in self._kept:
            self._reader.drop(key)
        return self._kept.get(key, lambda: self._make(self._reader.take(key)))

    def shrink(self, max_bytes: float) -> None:
        """Keep only the latest that fit into so many bytes, and at least two."""
        self._kept.shrink(max_bytes)


def shapes(pair: tuple[PendingImage, PendingImage]) -> tuple[Size, ...]:
    """The sizes that the network sees; pairs with the same can be matched together."""
    return tuple(item.scale.input_size for item in pair)


def chunks(items: list[PendingImage], size: int) -> Iterator[list[PendingImage]]:
    """So many at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def stack(features: list[Features]) -> Features:
    """Pictures of the same shape as one batch."""
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
