"""Neighborhood consensus on the GPU: two layers of 4D convolutions in both directions, hidden values in registers.

The sum over 81 neighbors is split. A program walks down the rows of image 1 and accumulates three rows in registers, in
both layers. A hidden value is therefore computed once and never leaves its program. Its contributions to the other 27
neighbors are written to memory, and a second kernel adds them up. These contributions dominate memory, with 54 values
per entry of the tensor. They are held for a few rows of image 0 at a time, in a ring of slots, so no row is computed
twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.model.cells import MaskPair
from dualrc.ops import memory
from dualrc.ops.triton.launch import launcher, parts, power_above, readable

CHANNELS = (8, 16, 32)
# Contributions of a hidden position: 27 neighbors in two directions.
SHARES = 54
# Hidden positions per program, and values that it unrolls; float32 needs twice the registers.
_POSITIONS, _UNROLL = {torch.float16: 64, torch.float32: 32}, {torch.float16: 3, torch.float32: 1}
# Results per program that adds contributions.
_COLLECTED = 256
# Enough programs to keep a large GPU busy. More programs compute more halos twice.
_PROGRAMS = 2000


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The weights of both layers and directions in the layout of the kernels."""

    # (3 2C 32) By row shift in image 1, channel of both directions, and the other 27 shifts padded to 32.
    weight1: Tensor
    # (2C) float32
    bias1: Tensor
    # (3 64 2C) 27 results padded to 32, for each direction.
    weight2: Tensor
    # (1) float32
    bias2: Tensor


@dataclass(frozen=True, kw_only=True)
class Slab:
    """A part of the work whose contributions fit into memory."""

    pairs: range
    # Rows of image 1.
    region: range
    # Number of rows of image 0 whose contributions are kept.
    slots: int
    # Number of rows of image 0 whose results are computed per step.
    rows: int


class Maxima(NamedTuple):
    """The maxima that the mutual filter divides by, in float32."""

    # (b*h1*w1) Over image 0.
    best0: Tensor
    # (b*h0*w0) Over image 1.
    best1: Tensor


def supported(shape: torch.Size, dtype: torch.dtype, weights: Sequence[Tensor]) -> bool:
    """Return whether `apply` supports scores of this shape (b h0 w0 h1 w1) and type with these weights."""
    channels = weights[0].shape[0]
    return (
        dtype in (torch.float16, torch.float32)
        and len(weights) == 2
        and channels in CHANNELS
        and weights[0].shape == (channels, 1, 3, 3, 3, 3)
        and weights[1].shape == (1, channels, 3, 3, 3, 3)
        and SHARES * pitch(shape[2], shape[4]) < 2**31
    )


def prepare(weights: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype) -> Prepared:
    """Arrange weights (C 1 3 3 3 3), (1 C 3 3 3 3) and their biases for scores of this type."""
    first, second = weights[0].detach()[:, 0], weights[1].detach()[0]
    channels = len(first)
    # (2C di dj dk dl)
    both = torch.cat([first, first.permute(0, 3, 4, 1, 2)])
    weight1 = F.pad(both.permute(3, 0, 1, 2, 4).reshape(3, 2 * channels, 27), (0, 5))
    weight2 = second.new_zeros(3, 2, 32, 2, channels)
    for direction, kernel in enumerate((second, second.permute(0, 3, 4, 1, 2))):
        # The channels of a direction contribute to the results of that direction only.
        weight2[:, direction, :27, direction] = kernel.permute(3, 1, 2, 4, 0).reshape(3, 27, channels)
    return Prepared(
        weight1=weight1.to(dtype).contiguous(),
        bias1=biases[0].detach().float().repeat(2),
        weight2=weight2.reshape(3, 64, 2 * channels).to(dtype),
        bias2=biases[1].detach().float().reshape(1).contiguous(),
    )


