"""Arrays of others' .npz files, also those of Python objects, without running code that a file may hold."""

import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from dualrc.errors import DataError

_BROKEN = (OSError, ValueError, LookupError, TypeError, EOFError, AttributeError, ImportError, MemoryError)


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The named arrays of an .npz file; the others, which may be large, are not touched."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {name.removesuffix(".npy") for name in archive.namelist()}
            if missing := [name for name in names if name not in found]:
                raise DataError(f"{path} has no {missing[0]}; get the published file.")
            arrays = {}
            for name in names:
                with archive.open(f"{name}.npy") as file:
                    arrays[name] = _read_array(file)
            return arrays
    except (*_BROKEN, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is missing or broken ({reason}); get the published file again.") from error


def _read_array(file: IO[bytes]) -> Any:
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        return _Unpickler(file, encoding="latin1").load()
    values = np.frombuffer(file.read(), dtype=dtype)
    return values.reshape(shape, order="F" if fortran else "C")


class _Unpickler(pickle.Unpickler):
    """Reads numpy arrays in plain containers, and refuses everything else by its name."""

    def find_class(self, module: str, name: str) -> Any:
        array: Any = np.zeros(1)
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): array.__reduce__()[0],
            ("numpy.core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
            ("numpy.core.numeric", "_frombuffer"): array.__reduce_ex__(5)[0],
            ("_codecs", "encode"): _latin1,
        }
        found = allowed.get((module.replace("numpy._core", "numpy.core"), name))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed here")
        return found


def _latin1(text: str, encoding: str) -> bytes:
    """How old pickles store bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, which is not allowed here")
    return text.encode("latin1")
