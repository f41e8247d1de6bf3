"""The arrays and sizes that the whole package speaks of."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]
ImageArray = npt.NDArray[np.uint8]  # (height, width, 3), RGB, upright
Size = tuple[int, int]  # (width, height)
