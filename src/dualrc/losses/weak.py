"""NCNet's weak loss, which needs no correspondences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dualrc.data.pairs import PairBatch
from dualrc.errors import ConfigError
from dualrc.losses.keypoint import dense_tensor, keypoint_losses
from dualrc.model.network import Features, Network


@dataclass(frozen=True, kw_only=True)
class WeakLosses:
    """NCNet's weak loss: the mean score of non-matching images minus that of matching images."""

    # Mean matching score of the pairs.
    positive: Tensor
    # Mean matching score of images of different pairs.
    negative: Tensor
    # Accuracy of keypoints; empty during training.
    accuracy: dict[str, Tensor]

    def total(self) -> Tensor:
        """Return the loss that is minimized."""
        return self.negative - self.positive

    def logged(self) -> dict[str, Tensor]:
        """Return the terms and the accuracy by name."""
        return {"positive": self.positive, "negative": self.negative} | self.accuracy


def weak_losses(network: Network, features0: Features, features1: Features, batch: PairBatch) -> WeakLosses:
    """Compute NCNet's weak loss of a batch of at least two pairs; positions are used for the accuracy only.

    Each image 1 is matched with its own image 0 and with that of the next pair. Pairs without overlap do not count as
    positive pairs.
    """
    if len(batch.valid) < 2:
        raise ConfigError('loss = "weak" compares pairs with each other; give at least two pairs per part.')
    shown = batch.valid.any(1).float()
    positive = (matching_scores(dense_tensor(network, features0, features1)) * shown).sum() / shown.sum().clamp(min=1)
    rolled = Features(coarse=features0.coarse.roll(-1, 0), fine=features0.fine.roll(-1, 0))
    negative = matching_scores(dense_tensor(network, rolled, features1)).mean()
    accuracy: dict[str, Tensor] = {}
    # Skipped during training, because it needs another pass.
    if not network.training:
        with torch.no_grad():
            accuracy = keypoint_losses(network, features0, features1, batch, "paper").accuracy
    return WeakLosses(positive=positive, negative=negative, accuracy=accuracy)


def matching_scores(tensor: Tensor) -> Tensor:
    """Return the mean, over the cells of both images, of the largest softmax score: (b h0 w0 h1 w1) -> (b)."""
    rows = tensor.flatten(3).flatten(1, 2)
    # The softmax of the maximum is exp(maximum - logsumexp).
    means = [(rows.amax(axis) - rows.logsumexp(axis)).exp().mean(1) for axis in (1, 2)]
    return (means[0] + means[1]) / 2
