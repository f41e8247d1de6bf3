"""Work on a GPU, recorded once per shape and replayed: launching its many small steps takes longer than they do."""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from dualrc.model import trace

_KEPT = 64  # recordings, and what has been seen once
_VALUES = 48_000_000  # of input; larger work keeps the GPU busy by itself
_ALL_VALUES = 160_000_000  # of the inputs of all recordings, which are kept with them

Function = Callable[..., tuple[Tensor, ...]]


class Recorder:
    """Calls functions from tensors to tensors, whose work depends on nothing but their shapes.

    What comes for the second time is recorded, and from then on replayed. Elsewhere than on a GPU, while gradients are
    wanted, and where recording fails, functions are called as they are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recordings: OrderedDict[Any, _Recording | None] = OrderedDict()
        self._fails = False
        self._pool: Any = None  # memory that all recordings work in, one after the other
        _all.add(self)

    def __call__(self, name: Any, function: Function, *tensors: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """function(*tensors), all on `device`; `name` stands for the function and all else that it depends on."""
        too_large = _count(tensors) > _VALUES
        if device.type != "cuda" or torch.is_grad_enabled() or too_large or self._fails:
            return function(*(tensor.to(device) for tensor in tensors))
        key = (name, device, *((tensor.shape, tensor.dtype) for tensor in tensors))
        with self._lock:
            if key not in self._recordings:
                self._recordings[key] = None  # seen once
                self._forget()
                return function(*(tensor.to(device) for tensor in tensors))
            self._recordings.move_to_end(key)
            recording = self._recordings[key]
            if recording is None:
                try:
                    self._pool = self._pool or torch.cuda.graph_pool_handle()
                    recording = self._recordings[key] = _Recording(function, tensors, device, self._pool)
                    self._forget()
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    self._fails = True
                    warnings.warn(f"Work on the GPU can't be recorded ({error}); it is slower so.", stacklevel=2)
                    return function(*(tensor.to(device) for tensor in tensors))
            return recording.replay(tensors)

    def _forget(self) -> None:
        """Let the recordings go that were not used for longest, if there are too many."""
        values = sum(_count(recording.inputs) for recording in self._recordings.values() if recording)
        while len(self._recordings) > 1 and (len(self._recordings) > _KEPT or values > _ALL_VALUES):
            _, oldest = self._recordings.popitem(last=False)
            values -= _count(oldest.inputs) if oldest else 0

    def clear(self) -> None:
        """Let the recordings go, with the memory that they work in."""
        with self._lock:
            self._recordings.clear()
            self._pool = None

    def __deepcopy__(self, memo: Any) -> "Recorder":
        return Recorder()

    def __reduce__(self) -> tuple[type["Recorder"], tuple[()]]:
        return Recorder, ()


_all: "WeakSet[Recorder]" = WeakSet()


def clear_all() -> None:
    """Let all recordings of this process go, where memory is short."""
    for recorder in list(_all):
        recorder.clear()


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class _Recording:
    def __init__(self, function: Function, tensors: tuple[Tensor, ...], device: torch.device, pool: Any) -> None:
        self.inputs = [tensor.to(device, copy=True) for tensor in tensors]
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # kernels are compiled and chosen before anything is recorded
            for _ in range(2):
                function(*self.inputs)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with trace.recording() as seen, torch.cuda.graph(self._graph, pool=pool):
            self._outputs = function(*self.inputs)
        self._notes = seen.notes

    def replay(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        for key, values in self._notes.items():
            for value in values:
                trace.note(key, value)
        return tuple(output.clone() for output in self._outputs)
