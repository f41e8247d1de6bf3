"""Training losses: that of `default`, that of the paper, and the weak loss of NCNet."""

from dualrc.losses.keypoint import (
    BatchKeypointLosses,
    KeypointMaps,
    dense_tensor,
    keypoint_loss,
    keypoint_losses,
    keypoint_maps,
    orthogonal_loss,
)
from dualrc.losses.matching import MatchingLosses, distillation_loss, matching_losses
from dualrc.losses.weak import WeakLosses, weak_losses

__all__ = [
    "BatchKeypointLosses",
    "KeypointMaps",
    "MatchingLosses",
    "WeakLosses",
    "dense_tensor",
    "distillation_loss",
    "keypoint_loss",
    "keypoint_losses",
    "keypoint_maps",
    "matching_losses",
    "orthogonal_loss",
    "weak_losses",
]
