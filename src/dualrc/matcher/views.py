"""Views: images resampled by a homography. Changes of scale are one kind of view."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc import geometry
from dualrc.agreement import Agreement, measure_agreement
from dualrc.image import Scale
from dualrc.matcher.features import FeaturePair, ImageFeatures, PendingImage, chunks, grouped
from dualrc.matcher.many import MOST_PAIRS, batch_size
from dualrc.matches import Matches
from dualrc.pixels import FINE_STRIDE, STRIDE, image_center, in_image, pixel_to_unit
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

    def depth(self, image: Size) -> float:
        """Return a number whose sign is that of the depth of all visible points of an image of this size."""
        # They lie on the same side of the horizon as the center of the image.
        return float(np.linalg.inv(self.image_from_view)[2] @ (*image_center(image), 1.0))

    def covered_by(self, image: Size) -> bool:
        """Return whether all pixels of the view show a part of an image of this size."""
        right, bottom = self.size[0] - 1, self.size[1] - 1
        corners = np.array([(0, 0, 1), (right, 0, 1), (0, bottom, 1), (right, bottom, 1)]) @ self.image_from_view.T
        if (corners[:, 2] * self.depth(image) <= 0).any():
            return False
        return bool(in_image(corners[:, :2] / corners[:, 2:], image).all())


# Views of two images; None for an image as it is.
ViewPair = tuple[View | None, View | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """Result of matching two images, each directly or through a view."""

    # In pixels of the original images.
    matches: Matches
    # Agreement between the network inputs.
    agreement: Agreement


def scale_views(
    scales: tuple[Scale, Scale], scale: float, boxes: tuple[Box | None, Box | None] = (None, None), longest: int = 0
) -> ViewPair | None:
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


def places_of(views: Sequence[View], image: Size, device: torch.device) -> Tensor:
    """Return the positions of the pixels of views of one size in an image: (v h w 2); NaN beyond the horizon."""
    rows = torch.tensor(np.stack([view.image_from_view for view in views]), dtype=torch.float32, device=device)
    front = torch.tensor([view.depth(image) for view in views], dtype=torch.float32, device=device)
    x, y = (torch.arange(side, dtype=torch.float32, device=device) for side in views[0].size)
    # Three maps (v h w).
    across, down, depth = (
        row[:, 0, None, None] * x + (row[:, 1, None] * y + row[:, 2, None])[:, :, None] for row in rows.unbind(1)
    )
    visible = depth * front[:, None, None] > 0
    return torch.stack([across / depth, down / depth], dim=3).masked_fill(~visible[..., None], torch.nan)


def see(pixels: Tensor, image: Size, views: Sequence[View]) -> tuple[Tensor, Tensor]:
    """Warp pixels, uint8 (h w 3), of an image of size `image` into views of one size and sampling: uint8 (v h w 3).

    The second result has the positions of their pixels in the image, as `places_of`.
    """
    places = places_of(views, image, pixels.device)
    source = (pixels.shape[1], pixels.shape[0])
    shrinks = views[0].shrinks * float(np.sqrt(source[0] * source[1] / (image[0] * image[1])))
    images = pixels[None].permute(0, 3, 1, 2).float()
    # Downscale first to avoid aliasing.
    if shrinks > 1:
        size = (max(1, round(source[1] / shrinks)), max(1, round(source[0] / shrinks)))
        images = F.interpolate(images, size=size, mode="bicubic", antialias=True, align_corners=False)
    # grid_sample does not accept NaN, so unknown positions are placed far outside.
    known = places.nan_to_num(nan=-1e6).clamp(-1e6, 1e6)
    # (v k 1 1 2)
    steps = torch.tensor(np.stack([_steps(view) for view in views]), dtype=torch.float32, device=pixels.device)
    grid = pixel_to_unit(known[:, None] + steps[:, :, None, None], image)
    samples = F.grid_sample(
        images.expand(grid.shape[0] * grid.shape[1], -1, -1, -1),
        grid.flatten(0, 1),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    seen = samples.unflatten(0, grid.shape[:2]).mean(1)
    return seen.permute(0, 2, 3, 1).round().clamp(0, 255).to(torch.uint8), places


def _steps(view: View) -> FloatArray:
    """Return the offsets (k, 2), in image pixels, at which each pixel of a view is sampled."""
    if view.blur is None:
        return np.zeros((1, 2))
    count = _samples(view)
    return view.blur * ((np.arange(count) + 0.5) / count - 0.5)[:, None]


def _samples(view: View) -> int:
    if view.blur is None:
        return 1
    return max(1, int(np.ceil(np.linalg.norm(view.blur) / max(view.shrinks, 1.0))))


class Shown(NamedTuple):
    """An image through a view."""

    view: View
    # uint8 (h w 3)
    pixels: Tensor
    # (h w) Pixels that show a part of the image to match; None for all.
    mask: Tensor | None

    def rotated(self) -> "Shown":
        """Rotate by 90 degrees clockwise."""
        mask = None if self.mask is None else torch.rot90(self.mask, -1)
        return Shown(self.view.rotated(), torch.rot90(self.pixels, -1).contiguous(), mask)


def show(features: ImageFeatures, views: Sequence[View], pixels: Tensor | None = None) -> list[Shown]:
    """Show an image through views; `pixels` (h w 3) replaces the image as the network saw it."""
    # Views that are sampled alike are computed at once, because many small operations keep a GPU waiting.
    shown: dict[int, Shown] = {}
    for numbers in grouped((view.box, view.size, view.shrinks, _samples(view)) for view in views):
        own = [views[number] for number in numbers]
        if own[0].box is None:
            seen, places = see(features.pixels if pixels is None else pixels, features.size, own)
        else:
            # The device resizes crops, as it resizes any image.
            left, top, width, height = own[0].box
            crop = features.pixels[top : top + height, left : left + width]
            seen, places = crop.expand(len(own), -1, -1, -1), None
        shown |= zip(numbers, map(Shown, own, seen, _masks(features, own, places)), strict=True)
    return [shown[number] for number in range(len(views))]


def _masks(features: ImageFeatures, views: Sequence[View], places: Tensor | None) -> list[Tensor | None]:
    """Return the pixels of views at these places (v h w 2) that show a part of the image to match; None for crops."""
    if features.mask is not None:
        places = places_of(views, features.size, features.pixels.device) if places is None else places
        return list(_allowed(places, features.mask))
    if places is None:
        return [None for _ in views]
    extent = in_image(places, features.size)
    return [None if view.covered_by(features.size) else own for view, own in zip(views, extent, strict=True)]


def _allowed(places: Tensor, mask: BoolArray) -> Tensor:
    """Return whether places (... 2) lie on true pixels of a mask, as `inside_mask` does: (...)."""
    # A border outside the image is not allowed.
    padded = F.pad(torch.from_numpy(mask).to(places.device), (1, 1, 1, 1))
    x, y = (places.nan_to_num(nan=-1.0) + 0.5).floor().unbind(-1)
    column, row = (axis.clamp(-1, side).long() + 1 for axis, side in ((x, mask.shape[1]), (y, mask.shape[0])))
    return padded[row, column]


def extract_shown(matcher: "Matcher", shown: Sequence[Shown]) -> list[ImageFeatures]:
    """Extract features of views, in pixels of the network input; they need `restricted` before they are matched."""
    scales = [Scale(image_size=one.view.size, input_size=one.view.size) for one in shown]
    items = [PendingImage(scale=scale, pixels=one.pixels) for scale, one in zip(scales, shown, strict=True)]
    if items:
        matcher.extract(items)
    return [_with_valid(item.known(), one.mask) for item, one in zip(items, shown, strict=True)]


def _with_valid(features: ImageFeatures, mask: Tensor | None) -> ImageFeatures:
    if mask is None:
        return features
    # The pixel below and right of the center of each fine cell, as in `mask_to_cells`.
    valid = mask[FINE_STRIDE // 2 :: FINE_STRIDE, FINE_STRIDE // 2 :: FINE_STRIDE].contiguous()
    return replace(features, maps=replace(features.maps, valid=valid[None]))


def restricted(features: ImageFeatures, shown: Shown) -> ImageFeatures:
    """Return the features of a view with its mask, which takes a transfer from the device."""
    return features if shown.mask is None else replace(features, mask=shown.mask.cpu().numpy())


def match_views(
    matcher: "Matcher",
    features: FeaturePair,
    views: Sequence[ViewPair],
    pixels: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Iterator[Look]:
    """Match two images through pairs of views, in this order; None uses the features as they are."""
    for part in chunks(views, _at_once(matcher, features)):
        columns = [pair[0] for pair in part], [pair[1] for pair in part]
        shown = [
            one
            for own, column, detail in zip(features, columns, pixels, strict=True)
            for one in show(own, [view for view in column if view is not None], detail)
        ]
        extracted = map(restricted, extract_shown(matcher, shown), shown)
        first, second = (
            [own if view is None else next(extracted) for view in column]
            for own, column in zip(features, columns, strict=True)
        )
        yield from match_seen(matcher, features, part, list(zip(first, second, strict=True)))


def _at_once(matcher: "Matcher", features: FeaturePair) -> int:
    """Return the number of pairs of views whose features are extracted at once; views are rarely larger than images."""
    if matcher.device.type != "cuda":
        return 1
    spare = matcher.budget.spare((features[0].scale, features[1].scale))
    return max(1, min(MOST_PAIRS, int(spare // (features[0].bytes + features[1].bytes))))


def match_seen(
    matcher: "Matcher", features: FeaturePair, views: Sequence[ViewPair], seen: Sequence[FeaturePair]
) -> Iterator[Look]:
    """Match two images by the features `seen` through pairs of views, in this order; equal sizes form a batch."""
    scales = [(first.scale, second.scale) for first, second in seen]
    batches = [batch for group in grouped(scales) for batch in chunks(group, batch_size(matcher, scales[group[0]]))]
    batch_of = {number: batch for batch in batches for number in batch}
    found: dict[int, Look] = {}
    for number in range(len(seen)):
        if number not in found:
            batch = batch_of[number]
            for each, matches in zip(batch, matcher.match_plain([seen[each] for each in batch]), strict=True):
                found[each] = _look(features, views[each], seen[each], matches)
        yield found.pop(number)


def _look(features: FeaturePair, views: ViewPair, seen: FeaturePair, found: Matches) -> Look:
    """Return matches between views in pixels of the images, without those in blank areas or outside of the masks."""
    # Areas without texture match themselves at the same distance from the border, whatever the views show.
    found = without_blank_areas(found, [own.seen for own in seen])
    agreement, points = measure_agreement(found), [found.points0, found.points1]
    for number, view in enumerate(views):
        if view is not None:
            points[number] = geometry.apply_homography(view.image_from_view, points[number]).astype(np.float32)
    found = replace(found, points0=points[0], points1=points[1], size0=features[0].size, size1=features[1].size)
    whole = (np.ones((f.size[1], f.size[0]), dtype=bool) if f.mask is None else f.mask for f in features)
    return Look(matches=found.inside(*whole), agreement=agreement)
