"""CUDA graphs: operations are captured once for each shape that repeats, and replayed.

Launching the many small kernels of an operation takes longer than they run. A graph launches them at once.
"""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import FineConfig
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.context import Context
from dualrc.model.engine import Engine
from dualrc.model.refine import CellMatches, PointMatches
from dualrc.model.search import Correspondences, Found
from dualrc.model.sparse import SparseScores
from dualrc.model.subpixel import Offsets, Subpixel, WindowPairs
from dualrc.model.support import Support
from dualrc.ops import memory

if TYPE_CHECKING:
    from dualrc.model.network import Network

_TYPES = (torch.float16, torch.float32)  # for others the kernels fall back on torch, which waits for results
_KEPT = 64  # graphs
_KNOWN = 1024  # shapes that are counted
_SEEN = 2  # calls of a shape before it is captured: capturing takes as long as ten calls
_VALUES = 48_000_000  # values of inputs; larger work keeps the GPU busy by itself
_ALL_VALUES = 160_000_000  # values of the inputs of all graphs, which are kept with them
_LEAST_MATCHES = 1024  # matches are padded to a power of two, so that few graphs serve all numbers

Function = Callable[..., tuple[Tensor, ...]]


class GraphEngine(Engine):
    """Another engine whose operations are captured; they must launch work that depends on nothing but shapes.

    Weights are read where they were when a graph was captured, so they must not change.
    """

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.name = f"{engine.name}+graphs"
        self._lock = threading.Lock()
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._seen: OrderedDict[Any, int] = OrderedDict()  # calls of shapes that were not captured
        self._failed: set[Any] = set()  # what could not be captured
        self._pool: Any = None  # memory that all graphs work in, one after the other
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # on which they are captured
        _all.add(self)

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(self.inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner,)

    def prepare(self, backbone: nn.Module) -> nn.Module:
        return self.inner.prepare(backbone)

    def warm_up(self, network: "Network", dtype: torch.dtype) -> None:
        self.inner.warm_up(network, dtype)

    def extract(self, extract: Callable[[Tensor], tuple[Tensor, ...]], pixels: Tensor) -> tuple[Tensor, ...]:
        return self._run(("extract", *_identity(extract)), extract, pixels)

    def context(
        self, context: Context, coarse: tuple[Tensor, Tensor], valid: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        def function(coarse0: Tensor, coarse1: Tensor, *masks: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner.context(context, (coarse0, coarse1), _restored(valid, masks))

        name = ("context", context, valid[0] is None, valid[1] is None)
        first, second = self._run(name, function, *coarse, *(mask for mask in valid if mask is not None))
        return first, second

    def coarse(
        self, coarse: tuple[Tensor, Tensor], consensus: Consensus, valid: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        present = [mask for mask in valid if mask is not None]

        def function(coarse0: Tensor, coarse1: Tensor, *masks: Tensor) -> tuple[Tensor]:
            return (self.inner.coarse((coarse0, coarse1), consensus, _restored(valid, masks)),)

        name = ("coarse", consensus, valid[0] is None, valid[1] is None)
        return self._run(name, function, *coarse, *present)[0]

    def search(self, tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> Correspondences:
        masks = [fine.valid for fine in (fine0, fine1) if fine.valid is not None]

        def function(tensor: Tensor, features0: Tensor, features1: Tensor, *masks: Tensor) -> Correspondences:
            given = iter(masks)
            own0 = replace(fine0, features=features0, valid=None if fine0.valid is None else next(given))
            own1 = replace(fine1, features=features1, valid=None if fine1.valid is None else next(given))
            return self.inner.search(tensor, own0, own1, config)

        name = ("search", config, fine0.width, fine1.width, fine0.valid is None, fine1.valid is None)
        return Correspondences(*self._run(name, function, tensor, fine0.features, fine1.features, *masks))

    def refine(
        self,
        subpixel: Subpixel,
        fine: tuple[FineMap, FineMap],
        light: tuple[Tensor, Tensor] | None,
        matches: CellMatches,
    ) -> PointMatches:
        count, features = len(matches.pair), (fine[0].features, fine[1].features)
        length = 1 << max(count - 1, _LEAST_MATCHES - 1).bit_length()
        key = (
            "refine",
            subpixel,
            length,
            *((f.width, f.features.shape, f.features.dtype) for f in fine),
            light is None,
        )
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

    def filtered(self, scores: Tensor, consensus: Consensus) -> Tensor:
        return self.inner.filtered(scores, consensus)

    def pooled_correlation(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.pooled_correlation(*args, **kwargs)

    def relocalize(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.inner.relocalize(*args, **kwargs)

    def nearest(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.inner.nearest(*args, **kwargs)

    def sparse_consensus(self, *args: Any, **kwargs: Any) -> SparseScores:
        return self.inner.sparse_consensus(*args, **kwargs)

    def normalize(self, features: Tensor) -> Tensor:
        return self.inner.normalize(features)

    def brightness(self, images: Tensor) -> Tensor:
        return self.inner.brightness(images)

    def search_cells(self, *args: Any, **kwargs: Any) -> Found:
        return self.inner.search_cells(*args, **kwargs)

    def search_points(self, *args: Any, **kwargs: Any) -> Found:
        return self.inner.search_points(*args, **kwargs)

    def refine_points(self, *args: Any, **kwargs: Any) -> Offsets:
        return self.inner.refine_points(*args, **kwargs)

    def windows(self, *args: Any, **kwargs: Any) -> WindowPairs:
        return self.inner.windows(*args, **kwargs)

    def support(self, *args: Any, **kwargs: Any) -> Support:
        return self.inner.support(*args, **kwargs)

    def align(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.align(*args, **kwargs)

    def _run(self, name: tuple[Any, ...], function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        """function(*tensors), replayed where its shapes repeat; `name` holds all else that it depends on."""
        key = (*name, *((tensor.shape, tensor.dtype) for tensor in tensors))
        if not self._repeats(key, tensors):
            return function(*tensors)
        return self._replayed(key, function, *tensors)

    def _repeats(self, key: tuple[Any, ...], inputs: Sequence[Tensor]) -> bool:
        """Whether work with this key was done often enough to be captured; counts this time."""
        fits = all(x.dtype in _TYPES for x in inputs if x.is_floating_point())
        if torch.is_grad_enabled() or not fits or _count(inputs) > _VALUES:
            return False
        key = (*key, memory.working_values(), inputs[0].device)
        if key in self._failed:
            return False
        with self._lock:
            count = self._seen.get(key, 0)
            self._seen[key] = min(count + 1, _SEEN)
            self._seen.move_to_end(key)
            if count >= _SEEN:
                return True
            if len(self._seen) > _KNOWN:
                self._seen.popitem(last=False)
            return False

    def _replayed(self, key: tuple[Any, ...], function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        """function(*tensors) by its graph, which is captured if there is none yet."""
        device = tensors[0].device
        key = (*key, memory.working_values(), device)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                try:
                    with torch.cuda.device(device):
                        self._pool = self._pool or torch.cuda.graph_pool_handle()
                        # On one stream, or graphs could not use the same memory one after the other.
                        if device not in self._streams:
                            self._streams[device] = torch.cuda.Stream(device)
                        graph = _Graph.capture(function, tensors, self._streams[device], self._pool)
                    self._graphs[key] = graph
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
        """Let the graphs go that were not used for longest, if there are too many."""
        values = sum(_count(graph.inputs) for graph in self._graphs.values())
        while len(self._graphs) > 1 and (len(self._graphs) > _KEPT or values > _ALL_VALUES):
            key, oldest = self._graphs.popitem(last=False)
            self._seen.pop(key, None)  # or it would be captured again at once, and another would go
            values -= _count(oldest.inputs)

    def clear(self) -> None:
        """Let the graphs go, with the memory that they work in."""
        with self._lock:
            self._graphs.clear()
            self._seen.clear()
            self._failed.clear()
            self._pool = None


_all: "WeakSet[GraphEngine]" = WeakSet()


def clear_all() -> None:
    """Let all graphs of this process go, where memory is short."""
    for engine in list(_all):
        engine.clear()


def _restored(
    valid: tuple[Tensor | None, Tensor | None], masks: tuple[Tensor, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The masks given to a captured function, in the places where there were masks."""
    given = iter(masks)
    return None if valid[0] is None else next(given), None if valid[1] is None else next(given)


def _identity(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What tells functions apart that are made anew for each call."""
    if isinstance(function, partial):
        return function.func, *function.args, *sorted(function.keywords.items())
    return (function,)


def _count(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured function with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]

    @staticmethod
    def capture(function: Function, tensors: tuple[Tensor, ...], stream: torch.cuda.Stream, pool: Any) -> "_Graph":
        inputs = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # kernels are compiled and chosen before anything is captured
            function(*inputs)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The outer block restores the stream where a capture fails; other threads may allocate memory meanwhile.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            outputs = function(*inputs)
        return _Graph(graph, inputs, tuple(outputs))

    def replay(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)
