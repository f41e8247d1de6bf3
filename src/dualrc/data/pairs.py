"""The pair sample: two pictures, corresponding points, and which of them count."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Generator, Tensor

from dualrc.types import FloatArray, ImageArray


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Pairs of pictures of the same size with n places each; points are (x, y) in pixels."""

    # B 3 h w, normalized.
    images0: Tensor
    images1: Tensor
    # B n 2.
    points0: Tensor
    points1: Tensor
    # B n: points0 and points1 show the same thing.
    valid: Tensor
    # B n: points0 is known to be hidden in picture 1, or outside it.
    absent0: Tensor
    # B n: the same of points1 in picture 0.
    absent1: Tensor

    def swapped(self) -> "PairBatch":
        """The pictures exchanged."""
        return PairBatch(
            images0=self.images1,
            images1=self.images0,
            points0=self.points1,
            points1=self.points0,
            valid=self.valid,
            absent0=self.absent1,
            absent1=self.absent0,
        )


class PairMaker(Protocol):
    """What training takes its batches from."""

    def make(self, count: int, random: Generator) -> PairBatch:
        """A batch of `count` pairs; the same generator state makes the same batch."""

    def report(self) -> str:
        """One line about what could not be used so far; empty if all could."""

    def close(self) -> None:
        """Stop what is being prepared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSample:
    """Two pictures as they are, and what is known of their points, in their own pixels."""

    image0: Path | ImageArray
    image1: Path | ImageArray
    points0: FloatArray  # (n, 2)
    # (n, 2), which show the same.
    points1: FloatArray
    # (m, 2) points of picture 0 that are known to be hidden in picture 1, or outside it, and (k, 2) of picture 1.
    hidden0: FloatArray = field(default_factory=lambda: np.empty((0, 2)))
    hidden1: FloatArray = field(default_factory=lambda: np.empty((0, 2)))


class PairSource(Protocol):
    """Pairs by number, read when they are asked for."""

    def __len__(self) -> int: ...

    def name(self, number: int) -> str:
        """What a report calls this pair."""

    def load(self, number: int) -> PairSample:
        """Read a pair; a DualRCError says what is wrong with it."""


def left_out(names_and_reasons: Sequence[str], what: str) -> str:
    """One line about what could not be used, with some of them; empty if there is nothing."""
    if not names_and_reasons:
        return ""
    some = names_and_reasons[:3]
    more = "; ..." if len(names_and_reasons) > len(some) else ""
    return f"{what}: {len(names_and_reasons)} ({'; '.join(some)}{more})"
