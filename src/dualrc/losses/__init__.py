"""Training losses: that of `default`, that of the paper, and the weak loss of NCNet."""

from dualrc.losses.keypoint import (
    KeypointMaps,
    dense_tensor,
    keypoint_loss,
    keypoint_losses,
    keypoint_maps,
    orthogonal_loss,
)
from dualrc.losses.matching import distillation_loss, matching_losses
from dualrc.losses.result import Losses
from dualrc.losses.weak import weak_losses

__all__ = [
    "KeypointMaps",
    "Losses",
    "dense_tensor",
    "distillation_loss",
    "keypoint_loss",
    "keypoint_losses",
    "keypoint_maps",
    "matching_losses",
    "orthogonal_loss",
    "weak_losses",
]
