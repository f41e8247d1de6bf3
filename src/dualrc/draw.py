"""Drawings of matches and warps as uint8 arrays (height, width, 3), from any image that the matcher accepts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.extras import png_is_broken
from dualrc.files import replacing
from dualrc.formats import encoded
from dualrc.geometry import homography_grid, sample_bilinear
from dualrc.image import ImageInput, read
from dualrc.matches import Matches, Warp
from dualrc.pixels import cell_to_pixel, in_image, resize_points
from dualrc.types import BoolArray, FloatArray, ImageArray, IntArray, Size


class Drawing(np.ndarray[Any, np.dtype[np.uint8]]):
    """Image array, uint8 (height, width, 3), or 4 channels with transparency; notebooks display it."""

    def _repr_png_(self) -> bytes | None:
        """Return the PNG that a notebook displays; None for slices that are not images."""
        is_image = self.ndim == 3 and self.shape[2] in (3, 4) and self.dtype == np.uint8 and 0 not in self.shape
        return encoded(Image.fromarray(np.asarray(self)), "PNG") if is_image and not png_is_broken() else None

    def save(self, path: str | Path) -> None:
        """Write .png or .jpg atomically."""
        save(self, path)


# Red, green and blue, 0 to 255.
Color = tuple[int, int, int]

# File types of drawings.
SUFFIXES = (".png", ".jpg", ".jpeg")
# Largest canvas, without its caption.
_WIDTH_PX, _HEIGHT_PX = 2000, 2000
# Tiny images are enlarged to this height, so that lines and caption stay readable.
_SMALLEST_PX = 240
_GAP_PX = 6
_CAPTION_PX, _FONT_PX = 30, 16
# Aspect ratio from which images are stacked vertically.
_PANORAMA = 2.0
# Lines are drawn on an enlarged canvas and averaged down, which smooths them. Other pixels stay exact.
_OVERSAMPLING = 3
_WHITE, _INK, _GOOD, _BAD = (255, 255, 255), (40, 40, 40), (46, 204, 64), (235, 40, 40)
# Matplotlib's plasma without its first quarter, which is too dark to see on a photograph.
_SCORE_COLORS = ("7e03a8", "a01a9c", "bc3587", "d35171", "e66c5c", "f58b47", "fdac33", "fcd225", "f0f921")


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Position of one image on the canvas."""

    # (width, height) of the image.
    size: Size
    # Left, top, width and height on the canvas.
    box: tuple[int, int, int, int]

    def place(self, points: FloatArray) -> FloatArray:
        """Map pixels of the image (n, 2) to pixels of the canvas."""
        left, top, width, height = self.box
        return resize_points(points, self.size, (width, height)) + np.array([left, top])


def draw_matches(
    image0: ImageInput,
    image1: ImageInput,
    matches: Matches,
    *,
    limit: int | None = 200,
    colors: Literal["score", "inliers"] = "score",
    line_px: float | None = None,
) -> Drawing:
    """Draw both images with lines between corresponding points: at most `limit`, spread over the image.

    `colors` is "score" (dark to bright) or "inliers" (green and red; the matches need an estimate).
    """
    canvas, panels = _side_by_side([image0, image1], matches)
    order = _spread(matches, _drawable(matches, panels), limit)
    ends = [
        panel.place(points[order]) for panel, points in zip(panels, (matches.points0, matches.points1), strict=True)
    ]
    scores = matches.scores[order]
    if colors not in ("score", "inliers"):
        raise ConfigError(f"Unknown colors {colors!r}; choose score or inliers.")
    if colors == "inliers":
        if matches.estimate is None:
            raise DataError("These matches have no estimate to color by; add one with matches.with_estimate(model).")
        line_colors = [_GOOD if good else _BAD for good in matches.estimate.inliers[order]]
    else:
        line_colors = _score_colors(scores)
    if line_px is None:
        line_px = 2.0 if len(order) <= 50 else 1.3
    pen = _Pen(canvas)
    for start, end, color in zip(*ends, line_colors, strict=True):
        pen.line(start, end, color, line_px)
    # Lines are transparent, so that the photographs stay visible; dots are opaque.
    pen = _Pen(Image.blend(canvas, pen.finish(), 0.75))
    for points in ends:
        for point, color in zip(points, line_colors, strict=True):
            pen.dot(point, color, 1.8 * line_px)
    show_scale = colors == "score" and len(scores) > 1 and scores.min() < scores.max()
    scale = (float(scores.min()), float(scores.max())) if show_scale else None
    return _captioned(pen.finish(), _summary(matches, len(order)), scale)


