"""Warping of images into the frame of another image, and panoramas of several images."""

import warnings
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dualrc import geometry
from dualrc.draw import Drawing
from dualrc.errors import ConfigError, DataError
from dualrc.image import ImageInput, read
from dualrc.matcher import Matcher, load
from dualrc.matches import Estimate, Warp
from dualrc.pixels import image_center, in_image, resize_points
from dualrc.types import BoolArray, FloatArray, ImageArray, Size

# Number of matches of a pair to which a homography is fitted.
_TOP = 4000
# Inlier threshold as a share of the long side. It is wide, because hand-held cameras do not rotate about their center.
_THRESHOLD = 0.004
# Smallest number of inliers, and smallest inlier ratio.
_FEWEST, _SHARE = 60, 0.2
# Largest number of images of which all pairs are matched. More images are assumed to be in order.
# Each of them is matched with the next three.
_ALL_PAIRS, _AHEAD = 8, 3
# Largest canvas, as a multiple of the total area of the images. Beyond it, a planar panorama is unsuitable.
_WIDEST = 6.0
# Band limit in canvas pixels: finer detail comes from few images, coarser content is averaged.
_BAND = 32
# Power of the weights that blend fine detail.
_SHARP = 16
# Number of canvas rows that are sampled per step.
_ROWS = 256
# Standard deviations of log brightness: of exposures, and of overlaps by chance.
_GAIN_SPREAD, _GAIN_NOISE = 0.1, 0.02


def warp_image(
    image: ImageInput,
    transform: npt.ArrayLike | Estimate | Warp,
    size: Size | None = None,
    *,
    min_certainty: float = 0.1,
) -> Drawing:
    """Warp an image into the frame of another one, RGBA (height, width, 4); alpha is 0 where it is not visible.

    A homography (3, 3), or an Estimate of one, warps image 0 into the frame of image 1, whose `size` (width, height) is
    required. A Warp warps image 1 into the frame of image 0, where its certainty is above `min_certainty`.
    """
    pixels = read(image)
    own = (pixels.shape[1], pixels.shape[0])
    places: FloatArray
    if isinstance(transform, Warp):
        if own != transform.size1:
            raise DataError(
                f"The image has {own[0]}x{own[1]} pixels, but the warp is for an image of "
                f"{transform.size1[0]}x{transform.size1[1]}; give image 1 of the warp."
            )
        places, known = np.asarray(transform.points1, dtype=np.float64), transform.certainty > min_certainty
    else:
        if size is None:
            raise ConfigError("A homography maps to another image of unknown size; give its size=(width, height).")
        places = geometry.homography_grid(_homography(transform), own, size)
        known = np.ones(places.shape[:2], dtype=bool)
    known = known & in_image(places, own)
    return _with_alpha(_sampled(pixels, places, known), known)


def panorama(
    images: Sequence[ImageInput],
    *,
    matcher: Matcher | None = None,
    reference: int | None = None,
    max_pixels: int = 12_000_000,
) -> Drawing:
    """Combine images taken from one position, or of one plane, into a panorama: RGBA (height, width, 4).

    All pairs of up to eight images are matched; more images are assumed to be in order. Images that overlap with no
    other are left out, with a warning. `reference` is the index of the image whose frame is kept; None selects the
    central one. Exposures are balanced, coarse brightness is averaged over overlaps, and fine detail comes from one
    image.
    """
    if len(images) < 2:
        raise DataError("A panorama needs at least two images; give more.")
    if reference is not None and not 0 <= reference < len(images):
        raise ConfigError(f"reference = {reference} is not an image index; choose one from 0 to {len(images) - 1}.")
    arrays = [read(image) for image in images]
    links = _links(arrays, matcher or load())
    frames = _frames(links, len(arrays), reference)
    if len(frames) < 2:
        raise DataError(
            "No two of these images could be joined; give images that overlap, taken from one position or of one plane."
        )
    left_out = [number for number in range(len(arrays)) if number not in frames]
    if left_out:
        names = ", ".join(str(number) for number in left_out)
        warnings.warn(f"Images left out of the panorama, because they overlap with no other: {names}.", stacklevel=2)
    sizes = {number: (arrays[number].shape[1], arrays[number].shape[0]) for number in frames}
    frames, size = _canvas(frames, sizes, max_pixels)
    return _blended({number: arrays[number] for number in frames}, frames, size)


def _homography(transform: npt.ArrayLike | Estimate) -> FloatArray:
    if isinstance(transform, Estimate):
        if transform.matrix is None or transform.kind != "homography":
            reason = transform.info.get("reason", f"it is a {transform.kind} matrix")
            raise DataError(f"This estimate has no homography ({reason}); estimate one, or give a Warp.")
        transform = transform.matrix
    matrix = np.asarray(transform, dtype=np.float64)
    if matrix.shape != (3, 3):
        raise DataError(f"A homography must have shape (3, 3), not {matrix.shape}.")
    return matrix