def apply(scores: Tensor, prepared: Prepared, maxima: Maxima | None = None) -> Tensor:
    """Apply the consensus to scores (b h0 w0 h1 w1), or to the mutually filtered scores if `maxima` are given."""
    scores = readable(scores)
    results = torch.empty_like(scores)
    if scores.numel():
        for slab in plan(tuple(scores.shape), scores.element_size(), 4 * memory.working_values()):
            _compute(slab, scores, prepared, maxima, results)
    return results


def correlate(maps0: Tensor, maps1: Tensor, valid: MaskPair, dtype: torch.dtype) -> tuple[Tensor, Maxima, Maxima]:
    """Correlate masked maps (b c h0 w0), (b c h1 w1) -> (b h0 w0 h1 w1), its maxima, and initial maxima for later.

    Masks are (b 4h 4w) bool. Cells without a valid fine cell have correlation 0.
    """
    batch, channels = maps0.shape[:2]
    shape = (batch, *maps0.shape[2:], *maps1.shape[2:])
    count0, count1 = shape[1] * shape[2], shape[3] * shape[4]
    # Lengths are rounded up, so that each part is aligned.
    length0, length1 = parts(batch * count0, 4) * 4, parts(batch * count1, 4) * 4
    table = torch.empty(3 * (length0 + length1), dtype=torch.float32, device=maps0.device)
    scale0, scale1, maxima = table.split([length0, length1, 2 * (length0 + length1)])
    first1, first0, last1, last0 = maxima.split([length0, length1, length0, length1])
    first, last = Maxima(first0, first1), Maxima(last0, last1)
    scores = torch.empty(shape, dtype=dtype, device=maps0.device)
    if scores.numel() == 0:
        return scores, first, last
    maps0, maps1 = (readable(maps.to(dtype), torch.channels_last) for maps in (maps0, maps1))
    block = max(1, 4096 // power_above(channels))
    measure = launcher("consensus_jit.measure", CHANNELS=channels, BLOCK_C=power_above(channels), POSITIONS=block)
    measure(
        (parts(len(maxima), block), 1, 1), maps0, maps1, scale0, scale1, maxima,
        batch * count0, batch * count1, len(maxima),
    )  # fmt: skip
    masked = valid[0] is not None or valid[1] is not None
    counts = zip(valid, (scale0[: batch * count0], scale1[: batch * count1]), strict=True)
    cells = [_cells(mask, scale) for mask, scale in counts] if masked else [scale0, scale1]
    half = dtype == torch.float16
    side = 128 if half else 64
    multiply = launcher(
        "consensus_jit.correlate", CHANNELS=channels, MASKED=masked, ROWS=side, COLUMNS=side, TERMS=64 if half else 16,
        warps=8 if half else 4,
    )  # fmt: skip
    grid = (parts(count0, side), parts(count1, side), batch)
    multiply(grid, maps0, maps1, scale0, scale1, *cells, scores, *first, count0, count1)
    return scores, first, last


def _cells(valid: Tensor | None, cells: Tensor) -> Tensor:
    """Return coarse cells with a valid fine cell as bytes, in the shape of `cells`; all of them without a mask."""
    if valid is None:
        return torch.ones_like(cells, dtype=torch.uint8)
    return readable(valid.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).any(4).any(2).view(torch.uint8))


def mutual_filter(scores: Tensor, maxima: Maxima) -> Tensor:
    """Apply the mutual filter in place, in float32; `maxima` are first raised to those of the scores."""
    if scores.numel() == 0:
        return scores
    batch, count0, count1 = len(scores), scores.shape[1] * scores.shape[2], scores.shape[3] * scores.shape[4]
    find = launcher("consensus_jit.find_maxima", ROWS=32, COLUMNS=128)
    find((parts(count0, 32), parts(count1, 128), batch), scores, *maxima, count0, count1)
    apply = launcher("consensus_jit.filter_scores", POSITIONS=1024)
    apply((batch * count0, parts(count1, 1024), 1), scores, *maxima, scores, count0, count1)
    return scores


