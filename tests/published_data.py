"""Generated weights and images behind the results of the published implementation in tests/data/published.npz.

The weights would be too large to store. Each tensor has its own generator, seeded by its name, so that all machines
generate the same values.
"""

import zlib

import numpy as np
import torch

SIZES = ((96, 80, 0), (80, 112, 1))  # height, width and seed of the two images


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return values that keep activations bounded and let the consensus pass its input."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, dtype=np.int64)
    values = np.random.default_rng(zlib.crc32(b"published " + name.encode())).standard_normal(shape, dtype=np.float32)
    if len(shape) == 6:  # 4D convolution, as published: first kernel dimension, outputs, inputs, the other three
        values = np.abs(values) / (shape[2] * shape[0] ** 4)
    elif len(shape) == 4:
        values *= (2 / np.prod(shape[1:])) ** 0.5
    elif name.endswith("running_var"):
        values = 1 + np.abs(values) / 10
    elif name.endswith(("running_mean", "bias")):
        values *= 0.02
    else:  # the scale of a batch norm
        values = 0.6 + values / 20
    return values.astype(np.float32)


def image(height: int, width: int, seed: int) -> torch.Tensor:
    """Return a network input (1 3 height width): waves in all directions."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = generator.uniform((-0.3, -0.3, 0, 0.2), (0.3, 0.3, 2 * np.pi, 1), (3, 20, 4))
    colors = [sum(a * np.cos(u * x + v * y + phase) for u, v, phase, a in channel) for channel in waves]
    values = np.stack(colors)
    return torch.from_numpy(((values - values.mean()) / values.std()).astype(np.float32))[None]
