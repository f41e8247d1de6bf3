"""A memory budget: what a pair of pictures takes on the device, and how large it may be seen for what there is."""

import gc
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch

from dualrc import machine
from dualrc.config import MIN_SIDE, NetworkConfig
from dualrc.errors import ImageError
from dualrc.image import Scale
from dualrc.ops import graphs, memory
from dualrc.pixels import STRIDE

_GIB = 2**30
_SHARE = 0.8  # of what is free on the device, where no budget is given
_LEAST = 32 * 2**20  # bytes that consensus and search work in, at least
_MOST, _GPU_MOST = _GIB // 2, _GIB  # and at most; more brings little
_KNOWN = 1000  # estimates that are kept
_SMALLER = 0.8  # of both sides, where the device has less than it said

Pair = tuple[Scale, Scale]


class NoMemoryError(ImageError):
    """The device ran out of memory."""

    def __init__(self) -> None:
        super().__init__("There is not enough memory for pictures of this size; give a smaller size.")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn running out of memory into an error that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        told = any(words in str(error).lower() for words in ("allocate memory", "out of memory", "alloc_failed"))
        if not told and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        raise NoMemoryError from error


def let_go() -> None:
    """Free the memory that is kept for speed alone."""
    graphs.clear_all()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Budget:
    """What matching a pair may take on a device beside the weights.

    The estimates are calibrated (docs/speed.md) for pictures of which every cell is matched: on a CPU they are at most
    a third too high, and not too low. They depend on the sizes alone, so that one CUDA graph serves a size.
    """

    def __init__(
        self,
        network: NetworkConfig,
        device: torch.device,
        precision: torch.dtype,
        max_memory: float | None,
        *,
        engine: str,
    ) -> None:
        self.network, self.device, self.precision, self.max_memory = network, device, precision, max_memory
        self._traits = memory.traits(engine, device, precision, network.consensus.channels[0])
        self._on_gpu = device.type == "cuda"
        self._most = _GPU_MOST if self._on_gpu else _MOST
        self._told: set[Pair] = set()
        self._known: dict[Pair, int] = {}

    @cached_property
    def total(self) -> int:
        """Bytes; where none are given, most of what is free when it is first asked."""
        if self.max_memory is not None:
            return int(self.max_memory * _GIB)
        if not self._on_gpu:
            return int(_SHARE * machine.free_memory())
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(_SHARE * (torch.cuda.mem_get_info(self.device)[0] + unused))

    def least(self, pair: Pair) -> int:
        """Bytes that a pair takes with the least working memory."""
        return self._held(pair) + _LEAST

    def need(self, pair: Pair) -> int:
        """Bytes that a pair takes with as much working memory as it may have."""
        return self._held(pair) + self._most

    def working(self, pair: Pair, count: int = 1) -> int:
        """Bytes that consensus and search of so many such pairs may work in."""
        return max(_LEAST, min(self.total - count * self._held(pair), self._most))

    def together(self, pair: Pair) -> int:
        """How many such pairs can be matched together."""
        return max(1, (self.total - _LEAST) // self._held(pair))

    def spare(self, pair: Pair) -> float:
        """Bytes that matching this pair leaves for features of other pictures."""
        return min(self._most, self.total - self._held(pair) - self.working(pair))

    def fits(self, pair: Pair) -> bool:
        """Whether there is memory for a pair at this size."""
        return self.least(pair) <= self.total

    def sizes(self, pair: Pair, fixed: tuple[bool, bool]) -> Iterator[Pair]:
        """The pair at the sizes to try, the largest that fits first; what is fixed stays as it is.

        The others are for a device that has less memory than it said.
        """
        found = self.fitted(pair, fixed)
        yield found
        if self._on_gpu:  # once more, now that all is free which was kept for speed
            yield found
        while (smaller := _resized(found, fixed, _SMALLER)) != found:
            yield smaller
            found = smaller

    def tell(self, wanted: Pair, seen: Pair) -> None:
        """Warn, once, of pictures that are not seen at the size that was wanted."""
        if seen == wanted or wanted in self._told:
            return
        self._told.add(wanted)
        where, remedy = f"{_gib(self.total)} of memory", "Give more max_memory"
        if self.fits(wanted):
            where, remedy = "the memory that the device has left", "Free some"
        warnings.warn(
            f"A pair of {_sizes(wanted)} does not fit into {where}; it is matched at {_sizes(seen)}. {remedy}, or give "
            "a smaller size to silence this.",
            stacklevel=5,
        )

    def fitted(self, pair: Pair, fixed: tuple[bool, bool] = (False, False)) -> Pair:
        """The pair as it is, or at the largest size that fits, the same ratio for both pictures."""
        if self.fits(pair) or all(fixed):
            return pair
        longest = max(max(scale.input_size) for scale, stays in zip(pair, fixed, strict=True) if not stays) // STRIDE
        cells = range(MIN_SIDE // STRIDE, longest)  # along the longest side
        count = bisect_left(cells, True, key=lambda side: not self.fits(_resized(pair, fixed, side / longest)))
        if count == 0:
            least = _resized(pair, fixed, 0)
            raise ImageError(
                f"Not even the smallest size fits into {_gib(self.total)} of memory: {_sizes(least)} takes "
                f"{_gib(self.least(least))}; give more max_memory."
            )
        return _resized(pair, fixed, cells[count - 1] / longest)

    def _held(self, pair: Pair) -> int:
        """Bytes that a pair takes beside what consensus and search work in; asked several times for each."""
        if pair not in self._known:
            if len(self._known) > _KNOWN:
                self._known.clear()
            self._known[pair] = self._estimate(pair)
        return self._known[pair]

    def _estimate(self, pair: Pair) -> int:
        images, seen = (pair[0].image_size, pair[1].image_size), (pair[0].input_size, pair[1].input_size)
        item = self.precision.itemsize
        return int(max(memory.needs(self.network, images, seen, item, self._traits, on_gpu=self._on_gpu)))


def _resized(pair: Pair, fixed: tuple[bool, bool], ratio: float) -> Pair:
    """The pair seen at this ratio of the size, but for what is fixed."""
    first, second = (
        scale
        if stays
        else replace(scale, input_size=(_scaled(scale.input_size[0], ratio), _scaled(scale.input_size[1], ratio)))
        for scale, stays in zip(pair, fixed, strict=True)
    )
    return first, second


def _scaled(side: int, ratio: float) -> int:
    # The small term keeps 64 * 0.49999999 from losing a whole cell.
    return max(MIN_SIDE, int(side * ratio + 1e-6) // STRIDE * STRIDE)


def _sizes(pair: Pair) -> str:
    sizes = dict.fromkeys(f"{width}x{height}" for width, height in (scale.input_size for scale in pair))
    return " and ".join(sizes)


def _gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"
