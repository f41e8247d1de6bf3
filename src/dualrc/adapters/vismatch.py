"""Adapter for vismatch: a matcher that `vismatch.get_matcher("dualrc")` returns."""

import functools
from typing import Any

from torch import Tensor

from dualrc.errors import ConfigError
from dualrc.types import FloatArray

NAME = "dualrc"


def register() -> Any:
    """Add "dualrc" to the models of vismatch and return the matcher class.

    vismatch has no registry, so this wraps `vismatch.get_matcher`. Call it before `from vismatch import get_matcher`.
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
    """Return the matcher class; it is created here because its base class is imported on demand."""
    from dualrc.matcher import load

    class DualRCMatcher(base):  # type: ignore[misc]
        """Matcher with the interface of vismatch; the center of the first pixel is (0, 0)."""

        def __init__(self, device: str = "cpu", max_num_keypoints: int = 2048, **options: Any) -> None:
            """Load the matcher; `options` are those of `dualrc.load` and the `ransac_` options of vismatch."""
            ours = {key: value for key, value in options.items() if not key.startswith("ransac_")}
            super().__init__(device, **options)
            self.matcher = load(device=device, top=max_num_keypoints, **ours)

        def _forward(
            self, img0: Tensor, img1: Tensor
        ) -> tuple[FloatArray, FloatArray, None, None, None, None, FloatArray]:
            """Match images (3, h, w) in 0 to 1; return points and scores, without keypoints and descriptors."""
            found = self.matcher.match(img0, img1)
            return found.points0, found.points1, None, None, None, None, found.scores

    return DualRCMatcher
