"""Differentiable torch module that matches batches of images on any device."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.calibration import Calibration, Curve
from dualrc.config import MatcherConfig
from dualrc.errors import ConfigError, ImageError
from dualrc.image import Scale, mask_to_cells, network_size, normalize_colors
from dualrc.matcher.features import textured_cells
from dualrc.model.engine import Engine
from dualrc.model.network import Features, Network, NetworkMatches, best_first
from dualrc.ops import choose, triton
from dualrc.pixels import FINE_STRIDE, resize_points
from dualrc.texture import LEAST_SHARE


class TensorMatcher(nn.Module):
    """Module that matches batches of images in a single pass, without the scale search.

    If gradients are enabled, they flow from points and scores to the images and to parameters that require them. This
    computes full tensors: use images of a few hundred pixels.
    """

    def __init__(self, network: Network, config: MatcherConfig, calibration: Calibration | None = None) -> None:
        super().__init__()
        self.network = network
        self.config, self.calibration = config, calibration
        self._engines: dict[torch.device, Engine] = {}

    def forward(
        self, images0: Tensor, images1: Tensor, mask0: Tensor | None = None, mask1: Tensor | None = None
    ) -> NetworkMatches:
        """Match images (b 1 h w) or (b 3 h w) in 0 to 1; only pixels with non-zero masks (b h w) are matched.

        If the matcher is calibrated, images without texture have no matches.
        """
        if len(images0) != len(images1) or not len(images0):
            raise ImageError(
                f"Both batches need the same number of images, at least 1, not {len(images0)} and {len(images1)}."
            )
        if any(weight.dtype != torch.float32 for weight in self.parameters()):
            raise ConfigError("The network computes in float32; call .float() on it, and use torch.autocast instead.")
        learns = any(tensor.requires_grad for tensor in (images0, images1, *self.parameters()))
        learns = torch.is_grad_enabled() and learns
        # Only the definition is differentiable.
        self.network.engine = Engine() if learns else self._fast_engine(images0.device)
        with torch.set_grad_enabled(learns):
            features0, scale0, textured0 = self._extract(images0, mask0)
            features1, scale1, textured1 = self._extract(images1, mask1)
            masked = mask0 is not None or mask1 is not None
            found = self.network.match(features0, features1, top=None if masked else self.config.top)
            points0 = resize_points(found.points0, scale0.input_size, scale0.image_size)
            points1 = resize_points(found.points1, scale1.input_size, scale1.image_size)
            scores = found.scores if self.calibration is None else interpolate(self.calibration.matches, found.scores)
            # Refinement can move a point off its mask, so the best matches are selected afterwards.
            keep = scores >= self.config.min_score
            if self.calibration is not None:
                keep = keep & (textured0 & textured1)[found.pair]
            for mask, points in ((mask0, points0), (mask1, points1)):
                if mask is not None:
                    keep = keep & _on_mask(points.detach(), found.pair, mask)
            rows = keep.nonzero()[:, 0]
            rows = rows[best_first(found.pair[rows], scores[rows].detach(), self.config.top, len(images0))]
            return NetworkMatches(
                pair=found.pair[rows], points0=points0[rows], points1=points1[rows], scores=scores[rows]
            )

    def _fast_engine(self, device: torch.device) -> Engine:
        """Return the best engine of a device, without CUDA graphs, which need inputs at fixed addresses."""
        if device not in self._engines:
            name = "triton" if device.type == "cuda" and triton.usable(device) else None
            self._engines[device] = choose(device, name)
        return self._engines[device]

    def _extract(self, images: Tensor, mask: Tensor | None) -> tuple[Features, Scale, Tensor]:
        """Return the features of a batch of images, the scale of their resizing, and which have texture (b)."""
        if images.ndim != 4 or images.shape[1] not in (1, 3) or not images.is_floating_point():
            raise ImageError(
                f"Images of shape {tuple(images.shape)} and type {images.dtype} can't be matched; give floats in 0 to "
                "1 of shape (batch, 1 or 3, height, width)."
            )
        if mask is not None and mask.shape != (len(images), *images.shape[2:]):
            raise ImageError(
                f"A mask of shape {tuple(mask.shape)} does not fit images of shape {tuple(images.shape)}; give "
                "(batch, height, width)."
            )
        size = (images.shape[3], images.shape[2])
        seen = network_size(size, long_side=self.config.size, max_size=self.config.max_size)
        scale = Scale(image_size=size, input_size=seen)
        images = images.float().expand(-1, 3, -1, -1)
        if seen != size:
            antialias = self.network.config.backbone.antialias
            images = F.interpolate(images, size=seen[::-1], mode="bilinear", antialias=antialias, align_corners=False)
        features = self.network.extract(normalize_colors(images).contiguous(memory_format=torch.channels_last))
        if mask is not None:
            cells = [mask_to_cells(one.cpu().numpy() != 0, size, seen, FINE_STRIDE) for one in mask]
            valid = torch.stack([torch.from_numpy(one) for one in cells]).to(images.device)
            features = replace(features, valid=valid)
        textured = textured_cells(255 * images.detach().mean(1)).float()
        # Padding does not count.
        inside = torch.ones_like(textured) if features.valid is None else features.valid.float()
        share = (textured * inside).sum((1, 2)) / inside.sum((1, 2))
        return features, scale, share >= LEAST_SHARE


def interpolate(curve: Curve, scores: Tensor) -> Tensor:
    """Return `curve(scores)`, differentiable, for a tensor of any shape."""
    knots = scores.new_tensor(curve.scores)
    values = scores.new_tensor(curve.probabilities)
    right = torch.searchsorted(knots, scores.detach().contiguous()).clamp(1, len(knots) - 1)
    share = ((scores - knots[right - 1]) / (knots[right] - knots[right - 1])).clamp(0, 1)
    return values[right - 1] + share * (values[right] - values[right - 1])


def _on_mask(points: Tensor, pair: Tensor, mask: Tensor) -> Tensor:
    """Return which points (n 2) of the given pairs (n) lie on non-zero pixels of masks (b h w)."""
    height, width = mask.shape[1:]
    column, row = (points + 0.5).floor().long().unbind(1)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return inside & (mask[pair, row.clamp(0, height - 1), column.clamp(0, width - 1)] != 0)


def load_tensor_matcher(preset: str = "default", **options: Any) -> TensorMatcher:
    """Return a TensorMatcher in float32 on the CPU, with frozen parameters; `options` are those of `dualrc.load`."""
    from dualrc.matcher import load

    matcher = load(preset, device="cpu", precision="float32", engine="torch", **options)
    return TensorMatcher(matcher.network.requires_grad_(False), matcher.config, matcher.calibration)
