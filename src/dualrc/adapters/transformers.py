"""Adapter for Hugging Face transformers: a keypoint-matching model and its image processor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dualrc import config as configs
from dualrc.adapters.tensors import TensorMatcher
from dualrc.calibration import Calibration
from dualrc.config import MatcherConfig, NetworkConfig
from dualrc.errors import DataError, ImageError
from dualrc.extras import require
from dualrc.image import ImageInput, network_size, read, resize, to_tensor
from dualrc.model.checkpoint import load_weights, read_calibration, weights_file
from dualrc.model.dualrc import make_network
from dualrc.toml import from_dict, to_dict
from dualrc.types import Size

transformers: Any = require("transformers", "transformers", "Its models and processors")


class DualRCConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """Configuration that `save_pretrained` writes to config.json."""

    model_type = "dualrc"

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        calibration: dict[str, Any] | None = None,
        max_size: int = 1024,
        num_matches: int = 2048,
        **options: Any,
    ) -> None:
        """Set `network`, the fields of a NetworkConfig, and `num_matches`, the maximum number of matches of a pair."""
        self.network = network or to_dict(configs.preset("default")[0])
        self.calibration = calibration
        self.max_size, self.num_matches = max_size, num_matches
        super().__init__(**options)


@dataclass
class KeypointMatchingOutput(transformers.utils.ModelOutput):  # type: ignore[misc]
    """Matches of a batch, with the fields of the library's own keypoint-matching models."""

    # Index of the matching keypoint in the other image, -1 for empty rows: (b, 2, n).
    matches: Tensor | None = None
    matching_scores: Tensor | None = None  # (b, 2, n)
    # Positions (x, y) as fractions of the width and height, from the upper left corner: (b, 2, n, 2).
    keypoints: Tensor | None = None


