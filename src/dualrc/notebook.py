"""What a notebook shows of matches and warps, which do not hold their images: frames, lines and colors."""

import html
import io

import numpy as np

from dualrc.extras import png_is_broken
from dualrc.types import FloatArray, Size

_WIDTH_PX, _GAP_PX, _LINES = 800, 10, 200
# The longest side of a warp's image.
_WARP_PX = 400


def matches_html(
    points0: FloatArray, points1: FloatArray, scores: FloatArray, sizes: tuple[Size, Size], caption: str
) -> str:
    """Lines between two empty frames of the images' sizes as SVG, the best so many, with a caption."""
    text = f"<div>{html.escape(caption)}</div>"
    if min(min(size) for size in sizes) <= 0:
        return text
    # Frames have the same height, and fill the width together.
    ratio = (_WIDTH_PX - _GAP_PX) / sum(width / height for width, height in sizes)
    scales = [ratio / height for _, height in sizes]
    widths = [size[0] * scale for size, scale in zip(sizes, scales, strict=True)]
    shift = widths[0] + _GAP_PX
    best = np.argsort(-scores, kind="stable")[:_LINES]
    best = best[np.isfinite(points1[best]).all(axis=1)]
    ends0, ends1 = ((points[best] + 0.5) * scale for points, scale in zip((points0, points1), scales, strict=True))
    lines = []
    for (x0, y0), (x1, y1), score in zip(ends0.tolist(), ends1.tolist(), scores[best].tolist(), strict=True):
        # Red for 0, green for 1.
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
    """Motions as colors: the hue is the direction, the saturation the distance, black where nothing is known."""
    from PIL import Image

    if 0 in certainty.shape or png_is_broken():
        return None
    height, width = certainty.shape
    step = max(1, -(-max(height, width) // _WARP_PX))
    row, column = np.mgrid[:height:step, :width:step]
    motion = points1[::step, ::step] - np.stack([column, row], axis=2)
    known = np.isfinite(motion).all(axis=2) & (certainty[::step, ::step] > 0)
    motion = np.where(known[:, :, None], motion, 0)
    # A shift that all pixels share is left out, so that colors show what differs.
    if known.any():
        motion = motion - np.median(motion[known], axis=0)
    length = np.linalg.norm(motion, axis=2)
    longest = float(np.percentile(length[known], 95)) if known.any() else 1.0
    hue = (np.arctan2(motion[:, :, 1], motion[:, :, 0]) / (2 * np.pi)) % 1
    colors = np.stack([hue, np.clip(length / max(longest, 1e-6), 0, 1), np.ones_like(hue)], axis=2)
    colors[:, :, 2] = np.where(known, 0.35 + 0.65 * np.clip(certainty[::step, ::step], 0, 1), 0)
    file = io.BytesIO()
    Image.fromarray(np.round(colors * 255).astype(np.uint8), mode="HSV").convert("RGB").save(file, "PNG")
    return file.getvalue()
