"""Memory and operation counts of the engines: the workspace limit, memory estimates, and lower bounds of work.

Each operation states its own numbers; `matcher.budget` and `dualrc bench` only add them up.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualrc.config import CompactConfig, ConsensusConfig, NetworkConfig, SparseNCNetConfig, TrunkConfig
from dualrc.model.backbone import make_backbone
from dualrc.model.cells import PLACES
from dualrc.model.consensus import Consensus
from dualrc.model.context import POOL
from dualrc.model.subpixel import WINDOW, Subpixel
from dualrc.pixels import FINE_STRIDE, STRIDE
from dualrc.types import Size

_GIB = 2**30
_working: ContextVar[int] = ContextVar("working memory", default=_GIB // 2)


@contextmanager
def working_memory(limit: int) -> Iterator[None]:
    """Limit the workspace of the operations in this block to about `limit` bytes, beside inputs and results."""
    token = _working.set(limit)
    try:
        yield
    finally:
        _working.reset(token)


def working_values() -> int:
    """Return the number of float32 values in the workspace."""
    return _working.get() // 4


def consensus_values(consensus: Consensus) -> int:
    """Return the largest number of values that torch holds per entry of the tensor, for both directions."""
    return max(2 * (w.shape[2] ** 2 * min(w.shape[:2]) + sum(w.shape[:2])) for w in consensus.weights)


class Traits(NamedTuple):
    """Peak memory of an engine, as measured (docs/speed.md)."""

    # Bytes of the copies of the coarse tensor, per entry.
    tensor_bytes: int
    # Bytes of the consensus, per entry of a row of image 0.
    row_bytes: int
    # Bytes of the coarse tensor in the search, per entry.
    search_bytes: int
    # Copies of the features of all queries.
    query_copies: int
    # Copies of the intermediate values of a match in the refinement.
    match_copies: float


def traits(engine: str, device: torch.device, precision: torch.dtype, hidden: int) -> Traits:
    """Return the traits of the engine with this name; `hidden` is the number of hidden consensus channels."""
    if device.type == "cuda" and precision == torch.float16 and "triton" in engine:
        return Traits(4 * 2, 8 * 2, 2 * 2, 1, 1.3)
    # These engines hold the full fine correlation in several tensors.
    if engine in ("definition", "reference"):
        return Traits(4 * 5, 4 * (6 * hidden + 48), 4 * 4 * PLACES**2, 2, 1.5)
    row = 4 * hidden if engine.startswith("native") else 4 * (6 * hidden + 48)
    if device.type == "cpu":
        return Traits(4 * 2, row, 2 * 4, 2, 0.9 if engine.startswith("native") else 1.5)
    return Traits(4 * 5, row, 2 * 4, 1, 1.3 if device.type == "cuda" else 1.5)


class Needs(NamedTuple):
    """Bytes that each operation needs for a pair, beside the weights and its workspace."""

    extract: float
    coarse: float
    search: float
    refine: float


def needs(
    config: NetworkConfig, images: tuple[Size, Size], seen: tuple[Size, Size], item: int, own: Traits, *, on_gpu: bool
) -> Needs:
    """Estimate for images of (width, height), resized for the network to `seen`; `item` bytes per feature value."""
    features, widest = _values_per_pixel(config)
    if isinstance(config.backbone, TrunkConfig) and on_gpu:
        # A CUDA graph returns copies of its results.
        features += _one_map(config)
    pixels, image = [math.prod(size) for size in seen], max(math.prod(size) for size in images)
    # Bytes per pixel: its features, and its color for matching at another scale.
    held = features * item + 3
    kept = held * sum(pixels)
    # The other image is present as features. This one is present as bytes and as floats, then as feature maps.
    loading = (18 if on_gpu else 14) * image + 36 * max(pixels)
    extract = held * min(pixels) + max(loading, 6 * image * on_gpu + widest * item * max(pixels))
    width = 256 if isinstance(config.backbone, TrunkConfig) else config.backbone.fine_channels
    # One convolution keeps a reordered copy of its weights.
    extract += 9 * width**2 * item
    cell = _cell(config)
    entries = math.prod(count / cell**2 for count in pixels)
    row = entries / min(size[1] for size in seen) * cell
    if config.ncnet is not None:
        return _ncnet_needs(config, kept, extract, entries, row, sum(pixels) / cell**2, own)
    queries = max(pixels) / FINE_STRIDE**2
    query = features * FINE_STRIDE**2 * item + 256
    # Values per token: queries, keys, values, the MLP's hidden layer, and transposed copies.
    tokens = 0 if config.context is None else 4 * 14 * config.context.width * sum(pixels) / STRIDE**2
    match = 4 * (4 * config.backbone.fine_channels + 5 * WINDOW**2 + 4 * config.fine.subpixel_hidden)
    return Needs(
        extract=extract,
        coarse=kept
        + max(tokens, entries * own.tensor_bytes + row * own.row_bytes)
        + (0 if config.context is None else config.backbone.coarse_channels * item * sum(pixels) / STRIDE**2),
        search=kept + entries * own.search_bytes + own.query_copies * queries * query,
        refine=kept + (queries * match * own.match_copies if config.fine.subpixel else 0),
    )


def _ncnet_needs(
    config: NetworkConfig, kept: float, extract: float, entries: float, row: float, cells: float, own: Traits
) -> Needs:
    """Estimate for NCNet or Sparse-NCNet, from the entries of the dense tensor and the cells of both images."""
    assert config.ncnet is not None
    # Indices, scores and positions.
    matches = 64 * cells
    if isinstance(config.ncnet, SparseNCNetConfig):
        # Per entry: its neighbors, its coordinates three times, and the channels of both directions four times.
        entry = 8 * max(config.consensus.kernel_sizes) ** 4 + 3 * 40 + 4 * 8 * max(config.consensus.channels)
        return Needs(extract, kept + config.ncnet.neighbors * cells * entry, kept + matches, 0)
    layers = consensus_layers(config.consensus)
    halo = sum(kernel // 2 for kernel, _, _ in layers)
    slab = (1 + 2 * halo) * max(8 * (k**2 * min(i, o) + i + o) for k, i, o in layers)
    # Products of one row, before and during the pooling.
    products = 8 * config.ncnet.pool**4
    # The kernels of the engines support this configuration.
    usual = config.consensus.kernel_sizes == (3, 3)
    work = max(own.row_bytes if usual else slab, products)
    return Needs(extract, kept + entries * own.tensor_bytes + row * work, kept + 8 * entries + matches, 0)


def _cell(config: NetworkConfig) -> int:
    """Return the side of a cell of the coarse tensor, in pixels."""
    if isinstance(config.backbone, TrunkConfig) and config.ncnet is not None:
        return config.backbone.stride * config.ncnet.pool
    return STRIDE


def _one_map(config: NetworkConfig) -> float:
    """Return the number of values per pixel in the map of a trunk."""
    assert isinstance(config.backbone, TrunkConfig)
    return config.backbone.fine_channels / config.backbone.stride**2


def _values_per_pixel(config: NetworkConfig) -> tuple[float, float]:
    """Return the number of values per network pixel: of the features, and of the backbone at its peak."""
    backbone = config.backbone
    if isinstance(backbone, TrunkConfig):
        own, widest = _one_map(config), max(80.0, 256 / 16 + 512 / 64 + 4 * _one_map(config))
        return own + (backbone.coarse_channels / _cell(config) ** 2), widest + 6
    fine, coarse = backbone.fine_channels / FINE_STRIDE**2, backbone.coarse_channels / STRIDE**2
    if isinstance(backbone, CompactConfig):
        half, quarter, eighth = (width / 4**level for level, width in enumerate(backbone.widths[:3], 1))
        widest = max(half + 3 * quarter, 4 * quarter + eighth + 2 * fine)
    else:
        widest = max(80.0, 256 / 16 + 512 / 64 + 1024 / 256 + 3.5 * fine)
    return coarse + fine + config.fine.subpixel, widest + 6


@dataclass(frozen=True, kw_only=True)
class Work:
    """Lower bound of the work of an operation: additions and multiplications in products, and bytes moved."""

    operations: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(operations=self.operations + other.operations, bytes=self.bytes + other.bytes)


def extract_work(config: NetworkConfig, size: Size, item: int) -> Work:
    """Count the backbone's convolutions on one image of (width, height), with each input, weight and output once."""
    work = [Work(operations=0, bytes=0)]

    def count(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        values = inputs[0].numel() + layer.weight.numel() + output.numel()
        work[0] += Work(operations=2 * output.numel() * layer.weight[0].numel(), bytes=values * item)

    # The meta device computes shapes only.
    with torch.device("meta"):
        backbone = make_backbone(config.backbone).eval()
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d):
                layer.register_forward_hook(count)
        backbone(torch.empty(1, 3, size[1], size[0]))
    return work[0]


