"""The compiled C sources: found for this processor, checked, and called with tensors."""

import ctypes
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualrc.ops.native import sources

LANES = 16  # values of the widest vector registers
_FLOATS, _WHOLE, _FLAGS = (torch.float32,), (torch.int64,), (torch.bool, torch.uint8)


class _Kernel(NamedTuple):
    """How a function of the C sources is called: by one structure, whose fields come in this order."""

    tensors: dict[str, tuple[torch.dtype, ...]]
    sizes: str
    numbers: str = ""
    counts: str = ""
    outputs: str = ""  # the tensors that are written to

    def structure(self) -> type[ctypes.Structure]:
        """What is handed over."""
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
            "cosines": _FLOATS,
        },
        sizes="count channels height0 width0 height1 width1",
        outputs="cosines",
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
# The compiled sources by instruction set, best first, and what torch calls a processor that has it.
VARIANTS = {"avx512": "AVX512", "avx2": "AVX2", "generic": "DEFAULT"}


def available() -> list[str]:
    """Variants that were compiled and that this processor can run, best first."""
    here = torch.backends.cpu.get_cpu_capability()
    order = list(VARIANTS)
    first = list(VARIANTS.values()).index(here) if here in VARIANTS.values() else order.index("generic")
    return [name for name in order[first:] if _origin(name) is not None]


def _origin(variant: str) -> str | None:
    found = find_spec(f"dualrc.ops.native._{variant}")
    return None if found is None else found.origin


@cache
def opened(variant: str) -> "Library | None":
    """The library of this variant, if it was compiled from the sources that this file belongs to."""
    path = _origin(variant)
    return None if path is None else open_library(path)


def open_library(path: str) -> "Library | None":
    """The library in a file; None, with a warning, where it can't be used."""
    try:
        library = ctypes.CDLL(path)
        library.dualrc_sources.restype = ctypes.c_char_p
        if library.dualrc_sources() != sources.digest().encode():
            raise OSError("they were compiled from other sources than the package's")
    except (OSError, AttributeError) as error:
        reason = "they are of another version" if isinstance(error, AttributeError) else error
        remedy = "pip install --force-reinstall --no-deps dualrc; in a checkout, python setup.py build_ext -f --inplace"
        # Without the file's name, so that all variants give one warning.
        message = (
            f"The C kernels in {Path(path).parent} can't be used ({reason}); torch is, which is slower. Compile them"
        )
        warnings.warn(f"{message}: {remedy}", stacklevel=2)
        return None
    return Library(library)


class Library:
    """Functions of the C sources, called by name."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, **values: Any) -> None:
        """Run a function on tensors and numbers; tensors must be of the CPU and of the types that it is written for."""
        kernel = _KERNELS[name]
        held = {}  # until the function has ended
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
            raise MemoryError("There is no memory left to match; match smaller images, or set max_memory.")
