"""Configuration of a training run."""

import math
from dataclasses import dataclass, field
from typing import Literal

from dualrc.config import PRESETS, NetworkConfig, ResNetConfig, check_bounds
from dualrc.data import DataConfig, PhotosConfig, ScenesConfig
from dualrc.errors import ConfigError
from dualrc.pixels import STRIDE

Precision = Literal["float32", "bfloat16"]
Loss = Literal["matching", "paper", "published", "weak"]


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A frozen network whose features the last coarse channels learn to predict under any lighting."""

    # File of `scripts/make-teacher`: a ResNet-50 and the projection of its conv4 features.
    file: str
    # As in ResNetConfig.
    stride_on: Literal["3x3", "1x1"] = "3x3"
    # Weight of the loss.
    weight: float = 3.0

    def __post_init__(self) -> None:
        check_bounds(self, "weight", above=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configuration of a training run."""

    # Sources of training pairs, mixed by their shares.
    data: tuple[DataConfig, ...]
    # Sources of validation pairs. Without any, every tenth image or pair of `data` is held out of training.
    validation: tuple[DataConfig, ...] = ()
    # "random" draws pairs with replacement. "epochs" takes every pair once before any pair again, in a new order each
    # time, for one source that has a list of pairs.
    draw: Literal["random", "epochs"] = "random"
    # Which weights the run leaves: the last ones, or those with the lowest validation loss.
    keep: Literal["last", "best"] = "last"
    # Network to train. With `start_from`, it is the network of that file, and this one may only add parts to it.
    network: NetworkConfig = field(default_factory=lambda: PRESETS["default"][0])
    # Weights file to continue from.
    start_from: str | None = None
    # Weights of a ResNet backbone, with torchvision's names (.pth, .safetensors).
    trunk: str | None = None
    # Train conv5 of fusion "e" from scratch, for trunk files that end with conv4.
    train_conv5: bool = False
    # "matching" trains `default`; "paper" is the paper's keypoint loss, "published" the loss of its code;
    # "weak" is NCNet's loss, which needs only image pairs.
    loss: Loss = "matching"
    # Frozen network that teaches the coarse features; for loss = "matching" only.
    teacher: TeacherConfig | None = None
    # Seed of the initial weights and of the pairs.
    seed: int = 0
    # Side of the images in pixels.
    size: int = 320
    # Number of pairs per step, over all processes.
    pairs: int = 32
    # Number of parts in which the pairs of a step are made; several processes take one part each.
    parts: int = 1
    # Number of point samples per pair.
    points: int = 256
    # Number of optimizer steps.
    steps: int = 10_000
    # Optimizer; "adam" has no weight decay.
    optimizer: Literal["adamw", "adam"] = "adamw"
    # Learning rate after the warm-up.
    learning_rate: float = 1e-3
    # Linear warm-up of the learning rate, in steps.
    warm_up: int = 500
    # Learning-rate schedule after the warm-up: halved at this interval, as in the paper; 0: cosine decay to zero.
    halve_every: int = 0
    # Alternative to the cosine: constant until this number of steps before the end, then a linear cool-down to zero.
    cool_down: int = 0
    # Weight decay of adamw.
    weight_decay: float = 0.01
    # Maximum norm of the gradient; 0: no clipping.
    clip: float = 1.0
    # Decay of the exponential moving average of the weights.
    average: float = 0.999
    # Precision of the backbone.
    precision: Precision = "bfloat16"
    # Compile the step on a single GPU: faster, after one or two minutes of compilation.
    compile: bool = False
    # Interval of validation and checkpoints, in steps.
    validate_every: int = 1000
    # Number of batches of a validation, each of `pairs` / `parts` pairs.
    validation_batches: int = 8

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data is empty; add at least one [[data]] table.")
        if self.size < 64 or self.size % STRIDE:
            raise ConfigError(f"size = {self.size} is not valid; pass a multiple of {STRIDE} of at least 64.")
        check_bounds(self, "pairs", "parts", "points", "steps", "validate_every", "validation_batches", at_least=1)
        if self.pairs % self.parts:
            raise ConfigError(f"pairs = {self.pairs} is not a multiple of parts = {self.parts}; change one of them.")
        check_bounds(self, "learning_rate", above=0)
        check_bounds(self, "clip", "warm_up", "weight_decay", "halve_every", "cool_down", at_least=0)
        check_bounds(self, "average", at_least=0, below=1)
        is_resnet = self.network.resnet is not None
        if self.trunk is not None and not is_resnet:
            raise ConfigError("trunk needs a network with a ResNet backbone; omit it.")
        if is_resnet and self.trunk is None and self.start_from is None:
            raise ConfigError(
                "The ResNet backbone is frozen and needs trained weights; set trunk to torchvision's file."
            )
        backbone = self.network.backbone
        if self.train_conv5 and not (isinstance(backbone, ResNetConfig) and backbone.fusion == "e"):
            raise ConfigError('train_conv5 needs a network with backbone.fusion = "e"; omit it.')
        if self.loss == "weak" and self.pairs // self.parts < 2:
            raise ConfigError('loss = "weak" compares pairs with each other; use at least two pairs per part.')
        if self.teacher is not None and self.loss != "matching":
            raise ConfigError('A teacher needs loss = "matching"; omit one of them.')
        if self.draw == "epochs" and (len(self.data) > 1 or isinstance(self.data[0], (PhotosConfig, ScenesConfig))):
            raise ConfigError('draw = "epochs" needs one [[data]] table with a list of pairs; use draw = "random".')

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear warm-up, then the schedule."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        if self.halve_every:
            return self.learning_rate * 0.5 ** (step // self.halve_every)
        if self.cool_down:
            return self.learning_rate * min(1.0, (self.steps - step) / self.cool_down)
        progress = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
