"""Launches of the kernels of the refinement: what torch does in hundreds of small steps, one kernel each."""

import torch
from torch import Tensor

from dualrc.model import align, support
from dualrc.model.cells import FineMap
from dualrc.model.subpixel import WINDOW
from dualrc.model.support import NeighborMaps, Support
from dualrc.ops.triton.launch import device_of, power_above

_EXPLAINED, _ALIGNED = 8, 4  # matches of a program


def cosines(fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> Tensor:
    """Products of the features of the 3x3 fine cells around matched ones, (n 9 9), float32."""
    from dualrc.ops.triton.refine_jit import window_products

    result = torch.empty(len(pair), WINDOW, WINDOW, device=pair.device)
    if len(pair):
        with device_of(pair):
            window_products[(len(pair),)](
                fine0.features.contiguous(), fine1.features.contiguous(), pair, index0, index1, result,
                fine0.features.shape[1], fine1.features.shape[1], fine0.fine_size[1], fine1.fine_size[1],
                fine0.features.shape[2], CHANNELS=32, num_warps=1,
            )  # fmt: skip
    return result


def explained(layout: NeighborMaps) -> Support:
    """What `model.support.explain` gives."""
    from dualrc.ops.triton.refine_jit import explain

    at, count = layout.at, len(layout.at)
    found = Support(
        torch.empty(count, device=at.device),
        torch.empty(count, 2, 2, device=at.device),
        torch.empty(count, 2, device=at.device),
    )
    if count:
        with device_of(at):
            explain[(-(-count // _EXPLAINED),)](
                layout.maps, at, layout.known.contiguous(), *found, count, layout.maps.shape[1], layout.row,
                STEP=support.STEP, REACH=support.REACH, SHARPNESS=0.5 / support.SIGMA**2, DOUBT=support.DOUBT,
                RIDGE=support.RIDGE,                NEAR=0.5 / support.NEAR**2, OWN=support.OWN, MATCHES=_EXPLAINED,
                NEIGHBORS=power_above((2 * support.REACH + 1) ** 2), num_warps=4,
            )  # fmt: skip
    return found


def aligned(light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor) -> Tensor:
    """What `model.align.align` gives."""
    from dualrc.ops.triton.refine_jit import fit_windows

    count = len(pair)
    result = torch.empty(count, 2, device=pair.device)
    if count:
        samples = (2 * align.REACH // align.STEP + 1) ** 2
        with device_of(pair):
            fit_windows[(-(-count // _ALIGNED),)](
                light0.contiguous(), light1.contiguous(), pair, points0.nan_to_num(), points1.nan_to_num(),
                motion.nan_to_num(), result, count, *light0.shape[1:], *light1.shape[1:],
                REACH=align.REACH, STEP=align.STEP, ROUNDS=align.ROUNDS, DAMPING=align.DAMPING, LONGEST=align.LONGEST,
                FARTHEST=align.FARTHEST, LEAST=align.LEAST, GAIN=align.GAIN, LARGEST=align.LARGEST,
                MATCHES=_ALIGNED, PLACES=power_above(samples), num_warps=4,
            )  # fmt: skip
    return result
