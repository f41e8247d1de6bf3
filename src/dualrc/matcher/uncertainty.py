"""Covariances of matches in original pixels."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dualrc.matcher.features import ImageFeatures
from dualrc.matches import Matches
from dualrc.model.align import brightness
from dualrc.model.covariance import covariances, evidence, local_motion
from dualrc.ops.torch import in_parts

# Matches whose windows are in memory at a time. On a CPU they fit into the cache.
_ROWS, _GPU_ROWS = 2**10, 2**16


@torch.inference_mode()
def with_covariance(
    matches: Matches, features0: ImageFeatures, features1: ImageFeatures, device: torch.device
) -> Matches:
    """Return the matches with the covariance of each point of image 1; NaN for a point without a counterpart."""
    found = np.isfinite(np.hstack([matches.points0, matches.points1])).all(axis=1)
    result = np.full((len(matches), 2, 2), np.nan, np.float32)
    normal, unexplained = alignment_evidence(matches[found], features0, features1, device)
    result[found] = covariances(normal, unexplained).cpu().numpy()
    ratio = np.array(features1.scale.image_size) / np.array(features1.scale.input_size)
    return replace(matches, covariance=result * np.outer(ratio, ratio))


@torch.inference_mode()
def alignment_evidence(
    matches: Matches, features0: ImageFeatures, features1: ImageFeatures, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return normal matrices (n 2 2) and unexplained parts (n) of finite matches; see `model.covariance`."""
    lights, points = [], []
    for features, places in ((features0, matches.points0), (features1, matches.points1)):
        lights.append(brightness(features.pixels.permute(2, 0, 1)[None].to(device).float() / 255))
        points.append(torch.from_numpy(features.scale.to_network(places).astype(np.float32)).to(device))
    motion = local_motion(points[0], points[1], torch.from_numpy(matches.scores).to(device))
    normal, unexplained = in_parts(partial(evidence, *lights), _ROWS, _GPU_ROWS, *points, motion)
    return normal, unexplained
