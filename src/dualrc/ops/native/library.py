"""The compiled C kernels: selected for this processor, checked against the sources, and called with tensors."""

import ctypes
import struct
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualrc.ops.native import sources

# Values in the widest vector register.
LANES = 16
_FLOATS, _WHOLE, _FLAGS = (torch.float32,), (torch.int64,), (torch.bool, torch.uint8)


class _Kernel(NamedTuple):
    """Signature of a C function. It takes one structure whose fields have this order."""

    tensors: dict[str, tuple[torch.dtype, ...]]
    sizes: str
    numbers: str = ""
    counts: str = ""
    # Names of the tensors that the function writes.
    outputs: str = ""

    def structure(self) -> type[ctypes.Structure]:
        """Return the ctypes structure of the arguments."""
        kinds = (ctypes.c_int64, self.sizes), (ctypes.c_float, self.numbers), (ctypes.c_int32, self.counts)
        fields: list[tuple[str, Any]] = [(name, ctypes.c_void_p) for name in self.tensors]
        fields += [(name, kind) for kind, names in kinds for name in names.split()]
        return _structure(*fields, ("threads", ctypes.c_int32))


@cache
def _structure(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Call", (ctypes.Structure,), {"_fields_": list(fields)})


_KERNELS = {
    "consensus": _Kernel(
        dict.fromkeys(("scores", "first", "bias", "second", "hidden", "out"), _FLOATS),
        sizes="height0 width0 height1 width1 channels strip",
        numbers="last_bias",
        outputs="hidden out",
    ),
    "search": _Kernel(
        {
            **dict.fromkeys(("tensor", "sums", "queries"), _FLOATS),
            **dict.fromkeys(("pair", "rows"), _WHOLE),
            "weights": _FLOATS,
            "wanted": _FLAGS,
            "fine": _FLOATS,
            "valid": _FLAGS,
            "index": _WHOLE,
            "score": _FLOATS,
            "visited": _WHOLE,
        },
        sizes="groups places channels mixed weights_apart candidates width",
        numbers="temperature allowance",
        outputs="index score visited",
    ),
    "meet": _Kernel(
        {
            **dict.fromkeys(("features0", "features1"), _FLOATS),
            **dict.fromkeys(("pair", "index0", "index1"), _WHOLE),
            **dict.fromkeys(("known", "cosines", "inputs", "offsets"), _FLOATS),
        },
        sizes="count channels height0 width0 height1 width1",
        numbers="temperature",
        outputs="cosines inputs offsets",
    ),
    "explain": _Kernel(
        {
            "maps": _FLOATS,
            "at": _WHOLE,
            "known": _FLOATS,
            "offsets": _WHOLE,
            **dict.fromkeys(("share", "motion", "shift"), _FLOATS),
        },
        sizes="count places neighbors",
        numbers="sigma near own doubt ridge",
        outputs="share motion shift",
    ),
    "fit": _Kernel(
        {
            **dict.fromkeys(("light0", "light1"), _FLOATS),
            "pair": _WHOLE,
            **dict.fromkeys(("points0", "points1", "motion", "across", "down", "weights", "moves"), _FLOATS),
        },
        sizes="count places height0 width0 height1 width1",
        numbers="reach damping longest farthest least gain largest",
        counts="rounds",
        outputs="moves",
    ),
}
# Instruction sets of the compiled variants, best first, with torch's name for the CPU capability.
VARIANTS = {"avx512": "AVX512", "avx2": "AVX2", "generic": "DEFAULT"}


def available() -> list[str]:
    """Return the compiled variants that this processor can run, best first."""
    here = torch.backends.cpu.get_cpu_capability()
    order = list(VARIANTS)
    first = list(VARIANTS.values()).index(here) if here in VARIANTS.values() else order.index("generic")
    return [name for name in order[first:] if _origin(name) is not None]


def _origin(variant: str) -> str | None:
    found = find_spec(f"dualrc.ops.native._{variant}")
    return None if found is None else found.origin


@cache
def opened(variant: str) -> "Library | None":
    """Return the library of this variant, or None if it was not compiled from the sources of this package."""
    path = _origin(variant)
    return None if path is None else open_library(path)


def open_library(path: str) -> "Library | None":
    """Open a library; return None, with a warning, if it cannot be used."""
    try:
        _check_complete(Path(path))
        library = ctypes.CDLL(path)
        library.dualrc_sources.restype = ctypes.c_char_p
        if library.dualrc_sources() != sources.digest().encode():
            raise OSError("they were compiled from different sources than those of the package")
    except (OSError, AttributeError) as error:
        reason = "they belong to another version" if isinstance(error, AttributeError) else error
        remedy = "pip install --force-reinstall --no-deps dualrc; in a checkout, python setup.py build_ext -f --inplace"
        # The message omits the file name, so that all variants together give one warning.
        message = (
            f"Cannot use the C kernels in {Path(path).parent} ({reason}); torch runs instead, slower. Compile them"
        )
        warnings.warn(f"{message}: {remedy}", stacklevel=2)
        return None
    return Library(library)


def _check_complete(path: Path) -> None:
    """Raise an OSError for a truncated ELF file, because loading one can end the process with a bus error."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:5] == b"\x7fELF\x02" and len(header) == 64:
        (table,) = struct.unpack_from("Q", header, 40)
        entry_bytes, entries = struct.unpack_from("HH", header, 58)
        # The section headers are at the end of the file.
        if path.stat().st_size < table + entry_bytes * entries:
            raise OSError("the file is incomplete")


class Library:
    """Functions of the C kernels, called by name."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, **values: Any) -> None:
        """Run a function on CPU tensors of the types of its signature, and on numbers."""
        kernel = _KERNELS[name]
        # Keeps copies alive until the function returns.
        held = {}
        for field, dtypes in kernel.tensors.items():
            tensor = values.pop(field)
            if tensor is not None:
                assert tensor.device.type == "cpu" and tensor.dtype in dtypes, (field, tensor.device, tensor.dtype)
                assert tensor.is_contiguous() or field not in kernel.outputs.split(), field
                held[field] = tensor.contiguous()
        pointers = {field: tensor.data_ptr() for field, tensor in held.items()}
        structure = kernel.structure()(**pointers, **values, threads=torch.get_num_threads())
        with torch.profiler.record_function(f"dualrc_{name}"):
            failed = getattr(self._library, f"dualrc_{name}")(ctypes.byref(structure))
        if failed:
            raise MemoryError("Not enough memory to match; match smaller images, or set max_memory.")
