"""What a matcher, the benchmarks and training need of any network: features of an image, and matches of two."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualrc.config import NetworkConfig
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.engine import Engine
from dualrc.pixels import FINE_STRIDE, cell_to_pixel


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """What matching needs to know of an image; depends on that image alone."""

    # b c h w: what the coarse tensor is made of. Of DualRC-Net at 1/16, as the backbone gives it.
    coarse: Tensor
    # b c h w, unit length: what says where in a coarse cell a match ends. Of DualRC-Net at 1/4, of NCNet at 1/8.
    fine: Tensor
    # Where to look: squares of 4x4 pixels that may be matched, (b h w) bool; None: everywhere.
    valid: Tensor | None = None
    light: Tensor | None = None  # b h w in pixels: the brightness by which matches are aligned, if they are

    def map(self) -> FineMap:
        """The fine features, as the search reads them."""
        return FineMap.of(self.fine, self.valid)


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkMatches:
    """Matches of a batch in network-input pixels, by pair and then best first."""

    pair: Tensor  # n
    points0: Tensor  # n 2, (x, y), the center of the first pixel at (0, 0)
    points1: Tensor  # n 2
    scores: Tensor  # n: see model.refine.PointMatches


class Network(nn.Module, ABC):
    """A network that matches images by a coarse tensor; `engine` says how its operations are carried out."""

    def __init__(
        self, config: NetworkConfig, *, backbone: nn.Module, consensus: Consensus, engine: Engine | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.consensus = consensus
        self.engine = engine or Engine()

    def forward(self, images0: Tensor, images1: Tensor, top: int | None = None) -> NetworkMatches:
        """Normalized images (b 3 h w), sides multiples of 16, to their matches."""
        return self.match(self.extract(images0), self.extract(images1), top=top)

    @abstractmethod
    def extract(self, images: Tensor) -> Features:
        """Normalized images (b 3 h w), sides multiples of 16, to their features."""

    @abstractmethod
    def coarse_tensor(self, features0: Features, features1: Features) -> Tensor:
        """The refined coarse tensor, b h0 w0 h1 w1; it may be a sparse one."""

    @abstractmethod
    def match(self, features0: Features, features1: Features, *, top: int | None = None) -> NetworkMatches:
        """Matches of every pair of a batch; the best `top` of each pair where given."""

    @abstractmethod
    def match_points(self, features0: Features, features1: Features, points0: Tensor) -> tuple[Tensor, Tensor]:
        """Where points of image 0 (n 2, network pixels) of one pair are in image 1, and scores; score 0: nowhere."""

    @abstractmethod
    def warp(self, features0: Features, features1: Features) -> tuple[Tensor, Tensor]:
        """For every square of 4x4 pixels of image 0 of one pair: its place in image 1 (h w 2), certainty (h w)."""


def best_first(pair: Tensor, scores: Tensor, top: int | None, pairs: int) -> Tensor:
    """Indices of matches by pair and then by falling score, at most `top` of each of so many pairs."""
    keep = scores.sort(descending=True, stable=True).indices
    if pairs == 1:
        return keep[:top]
    keep = keep[pair[keep].sort(stable=True).indices]
    if top is not None:
        counts = pair.bincount(minlength=pairs)
        rank = torch.arange(len(keep), device=keep.device) - (counts.cumsum(0) - counts)[pair[keep]]
        keep = keep[rank < top]
    return keep


def square_centers(height: int, width: int, device: torch.device) -> Tensor:
    """Centers of all squares of 4x4 pixels of an image of so many, row by row: (n 2), (x, y) in pixels."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return cell_to_pixel(torch.stack([column, row], dim=-1).flatten(0, 1).float(), FINE_STRIDE).to(device)
