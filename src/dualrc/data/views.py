"""Batches from pairs of images: cropped, scaled to one size, decoded in threads."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Generator, Tensor

from dualrc.config import check_bounds
from dualrc.data.light import relight
from dualrc.data.pairs import LazyPair, PairBatch, PairSample, left_out
from dualrc.errors import ConfigError, DataError, DualRCError
from dualrc.image import normalize_colors, read
from dualrc.pixels import in_image, resize_points
from dualrc.types import BoolArray, FloatArray, ImageArray

# Number of random crops, of which the first with enough points is used.
_TRIES = 8
# Share of the points that are occluded, for each image.
_HIDDEN_SHARE = 1 / 8
# A point outside of a view is ignored within this distance of the border, where the network may still see it.
_MARGIN_PX = 8


@dataclass(frozen=True, kw_only=True)
class CutConfig:
    """Settings of views: image pairs cropped and scaled to one size."""

    # Share of the pairs, relative to the other sources.
    share: float = 1.0
    # None: the whole image, scaled to a square, as in the paper. Else a random square, whose side is at least this
    # share of the shorter side.
    crop: float | None = None
    # Apply random lighting, noise and compression, as for single photos.
    light: bool = False
    # Pairs with fewer corresponding points are left out.
    min_points: int = 8

    def __post_init__(self) -> None:
        check_bounds(self, "share", above=0)
        check_bounds(self, "crop", above=0, at_most=1)
        check_bounds(self, "min_points", at_least=1)


class _Box(NamedTuple):
    """A part of an image, in coordinates of its outer edge: pixel x covers x to x + 1."""

    left: float
    top: float
    width: float
    height: float


class _View(NamedTuple):
    """One pair of a batch."""

    # (2, size, size, 3).
    images: ImageArray
    # (2, n, 2).
    points: npt.NDArray[np.float32]
    # (3, n): valid, absent0, absent1.
    flags: BoolArray


class FilePairs:
    """Makes batches from a source of pairs; `skipped` records pairs that cannot be used.

    The same generator state makes the same batch.
    """

    def __init__(
        self,
        source: Sequence[LazyPair],
        config: CutConfig,
        *,
        size: int,
        points: int,
        device: torch.device | str = "cpu",
        clean: bool = False,
    ) -> None:
        """`clean`: whether batches have the images before the change of light too."""
        if config.light and size % 8:
            raise ConfigError(f"size = {size} is not valid with light; pass a multiple of 8.")
        if not len(source):
            raise DataError("There are no pairs to train on; check the data.")
        self.source, self.config = source, config
        self.size, self.points, self.device, self.clean = size, points, torch.device(device), clean
        # Reasons by name of a pair, or of a whole frame or scene.
        self.skipped: dict[str, str] = {}
        self._broken: set[int] = set()
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pairs")

    def make(self, count: int, random: Generator) -> PairBatch:
        """Make a batch of `count` pairs, drawn with replacement."""
        seed = int(torch.randint(1 << 62, (), generator=random, device=random.device))
        return self._batch(seed, [self._drawn(seed, slot) for slot in range(count)])

    def make_in_order(self, first: int, count: int, *, seed: int) -> PairBatch:
        """Make a batch of the pairs `first` to `first + count` of an infinite sequence of epochs.

        Each epoch has every pair once, in an order that depends only on `seed` and the number of the epoch.
        """
        total = len(self.source)
        epochs = range(first // total, (first + count - 1) // total + 1)
        orders = {epoch: np.random.default_rng([seed, epoch]).permutation(total).tolist() for epoch in epochs}
        numbers = (orders[place // total][place % total] for place in range(first, first + count))
        own = int(np.random.default_rng([seed, first]).integers(1 << 62))
        # A random pair replaces a pair that cannot be used.
        choices = [itertools.chain([number], self._drawn(own, slot)) for slot, number in enumerate(numbers)]
        return self._batch(own, choices)

    def _drawn(self, seed: int, slot: int) -> Iterator[int]:
        """Yield the numbers of all pairs, in an order that depends only on seed and slot."""
        yield from np.random.default_rng([seed, slot]).permutation(len(self.source)).tolist()

    def _batch(self, seed: int, choices: Sequence[Iterable[int]]) -> PairBatch:
        """Make a batch with one pair from each of the choices."""
        count = len(choices)
        views = list(self._pool.map(lambda slot: self._view(seed, slot, choices[slot]), range(count)))
        own = torch.Generator(device=self.device).manual_seed(seed)
        # (2, b, s, s, 3).
        images = torch.from_numpy(np.stack([view.images for view in views], axis=1)).to(self.device)
        images = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 255
        lit = relight(images, own) if self.config.light else images
        clean = normalize_colors(images).split(count) if self.clean else ()
        points, flags = self._tensor([view.points for view in views]), self._tensor([view.flags for view in views])
        return PairBatch.of([*normalize_colors(lit).split(count), *points, *flags, *clean])

    def report(self) -> str:
        """Return one line about data that was left out so far; empty if there is none."""
        reasons = [f"{name}: {reason.rstrip('.')}" for name, reason in self.skipped.items()]
        return left_out(reasons, "Left out as unusable")

    def close(self) -> None:
        """Stop preparing batches."""
        self._pool.shutdown(cancel_futures=True)

    def _tensor(self, arrays: list[npt.NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.stack(arrays, axis=1)).to(self.device)

    def _view(self, seed: int, slot: int, choice: Iterable[int]) -> _View:
        """Return the first usable pair of a choice."""
        for number in choice:
            if number in self._broken:
                continue
            try:
                sample = self.source[number].load()
                if len(sample.points0) < self.config.min_points:
                    raise DataError(f"{len(sample.points0)} corresponding points are too few.")
                return self._cut(sample, np.random.default_rng([seed, slot, number]))
            except DualRCError as error:
                self.skipped[self.source[number].name] = str(error)
                self._broken.add(number)
        name, reason = next(iter(self.skipped.items()))
        raise DataError(
            f"None of the {len(self.source)} pairs can be used; correct the data. The first, {name}: {reason}"
        )

    def _cut(self, sample: PairSample, rng: np.random.Generator) -> _View:
        decoded = read(sample.image0), read(sample.image1)
        whole = tuple(_Box(0, 0, pixels.shape[1], pixels.shape[0]) for pixels in decoded)
        boxes = self._boxes(sample, whole, rng)
        if _count_common(sample, boxes) < self.config.min_points:
            boxes = whole
        if (kept := _count_common(sample, boxes)) < self.config.min_points:
            raise DataError(f"{kept} corresponding points inside of the images are too few.")
        images = [_scaled(pixels, box, self.size) for pixels, box in zip(decoded, boxes, strict=True)]
        points, flags = self._places(sample, boxes, rng)
        return _View(np.stack(images), points, flags)

    def _boxes(self, sample: PairSample, whole: tuple[_Box, ...], rng: np.random.Generator) -> tuple[_Box, ...]:
        """Return crops of both images around one of the corresponding points."""
        if self.config.crop is None:
            return whole
        best, most = whole, 0
        for _ in range(_TRIES):
            anchor, place = rng.integers(len(sample.points0)), rng.uniform(0.2, 0.8, 2)
            boxes = []
            for points, box in zip((sample.points0, sample.points1), whole, strict=True):
                side = min(box.width, box.height) * rng.uniform(self.config.crop, 1)
                corner = points[anchor] + 0.5 - side * (place + rng.normal(0, 0.1, 2))
                left, top = np.clip(corner, 0, (box.width - side, box.height - side)).tolist()
                boxes.append(_Box(left, top, side, side))
            kept = _count_common(sample, tuple(boxes))
            if kept > most:
                best, most = tuple(boxes), kept
            if most >= min(self.points, len(sample.points0) / 4):
                break
        return best

    def _places(
        self, sample: PairSample, boxes: tuple[_Box, ...], rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.float32], BoolArray]:
        """Return the requested number of points: corresponding ones, occluded ones of either image, and padding."""
        both = _to_views(sample, boxes, self.size)
        inside = np.all((both >= 0) & (both <= self.size - 1), axis=2)
        outside = np.any((both < -_MARGIN_PX) | (both > self.size - 1 + _MARGIN_PX), axis=2)
        absent = []
        for number, hidden in enumerate((sample.hidden0, sample.hidden1)):
            known = _to_view(hidden, boxes[number], self.size)
            known = known[np.all((known >= 0) & (known <= self.size - 1), axis=1)]
            # Points that the crop removed from the other image are absent there too.
            lost = both[number][inside[number] & outside[1 - number]]
            absent.append(_some(np.concatenate([known, lost])[None], int(self.points * _HIDDEN_SHARE), rng)[0])
        valid = _some(both[:, inside.all(axis=0)], self.points - len(absent[0]) - len(absent[1]), rng)
        points = np.zeros((2, self.points, 2), dtype=np.float32)
        flags = np.zeros((3, self.points), dtype=np.bool_)
        start = valid.shape[1]
        points[:, :start], flags[0, :start] = valid, True
        for number, places in enumerate(absent):
            rows = slice(start, start + len(places))
            points[number, rows], flags[1 + number, rows] = places, True
            start += len(places)
        return points, flags


def _some(points: FloatArray, count: int, rng: np.random.Generator) -> FloatArray:
    """Return at most `count` of the points (k, n, 2), at random."""
    number = points.shape[1]
    return points if number <= count else points[:, rng.choice(number, count, replace=False)]


def _to_view(points: FloatArray, box: _Box, size: int) -> FloatArray:
    """Map points (n, 2) of an image to a view of `size` x `size` that shows a box of it."""
    return resize_points(points - (box.left, box.top), (box.width, box.height), (size, size))


def _to_views(sample: PairSample, boxes: tuple[_Box, ...], size: int) -> FloatArray:
    """Map the corresponding points to both views: (2, n, 2)."""
    return np.stack([_to_view(p, b, size) for p, b in zip((sample.points0, sample.points1), boxes, strict=True)])


def _count_common(sample: PairSample, boxes: tuple[_Box, ...]) -> int:
    """Return the number of corresponding points that lie in both boxes."""
    return int(in_image(_to_views(sample, boxes, 1), (1, 1)).all(axis=0).sum())


def _scaled(image: ImageArray, box: _Box, size: int) -> ImageArray:
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=edges))
