"""The formulas of the paper and of the refinement, one entry or one match at a time, in float64.

This file shares only input and output types with the definition in `model`, and nothing with the engines.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc.model.cells import FineMap
from dualrc.model.subpixel import Subpixel, WindowPairs
from dualrc.model.support import DirectedMatches, Support


def supported(matches: DirectedMatches) -> Support:
    """Return share, motion and shift of each match, by weighted least squares over its neighbors."""
    index, here, there, confidence, pair, (_, _, width) = matches
    own = {(p, *divmod(i, width)): n for n, (p, i) in enumerate(zip(pair.tolist(), index.tolist(), strict=True))}
    shares, motions, shifts = [], [], []
    for number, (p, i) in enumerate(zip(pair.tolist(), index.tolist(), strict=True)):
        row, column = divmod(i, width)
        steps = [(a, b) for a in range(-9, 10, 3) for b in range(-9, 10, 3) if (a, b) != (0, 0)]
        around = [n for a, b in steps if (n := own.get((p, row + a, column + b))) is not None]
        weight = confidence[around].double()
        x, y = (here[around] - here[number]).double().T if around else torch.zeros(2, 0).double()
        uv = (there[around] - there[number]).double()
        # (k 2)
        design = torch.stack([x, y], 1)
        normal = design.T @ (weight[:, None] * design) + 0.1 * torch.eye(2)
        # (2 2)
        motion = torch.linalg.solve(normal, design.T @ (weight[:, None] * uv)).T
        residual = uv - design @ motion.T
        square = residual.square().sum(1)
        near = weight * torch.exp(-square / 2)
        shifts.append((near[:, None] * residual).sum(0) / (near.sum() + 1))
        shares.append((weight * torch.exp(-square / (2 * 0.25**2))).sum() / (weight.sum() + 4))
        motions.append(motion)
    if not shares:
        return Support(torch.zeros(0), torch.zeros(0, 2, 2), torch.zeros(0, 2))
    return Support(torch.stack(shares), torch.stack(motions), torch.stack(shifts))


def correlation(features0: Tensor, features1: Tensor, valid0: Tensor | None, valid1: Tensor | None) -> Tensor:
    """Compute C of one pair: (c h0 w0), (c h1 w1) -> (h0 w0 h1 w1); masked cells have correlation 0."""
    shape = (*features0.shape[1:], *features1.shape[1:])
    result = torch.zeros(shape, dtype=torch.float64)
    for i, j, k, m in itertools.product(*map(range, shape)):
        if valid0 is not None and not valid0[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].any():
            continue
        if valid1 is not None and not valid1[4 * k : 4 * k + 4, 4 * m : 4 * m + 4].any():
            continue
        f, g = features0[:, i, j], features1[:, k, m]
        result[i, j, k, m] = (f @ g) / math.sqrt((f @ f + 1e-6) * (g @ g + 1e-6))
    return result


def convolved(scores: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Compute N(C) + N(C^T)^T of one pair: (h0 w0 h1 w1) -> the same."""

    def layers(values: Tensor) -> Tensor:
        values = values[None]
        for weight, bias in zip(weights, biases, strict=True):
            values = conv4d(values, weight, bias).clamp(min=0)
        return values[0]

    return layers(scores) + layers(scores.permute(2, 3, 0, 1)).permute(2, 3, 0, 1)


