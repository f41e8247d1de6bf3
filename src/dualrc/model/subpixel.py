"""Sub-pixel refinement: where, around a fine cell, a query fits best, and how far to trust that."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualrc.model.fine import RATIO, FineMap

_SIDE = 3  # of the window


class Refined(NamedTuple):
    """Offsets from fine cells, and the logit of the probability that they end where they should."""

    offset: Tensor  # n 2, (x, y) in fine cells
    logit: Tensor  # n


class Subpixel(nn.Module):
    """A soft-argmax over the 3x3 fine cells around a match, with a learnt correction and a learnt confidence."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.05)))
        self.correction: nn.Module | None = None
        if hidden:
            last = nn.Linear(hidden, 3)
            nn.init.zeros_(last.weight)  # starts as the plain soft-argmax
            nn.init.zeros_(last.bias)
            self.correction = nn.Sequential(
                nn.Linear(2 * channels + _SIDE**2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), last
            )

    def forward(self, query: Tensor, fine: FineMap, pair: Tensor, index: Tensor) -> Refined:
        """Refine around fine cells: queries (n c), pair (n), index (n).

        Offsets are zero at the picture's border, where half a window would pull inwards.
        """
        height, width = fine.height * RATIO, fine.width * RATIO
        axis = torch.arange(_SIDE, device=query.device) - _SIDE // 2
        rows, columns = axis.repeat_interleave(_SIDE), axis.repeat(_SIDE)
        row, column = (index // width)[:, None] + rows, (index % width)[:, None] + columns
        whole = ((row >= 0) & (row < height) & (column >= 0) & (column < width)).all(1)
        window = fine.gather(pair, row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).float()  # n 9 c
        query = query.float()
        cosine = torch.einsum("nc,nkc->nk", query, window)
        weight = (cosine / self.log_temperature.exp()).softmax(1)
        offset = torch.stack([weight @ columns.float(), weight @ rows.float()], dim=1)
        logit = torch.zeros_like(offset[:, 0])
        if self.correction is not None:
            learnt = self.correction(torch.cat([query, window[:, _SIDE**2 // 2], 4 * cosine], dim=1)).float()
            offset, logit = offset + learnt[:, :2], learnt[:, 2]
        return Refined(torch.where(whole[:, None], offset, 0), logit)


def refine_both(
    subpixel: Subpixel, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets for both points of matches, (n 2) each, and how far to trust them, (n) in 0 to 1.

    Cell 0 fits at offset1 from cell 1, and cell 1 at offset0 from cell 0. To first order in any smooth motion, the
    point half of offset0 from cell 0 corresponds to the point half of offset1 from cell 1; and exchanging the
    pictures exchanges the two.
    """
    in0 = subpixel(fine1.gather(pair, index1), fine0, pair, index0)
    in1 = subpixel(fine0.gather(pair, index0), fine1, pair, index1)
    trust = (in0.logit.sigmoid() * in1.logit.sigmoid()).sqrt()
    return in0.offset / 2, in1.offset / 2, trust
