"""Kernels for the outputs of the backbone: unit features, and the brightness for the alignment."""

import triton.language as tl

from dualrc.ops.triton.jit import kernel


@kernel("positions")
def normalize_rows(
    # (positions CHANNELS)
    features: tl.tensor,
    result: tl.tensor,
    positions: tl.tensor,
    CHANNELS: tl.constexpr,
    # A power of two, at least CHANNELS.
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Divide rows by sqrt(sum of squares + 1e-6)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDE)
    place = row[:, None] * CHANNELS + channel[None, :]
    exists = (row < positions)[:, None] & (channel < CHANNELS)[None, :]
    values = tl.load(features + place, mask=exists, other=0.0).to(tl.float32)
    values = values / tl.sqrt(tl.sum(values * values, axis=1) + 1e-6)[:, None]
    tl.store(result + place, values.to(result.dtype.element_ty), mask=exists)


@kernel("height", "width", "image_stride", "row_stride", "column_stride", "color_stride")
def blur(
    # (b 3 height width) With these strides.
    images: tl.tensor,
    # (b height width)
    result: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    image_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    color_stride: tl.tensor,
    PIXELS: tl.constexpr,
) -> None:
    """Convolve the mean of the colors with the kernel 1 4 6 4 1 along each axis; the border is replicated."""
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    image = tl.program_id(1).to(tl.int64)
    y, x = place // width, place % width
    inside = place < height * width
    source = images + image * image_stride
    total = tl.zeros((PIXELS,), tl.float32)
    for dy in tl.static_range(-2, 3):
        row = tl.minimum(tl.maximum(y + dy, 0), height - 1) * row_stride
        for dx in tl.static_range(-2, 3):
            # Binomial weights 1 4 6 4 1; the divisor 768 is 16 * 16 * 3.
            weight = (6 - 2 * dy * dy + (dy * dy * (dy * dy - 1)) // 4) * (
                6 - 2 * dx * dx + (dx * dx * (dx * dx - 1)) // 4
            )
            at = source + row + tl.minimum(tl.maximum(x + dx, 0), width - 1) * column_stride
            red = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            green = tl.load(at + color_stride, mask=inside, other=0.0).to(tl.float32)
            blue = tl.load(at + 2 * color_stride, mask=inside, other=0.0).to(tl.float32)
            total += (red + green + blue) * (weight / 768.0)
    tl.store(result + image * height * width + place, total.to(result.dtype.element_ty), mask=inside)
