"""Sub-pixel refinement: where, around a fine cell, a place fits best, and how far to trust that."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import dualrc.kernels.refine as kernel
from dualrc.model.fine import RATIO, FineMap

_SIDE = 3  # of the windows
WINDOW = _SIDE**2
_MIDDLE = WINDOW // 2


class Windows(NamedTuple):
    """Unit features of the 3x3 fine cells around places."""

    features: Tensor  # n 9 c
    whole: Tensor  # n: the window lies inside the picture


class Meeting(NamedTuple):
    """What is seen of places of picture 0 and of those of picture 1 that they were matched with."""

    middle0: Tensor  # n c: unit features
    middle1: Tensor  # n c
    cosine: Tensor  # n 9 9: of the cells around one with those around the other
    whole0: Tensor  # n: the window lies inside the picture
    whole1: Tensor  # n

    def turned(self) -> "Meeting":
        """The same with the pictures exchanged."""
        return Meeting(self.middle1, self.middle0, self.cosine.transpose(1, 2), self.whole1, self.whole0)


class Refined(NamedTuple):
    """Offsets from fine cells, and the logit of the probability that they end where they should."""

    offset: Tensor  # n 2, (x, y) in fine cells
    logit: Tensor  # n


def cell_windows(fine: FineMap, pair: Tensor, index: Tensor) -> Windows:
    """The windows around fine cells: pair (n), index (n)."""
    height, width = fine.height * RATIO, fine.width * RATIO
    columns, rows = _steps(index.device)
    row, column = (index // width)[:, None] + rows, (index % width)[:, None] + columns
    around = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    return Windows(fine.gather(pair, around).float(), _whole(fine, index))


def _whole(fine: FineMap, index: Tensor) -> Tensor:
    """Whether the windows around fine cells (n) lie inside the picture."""
    height, width = fine.height * RATIO, fine.width * RATIO
    row, column = index // width, index % width
    return (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)


def point_windows(fine: FineMap, pair: Tensor, points: Tensor) -> Windows:
    """The windows around any places: pair (n), points (n 2), (x, y) in fine cells."""
    steps = torch.stack(_steps(points.device), dim=1)
    places = points[:, None] + steps  # n 9 2
    limit = torch.tensor([fine.width * RATIO - 1, fine.height * RATIO - 1], device=points.device)
    whole = ((places >= 0) & (places <= limit)).flatten(1).all(1)
    features = fine.sample(pair.repeat_interleave(WINDOW), places.flatten(0, 1))
    return Windows(features.unflatten(0, (-1, WINDOW)), whole)


def _steps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns and rows (9) of a window, from its middle."""
    axis = torch.arange(_SIDE, device=device) - _SIDE // 2
    return axis.repeat(_SIDE), axis.repeat_interleave(_SIDE)


def meet(windows0: Windows, windows1: Windows) -> Meeting:
    """Windows around places that were matched."""
    cosine = torch.bmm(windows0.features, windows1.features.transpose(1, 2))
    middles = windows0.features[:, _MIDDLE], windows1.features[:, _MIDDLE]
    return Meeting(*middles, cosine, windows0.whole, windows1.whole)


def cells_meet(fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> Meeting:
    """Fine cells that were matched, all (n)."""
    features = fine0.features, fine1.features
    learning = torch.is_grad_enabled() and any(map.requires_grad for map in features)
    if learning or not kernel.supported(*features):
        return meet(cell_windows(fine0, pair, index0), cell_windows(fine1, pair, index1))
    widths = fine0.width * RATIO, fine1.width * RATIO
    cosine = kernel.cosines(fine0.features, fine1.features, pair, index0, index1, widths)
    middles = fine0.gather(pair, index0).float(), fine1.gather(pair, index1).float()
    return Meeting(*middles, cosine, _whole(fine0, index0), _whole(fine1, index1))


class Subpixel(nn.Module):
    """A soft-argmax over the 3x3 fine cells around a match, with a learnt correction and a learnt confidence.

    Both are learnt from the features of the two cells, the cosines of all cells around one with all around the other,
    and the score that the match was found with.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.05)))
        self.correction: nn.Module | None = None
        if hidden:
            last = nn.Linear(hidden, 3)
            nn.init.zeros_(last.weight)  # starts as the plain soft-argmax
            nn.init.zeros_(last.bias)
            inputs = 2 * channels + WINDOW**2 + 1
            self.correction = nn.Sequential(
                nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden), nn.ReLU(inplace=True), last
            )

    def forward(self, seen: Meeting, score: Tensor) -> Refined:
        """Where the places of picture 0 lie in picture 1, found there with this score (n).

        Offsets are zero at the picture's border, where half a window would pull inwards.
        """
        weight = (seen.cosine[:, _MIDDLE] / self.log_temperature.exp()).softmax(1)
        offset = torch.stack([weight @ steps.float() for steps in _steps(weight.device)], dim=1)
        logit = torch.logit(score.float(), eps=1e-6)  # where nothing is learnt, the score is all the trust there is
        if self.correction is not None:
            known = torch.log(score.float().clamp(min=0) + 1e-4) / 2
            inputs = torch.cat([seen.middle0, seen.middle1, 4 * seen.cosine.flatten(1), known[:, None]], dim=1)
            learnt = self.correction(inputs).float()
            offset, logit = offset + learnt[:, :2], learnt[:, 2]
        return Refined(offset.masked_fill(~seen.whole1[:, None], 0), logit)


def refine_both(subpixel: Subpixel, seen: Meeting, score0: Tensor, score1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets for both points of matches, (n 2) each, and how far to trust them, (n) in 0 to 1.

    `score0` is what cell 0 found cell 1 with, `score1` the way back. Cell 0 fits at offset1 from cell 1, and cell 1 at
    offset0 from cell 0. To first order in any smooth motion, the point half of offset0 from cell 0 corresponds to the
    point half of offset1 from cell 1; and exchanging the pictures exchanges the two.
    """
    in1 = subpixel(seen, score0)
    in0 = subpixel(seen.turned(), score1)
    trust = (in0.logit.sigmoid() * in1.logit.sigmoid()).sqrt()
    return in0.offset / 2, in1.offset / 2, trust
