"""Views: images resampled by a homography. Changes of scale are one kind of view."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc import geometry
from dualrc.agreement import Agreement, measure_agreement
from dualrc.image import Scale
from dualrc.matcher.features import FeaturePair, ImageFeatures, PendingImage
from dualrc.matches import Matches, inside_mask
from dualrc.pixels import STRIDE, image_center, in_image, pixel_to_unit
from dualrc.texture import without_blank_areas
from dualrc.types import BoolArray, FloatArray, Size

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher

# Largest factor by which a crop is enlarged.
LARGEST_GROWTH = 2.0
# Shortest side of a view in pixels. In smaller views, matches agree by chance.
LEAST_SIDE = 64

# Left, top, width and height in pixels of the network input.
Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """An image warped by a homography, at the size of the network input."""

    # (3, 3) From pixels of the view to pixels of the image.
    image_from_view: FloatArray
    # (width, height), multiples of 16
    size: Size
    # Factor by which the view is smaller than the image, near its center.
    shrinks: float = 1.0

    # Set if the view is this crop of the network input, resized.
    box: Box | None = None
    # (2,) Vector in image pixels that each pixel of the view averages over, so that foreshortened views do not alias.
    blur: FloatArray | None = None

    @staticmethod
    def part(own: Scale, box: Box, size: Size) -> "View":
        """Create a view of a crop of the network input, or of all of it, at another size."""
        left, top, width, height = box
        seen_from_view = geometry.crop_homography(-left, -top) @ geometry.resize_homography(size, (width, height))
        image_from_seen = geometry.resize_homography(own.input_size, own.image_size)
        ratio = np.sqrt(width * height / (size[0] * size[1])) * own.image_size[0] / own.input_size[0]
        return View(image_from_view=image_from_seen @ seen_from_view, size=size, shrinks=float(ratio), box=box)

    def rotated(self) -> "View":
        """Rotate by 90 degrees clockwise."""
        width, height = self.size
        view_from_rotated = np.array([(0, 1, 0), (-1, 0, height - 1), (0, 0, 1)])
        return replace(self, image_from_view=self.image_from_view @ view_from_rotated, size=(height, width))

    def places(self, image: Size, device: torch.device) -> Tensor:
        """Return the positions of the view's pixels in an image of this size: (h w 2); NaN beyond the horizon."""
        matrix = self.image_from_view.tolist()
        x, y = (torch.arange(side, dtype=torch.float32, device=device) for side in self.size)
        across, down, depth = (row[0] * x + (row[1] * y + row[2])[:, None] for row in matrix)
        # Visible points lie on the same side of the horizon as the center of the image.
        visible = depth * float(np.linalg.inv(self.image_from_view)[2] @ (*image_center(image), 1.0)) > 0
        return torch.stack([across / depth, down / depth], dim=2).masked_fill(~visible[:, :, None], torch.nan)


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """Result of matching two images, each directly or through a view."""

    # In pixels of the original images.
    matches: Matches
    # Agreement between the network inputs.
    agreement: Agreement


def scale_views(
    scales: tuple[Scale, Scale], scale: float, boxes: tuple[Box | None, Box | None] = (None, None), longest: int = 0
) -> tuple[View | None, View | None] | None:
    """Return views that compensate for a scale factor from image 0 to image 1; None if a view would be too small.

    `scale` relates the current network inputs, and boxes are crops of them. The image with the larger scale is shrunk.
    Then both are enlarged, at most twice, if their longest side is below `longest`. An image that does not change needs
    no view.
    """
    parts = [box or (0, 0, *own.input_size) for box, own in zip(boxes, scales, strict=True)]
    ratios = min(1.0, scale), min(1.0, 1 / scale)
    side = max(max(part[2:]) * ratio for part, ratio in zip(parts, ratios, strict=True))
    grow = min(max(1.0, longest / side), LARGEST_GROWTH)
    views: list[View | None] = []
    for own, part, ratio in zip(scales, parts, ratios, strict=True):
        size = (rounded(part[2] * ratio * grow), rounded(part[3] * ratio * grow))
        if min(size) < LEAST_SIDE:
            return None
        views.append(None if part == (0, 0, *size) == (0, 0, *own.input_size) else View.part(own, part, size))
    return views[0], views[1]


def rounded(side: float) -> int:
    """Round a side to a multiple of the stride, at least one."""
    return max(1, round(side / STRIDE)) * STRIDE


