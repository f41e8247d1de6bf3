"""Drawings of matches during training."""

from pathlib import Path

import numpy as np
import torch

from dualrc import draw
from dualrc.data import PairBatch
from dualrc.image import restore_colors
from dualrc.matches import Matches
from dualrc.model.network import Network

_PAIRS = 4
# Number of matches drawn per pair.
_TOP = 60


@torch.no_grad()
def draw_pairs(network: Network, batch: PairBatch, path: Path) -> None:
    """Draw the best matches of the last pairs of a batch, one pair below the other."""
    # The first pairs may be unrelated images.
    images0, images1 = batch.images0[-_PAIRS:], batch.images1[-_PAIRS:]
    found = network.match(network.extract(images0), network.extract(images1), top=_TOP)
    rows = []
    for number, (image0, image1) in enumerate(zip(restore_colors(images0), restore_colors(images1), strict=True)):
        chosen, size = found.pair == number, (image0.shape[1], image0.shape[0])
        arrays = [t[chosen].cpu().numpy() for t in (found.points0, found.points1, found.scores)]
        matches = Matches(points0=arrays[0], points1=arrays[1], scores=arrays[2], size0=size, size1=size)
        rows.append(draw.draw_matches(image0, image1, matches))
    draw.save(np.concatenate(rows), path)
