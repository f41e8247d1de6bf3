"""Sub-pixel refinement from features: the best offset within a 3x3 window of fine cells, and its confidence."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualrc.model.cells import FineMap

# Side of a window, in fine cells.
_SIDE = 3
WINDOW = _SIDE**2
_MIDDLE = WINDOW // 2


class Windows(NamedTuple):
    """Unit features of the 3x3 fine cells around positions."""

    # (n 9 c)
    features: Tensor
    # (n) Whether the window lies inside the image.
    whole: Tensor


class WindowPairs(NamedTuple):
    """The windows around both points of matches."""

    # (n c) Unit features at the center of the window in image 0.
    middle0: Tensor
    # (n c) Unit features at the center of the window in image 1.
    middle1: Tensor
    # (n 9 9) Cosines of all cells of one window with all cells of the other.
    cosine: Tensor
    # (n) Whether the window in image 0 lies inside the image.
    whole0: Tensor
    # (n) Whether the window in image 1 lies inside the image.
    whole1: Tensor

    def swapped(self) -> "WindowPairs":
        """Return the same windows with the images swapped."""
        return WindowPairs(self.middle1, self.middle0, self.cosine.transpose(1, 2), self.whole1, self.whole0)


class Offsets(NamedTuple):
    """Offsets from fine cells, and the logit of the probability that they are correct."""

    # (n 2) as (x, y) in fine cells.
    offset: Tensor
    # (n)
    logit: Tensor


def cell_windows(fine: FineMap, pair: Tensor, index: Tensor) -> Windows:
    """Return the windows around fine cells: pair (n), index (n); border cells are replicated outside the image."""
    height, width = fine.fine_size
    columns, rows = _steps(index.device)
    row, column = (index // width)[:, None] + rows, (index % width)[:, None] + columns
    around = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    return Windows(fine.gather(pair, around).float(), inside(fine, index))


def inside(fine: FineMap, index: Tensor) -> Tensor:
    """Return whether the windows around fine cells (n) lie inside the image."""
    height, width = fine.fine_size
    row, column = index // width, index % width
    return (row > 0) & (row < height - 1) & (column > 0) & (column < width - 1)


def point_windows(fine: FineMap, pair: Tensor, points: Tensor) -> Windows:
    """Return the windows around arbitrary positions: pair (n), points (n 2), (x, y) in fine cells."""
    # (n 9 2)
    places = points[:, None] + torch.stack(_steps(points.device), dim=1)
    x, y = places.unbind(2)
    height, width = fine.fine_size
    whole = ((x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)).all(1)
    features = fine.sample(pair.repeat_interleave(WINDOW), places.flatten(0, 1))
    return Windows(features.unflatten(0, (-1, WINDOW)), whole)


def _steps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the column and row offsets (9) of a window from its center."""
    axis = torch.arange(_SIDE, device=device) - _SIDE // 2
    return axis.repeat(_SIDE), axis.repeat_interleave(_SIDE)


def pair_windows(windows0: Windows, windows1: Windows) -> WindowPairs:
    """Combine the windows around both points of matches with all cosines between them."""
    cosine = torch.bmm(windows0.features, windows1.features.transpose(1, 2))
    middles = windows0.features[:, _MIDDLE], windows1.features[:, _MIDDLE]
    return WindowPairs(*middles, cosine, windows0.whole, windows1.whole)


class Subpixel(nn.Module):
    """Soft-argmax over the 3x3 fine cells around a match, with a learned correction and a learned confidence.

    The inputs of the learned part are the features of both cells, the cosines between all cells of both windows, and
    the score of the match.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.05)))
        self.correction: nn.Sequential | None = None
        if hidden:
            last = nn.Linear(hidden, 3)
            # Zero weights make this the plain soft-argmax at initialization.
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            inputs = 2 * channels + WINDOW**2 + 1
            self.correction = nn.Sequential(
                nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden), nn.ReLU(inplace=True), last
            )

    def forward(self, windows: WindowPairs, score: Tensor) -> Offsets:
        """Locate positions of image 0 in image 1, given the scores (n) of their matches.

        Offsets are zero at the image border, where an incomplete window would bias them inward.
        """
        weight = (windows.cosine[:, _MIDDLE] / self.log_temperature.exp()).softmax(1)
        offset = torch.stack([weight @ steps.float() for steps in _steps(weight.device)], dim=1)
        # Without a learned part, the score is the only confidence.
        logit = torch.logit(score.float(), eps=1e-6)
        if self.correction is not None:
            known = torch.log(score.float().clamp(min=0) + 1e-4) / 2
            inputs = [windows.middle0, windows.middle1, 4 * windows.cosine.flatten(1), known[:, None]]
            learnt = self.correction(torch.cat(inputs, dim=1)).float()
            offset, logit = offset + learnt[:, :2], learnt[:, 2]
        return Offsets(offset.masked_fill(~windows.whole1[:, None], 0), logit)


def refine_both(
    subpixel: Subpixel, windows: WindowPairs, score0: Tensor, score1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets for both points of matches, (n 2) each, and their confidence, (n) from 0 to 1.

    `score0` is the score from cell 0 to cell 1, `score1` the score back. Cell 0 corresponds to cell 1 plus offset1, and
    cell 1 to cell 0 plus offset0. To first order in any smooth motion, cell 0 plus half of offset0 then corresponds to
    cell 1 plus half of offset1. This choice is symmetric: swapping the images swaps the offsets.
    """
    in1 = subpixel(windows, score0)
    in0 = subpixel(windows.swapped(), score1)
    confidence = (in0.logit.sigmoid() * in1.logit.sigmoid()).sqrt()
    return in0.offset / 2, in1.offset / 2, confidence