def _links(images: list[ImageArray], matcher: Matcher) -> dict[tuple[int, int], tuple[FloatArray, int]]:
    """Return the homographies between overlapping images, from the first to the second, and their inlier counts."""
    count = len(images)
    pairs = [(i, j) for i, j in combinations(range(count), 2) if count <= _ALL_PAIRS or j - i <= _AHEAD]
    features = [matcher.features(image) for image in images]
    links = {}
    for i, j in pairs:
        # Most pairs of a long panorama have nothing in common, and none have tilted views.
        matches = matcher.match_features(features[i], features[j], top=_TOP, max_tilt=1)
        threshold_px = _THRESHOLD * max(matches.size1)
        fit = geometry.estimate(matches, "homography", threshold_px=threshold_px, min_inliers=_FEWEST)
        agree = int(fit.inliers.sum())
        if fit.matrix is not None and agree >= _SHARE * len(matches):
            links[i, j] = (fit.matrix, agree)
    return links


def _frames(
    links: dict[tuple[int, int], tuple[FloatArray, int]], count: int, reference: int | None
) -> dict[int, FloatArray]:
    """Return homographies into the frame of the reference, along the links with the most inliers."""
    tree: dict[int, list[int]] = {number: [] for number in range(count)}
    # Connected component of each image in the forest so far.
    part = list(range(count))
    for (i, j), _ in sorted(links.items(), key=lambda item: -item[1][1]):
        if part[i] != part[j]:
            tree[i].append(j)
            tree[j].append(i)
            old, new = part[i], part[j]
            part = [new if own == old else own for own in part]
    if reference is None:
        largest = max(part, key=part.count)
        members = [number for number in range(count) if part[number] == largest]
        # The center of the tree: the image whose longest path is shortest.
        reference = min(members, key=lambda number: max(_steps(tree, number).values()))
    frames: dict[int, FloatArray] = {reference: np.eye(3)}
    # Breadth first.
    for number in _steps(tree, reference):
        for other in tree[number]:
            if other not in frames:
                pair = links.get((other, number))
                step = pair[0] if pair is not None else np.linalg.inv(links[number, other][0])
                frames[other] = frames[number] @ step
    return frames


def _steps(tree: dict[int, list[int]], start: int) -> dict[int, int]:
    """Return the number of links to each image, nearest first."""
    steps, queue = {start: 0}, [start]
    for number in queue:
        for other in tree[number]:
            if other not in steps:
                steps[other] = steps[number] + 1
                queue.append(other)
    return steps


def _canvas(
    frames: dict[int, FloatArray], sizes: dict[int, Size], max_pixels: int
) -> tuple[dict[int, FloatArray], Size]:
    """Return homographies from the images to a canvas that contains all of them, and its size."""
    corners = []
    for number, H in frames.items():
        width, height = sizes[number]
        edge = np.linspace(0, 1, 9)
        across, down = edge * (width - 1), edge * (height - 1)
        outline = np.concatenate(
            [np.stack([across, 0 * across + y], 1) for y in (0, height - 1)]
            + [np.stack([0 * down + x, down], 1) for x in (0, width - 1)]
        )
        depth = outline @ H[2, :2] + H[2, 2]
        middle = H[2, :2] @ image_center(sizes[number]) + H[2, 2]
        if not (depth * middle > 0).all():
            raise DataError(_TOO_WIDE)
        corners.append(geometry.apply_homography(H, outline))
    points = np.concatenate(corners)
    low, high = points.min(axis=0), points.max(axis=0)
    extent = high - low + 1
    if not np.isfinite(extent).all() or extent.prod() > _WIDEST * sum(w * h for w, h in sizes.values()):
        raise DataError(_TOO_WIDE)
    ratio = min(1.0, float(np.sqrt(max_pixels / extent.prod())))
    full = (int(np.ceil(extent[0])), int(np.ceil(extent[1])))
    size = (max(1, int(full[0] * ratio)), max(1, int(full[1] * ratio)))
    placed = geometry.resize_homography(full, size) @ geometry.crop_homography(*low)
    return {number: placed @ H for number, H in frames.items()}, size


_TOO_WIDE = "These images span too wide an angle for a planar panorama; give fewer images, or another reference."


def _blended(images: dict[int, ImageArray], frames: dict[int, FloatArray], size: Size) -> Drawing:
    """Blend the images on one canvas."""
    gains = _gains(images, frames, size)
    width, height = size
    coarse, fine = torch.zeros(3, height, width), torch.zeros(3, height, width)
    coarse_weight, fine_weight = torch.zeros(height, width), torch.full((height, width), 1e-37)
    for number, image in images.items():
        left, top, right, bottom = _box(frames[number], image, size)
        values, weight = _placed(image, frames[number], (left, top, right, bottom))
        values = values * gains[number][:, None, None]
        known = (weight > 0).float()
        smooth = _smooth(values * known) / _smooth(known[None]).clamp(min=1e-6)
        part = slice(top, bottom), slice(left, right)
        coarse[:, *part] += smooth * weight
        coarse_weight[part] += weight
        sharp = weight**_SHARP
        fine[:, *part] += (values - smooth) * sharp
        fine_weight[part] += sharp
    shown = (coarse_weight > 0).numpy()
    colors = coarse / coarse_weight.clamp(min=1e-6) + fine / fine_weight
    return _with_alpha(colors.permute(1, 2, 0).numpy(), shown)