def draw_dots(
    image0: ImageInput, image1: ImageInput, matches: Matches, correct: npt.ArrayLike, *, radius_px: float | None = None
) -> Drawing:
    """Draw both images with a green dot for every correct match (n,) and a red dot for every wrong one."""
    flags = np.asarray(correct, dtype=bool)
    if flags.shape != (len(matches),):
        raise DataError(f"`correct` has shape {flags.shape} for {len(matches)} matches; give one flag per match.")
    canvas, panels = _side_by_side([image0, image1], matches)
    drawable = _drawable(matches, panels)
    if radius_px is None:
        radius_px = 3.0 if len(flags) <= 2000 else 1.5
    pen = _Pen(canvas)
    # Draw wrong matches last, so that they stay visible.
    for wanted, color in ((True, _GOOD), (False, _BAD)):
        for panel, points in zip(panels, (matches.points0, matches.points1), strict=True):
            for point in panel.place(points[drawable & (flags == wanted)]):
                pen.dot(point, color, radius_px)
    text = f"{int(flags.sum()):,}/{len(flags):,} correct" if len(flags) else "no matches"
    return _captioned(pen.finish(), text)


def draw_warp(
    image0: ImageInput,
    image1: ImageInput,
    warp: npt.ArrayLike | Warp,
    *,
    certainty: npt.ArrayLike | None = None,
    mode: Literal["blend", "checkerboard"] = "blend",
) -> Drawing:
    """Overlay one image on the other, half transparent or as a checkerboard.

    A homography (3, 3) overlays image 0 on image 1. A Warp, or its points (h, w, 2) with the position in image 1 of
    every pixel of image 0, overlays image 1 on image 0, weighted by the certainty (h, w).
    """
    if isinstance(warp, Warp):
        certainty, warp = warp.certainty, warp.points1
    array = np.asarray(warp, dtype=np.float64)
    if array.shape == (3, 3):
        base, over = _opened(image1), _opened(image0)
        size = _fitted(base.size, (_WIDTH_PX, _HEIGHT_PX))
        grid = homography_grid(array, over.size, base.size, size)
        weight: FloatArray = np.ones(grid.shape[:2])
    else:
        base, over = _opened(image0), _opened(image1)
        grid, weight = _dense_grid(array, certainty, base.size)
        size = (grid.shape[1], grid.shape[0])
    below = np.asarray(_resized(base, size), dtype=np.float64)
    above = _pulled(over, grid, base.size)
    weight = weight * in_image(grid, over.size)
    if mode == "blend":
        weight = 0.5 * weight
    else:
        side = max(max(size) // 8, 1)
        weight = weight * (np.add.outer(np.arange(size[1]) // side, np.arange(size[0]) // side) % 2)
    return _mixed(below, above, weight)


def draw_flow(
    image0: ImageInput, image1: ImageInput, points1: npt.ArrayLike | Warp, certainty: npt.ArrayLike | None = None
) -> Drawing:
    """Draw image 0 next to image 1 warped into its frame, faded to white where the certainty is low.

    `points1` is a Warp, or positions (h, w, 2) in image 1 of the pixels of image 0, with `certainty` (h, w) from 0 to
    1.
    """
    if isinstance(points1, Warp):
        certainty, points1 = points1.certainty, points1.points1
    base, other = _opened(image0), _opened(image1)
    grid, weight = _dense_grid(np.asarray(points1, dtype=np.float64), certainty, base.size)
    pulled = _pulled(other, grid, base.size)
    weight = weight * in_image(grid, other.size)
    faded = _mixed(np.full_like(pulled, 255), pulled, weight)
    left = np.asarray(_resized(base, (grid.shape[1], grid.shape[0])))
    canvas, _ = _side_by_side([left, faded])
    return _captioned(canvas, f"image 1 in the frame of image 0, {weight.mean():.0%} certain on average")


def save(image: ImageArray, path: str | Path) -> None:
    """Write .png, with transparency if present, or .jpg, atomically."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise OutputError(f"{path}: images are written as .png or .jpg; choose one of these suffixes.")
    if path.suffix.lower() == ".png" and png_is_broken():
        raise OutputError(
            f"Cannot write {path}: pycolmap was imported before Pillow, whose PNG writer then aborts the process. "
            "Import dualrc or PIL.Image before pycolmap, or write a .jpg."
        )
    options: dict[str, Any] = {} if path.suffix.lower() == ".png" else {"quality": 92, "subsampling": 0}
    transparent = image.ndim == 3 and image.shape[2] == 4 and path.suffix.lower() == ".png"
    opened = Image.fromarray(np.asarray(image)) if transparent else _opened(np.asarray(image))
    with replacing(path) as temporary:
        opened.save(temporary, **options)


class _Pen:
    """Draws antialiased lines and dots on a canvas."""

    def __init__(self, canvas: Image.Image) -> None:
        width, height = canvas.size
        self._large = canvas.resize((width * _OVERSAMPLING, height * _OVERSAMPLING), Image.Resampling.NEAREST)
        self._draw = ImageDraw.Draw(self._large)

    def line(self, start: FloatArray, end: FloatArray, color: Color, width_px: float) -> None:
        ends = cell_to_pixel(np.concatenate([start, end]), _OVERSAMPLING).tolist()
        self._draw.line(ends, fill=color, width=max(round(width_px * _OVERSAMPLING), 1))

    def dot(self, point: FloatArray, color: Color, radius_px: float) -> None:
        """Draw a disc with a dark outline, which separates it from similar colors."""
        x, y = cell_to_pixel(point, _OVERSAMPLING).tolist()
        radius = radius_px * _OVERSAMPLING
        self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color, outline=_INK, width=1)

    def finish(self) -> Image.Image:
        return self._large.reduce(_OVERSAMPLING)


def _opened(image: ImageInput) -> Image.Image:
    return Image.fromarray(read(image))


def _side_by_side(inputs: Sequence[ImageInput], matches: Matches | None = None) -> tuple[Image.Image, list[_Panel]]:
    """Place images on one canvas at a common height, or stacked at a common width if all are panoramas."""
    images = [_opened(given) for given in inputs]
    if matches is not None:
        for number, (image, size) in enumerate(zip(images, (matches.size0, matches.size1), strict=True)):
            if 0 not in size and image.size != size:
                raise DataError(
                    f"Image {number} has {image.width} x {image.height} pixels but the matches are for "
                    f"{size[0]} x {size[1]}; give the matched image, upright and in full size."
                )
    stacked = all(image.width >= _PANORAMA * image.height for image in images)
    # Images are placed along one axis and have a common extent across it.
    along, across = (1, 0) if stacked else (0, 1)
    ratios = [image.size[along] / image.size[across] for image in images]
    largest = (_WIDTH_PX, _HEIGHT_PX)
    extent = min(
        max(_SMALLEST_PX, *(image.size[across] for image in images)),
        largest[across],
        (largest[along] - _GAP_PX * (len(images) - 1)) / sum(ratios),
    )
    lengths = [max(round(extent * ratio), 1) for ratio in ratios]
    extent = max(round(extent), 1)
    total = sum(lengths) + _GAP_PX * (len(images) - 1)
    canvas = Image.new("RGB", (extent, total) if stacked else (total, extent), _WHITE)
    panels, start = [], 0
    for image, length in zip(images, lengths, strict=True):
        box = (0, start, extent, length) if stacked else (start, 0, length, extent)
        canvas.paste(_resized(image, box[2:]), box[:2])
        panels.append(_Panel(size=image.size, box=box))
        start += length + _GAP_PX
    return canvas, panels


def _resized(image: Image.Image, size: Size) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _fitted(size: Size, largest: Size) -> Size:
    """Return the size, shrunk in proportion to fit into `largest`."""
    ratio = min(1.0, largest[0] / size[0], largest[1] / size[1])
    return max(round(size[0] * ratio), 1), max(round(size[1] * ratio), 1)


def _drawable(matches: Matches, panels: Sequence[_Panel]) -> BoolArray:
    inside = in_image(matches.points0, panels[0].size) & in_image(matches.points1, panels[1].size)
    return inside & np.isfinite(matches.scores)


def _spread(matches: Matches, drawable: BoolArray, limit: int | None) -> IntArray:
    """Return indices of at most `limit` good matches from all over image 0, best last so that they are on top."""
    indices = np.flatnonzero(drawable)
    indices = indices[np.argsort(-matches.scores[indices], kind="stable")]
    if limit is None or len(indices) <= limit:
        return indices[::-1]
    # Take the best of every cell of a grid, then the second best of every cell, and so on.
    points = matches.points0[indices]
    extent = np.ptp(points, axis=0) + 1
    cell_px = np.sqrt(extent.prod() / max(limit / 4, 1))
    counts = np.maximum(np.round(extent / cell_px), 1)
    column, row = np.floor((points - points.min(axis=0)) / extent * counts).T
    cells = row * counts[0] + column
    by_cell = np.argsort(cells, kind="stable")
    starts = np.searchsorted(cells[by_cell], cells[by_cell])
    rank = np.empty(len(indices), dtype=np.int64)
    rank[by_cell] = np.arange(len(indices)) - starts
    chosen = np.sort(np.argsort(rank, kind="stable")[: max(limit, 0)])
    return indices[chosen][::-1]


def _score_colors(scores: FloatArray) -> list[Color]:
    """Return colors from the lowest to the highest score; equal scores all get the highest color."""
    if not len(scores):
        return []
    low, high = float(scores.min()), float(scores.max())
    position = (scores - low) / (high - low) if high > low else np.ones(len(scores))
    anchors = np.array([list(bytes.fromhex(color)) for color in _SCORE_COLORS], dtype=np.float64)
    steps = np.linspace(0, 1, len(anchors))
    channels = [np.interp(position, steps, anchors[:, channel]).round().astype(int).tolist() for channel in range(3)]
    return list(zip(*channels, strict=True))


def _captioned(canvas: Image.Image, text: str, scale: tuple[float, float] | None = None) -> Drawing:
    """Add a strip below the canvas: text on the left, the scale of the scores on the right if there is room."""
    width, height = canvas.size
    font = ImageFont.load_default(_FONT_PX)
    result = Image.new("RGB", (max(width, round(font.getlength(text)) + 16), height + _CAPTION_PX), _WHITE)
    result.paste(canvas)
    draw = ImageDraw.Draw(result)
    middle = height + _CAPTION_PX / 2
    draw.text((8, middle), text, _INK, font, anchor="lm")
    if scale is not None:
        low, high = f"score {scale[0]:.3g}", f"{scale[1]:.3g}"
        bar_px = 120
        bar_left = result.width - 8 - font.getlength(high) - 8 - bar_px
        if bar_left - 8 - font.getlength(low) > 8 + font.getlength(text) + 16:
            for step, color in enumerate(_score_colors(np.arange(bar_px, dtype=np.float64))):
                draw.line((bar_left + step, middle - 5, bar_left + step, middle + 5), fill=color)
            draw.text((bar_left - 8, middle), low, _INK, font, anchor="rm")
            draw.text((result.width - 8, middle), high, _INK, font, anchor="rm")
    return np.array(result).view(Drawing)


def _summary(matches: Matches, drawn: int) -> str:
    count = len(matches)
    if not count:
        return "no matches"
    text = "1 match" if count == 1 else f"{count:,} matches"
    if drawn < count:
        text = f"{drawn:,} of {text}"
    estimate = matches.estimate
    if estimate is None:
        return text
    name = estimate.kind if estimate.kind == "homography" else f"{estimate.kind} matrix"
    if estimate.matrix is None:
        return f"{text}, no {name} found"
    return f"{text}, {int(estimate.inliers.sum()):,} agree with the {name}"


def _dense_grid(points1: FloatArray, certainty: npt.ArrayLike | None, size0: Size) -> tuple[FloatArray, FloatArray]:
    """Resize dense points and certainty to the displayed size of image 0: (h w 2), (h w)."""
    if points1.ndim != 3 or points1.shape[2] != 2:
        raise DataError(
            f"A warp must be a homography (3, 3) or points (h, w, 2), not an array of shape {points1.shape}."
        )
    weight = np.ones(points1.shape[:2]) if certainty is None else np.asarray(certainty, dtype=np.float64)
    if weight.shape != points1.shape[:2]:
        raise DataError(f"The certainty has shape {weight.shape} for points of shape {points1.shape}; make them equal.")
    size = _fitted(size0, ((_WIDTH_PX - _GAP_PX) // 2, _HEIGHT_PX))
    channels = [
        np.asarray(Image.fromarray(channel.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))
        for channel in (points1[..., 0], points1[..., 1], weight)
    ]
    return np.stack(channels[:2], axis=-1).astype(np.float64), np.clip(np.nan_to_num(channels[2]), 0, 1)


def _pulled(image: Image.Image, grid: FloatArray, shown_of: Size) -> FloatArray:
    """Sample colors of an image at the positions of a grid (h, w, 2) over an image of size `shown_of`: (h w 3)."""
    # Downscale to the displayed size first, to avoid aliasing of thin structures.
    ratio = min(1.0, grid.shape[1] / shown_of[0])
    small = _resized(image, (max(round(image.width * ratio), 1), max(round(image.height * ratio), 1)))
    return sample_bilinear(np.asarray(small), resize_points(grid, image.size, small.size))


def _mixed(below: FloatArray, above: FloatArray, weight: FloatArray) -> Drawing:
    """Blend colors `above` over colors `below` by weights (h, w) from 0 to 1."""
    share = weight[..., None]
    return np.clip(np.round(below * (1 - share) + above * share), 0, 255).astype(np.uint8).view(Drawing)
