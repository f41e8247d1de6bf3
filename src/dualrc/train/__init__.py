"""Training of networks from a TOML configuration."""

from dualrc.train.config import TrainConfig
from dualrc.train.loop import train

__all__ = ["TrainConfig", "train"]