class DualRCForKeypointMatching(transformers.PreTrainedModel):  # type: ignore[misc]
    """Network with the interface of a transformers model."""

    config_class = DualRCConfig
    base_model_prefix = "dualrc"
    main_input_name = "pixel_values"
    # `from_pretrained(dtype=...)` leaves the network in float32.
    _keep_in_fp32_modules_strict = ["matcher"]  # noqa: RUF012

    def __init__(self, config: DualRCConfig) -> None:
        super().__init__(config)
        network = make_network(from_dict(NetworkConfig, config.network))
        calibration = None if config.calibration is None else from_dict(Calibration, config.calibration)
        self.matcher = TensorMatcher(
            network, MatcherConfig(max_size=config.max_size, top=config.num_matches), calibration
        )
        self.post_init()

    @classmethod
    def from_weights(
        cls, preset: str = "default", *, weights: str | Path | None = None, **options: Any
    ) -> "DualRCForKeypointMatching":
        """Return a model with the bundled weights of a preset or a weights file; `options` are fields of the config."""
        path = weights_file(preset, weights)
        network, calibration = load_weights(path), read_calibration(path)
        options.setdefault("max_size", configs.preset(network.config.preset)[1].max_size)
        fitted = None if calibration is None else to_dict(calibration)
        model = cls(DualRCConfig(network=to_dict(network.config), calibration=fitted, **options))
        model.matcher.network.load_state_dict(network.state_dict())
        return model.eval().requires_grad_(False)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Do nothing: modules are initialized when they are created."""

    def forward(
        self, pixel_values: Tensor, pixel_mask: Tensor | None = None, return_dict: bool | None = None
    ) -> KeypointMatchingOutput | tuple[Tensor, ...]:
        """Match pairs of images (b 2 3 h w) in 0 to 1; `pixel_mask` (b 2 h w) is 0 at padding."""
        if pixel_values.ndim != 5 or pixel_values.shape[1] != 2:
            raise ImageError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; give (batch, 2, 3, height, width), as the image "
                "processor does."
            )
        masks = (None, None) if pixel_mask is None else (pixel_mask[:, 0], pixel_mask[:, 1])
        found = self.matcher(pixel_values[:, 0], pixel_values[:, 1], *masks)
        batch, height, width = len(pixel_values), *pixel_values.shape[3:]
        count = int(found.pair.bincount(minlength=batch).max()) if len(found.pair) else 0
        # Rank of each match within its pair.
        first = torch.searchsorted(found.pair, torch.arange(batch, device=found.pair.device))
        place = torch.arange(len(found.pair), device=found.pair.device) - first[found.pair]
        sizes = found.scores.new_tensor([width, height]).expand(batch, 2, 2)
        if pixel_mask is not None:
            # Padding is at the right and at the bottom, so the mask gives the image sizes.
            sizes = torch.stack([pixel_mask[:, :, 0].sum(2), pixel_mask[:, :, :, 0].sum(2)], dim=2).to(sizes)
        keypoints = found.scores.new_zeros(batch, 2, count, 2)
        scores = found.scores.new_zeros(batch, 2, count)
        matches = torch.full((batch, 2, count), -1, dtype=torch.long, device=found.pair.device)
        for side, points in enumerate((found.points0, found.points1)):
            keypoints[found.pair, side, place] = (points + 0.5) / sizes[found.pair, side]
            scores[found.pair, side, place] = found.scores
            matches[found.pair, side, place] = place
        result = KeypointMatchingOutput(matches=matches, matching_scores=scores, keypoints=keypoints)
        return result.to_tuple() if return_dict is False else result


class DualRCImageProcessor(transformers.image_processing_utils.BaseImageProcessor):  # type: ignore[misc]
    """Image processor that makes batches from pairs of images, and converts outputs to pixels of the images."""

    model_input_names = ["pixel_values", "pixel_mask"]  # noqa: RUF012

    def __init__(self, max_size: int = 1024, do_resize: bool = True, **options: Any) -> None:
        """Set the maximum long side of images; without `do_resize`, images keep their size."""
        super().__init__(**options)
        self.max_size, self.do_resize = max_size, do_resize

    def preprocess(
        self, images: Sequence[Any], return_tensors: str | None = None, max_size: int | None = None, **_: Any
    ) -> Any:
        """Return a batch, padded to one size, of a pair or a list of pairs of paths, PIL images, arrays or tensors."""
        pairs = _pairs(images)
        tensors = []
        for image in (image for pair in pairs for image in pair):
            pixels = to_tensor(read(image))
            size: Size = (pixels.shape[1], pixels.shape[0])
            if self.do_resize:
                size = network_size(size, long_side=None, max_size=max_size or self.max_size)
            tensors.append(resize(pixels[None], size)[0] / 255)
        height, width = (max(tensor.shape[axis] for tensor in tensors) for axis in (1, 2))
        padding = [(0, width - tensor.shape[2], 0, height - tensor.shape[1]) for tensor in tensors]
        values = torch.stack([F.pad(tensor, room) for tensor, room in zip(tensors, padding, strict=True)])
        data = {"pixel_values": values.unflatten(0, (-1, 2))}
        if any(map(any, padding)):
            masks = [F.pad(torch.ones(tensor.shape[1:]), room) for tensor, room in zip(tensors, padding, strict=True)]
            data["pixel_mask"] = torch.stack(masks).unflatten(0, (-1, 2)).long()
        if return_tensors != "pt":
            data = {name: value.numpy() for name, value in data.items()}
        return transformers.BatchFeature(data=data, tensor_type=return_tensors)

    def post_process_keypoint_matching(
        self, outputs: KeypointMatchingOutput, target_sizes: Tensor | Sequence[Any], threshold: float = 0.0
    ) -> list[dict[str, Tensor]]:
        """Return the matches of each pair, best first, in pixels of images of `target_sizes` (b, 2, 2), height first.

        Each result contains keypoints0 and keypoints1 (n 2) in float32, with the center of the first pixel at (0, 0),
        and matching_scores (n) above the threshold.
        """
        if outputs.keypoints is None or outputs.matches is None or outputs.matching_scores is None:
            raise DataError("The outputs have no keypoints; pass the output of the model.")
        sizes = torch.as_tensor(np.asarray(target_sizes), dtype=torch.float32, device=outputs.keypoints.device)
        if sizes.shape != (len(outputs.keypoints), 2, 2):
            raise DataError(
                f"target_sizes has shape {tuple(sizes.shape)}; give (height, width) of both images of each of the "
                f"{len(outputs.keypoints)} pairs."
            )
        points = outputs.keypoints * sizes.flip(-1)[:, :, None] - 0.5
        results = []
        for pair, matches, scores in zip(points, outputs.matches, outputs.matching_scores, strict=True):
            rows = ((matches[0] > -1) & (scores[0] > threshold)).nonzero()[:, 0]
            result = {"keypoints0": pair[0, rows], "keypoints1": pair[1, matches[0, rows]]}
            results.append(result | {"matching_scores": scores[0, rows]})
        return results


def _pairs(images: Sequence[Any]) -> list[tuple[ImageInput, ImageInput]]:
    given = list(images)
    nested = [isinstance(item, (list, tuple)) for item in given]
    pairs = given if given and all(nested) else [given]
    if any(nested) != all(nested) or not all(len(pair) == 2 for pair in pairs):
        raise ImageError("Pass a pair of images, [image0, image1], or a list of such pairs.")
    return [(pair[0], pair[1]) for pair in pairs]


def register() -> None:
    """Register the classes, so that the Auto classes of transformers can load saved models and processors."""
    transformers.AutoConfig.register("dualrc", DualRCConfig, exist_ok=True)
    transformers.AutoModelForKeypointMatching.register(DualRCConfig, DualRCForKeypointMatching, exist_ok=True)
    transformers.AutoImageProcessor.register(
        DualRCConfig, slow_image_processor_class=DualRCImageProcessor, exist_ok=True
    )
