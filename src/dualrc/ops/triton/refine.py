"""The refinement on the GPU, in a few kernels instead of hundreds of small torch operations.

The first kernel reads the windows around each match and writes the inputs of the small network, in both directions.
Matrix products evaluate the network. The second kernel applies its offsets and places the matches on a grid of cells.
The third computes the support of the neighbors in both images. The last counts better matches and aligns by brightness.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualrc.model import align, support
from dualrc.model import refine as definition
from dualrc.model.cells import FineMap, FineMapPair, TensorPair
from dualrc.model.refine import CellMatches, PointMatches
from dualrc.model.subpixel import WINDOW, Subpixel
from dualrc.ops.triton.launch import launcher, parts, readable

# Matches per program of the support, alignment and placement kernels.
_EXPLAINED, _ALIGNED, _PLACED = 8, 4, 128
# Planes of the grid: x, y, u, v, confidence, score.
_PLANES = 6
_MARGIN = support.STEP * support.REACH
# The constants of the definition, which the kernels read as globals.
_CONSTANTS = str([[x for x in vars(m).values() if isinstance(x, (int, float))] for m in (align, support, definition)])


class Network(NamedTuple):
    """The weights of a `Subpixel` in the layout of the matrix products."""

    log_temperature: Tensor
    # Weights (in out) and biases; empty without a learned correction.
    layers: tuple[tuple[Tensor, Tensor], ...]
    # Length of an input row, padded for alignment.
    pitch: int


def prepare(subpixel: Subpixel) -> Network:
    """Copy the weights of a `Subpixel`."""
    linear = [] if subpixel.correction is None else [m for m in subpixel.correction if isinstance(m, nn.Linear)]
    pitch = parts(linear[0].in_features, 8) * 8 if linear else 0
    layers = []
    for number, layer in enumerate(linear):
        weight = layer.weight.detach()
        if number == 0:
            weight = nn.functional.pad(weight, (0, pitch - layer.in_features))
        layers.append((weight.clone().T, layer.bias.detach().clone()))
    return Network(subpixel.log_temperature.detach().reshape(1).clone(), tuple(layers), pitch)


def refine(network: Network, fine: FineMapPair, light: TensorPair | None, matches: CellMatches) -> PointMatches:
    """Compute `model.refine.refine`."""
    count, device = len(matches.pair), matches.pair.device
    points0, points1 = (torch.empty(count, 2, dtype=torch.float32, device=device) for _ in range(2))
    score = torch.empty(count, dtype=torch.float32, device=device)
    if count == 0:
        return PointMatches(points0, points1, score)
    columns = CellMatches(*(readable(column) for column in matches))
    pair, index0, index1 = columns[:3]
    steps, learnt = _offsets(network, fine, columns)

    size0, size1 = (f.fine_size for f in fine)
    batch, row0, row1 = len(fine[0].features), size0[1] + _MARGIN, size1[1] + _MARGIN
    # Lengths are rounded up, so that each plane is aligned.
    places0, places1 = (
        parts((batch * (height + _MARGIN) + _MARGIN) * row + _MARGIN, 4) * 4
        for (height, _), row in ((size0, row0), (size1, row1))
    )
    maps = torch.zeros(_PLANES * (places0 + places1), dtype=torch.float32, device=device)
    known = torch.empty(5, count, dtype=torch.float32, device=device)
    at = torch.empty(2, count, dtype=torch.int32, device=device)
    around = torch.empty(2, 6, count, dtype=torch.float32, device=device)
    place = launcher("refine_jit.place", MARGIN=_MARGIN, LEARNT=bool(network.layers), BLOCK=_PLACED)
    place(
        (parts(count, _PLACED), 1, 1), *columns, steps, learnt, known, at, maps, count, *size0, *size1, places0, places1
    )
    explain = launcher("support_jit.explain_both", MATCHES=_EXPLAINED, CONSTANTS=_CONSTANTS)
    explain((parts(count, _EXPLAINED), 1, 1), pair, known, at, maps, around, score, count, places0, places1, row0, row1)
    light0, light1 = (maps, maps) if light is None else (readable(light[0]), readable(light[1]))
    pixels = (1, 1, 1, 1) if light is None else (*light0.shape[1:], *light1.shape[1:])
    finish = launcher("refine_jit.finish", ALIGN=light is not None, MATCHES=_ALIGNED, CONSTANTS=_CONSTANTS)
    finish(
        (parts(count, _ALIGNED), 1, 1), light0, light1, pair, index0, index1, known, at, maps, around, score,
        points0, points1, count, places0, places1, size0[1], size1[1], *pixels,
    )  # fmt: skip
    return PointMatches(points0, points1, score)


def _offsets(network: Network, fine: FineMapPair, matches: CellMatches) -> tuple[Tensor, Tensor]:
    """Return the soft-argmax (2 n 2) in images 1 and 0, and the network's output (2 n 3), undefined without one."""
    count, device = len(matches.pair), matches.pair.device
    steps = torch.empty(2 * count, 2, dtype=torch.float32, device=device)
    inputs = torch.empty(2 * count, network.pitch, dtype=torch.float32, device=device) if network.layers else steps
    features0, features1 = (readable(f.features) for f in fine)
    look = launcher(
        "refine_jit.look_around", LENGTH=features0.shape[2], CHANNELS=32, PITCH=network.pitch,
        LEARNT=bool(network.layers), warps=1,
    )  # fmt: skip
    look(
        (count, 1, 1), features0, features1, *matches, network.log_temperature, steps, inputs,
        count, features0.shape[1], features1.shape[1], fine[0].fine_size[1], fine[1].fine_size[1],
    )  # fmt: skip
    for number, (weight, bias) in enumerate(network.layers):
        # torch.addmm asks cuBLASLt for an algorithm in each call, which takes the host longer than these two launches.
        inputs = torch.mm(inputs, weight).add_(bias)
        if number < len(network.layers) - 1:
            inputs.relu_()
    return steps, inputs


def cosines(fine0: FineMap, fine1: FineMap, pair: Tensor, index0: Tensor, index1: Tensor) -> Tensor:
    """Return products of the features of the 3x3 fine cells around matched cells, (n 9 9) float32."""
    result = torch.empty(len(pair), WINDOW, WINDOW, dtype=torch.float32, device=pair.device)
    if len(pair):
        features0, features1 = readable(fine0.features), readable(fine1.features)
        launch = launcher("refine_jit.window_products", LENGTH=features0.shape[2], CHANNELS=32, warps=1)
        launch(
            (len(pair), 1, 1), features0, features1, readable(pair), readable(index0), readable(index1), result,
            features0.shape[1], features1.shape[1], fine0.fine_size[1], fine1.fine_size[1],
        )  # fmt: skip
    return result
