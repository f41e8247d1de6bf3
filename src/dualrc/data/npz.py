"""Arrays of others' .npz files, also those of Python objects, without running code that a file may hold.

The arrays of a file take at most 4 GiB together, however small the file is, and a shape must be that of the data.
Objects are unpickled only if they are arrays, plain values and containers of them.
"""

import pickle
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from dualrc.errors import DataError
from dualrc.files import limit_zip

# Unpacked.
MOST_BYTES = 4 << 30
# What reading a file that is not what it should be can raise.
BROKEN = (
    OSError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    ArithmeticError,
    # Broken lengths ask for anything.
    MemoryError,
    # Encrypted, or compressed in a way that is not known here.
    RuntimeError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The named arrays of an .npz file; the others, which may be large, are not touched."""
    try:
        limit_zip(path, MOST_BYTES)
        with zipfile.ZipFile(path) as archive:
            found = {name.removesuffix(".npy") for name in archive.namelist()}
            if missing := [name for name in names if name not in found]:
                raise DataError(f"{path} has no {missing[0]}; get the published file.")
            arrays = {}
            for name in names:
                with archive.open(f"{name}.npy") as file:
                    arrays[name] = read_array(file)
            return arrays
    except DataError:
        raise
    except BROKEN as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is missing or broken ({reason}); get the published file again.") from error


def read_array(file: IO[bytes]) -> Any:
    """One array of an .npz file; objects in it are let in only if they are arrays and plain values."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        return ArrayUnpickler(file, encoding="latin1").load()
    values = np.frombuffer(file.read(), dtype=dtype)
    return values.reshape(shape, order="F" if fortran else "C")


class ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays in plain containers, and refuses everything else by its name."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _allowed().get((module.replace("numpy._core", "numpy.core"), name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed here")
        return allowed


def _allowed() -> dict[tuple[str, str], Any]:
    # The functions that numpy's own pickles name, whose places differ between its versions.
    array: Any = np.zeros(1).__reduce__()
    # How pickles of protocol 5 store it.
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
    """How old pickles store no bytes at all; with an argument it could be asked for terabytes."""
    return b""


def _latin1(text: str, encoding: str) -> bytes:
    """How old pickles store bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, which is not allowed here")
    return text.encode("latin1")
