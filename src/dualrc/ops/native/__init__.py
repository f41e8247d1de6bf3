"""The operations in C for CPUs, compiled at installation for several instruction sets."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.errors import ConfigError
from dualrc.model import align, support
from dualrc.model.cells import FineMap, FineMapPair
from dualrc.model.consensus import Consensus, swap_images
from dualrc.model.correlation import normalize
from dualrc.model.refine import CellMatches
from dualrc.model.search import Found, Queries
from dualrc.model.subpixel import WINDOW, Subpixel, WindowPairs, inside
from dualrc.model.support import DirectedMatches, Support
from dualrc.ops import memory, onednn
from dualrc.ops.native import library
from dualrc.ops.torch import CoarseRows, TorchEngine, slack

# Columns of image 1, and channels of one direction, that the consensus kernel processes as one block.
_COLUMNS, _CHANNELS = 8, 8
# Hidden values that the consensus holds, so that they fit into the cache that all cores share.
_HIDDEN_VALUES = 2**22
# Smallest number of rows of image 1 in a strip. Each strip computes two extra rows.
_ROWS = 8


class NativeEngine(TorchEngine):
    """C kernels for float32 on a CPU without gradients; torch for everything else."""

    def __init__(self, variant: str | None = None) -> None:
        """Open the kernels. `variant` is one of library.available(); None selects the best that loads."""
        names = [variant] if variant else library.available()
        opened = [(name, found) for name in names if (found := library.opened(name)) is not None]
        if not opened:
            raise ConfigError(
                f"The C kernels{f' for {variant}' if variant else ''} were not compiled or cannot run here; available: "
                f"{', '.join(library.available()) or 'none'}. Reinstall dualrc with a C compiler, or omit the engine."
            )
        self._asked = variant
        self.variant, self._library = opened[0]
        self.name = f"native-{self.variant}"
        self._has_onednn = onednn.works()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the requested variant only, because another machine may have another instruction set."""
        return type(self), (self._asked,)

    def consensus(self, scores: Tensor, consensus: Consensus) -> Tensor:
        """Apply two layers of kernel size 3 in both directions, with hidden channels of three rows of image 0."""
        weights, biases = list(consensus.weights), list(consensus.biases)
        is_usual = [w.shape[2] for w in weights] == [3, 3] and len(biases[0]) % _CHANNELS == 0
        if not (is_usual and _fits(scores, *weights)):
            return super().consensus(scores, consensus)
        height0, width0, height1, width1 = scores.shape[1:]
        # (2c 81)
        first = torch.cat([weights[0], swap_images(weights[0])])[:, 0].flatten(1)
        second = torch.cat([weights[1], swap_images(weights[1])], dim=1)[0].flatten(1)
        # Values per row of image 1 in a strip: the hidden channels of three rows of image 0.
        row = 3 * width0 * (math.ceil(width1 / _COLUMNS) * _COLUMNS + 2) * len(first)
        rows = min(max(_ROWS, _HIDDEN_VALUES // row - 2), memory.working_values() // row - 2)
        strip = max(2, min(rows, height1 + 1) // 2 * 2)
        hidden = scores.new_empty((strip + 2) * row)
        result = torch.empty_like(scores, memory_format=torch.contiguous_format)
        for one, out in zip(scores, result, strict=True):
            self._library.call(
                "consensus",
                scores=one,
                first=first.T,
                bias=biases[0].repeat(2),
                second=second.T,
                hidden=hidden,
                out=out,
                height0=height0,
                width0=width0,
                height1=height1,
                width1=width1,
                channels=len(first),
                strip=strip,
                last_bias=biases[1].item(),
            )
        return result

    def correlate(self, coarse0: Tensor, coarse1: Tensor) -> Tensor:
        """Correlate by oneDNN, pair by pair."""
        if not (self._has_onednn and _fits(coarse0, coarse1)):
            return super().correlate(coarse0, coarse1)
        # (b h w c)
        rows0, rows1 = (normalize(features).movedim(1, -1) for features in (coarse0, coarse1))
        products = [
            onednn.linear(one.flatten(0, 1), other.flatten(0, 1)) for one, other in zip(rows0, rows1, strict=True)
        ]
        scores = torch.stack(products) if len(products) != 1 else products[0][None]
        return scores.view(*rows0.shape[:3], *rows1.shape[1:3])

    def search_queries(
        self, coarse: CoarseRows, queries: Queries, fine: FineMap, temperature: float, *, wanted: Tensor | None = None
    ) -> Found:
        """Run the search of ops/torch.py, where each query stops when the bound holds for it."""
        tensor, sums = coarse
        if not _fits(tensor, queries.features, fine.features):
            return super().search_queries(coarse, queries, fine, temperature, wanted=wanted)
        batch, groups, places, channels = queries.features.shape
        pair = torch.arange(batch).repeat_interleave(groups)
        mixed, shared = queries.rows.shape[2], queries.weights.shape[:2] == (1, 1) != (batch, groups)
        found = Found(
            torch.empty(batch, groups, places, dtype=torch.long),
            torch.empty(batch, groups, places),
            torch.empty(batch, groups, dtype=torch.long),
        )
        self._library.call(
            "search",
            tensor=tensor,
            sums=sums,
            queries=queries.features,
            pair=pair,
            rows=queries.rows.flatten(0, 1) + pair[:, None] * tensor.shape[1],
            weights=queries.weights,
            wanted=wanted,
            fine=fine.features,
            valid=fine.valid,
            index=found.best,
            score=found.score,
            visited=found.visited,
            groups=batch * groups,
            places=places,
            channels=channels,
            mixed=mixed,
            weights_apart=0 if shared else places * mixed,
            candidates=tensor.shape[2],
            width=fine.width,
            temperature=temperature,
            allowance=slack(torch.float32, temperature),
        )
        return found

    def offsets(self, subpixel: Subpixel, fine: FineMapPair, matches: CellMatches) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the inputs of the correction in C, for both directions, and its layers by oneDNN."""
        layers = [] if subpixel.correction is None else [m for m in subpixel.correction if isinstance(m, nn.Linear)]
        inputs, weights = [one.features for one in fine], [layer.weight for layer in layers]
        if not (layers and self._has_onednn and _fits(matches.score0, matches.score1, *inputs, *weights)):
            return super().offsets(subpixel, fine, matches)
        count, score = 2 * len(matches.pair), torch.cat([matches.score0, matches.score1])
        offset, x = torch.empty(count, 2), torch.empty(-(-count // onednn.ROWS) * onednn.ROWS, weights[0].shape[1])
        x[count:] = 0
        self._meet(
            fine,
            matches.pair.clamp(min=0),
            matches.index0,
            matches.index1,
            known=torch.log(score.clamp(min=0) + 1e-4) / 2,
            inputs=x,
            offsets=offset,
            temperature=subpixel.log_temperature.exp().item(),
        )
        for layer in layers:
            x = onednn.linear(x, layer.weight, layer.bias, relu=layer is not layers[-1])
        whole = torch.cat([inside(fine[1], matches.index1), inside(fine[0], matches.index0)])
        offset = (offset + x[:count, :2]).masked_fill_(~whole[:, None], 0) / 2
        offset1, offset0 = offset.chunk(2)
        certain1, certain0 = x[:count, 2].sigmoid().chunk(2)
        return offset0, offset1, (certain0 * certain1).sqrt()

    def windows(self, fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> WindowPairs:
        """Compute cosines between the 3x3 cells around matches, without a copy of their features."""
        if not _fits(fine0.features, fine1.features):
            return super().windows(fine0, fine1, pair, index0, index1)
        cosine = torch.empty(len(pair), WINDOW, WINDOW)
        self._meet((fine0, fine1), pair, index0, index1, cosines=cosine)
        middles = fine0.gather(pair, index0), fine1.gather(pair, index1)
        return WindowPairs(*middles, cosine, inside(fine0, index0), inside(fine1, index1))

    def _meet(self, fine: FineMapPair, pair: Tensor, index0: Tensor, index1: Tensor, **outputs: Any) -> None:
        """Compute the requested `outputs` from the cosines between the windows around matches."""
        (height0, width0), (height1, width1) = fine[0].fine_size, fine[1].fine_size
        unused = dict.fromkeys(("known", "cosines", "inputs", "offsets")) | {"temperature": 1.0}
        self._library.call(
            "meet",
            features0=fine[0].features,
            features1=fine[1].features,
            pair=pair,
            index0=index0,
            index1=index1,
            count=len(pair),
            channels=fine[0].features.shape[2],
            height0=height0,
            width0=width0,
            height1=height1,
            width1=width1,
            **(unused | outputs),
        )

    def support(self, matches: DirectedMatches) -> Support:
        """Fit the affine motion of the neighbors and measure their agreement, match by match."""
        if not _fits(matches.here, matches.there, matches.confidence):
            return super().support(matches)
        layout = support.lay_out(matches)
        count, offsets = len(matches.cells), support.neighbor_offsets(layout.row, matches.cells.device)
        found = Support(torch.empty(count), torch.empty(count, 2, 2), torch.empty(count, 2))
        self._library.call(
            "explain",
            maps=layout.maps,
            at=layout.at,
            known=layout.known,
            offsets=offsets,
            **found._asdict(),
            count=count,
            places=layout.maps.shape[1],
            neighbors=len(offsets),
            sigma=support.SIGMA,
            near=support.NEAR,
            own=support.OWN,
            doubt=support.DOUBT,
            ridge=support.RIDGE,
        )
        return found

    def align(
        self, light0: Tensor, light1: Tensor, pair: Tensor, points0: Tensor, points1: Tensor, motion: Tensor
    ) -> Tensor:
        """Align by Gauss-Newton on brightness, match by match."""
        if not _fits(light0, light1, points0, points1, motion):
            return super().align(light0, light1, pair, points0, points1, motion)
        places, weights = align.window(pair.device)
        # Pad the samples to whole vector registers.
        spare = (0, -len(weights) % library.LANES)
        across, down, weights = (F.pad(column, spare) for column in (*places.T, weights))
        moves = torch.empty(len(pair), 2)
        self._library.call(
            "fit",
            light0=light0,
            light1=light1,
            pair=pair,
            points0=points0.nan_to_num(),
            points1=points1.nan_to_num(),
            motion=motion.nan_to_num(),
            across=across,
            down=down,
            weights=weights,
            moves=moves,
            count=len(pair),
            places=len(weights),
            height0=light0.shape[1],
            width0=light0.shape[2],
            height1=light1.shape[1],
            width1=light1.shape[2],
            reach=align.REACH,
            damping=align.DAMPING,
            longest=align.LONGEST,
            farthest=align.FARTHEST,
            least=align.LEAST,
            gain=align.GAIN,
            largest=align.LARGEST,
            rounds=align.ROUNDS,
        )
        return moves


def _fits(*tensors: Tensor) -> bool:
    """Return whether the C functions support these tensors."""
    learning = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not learning and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
