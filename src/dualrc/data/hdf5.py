"""Arrays of untrusted HDF5 files, without external data and with a size limit."""

from typing import Any

import numpy as np
import numpy.typing as npt

# Maximum size of an array in memory; an empty file can claim any size.
MOST_BYTES = 1 << 30


def read_dataset(file: Any, name: Any) -> npt.NDArray[Any]:
    """Read the array of this name or reference from an open h5py.File, at most 1 GiB.

    HDF5 can load an array from any other readable file; such arrays raise a ValueError.
    """
    if isinstance(name, str) and type(file.get(name, getlink=True)).__name__ == "ExternalLink":
        raise ValueError(f"{name} is in another file")
    dataset = file[name]
    if not hasattr(dataset, "nbytes"):
        raise ValueError(f"{name} is not an array")
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{name} takes its values from another file")
    if dataset.nbytes > MOST_BYTES:
        raise ValueError(f"{name} would take {dataset.nbytes / 2**30:.1f} GiB of memory")
    return np.asarray(dataset[()])
