"""What a training run is."""

import math
from dataclasses import dataclass, field
from typing import Literal

from dualrc.config import PRESETS, NetworkConfig, check_bounds
from dualrc.data import DataConfig
from dualrc.errors import ConfigError
from dualrc.pixels import STRIDE

Precision = Literal["float32", "bfloat16"]
Loss = Literal["matching", "paper", "published", "weak"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    # Where pairs come from; several are mixed by their shares. A tenth of each is held out for validation.
    data: tuple[DataConfig, ...]
    network: NetworkConfig = field(default_factory=lambda: PRESETS["default"][0])
    # Weights file to go on from.
    start_from: str | None = None
    # A ResNet's file with torchvision's names (.pth, .safetensors), for a network with one.
    trunk: str | None = None
    # "matching" trains `default`; "paper" is the paper's loss of keypoints, "published" what its code computes;
    # "weak" is NCNet's, which needs pairs of pictures alone.
    loss: Loss = "matching"
    seed: int = 0
    # Side of the pictures.
    size: int = 320
    # A step, over all processes.
    pairs: int = 32
    # That a step's pairs are made in; several processes take a part each.
    parts: int = 1
    # Places a pair.
    points: int = 256
    steps: int = 10_000
    optimizer: Literal["adamw", "adam"] = "adamw"
    learning_rate: float = 1e-3
    # Steps.
    warm_up: int = 500
    # After warming up: half a cosine down to zero, or halved every so many steps, as the paper does; 0: the cosine.
    halve_every: int = 0
    # Instead of the cosine: the rate stays until so many steps before the end, then falls to zero in a line.
    cool_down: int = 0
    # Of adamw.
    weight_decay: float = 0.01
    # Largest norm of the gradient; 0: not clipped.
    clip: float = 1.0
    # Decay of the averaged weights.
    average: float = 0.999
    # Of the backbone.
    precision: Precision = "bfloat16"
    # Compile the step where it runs on one GPU: faster, after a minute or two of compiling.
    compile: bool = False
    # Steps, and so often the run is saved.
    validate_every: int = 1000
    validation_batches: int = 8

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data is empty; add at least one [[data]] table.")
        if self.size < 64 or self.size % STRIDE:
            raise ConfigError(f"size = {self.size} must be a multiple of {STRIDE} and at least 64.")
        check_bounds(self, "pairs", "parts", "points", "steps", "validate_every", "validation_batches", at_least=1)
        if self.pairs % self.parts:
            raise ConfigError(f"pairs = {self.pairs} can't be made in parts = {self.parts} of equal size.")
        check_bounds(self, "learning_rate", above=0)
        check_bounds(self, "clip", "warm_up", "weight_decay", "halve_every", "cool_down", at_least=0)
        check_bounds(self, "average", at_least=0, below=1)
        is_resnet = self.network.resnet is not None
        if self.trunk is not None and not is_resnet:
            raise ConfigError("trunk is for a network with a ResNet backbone; leave it out.")
        if is_resnet and self.trunk is None and self.start_from is None:
            raise ConfigError("The ResNet backbone is not trained here; name torchvision's file as trunk = ...")
        if self.loss == "weak" and self.pairs // self.parts < 2:
            raise ConfigError('loss = "weak" compares pairs with each other; give at least two pairs a part.')

    def rate(self, step: int) -> float:
        """The learning rate of a step: a linear warm-up, then the schedule."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        if self.halve_every:
            return self.learning_rate * 0.5 ** (step // self.halve_every)
        if self.cool_down:
            return self.learning_rate * min(1.0, (self.steps - step) / self.cool_down)
        progress = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
