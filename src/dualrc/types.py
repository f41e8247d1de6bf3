"""Array and size types used throughout the package."""

from enum import Enum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
# (height, width, 3), RGB, upright
ImageArray = npt.NDArray[np.uint8]
ImagePair = tuple[ImageArray, ImageArray]
# (width, height)
Size = tuple[int, int]


class Unset(Enum):
    """Type of UNSET, a setting that a call leaves unchanged; None has a meaning of its own."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET
