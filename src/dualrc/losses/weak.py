"""NCNet's weak loss, which needs no correspondences."""

import torch
from torch import Tensor

from dualrc.data.pairs import PairBatch
from dualrc.losses.keypoint import dense_tensor, keypoint_accuracy, keypoint_maps
from dualrc.losses.result import Losses
from dualrc.model.network import Features, Network


def weak_losses(network: Network, features0: Features, features1: Features, batch: PairBatch) -> Losses:
    """Compute the mean score of non-matching images minus that of matching images, for at least two pairs.

    Each image 1 is matched with its own image 0 and with that of the next pair. Pairs without overlap do not count as
    positive pairs. Positions are used for the accuracy only.
    """
    assert len(batch.valid) > 1
    shown = batch.valid.any(1).float()
    positive = (matching_scores(dense_tensor(network, features0, features1)) * shown).sum() / shown.sum().clamp(min=1)
    rolled = Features(coarse=features0.coarse.roll(-1, 0), fine=features0.fine.roll(-1, 0))
    negative = matching_scores(dense_tensor(network, rolled, features1)).mean()
    logged = {"positive": positive, "negative": negative}
    # The accuracy is skipped during training, because it needs another pass.
    if not network.training:
        with torch.no_grad():
            logged |= keypoint_accuracy(network, keypoint_maps(network, features0, features1, batch), batch)
    return Losses(negative - positive, logged)


def matching_scores(tensor: Tensor) -> Tensor:
    """Return the mean, over the cells of both images, of the largest softmax score: (b h0 w0 h1 w1) -> (b)."""
    rows = tensor.flatten(3).flatten(1, 2)
    # The softmax of the maximum is exp(maximum - logsumexp).
    means = [(rows.amax(axis) - rows.logsumexp(axis)).exp().mean(1) for axis in (1, 2)]
    return (means[0] + means[1]) / 2
