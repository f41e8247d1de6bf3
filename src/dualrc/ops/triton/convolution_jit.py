"""Kernels of the fused backbone; `convolution.py` and `backbone.py` launch them.

Maps are channels-last, (b h w c) in memory. Channel counts are compile-time constants, so the compiler knows the
alignment of loads. Map sizes are run-time arguments, so one compiled kernel serves images of every size.
"""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


@kernel()
def _inside(first: tl.tensor, length: tl.tensor, KERNEL: tl.constexpr) -> tl.tensor:
    """Return a bit mask of the taps along an axis that lie inside the map, lowest tap first."""
    bits = tl.zeros_like(first)
    for tap in tl.static_range(KERNEL):
        bits |= tl.where((first + tap >= 0) & (first + tap < length), 1 << tap, 0)
    return bits


@kernel("height", "width", "out_width", "positions")
def convolve(  # noqa: PLR0915
    # (b height width CIN)
    x: tl.tensor,
    # (taps*CIN PITCH) Rounded up to whole blocks; zero beyond taps*CIN and COUT.
    weight: tl.tensor,
    # (PITCH)
    bias: tl.tensor,
    # (b positions COUT) Read only if ADD.
    onto: tl.tensor,
    # (b positions COUT)
    out: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    out_width: tl.tensor,
    # Output positions of one image: out_height * out_width.
    positions: tl.tensor,
    CIN: tl.constexpr,
    COUT: tl.constexpr,
    PITCH: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    # Whether to repeat the last row and column beyond the end of the map.
    REPLICATE: tl.constexpr,
    ADD: tl.constexpr,
    RELU: tl.constexpr,
    # Positions per program.
    BLOCK_M: tl.constexpr,
    # Output channels per program.
    BLOCK_N: tl.constexpr,
    # Terms per step of the sum over taps and input channels.
    BLOCK_K: tl.constexpr,
) -> None:
    """Convolve as an implicit matrix product: (positions, taps*CIN) x (taps*CIN, COUT)."""
    blocks: tl.constexpr = (COUT + BLOCK_N - 1) // BLOCK_N
    terms: tl.constexpr = KERNEL * KERNEL * CIN
    steps: tl.constexpr = (terms + BLOCK_K - 1) // BLOCK_K
    # Consecutive programs share their positions, so their inputs come from the L2 cache.
    program = tl.program_id(0)
    m = program // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # Offsets have 64 bits between images and 32 bits within one image.
    image = tl.program_id(1).to(tl.int64)
    x += image * height * width * CIN
    out += image * positions * COUT
    onto += image * positions * COUT

    # Positions past the end repeat the last position, so that only borders need a mask.
    position = tl.minimum(m, positions - 1)
    top = position // out_width * STRIDE - PADDING
    left = position % out_width * STRIDE - PADDING
    corner = (top * width + left) * CIN
    k = tl.arange(0, BLOCK_K)
    weights = weight + k[:, None] * PITCH + n[None, :]
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PADDING > 0 and CIN % BLOCK_K == 0:
        rows, columns = _inside(top, height, KERNEL), _inside(left, width, KERNEL)
    for step in range(steps):
        if CIN % BLOCK_K == 0:
            # All terms of the block belong to one tap.
            parts: tl.constexpr = CIN // BLOCK_K
            dy, dx = step // parts // KERNEL, step // parts % KERNEL
            channel = step % parts * BLOCK_K + k
            if REPLICATE:
                row, column = tl.minimum(top + dy, height - 1), tl.minimum(left + dx, width - 1)
                sources = x + ((row * width + column) * CIN)[:, None] + channel[None, :]
            else:
                sources = x + (corner + (dy * width + dx) * CIN)[:, None] + channel[None, :]
            if PADDING == 0:
                values = tl.load(sources)
            else:
                inside = ((rows >> dy) & (columns >> dx) & 1) != 0
                values = tl.load(sources, mask=inside[:, None], other=0.0)
        else:
            term = step * BLOCK_K + k
            dy, dx = term // CIN // KERNEL, term // CIN % KERNEL
            row, column = top[:, None] + dy[None, :], left[:, None] + dx[None, :]
            if REPLICATE:
                row, column = tl.minimum(row, height - 1), tl.minimum(column, width - 1)
                sources = x + (row * width + column) * CIN + (term % CIN)[None, :]
            else:
                # Terms of one row of taps are adjacent in memory.
                sources = x + corner[:, None] + (dy * width * CIN + term % (KERNEL * CIN))[None, :]
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            if terms % BLOCK_K != 0:
                inside = inside & (term < terms)[None, :]
            values = tl.load(sources, mask=inside, other=0.0)
        result = tl.dot(values, tl.load(weights), result, input_precision="ieee")
        weights += BLOCK_K * PITCH

    result += tl.load(bias + n).to(tl.float32)[None, :]
    target = m[:, None] * COUT + n[None, :]
    exists = (m < positions)[:, None]
    if COUT % BLOCK_N != 0:
        exists = exists & (n < COUT)[None, :]
    if ADD:
        result += tl.load(onto + target, mask=exists, other=0.0).to(tl.float32)
    if RELU:
        result = tl.maximum(result, 0.0)
    tl.store(out + target, result.to(out.dtype.element_ty), mask=exists)


