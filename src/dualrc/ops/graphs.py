"""CUDA graphs: operations are captured once for each shape that repeats often, then replayed.

Launching the many small kernels of an operation takes longer than running them. A graph launches all kernels with
one call.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.config import FineConfig
from dualrc.model.cells import FineMap, FineMapPair, MaskPair, TensorPair
from dualrc.model.consensus import Consensus
from dualrc.model.context import Context
from dualrc.model.engine import Engine
from dualrc.model.refine import CellMatches, PointMatches
from dualrc.model.search import Correspondences
from dualrc.model.subpixel import Subpixel
from dualrc.ops import memory

# With other types the kernels fall back on torch, which synchronizes with the host and cannot be captured.
_TYPES = (torch.float16, torch.float32)
# Largest number of graphs kept, and of recent shapes whose calls are counted. A shape that recurs after more other
# shapes than this would find its graph dropped, so it is not worth a capture.
_KEPT = 64
# Calls of a shape before it is captured. A capture takes as long as replays save in six to nine calls. If a shape is
# captured when its calls have cost about that much, no number of calls takes much longer than with the best choice.
_SEEN = 6
# Largest number of input values of one graph. Larger operations keep the GPU busy without a graph.
_VALUES = 48_000_000
# Largest number of input values of all graphs together, because each graph keeps a copy of its inputs.
_ALL_VALUES = 160_000_000
# The number of matches is padded to a power of two, at least this, so that few graphs cover all numbers.
_LEAST_MATCHES = 1024

Function = Callable[..., tuple[Tensor, ...]]


class GraphEngine(Engine):
    """Wrapper that captures the operations of another engine in CUDA graphs.

    The work of a captured operation must depend on shapes alone. A graph reads the weights at the addresses of the
    time of capture, so the weights must not change.
    """

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        # Operations that this class does not capture run on the inner engine.
        for name in vars(Engine).keys() - vars(GraphEngine).keys():
            if not name.startswith("_"):
                setattr(self, name, getattr(engine, name))
        self.name = f"{engine.name}+graphs"
        self._lock = threading.Lock()
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        # Number of calls of each shape that is not captured.
        self._seen: OrderedDict[Any, int] = OrderedDict()
        # Keys of operations that could not be captured.
        self._failed: set[Any] = set()
        # Memory pool that all graphs share. They run one after the other.
        self._pool: Any = None
        # Streams for the capture.
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        _all.add(self)

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(self.inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner,)

    def extract(self, extract: Callable[[Tensor], tuple[Tensor, ...]], pixels: Tensor) -> tuple[Tensor, ...]:
        return self._run(("extract", *_identity(extract)), extract, pixels)

    def context(self, context: Context, coarse: TensorPair, valid: MaskPair) -> tuple[Tensor, Tensor]:
        def function(coarse0: Tensor, coarse1: Tensor, *valid: Tensor | None) -> tuple[Tensor, Tensor]:
            return self.inner.context(context, (coarse0, coarse1), (valid[0], valid[1]))

        first, second = self._run(("context", context), function, *coarse, *valid)
        return first, second

    def coarse(self, coarse: TensorPair, consensus: Consensus, valid: MaskPair) -> Tensor:
        def function(coarse0: Tensor, coarse1: Tensor, *valid: Tensor | None) -> tuple[Tensor]:
            return (self.inner.coarse((coarse0, coarse1), consensus, (valid[0], valid[1])),)

        return self._run(("coarse", consensus), function, *coarse, *valid)[0]

    def search(self, tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> Correspondences:
        def function(tensor: Tensor, features0: Tensor, features1: Tensor, *valid: Tensor | None) -> Correspondences:
            own0 = replace(fine0, features=features0, valid=valid[0])
            own1 = replace(fine1, features=features1, valid=valid[1])
            return self.inner.search(tensor, own0, own1, config)

        name = ("search", config, fine0.width, fine1.width)
        found = self._run(name, function, tensor, fine0.features, fine1.features, fine0.valid, fine1.valid)
        return Correspondences(*found)

    def refine(
        self, subpixel: Subpixel, fine: FineMapPair, light: TensorPair | None, matches: CellMatches
    ) -> PointMatches:
        count, features = len(matches.pair), (fine[0].features, fine[1].features)
        length = 1 << max(count - 1, _LEAST_MATCHES - 1).bit_length()
        shapes = ((f.width, f.features.shape, f.features.dtype) for f in fine)
        key = ("refine", subpixel, length, *shapes, light is None)
        if not self._repeats(key, (*features, *(light or ()))):
            return self.inner.refine(subpixel, fine, light, matches)

        def function(features0: Tensor, features1: Tensor, *rest: Tensor) -> PointMatches:
            maps = replace(fine[0], features=features0), replace(fine[1], features=features1)
            lights = None if light is None else (rest[5], rest[6])
            return self.inner.refine(subpixel, maps, lights, CellMatches(*rest[:5]))

        spare = (0, length - count)
        columns = [F.pad(matches.pair, spare, value=-1), *(F.pad(column, spare) for column in matches[1:])]
        found = self._replayed(key, function, *features, *columns, *(light or ()))
        return PointMatches(*(column[:count] for column in found))

    def _run(self, name: tuple[Any, ...], function: Function, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Return function(*inputs), by a graph if its shapes repeat; `name` holds everything else it depends on."""
        key = (*name, *(None if x is None else (x.shape, x.dtype) for x in inputs))
        tensors = [x for x in inputs if x is not None]

        def with_none(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            return function(*(None if x is None else next(rest) for x in inputs))

        return self._replayed(key, with_none, *tensors) if self._repeats(key, tensors) else function(*inputs)

    def _repeats(self, key: tuple[Any, ...], inputs: Sequence[Tensor]) -> bool:
        """Count a call with this key, and return whether it occurred often enough to be captured."""
        fits = all(x.dtype in _TYPES for x in inputs if x.is_floating_point())
        if torch.is_grad_enabled() or not fits or _count(inputs) > _VALUES:
            return False
        key = (*key, memory.working_values(), inputs[0].device)
        if key in self._failed:
            return False
        with self._lock:
            if key in self._graphs:
                return True
            count = self._seen.get(key, 0)
            self._seen[key] = count + 1
            self._seen.move_to_end(key)
            if len(self._seen) > _KEPT:
                self._seen.popitem(last=False)
            return count >= _SEEN

    def _replayed(self, key: tuple[Any, ...], function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return function(*tensors) by its graph, which is captured first if there is none yet."""
        device = tensors[0].device
        key = (*key, memory.working_values(), device)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                try:
                    with torch.cuda.device(device):
                        self._pool = self._pool or torch.cuda.graph_pool_handle()
                        # All captures use one stream, or the graphs could not share one memory pool.
                        if device not in self._streams:
                            self._streams[device] = torch.cuda.Stream(device)
                        graph = _Graph(function, tensors, self._streams[device], self._pool)
                    self._graphs[key] = graph
                    # A graph that is dropped starts to be counted again.
                    self._seen.pop(key, None)
                    self._forget()
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    self._failed.add(key)
                    message = f"Could not capture a CUDA graph ({error}); matching continues without it, more slowly."
                    warnings.warn(message, stacklevel=2)
                    return function(*tensors)
            self._graphs.move_to_end(key)
            with torch.cuda.device(device):
                return graph.replay(tensors)

    def _forget(self) -> None:
        """Drop the least recently used graphs if there are too many."""
        values = sum(_count(graph.inputs) for graph in self._graphs.values())
        while len(self._graphs) > 1 and (len(self._graphs) > _KEPT or values > _ALL_VALUES):
            _, oldest = self._graphs.popitem(last=False)
            values -= _count(oldest.inputs)

    def clear(self) -> None:
        """Drop all graphs and release their memory."""
        with self._lock:
            self._graphs.clear()
            self._seen.clear()
            self._failed.clear()
            self._pool = None


_all: "WeakSet[GraphEngine]" = WeakSet()


def clear_all() -> None:
    """Drop all graphs of this process, for example when memory is short."""
    for engine in list(_all):
        engine.clear()


def _identity(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a key that identifies a function even if a new partial is created for each call."""
    if isinstance(function, partial):
        return function.func, *function.args, *sorted(function.keywords.items())
    return (function,)


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class _Graph:
    """A captured function with the tensors that it reads and writes."""

    def __init__(self, function: Function, tensors: Sequence[Tensor], stream: torch.cuda.Stream, pool: Any) -> None:
        self.inputs = inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        # The first run compiles and selects the kernels, which must not happen during the capture.
        with torch.cuda.stream(stream):
            function(*inputs)
        current.wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # The outer block restores the stream if the capture fails. "thread_local" lets other threads allocate memory.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self.outputs = tuple(function(*inputs))

    def replay(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)
