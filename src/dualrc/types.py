"""The arrays and sizes that the whole package speaks of."""

from enum import Enum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]
ImageArray = npt.NDArray[np.uint8]  # (height, width, 3), RGB, upright
Size = tuple[int, int]  # (width, height)


class Unset(Enum):
    """The type of UNSET: a setting that a call leaves as it was loaded, where None has a meaning of its own."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset.UNSET