@kernel()
def _cells(
    small: tl.tensor, row: tl.tensor, column: tl.tensor, width: tl.tensor,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load channels of cells of a map as float32: (m), (m) -> (m BLOCK_C)."""
    channel = tl.arange(0, BLOCK_C)
    sources = small + ((row * width + column) * CHANNELS)[:, None] + channel[None, :]
    return tl.load(sources, mask=(channel < CHANNELS)[None, :], other=0.0).to(tl.float32)


@kernel("height", "width", "out_width", "positions")
def upsample_add(
    # (b height width CHANNELS)
    small: tl.tensor,
    # (b positions CHANNELS)
    large: tl.tensor,
    out: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    out_width: tl.tensor,
    positions: tl.tensor,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    # A power of two, at least CHANNELS.
    BLOCK_C: tl.constexpr,
) -> None:
    """Add the smaller map, up-sampled bilinearly by 2 (align_corners=False), to the larger map."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    image = tl.program_id(1).to(tl.int64)
    small += image * height * width * CHANNELS
    large += image * positions * CHANNELS
    out += image * positions * CHANNELS
    position = tl.minimum(m, positions - 1)
    y, x = position // out_width, position % out_width
    # The center of a cell is a quarter of a small cell away from the center of its small cell, toward one neighbor.
    row, column = y // 2, x // 2
    next_row = tl.minimum(tl.maximum(row + y % 2 * 2 - 1, 0), height - 1)
    next_column = tl.minimum(tl.maximum(column + x % 2 * 2 - 1, 0), width - 1)
    value = 0.5625 * _cells(small, row, column, width, CHANNELS, BLOCK_C)
    value += 0.1875 * _cells(small, row, next_column, width, CHANNELS, BLOCK_C)
    value += 0.1875 * _cells(small, next_row, column, width, CHANNELS, BLOCK_C)
    value += 0.0625 * _cells(small, next_row, next_column, width, CHANNELS, BLOCK_C)
    channel = tl.arange(0, BLOCK_C)
    target = m[:, None] * CHANNELS + channel[None, :]
    exists = (m < positions)[:, None] & (channel < CHANNELS)[None, :]
    value += tl.load(large + target, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + target, value.to(out.dtype.element_ty), mask=exists)


@kernel()
def _colors(
    images: tl.tensor, row: tl.tensor, column: tl.tensor, row_stride: tl.tensor, column_stride: tl.tensor,
    color_stride: tl.tensor, exists: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Load colors of pixels as float32, padded with a zero: (m), (m) -> (m 4)."""
    color = tl.arange(0, 4)
    sources = images + (row * row_stride + column * column_stride)[:, None] + color[None, :] * color_stride
    return tl.load(sources, mask=exists[:, None] & (color < 3)[None, :], other=0.0).to(tl.float32)


@kernel("squares", "across", "image_stride", "color_stride", "row_stride", "column_stride")
def square_means(
    # (b 3 h w) With any strides.
    images: tl.tensor,
    # (b 2 squares) Output: means of the brightness and of its square.
    means: tl.tensor,
    # Number of squares in an image.
    squares: tl.tensor,
    # Number of squares in a row.
    across: tl.tensor,
    image_stride: tl.tensor,
    color_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    # Side of a square in pixels.
    SIDE: tl.constexpr,
    # Squares per program.
    BLOCK: tl.constexpr,
) -> None:
    """Compute the mean brightness and mean squared brightness of each square of pixels."""
    place = tl.arange(0, BLOCK * SIDE * SIDE)
    image = tl.program_id(1).to(tl.int64)
    square = tl.program_id(0) * BLOCK + place // (SIDE * SIDE)
    row = square // across * SIDE + place // SIDE % SIDE
    column = square % across * SIDE + place % SIDE
    colors = _colors(
        images + image * image_stride, row, column, row_stride, column_stride, color_stride, square < squares
    )
    gray = tl.reshape(tl.sum(colors, axis=1) / 3, (BLOCK, SIDE * SIDE))
    target = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    means += image * 2 * squares
    tl.store(means + target, tl.sum(gray, axis=1) / (SIDE * SIDE), mask=target < squares)
    tl.store(means + squares + target, tl.sum(gray * gray, axis=1) / (SIDE * SIDE), mask=target < squares)


@kernel()
def _between(
    means: tl.tensor, y0: tl.tensor, y1: tl.tensor, x0: tl.tensor, x1: tl.tensor, down: tl.tensor, right: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Interpolate bilinearly; y0 and y1 are row offsets, down and right the weights of the second row and column."""
    above = tl.load(means + y0 + x0) * (1 - right) + tl.load(means + y0 + x1) * right
    below = tl.load(means + y1 + x0) * (1 - right) + tl.load(means + y1 + x1) * right
    return above * (1 - down) + below * down


@kernel("width", "pixels", "down_squares", "across", "image_stride", "color_stride", "row_stride", "column_stride")
def add_contrast(
    # (b 3 h w) With any strides.
    images: tl.tensor,
    # (b 2 down_squares across) Smoothed means.
    means: tl.tensor,
    # (b pixels 4) Output.
    out: tl.tensor,
    width: tl.tensor,
    # Number of pixels in an image.
    pixels: tl.tensor,
    down_squares: tl.tensor,
    across: tl.tensor,
    image_stride: tl.tensor,
    color_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    SIDE: tl.constexpr,
    FAINT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the colors of each pixel and its contrast: brightness minus local mean, in standard deviations."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = tl.program_id(1).to(tl.int64)
    exists = place < pixels
    place = tl.minimum(place, pixels - 1)
    row, column = place // width, place % width
    y = tl.maximum((row.to(tl.float32) + 0.5) / SIDE - 0.5, 0.0)
    x = tl.maximum((column.to(tl.float32) + 0.5) / SIDE - 0.5, 0.0)
    y0, x0 = y.to(tl.int32), x.to(tl.int32)
    down, right = y - y0.to(tl.float32), x - x0.to(tl.float32)
    y1, x1 = tl.minimum(y0 + 1, down_squares - 1) * across, tl.minimum(x0 + 1, across - 1)
    y0 *= across
    means += image * 2 * down_squares * across
    mean = _between(means, y0, y1, x0, x1, down, right)
    square = _between(means + down_squares * across, y0, y1, x0, x1, down, right)
    colors = _colors(images + image * image_stride, row, column, row_stride, column_stride, color_stride, exists)
    gray = tl.sum(colors, axis=1) / 3
    contrast = (gray - mean) / tl.sqrt(tl.maximum(square - mean * mean, 0.0) + FAINT)
    color = tl.arange(0, 4)
    values = tl.where((color < 3)[None, :], colors, contrast[:, None])
    target = out + image * pixels * 4 + place[:, None] * 4 + color[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=exists[:, None])
