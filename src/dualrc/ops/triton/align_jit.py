"""Kernels of the photometric alignment; `refine.py` launches them."""

import triton.language as tl

from dualrc.model import align
from dualrc.ops.triton.jit import kernel
from dualrc.ops.triton.launch import power_above

# Triton reads a global only if it is marked as a constant.
_REACH, _STEP, _ROUNDS = tl.constexpr(align.REACH), tl.constexpr(align.STEP), tl.constexpr(align.ROUNDS)
_DAMPING, _LONGEST, _FARTHEST = tl.constexpr(align.DAMPING), tl.constexpr(align.LONGEST), tl.constexpr(align.FARTHEST)
_LEAST, _GAIN, _LARGEST = tl.constexpr(align.LEAST), tl.constexpr(align.GAIN), tl.constexpr(align.LARGEST)
_SIDE = tl.constexpr(2 * align.REACH // align.STEP + 1)
_PLACES = tl.constexpr(power_above((2 * align.REACH // align.STEP + 1) ** 2))


@kernel()
def _look(
    # (matches 1) Pointers to the first pixel of each match's image.
    light: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    # (matches places)
    x: tl.tensor,
    y: tl.tensor,
) -> tl.tensor:
    """Sample the brightness, bilinear and clamped."""
    x = tl.minimum(tl.maximum(x, 0.0), (width - 1).to(tl.float32))
    y = tl.minimum(tl.maximum(y, 0.0), (height - 1).to(tl.float32))
    left, top = x.to(tl.int32), y.to(tl.int32)
    right, bottom = tl.minimum(left + 1, width - 1), tl.minimum(top + 1, height - 1)
    a = tl.load(light + top * width + left).to(tl.float32)
    b = tl.load(light + top * width + right).to(tl.float32)
    c = tl.load(light + bottom * width + left).to(tl.float32)
    d = tl.load(light + bottom * width + right).to(tl.float32)
    x, y = x - left.to(tl.float32), y - top.to(tl.float32)
    above, below = a + (b - a) * x, c + (d - c) * x
    return above + (below - above) * y


@kernel()
def _normalized(window: tl.tensor, weights: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    window = window - tl.sum(window * weights, axis=1)[:, None]
    spread = tl.sqrt(tl.sum(window * window * weights, axis=1) + 1e-6)
    return window / spread[:, None], spread


@kernel()
def _slope(change: tl.tensor, spread: tl.tensor, template: tl.tensor, weights: tl.tensor) -> tl.tensor:
    """Return the derivative of the normalized window, with gain and offset projected out."""
    slope = change / spread[:, None]
    slope = slope - tl.sum(slope * weights, axis=1)[:, None]
    return slope - template * tl.sum(slope * template * weights, axis=1)[:, None]


@kernel()
def _number(value: tl.tensor) -> tl.tensor:
    """Replace NaN and infinities by finite numbers."""
    return tl.where(value == value, tl.minimum(tl.maximum(value, -3e38), 3e38), 0.0)  # noqa: PLR0124


@kernel()
def fit(
    # (b height0 width0)
    light0: tl.tensor,
    # (b height1 width1)
    light1: tl.tensor,
    # (matches) Pair of the batch.
    number: tl.tensor,
    height0: tl.tensor,
    width0: tl.tensor,
    height1: tl.tensor,
    width1: tl.tensor,
    x0: tl.tensor,
    y0: tl.tensor,
    x1: tl.tensor,
    y1: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the motion that aligns the windows of points in image 1 with those in image 0."""
    x0, y0, x1, y1 = _number(x0), _number(y0), _number(x1), _number(y1)
    a, b, c, d = _number(a), _number(b), _number(c), _number(d)
    place = tl.arange(0, _PLACES)
    dx = (place % _SIDE * _STEP - _REACH).to(tl.float32)[None, :]
    dy = (place // _SIDE * _STEP - _REACH).to(tl.float32)[None, :]
    weights = tl.where(place[None, :] < _SIDE * _SIDE, tl.exp((dx * dx + dy * dy) * (-1.125 / (_REACH * _REACH))), 0.0)
    weights = weights / tl.sum(weights, axis=1)[:, None]
    pixels0 = light0 + (number * height0 * width0)[:, None]
    pixels1 = light1 + (number * height1 * width1)[:, None]
    at_x, at_y = x0[:, None] + dx, y0[:, None] + dy
    template = _look(pixels0, height0, width0, at_x, at_y)
    across = _look(pixels0, height0, width0, at_x + 1, at_y) - _look(pixels0, height0, width0, at_x - 1, at_y)
    down = _look(pixels0, height0, width0, at_x, at_y + 1) - _look(pixels0, height0, width0, at_x, at_y - 1)
    template, spread = _normalized(template, weights)
    slope_x, slope_y = _slope(across / 2, spread, template, weights), _slope(down / 2, spread, template, weights)
    xx = tl.sum(slope_x * slope_x * weights, axis=1) + _DAMPING
    yy = tl.sum(slope_y * slope_y * weights, axis=1) + _DAMPING
    xy = tl.sum(slope_x * slope_y * weights, axis=1)
    inverse = 1.0 / (xx * yy - xy * xy)
    offset_x, offset_y = a[:, None] * dx + b[:, None] * dy, c[:, None] * dx + d[:, None] * dy
    move_x, move_y = tl.zeros_like(x1), tl.zeros_like(y1)
    window = _look(pixels1, height1, width1, x1[:, None] + offset_x, y1[:, None] + offset_y)
    window, _ = _normalized(window, weights)
    before = tl.sum(window * template * weights, axis=1)
    alike = before
    for _ in tl.static_range(_ROUNDS):
        off_x = tl.sum(slope_x * (window - template) * weights, axis=1)
        off_y = tl.sum(slope_y * (window - template) * weights, axis=1)
        step_x, step_y = (yy * off_x - xy * off_y) * inverse, (xx * off_y - xy * off_x) * inverse
        # The comparison also replaces NaN by 0.
        step_x = tl.where(tl.abs(step_x) < 1e30, step_x, 0.0)
        step_y = tl.where(tl.abs(step_y) < 1e30, step_y, 0.0)
        length = tl.maximum(tl.sqrt(step_x * step_x + step_y * step_y) / _LONGEST, 1.0)
        step_x, step_y = step_x / length, step_y / length
        move_x, move_y = move_x - (a * step_x + b * step_y), move_y - (c * step_x + d * step_y)
        window = _look(pixels1, height1, width1, (x1 + move_x)[:, None] + offset_x, (y1 + move_y)[:, None] + offset_y)
        window, _ = _normalized(window, weights)
        alike = tl.sum(window * template * weights, axis=1)
    area = a * d - b * c
    good = (alike > before + _GAIN) & (alike > _LEAST) & (area > 1.0 / _LARGEST) & (area < _LARGEST)
    good = good & (move_x * move_x + move_y * move_y < _FARTHEST * _FARTHEST)
    reach = _REACH + 1
    good = good & (x0 >= reach) & (y0 >= reach) & (x0 + reach <= width0 - 1) & (y0 + reach <= height0 - 1)
    reach_x, reach_y = (tl.abs(a) + tl.abs(b)) * _REACH + _FARTHEST, (tl.abs(c) + tl.abs(d)) * _REACH + _FARTHEST
    good = good & (x1 >= reach_x) & (y1 >= reach_y) & (x1 + reach_x <= width1 - 1) & (y1 + reach_y <= height1 - 1)
    return tl.where(good, move_x, 0.0), tl.where(good, move_y, 0.0)
