"""kornia: a module with the call and the keys of `kornia.feature.LoFTR`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dualrc.adapters.tensors import load_tensor_matcher
from dualrc.errors import DataError


class DualRC(nn.Module):
    """A replacement for `kornia.feature.LoFTR`, for grayscale or color images.

    Two differences: keypoints have the center of the first pixel at (0, 0), as kornia's own features do and LoFTR's,
    which are half a pixel larger, do not. And keypoints and confidence are differentiable in the images, where
    LoFTR's are detached.
    """

    def __init__(self, preset: str = "default", **options: Any) -> None:
        """`options` are those of `dualrc.load`: weights, size, max_size, top, min_score."""
        super().__init__()
        self.matcher = load_tensor_matcher(preset, **options)

    def forward(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """image0, image1 (b 1 h w) or (b 3 h w) in 0 to 1, and mask0, mask1 (b h w), where 0 is padding, if given.

        Returns keypoints0, keypoints1 (n 2), confidence (n) and batch_indexes (n), by pair and then best first.
        """
        missing = {"image0", "image1"} - data.keys()
        if missing:
            raise DataError(f"The data lack {', '.join(sorted(missing))}; give a dictionary with image0 and image1.")
        found = self.matcher(data["image0"], data["image1"], data.get("mask0"), data.get("mask1"))
        return {
            "keypoints0": found.points0,
            "keypoints1": found.points1,
            "confidence": found.scores,
            "batch_indexes": found.pair,
        }
