"""Feature extraction: device, precision and batch size."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualrc.errors import ConfigError
from dualrc.files import first_line
from dualrc.image import Scale, normalize_colors, resize, to_tensor
from dualrc.machine import device_name
from dualrc.matcher.budget import enough_memory
from dualrc.matcher.features import ImageFeatures, PendingImage, chunks, grouped
from dualrc.model.backbone import CompactBackbone
from dualrc.model.network import Features, Network
from dualrc.ops import int8
from dualrc.types import Size

Precision = Literal["float32", "float16", "bfloat16", "int8"]
# Seconds before a message explains the delay.
_PATIENCE_S = 3.0
# Bytes of images that one thread copies. Waking other threads can take longer than a pair on a GPU.
_FEW = 4_000_000


class Extractor:
    """Extracts features of images; moves a network to a device and its backbone to a precision."""

    def __init__(self, network: Network, device: torch.device, precision: Precision | None, *, made_by: str) -> None:
        """Prepare the network, which is modified in place; `made_by` identifies the weights in the features."""
        self.device, self.made_by = device, made_by
        self.precision = precision or ("float16" if device.type == "cuda" else "float32")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"Unknown precision {self.precision!r}; choose one of {', '.join(get_args(Precision))}.")
        self._network = network.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.precision == "int8":
            if not has_int8(network, device):
                raise ConfigError("Precision int8 needs a compact network and a CPU with VNNI; choose float32.")
            int8.convert(network.backbone)
        self.dtype: torch.dtype = torch.float32 if self.precision == "int8" else getattr(torch, self.precision)
        if device.type == "cuda":
            network.backbone.to(self.dtype)
        self._autocast = self.dtype != torch.float32 and device.type != "cuda"
        # The first compilation of the kernels takes a minute.
        note = "Preparing the GPU kernels; this takes about a minute, the first time only."
        patience = threading.Timer(_PATIENCE_S, logging.getLogger("dualrc").warning, [note])
        patience.start()
        try:
            network.backbone = network.engine.prepare(network.backbone)
            network.engine.warm_up(network, self.dtype)
        finally:
            patience.cancel()

    def __call__(self, items: Iterable[PendingImage], together: Callable[[Scale], int]) -> None:
        """Extract features of the items without any; `together` is how many images of a size fit into memory at once.

        Images of one size form a batch on a GPU. In int8, two images are processed side by side, each with half of the
        threads, because the threads of one image often wait for each other.
        """
        # One image may occur in several pairs.
        waiting = list({id(item): item for item in items if item.features is None}.values())
        groups = [[waiting[number] for number in numbers] for numbers in grouped(item.scale for item in waiting)]
        if self.device.type != "cpu":
            batches: list[Sequence[PendingImage]] = []
            for group in groups:
                batches += chunks(group, together(group[0].scale) if len(group) > 1 else 1)
            self._extract_all(batches)
            return
        single, threads = [[item] for group in groups for item in group], torch.get_num_threads()
        # Only sums in int8 are exact, whatever the number of threads.
        alone = self.precision != "int8" or len(single) < 2 or threads < 2
        if alone or min(together(group[0].scale) for group in groups) < 2:
            self._extract_all(single)
            return
        with use_threads(threads // 2):
            other = _helper(os.getpid()).submit(self._extract_all, single[1::2], threads // 2)
            try:
                self._extract_all(single[::2])
            finally:
                other.result()

    @torch.inference_mode()
    def _extract_all(self, batches: Sequence[Sequence[PendingImage]], threads: int | None = None) -> None:
        """Extract the features of batches of images of one size, one after the other."""
        for batch in batches:
            with enough_memory(), use_threads(threads):
                pixels = self._upload([item.pixels for item in batch if item.pixels is not None])
                size = batch[0].scale.input_size
                found = self._network.engine.extract(partial(self._extract, size=size), pixels)
            for number, item in enumerate(batch):
                seen, coarse, fine, *light = (tensor[number : number + 1] for tensor in found)
                one = Features(coarse=coarse, fine=fine, light=light[0] if light else None)
                item.features = ImageFeatures(
                    maps=one, scale=item.scale, mask=None, made_by=self.made_by, pixels=seen[0]
                )
                item.pixels = None

    def _upload(self, given: list[npt.NDArray[np.uint8] | Tensor]) -> Tensor:
        """Stack images of the same size, uint8 (h w 3), on the device; tensors are already there."""
        images = [image for image in given if not isinstance(image, Tensor)]
        if not images:
            return torch.stack([image for image in given if isinstance(image, Tensor)])
        if self.device.type != "cuda":
            pixels = [to_tensor(image) for image in images]
            return torch.stack(pixels).to(self.device) if len(pixels) > 1 else pixels[0][None].to(self.device)
        # Copy through pinned memory, which torch caches for the next time.
        shelf = torch.empty(len(images), *images[0].shape, dtype=torch.uint8, pin_memory=True)
        if shelf.numel() <= _FEW:
            for image, place in zip(images, shelf, strict=True):
                np.copyto(place.numpy(), image)
        else:
            torch.stack([to_tensor(image) for image in images], out=shelf)
        return shelf.to(self.device, non_blocking=True)

    def _extract(self, pixels: Tensor, *, size: Size) -> tuple[Tensor, ...]:
        """Resize images on the device, uint8 (b h w 3); return them, coarse and fine features, and brightness."""
        resized = resize(pixels, size, antialias=self._network.config.backbone.antialias)
        # Both results need this layout, which not every device keeps.
        resized = resized.contiguous(memory_format=torch.channels_last)
        images = normalize_colors(resized / 255).contiguous(memory_format=torch.channels_last)
        if self.device.type == "cuda":
            images = images.to(self.dtype)
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self._autocast):
            features = self._network.extract(images)
        light = () if features.light is None else (features.light,)
        # Always a copy: without resizing, the pixels may be the user's own array.
        seen = resized.round().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        return seen, features.coarse, features.fine, *light


@cache
def _helper(process: int) -> ThreadPoolExecutor:
    """Return the thread that extracts features beside the calling one; a forked process needs its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="features")


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Run the block with this number of CPU threads; None keeps the setting of torch."""
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
    """Return whether the backbone of this network can be quantized to int8 on this device."""
    return device.type == "cpu" and isinstance(network.backbone, CompactBackbone) and int8.works()


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the requested device, or the best one available; "gpu" is an alias of "cuda"."""
    here = devices()
    if device is None:
        return torch.device(here[0])
    try:
        chosen = torch.device(device_name(device) if isinstance(device, str) else device)
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # The message of PyTorch for an unknown name lists every backend it ever had.
        reason = first_line(error)
        reason = "no such device" if reason.startswith("Expected one of") else reason
        remedy = f"available devices: {', '.join(here)}"
        raise ConfigError(f"Cannot use the device {str(device)!r} ({reason}); {remedy}.") from error
    return chosen


def devices() -> list[str]:
    """Return the devices of this machine, best first."""
    found = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if len(found) == 1:
        found = ["cuda"]
    return [*found, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
