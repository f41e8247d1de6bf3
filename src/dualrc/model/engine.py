"""What the network asks of whatever carries it out: a few operations, each with one signature."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from dualrc.config import FineConfig
from dualrc.model import align, refine, relocalize, search, sparse, subpixel, support
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.context import Context
from dualrc.model.correlation import correlate, mask_cells, max_pool, normalize, valid_cells
from dualrc.model.refine import CellMatches, PointMatches
from dualrc.model.search import Correspondences, Found
from dualrc.model.sparse import SparseScores
from dualrc.model.subpixel import Offsets, Subpixel, WindowPairs
from dualrc.model.support import Support

if TYPE_CHECKING:
    from dualrc.model.network import Network


class Engine:
    """Carries the operations out by definition: plain torch, all at once, differentiable but for the alignment.

    `dualrc.ops` has engines that do the same faster or in less memory. An engine overrides the operations that it is
    good at, and calls its base class for cases that it does not support.
    """

    name = "definition"

    def __deepcopy__(self, memo: Any) -> Self:
        """Engines know nothing of a network, so that copies of it can share one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """For other processes: made anew there."""
        return type(self), ()

    def prepare(self, backbone: nn.Module) -> nn.Module:
        """A backbone that gives the same features by this engine; the given one is left as it is."""
        return backbone

    def warm_up(self, network: "Network", dtype: torch.dtype) -> None:
        """Get ready for this network with features of this type, so that no pair has to wait for it."""

    def extract(self, extract: Callable[[Tensor], tuple[Tensor, ...]], pixels: Tensor) -> tuple[Tensor, ...]:
        """Features of images of one size; `extract` does all of it, on whatever device the pixels are."""
        return extract(pixels)

    def normalize(self, features: Tensor) -> Tensor:
        """Unit features: (b c h w) -> the same."""
        return normalize(features)

    def brightness(self, images: Tensor) -> Tensor:
        """What matches are aligned by, of normalized images: (b 3 h w) -> (b h w)."""
        return align.brightness(images)

    def context(
        self, context: Context, coarse: tuple[Tensor, Tensor], valid: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Coarse features that know of the other image: (b c h0 w0), (b c h1 w1) -> the same."""
        return context(*coarse, *(None if mask is None else valid_cells(mask) for mask in valid))

    def coarse(
        self, coarse: tuple[Tensor, Tensor], consensus: Consensus, valid: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """Correlation, mutual filter, consensus, mutual filter: (b c h0 w0), (b c h1 w1) -> (b h0 w0 h1 w1)."""
        return self.filtered(mask_cells(correlate(*(features.float() for features in coarse)), *valid), consensus)

    def filtered(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Mutual filter, consensus, mutual filter; `scores` (b h0 w0 h1 w1) may be overwritten."""
        return consensus.filtered(scores)

    def consensus(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """The 4D convolutions of `coarse`, without the filters: (b h0 w0 h1 w1) -> the same."""
        return consensus(scores)

    def search(self, tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> Correspondences:
        """Both directions of the fine search; `tensor` is (b n m), cells of image 0 times cells of image 1."""
        return search.search_both(self, tensor, fine0, fine1, config)

    def search_cells(
        self,
        tensor: Tensor,
        fine0: FineMap,
        cells0: Tensor,
        fine1: FineMap,
        config: FineConfig,
        *,
        wanted: Tensor | None = None,
    ) -> Found:
        """The best fine cells of image 1 for the 16 fine cells of each of these cells (b g) of image 0.

        `tensor` (b n m) has the querying image first. Where `wanted` (b g 16) is given, other answers mean nothing.
        """
        return search.search(tensor, search.cell_queries(fine0, cells0, config.reading), fine1, config.temperature)

    def search_points(
        self, tensor: Tensor, fine0: FineMap, points0: Tensor, fine1: FineMap, config: FineConfig
    ) -> Found:
        """The same for any points (b g 2) of image 0, (x, y) in fine cells; answers are (b g 1)."""
        return search.search(tensor, search.point_queries(fine0, points0, config.reading), fine1, config.temperature)

    def refine(
        self,
        subpixel: Subpixel,
        fine: tuple[FineMap, FineMap],
        light: tuple[Tensor, Tensor] | None,
        matches: CellMatches,
    ) -> PointMatches:
        """Matched cells to matched points in network-input pixels, with scores."""
        return refine.refine(self, subpixel, fine, light, matches)

    def refine_points(
        self,
        subpixel: Subpixel,
        fine0: FineMap,
        fine1: FineMap,
        pair: Tensor,
        points0: Tensor,
        index1: Tensor,
        score: Tensor,
    ) -> Offsets:
        """Offsets of cells of image 1 that points (n 2) of image 0, in fine cells, found there with this score."""
        return refine.refine_points(subpixel, fine0, fine1, pair, points0, index1, score)

    # Parts of `refine`.

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        """The 3x3 fine cells around both cells of matches (n)."""
        windows = (subpixel.cell_windows(fine, pair, index) for fine, index in ((fine0, index0), (fine1, index1)))
        return subpixel.pair_windows(*windows)

    def support(
        self,
        index: Tensor,
        here: Tensor,
        there: Tensor,
        confidence: Tensor,
        pair: Tensor,
        shape: tuple[int, int, int],
    ) -> Support:
        """What the neighbors of matches tell; see `model.support.support`."""
        return support.support(index, here, there, confidence, pair, shape)

    def align(
        self, light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
    ) -> Tensor:
        """How far points of image 1 must move to look like those of image 0; see `model.align.align`."""
        return align.align(light0, light1, pair, points0, points1, motion)

    # Operations of NCNet and Sparse-NCNet.

    def pooled_correlation(self, fine0: Tensor, fine1: Tensor, pool: int) -> Tensor:
        """Products of unit features (b c H0 W0), (b c H1 W1), the largest of `pool`**4: (b h0 w0 h1 w1)."""
        return max_pool(torch.einsum("bchw,bcij->bhwij", fine0.float(), fine1.float()), pool)

    def relocalize(
        self, fine: tuple[Tensor, Tensor], pair: Tensor, index: tuple[Tensor, Tensor], pool: int, *, soft: bool
    ) -> tuple[Tensor, Tensor]:
        """Matched coarse cells to places in the fine maps; see `model.relocalize.relocalize`."""
        return relocalize.relocalize(fine, pair, index, pool, soft=soft)

    def nearest(self, rows: Tensor, others: Tensor, count: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The largest products of features (b n c) with others (b m c); see `model.sparse.nearest`."""
        return sparse.nearest(rows, others, count, valid)

    def nearest_correlations(
        self, coarse: tuple[Tensor, Tensor], count: int, valid: tuple[Tensor | None, Tensor | None]
    ) -> SparseScores:
        """The largest correlations of each cell of either image, (b c h0 w0), (b c h1 w1), with masks (b h w)."""
        shape = (len(coarse[0]), *coarse[0].shape[2:], *coarse[1].shape[2:])
        rows0, rows1 = (features.movedim(1, -1).flatten(1, 2) for features in coarse)
        masks = [None if mask is None else mask.flatten(1) for mask in valid]
        found = self.nearest(rows0, rows1, count, masks[1]), self.nearest(rows1, rows0, count, masks[0])
        return sparse.nearest_correlations(found, shape, valid)

    def sparse_consensus(self, scores: SparseScores, consensus: Consensus) -> SparseScores:
        """The consensus over the entries of a sparse tensor; see `model.sparse.sparse_consensus`."""
        return sparse.sparse_consensus(scores, consensus)
