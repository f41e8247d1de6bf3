"""Interface of a network for matcher, benchmarks and training: features of an image, and matches of a pair."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dualrc.config import NetworkConfig
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.engine import Engine


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """Features of a batch of images; they depend on the images alone, not on their partners."""

    # (b c h w) Input of the coarse tensor. DualRC-Net: F~ at 1/16, as the backbone returns it.
    coarse: Tensor
    # (b c h w) Unit features that localize a match inside a coarse cell. DualRC-Net: F^ at 1/4. NCNet: at 1/8.
    fine: Tensor
    # (b h w) bool: squares of 4x4 pixels that may be matched. None allows all.
    valid: Tensor | None = None
    # (b h w) in pixels: the brightness for the photometric alignment, if the network uses it.
    light: Tensor | None = None

    def map(self) -> FineMap:
        """Return the fine features in the layout of the search."""
        return FineMap.of(self.fine, self.valid)


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkMatches:
    """Matches of a batch in network-input pixels, sorted by pair, then by descending score."""

    # (n)
    pair: Tensor
    # (n 2) as (x, y); the center of the first pixel is (0, 0).
    points0: Tensor
    # (n 2)
    points1: Tensor
    # (n) See model.refine.PointMatches.
    scores: Tensor


class Network(nn.Module, ABC):
    """Network that matches images through a coarse tensor; `engine` executes its operations."""

    def __init__(
        self, config: NetworkConfig, *, backbone: nn.Module, consensus: Consensus, engine: Engine | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.consensus = consensus
        self.engine = engine or Engine()

    def forward(self, images0: Tensor, images1: Tensor, top: int | None = None) -> NetworkMatches:
        """Match normalized images (b 3 h w) whose sides are multiples of 16."""
        return self.match(self.extract(images0), self.extract(images1), top=top)

    @abstractmethod
    def extract(self, images: Tensor) -> Features:
        """Extract features of normalized images (b 3 h w) whose sides are multiples of 16."""

    @abstractmethod
    def coarse_tensor(self, features0: Features, features1: Features) -> Tensor:
        """Compute the refined coarse tensor (b h0 w0 h1 w1), which may be sparse."""

    @abstractmethod
    def match(self, features0: Features, features1: Features, *, top: int | None = None) -> NetworkMatches:
        """Return the matches of every pair in a batch, or the best `top` of each pair."""

    @abstractmethod
    def match_points(self, features0: Features, features1: Features, points0: Tensor) -> tuple[Tensor, Tensor]:
        """Locate points of image 0 (n 2, network pixels) of one pair in image 1; a score of 0 means not found."""

    @abstractmethod
    def warp(self, features0: Features, features1: Features) -> tuple[Tensor, Tensor]:
        """Locate every square of 4x4 pixels of image 0 of one pair in image 1 (h w 2), with certainty (h w)."""


def full_precision(maps: Tensor) -> Tensor:
    """Convert maps computed under autocast to float32, because cosines need more precision than convolutions."""
    return maps.float() if torch.is_autocast_enabled(maps.device.type) else maps


def best_first(pair: Tensor, scores: Tensor, top: int | None, pairs: int) -> Tensor:
    """Return indices that sort matches by pair, then by descending score, with at most `top` of each pair."""
    keep = scores.sort(descending=True, stable=True).indices
    if pairs == 1:
        return keep[:top]
    keep = keep[pair[keep].sort(stable=True).indices]
    if top is not None:
        counts = pair.bincount(minlength=pairs)
        rank = torch.arange(len(keep), device=keep.device) - (counts.cumsum(0) - counts)[pair[keep]]
        keep = keep[rank < top]
    return keep
