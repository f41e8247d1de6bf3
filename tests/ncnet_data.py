"""Weights and images behind tests/data/ncnet.npz, generated with one generator per tensor, seeded by its name.

The vectors are the results of NCNet's published code for these in float32.
"""

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).parent / "data" / "ncnet.npz"
# Kernel sizes and channels of the consensus: of the model for places, of the code's default, of PF-Pascal's model.
CONSENSUS = {"places": ((3, 3), (16, 1)), "three": ((3, 3, 3), (10, 10, 1)), "five": ((5, 5, 5), (16, 16, 1))}
IMAGE_A, IMAGE_B = (96, 128, 1), (128, 96, 2)  # height, width, seed
CHANNELS = slice(0, 1024, 64)  # of the features that are kept
STAGES = {4: (64, 64, 3), 5: (256, 128, 4), 6: (512, 256, 23)}  # module number: inputs, width, blocks


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("running_var"):
        values = 1 + 0.1 * np.abs(values)
    elif name.endswith("running_mean"):
        values = 0.1 * values
    elif len(shape) == 6:  # a 4D convolution, stored as (k, out, in, k, k, k); near the identity, so that cells differ
        middle = shape[0] // 2
        values = 0.3 * values / (np.prod(shape) / shape[1]) ** 0.5
        values[middle, :, :, middle, middle, middle] += 1 / shape[2]
    elif len(shape) == 4:
        values = values * (2 / np.prod(shape[1:])) ** 0.5
    elif "NeighConsensus" in name:
        values = 0.01 * values
    elif name.endswith("bias"):
        values = 0.1 * values
    else:  # of batch norms; small in the branches, so that features still differ from place to place
        values = (0.2 if "bn3" in name else 1.0) + 0.05 * values
    return torch.from_numpy(np.asarray(values, np.float32))


def trunk_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return names as in the published repositories, where the backbone is a sequence of modules."""

    def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((f"{name}.{part}", (width,)) for part in ("weight", "bias", "running_mean", "running_var"))

    yield "0.weight", (64, 3, 7, 7)
    yield from norm("1", 64)
    for number, (first, width, blocks) in STAGES.items():
        inputs = first
        for block in range(blocks):
            name = f"{number}.{block}"
            for layer, shape in enumerate(((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)), 1):
                yield f"{name}.conv{layer}.weight", shape
                yield from norm(f"{name}.bn{layer}", shape[0])
            if block == 0:
                yield f"{name}.downsample.0.weight", (4 * width, inputs, 1, 1)
                yield from norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width


def consensus_shapes(tag: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    kernels, channels = CONSENSUS[tag]
    for layer, (k, inputs, outputs) in enumerate(zip(kernels, (1, *channels[:-1]), channels, strict=True)):
        yield f"NeighConsensus.conv.{2 * layer}.weight", (k, outputs, inputs, k, k, k)
        yield f"NeighConsensus.conv.{2 * layer}.bias", (outputs,)


def trunk_state() -> dict[str, Tensor]:
    return {f"FeatureExtraction.model.{name}": weight(name, shape) for name, shape in trunk_shapes()}


def checkpoint(tag: str, trunk: dict[str, Tensor] | None = None) -> dict:
    """Return a checkpoint as the published code saves it: with numpy arrays and numbers beside the weights."""
    kernels, channels = CONSENSUS[tag]
    state = dict(trunk_state() if trunk is None else trunk)
    state |= {name: weight(name, shape) for name, shape in consensus_shapes(tag)}
    args = argparse.Namespace(ncons_kernel_sizes=list(kernels), ncons_channels=list(channels), lr=0.0005)
    losses = {"best_test_loss": np.float64(-0.1), "train_loss": np.zeros(5), "test_loss": np.zeros(5)}
    return {"epoch": 5, "args": args, "state_dict": state, "optimizer": {"state": {}}, **losses}


def image(height: int, width: int, seed: int) -> Tensor:
    """Return a normalized network input (1 3 h w): a sum of waves."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    values = np.zeros((3, height, width))
    for channel in range(3):
        for _ in range(24):
            (fx, fy), phase = rng.uniform(-0.4, 0.4, 2), rng.uniform(0, 2 * np.pi)
            values[channel] += rng.uniform(0.2, 1) * np.cos(fx * x + fy * y + phase)
    return torch.from_numpy((values / values.std()).astype(np.float32))[None]
