"""Sub-pixel refinement from features: where, around a fine cell, a place fits best, and how far to trust that."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualrc.model.cells import FineMap

_SIDE = 3  # of the windows
WINDOW = _SIDE**2
_MIDDLE = WINDOW // 2


class Windows(NamedTuple):
    """Unit features of the 3x3 fine cells around places."""

    features: Tensor  # n 9 c
    whole: Tensor  # n: the window lies inside the image


class WindowPairs(NamedTuple):
    """The windows around both points of matches."""

    middle0: Tensor  # n c: unit features
    middle1: Tensor  # n c
    cosine: Tensor  # n 9 9: of the cells around one with those around the other
    whole0: Tensor  # n: the window lies inside the image
    whole1: Tensor  # n

    def swapped(self) -> "WindowPairs":
        """The same with the images exchanged."""
        return WindowPairs(self.middle1, self.middle0, self.cosine.transpose(1, 2), self.whole1, self.whole0)


class Offsets(NamedTuple):
    """Offsets from fine cells, and the logit of the probability that they end where they should."""

    offset: Tensor  # n 2, (x, y) in fine cells
    logit: Tensor  # n


def cell_windows(fine: FineMap, pair: Tensor, index: Tensor) -> Windows:
    """The windows around fine cells: pair (n), index (n); beyond the border the cells at it are repeated."""
    height, width = fine.fine_size
    columns, rows = _steps(index.device)
    row, column = (index // width)[:, None] + rows, (index % width)[:, None] + columns
    around = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    return Windows(fine.gather(pair, around).float(), inside(fine, index))


def inside(fine: FineMap, index: Tensor) -> Tensor:
    """Whether the windows around fine cells (n) lie inside the image."""
    height, width = fine.fine_size
    row, column = index // width, index % width
    return (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)


def point_windows(fine: FineMap, pair: Tensor, points: Tensor) -> Windows:
    """The windows around any places: pair (n), points (n 2), (x, y) in fine cells."""
    places = points[:, None] + torch.stack(_steps(points.device), dim=1)  # n 9 2
    x, y = places.unbind(2)
    height, width = fine.fine_size
    whole = ((x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)).all(1)
    features = fine.sample(pair.repeat_interleave(WINDOW), places.flatten(0, 1))
    return Windows(features.unflatten(0, (-1, WINDOW)), whole)


def _steps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns and rows (9) of a window, from its middle."""
    axis = torch.arange(_SIDE, device=device) - _SIDE // 2
    return axis.repeat(_SIDE), axis.repeat_interleave(_SIDE)


def pair_windows(windows0: Windows, windows1: Windows) -> WindowPairs:
    """Windows around the points of matches, with all cosines between them."""
    cosine = torch.bmm(windows0.features, windows1.features.transpose(1, 2))
    middles = windows0.features[:, _MIDDLE], windows1.features[:, _MIDDLE]
    return WindowPairs(*middles, cosine, windows0.whole, windows1.whole)


class Subpixel(nn.Module):
    """A soft-argmax over the 3x3 fine cells around a match, with a learnt correction and a learnt confidence.

    Both are learnt from the features of the two cells, the cosines of all cells around one with all around the other,
    and the score that the match was found with.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.05)))
        self.correction: nn.Sequential | None = None
        if hidden:
            last = nn.Linear(hidden, 3)
            nn.init.zeros_(last.weight)  # starts as the plain soft-argmax
            nn.init.zeros_(last.bias)
            inputs = 2 * channels + WINDOW**2 + 1
            self.correction = nn.Sequential(
                nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden), nn.ReLU(inplace=True), last
            )

    def forward(self, windows: WindowPairs, score: Tensor) -> Offsets:
        """Where the places of image 0 lie in image 1, found there with this score (n).

        Offsets are zero at the image's border, where half a window would pull inwards.
        """
        weight = (windows.cosine[:, _MIDDLE] / self.log_temperature.exp()).softmax(1)
        offset = torch.stack([weight @ steps.float() for steps in _steps(weight.device)], dim=1)
        logit = torch.logit(score.float(), eps=1e-6)  # where nothing is learnt, the score is the only confidence
        if self.correction is not None:
            known = torch.log(score.float().clamp(min=0) + 1e-4) / 2
            inputs = [windows.middle0, windows.middle1, 4 * windows.cosine.flatten(1), known[:, None]]
            learnt = self.correction(torch.cat(inputs, dim=1)).float()
            offset, logit = offset + learnt[:, :2], learnt[:, 2]
        return Offsets(offset.masked_fill(~windows.whole1[:, None], 0), logit)


def refine_both(
    subpixel: Subpixel, windows: WindowPairs, score0: Tensor, score1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets for both points of matches, (n 2) each, and their confidence, (n) in 0 to 1.

    `score0` is what cell 0 found cell 1 with, `score1` the way back. Cell 0 fits at offset1 from cell 1, and cell 1 at
    offset0 from cell 0. To first order in any smooth motion, the point half of offset0 from cell 0 corresponds to the
    point half of offset1 from cell 1; and exchanging the images exchanges the two.
    """
    in1 = subpixel(windows, score0)
    in0 = subpixel(windows.swapped(), score1)
    confidence = (in0.logit.sigmoid() * in1.logit.sigmoid()).sqrt()
    return in0.offset / 2, in1.offset / 2, confidence
