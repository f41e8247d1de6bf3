"""Training losses: that of `default`, that of the paper, and the weak loss of NCNet."""

from dualrc.losses.keypoint import keypoint_losses
from dualrc.losses.matching import distillation_loss, matching_losses
from dualrc.losses.weak import weak_losses

__all__ = ["distillation_loss", "keypoint_losses", "matching_losses", "weak_losses"]
