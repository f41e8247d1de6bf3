"""Search over simulated views: if viewpoints differ too much to match, both images are warped toward each other.

An affine view of an image foreshortens it, which cancels most of the foreshortening of the other image. All pairs of
views are compared by the nearest neighbors of their coarse cells alone. The best pairs are matched and verified.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from dualrc.matcher.features import FeaturePair, ImageFeatures
from dualrc.matcher.verify import Verified, side_by_side, verify
from dualrc.matcher.views import Shown, View, extract_shown, match_seen, rounded, show
from dualrc.matches import Matches
from dualrc.pixels import STRIDE, image_center
from dualrc.types import FloatArray, Size

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher

# Long side at which views are compared, as a share of the network input.
# The start of a second pass needs no more detail.
_SHARE = 0.47
# Factor between the tilts of the quick search. The network tolerates what remains.
_TILT_STEP = 3.0
# Views whose features are in memory at a time, and views of image 1 that are compared at a time.
_TOGETHER, _COMPARED = 16, 32
# Steps (x, y) to the adjacent cells.
_AROUND = [(x, y) for y in (-1, 0, 1) for x in (-1, 0, 1) if (x, y) != (0, 0)]
# Standard deviation of gray levels below which a coarse cell has no texture.
_LEAST_DEVIATION = 4.0
# Range of the distance between the matches of adjacent cells, and the deviation from their common similarity, in cells.
_STEPS, _DEVIATION = (0.5, 2.9), 0.75
# Neighbors that agree by chance, and the number of matches below which chance is not averaged out.
_BY_CHANCE, _FEW = 2, 20
_LEAST_SIDE = 48


@dataclass(frozen=True, kw_only=True)
class ViewSearch:
    """The views that are compared, and how many pairs of them are matched."""

    # Tilts, as the ratio of foreshortening, and the number of directions of each. A larger tilt needs more directions.
    tilts: tuple[tuple[float, int], ...]
    # Whether image 0 is also rotated by 90, 180 and 270 degrees.
    rotated: bool
    # Bounds in pixels on the long side at which views are compared, and its factors.
    bounds: tuple[int, int]
    factors: tuple[float, ...]
    # Number of pairs of views that are matched and verified geometrically, and the agreement that they need.
    verified: int
    least_agreement: float


def thorough_search(*, rotated: bool) -> ViewSearch:
    """Return the search of the higher qualities."""
    return ViewSearch(
        tilts=((2.0, 4), (4.0, 8)),
        rotated=rotated,
        bounds=(320, 480),
        factors=(1.0, 0.5),
        verified=16,
        least_agreement=0.0,
    )


def quick_search(max_tilt: float) -> ViewSearch:
    """Return the search of the standard quality: few views, and an end if none of them agree more than by chance."""
    tilts = [_TILT_STEP**step for step in range(1, 1 + int(np.log(max_tilt) / np.log(_TILT_STEP) + 1e-6))]
    return ViewSearch(
        tilts=tuple((tilt, round(2 * tilt)) for tilt in tilts),
        rotated=False,
        bounds=(320, 320),
        factors=(1.0,),
        verified=4,
        # One unrelated pair in ten agrees more.
        least_agreement=1.5,
    )


class Simulated(NamedTuple):
    """An affine view of an image: foreshortened by `tilt` along a direction."""

    tilt: float
    direction_deg: float


class Cells(NamedTuple):
    """Coarse cells of a view that can be compared."""

    # (n c) Unit features.
    features: Tensor
    # (n 2) Column and row in the view.
    place: Tensor
    # (n 8) Adjacent cells, n where there is none.
    around: Tensor


def simulated_views(search: ViewSearch) -> Iterator[Simulated]:
    """Yield the views of an image, without rotations."""
    yield Simulated(1.0, 0.0)
    for tilt, directions in search.tilts:
        yield from (Simulated(tilt, 180.0 * step / directions) for step in range(directions))


def affine_view(image: Size, side: int, simulated: Simulated) -> View | None:
    """Return the view of an image of this size with an untilted long side of `side` pixels; None if too small."""
    scale = min(1.0, side / max(image))
    direction = np.deg2rad(simulated.direction_deg)
    shrink = np.diag([1 / simulated.tilt, 1.0])
    linear = scale * _rotation(direction) @ shrink @ _rotation(-direction)
    corners = np.array([(0, 0), (image[0], 0), (0, image[1]), image]) @ linear.T
    low, high = corners.min(axis=0), corners.max(axis=0)
    width, height = (rounded(side) for side in (high - low).tolist())
    if min(width, height) < _LEAST_SIDE:
        return None
    inverse = np.linalg.inv(linear)
    # Align the centers of view and image.
    center, view_center = np.array(image_center(image)), np.array(image_center((width, height)))
    image_from_view = np.eye(3)
    image_from_view[:2, :2], image_from_view[:2, 2] = inverse, center - inverse @ view_center
    along = np.array((np.cos(direction), np.sin(direction))) * (simulated.tilt / scale)
    return View(image_from_view=image_from_view, size=(width, height), shrinks=1 / scale, blur=along)


def _rotation(angle: float) -> FloatArray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


@torch.inference_mode()
def best_views(matcher: "Matcher", features: FeaturePair, search: ViewSearch) -> list[Verified]:
    """Return matches through the pairs of views that agree most, in original pixels."""
    views = [_show_views(features[0], search), _show_views(features[1], replace(search, rotated=False))]
    agreement = view_agreement(*(_view_cells(matcher, own) for own in views)).flatten()
    best = agreement.argsort(descending=True, stable=True)[: search.verified]
    pairs = [divmod(place, len(views[1])) for place in best[agreement[best] >= search.least_agreement].tolist()]
    # Features are extracted again, because those of all views would take too much memory.
    seen = [_seen(matcher, own, {pair[number] for pair in pairs}) for number, own in enumerate(views)]

    def matched() -> Iterator[Matches]:
        for first, second in pairs:
            through, pair = (views[0][first].view, views[1][second].view), (seen[0][first], seen[1][second])
            yield match_seen(matcher, features, through, pair).matches

    return [each for each in side_by_side(verify, matched()) if each.weight > 0]


def _seen(matcher: "Matcher", views: Sequence[Shown], chosen: Iterable[int]) -> dict[int, ImageFeatures]:
    """Extract the features of the chosen views."""
    numbers = sorted(chosen)
    return dict(zip(numbers, extract_shown(matcher, [views[number] for number in numbers]), strict=True))


def _view_cells(matcher: "Matcher", views: list[Shown]) -> list[Cells]:
    """Return the coarse cells of all views."""
    parts = (range(start, min(start + _TOGETHER, len(views))) for start in range(0, len(views), _TOGETHER))
    return [coarse_cells(seen) for part in parts for seen in _seen(matcher, views, part).values()]


def _show_views(features: ImageFeatures, search: ViewSearch) -> list[Shown]:
    """Return the simulated views of an image."""
    views = []
    width, height = features.scale.input_size
    full = int(np.clip(_SHARE * max(width, height), *search.bounds))
    for side in (int(factor * full) for factor in search.factors):
        # All views of a size sample the same small image.
        small = (max(1, round(height * side / max(width, height))), max(1, round(width * side / max(width, height))))
        pixels = features.pixels.permute(2, 0, 1)[None].float()
        pixels = F.interpolate(pixels, size=small, mode="bicubic", antialias=True, align_corners=False)
        pixels = pixels[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8)
        for simulated in simulated_views(search):
            view = affine_view(features.size, side, simulated)
            if view is None:
                continue
            views.append(show(features, view, pixels))
            for _ in range(3 if search.rotated else 0):
                views.append(views[-1].rotated())
    return views


def coarse_cells(seen: ImageFeatures) -> Cells:
    """Return the coarse cells of an image that show a textured part of it."""
    features = F.normalize(seen.maps.coarse[0].float(), dim=0)
    height, width = features.shape[1:]
    gray = seen.pixels[: height * STRIDE, : width * STRIDE].float().mean(2)
    deviation = gray.unflatten(0, (height, STRIDE)).unflatten(2, (width, STRIDE)).std(dim=(1, 3))
    usable = deviation > _LEAST_DEVIATION
    if seen.maps.valid is not None:
        usable &= F.adaptive_avg_pool2d(seen.maps.valid.float(), (height, width))[0] > 0.5
    row, column = usable.nonzero().unbind(1)
    # The number of usable cells stands for a position without one.
    number = torch.full((height + 2, width + 2), len(row), device=row.device)
    number[row + 1, column + 1] = torch.arange(len(row), device=row.device)
    return Cells(
        features=features[:, row, column].T.contiguous(),
        place=torch.stack([column, row], dim=1).float(),
        around=torch.stack([number[row + 1 + y, column + 1 + x] for x, y in _AROUND], dim=1),
    )


def view_agreement(views0: list[Cells], views1: list[Cells]) -> Tensor:
    """Measure the agreement of all pairs of views: (views of image 0, views of image 1)."""
    if not views0 or not views1:
        return torch.zeros(len(views0), len(views1))
    parts = [stacked(views1[start : start + _COMPARED]) for start in range(0, len(views1), _COMPARED)]
    return torch.stack([torch.cat([cell_agreement(cells0, *part) for part in parts]) for cells0 in views0])


def stacked(views: Sequence[Cells]) -> tuple[Tensor, Tensor]:
    """Return features (v n c) and places (v n 2) of the cells of several views; those of missing cells are NaN."""
    lists = [cells.features for cells in views], [cells.place for cells in views]
    features, places = (pad_sequence(own, batch_first=True, padding_value=torch.nan) for own in lists)
    return features, places


def cell_agreement(cells0: Cells, features1: Tensor, places1: Tensor) -> Tensor:
    """Measure how many mutual nearest neighbors of cells move like those of the adjacent cells, beyond chance.

    The views of image 1 are `stacked`. The result (v) has the agreement with each of them.
    """
    count, views = len(cells0.features), len(features1)
    if not count or not features1.shape[1]:
        return cells0.features.new_zeros(views)
    # (v n m)
    cosine = (cells0.features @ features1.mT).nan_to_num(nan=-2.0)
    value, best = cosine.max(2)
    back = cosine.argmax(1).gather(1, best)
    mutual = (back == torch.arange(count, device=best.device)) & (value > -2)
    there = places1.gather(1, best[:, :, None].expand(-1, -1, 2)).masked_fill(~mutual[:, :, None], torch.nan)
    # (v n 8 2) Motion from a match to those of the adjacent cells.
    moves = F.pad(there, (0, 0, 0, 1), value=torch.nan)[:, cells0.around] - there[:, :, None]
    length = moves.norm(dim=3)
    near = (length > _STEPS[0]) & (length < _STEPS[1])
    # A similarity maps all steps by the same complex factor.
    steps = torch.view_as_complex(torch.tensor(_AROUND, dtype=torch.float32, device=best.device))
    factor = torch.where(near, torch.view_as_complex(moves) / steps, 0)
    common = factor.sum(2) / near.sum(2).clamp(min=1)
    agree = (near & ((factor - common[:, :, None]).abs() < _DEVIATION)).sum(2)
    return (agree - _BY_CHANCE).clamp(min=0).sum(1) / (mutual.sum(1) + _FEW).sqrt()
