"""What every training loss returns."""

from typing import NamedTuple

from torch import Tensor


class Losses(NamedTuple):
    """The loss of a batch, and values to log by name; all are scalars."""

    total: Tensor
    # Terms of the loss, and accuracy: shares of points, which are not minimized.
    logged: dict[str, Tensor]