def _box(H: FloatArray, image: ImageArray, size: Size) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the part of the canvas that an image covers."""
    height, width = image.shape[:2]
    corners = geometry.apply_homography(H, [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)])
    left, top = np.clip(np.floor(corners.min(axis=0)).astype(int), 0, np.array(size) - 1)
    right, bottom = np.clip(np.ceil(corners.max(axis=0)).astype(int) + 1, (left + 1, top + 1), size)
    return int(left), int(top), int(right), int(bottom)


def _placed(image: ImageArray, H: FloatArray, box: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Warp an image to a part of the canvas: colors (3 h w), and a weight (h w) that falls to 0 at the border."""
    left, top, right, bottom = box
    own = (image.shape[1], image.shape[0])
    places = geometry.homography_grid(geometry.crop_homography(left, top) @ H, own, (right - left, bottom - top))
    known = in_image(places, own)
    values = _sampled(image, places, known)
    # 0 at the borders, 1 in the center.
    inward = 1 - np.abs((places + 0.5) / own * 2 - 1)
    weight = np.where(known, np.clip(inward, 0.02, 1).min(axis=2), 0.0)
    return torch.from_numpy(values.astype(np.float32)).permute(2, 0, 1), torch.from_numpy(weight.astype(np.float32))


def _smooth(values: Tensor) -> Tensor:
    """Remove detail finer than the band limit: (c h w) -> (c h w)."""
    height, width = values.shape[1:]
    cells = (max(1, height // _BAND), max(1, width // _BAND))
    coarse = F.interpolate(values[None], size=cells, mode="area")
    return F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)[0]


def _gains(images: dict[int, ImageArray], frames: dict[int, FloatArray], size: Size) -> dict[int, Tensor]:
    """Return the gains (3,) that make the exposures of overlapping images agree, from a small canvas."""
    small = (max(1, size[0] // 8), max(1, size[1] // 8))
    shrink = geometry.resize_homography(size, small)
    logs, knowns = [], []
    for number, image in images.items():
        values, weight = _placed(image, shrink @ frames[number], (0, 0, *small))
        logs.append(torch.log(values.clamp(min=1) + 4).double().numpy())
        knowns.append((weight > 0).numpy())
    count = len(logs)
    # Least squares: overlaps should agree, and gains should be close to 1.
    normal, target = np.eye(count) / _GAIN_SPREAD**2, np.zeros((count, 3))
    for i, j in combinations(range(count), 2):
        shared = knowns[i] & knowns[j]
        if shared.sum() < 16:
            continue
        difference = np.median(logs[i][:, shared] - logs[j][:, shared], axis=1)
        strength = 1 / _GAIN_NOISE**2
        normal[[i, j], [i, j]] += strength
        normal[[i, j], [j, i]] -= strength
        target[i] -= strength * difference
        target[j] += strength * difference
    found = np.exp(np.linalg.solve(normal, target)).astype(np.float32)
    return {number: torch.from_numpy(row) for number, row in zip(images, found, strict=True)}


def _sampled(image: ImageArray, places: FloatArray, known: BoolArray) -> FloatArray:
    """Sample an image at positions (h, w, 2), 0 where unknown: (h, w, 3); downscaled first to avoid aliasing."""
    shrinks = _shrinks(places, known)
    own = (image.shape[1], image.shape[0])
    if shrinks > 1:
        smaller = (max(1, round(own[0] / shrinks)), max(1, round(own[1] / shrinks)))
        image = np.asarray(Image.fromarray(image).resize(smaller, Image.Resampling.LANCZOS))
    size = (image.shape[1], image.shape[0])
    values = np.zeros((*places.shape[:2], 3), dtype=np.float32)
    # A few rows at a time, because sampling needs some hundred bytes per pixel.
    for start in range(0, len(places), _ROWS):
        rows = slice(start, start + _ROWS)
        at = np.where(known[rows][..., None], resize_points(places[rows], own, size), np.nan)
        values[rows] = geometry.sample_bilinear(image, at)
    return values


def _shrinks(places: FloatArray, known: BoolArray) -> float:
    """Return the median size of a pixel of the frame, in pixels of the image."""
    right, below = places[:-1, 1:] - places[:-1, :-1], places[1:, :-1] - places[:-1, :-1]
    area = np.abs(right[..., 0] * below[..., 1] - right[..., 1] * below[..., 0])
    inner = known[:-1, :-1] & known[:-1, 1:] & known[1:, :-1] & np.isfinite(area)
    return float(np.sqrt(np.median(area[inner]))) if inner.any() else 1.0


def _with_alpha(values: FloatArray, known: BoolArray) -> Drawing:
    colors = np.where(known[..., None], values.round().clip(0, 255), 255).astype(np.uint8)
    return np.concatenate([colors, known[..., None].astype(np.uint8) * 255], axis=2).view(Drawing)
