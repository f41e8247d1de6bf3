"""A memory budget: what a pair of pictures takes on the device, and how large it may be seen for what there is."""

import gc
import math
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch

from dualrc import machine
from dualrc.config import MIN_SIDE, CompactConfig, NetworkConfig, ResNetConfig
from dualrc.errors import ImageError
from dualrc.image import Scale
from dualrc.kernels import native
from dualrc.model.record import clear_all
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
    clear_all()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Budget:
    """What matching a pair may take on a device beside the weights.

    The estimates are calibrated (docs/speed.md) for pictures of which every cell is matched: on a CPU they are at most
    a third too high, and not too low. They depend on the sizes alone, so that work is not recorded anew for a size.
    """

    def __init__(
        self, network: NetworkConfig, device: torch.device, precision: torch.dtype, max_memory: float | None
    ) -> None:
        self.network, self.device, self.precision, self.max_memory = network, device, precision, max_memory
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

    def working(self, pair: Pair, count: int = 1) -> float:
        """GiB that consensus and search of so many such pairs may work in."""
        return max(_LEAST, min(self.total - count * self._held(pair), self._most)) / _GIB

    def together(self, pair: Pair) -> int:
        """How many such pairs can be matched together."""
        return max(1, (self.total - _LEAST) // self._held(pair))

    def spare(self, pair: Pair) -> float:
        """Bytes that matching this pair leaves for features of other pictures."""
        return min(self._most, self.total - self._held(pair) - self.working(pair) * _GIB)

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
        longest = max(max(scale.network) for scale, stays in zip(pair, fixed, strict=True) if not stays) // STRIDE
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
        item, config = self.precision.itemsize, self.network
        features, widest = _values(config)
        pixels = [math.prod(scale.network) for scale in pair]
        kept = features * item * sum(pixels)
        own = max(math.prod(scale.picture) for scale in pair)
        # Of the other picture there are features; of this one the pixels, as they are and as numbers, then the maps.
        loading = (18 if self._on_gpu else 14) * own + 36 * max(pixels)
        extracting = features * item * min(pixels) + max(loading, 6 * own * self._on_gpu + widest * item * max(pixels))
        extracting += 9 * _fine_channels(config.backbone) ** 2 * item  # a convolution's weights, reordered
        entries = math.prod(size / STRIDE**2 for size in pixels)
        by_kernels = self._on_gpu and self.precision == torch.float16
        on_cpu = self.device.type == "cpu"
        in_c = on_cpu and native.usable()
        # Scores, what the filters make of them, consensus, and the transpose: so many at a time, by measurement.
        coarse = kept + entries * (4 * item if by_kernels else 4 * (2 if on_cpu else 5))
        row = entries / min(scale.network[1] for scale in pair) * STRIDE
        hidden = config.consensus.channels[0]
        coarse += row * (8 * item if by_kernels else 4 * (hidden if in_c else 6 * hidden + 48))
        # All queries with their features; all matches with what refinement makes of them.
        queries = max(pixels) / 16
        searching = kept + 2 * entries * (item if by_kernels else 4)
        searching += (2 if on_cpu else 1) * queries * (features * 16 * item + 256)
        match = 4 * (4 * _fine_channels(config.backbone) + 5 * 81 + 4 * config.fine.subpixel_hidden)
        # Kernels need less of it, but on a GPU their number is rounded up; in torch some is lost between the steps.
        share = 1.3 if self._on_gpu else 0.9 if in_c else 1.5
        refining = kept + (queries * match * share if config.fine.subpixel else 0)
        return int(max(extracting, coarse, searching, refining))


def _values(config: NetworkConfig) -> tuple[float, float]:
    """Values for each pixel that the network sees: of its features, and of the backbone at its widest."""
    backbone = config.backbone
    fine = _fine_channels(backbone) / 16
    if isinstance(backbone, ResNetConfig):
        coarse = backbone.channels / 256
        widest = max(80.0, 256 / 16 + 512 / 64 + 1024 / 256 + 3.5 * fine)
    else:
        coarse = backbone.coarse_channels / 256
        half, quarter, eighth = (width / 4**level for level, width in enumerate(backbone.widths[:3], 1))
        widest = max(half + 3 * quarter, 4 * quarter + eighth + 2 * fine)
    return coarse + fine + config.fine.subpixel, widest + 6


def _fine_channels(backbone: ResNetConfig | CompactConfig) -> int:
    return backbone.fine_channels if isinstance(backbone, CompactConfig) else backbone.channels


def _resized(pair: Pair, fixed: tuple[bool, bool], ratio: float) -> Pair:
    """The pair seen at this ratio of the size, but for what is fixed."""
    first, second = (
        scale if stays else replace(scale, network=(_scaled(scale.network[0], ratio), _scaled(scale.network[1], ratio)))
        for scale, stays in zip(pair, fixed, strict=True)
    )
    return first, second


def _scaled(side: int, ratio: float) -> int:
    # The small term keeps 64 * 0.49999999 from losing a whole cell.
    return max(MIN_SIDE, int(side * ratio + 1e-6) // STRIDE * STRIDE)


def _sizes(pair: Pair) -> str:
    sizes = dict.fromkeys(f"{width}x{height}" for width, height in (scale.network for scale in pair))
    return " and ".join(sizes)


def _gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB"
