"""The compiled C kernels: selected for this processor, checked against the sources, and called with tensors."""

import ctypes
import re
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
# Types of numbers, and of tensors behind pointers, by their names in C.
_NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}
_TENSORS = {"int64_t": (torch.int64,), "uint8_t": (torch.bool, torch.uint8), "float": (torch.float32,)}
# Instruction sets of the compiled variants, best first, with torch's name for the CPU capability.
VARIANTS = {"avx512": "AVX512", "avx2": "AVX2", "generic": "DEFAULT"}


class _Kernel(NamedTuple):
    """Signature of a C function, which takes one structure."""

    structure: type[ctypes.Structure]
    # Types of the fields that are tensors.
    tensors: dict[str, tuple[torch.dtype, ...]]
    # Tensors that the function writes.
    outputs: set[str]


@cache
def kernels() -> dict[str, _Kernel]:
    """Return the signatures of the functions, as the C sources declare them; `open_library` compares these sources."""
    found = {}
    for path in Path(__file__).parent.glob("*.c"):
        code = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", code, flags=re.DOTALL):
            # A declaration is like `const float *scores, *first;` or `int64_t height, width;`.
            fields = [
                (field, kind, bool(pointer), bool(constant))
                for constant, kind, names in re.findall(r"(const )?(\w+) ([^;]+);", body)
                for pointer, field in re.findall(r"(\*?)(\w+)", names)
            ]
            types = [(field, ctypes.c_void_p if pointer else _NUMBERS[kind]) for field, kind, pointer, _ in fields]
            found[name.lower()] = _Kernel(
                structure=type(name, (ctypes.Structure,), {"_fields_": types}),
                tensors={field: _TENSORS[kind] for field, kind, pointer, _ in fields if pointer},
                outputs={field for field, _, pointer, constant in fields if pointer and not constant},
            )
    return found


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
        kernel = kernels()[name]
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
