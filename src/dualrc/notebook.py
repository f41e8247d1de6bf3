"""Notebook display of matches and warps, which do not contain their images."""

import html

import numpy as np

from dualrc.extras import png_is_broken
from dualrc.types import FloatArray, Size

# Width of the drawing and of the gap between its frames, in pixels, and maximum number of lines.
_WIDTH_PX, _GAP_PX, _LINES = 800, 10, 200
# Maximum long side of the image of a warp.
_WARP_PX = 400


def matches_html(
    points0: FloatArray, points1: FloatArray, scores: FloatArray, sizes: tuple[Size, Size], caption: str
) -> str:
    """Return the best matches as SVG lines between two frames with the shapes of the images, with a caption."""
    text = f"<div>{html.escape(caption)}</div>"
    if min(min(size) for size in sizes) <= 0:
        return text
    # Both frames have the same height, and together they fill the width.
    ratio = (_WIDTH_PX - _GAP_PX) / sum(width / height for width, height in sizes)
    scales = [ratio / height for _, height in sizes]
    widths = [size[0] * scale for size, scale in zip(sizes, scales, strict=True)]
    shift = widths[0] + _GAP_PX
    best = np.argsort(-scores, kind="stable")[:_LINES]
    best = best[np.isfinite(points1[best]).all(axis=1)]
    ends0, ends1 = ((points[best] + 0.5) * scale for points, scale in zip((points0, points1), scales, strict=True))
    lines = []
    for (x0, y0), (x1, y1), score in zip(ends0.tolist(), ends1.tolist(), scores[best].tolist(), strict=True):
        # The hue is red for score 0 and green for score 1.
        hue = 120 * min(max(score, 0.0), 1.0)
        lines.append(
            f'<g stroke="hsl({hue:.0f},75%,45%)" fill="hsl({hue:.0f},75%,45%)">'
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1 + shift:.1f}" y2="{y1:.1f}" stroke-opacity="0.5"/>'
            f'<circle cx="{x0:.1f}" cy="{y0:.1f}" r="1.5"/><circle cx="{x1 + shift:.1f}" cy="{y1:.1f}" r="1.5"/></g>'
        )
    frames = "".join(
        f'<rect x="{left:.1f}" y="0" width="{width:.1f}" height="{ratio:.1f}" fill="#f4f4f4" stroke="#999"/>'
        for left, width in ((0.0, widths[0]), (shift, widths[1]))
    )
    box = f'viewBox="0 0 {_WIDTH_PX} {ratio:.1f}" width="{_WIDTH_PX}" height="{ratio:.0f}"'
    shown = f"; the best {len(best):,} are drawn" if len(best) < len(scores) else ""
    text = f"<div>{html.escape(caption)}{shown}</div>"
    return f'{text}<svg xmlns="http://www.w3.org/2000/svg" {box} style="max-width:100%">{frames}{"".join(lines)}</svg>'


def warp_png(points1: FloatArray, certainty: FloatArray) -> bytes | None:
    """Return motion as color: hue is the direction, saturation the distance, black is unknown."""
    from PIL import Image

    from dualrc.formats import encoded

    if 0 in certainty.shape or png_is_broken():
        return None
    height, width = certainty.shape
    step = max(1, -(-max(height, width) // _WARP_PX))
    row, column = np.mgrid[:height:step, :width:step]
    motion = points1[::step, ::step] - np.stack([column, row], axis=2)
    known = np.isfinite(motion).all(axis=2) & (certainty[::step, ::step] > 0)
    motion = np.where(known[:, :, None], motion, 0)
    # Subtract the median motion, so that colors show differences.
    if known.any():
        motion = motion - np.median(motion[known], axis=0)
    length = np.linalg.norm(motion, axis=2)
    longest = float(np.percentile(length[known], 95)) if known.any() else 1.0
    hue = (np.arctan2(motion[:, :, 1], motion[:, :, 0]) / (2 * np.pi)) % 1
    colors = np.stack([hue, np.clip(length / max(longest, 1e-6), 0, 1), np.ones_like(hue)], axis=2)
    colors[:, :, 2] = np.where(known, 0.35 + 0.65 * np.clip(certainty[::step, ::step], 0, 1), 0)
    return encoded(Image.fromarray(np.round(colors * 255).astype(np.uint8), mode="HSV").convert("RGB"), "PNG")
