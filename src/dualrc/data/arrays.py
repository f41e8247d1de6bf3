"""Arrays of untrusted .npz and HDF5 files, without executing code, without external data, and with limits on memory.

All arrays of an .npz file take at most 4 GiB in memory, and shapes must fit the data. Objects are unpickled only if
they are arrays, plain values, or containers of them.
"""

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dualrc.errors import DataError
from dualrc.files import BROKEN, limit_zip, one_line

# Maximum size in memory of an .npz file, and of an HDF5 dataset; an empty file can claim any size.
MOST_BYTES, MOST_DATASET_BYTES = 4 << 30, 1 << 30


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the named arrays of an .npz file; other arrays, which may be large, are not read."""
    try:
        limit_zip(path, MOST_BYTES)
        with zipfile.ZipFile(path) as archive:
            found = {name.removesuffix(".npy") for name in archive.namelist()}
            if missing := [name for name in names if name not in found]:
                raise DataError(f"{path} has no {missing[0]}; download the published file.")
            arrays = {}
            for name in names:
                with archive.open(f"{name}.npy") as file:
                    arrays[name] = read_array(file)
            return arrays
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(
            f"{path} is missing or damaged ({one_line(error)}); download the published file again."
        ) from error


def read_array(file: IO[bytes]) -> Any:
    """Read one array of an .npz file; objects in it must be arrays and plain values."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        return ArrayUnpickler(file, encoding="latin1").load()
    values = np.frombuffer(file.read(), dtype=dtype)
    return values.reshape(shape, order="F" if fortran else "C")


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
    if dataset.nbytes > MOST_DATASET_BYTES:
        raise ValueError(f"{name} would take {dataset.nbytes / 2**30:.1f} GiB of memory")
    return np.asarray(dataset[()])


class ArrayUnpickler(pickle.Unpickler):
    """Unpickler for numpy arrays in plain containers; it rejects everything else by name."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _allowed().get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed here")
        return allowed


def _allowed() -> dict[tuple[str, str], Any]:
    # Functions that numpy's own pickles use; their modules differ between versions of numpy.
    array: Any = np.zeros(1).__reduce__()
    # Form of an array in pickles of protocol 5.
    array_from_5: Any = np.zeros(1).__reduce_ex__(5)
    scalar: Any = np.float64(0).__reduce__()
    return {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): array[0],
        ("numpy.core.multiarray", "scalar"): scalar[0],
        ("numpy.core.numeric", "_frombuffer"): array_from_5[0],
        ("_codecs", "encode"): _latin1,
        ("builtins", "bytes"): _no_bytes,
        ("__builtin__", "bytes"): _no_bytes,
    }


def _no_bytes() -> bytes:
    """Return empty bytes, as in old pickles; bytes() with an argument could allocate terabytes."""
    return b""


def _latin1(text: str, encoding: str) -> bytes:
    """Return bytes from their form in old pickles."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, which is not allowed here")
    return text.encode("latin1")
