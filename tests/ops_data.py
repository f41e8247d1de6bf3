"""Inputs of the operations of engines, and calls on the device of an engine."""

import copy
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import DEVICE, rand, texture

from dualrc.config import ConsensusConfig
from dualrc.model.align import brightness
from dualrc.model.cells import FineMap
from dualrc.model.consensus import Consensus
from dualrc.model.correlation import normalize
from dualrc.model.refine import CellMatches
from dualrc.model.subpixel import Subpixel
from dualrc.model.support import DirectedMatches
from dualrc.ops.reference import ReferenceEngine

REFERENCE = ReferenceEngine()
HALF = {"triton", "triton+graphs", "torch", "definition"}
NOTHING = (None, None)


def only_on_gpu(engine, request):
    """Skip cases that take too long in Triton's interpreter, unless slow tests are enabled."""
    if engine.name == "triton" and DEVICE == "cpu" and not request.config.getoption("--slow"):
        pytest.skip("slow in Triton's interpreter: give --slow to run it")


def place(engine, value):
    """Move tensors, and containers of tensors, to the device of an engine."""
    device = DEVICE if engine.name.startswith("triton") else "cpu"
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return (value if isinstance(value, torch.Tensor) else copy.deepcopy(value)).to(device)
    if isinstance(value, FineMap):
        valid = None if value.valid is None else value.valid.to(device)
        return replace(value, features=value.features.to(device), valid=valid)
    if isinstance(value, CellMatches | DirectedMatches):
        return type(value)(*(place(engine, column) for column in value))
    return type(value)(place(engine, each) for each in value) if isinstance(value, tuple | list) else value


def run(engine, operation, *inputs, **options):
    """Run an operation without gradients on the engine's device, with results on the CPU."""
    with torch.no_grad():
        result = getattr(engine, operation)(*(place(engine, value) for value in inputs), **options)
    return result.cpu() if isinstance(result, torch.Tensor) else type(result)(*(column.cpu() for column in result))


def consensus_of(channels, sizes=(3, 3)) -> Consensus:
    """Return random kernels without symmetry, and biases for which ReLU and the border matter."""
    consensus = Consensus(ConsensusConfig(kernel_sizes=sizes, channels=channels))
    for number, (weight, bias) in enumerate(zip(consensus.weights, consensus.biases, strict=True)):
        weight.data = rand(number, *weight.shape) * (weight.shape[1] * weight.shape[2] ** 4) ** -0.5
        bias.data = 0.3 * rand(10 + number, *bias.shape)
    consensus.biases[-1].data.abs_()  # or half of the results would be zero
    return consensus.requires_grad_(False)


@cache
def coarse_maps(batch, shape0, shape1, seed=0):
    return tuple(0.2 + rand(seed + n, batch, 6, *shape) for n, shape in enumerate((shape0, shape1)))


def coarse_values(kind, seed, *shape):
    if kind == "exact":  # small integers, so that sums, mixtures and products have no rounding, and many ties
        return rand(seed, *shape).abs().mul(1.5).round()
    if kind == "flat":
        return 0.9 + 0.1 * rand(seed, *shape).sigmoid()
    if kind == "sparse":  # many zeros, whole rows of them too
        return (rand(seed, *shape) - 1.2).clamp(min=0)
    noise = rand(seed, *shape)
    return torch.where(noise == noise.amax(2, keepdim=True), 1.0, 0.01 * noise.abs())


def search_case(kind, seed, shape0, shape1, batch=1, channels=4, masked=False, dtype=torch.float32):
    """Return a coarse tensor (b n m) and the fine maps of both images."""
    tensor = coarse_values(kind, seed, batch, math.prod(shape0), math.prod(shape1))
    maps = []
    for side, (height, width) in enumerate((shape0, shape1)):
        values = rand(seed + 100 + side, batch, channels, 4 * height, 4 * width)
        # Vectors of four halves have length 1, and their dot products are exact.
        features = values.sign() / 2 if kind == "exact" else normalize(values)
        valid = rand(seed + 200 + side, batch, 4 * height, 4 * width) > -0.3 if masked else None
        maps.append(FineMap.of(features.to(dtype), valid))
    return tensor, *maps


def refinement_case(seed=0, count=60, batch=2, hidden=8, channels=12, size0=(5, 6), size1=(6, 5), dtype=torch.float32):
    """Return matches of two small images with one motion, some at borders, some random, and smooth brightness."""
    fine = tuple(
        FineMap.of(normalize(0.3 + rand(seed + n, batch, channels, 4 * h, 4 * w)).to(dtype))
        for n, (h, w) in enumerate((size0, size1))
    )
    image = torch.from_numpy(texture(seed, 16 * 8, 16 * 8)).float().permute(2, 0, 1)[None] / 60
    light = tuple(
        brightness(image[:, :, n : n + 16 * h, 2 * n : 2 * n + 16 * w]).expand(batch, -1, -1).contiguous().to(dtype)
        for n, (h, w) in enumerate((size0, size1))
    )
    random = torch.Generator().manual_seed(seed)
    index0 = torch.randperm(fine[0].cells * 16, generator=random)[:count]
    x, y = index0 % (4 * size0[1]), index0 // (4 * size0[1])
    there = y.clamp(max=4 * size1[0] - 1) * 4 * size1[1] + x.clamp(max=4 * size1[1] - 1)
    # Each cell of image 1 is matched once per pair.
    pair = torch.zeros(count, dtype=torch.long)
    for number in range(count):
        taken = {(p, i) for p, i in zip(pair[:number].tolist(), there[:number].tolist(), strict=True)}
        while (int(pair[number]), int(there[number])) in taken:
            pair[number] += 1
    keep = pair < batch
    scores = torch.rand(2, count, generator=random) * 0.3
    matches = CellMatches(pair[keep], index0[keep], there[keep], scores[0][keep], scores[1][keep])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        subpixel = Subpixel(channels, hidden).requires_grad_(False)
        if hidden:
            torch.nn.init.normal_(subpixel.correction[-1].weight, std=0.3)
    return subpixel, fine, light, matches
