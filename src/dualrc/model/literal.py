"""The paper's formulas as they are written, slow and plain: the oracle that every fast path is tested against.

Nothing here is shared with the fast code.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F


def conv4d(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(i h0 w0 h1 w1), (o i k k k k), (o) -> (o h0 w0 h1 w1), zero padding, one entry of the kernel at a time."""
    halo = weight.shape[2] // 2
    shape = values.shape[1:]
    padded = F.pad(values, [halo] * 8)
    result = bias.view(-1, 1, 1, 1, 1).expand(-1, *shape).clone()
    h0, w0, h1, w1 = shape
    for a, b, c, d in itertools.product(range(weight.shape[2]), repeat=4):
        window = padded[:, a : a + h0, b : b + w0, c : c + h1, d : d + w1]
        result += torch.tensordot(weight[:, :, a, b, c, d], window, dims=1)
    return result


def consensus(scores: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """N(C) + N(C^T)^T for one pair: (h0 w0 h1 w1) -> the same."""

    def layers(values: Tensor) -> Tensor:
        values = values[None]
        for weight, bias in zip(weights, biases, strict=True):
            values = conv4d(values, weight, bias).clamp(min=0)
        return values[0]

    return layers(scores) + layers(scores.permute(2, 3, 0, 1)).permute(2, 3, 0, 1)


def mutual_filter(scores: Tensor) -> Tensor:
    """The soft mutual filter of one pair, an entry at a time: (h0 w0 h1 w1) -> the same."""
    result = torch.empty_like(scores)
    for i, j, k, m in itertools.product(*map(range, scores.shape)):
        value = scores[i, j, k, m]
        ratio0 = value / (scores[:, :, k, m].max() + 1e-5)
        ratio1 = value / (scores[i, j].max() + 1e-5)
        result[i, j, k, m] = ratio0 * ratio1 * value
    return result


def coarse_scores(tensor: Tensor, row: int, column: int, reading: str) -> Tensor:
    """What the fine cell (row, column) of picture 0 reads from the coarse tensor (h0 w0 h1 w1): (h1 w1), sum 1."""
    height, width = tensor.shape[:2]
    if reading == "corner":
        if row == 0 and column == 0:  # a fact of the published implementation
            return torch.zeros_like(tensor[0, 0])
        y, x = row / 4, column / 4
    else:
        y, x = (row + 0.5) / 4 - 0.5, (column + 0.5) / 4 - 0.5
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = math.floor(y), math.floor(x)
    bottom, right = math.ceil(y), math.ceil(x)
    scores = (
        (1 - (y - top)) * (1 - (x - left)) * tensor[top, left]
        + (1 - (y - top)) * (x - left) * tensor[top, right]
        + (y - top) * (1 - (x - left)) * tensor[bottom, left]
        + (y - top) * (x - left) * tensor[bottom, right]
    )
    return scores / (scores.sum() + 1e-15)


def score_map(
    tensor: Tensor, fine0: Tensor, fine1: Tensor, row: int, column: int, *, reading: str, temperature: float
) -> Tensor:
    """S for one fine cell of picture 0 against all of picture 1: unit features (c H W) -> (H1 W1)."""
    cosine = torch.einsum("c,chw->hw", fine0[:, row, column], fine1)
    fine = torch.exp((cosine - 1) / temperature) if temperature > 0 else cosine
    coarse = coarse_scores(tensor, row, column, reading)
    return fine * coarse.repeat_interleave(4, dim=0).repeat_interleave(4, dim=1)


def best(scores: Tensor) -> tuple[int, float]:
    """The flat place of the largest score, the first among equals, and the score; -1 where none is above zero."""
    flat = scores.flatten()
    highest = float(flat.max())
    if highest <= 0:
        return -1, 0.0
    return int((flat == highest).nonzero()[0, 0]), highest


def match(
    tensor: Tensor, fine0: Tensor, fine1: Tensor, *, reading: str, temperature: float, query_share: float
) -> dict[tuple[int, int], float]:
    """All mutual matches of one pair: {(flat fine cell of 0, flat fine cell of 1): sum of both directions' scores}."""
    height, width = tensor.shape[:2]
    ranked = torch.sort(tensor.flatten(2).amax(2).flatten(), descending=True, stable=True).indices.tolist()
    chosen = set(ranked[: int(query_share * height * width)])
    transposed = tensor.permute(2, 3, 0, 1)
    result = {}
    for row, column in itertools.product(range(4 * height), range(4 * width)):
        if (row // 4) * width + column // 4 not in chosen:
            continue
        forward = score_map(tensor, fine0, fine1, row, column, reading=reading, temperature=temperature)
        there, score = best(forward)
        if there < 0:
            continue
        row1, column1 = divmod(there, fine1.shape[2])
        backward = score_map(transposed, fine1, fine0, row1, column1, reading=reading, temperature=temperature)
        back, score_back = best(backward)
        if back == row * fine0.shape[2] + column:
            result[back, there] = score + score_back
    return result
