"""Arrays of others' HDF5 files: those that are in the file itself, and not larger than they may be."""

from typing import Any

import numpy as np
import numpy.typing as npt

# Of an array, unpacked: a file with nothing in it can claim any size.
MOST_BYTES = 1 << 30


def read_dataset(file: Any, name: Any) -> npt.NDArray[Any]:
    """The array of this name or reference in an open h5py.File, at most 1 GiB.

    HDF5 can take an array from any other file that may be read here; such arrays are refused with a ValueError.
    """
    if isinstance(name, str) and type(file.get(name, getlink=True)).__name__ == "ExternalLink":
        raise ValueError(f"{name} is in another file")
    dataset = file[name]
    if not hasattr(dataset, "nbytes"):
        raise ValueError(f"{name} is no array")
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{name} takes its values from another file")
    if dataset.nbytes > MOST_BYTES:
        raise ValueError(f"{name} would take {dataset.nbytes / 2**30:.1f} GiB of memory")
    return np.asarray(dataset[()])
