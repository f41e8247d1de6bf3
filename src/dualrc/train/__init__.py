"""Training: from a TOML file to weights."""

from dualrc.train.config import TrainConfig
from dualrc.train.loop import train

__all__ = ["TrainConfig", "train"]
