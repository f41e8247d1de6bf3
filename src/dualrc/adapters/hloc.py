"""Adapter for hloc: a dense matcher for `hloc.match_dense`, registered at run time."""

import copy
from typing import Any

from torch import Tensor

from dualrc.adapters.modules import SETTINGS, add_module, load_matcher
from dualrc.errors import ConfigError


def _conf(name: str, **keypoints: int) -> dict[str, Any]:
    """Return an entry; image sides are multiples of 16, so that the network does not resize them."""
    preprocessing = {"grayscale": False, "resize_max": 1024, "dfactor": 16}
    return {"output": f"matches-{name}", "model": {"name": "dualrc"}, "preprocessing": preprocessing, **keypoints}


# Entries for `hloc.match_dense.confs`. hloc rounds the keypoints of an image to cells of `cell_size` pixels, one
# keypoint per cell. The second entry has fewer keypoints, for scenes with many images.
CONFS = {
    "dualrc": _conf("dualrc", max_error=1, cell_size=1),
    "dualrc_large": _conf("dualrc_large", max_error=2, cell_size=8),
}


def register() -> dict[str, dict[str, Any]]:
    """Register `hloc.matchers.dualrc`, add the entries of CONFS to hloc and return them."""
    try:
        from hloc import match_dense, matchers
    except ImportError as error:
        raise ConfigError(
            f"hloc can't be imported ({error}); install it from its repository, cvg/Hierarchical-Localization."
        ) from error
    add_module(matchers, _make_model)
    confs = copy.deepcopy(CONFS)
    match_dense.confs.update(confs)
    return confs


def _make_model() -> Any:
    """Return the model class; it is created here because its base class is imported on demand."""
    from hloc.utils.base_model import BaseModel

    class DualRC(BaseModel):  # type: ignore[misc]
        """Matcher with the interface of hloc: it returns keypoints0, keypoints1 and scores of a pair of images."""

        default_conf = {**SETTINGS, "device": None}  # noqa: RUF012
        required_inputs = ["image0", "image1"]  # noqa: RUF012

        def _init(self, conf: dict[str, Any]) -> None:
            self.matcher = load_matcher(conf, conf["device"])

        def _forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
            image0, image1 = data["image0"], data["image1"]
            size = max(max(image.shape[-2:]) for image in (image0, image1))
            found = self.matcher.match(image0, image1, size=None if size <= self.matcher.config.max_size else size)
            return {
                "keypoints0": image0.new_tensor(found.points0),
                "keypoints1": image0.new_tensor(found.points1),
                "scores": image0.new_tensor(found.scores),
            }

    return DualRC