def conv4d(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve (i h0 w0 h1 w1) with (o i k k k k) and bias (o) to (o h0 w0 h1 w1), zero-padded."""
    halo = weight.shape[2] // 2
    h0, w0, h1, w1 = values.shape[1:]
    padded = F.pad(values, [halo] * 8)
    result = bias.view(-1, 1, 1, 1, 1).expand(-1, h0, w0, h1, w1).clone()
    for a, b, c, d in itertools.product(range(weight.shape[2]), repeat=4):
        window = padded[:, a : a + h0, b : b + w0, c : c + h1, d : d + w1]
        result += torch.tensordot(weight[:, :, a, b, c, d], window, dims=1)
    return result


def mutual_filter(scores: Tensor) -> Tensor:
    """Apply M to one pair, C_ijkl * r^A_ijkl * r^B_ijkl: (h0 w0 h1 w1) -> the same."""
    result = torch.empty_like(scores)
    for i, j, k, m in itertools.product(*map(range, scores.shape)):
        value = scores[i, j, k, m]
        ratio0 = value / (scores[:, :, k, m].max() + 1e-5)
        ratio1 = value / (scores[i, j].max() + 1e-5)
        result[i, j, k, m] = ratio0 * ratio1 * value
    return result


def attended(
    weights: dict[str, Tensor], heads: list[int], maps: list[Tensor], masks: list[Tensor | None]
) -> list[Tensor]:
    """Apply self- and cross-attention layers with these weights to coarse features (c h w) of both images."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name: str, x: Tensor) -> Tensor:
        centered = x - x.mean(1, keepdim=True)
        scale = (centered.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return centered / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    sizes = [features.shape[1:] for features in maps]
    columns = [features.flatten(1).T for features in maps]
    scales = [(x.square().mean(1, keepdim=True) + 1e-6).sqrt() for x in columns]
    tokens = []
    for x, scale, size in zip(columns, scales, sizes, strict=True):
        places = torch.stack([_waves(size, *divmod(cell, size[1])) for cell in range(math.prod(size))])
        tokens.append(linear("embed", x / scale) + linear("place", places))
    for number, count in enumerate(heads):
        layer = f"layers.{number}"
        normed = [norm(f"{layer}.norm", x) for x in tokens]
        queries = [linear(f"{layer}.query", x) for x in normed]
        answers = []
        for x, size, mask in zip(normed, sizes, masks, strict=True):
            squares = linear(f"{layer}.answer", _squares(x, size, mask))
            answers.append(torch.cat([squares, weights[f"{layer}.nothing"][None]]))
        updated = []
        for own in (0, 1):
            parts = []
            for side, source in ((0, answers[own]), (1, answers[1 - own])):
                query = queries[own].chunk(2, dim=1)[side].chunk(count, dim=1)
                keys, values = (x.chunk(count, dim=1) for x in source.chunk(4, dim=1)[2 * side : 2 * side + 2])
                for q, k, v in zip(query, keys, values, strict=True):
                    parts.append((q @ k.T / math.sqrt(q.shape[1])).softmax(1) @ v)
            x = tokens[own] + linear(f"{layer}.merge", torch.cat(parts, dim=1))
            hidden = linear(f"{layer}.mlp.0", norm(f"{layer}.mlp_norm", x))
            hidden = hidden / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
            updated.append(x + linear(f"{layer}.mlp.2", hidden))
        tokens = updated
    changes = [linear("out", norm("norm", x)) * scale for x, scale in zip(tokens, scales, strict=True)]
    return [features + change.T.view_as(features) for features, change in zip(maps, changes, strict=True)]


def _waves(size: torch.Size, row: int, column: int) -> Tensor:
    """Return sines and cosines of five octaves of the position of a cell."""
    values: list[float] = []
    for index, side in ((row, size[0]), (column, size[1])):
        angles = [math.pi / 2 * 2**octave * (2 * index + 1 - side) / max(size) for octave in range(5)]
        values += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    return torch.tensor(values, dtype=torch.float64)


def _squares(tokens: Tensor, size: torch.Size, mask: Tensor | None) -> Tensor:
    """Average the valid tokens (h*w w) of each square of 2x2 cells that has one: (m w); `mask` is (4h 4w)."""
    means = []
    for row, column in itertools.product(range(0, size[0], 2), range(0, size[1], 2)):
        members = []
        for i, j in itertools.product(range(row, min(row + 2, size[0])), range(column, min(column + 2, size[1]))):
            if mask is None or mask[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].any():
                members.append(tokens[i * size[1] + j])
        if members:
            means.append(torch.stack(members).mean(0))
    return torch.stack(means) if means else tokens[:0]


def coarse_scores(tensor: Tensor, x: float, y: float, reading: str) -> Tensor:
    """Compute S~ at a point (x, y), in fine cells of image 0, from the tensor (h0 w0 h1 w1): (h1 w1), sum 1."""
    shift = 0.0 if reading == "corner" else 0.5
    flat = tensor.flatten(2)
    scores = bilinear(flat, (x + shift) / 4 - shift, (y + shift) / 4 - shift).view(tensor.shape[2:])
    return scores / (scores.sum() + 1e-15)


def score_map(coarse: Tensor, feature: Tensor, fine1: Tensor, size1: tuple[int, int], temperature: float) -> Tensor:
    """Compute S = S^ * U_r(S~) of a query with unit feature (c) and all fine cells (4h*4w c) of image 1: (4h 4w)."""
    cosine = (fine1 @ feature).view(4 * size1[0], 4 * size1[1])
    fine = torch.exp((cosine - 1) / temperature) if temperature > 0 else cosine
    return fine * coarse.repeat_interleave(4, dim=0).repeat_interleave(4, dim=1)


def best(scores: Tensor) -> tuple[int, float]:
    """Return the flat index of the largest score, the first of equals, and the score; -1 if none is above zero."""
    flat = scores.flatten()
    highest = float(flat.max())
    if highest <= 0:
        return -1, 0.0
    return int((flat == highest).nonzero()[0, 0]), highest


def crowd(index: Tensor, score: Tensor, pair: Tensor, width: int) -> Tensor:
    """Count the better matches in the same 8x8 fine cells; among equals the first in row-major order is better."""
    rows = list(zip(pair.tolist(), index.tolist(), score.tolist(), strict=True))

    def square(p: int, i: int) -> tuple[int, int, int]:
        return p, i // width // 8, i % width // 8

    counts = [
        sum(square(q, j) == square(p, i) and (other > own or (other == own and j < i)) for q, j, other in rows)
        for p, i, own in rows
    ]
    return torch.tensor(counts, dtype=torch.float64)


def aligned(light0: Tensor, light1: Tensor, point0: Tensor, point1: Tensor, motion: Tensor) -> Tensor:
    """Return the motion (2) of one point of image 1 by one Gauss-Newton step on normalized 9x9 windows."""
    grid = [(float(dx), float(dy)) for dy in range(-12, 13, 3) for dx in range(-12, 13, 3)]
    weights = torch.tensor([math.exp(-1.125 * (dx * dx + dy * dy) / 144) for dx, dy in grid], dtype=torch.float64)
    weights = weights / weights.sum()

    def window(light: Tensor, center: Tensor, affine: Tensor, dx: float = 0.0, dy: float = 0.0) -> Tensor:
        steps = [affine @ torch.tensor(place, dtype=torch.float64) for place in grid]
        places = [(float(center[0] + step[0]) + dx, float(center[1] + step[1]) + dy) for step in steps]
        return torch.stack([bilinear(light[..., None], *place)[0] for place in places])

    def deviation(values: Tensor) -> Tensor:
        return ((values - values @ weights).square() @ weights + 1e-6).sqrt()

    eye = torch.eye(2, dtype=torch.float64)
    plain = window(light0, point0, eye)
    spread = deviation(plain)
    template = (plain - plain @ weights) / spread
    slopes = []
    for dx, dy in ((1.0, 0.0), (0.0, 1.0)):
        slope = (window(light0, point0, eye, dx, dy) - window(light0, point0, eye, -dx, -dy)) / 2 / spread
        slope = slope - slope @ weights
        slopes.append(slope - template * ((slope * template) @ weights))
    # (2 k)
    jacobian = torch.stack(slopes)
    hessian = (jacobian * weights) @ jacobian.T + 0.01 * eye

    def normalized(move: Tensor) -> Tensor:
        values = window(light1, point1 + move, motion)
        return (values - values @ weights) / deviation(values)

    nothing = torch.zeros(2, dtype=torch.float64)
    before = normalized(nothing)
    step = torch.linalg.solve(hessian, (jacobian * weights) @ (before - template)).nan_to_num()
    step = step / max(float(step.norm()), 1.0)
    move = -(motion @ step)
    old, new = (float((other * template) @ weights) for other in (before, normalized(move)))
    area = float(torch.linalg.det(motion))
    moves = new > old + 1e-4 and new > 0.5 and float(move.norm()) < 3 and 1 / 16 < area < 16
    reach = motion.abs().sum(1) * 12 + 3
    for point, far, light in ((point0, torch.full((2,), 13.0), light0), (point1, reach, light1)):
        size = torch.tensor([light.shape[1] - 1, light.shape[0] - 1])
        moves = moves and bool((point - far >= 0).all() and (point + far <= size).all())
    return move if moves else nothing


def cell_windows(fine: FineMap, pair: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (n 9 c) of the 3x3 fine cells around cells, borders replicated; whether they lie inside (n)."""
    height, width = 4 * fine.height, 4 * fine.width
    windows, whole = [], []
    for number, i in zip(pair.clamp(min=0).tolist(), index.tolist(), strict=True):
        row, column = divmod(i, width)
        around = [(row + a, column + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
        clamped = [min(max(a, 0), height - 1) * width + min(max(b, 0), width - 1) for a, b in around]
        windows.append(fine.features[number, clamped].double())
        whole.append(all(0 <= a < height and 0 <= b < width for a, b in around))
    features = torch.stack(windows) if windows else torch.zeros(0, 9, fine.features.shape[2]).double()
    return features, torch.tensor(whole, dtype=torch.bool)


def window_pairs(windows0: Tensor, whole0: Tensor, windows1: Tensor, whole1: Tensor) -> WindowPairs:
    cosine = torch.einsum("nic,njc->nij", windows0, windows1)
    return WindowPairs(windows0[:, 4], windows1[:, 4], cosine, whole0, whole1)


def swapped_windows(seen: WindowPairs) -> WindowPairs:
    return WindowPairs(seen.middle1, seen.middle0, seen.cosine.transpose(1, 2), seen.whole1, seen.whole0)


def offsets(subpixel: Subpixel, seen: WindowPairs, score: Tensor) -> tuple[Tensor, Tensor]:
    """Return the soft-argmax with the learned correction for each match: offsets (n 2), logits (n)."""
    offsets, logits = [], []
    layers = [] if subpixel.correction is None else [m for m in subpixel.correction if isinstance(m, torch.nn.Linear)]
    for n, value in enumerate(score.double().tolist()):
        weight = torch.softmax(seen.cosine[n, 4] / float(subpixel.log_temperature.exp()), 0)
        steps = torch.tensor([(dx, dy) for dy in (-1, 0, 1) for dx in (-1, 0, 1)], dtype=torch.float64)
        offset = (weight[:, None] * steps).sum(0)
        clipped = min(max(value, 1e-6), 1 - 1e-6)
        logit = torch.tensor(math.log(clipped / (1 - clipped)), dtype=torch.float64)
        if layers:
            known = torch.tensor([math.log(max(value, 0) + 1e-4) / 2], dtype=torch.float64)
            x = torch.cat([seen.middle0[n], seen.middle1[n], 4 * seen.cosine[n].flatten(), known])
            for number, layer in enumerate(layers):
                x = layer.weight.detach().double() @ x + layer.bias.detach().double()
                x = x if number == len(layers) - 1 else x.clamp(min=0)
            offset, logit = offset + x[:2], x[2]
        offsets.append(offset * seen.whole1[n])
        logits.append(logit)
    if not offsets:
        return torch.zeros(0, 2).double(), torch.zeros(0).double()
    return torch.stack(offsets), torch.stack(logits)


def bilinear(values: Tensor, x: float, y: float) -> Tensor:
    """Interpolate a map (h w c) at (x, y), clamped at the border: (c)."""
    height, width = values.shape[:2]
    x, y = min(max(x, 0.0), width - 1), min(max(y, 0.0), height - 1)
    left, top = math.floor(x), math.floor(y)
    right, bottom = min(left + 1, width - 1), min(top + 1, height - 1)
    a, b = x - left, y - top
    above = (1 - a) * values[top, left] + a * values[top, right]
    below = (1 - a) * values[bottom, left] + a * values[bottom, right]
    return (1 - b) * above + b * below


def unit(feature: Tensor) -> Tensor:
    return feature / max(float(feature.norm()), 1e-6)
