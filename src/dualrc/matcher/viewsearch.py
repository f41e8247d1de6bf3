"""Search over simulated views: if viewpoints differ too much to match, both images are warped toward each other.

An affine view of an image foreshortens it, which cancels most of the foreshortening of the other image. All pairs of
views are compared by the nearest neighbors of their coarse cells alone. The best pairs are matched and verified.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from dualrc.matcher.features import FeaturePair, ImageFeatures, chunks, grouped
from dualrc.matcher.verify import Verified, side_by_side, verify
from dualrc.matcher.views import Shown, View, extract_shown, match_seen, restricted, rounded, show
from dualrc.pixels import STRIDE, image_center
from dualrc.types import FloatArray, Size

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher

# Long side at which views are compared, as a share of the network input.
# The start of a second pass needs no more detail.
_SHARE = 0.47
# Factor between the tilts of the quick search. The network tolerates what remains.
_TILT_STEP = 3.0
# Views whose features are extracted at a time, and cells of each image that are compared at a time.
_TOGETHER, _COMPARED = 16, 4096
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
    # (n 8) Adjacent cells; n or more where there is none.
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
    shown0, shown1 = _show_views(features[0], search), _show_views(features[1], replace(search, rotated=False))
    shown, spare = [*shown0, *shown1], matcher.budget.spare((features[0].scale, features[1].scale))
    cells, kept = _view_cells(matcher, shown, spare)
    pairs = [
        (first, len(shown0) + second)
        for first, second in _most_agreeing(view_agreement(cells[: len(shown0)], cells[len(shown0) :]), search)
    ]
    chosen = sorted({number for pair in pairs for number in pair})
    missing = [number for number in chosen if number not in kept]
    kept |= zip(missing, extract_shown(matcher, [shown[number] for number in missing]), strict=True)
    seen = {number: restricted(kept[number], shown[number]) for number in chosen}
    # Release the features of the other views, except those in the same batch on a GPU, which share one tensor.
    del kept
    views = [(shown[first].view, shown[second].view) for first, second in pairs]
    looks = match_seen(matcher, features, views, [(seen[first], seen[second]) for first, second in pairs])
    return [each for each in side_by_side(verify, (look.matches for look in looks)) if each.weight > 0]


def _most_agreeing(agreement: FloatArray, search: ViewSearch) -> list[tuple[int, int]]:
    """Return the pairs of views to match, most agreement first."""
    best = np.argsort(-agreement, axis=None, kind="stable")[: search.verified]
    enough = best[agreement.flat[best] >= search.least_agreement]
    return [divmod(place, agreement.shape[1]) for place in enough.tolist()]


def _view_cells(
    matcher: "Matcher", shown: Sequence[Shown], spare: float
) -> tuple[list[Cells], dict[int, ImageFeatures]]:
    """Return the coarse cells of all views, and the features of as many of them as fit into `spare` bytes."""
    cells: dict[int, Cells] = {}
    kept: dict[int, ImageFeatures] = {}
    # Views of one size follow each other, because they form a batch.
    order = sorted(range(len(shown)), key=lambda number: shown[number].view.size)
    for part in chunks(order, _TOGETHER):
        seen = extract_shown(matcher, [shown[number] for number in part])
        cells |= zip(part, coarse_cells(seen), strict=True)
        spare -= sum(own.bytes for own in seen)
        if spare >= 0:
            kept |= zip(part, seen, strict=True)
        # Release these features before the next ones are extracted.
        del seen
    return [cells[number] for number in range(len(shown))], kept


def _show_views(features: ImageFeatures, search: ViewSearch) -> list[Shown]:
    """Return the simulated views of an image."""
    shown = []
    width, height = features.scale.input_size
    full = int(np.clip(_SHARE * max(width, height), *search.bounds))
    for side in (int(factor * full) for factor in search.factors):
        # All views of a size sample the same small image.
        small = (max(1, round(height * side / max(width, height))), max(1, round(width * side / max(width, height))))
        pixels = features.pixels.permute(2, 0, 1)[None].float()
        pixels = F.interpolate(pixels, size=small, mode="bicubic", antialias=True, align_corners=False)
        pixels = pixels[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8)
        views = [affine_view(features.size, side, simulated) for simulated in simulated_views(search)]
        for one in show(features, [view for view in views if view is not None], pixels):
            shown.append(one)
            for _ in range(3 if search.rotated else 0):
                shown.append(shown[-1].rotated())
    return shown


def coarse_cells(seen: Sequence[ImageFeatures]) -> list[Cells]:
    """Return the coarse cells of images that show a textured part of them."""
    groups = grouped(own.scale.input_size for own in seen)
    grids = [_textured_cells([seen[number] for number in group]) for group in groups]
    # One transfer to the host for all images.
    counts = torch.cat([count for _, count in grids]).tolist()
    numbers = [number for group in groups for number in group]
    columns = [own for grid, _ in grids for own in zip(*grid, strict=True)]
    # Copies, because slices would keep the cells without texture in memory.
    cells = {
        number: Cells(*(column[:count].clone() for column in own))
        for number, own, count in zip(numbers, columns, counts, strict=True)
    }
    return [cells[number] for number in range(len(seen))]


def _textured_cells(seen: Sequence[ImageFeatures]) -> tuple[Cells, Tensor]:
    """Return the coarse cells of images of one size, textured ones first, and the numbers of these (v)."""
    coarse = torch.cat([own.maps.coarse for own in seen])
    height, width = coarse.shape[2:]
    # (v h w)
    gray = torch.stack([own.pixels for own in seen]).float().mean(3)
    deviation = gray.unflatten(1, (height, STRIDE)).unflatten(3, (width, STRIDE)).std(dim=(2, 4))
    usable = deviation > _LEAST_DEVIATION
    for row, own in enumerate(seen):
        if own.maps.valid is not None:
            usable[row] &= F.adaptive_avg_pool2d(own.maps.valid.float(), (height, width))[0] > 0.5
    count = usable.sum((1, 2))
    # (v n)
    order = usable.flatten(1).int().argsort(dim=1, descending=True, stable=True)
    # Numbers among the usable cells, and one beyond all of them where there is none.
    number = usable.flatten(1).cumsum(1).view_as(usable) - 1
    number = F.pad(number.masked_fill(~usable, height * width), (1, 1, 1, 1), value=height * width)
    around = torch.stack([number[:, 1 + y : 1 + y + height, 1 + x : 1 + x + width] for x, y in _AROUND], dim=3)
    features = F.normalize(coarse.float(), dim=1).flatten(2).mT
    cells = Cells(
        features=features.take_along_dim(order[:, :, None], 1),
        place=torch.stack([order % width, order // width], dim=2).float(),
        around=around.flatten(1, 2).take_along_dim(order[:, :, None], 1),
    )
    return cells, count


def view_agreement(views0: list[Cells], views1: list[Cells]) -> FloatArray:
    """Measure the agreement of all pairs of views: (views of image 0, views of image 1)."""
    agreement = np.zeros((len(views0), len(views1)), dtype=np.float32)
    if agreement.size:
        # Views with similar numbers of cells are compared together.
        parts0, parts1 = _parts(views0), _parts(views1)
        stacks1 = [stacked([views1[number] for number in part]) for part in parts1]
        stacks0 = (stacked([views0[number] for number in part]) for part in parts0)
        rows = [torch.cat([cell_agreement(own, other) for other in stacks1], dim=1) for own in stacks0]
        agreement[np.ix_(np.concatenate(parts0), np.concatenate(parts1))] = torch.cat(rows).cpu().numpy()
    return agreement


def _parts(views: list[Cells]) -> list[list[int]]:
    """Divide views into parts with few cells, padded to the same number in each view; a part has at least one view."""
    parts: list[list[int]] = []
    for number in sorted(range(len(views)), key=lambda number: -len(views[number].place)):
        if not parts or (len(parts[-1]) + 1) * len(views[parts[-1][0]].place) > _COMPARED:
            parts.append([])
        parts[-1].append(number)
    return parts


def stacked(views: Sequence[Cells]) -> Cells:
    """Stack the cells of several views: (v n c), (v n 2) and (v n 8); features and places of missing cells are NaN."""
    features, place = (
        pad_sequence(own, batch_first=True, padding_value=torch.nan)
        for own in ([cells.features for cells in views], [cells.place for cells in views])
    )
    around = pad_sequence([cells.around for cells in views], batch_first=True)
    return Cells(features, place, around.clamp(max=around.shape[1]))


def cell_agreement(views0: Cells, views1: Cells) -> Tensor:
    """Measure how many mutual nearest neighbors of cells move like those of the adjacent cells, beyond chance.

    Both are `stacked`. The result (v u) has the agreement of each view with each of the others.
    """
    (v, n), (u, m) = views0.features.shape[:2], views1.features.shape[:2]
    if not n or not m:
        return views0.features.new_zeros(v, u)
    cosine = views0.features.flatten(0, 1) @ views1.features.flatten(0, 1).T
    cosine = cosine.nan_to_num_(nan=-2.0).view(v, n, u, m)
    # (v u n)
    value, best = (each.transpose(1, 2) for each in cosine.max(3))
    back = cosine.argmax(1).gather(2, best)
    mutual = (back == torch.arange(n, device=best.device)) & (value > -2)
    # (v u n 2)
    there = views1.place.expand(v, u, m, 2).take_along_dim(best[..., None], 2)
    there = there.masked_fill(~mutual[..., None], torch.nan)
    # (v u n 8 2) Motion from a match to those of the adjacent cells.
    around = F.pad(there, (0, 0, 0, 1), value=torch.nan).take_along_dim(views0.around.view(v, 1, 8 * n, 1), 2)
    moves = around.unflatten(2, (n, 8)) - there[:, :, :, None]
    length = moves.norm(dim=4)
    near = (length > _STEPS[0]) & (length < _STEPS[1])
    # A similarity maps all steps by the same complex factor.
    steps = torch.view_as_complex(torch.tensor(_AROUND, dtype=torch.float32, device=best.device))
    factor = torch.where(near, torch.view_as_complex(moves) / steps, 0)
    common = factor.sum(3) / near.sum(3).clamp(min=1)
    agree = (near & ((factor - common[..., None]).abs() < _DEVIATION)).sum(3)
    return (agree - _BY_CHANCE).clamp(min=0).sum(2) / (mutual.sum(2) + _FEW).sqrt()