def coarse_work(config: NetworkConfig, size0: Size, size1: Size, item: int) -> Work:
    """Count correlation, consensus and filters of one pair, with at least five passes over the tensor.

    The correlation writes the tensor, the consensus reads and writes it, and the last filter reads and writes it.
    """
    cells0, cells1, channels = _cells(config, size0), _cells(config, size1), config.backbone.coarse_channels
    entries, products = cells0 * cells1, cells0 * cells1
    if isinstance(config.ncnet, SparseNCNetConfig):
        entries, products = config.ncnet.neighbors * (cells0 + cells1), 2 * products
    elif config.ncnet is not None:
        products *= config.ncnet.pool**4
    operations: float = 2 * channels * products + consensus_operations(config.consensus) * entries
    operations += context_operations(config, cells0, cells1)
    return Work(operations=operations, bytes=(5 * entries + (cells0 + cells1) * channels) * item)


def context_operations(config: NetworkConfig, cells0: int, cells1: int) -> float:
    """Count the operations of all attention layers for images with these numbers of coarse cells; 0 without context."""
    if config.context is None:
        return 0
    width, channels, squares = config.context.width, config.backbone.coarse_channels, POOL**2
    # Per token: queries, merge and MLP. Per square: keys and values. Both images read them.
    token = 2 * width * (2 * width + 2 * width + 4 * width + 4 * width / squares)
    read = 4 * width * (cells0 + cells1) ** 2 / squares
    projections = 4 * width * channels * (cells0 + cells1)
    return config.context.layers * (token * (cells0 + cells1) + read) + projections


