"""The compiled C kernels: selected for this processor, checked against the sources, and called with tensors."""

import ctypes
import struct
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dualrc.ops.native import sources

# Values in the widest vector register.
LANES = 16


class _Kernel:
    """Signature of a C function. It takes one structure, whose fields have the order of these names."""

    def __init__(
        self,
        tensors: str,
        *,
        sizes: str,
        numbers: str = "",
        counts: str = "",
        whole: str = "",
        flags: str = "",
        outputs: str = "",
    ) -> None:
        """Tensors are float32, those in `whole` int64, those in `flags` bool or uint8; it writes those in `outputs`."""
        self.tensors: dict[str, tuple[torch.dtype, ...]] = dict.fromkeys(tensors.split(), (torch.float32,))
        self.tensors |= dict.fromkeys(whole.split(), (torch.int64,))
        self.tensors |= dict.fromkeys(flags.split(), (torch.bool, torch.uint8))
        self.outputs = outputs.split()
        kinds = (
            (ctypes.c_void_p, tensors),
            (ctypes.c_int64, sizes),
            (ctypes.c_float, numbers),
            (ctypes.c_int32, f"{counts} threads"),
        )
        fields = [(name, kind) for kind, names in kinds for name in names.split()]
        self.structure: type[ctypes.Structure] = type("Call", (ctypes.Structure,), {"_fields_": fields})


_KERNELS = {
    "consensus": _Kernel(
        "scores first bias second hidden out",
        sizes="height0 width0 height1 width1 channels strip",
        numbers="last_bias",
        outputs="hidden out",
    ),
    "search": _Kernel(
        "tensor sums queries pair rows weights wanted fine valid index score visited",
        sizes="groups places channels mixed weights_apart candidates width",
        numbers="temperature allowance",
        whole="pair rows index visited",
        flags="wanted valid",
        outputs="index score visited",
    ),
    "meet": _Kernel(
        "features0 features1 pair index0 index1 known cosines inputs offsets",
        sizes="count channels height0 width0 height1 width1",
        numbers="temperature",
        whole="pair index0 index1",
        outputs="cosines inputs offsets",
    ),
    "explain": _Kernel(
        "maps at known offsets share motion shift",
        sizes="count places neighbors",
        numbers="sigma near own doubt ridge",
        whole="at offsets",
        outputs="share motion shift",
    ),
    "fit": _Kernel(
        "light0 light1 pair points0 points1 motion across down weights moves",
        sizes="count places height0 width0 height1 width1",
        numbers="reach damping longest farthest least gain largest",
        counts="rounds",
        whole="pair",
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
                assert tensor.is_contiguous() or field not in kernel.outputs, field
                held[field] = tensor.contiguous()
        pointers = {field: tensor.data_ptr() for field, tensor in held.items()}
        structure = kernel.structure(**pointers, **values, threads=torch.get_num_threads())
        with torch.profiler.record_function(f"dualrc_{name}"):
            failed = getattr(self._library, f"dualrc_{name}")(ctypes.byref(structure))
        if failed:
            raise MemoryError("Not enough memory to match; match smaller images, or set max_memory.")
