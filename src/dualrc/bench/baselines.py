"""Other methods to compare with: LoFTR and SIFT."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualrc.errors import ConfigError
from dualrc.evaluation.baselines import has_opencv, opencv
from dualrc.types import ImagePair


def make_loftr(images: ImagePair, device: torch.device) -> Callable[[], npt.NDArray[Any]]:
    """Return kornia's LoFTR in single precision: images on the host to corresponding points on the host, (n, 4).

    Its weights are random, because trained weights would have to be downloaded. With trained weights it finds more
    matches and takes slightly longer to refine them.
    """
    from kornia.feature import LoFTR

    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = LoFTR(pretrained=None).eval().to(device)

    @torch.inference_mode()
    def match() -> npt.NDArray[Any]:
        inputs = {}
        for number, image in enumerate(images):
            height, width = (side // 8 * 8 for side in image.shape[:2])
            pixels = torch.from_numpy(image[:height, :width].copy()).to(device)
            inputs[f"image{number}"] = pixels.float().mean(2)[None, None] / 255
        found = network(inputs)
        return np.asarray(torch.cat([found["keypoints0"], found["keypoints1"]], dim=1).cpu())

    return match


def make_sift(images: ImagePair) -> Callable[[], list[Any]]:
    """Return OpenCV's SIFT with default settings and brute-force mutual nearest neighbors, on the CPU."""
    cv2 = opencv()
    # The same number of threads as the other methods.
    cv2.setNumThreads(torch.get_num_threads())
    sift, matcher = cv2.SIFT_create(), cv2.BFMatcher(cv2.NORM_L2, crossCheck=True)

    def match() -> list[Any]:
        gray = [cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) for image in images]
        described = [sift.detectAndCompute(image, None)[1] for image in gray]
        return [] if any(found is None for found in described) else list(matcher.match(*described))

    return match


def check_installed(method: str) -> None:
    """Raise ConfigError if a method cannot run on this machine."""
    needed = {"loftr": ("kornia", importlib.util.find_spec("kornia")), "sift": ("OpenCV", has_opencv())}
    package, found = needed.get(method, ("", True))
    if not found:
        raise ConfigError(f"--with {method} needs {package}, which is not installed; pip install 'dualrc[baselines]'.")
