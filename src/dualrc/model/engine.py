"""The operations that a network needs, each with one signature, and their plain torch implementation."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from dualrc.config import FineConfig
from dualrc.model import align, refine, relocalize, search, sparse, support
from dualrc.model.cells import FineMap, FineMapPair, MaskPair, TensorPair
from dualrc.model.consensus import Consensus
from dualrc.model.context import Context
from dualrc.model.correlation import correlate, mask_cells, max_pool, mutual_filter, normalize, valid_cells
from dualrc.model.refine import CellMatches, PointMatches
from dualrc.model.search import Correspondences, Found
from dualrc.model.subpixel import Offsets, Subpixel, WindowPairs, cell_windows, pair_windows, point_windows, refine_both
from dualrc.model.support import DirectedMatches, Support

if TYPE_CHECKING:
    from dualrc.model.network import Network


class Engine:
    """The definition of the operations: plain torch on whole tensors, differentiable except for the alignment.

    Engines in `dualrc.ops` compute the same results faster or in less memory. An engine overrides the operations that
    it accelerates and calls the base class for cases that it does not support.
    """

    name = "definition"

    def __deepcopy__(self, memo: Any) -> Self:
        """Return self: an engine has no state of a network, so copies of a network can share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the engine by its class, so that other processes create a new one."""
        return type(self), ()

    def prepare(self, backbone: nn.Module) -> nn.Module:
        """Return a backbone that computes the same features on this engine; the given one is not changed."""
        return backbone

    def warm_up(self, network: "Network", dtype: torch.dtype) -> None:
        """Prepare for this network and feature type in advance, so that the first pair is not slower."""

    def extract(self, extract: Callable[[Tensor], tuple[Tensor, ...]], pixels: Tensor) -> tuple[Tensor, ...]:
        """Extract features of images of one size; `extract` does all the work, on the device of the pixels."""
        return extract(pixels)

    def normalize(self, features: Tensor) -> Tensor:
        """Normalize features over channels: (b c h w) -> the same."""
        return normalize(features)

    def brightness(self, images: Tensor) -> Tensor:
        """Return the brightness of normalized images for the alignment: (b 3 h w) -> (b h w)."""
        return align.brightness(images)

    def context(self, context: Context, coarse: TensorPair, valid: MaskPair) -> tuple[Tensor, Tensor]:
        """Condition coarse features on the other image: (b c h0 w0), (b c h1 w1) -> the same."""
        return context(*coarse, *(None if mask is None else valid_cells(mask) for mask in valid))

    def coarse(self, coarse: TensorPair, consensus: Consensus, valid: MaskPair) -> Tensor:
        """Correlate, then apply M, N and M: (b c h0 w0), (b c h1 w1) -> (b h0 w0 h1 w1)."""
        coarse0, coarse1 = (features.float() for features in coarse)
        return self.filtered(mask_cells(self.correlate(coarse0, coarse1), *valid), consensus)

    def correlate(self, coarse0: Tensor, coarse1: Tensor) -> Tensor:
        """Correlate coarse features: (b c h0 w0), (b c h1 w1) -> (b h0 w0 h1 w1)."""
        return correlate(coarse0, coarse1)

    def filtered(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Apply mutual filter, consensus, mutual filter; may overwrite `scores` (b h0 w0 h1 w1)."""
        return mutual_filter(self.consensus(mutual_filter(scores), consensus))

    def consensus(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Apply the 4D convolutions alone, without the filters: (b h0 w0 h1 w1) -> the same."""
        return consensus(scores)

    def search(self, tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> Correspondences:
        """Search in both directions; `tensor` is (b n m), coarse cells of image 0 by coarse cells of image 1."""
        return search.search_both(self, tensor, fine0, fine1, config)

    def search_cells(
        self, tensor: Tensor, fine: FineMapPair, cells0: Tensor, config: FineConfig, *, wanted: Tensor | None = None
    ) -> Found:
        """Find the best fine cells of image 1 for the 16 fine cells of each coarse cell `cells0` (b g) of image 0.

        `tensor` (b n m) has the querying image first. `wanted` (b g 16) marks the queries that need an answer; the
        other answers are undefined.
        """
        return search.search(tensor, search.cell_queries(fine[0], cells0, config.reading), fine[1], config.temperature)

    def search_points(self, tensor: Tensor, fine: FineMapPair, points0: Tensor, config: FineConfig) -> Found:
        """Find the best fine cells for any points (b g 2) of image 0, (x, y) in fine cells; results are (b g 1)."""
        return search.search(
            tensor, search.point_queries(fine[0], points0, config.reading), fine[1], config.temperature
        )

    def refine(
        self, subpixel: Subpixel, fine: FineMapPair, light: TensorPair | None, matches: CellMatches
    ) -> PointMatches:
        """Refine matched cells to matched points in network-input pixels, with scores."""
        return refine.refine(self, subpixel, fine, light, matches)

    def refine_points(
        self, subpixel: Subpixel, fine: FineMapPair, pair: Tensor, points0: Tensor, index1: Tensor, score: Tensor
    ) -> Offsets:
        """Refine the cells of image 1 that points (n 2) of image 0, in fine cells, matched with this score."""
        windows = pair_windows(point_windows(fine[0], pair, points0), cell_windows(fine[1], pair, index1))
        return subpixel(windows, score)

    # Steps of `refine`.

    def offsets(self, subpixel: Subpixel, fine: FineMapPair, matches: CellMatches) -> tuple[Tensor, Tensor, Tensor]:
        """Return the offsets of both points of matches (n 2) and their confidence (n), by features alone."""
        windows = self.windows(*fine, matches.pair.clamp(min=0), matches.index0, matches.index1)
        return refine_both(subpixel, windows, matches.score0, matches.score1)

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        """Return the 3x3 windows of fine cells around both cells of matches (n)."""
        return pair_windows(cell_windows(fine0, pair, index0), cell_windows(fine1, pair, index1))

    def support(self, matches: DirectedMatches) -> Support:
        """Estimate affine motion and agreement of the neighbors of matches; see `model.support.support`."""
        return support.support(matches)

    def align(
        self, light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
    ) -> Tensor:
        """Return the motion that aligns points of image 1 with those of image 0; see `model.align.align`."""
        return align.align(light0, light1, pair, points0, points1, motion)

    # Operations of NCNet and Sparse-NCNet.

    def pooled_correlation(self, fine0: Tensor, fine1: Tensor, pool: int) -> Tensor:
        """Correlate unit features (b c H0 W0), (b c H1 W1) and max-pool by `pool`**4: (b h0 w0 h1 w1)."""
        return max_pool(torch.einsum("bchw,bcij->bhwij", fine0.float(), fine1.float()), pool)

    def relocalize(
        self, fine: TensorPair, pair: Tensor, index: TensorPair, pool: int, *, soft: bool
    ) -> tuple[Tensor, Tensor]:
        """Refine matched coarse cells to positions in the fine maps; see `model.relocalize.relocalize`."""
        return relocalize.relocalize(fine, pair, index, pool, soft=soft)

    def nearest(self, rows: Tensor, others: Tensor, count: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Find the largest products of features (b n c) with others (b m c); see `model.sparse.nearest`."""
        return sparse.nearest(rows, others, count, valid)
