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


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """A picture as it looks after a homography, at the size that the network sees."""

    picture_from_view: FloatArray  # 3x3, pixels of the view to those of the picture
    size: Size  # (width, height), multiples of 16
    shrinks: float = 1.0  # how many times smaller things are in the view than in the picture, about its middle

    @staticmethod
    def resized(picture: Size, size: Size) -> "View":
        """The whole picture of one size at another."""
        ratio = float(np.sqrt(picture[0] * picture[1] / (size[0] * size[1])))
        return View(picture_from_view=geometry.resize_homography(size, picture), size=size, shrinks=ratio)

    def is_resized(self, picture: Size) -> bool:
        """Whether the view is the whole picture at another size."""
        return np.array_equal(self.picture_from_view, geometry.resize_homography(self.size, picture))

    def places(self, picture: Size) -> FloatArray:
        """Where the view's pixels are in a picture of this size: (h, w, 2); NaN beyond the horizon."""
        # As for drawing, the places of a view's pixels in the picture are those of picture 1's in picture 0.
        return geometry.homography_grid(np.linalg.inv(self.picture_from_view), picture, self.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """What was found between two pictures, each seen as it is or through a view."""

    matches: Matches  # in the pictures' own pixels
    foothold: Foothold  # between what the network saw


def scaled_sizes(sizes: tuple[Size, Size], scale: float, longest: int = 0) -> tuple[Size, Size] | None:
    """The sizes at which things `scale` times larger in picture 1 are as large as in picture 0; None: too small.

    `sizes` are those at which the network sees the pictures now. The one that shows things larger is shrunk; then both
    are enlarged, at most twice, if their longest side is less than `longest`.
    """
    ratios = min(1.0, scale), min(1.0, 1 / scale)
    side = max(max(size) * ratio for size, ratio in zip(sizes, ratios, strict=True))
    grow = min(max(1.0, longest / side), _LARGEST_GROWTH)
    first, second = (
        (_rounded(w * ratio * grow), _rounded(h * ratio * grow)) for (w, h), ratio in zip(sizes, ratios, strict=True)
    )
    return None if min(*first, *second) < _LEAST_SIDE else (first, second)


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
    unit = pixel_to_unit(known, picture).float()[None]
    seen = F.grid_sample(images, unit, mode="bilinear", padding_mode="border", align_corners=False)
    return seen[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8), on_picture(places, picture)


def features_through(
    matcher: "Matcher", features: PictureFeatures, view: View, pixels: Tensor | None = None
) -> PictureFeatures:
    """The features of a picture in a view, in the view's pixels; `pixels`: the picture in more detail (h w 3)."""
    pixels = features.pixels if pixels is None else pixels
    whole, mask = view.is_resized(features.size), None
    if not whole:
        pixels, mask = see(pixels, features.size, view)
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
