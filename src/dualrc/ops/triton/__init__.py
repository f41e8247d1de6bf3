"""The operations as Triton kernels for GPUs."""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dualrc.config import FineConfig
from dualrc.files import first_line
from dualrc.model.backbone import CompactBackbone
from dualrc.model.cells import FineMap, FineMapPair, MaskPair, TensorPair
from dualrc.model.consensus import Consensus
from dualrc.model.dualrc import DualRCNet
from dualrc.model.refine import CellMatches, PointMatches
from dualrc.model.search import Correspondences, Found
from dualrc.model.subpixel import Subpixel, WindowPairs, inside
from dualrc.ops.torch import TorchEngine
from dualrc.ops.triton import backbone as backbone_kernels
from dualrc.ops.triton import consensus as consensus_kernels
from dualrc.ops.triton import features as feature_kernels
from dualrc.ops.triton import refine as refine_kernels
from dualrc.ops.triton import search as search_kernels

if TYPE_CHECKING:
    from dualrc.model.network import Network

T = TypeVar("T")


class TritonEngine(TorchEngine):
    """Triton kernels for float16 and float32 without gradients; torch for everything else."""

    name = "triton"

    def __init__(self) -> None:
        self._prepared: WeakKeyDictionary[nn.Module, tuple[object, Any]] = WeakKeyDictionary()

    def prepare(self, backbone: nn.Module) -> nn.Module:
        """Return the compact backbone as a few fused kernels, compiled once for all image sizes."""
        if not isinstance(backbone, CompactBackbone) or interpreted():
            return backbone
        dtype = next(backbone.parameters()).dtype
        if dtype not in backbone_kernels.DTYPES:
            return backbone
        fused = backbone_kernels.fuse(backbone, dtype)
        fused.compile_kernels()
        return fused

    @torch.inference_mode()
    def warm_up(self, network: "Network", dtype: torch.dtype) -> None:
        """Compile, or load from Triton's cache, every kernel that a pair of any sizes may need.

        Kernels depend on types, channels and masks, but never on sizes. Tiny images therefore cover every kernel.
        """
        if interpreted():
            return
        config, device = network.config, next(network.parameters()).device
        for size in (32, 48):
            images = torch.zeros(1, 3, size, size, dtype=dtype, device=device).contiguous(
                memory_format=torch.channels_last
            )
            network.extract(images)
        # NCNet and Sparse-NCNet have no fine search.
        if not isinstance(network, DualRCNet):
            self.filtered(torch.ones(1, 2, 3, 2, 3, device=device), network.consensus)
            return
        kept = dtype if dtype in (torch.float16, torch.float32) else torch.float32
        fine_channels, coarse_channels = config.backbone.fine_channels, config.backbone.coarse_channels
        everywhere = torch.ones(1, 8, 12, dtype=torch.bool, device=device)
        for valid in (None, everywhere):
            coarse = torch.ones(1, coarse_channels, 2, 3, dtype=kept, device=device)
            tensor = self.coarse((coarse, coarse), network.consensus, (valid, valid)).flatten(3).flatten(1, 2)
            features = torch.full((1, fine_channels, 8, 12), fine_channels**-0.5, dtype=kept, device=device)
            fine = FineMap.of(features, valid)
            # `warp` queries all cells; `match_points` queries the cells that it found.
            for share in {1.0, config.fine.query_share}:
                found = self.search(tensor, fine, fine, replace(config.fine, query_share=share))
            cells, wanted = torch.arange(6, device=device)[None], torch.ones(1, 6, 16, dtype=torch.bool, device=device)
            for asked in (None, wanted):
                self.search_cells(tensor, (fine, fine), cells, config.fine, wanted=asked)
        if network.subpixel is None:
            return
        columns = (column[0] for column in (found.index0, found.index0, found.score0, found.score0))
        matches = CellMatches(torch.zeros_like(found.index0[0]), *columns)
        light = torch.ones(1, 32, 48, dtype=kept, device=device)
        for lights in (None, (light, light)):
            self.refine(network.subpixel, (fine, fine), lights, matches)
        self.windows(fine, fine, *matches[:3])

    def normalize(self, features: Tensor) -> Tensor:
        """Normalize with one kernel, for channels-last maps as the backbone returns them."""
        if not _fits(features) or not features.is_contiguous(memory_format=torch.channels_last):
            return super().normalize(features)
        return feature_kernels.normalize(features)

    def brightness(self, images: Tensor) -> Tensor:
        """Compute the brightness with one kernel."""
        return feature_kernels.brightness(images) if _fits(images) else super().brightness(images)

    def coarse(self, coarse: TensorPair, consensus: Consensus, valid: MaskPair) -> Tensor:
        """Compute in half precision if the features are; the consensus applies the first filter while it reads."""
        half = all(features.dtype == torch.float16 for features in coarse)
        dtype = torch.float16 if half else torch.float32
        shape = torch.Size((len(coarse[0]), *coarse[0].shape[2:], *coarse[1].shape[2:]))
        if torch.is_grad_enabled() or not consensus_kernels.supported(shape, dtype, list(consensus.weights)):
            return super().coarse(coarse, consensus, valid)
        scores, maxima, filtered = consensus_kernels.correlate(*coarse, valid, dtype)
        scores = consensus_kernels.apply(scores, self._weights(consensus, dtype), maxima)
        return consensus_kernels.mutual_filter(scores, filtered)

    def consensus(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Apply the 4D convolutions to a tensor that was computed and filtered elsewhere."""
        if not consensus_kernels.supported(scores.shape, scores.dtype, list(consensus.weights)):
            return super().consensus(scores, consensus)
        return consensus_kernels.apply(scores, self._weights(consensus, scores.dtype))

    def _weights(self, consensus: Consensus, dtype: torch.dtype) -> consensus_kernels.Prepared:
        return self._known(
            consensus, dtype, lambda: consensus_kernels.prepare(list(consensus.weights), list(consensus.biases), dtype)
        )

    def _known(self, module: nn.Module, dtype: torch.dtype, prepare: Callable[[], T]) -> T:
        """Return the weights of a module in the layout of the kernels, cached while they do not change."""
        # Inference tensors have no version counter, and nothing can change them.
        state = (
            dtype,
            *((p.device, p.data_ptr(), None if p.is_inference() else p._version) for p in module.parameters()),
        )
        known = self._prepared.get(module)
        if known is None or known[0] != state:
            known = self._prepared[module] = state, prepare()
        return known[1]

    def search(self, tensor: Tensor, fine0: FineMap, fine1: FineMap, config: FineConfig) -> Correspondences:
        """Search in both directions with eleven kernels and no synchronization with the host."""
        if not search_kernels.supported(fine0, fine1) or not _fits(tensor):
            return super().search(tensor, fine0, fine1, config)
        return search_kernels.search_both(tensor, fine0, fine1, config)

    def search_cells(
        self, tensor: Tensor, fine: FineMapPair, cells0: Tensor, config: FineConfig, *, wanted: Tensor | None = None
    ) -> Found:
        """Search in one direction with four kernels and no synchronization with the host."""
        if not search_kernels.supported(*fine) or not _fits(tensor):
            return super().search_cells(tensor, fine, cells0, config, wanted=wanted)
        return search_kernels.search_cells(tensor, fine, cells0, config, wanted=wanted)

    def refine(
        self, subpixel: Subpixel, fine: FineMapPair, light: TensorPair | None, matches: CellMatches
    ) -> PointMatches:
        """Refine with four kernels, plus the matrix products of the small network."""
        features, lights, weights = [f.features for f in fine], light or (), list(subpixel.parameters())
        if not (
            _fits(*features, *lights, *weights, matches.score0, matches.score1)
            and len({tensor.dtype for tensor in features}) == len({tensor.dtype for tensor in lights} or {0}) == 1
            and all(weight.dtype == torch.float32 for weight in weights)
        ):
            return super().refine(subpixel, fine, light, matches)
        network = self._known(subpixel, torch.float32, lambda: refine_kernels.prepare(subpixel))
        return refine_kernels.refine(network, fine, light, matches)

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        """Compute cosines between the 3x3 cells around matches, without a copy of their features."""
        if not _fits(fine0.features, fine1.features):
            return super().windows(fine0, fine1, pair, index0, index1)
        cosine = refine_kernels.cosines(fine0, fine1, pair, index0, index1)
        middles = fine0.gather(pair, index0).float(), fine1.gather(pair, index1).float()
        return WindowPairs(*middles, cosine, inside(fine0, index0), inside(fine1, index1))


def _fits(*tensors: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not learning and all(tensor.dtype in (torch.float16, torch.float32) for tensor in tensors)


def interpreted() -> bool:
    """Return whether Triton interprets its kernels in Python, on any device, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(device: torch.device) -> bool:
    """Return whether Triton can compile and run kernels here; it needs a C compiler and a recent GPU."""
    return find_spec("triton") is not None and (interpreted() or (device.type == "cuda" and _works(device)))


@cache
def _works(device: torch.device) -> bool:
    try:
        scores, maxima = torch.ones(1, 1, 1, 1, 1, device=device), torch.zeros(2, 4, device=device)
        return bool(consensus_kernels.mutual_filter(scores, consensus_kernels.Maxima(*maxima)).isfinite().all())
    except Exception as error:
        # Compilation can raise any exception.
        reason = first_line(error)
        warnings.warn(f"Cannot use Triton here ({reason}); matching continues without it, more slowly.", stacklevel=2)
        return False
