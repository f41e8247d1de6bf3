"""vismatch: a matcher that `vismatch.get_matcher("dualrc")` finds."""

import functools
from typing import Any

from torch import Tensor

from dualrc.errors import ConfigError
from dualrc.types import FloatArray

NAME = "dualrc"


def register() -> Any:
    """Add "dualrc" to vismatch's models; returns the matcher's class, which takes a device and settings of `load`.

    vismatch has no registry: `vismatch.get_matcher` is wrapped. Call this before `from vismatch import get_matcher`.
    """
    try:
        import vismatch
    except ImportError as error:
        raise ConfigError(f"vismatch can't be imported ({error}): pip install vismatch.") from error
    original = vismatch.get_matcher
    if (known := getattr(original, "dualrc", None)) is not None:
        return known
    matcher_class = _make_class(vismatch.BaseMatcher)

    @functools.wraps(original)
    def get_matcher(
        matcher_name: Any = "sift-lightglue",
        device: Any = "cpu",
        max_num_keypoints: int = 2048,
        *args: Any,
        **options: Any,
    ) -> Any:
        if matcher_name == NAME:
            return matcher_class(str(device), max_num_keypoints, *args, **options)
        return original(matcher_name, device, max_num_keypoints, *args, **options)

    get_matcher.dualrc = matcher_class  # type: ignore[attr-defined]
    vismatch.get_matcher = get_matcher
    vismatch.available_models.append(NAME)
    return matcher_class


def _make_class(base: Any) -> Any:
    """A class that derives from vismatch's, which is known only now."""
    from dualrc.matcher import load

    class DualRCMatcher(base):  # type: ignore[misc]
        """The matcher under vismatch's interface; points have the center of the first pixel at (0, 0)."""

        def __init__(self, device: str = "cpu", max_num_keypoints: int = 2048, **options: Any) -> None:
            """`options` are vismatch's (ransac_iters, ransac_conf, ransac_reproj_thresh) and those of `dualrc.load`."""
            ours = {key: value for key, value in options.items() if not key.startswith("ransac_")}
            super().__init__(device, **options)
            self.matcher = load(device=device, top=max_num_keypoints, **ours)

        def _forward(
            self, img0: Tensor, img1: Tensor
        ) -> tuple[FloatArray, FloatArray, None, None, None, None, FloatArray]:
            """Images (3, h, w) in 0 to 1 to matched points of both, no keypoints or descriptors, and scores."""
            found = self.matcher.match(img0, img1)
            return found.points0, found.points1, None, None, None, None, found.scores

    return DualRCMatcher
