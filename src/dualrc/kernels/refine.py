"""Refinement of matches: what torch does in hundreds of small steps, one kernel each, on a GPU and on a CPU.

Each is the twin of plain code: `cosines` of model.subpixel.meet, `explained` of model.support, `moves` of model.align.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.kernels import device_of, native, power_above, usable

WINDOW = 9  # fine cells around a match


def supported(*tensors: Tensor) -> bool:
    """Whether the kernels can work with these."""
    in_triton = all(usable(tensor) and tensor.dtype in (torch.float16, torch.float32) for tensor in tensors)
    return native.usable(*tensors) or in_triton


def cosines(
    features0: Tensor, features1: Tensor, pair: Tensor, index0: Tensor, index1: Tensor, widths: tuple[int, int]
) -> Tensor:
    """Products of the features (b h*w c) of the 3x3 fine cells around matched ones, (n 9 9), float32.

    `pair` (n) and row-major indices (n) say which cells are matched; `widths` are those of the maps, in fine cells.
    """
    result = torch.empty(len(pair), WINDOW, WINDOW, device=pair.device)
    if native.usable(features0, features1):
        native.call(
            "meet",
            features0=features0,
            features1=features1,
            pair=pair,
            index0=index0,
            index1=index1,
            cosines=result,
            count=len(pair),
            channels=features0.shape[2],
            height0=features0.shape[1] // widths[0],
            width0=widths[0],
            height1=features1.shape[1] // widths[1],
            width1=widths[1],
        )
    elif len(pair):
        from dualrc.kernels.refine_jit import window_products

        with device_of(pair):
            window_products[(len(pair),)](
                features0.contiguous(), features1.contiguous(), pair, index0, index1, result,
                features0.shape[1], features1.shape[1], *widths, features0.shape[2],
                CHANNELS=32, num_warps=1,
            )  # fmt: skip
    return result


def explained(
    maps: Tensor,
    at: Tensor,
    known: Tensor,
    row_length: int,
    *,
    step: int,
    reach: int,
    sigma: float,
    doubt: float,
    near: float,
    own: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of neighbours that move with matches, (n), how they do, (n 2 2), and where they would have it, (n 2).

    `maps` (5 p) hold x, y, u, v and trust of matches by place, zero where there is none; `known` (5 n) those of the
    matches themselves and `at` (n) their places. Neighbours lie every `step` places, `reach` steps to each side.
    """
    count = len(at)
    share = torch.empty(count, device=at.device)
    motion, shift = torch.empty(count, 2, 2, device=at.device), torch.empty(count, 2, device=at.device)
    if native.usable(maps):
        axis = torch.arange(-reach, reach + 1, device=at.device) * step
        offsets = (axis[:, None] * row_length + axis).flatten()
        offsets = offsets[offsets != 0]  # it is no witness for itself
        native.call(
            "explain",
            maps=maps,
            at=at,
            known=known,
            offsets=offsets,
            share=share,
            motion=motion,
            shift=shift,
            count=count,
            places=maps.shape[1],
            neighbours=len(offsets),
            sigma=sigma,
            near=near,
            own=own,
            doubt=doubt,
        )
    elif count:
        from dualrc.kernels.refine_jit import explain

        matches = 8
        with device_of(at):
            explain[(-(-count // matches),)](
                maps.contiguous(), at, known.contiguous(), share, motion, shift, count, maps.shape[1],
                row_length, STEP=step, REACH=reach, SHARPNESS=0.5 / sigma**2, DOUBT=doubt, NEAR=0.5 / near**2, OWN=own,
                MATCHES=matches, NEIGHBOURS=power_above((2 * reach + 1) ** 2), num_warps=4,
            )  # fmt: skip
    return share, motion, shift


def moves(
    light0: Tensor,
    light1: Tensor,
    pair: Tensor,
    points0: Tensor,
    points1: Tensor,
    motion: Tensor,
    window: tuple[Tensor, Tensor],
    **limits: float,
) -> Tensor:
    """How far points of picture 1 must move for their windows to look like those of picture 0: (n 2).

    `window` are the places of one, (k 2), and their weights, (k); on a GPU both follow from the limits.
    """
    count = len(pair)
    result = torch.empty(count, 2, device=pair.device)
    if native.usable(light0, light1):
        spare = (0, -len(window[1]) % native.LANES)  # for whole vectors
        across, down, weights = (F.pad(column, spare) for column in (*window[0].T, window[1]))
        native.call(
            "fit",
            light0=light0,
            light1=light1,
            pair=pair,
            points0=points0,
            points1=points1,
            motion=motion,
            across=across,
            down=down,
            weights=weights,
            moves=result,
            count=count,
            places=len(weights),
            height0=light0.shape[1],
            width0=light0.shape[2],
            height1=light1.shape[1],
            width1=light1.shape[2],
            **{name.lower(): limit for name, limit in limits.items() if name != "STEP"},
        )
    elif count:
        from dualrc.kernels.refine_jit import fit_windows

        matches = 4
        places = (2 * int(limits["REACH"]) // int(limits["STEP"]) + 1) ** 2
        with device_of(pair):
            fit_windows[(-(-count // matches),)](
                light0.contiguous(), light1.contiguous(), pair, points0.contiguous(), points1.contiguous(),
                motion.contiguous(), result, count, *light0.shape[1:], *light1.shape[1:],
                MATCHES=matches, PLACES=power_above(places), num_warps=4, **limits,
            )  # fmt: skip
    return result
