"""The pair sample: two pictures, corresponding points, and which of them count."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Pairs of pictures of the same size with n places each; points are (x, y) in pixels."""

    images0: Tensor  # b 3 h w, normalized
    images1: Tensor
    points0: Tensor  # b n 2
    points1: Tensor
    valid: Tensor  # b n: points0 and points1 show the same thing
    absent0: Tensor  # b n: points0 is known to be hidden in picture 1, or outside it
    absent1: Tensor  # b n: the same of points1 in picture 0

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
