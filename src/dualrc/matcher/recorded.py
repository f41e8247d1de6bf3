"""Feature extraction on a GPU, recorded once per picture size and replayed: launching its many steps takes longer."""

import threading
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from dualrc.model.dualrc import Features

_SIZES = 4  # recordings kept; each holds the memory of a pass
_PIXELS = 1_600_000  # larger pictures keep the GPU busy by themselves


class Recorded:
    """A function from pixels (h w 3, uint8) to Features on a GPU, and its recordings.

    A size is recorded when it comes for the second time. Where recording fails, the function is called as it is.
    """

    def __init__(self, extract: Callable[[Tensor, tuple[int, int]], Features]) -> None:
        """`extract` is given the pixels on the device and the (width, height) that the network is to see."""
        self._extract = extract
        self._lock = threading.Lock()
        self._recordings: OrderedDict[tuple[int, ...], _Recording | None] = OrderedDict()

    def __call__(self, pixels: Tensor, size: tuple[int, int], device: torch.device) -> Features:
        """Features of a picture (h w 3, uint8, on the host) scaled to `size`."""
        key = (*pixels.shape, *size)
        if size[0] * size[1] > _PIXELS or pixels.shape[0] * pixels.shape[1] > 4 * _PIXELS:
            return self._extract(pixels.to(device), size)
        with self._lock:
            if key not in self._recordings:
                self._recordings[key] = None  # seen once
                while len(self._recordings) > _SIZES:
                    self._recordings.popitem(last=False)
                return self._extract(pixels.to(device), size)
            self._recordings.move_to_end(key)
            recording = self._recordings[key]
            if recording is None:
                recording = self._recordings[key] = _Recording(self._extract, pixels.to(device), size)
            return recording.replay(pixels)


class _Recording:
    def __init__(
        self, extract: Callable[[Tensor, tuple[int, int]], Features], pixels: Tensor, size: tuple[int, int]
    ) -> None:
        self._pixels = pixels.clone()
        side = torch.cuda.Stream(pixels.device)
        side.wait_stream(torch.cuda.current_stream(pixels.device))
        with torch.cuda.stream(side):  # libraries choose their ways before anything is recorded
            for _ in range(2):
                extract(self._pixels, size)
        torch.cuda.current_stream(pixels.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._features = extract(self._pixels, size)

    def replay(self, pixels: Tensor) -> Features:
        self._pixels.copy_(pixels)
        self._graph.replay()
        return Features(coarse=self._features.coarse.clone(), fine=self._features.fine.clone())