def pitch(w0: int, w1: int) -> int:
    """Return the number of values of one contribution for a row of image 0 and a row of image 1."""
    return parts(w0 * (w1 + 2), 8) * 8


def plan(shape: tuple[int, ...], item: int, limit: int) -> Iterator[Slab]:
    """Split the work into slabs whose contributions take at most `limit` bytes, if possible."""
    batch, h0, w0, h1, w1 = shape
    # Values per row of image 0 and row of image 1.
    plane = SHARES * pitch(w0, w1)
    # The kernels use 32-bit offsets within a row of image 0.
    tall = max(1, min(h1, (2**31 - 1) // plane))
    # Number of such rows that fit into the limit.
    fitting = limit // (plane * item)
    if fitting >= h0 * h1 and tall == h1:
        together = min(batch, fitting // (h0 * h1))
        for start in range(0, batch, together):
            pairs = range(start, min(start + together, batch))
            yield Slab(pairs=pairs, region=range(h1), slots=h0, rows=h0)
        return
    # A row of results needs three rows of contributions. More slots save launches.
    least = min(h0, 3)
    region = max(1, min(tall, fitting // least))
    slots = max(least, min(h0, fitting // region))
    rows = h0 if slots == h0 else slots - 2
    for pair in range(batch):
        for start in range(0, h1, region):
            yield Slab(
                pairs=range(pair, pair + 1), region=range(start, min(start + region, h1)), slots=slots, rows=rows
            )


def _compute(slab: Slab, scores: Tensor, prepared: Prepared, maxima: Maxima | None, results: Tensor) -> None:
    """Compute the results of a slab, some rows of image 0 at a time."""
    h0, w0, h1, w1 = scores.shape[1:]
    pairs, region, plane = len(slab.pairs), slab.region, (w0 + 2) * (w1 + 2)
    shares = scores.new_empty(pairs * slab.slots * SHARES * len(region) * pitch(w0, w1))
    # Each step computes one more row of hidden positions, from rows of scores on both sides.
    padded = scores.new_empty(pairs * (min(slab.rows + 1, h0) + 2) * h1 * plane)
    best0, best1 = maxima or (scores, scores)
    positions = _POSITIONS[scores.dtype]
    across = parts(w0 * (w1 + 2), positions)
    lay_out = launcher("consensus_jit.lay_out", FILTERED=maxima is not None, POSITIONS=1024)
    contribute = launcher(
        "consensus_jit.contribute", HIDDEN=prepared.weight1.shape[1], POSITIONS=positions, UNROLL=_UNROLL[scores.dtype]
    )
    collect = launcher("consensus_jit.collect", POSITIONS=_COLLECTED)
    made = 0
    for start in range(0, h0, slab.rows):
        stop = min(start + slab.rows, h0)
        needed = min(stop + 1, h0)
        rows = needed - made
        if rows > 0:
            grid = (parts(plane, 1024), h1, pairs * (rows + 2))
            lay_out(grid, scores, best0, best1, padded, slab.pairs.start, made - 1, rows + 2, h0, w0, h1, w1)
            steps = _steps(len(region), across * pairs * rows)
            contribute(
                (across, parts(len(region), steps), pairs * rows), padded, shares, prepared.weight1, prepared.bias1,
                prepared.weight2, made, rows, slab.slots, region.start, region.stop, steps, w0, h1, w1,
            )  # fmt: skip
            made = needed
        collect(
            (parts(w0 * (w1 + 2), _COLLECTED), len(region), pairs * (stop - start)), shares, prepared.bias2, results,
            slab.pairs.start, start, stop - start, slab.slots, region.start, len(region), h0, w0, h1, w1,
        )  # fmt: skip


def _steps(rows: int, programs: int) -> int:
    """Return the rows per program: all, unless that leaves the GPU idle; each program reads four extra rows."""
    walks = max(1, min(parts(_PROGRAMS, programs), rows // 12))
    return parts(rows, walks)
