"""The operations in Triton, for GPUs."""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dualrc.config import FineConfig
from dualrc.model import support
from dualrc.model.backbone import CompactBackbone
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import correlate, mask_cells
from dualrc.model.search import Found
from dualrc.model.subpixel import WindowPairs, inside
from dualrc.model.support import Support
from dualrc.ops import memory
from dualrc.ops.torch import EXCESS, FIRST_BLOCK, TorchEngine
from dualrc.ops.triton import consensus as consensus_kernels
from dualrc.ops.triton import convolution
from dualrc.ops.triton import refine as refine_kernels
from dualrc.ops.triton import search as search_kernels


class TritonEngine(TorchEngine):
    """Triton kernels for float16 and float32 without gradients; torch for anything else."""

    name = "triton"

    def __init__(self) -> None:
        self._prepared: WeakKeyDictionary[Consensus, tuple[object, consensus_kernels.Prepared]] = WeakKeyDictionary()

    def prepare(self, backbone: nn.Module) -> nn.Module:
        """The compact backbone in few kernels, compiled once for images of all sizes."""
        dtype = next(backbone.parameters()).dtype
        if not isinstance(backbone, CompactBackbone) or dtype not in convolution.DTYPES or interpreted():
            return backbone
        fused = convolution.fuse(backbone, dtype)
        fused.compile_kernels()
        return fused

    def coarse(
        self, coarse: tuple[Tensor, Tensor], consensus: Consensus, valid: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """In half precision where the features are; the first filter is applied while the consensus reads."""
        half = all(features.dtype == torch.float16 for features in coarse)
        dtype = torch.float16 if half else torch.float32
        shape = torch.Size((len(coarse[0]), *coarse[0].shape[2:], *coarse[1].shape[2:]))
        if torch.is_grad_enabled() or not consensus_kernels.supported(shape, dtype, list(consensus.weights)):
            return super().coarse(coarse, consensus, valid)
        scores = mask_cells(correlate(*(features.to(dtype) for features in coarse)), *valid)
        maxima = consensus_kernels.maxima_of(scores)
        prepared = self._weights(consensus, dtype)
        scores = consensus_kernels.apply(scores, prepared, memory.working_values(), maxima=maxima)
        return consensus_kernels.mutual_filter(scores)

    def _weights(self, consensus: Consensus, dtype: torch.dtype) -> consensus_kernels.Prepared:
        """The weights as the kernels read them, made once for as long as they don't change."""
        weights, biases = list(consensus.weights), list(consensus.biases)
        # Tensors of inference mode have no version, and nothing can change them.
        state = (dtype, *((p.device, p.data_ptr(), None if p.is_inference() else p._version) for p in weights + biases))
        known = self._prepared.get(consensus)
        if known is None or known[0] != state:
            known = self._prepared[consensus] = state, consensus_kernels.prepare(weights, biases, dtype)
        return known[1]

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
        """Four kernels, and nothing that the host waits for."""
        if not search_kernels.supported(fine0, fine1) or tensor.dtype not in (torch.float16, torch.float32):
            return super().search_cells(tensor, fine0, cells0, fine1, config, wanted=wanted)
        return search_kernels.search_cells(
            tensor,
            cells0,
            fine0,
            fine1,
            config.reading,
            config.temperature,
            FIRST_BLOCK,
            excess=EXCESS[fine1.features.dtype],
            wanted=wanted,
        )

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        """Cosines between the 3x3 cells around matches, without a copy of their features."""
        if not _fits(fine0.features, fine1.features):
            return super().windows(fine0, fine1, pair, index0, index1)
        cosine = refine_kernels.cosines(fine0, fine1, pair, index0, index1)
        middles = fine0.gather(pair, index0).float(), fine1.gather(pair, index1).float()
        return WindowPairs(*middles, cosine, inside(fine0, index0), inside(fine1, index1))

    def support(
        self,
        index: Tensor,
        here: Tensor,
        there: Tensor,
        confidence: Tensor,
        pair: Tensor,
        shape: tuple[int, int, int],
    ) -> Support:
        """The affine motion of the neighbors and what it explains."""
        if not _fits(here, there, confidence):
            return super().support(index, here, there, confidence, pair, shape)
        return refine_kernels.explained(support.lay_out(index, here, there, confidence, pair, shape))

    def align(
        self, light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
    ) -> Tensor:
        """Gauss-Newton on brightness."""
        if not _fits(light0, light1):
            return super().align(light0, light1, pair, points0, points1, motion)
        return refine_kernels.aligned(light0, light1, pair, points0, points1, motion)


def _fits(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these."""
    learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not learning and all(tensor.dtype in (torch.float16, torch.float32) for tensor in tensors)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, which it does on any device, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(device: torch.device) -> bool:
    """Whether kernels can be compiled and run there: Triton needs a C compiler, and not too old a GPU."""
    return find_spec("triton") is not None and (interpreted() or (device.type == "cuda" and _works(device)))


@cache
def _works(device: torch.device) -> bool:
    try:
        return bool(consensus_kernels.mutual_filter(torch.ones(1, 1, 1, 1, 1, device=device)).isfinite().all())
    except Exception as error:  # compilers fail in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warnings.warn(f"Triton can't be used here ({reason}); matching is slower without it.", stacklevel=2)
        return False