def consensus_layers(config: ConsensusConfig) -> list[tuple[int, int, int]]:
    """Return kernel size, input channels and output channels of each 4D convolution."""
    return list(zip(config.kernel_sizes, (1, *config.channels[:-1]), config.channels, strict=True))


def consensus_operations(config: ConsensusConfig) -> int:
    """Return the operations per entry of the tensor, for all layers in both directions."""
    return 2 * sum(2 * kernel**4 * inputs * outputs for kernel, inputs, outputs in consensus_layers(config))


def search_work(config: NetworkConfig, size0: Size, size1: Size, item: int, *, visited: float, matches: int) -> Work:
    """Count cosines of the cells that all groups of 16 queries visit, refinement, and one pass over the inputs."""
    cells0, cells1, channels = _cells(config, size0), _cells(config, size1), config.backbone.fine_channels
    # The maxima of the tensor, then products within the matched cells.
    if config.ncnet is not None:
        entries, around = cells0 * cells1, 0
        if isinstance(config.ncnet, SparseNCNetConfig):
            entries, around = config.ncnet.neighbors * (cells0 + cells1), 18 * config.ncnet.soft
        products = (config.ncnet.pool**4 + around) * matches
        return Work(operations=2 * channels * products, bytes=2 * entries * item)
    cosines = 2 * channels * PLACES**2 * visited
    operations = cosines + matches * refine_operations(config)
    return Work(operations=operations, bytes=(2 * cells0 * cells1 + (cells0 + cells1) * PLACES * channels) * item)


def refine_operations(config: NetworkConfig) -> int:
    """Return the operations per match in both directions; 0 for a preset without refinement."""
    if not config.fine.subpixel:
        return 0
    channels = config.backbone.fine_channels
    with torch.device("meta"):
        subpixel = Subpixel(channels, config.fine.subpixel_hidden)
    layers = sum(2 * layer.weight.numel() for layer in subpixel.modules() if isinstance(layer, nn.Linear))
    return 2 * (2 * channels * WINDOW**2 + layers)


def _cells(config: NetworkConfig, size: Size) -> int:
    return (size[0] // _cell(config)) * (size[1] // _cell(config))
