"""Adapter for kornia: a module with the interface of `kornia.feature.LoFTR`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dualrc.adapters.tensors import load_tensor_matcher
from dualrc.errors import DataError


class DualRC(nn.Module):
    """Replacement for `kornia.feature.LoFTR`, for grayscale or color images.

    There are two differences. The center of the first pixel is (0, 0), as in the other features of kornia, while the
    keypoints of LoFTR are half a pixel larger. Keypoints and confidence are differentiable with respect to the images,
    while those of LoFTR are detached.
    """

    def __init__(self, preset: str = "default", **options: Any) -> None:
        """Load a preset; `options` are those of `dualrc.load`: weights, size, max_size, top, min_score."""
        super().__init__()
        self.matcher = load_tensor_matcher(preset, **options)

    def forward(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return keypoints0, keypoints1 (n 2), confidence (n) and batch_indexes (n), sorted by pair, then best first.

        `data` contains image0 and image1 (b 1 h w) or (b 3 h w) in 0 to 1 and, optionally, mask0 and mask1 (b h w),
        which are 0 at padding.
        """
        missing = {"image0", "image1"} - data.keys()
        if missing:
            raise DataError(f"The input has no {', '.join(sorted(missing))}; pass a dictionary with image0 and image1.")
        found = self.matcher(data["image0"], data["image1"], data.get("mask0"), data.get("mask1"))
        return {
            "keypoints0": found.points0,
            "keypoints1": found.points1,
            "confidence": found.scores,
            "batch_indexes": found.pair,
        }
