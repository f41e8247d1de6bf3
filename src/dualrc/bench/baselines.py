"""Methods of others that are measured beside this project's: LoFTR and SIFT."""

import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualrc.errors import ConfigError
from dualrc.evaluation.baselines import has_opencv, opencv

Pictures = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


class Loftr:
    """kornia's LoFTR in single precision, with generated weights: trained ones would have to be downloaded.

    With trained ones it finds more matches, and takes somewhat longer to refine them.
    """

    def __init__(self, pictures: Pictures, device: torch.device) -> None:
        from kornia.feature import LoFTR

        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._network = LoFTR(pretrained=None).eval().to(device)
        self._pictures, self._device = pictures, device

    @torch.inference_mode()
    def __call__(self) -> npt.NDArray[Any]:
        """Pictures on the host to corresponding points on the host, (n, 4)."""
        inputs = {}
        for number, picture in enumerate(self._pictures):
            height, width = (side // 8 * 8 for side in picture.shape[:2])
            pixels = torch.from_numpy(picture[:height, :width].copy()).to(self._device)
            inputs[f"image{number}"] = pixels.float().mean(2)[None, None] / 255
        found = self._network(inputs)
        points: npt.NDArray[Any] = torch.cat([found["keypoints0"], found["keypoints1"]], dim=1).cpu().numpy()
        return points


class Sift:
    """OpenCV's SIFT with its own settings, and brute-force mutual nearest neighbors; always on the CPU."""

    def __init__(self, pictures: Pictures) -> None:
        self._cv2, self._pictures = opencv(), pictures
        self._cv2.setNumThreads(torch.get_num_threads())  # as many as the others have
        self._sift, self._matcher = self._cv2.SIFT_create(), self._cv2.BFMatcher(self._cv2.NORM_L2, crossCheck=True)

    def __call__(self) -> list[Any]:
        """Pictures to matches."""
        gray = [self._cv2.cvtColor(picture, self._cv2.COLOR_RGB2GRAY) for picture in self._pictures]
        described = [self._sift.detectAndCompute(picture, None)[1] for picture in gray]
        return [] if any(found is None for found in described) else list(self._matcher.match(*described))


def check_installed(method: str) -> None:
    """Raise ConfigError if a method can't be run on this machine at all."""
    needed = {"loftr": ("kornia", importlib.util.find_spec("kornia")), "sift": ("OpenCV", has_opencv())}
    package, found = needed.get(method, ("", True))
    if not found:
        raise ConfigError(f"--with {method} needs {package}, which is not installed; pip install 'dualrc[baselines]'.")
