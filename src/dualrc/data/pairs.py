"""Training pairs: two images, corresponding points, and their validity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Generator, Tensor

from dualrc.types import FloatArray, ImageArray


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Pairs of images of the same size with n points each; points are (x, y) in pixels."""

    # (b, 3, h, w), normalized.
    images0: Tensor
    images1: Tensor
    # (b, n, 2).
    points0: Tensor
    points1: Tensor
    # (b, n): points0 and points1 correspond.
    valid: Tensor
    # (b, n): points0 is known to be occluded in image 1, or outside of it.
    absent0: Tensor
    # (b, n): points1 is known to be occluded in image 0, or outside of it.
    absent1: Tensor
    # The images before their light was changed, if the maker was asked for them.
    clean0: Tensor | None = None
    clean1: Tensor | None = None

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "PairBatch":
        """Make a batch from the result of `tensors`."""
        # torch.compile cannot trace `fields`.
        return PairBatch(**dict(zip(PairBatch.__dataclass_fields__, tensors, strict=False)))

    def tensors(self) -> list[Tensor]:
        """Return all fields in their order, without the clean images if there are none."""
        return [tensor for f in fields(self) if (tensor := getattr(self, f.name)) is not None]

    def swapped(self) -> "PairBatch":
        """Return the batch with the images exchanged."""
        return PairBatch(
            images0=self.images1,
            images1=self.images0,
            points0=self.points1,
            points1=self.points0,
            valid=self.valid,
            absent0=self.absent1,
            absent1=self.absent0,
            clean0=self.clean1,
            clean1=self.clean0,
        )


class PairMaker(Protocol):
    """Source of batches for training."""

    def make(self, count: int, random: Generator) -> PairBatch:
        """Make a batch of `count` pairs; the same generator state makes the same batch."""

    def report(self) -> str:
        """Return one line about data that could not be used so far; empty if there is none."""

    def close(self) -> None:
        """Stop preparing batches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSample:
    """Two original images and their points, in original pixels."""

    image0: Path | ImageArray
    image1: Path | ImageArray
    # (n, 2).
    points0: FloatArray
    # (n, 2), corresponding points.
    points1: FloatArray
    # (m, 2), points of image 0 that are known to be occluded in image 1 or outside of it, and (k, 2) of image 1.
    hidden0: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    hidden1: FloatArray = field(default_factory=lambda: np.empty((0, 2)))


@dataclass(frozen=True, kw_only=True, eq=False)
class LazyPair:
    """A pair that is loaded on request."""

    # Name in reports.
    name: str
    # Loads the pair, or raises a DualRCError if it cannot be used.
    load: Callable[[], PairSample]


def left_out(names_and_reasons: Sequence[str], what: str) -> str:
    """Return one line about data that could not be used, with examples; empty if there is none."""
    if not names_and_reasons:
        return ""
    some = names_and_reasons[:3]
    more = "; ..." if len(names_and_reasons) > len(some) else ""
    return f"{what}: {len(names_and_reasons)} ({'; '.join(some)}{more})"
