"""Memory budget: the memory that a pair of images needs on the device, and the largest size that fits."""

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
# Share of the free memory of the device that is used if no budget is given.
_SHARE = 0.8
# Smallest workspace of consensus and search, in bytes.
_LEAST = 32 * 2**20
# Largest workspace on a CPU and on a GPU, in bytes. More brings little.
_MOST, _GPU_MOST = _GIB // 2, _GIB
# Number of estimates kept.
_KNOWN = 1000
# Factor of both sides if the device has less memory than reported.
_SMALLER = 0.8

Pair = tuple[Scale, Scale]


class NoMemoryError(ImageError):
    """Raised if the device runs out of memory."""

    def __init__(self) -> None:
        super().__init__("Not enough memory for images of this size; give a smaller size.")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Convert out-of-memory errors to a NoMemoryError, whose message contains the remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        told = any(words in str(error).lower() for words in ("allocate memory", "out of memory", "alloc_failed"))
        if not told and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            raise
        raise NoMemoryError from error


def release_memory() -> None:
    """Free memory that is kept for speed only."""
    graphs.clear_all()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Budget:
    """Memory for matching a pair on a device, in addition to the weights.

    The estimates are calibrated (docs/speed.md) on images in which every cell is matched. On a CPU they are at most a
    third too high, and not too low. They depend on the sizes alone, so that one CUDA graph serves a size.
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
        """Budget in bytes; by default most of the memory that is free at the first access."""
        if self.max_memory is not None:
            return int(self.max_memory * _GIB)
        if not self._on_gpu:
            return int(_SHARE * machine.free_memory())
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(_SHARE * (torch.cuda.mem_get_info(self.device)[0] + unused))

    def least(self, pair: Pair) -> int:
        """Return the bytes that a pair needs with the smallest workspace."""
        return self._held(pair) + _LEAST

    def need(self, pair: Pair) -> int:
        """Return the bytes that a pair needs with the largest workspace."""
        return self._held(pair) + self._most

    def working(self, pair: Pair, count: int = 1) -> int:
        """Return the workspace in bytes for consensus and search of `count` such pairs."""
        return max(_LEAST, min(self.total - count * self._held(pair), self._most))

    def together(self, pair: Pair) -> int:
        """Return the number of such pairs that fit into one batch."""
        return max(1, (self.total - _LEAST) // self._held(pair))

    def side_by_side(self, pair: Pair) -> bool:
        """Return whether two threads may extract the features of both images at the same time.

        That must not take more memory than matching does. Memory that the second thread frees is not always reused by
        the first, so all of it must fit into the budget in addition.
        """
        extract = self._needs(pair).extract
        return 2 * extract <= self.need(pair) <= self.total - extract

    def spare(self, pair: Pair) -> float:
        """Return the bytes that matching this pair leaves for features of other images."""
        beside = 0 if self._on_gpu or not self.side_by_side(pair) else self._needs(pair).extract
        return min(self._most, self.total - self._held(pair) - self.working(pair) - beside)

    def fits(self, pair: Pair) -> bool:
        """Return whether a pair fits into memory at this size."""
        return self.least(pair) <= self.total

    def sizes(self, pair: Pair, fixed: tuple[bool, bool]) -> Iterator[Pair]:
        """Yield the pair at the sizes to try, the largest that fits first; fixed sizes do not change.

        The later sizes are for a device that has less memory than it reported.
        """
        found = self.fitted(pair, fixed)
        yield found
        # Retry after memory that was kept for speed has been freed.
        if self._on_gpu:
            yield found
        while (smaller := _resized(found, fixed, _SMALLER)) != found:
            yield smaller
            found = smaller

    def warn(self, wanted: Pair, seen: Pair) -> None:
        """Warn, once per size, that images are matched at a smaller size than requested."""
        if seen == wanted or wanted in self._told:
            return
        self._told.add(wanted)
        where, remedy = f"{_gib(self.total)} of memory", "Give more max_memory"
        if self.fits(wanted):
            where, remedy = "the remaining memory of the device", "Free some memory"
        warnings.warn(
            f"A pair of {_sizes(wanted)} does not fit into {where}; it is matched at {_sizes(seen)}. {remedy}, or give "
            "a smaller size to silence this.",
            stacklevel=5,
        )

    def fitted(self, pair: Pair, fixed: tuple[bool, bool] = (False, False)) -> Pair:
        """Return the pair unchanged, or at the largest size that fits, with the same ratio for both images."""
        if self.fits(pair) or all(fixed):
            return pair
        longest = max(max(scale.input_size) for scale, stays in zip(pair, fixed, strict=True) if not stays) // STRIDE
        # Possible lengths of the longest side, in cells.
        cells = range(MIN_SIDE // STRIDE, longest)
        count = bisect_left(cells, True, key=lambda side: not self.fits(_resized(pair, fixed, side / longest)))
        if count == 0:
            least = _resized(pair, fixed, 0)
            raise ImageError(
                f"Not even the smallest size fits into {_gib(self.total)} of memory: {_sizes(least)} needs "
                f"{_gib(self.least(least))}; give more max_memory."
            )
        return _resized(pair, fixed, cells[count - 1] / longest)

    def _held(self, pair: Pair) -> int:
        """Return the bytes that a pair needs without the workspace; cached, because it is called often."""
        if pair not in self._known:
            if len(self._known) > _KNOWN:
                self._known.clear()
            self._known[pair] = int(max(self._needs(pair)))
        return self._known[pair]

    def _needs(self, pair: Pair) -> memory.Needs:
        images, seen = (pair[0].image_size, pair[1].image_size), (pair[0].input_size, pair[1].input_size)
        item = self.precision.itemsize
        return memory.needs(self.network, images, seen, item, self._traits, on_gpu=self._on_gpu)


def _resized(pair: Pair, fixed: tuple[bool, bool], ratio: float) -> Pair:
    """Return the pair at this ratio of the input size, except for fixed images."""
    first, second = (
        scale
        if stays
        else replace(scale, input_size=(_scaled(scale.input_size[0], ratio), _scaled(scale.input_size[1], ratio)))
        for scale, stays in zip(pair, fixed, strict=True)
    )
    return first, second


def _scaled(side: int, ratio: float) -> int:
    # The small term avoids losing a whole cell to rounding, as in 64 * 0.49999999.
    return max(MIN_SIDE, int(side * ratio + 1e-6) // STRIDE * STRIDE)


def _sizes(pair: Pair) -> str:
    sizes = dict.fromkeys(f"{width}x{height}" for width, height in (scale.input_size for scale in pair))
    return " and ".join(sizes)


def _gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"