def see(pixels: Tensor, image: Size, view: View) -> tuple[Tensor, BoolArray]:
    """Warp pixels, uint8 (h w 3), of an image of size `image` into a view; return the mask of its extent (h, w)."""
    places = view.places(image, pixels.device)
    source = (pixels.shape[1], pixels.shape[0])
    shrinks = view.shrinks * float(np.sqrt(source[0] * source[1] / (image[0] * image[1])))
    images = pixels[None].permute(0, 3, 1, 2).float()
    # Downscale first to avoid aliasing.
    if shrinks > 1:
        size = (max(1, round(source[1] / shrinks)), max(1, round(source[0] / shrinks)))
        images = F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)
    # grid_sample does not accept NaN, so unknown positions are placed far outside.
    known = places.nan_to_num(nan=-1e6).clamp(-1e6, 1e6)
    seen = torch.stack(
        [
            F.grid_sample(
                images,
                pixel_to_unit(known + torch.from_numpy(step).to(known), image)[None],
                mode="bilinear",
                padding_mode="border",
                align_corners=False,
            )
            for step in _steps(view)
        ]
    ).mean(0)
    return seen[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8), in_image(places, image).cpu().numpy()


def _steps(view: View) -> list[FloatArray]:
    """Return the offsets, in image pixels, at which each pixel of a view is sampled."""
    if view.blur is None:
        return [np.zeros(2)]
    count = max(1, int(np.ceil(np.linalg.norm(view.blur) / max(view.shrinks, 1.0))))
    return [view.blur * ((number + 0.5) / count - 0.5) for number in range(count)]


class Shown(NamedTuple):
    """An image through a view."""

    view: View
    # uint8 (h w 3)
    pixels: Tensor
    # (h, w) Pixels that show a part of the image to match; None for all.
    mask: BoolArray | None

    def rotated(self) -> "Shown":
        """Rotate by 90 degrees clockwise."""
        mask = None if self.mask is None else np.rot90(self.mask, -1).copy()
        return Shown(self.view.rotated(), torch.rot90(self.pixels, -1).contiguous(), mask)


def show(features: ImageFeatures, view: View, pixels: Tensor | None = None) -> Shown:
    """Show an image through a view; `pixels` (h w 3) replaces the image as the network saw it."""
    mask: BoolArray | None = None
    # The device resizes crops, as it resizes any image.
    if view.box is not None:
        left, top, width, height = view.box
        pixels = features.pixels[top : top + height, left : left + width]
    else:
        pixels, shown = see(features.pixels if pixels is None else pixels, features.size, view)
        mask = None if shown.all() else shown
    if features.mask is not None:
        places = view.places(features.size, pixels.device).cpu().numpy()
        allowed = inside_mask(places.reshape(-1, 2), features.mask).reshape(view.size[::-1])
        mask = allowed if mask is None else mask & allowed
    return Shown(view, pixels, mask)


def extract_shown(matcher: "Matcher", shown: Sequence[Shown]) -> list[ImageFeatures]:
    """Extract features of views, in pixels of the network input."""
    scales = [Scale(image_size=one.view.size, input_size=one.view.size) for one in shown]
    items = [PendingImage(scale=scale, pixels=one.pixels) for scale, one in zip(scales, shown, strict=True)]
    matcher.extract(items)
    return [matcher.masked(item.known(), one.mask) for item, one in zip(items, shown, strict=True)]


def match_views(
    matcher: "Matcher",
    features: FeaturePair,
    views: tuple[View | None, View | None],
    pixels: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Look:
    """Match two images through views; None uses the features as they are."""
    first, second = (
        own if view is None else extract_shown(matcher, [show(own, view, detail)])[0]
        for own, view, detail in zip(features, views, pixels, strict=True)
    )
    return match_seen(matcher, features, views, (first, second))


def match_seen(
    matcher: "Matcher", features: FeaturePair, views: tuple[View | None, View | None], seen: FeaturePair
) -> Look:
    """Match two images by the features `seen` through views."""
    found = next(matcher.match_plain([seen]))
    # Areas without texture match themselves at the same distance from the border, whatever the views show.
    found = without_blank_areas(found, [own.seen for own in seen])
    agreement, points = measure_agreement(found), [found.points0, found.points1]
    for number, view in enumerate(views):
        if view is not None:
            points[number] = geometry.apply_homography(view.image_from_view, points[number]).astype(np.float32)
    found = replace(found, points0=points[0], points1=points[1], size0=features[0].size, size1=features[1].size)
    whole = (np.ones((f.size[1], f.size[0]), dtype=bool) if f.mask is None else f.mask for f in features)
    return Look(matches=found.inside(*whole), agreement=agreement)
