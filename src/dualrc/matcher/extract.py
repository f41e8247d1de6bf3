"""From pictures to their features: on which device, in which precision, and how many at a time."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualrc.errors import ConfigError
from dualrc.image import Scale, normalize_colors, resize, to_tensor
from dualrc.machine import device_name
from dualrc.matcher.budget import enough_memory
from dualrc.matcher.features import PendingImage, PictureFeatures, chunks
from dualrc.model.backbone import CompactBackbone
from dualrc.model.network import Features, Network
from dualrc.ops import int8
from dualrc.types import Size

Precision = Literal["float32", "float16", "bfloat16", "int8"]
_PATIENCE_S = 3.0  # before a user is told what is going on
_FEW = 4_000_000  # bytes of pictures that one thread copies: waking the others can take longer than a pair on a GPU


class Extractor:
    """Gives features to pictures; brings a network to the device, and its backbone to the precision."""

    def __init__(self, network: Network, device: torch.device, precision: Precision | None, *, made_by: str) -> None:
        """`network` is altered; `made_by` names the weights in the features."""
        self.device, self.made_by = device, made_by
        self.precision = precision or ("float16" if device.type == "cuda" else "float32")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"Precision {self.precision!r} is not known; choose {', '.join(get_args(Precision))}.")
        self._network = network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.precision == "int8":
            if not has_int8(network, device):
                raise ConfigError("Precision int8 needs a compact network and a CPU with VNNI; choose float32.")
            int8.convert(network.backbone)
        self.dtype: torch.dtype = torch.float32 if self.precision == "int8" else getattr(torch, self.precision)
        if device.type == "cuda":
            network.backbone.to(self.dtype)
        self._autocast = self.dtype != torch.float32 and device.type != "cuda"
        # Where kernels are compiled for the first time, that takes a minute.
        note = "Preparing the GPU kernels; this takes about a minute, the first time only."
        patience = threading.Timer(_PATIENCE_S, logging.getLogger("dualrc").warning, [note])
        patience.start()
        try:
            network.backbone = network.engine.prepare(network.backbone)
            network.engine.warm_up(network, self.dtype)
        finally:
            patience.cancel()

    @torch.inference_mode()
    def __call__(self, items: Iterable[PendingImage], together: Callable[[Scale], int]) -> None:
        """Give features to those that have none, pictures of the same size together, at most so many."""
        groups: dict[tuple[Size, Size], list[PendingImage]] = {}
        for item in items:
            if item.features is None:
                groups.setdefault((item.scale.image_size, item.scale.input_size), []).append(item)
        for members in groups.values():
            group = list({id(item): item for item in members}.values())  # one may stand in several pairs
            size = group[0].scale.input_size
            for chunk in chunks(group, together(group[0].scale)):
                with enough_memory():
                    pixels = self._upload([item.pixels for item in chunk if item.pixels is not None])
                    found = self._network.engine.extract(partial(self._extract, size=size), pixels)
                for number, item in enumerate(chunk):
                    seen, coarse, fine, *light = (tensor[number : number + 1] for tensor in found)
                    one = Features(coarse=coarse, fine=fine, light=light[0] if light else None)
                    item.features = PictureFeatures(
                        maps=one, scale=item.scale, mask=None, made_by=self.made_by, pixels=seen[0]
                    )
                    item.pixels = None

    def _upload(self, given: list[npt.NDArray[np.uint8] | Tensor]) -> Tensor:
        """Pictures of the same size, uint8 (h w 3), as one tensor on the device; tensors are there already."""
        pictures = [picture for picture in given if not isinstance(picture, Tensor)]
        if not pictures:
            return torch.stack([picture for picture in given if isinstance(picture, Tensor)])
        if self.device.type != "cuda":
            pixels = [to_tensor(picture) for picture in pictures]
            return torch.stack(pixels).to(self.device) if len(pixels) > 1 else pixels[0][None].to(self.device)
        # By way of memory that the GPU reads itself; torch keeps it for the next time.
        shelf = torch.empty(len(pictures), *pictures[0].shape, dtype=torch.uint8, pin_memory=True)
        if shelf.numel() <= _FEW:
            for picture, place in zip(pictures, shelf, strict=True):
                np.copyto(place.numpy(), picture)
        else:
            torch.stack([to_tensor(picture) for picture in pictures], out=shelf)
        return shelf.to(self.device, non_blocking=True)

    def _extract(self, pixels: Tensor, *, size: Size) -> tuple[Tensor, ...]:
        """Pictures on the device, uint8 (b h w 3), at this size; coarse and fine features; brightness if it is used."""
        resized = resize(pixels, size, antialias=self._network.config.backbone.antialias)
        images = normalize_colors(resized / 255).contiguous(memory_format=torch.channels_last)
        if self.device.type == "cuda":
            images = images.to(self.dtype)
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self._autocast):
            features = self._network.extract(images)
        light = () if features.light is None else (features.light,)
        # A copy even where nothing was resized: the pixels may be the user's own array.
        seen = resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        return seen, features.coarse, features.fine, *light


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Run the block with this many CPU threads; None: as many as torch uses."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def has_int8(network: Network, device: torch.device) -> bool:
    """Whether this network's backbone can be quantized to int8 there."""
    return device.type == "cpu" and isinstance(network.backbone, CompactBackbone) and int8.works()


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that is asked for, or the best one here; "gpu" is another name for "cuda"."""
    here = devices()
    if device is None:
        return torch.device(here[0])
    try:
        chosen = torch.device(device_name(device) if isinstance(device, str) else device)
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # PyTorch's own words on an unknown name are a list of all that it was ever ported to.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = "no such device" if reason.startswith("Expected one of") else reason
        remedy = f"available here: {', '.join(here)}"
        raise ConfigError(f"The device {str(device)!r} can't be used ({reason}); {remedy}.") from error
    return chosen


def devices() -> list[str]:
    """The devices of this machine, best first."""
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if len(found) == 1:
        found = ["cuda"]
    return [*found, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
