"""Views: a picture resampled by a homography, as it looks from elsewhere. Scales are one family of views."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc import geometry
from dualrc.image import Scale
from dualrc.matcher.features import PendingImage, PictureFeatures
from dualrc.matcher.foothold import Foothold, vote
from dualrc.matches import Matches, inside_mask
from dualrc.pixels import STRIDE, on_picture, pixel_to_unit
from dualrc.types import BoolArray, FloatArray, Size

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher

_LARGEST_GROWTH = 2.0
_LEAST_SIDE = 64  # pixels of a view: with fewer cells, what agrees agrees by chance

Box = tuple[int, int, int, int]  # left, top, width and height, in pixels of what the network saw


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """A picture as it looks after a homography, at the size that the network sees."""

    picture_from_view: FloatArray  # 3x3, pixels of the view to those of the picture
    size: Size  # (width, height), multiples of 16
    shrinks: float = 1.0  # how many times smaller things are in the view than in the picture, about its middle

    box: Box | None = None  # the view is this part of what the network saw of the picture, resized
    # Each pixel of the view is a mean along this vector (2,) of the image, where the view is foreshortened.
    blur: FloatArray | None = None

    @staticmethod
    def part(own: Scale, box: Box, size: Size) -> "View":
        """A part of what the network saw of a picture, or all of it, at another size."""
        left, top, width, height = box
        seen_from_view = geometry.crop_homography(-left, -top) @ geometry.resize_homography(size, (width, height))
        picture_from_seen = geometry.resize_homography(own.input_size, own.image_size)
        ratio = np.sqrt(width * height / (size[0] * size[1])) * own.image_size[0] / own.input_size[0]
        return View(picture_from_view=picture_from_seen @ seen_from_view, size=size, shrinks=float(ratio), box=box)

    def places(self, picture: Size) -> FloatArray:
        """Where the view's pixels are in a picture of this size: (h, w, 2); NaN beyond the horizon."""
        # As for drawing, the places of a view's pixels in the picture are those of picture 1's in picture 0.
        return geometry.homography_grid(np.linalg.inv(self.picture_from_view), picture, self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """What was found between two pictures, each seen as it is or through a view."""

    matches: Matches  # in the pictures' own pixels
    foothold: Foothold  # between what the network saw


def scale_views(
    scales: tuple[Scale, Scale], scale: float, boxes: tuple[Box | None, Box | None] = (None, None), longest: int = 0
) -> tuple[View | None, View | None] | None:
    """Views in which things `scale` times larger in picture 1 are as large as in picture 0; None: too small for that.

    `scale` is that between the pictures as the network sees them now, and boxes are parts of that to look at. The
    picture that shows things larger is shrunk; then both are enlarged, at most twice, if their longest side is less
    than `longest`. A picture that stays as it is needs no view.
    """
    parts = [box or (0, 0, *own.input_size) for box, own in zip(boxes, scales, strict=True)]
    ratios = min(1.0, scale), min(1.0, 1 / scale)
    side = max(max(part[2:]) * ratio for part, ratio in zip(parts, ratios, strict=True))
    grow = min(max(1.0, longest / side), _LARGEST_GROWTH)
    views: list[View | None] = []
    for own, part, ratio in zip(scales, parts, ratios, strict=True):
        size = (_rounded(part[2] * ratio * grow), _rounded(part[3] * ratio * grow))
        if min(size) < _LEAST_SIDE:
            return None
        views.append(None if part == (0, 0, *size) == (0, 0, *own.input_size) else View.part(own, part, size))
    return views[0], views[1]


def _rounded(side: float) -> int:
    return max(1, round(side / STRIDE)) * STRIDE


def see(pixels: Tensor, picture: Size, view: View) -> tuple[Tensor, BoolArray]:
    """A picture of this size in a view: uint8 (h w 3), at whatever size it is given, and where that shows it (h, w)."""
    places = view.places(picture)
    source = (pixels.shape[1], pixels.shape[0])
    shrinks = view.shrinks * float(np.sqrt(source[0] * source[1] / (picture[0] * picture[1])))
    images = pixels[None].permute(0, 3, 1, 2).float()
    if shrinks > 1:  # scaled down first, so that nothing aliases
        size = (max(1, round(source[1] / shrinks)), max(1, round(source[0] / shrinks)))
        images = F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)
    # Far outside is outside: grid_sample takes no NaN.
    known = torch.from_numpy(np.nan_to_num(places, nan=-1e6).clip(-1e6, 1e6)).to(pixels.device)
    seen = torch.stack(
        [
            F.grid_sample(
                images,
                pixel_to_unit(known + torch.from_numpy(step).to(known), picture).float()[None],
                mode="bilinear",
                padding_mode="border",
                align_corners=False,
            )
            for step in _steps(view)
        ]
    ).mean(0)
    return seen[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8), on_picture(places, picture)


def _steps(view: View) -> list[FloatArray]:
    """Return the offsets, in image pixels, at which each pixel of a view is sampled."""
    if view.blur is None:
        return [np.zeros(2)]
    count = max(1, int(np.ceil(np.linalg.norm(view.blur) / max(view.shrinks, 1.0))))
    return [view.blur * ((number + 0.5) / count - 0.5) for number in range(count)]


def features_through(
    matcher: "Matcher", features: PictureFeatures, view: View, pixels: Tensor | None = None
) -> PictureFeatures:
    """The features of a picture in a view, in the view's pixels; `pixels`: the picture in more detail (h w 3)."""
    mask: BoolArray | None = None
    if view.box is not None:  # resized on the device, as any picture is
        left, top, width, height = view.box
        pixels = features.pixels[top : top + height, left : left + width]
    else:
        pixels, shown = see(features.pixels if pixels is None else pixels, features.size, view)
        mask = None if shown.all() else shown
    if features.mask is not None:
        allowed = inside_mask(view.places(features.size).reshape(-1, 2), features.mask).reshape(view.size[::-1])
        mask = allowed if mask is None else mask & allowed
    item = PendingImage(scale=Scale(image_size=view.size, input_size=view.size), pixels=pixels)
    matcher.extract([item])
    return matcher.masked(item.known(), mask)


def match_views(
    matcher: "Matcher",
    features: tuple[PictureFeatures, PictureFeatures],
    views: tuple[View | None, View | None],
    pixels: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Look:
    """Match two pictures through views; None: as the features are."""
    seen = [
        own if view is None else features_through(matcher, own, view, detail)
        for own, view, detail in zip(features, views, pixels, strict=True)
    ]
    found = next(matcher.match_plain([(seen[0], seen[1])]))
    foothold, points = vote(found), [found.points0, found.points1]
    for number, view in enumerate(views):
        if view is not None:
            points[number] = geometry.apply_homography(view.picture_from_view, points[number]).astype(np.float32)
    found = replace(found, points0=points[0], points1=points[1], size0=features[0].size, size1=features[1].size)
    whole = (np.ones((f.size[1], f.size[0]), dtype=bool) if f.mask is None else f.mask for f in features)
    return Look(matches=found.inside(*whole), foothold=foothold)
