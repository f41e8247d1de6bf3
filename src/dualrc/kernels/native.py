"""Fast CPU twins of operations in `model/`, written in C; where they could not be compiled, torch does the work."""

import ctypes
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dualrc.kernels import interpreted

LANES = 16  # numbers of a vector


def _structure(name: str, pointers: str, sizes: str, floats: str, ints: str) -> type[ctypes.Structure]:
    """A structure of the C sources, whose fields come in this order."""
    kinds = (ctypes.c_void_p, pointers), (ctypes.c_int64, sizes), (ctypes.c_float, floats), (ctypes.c_int32, ints)
    fields = [(field, kind) for kind, fields in kinds for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_STRUCTURES = {
    "consensus": _structure(
        "Consensus",
        "scores first bias second hidden out",
        "height0 width0 height1 width1 channels strip",
        "last_bias",
        "threads",
    ),
    "search": _structure(
        "Search",
        "tensor sums queries pair rows weights wanted fine valid index score visited",
        "groups places channels mixed weights_apart candidates width",
        "temperature allowance",
        "threads",
    ),
    "meet": _structure(
        "Meet",
        "features0 features1 pair index0 index1 cosines",
        "count channels height0 width0 height1 width1",
        "",
        "threads",
    ),
    "explain": _structure(
        "Explain",
        "maps at known offsets share motion shift",
        "count places neighbours",
        "sigma near own doubt",
        "threads",
    ),
    "fit": _structure(
        "Fit",
        "light0 light1 pair points0 points1 motion across down weights moves",
        "count places height0 width0 height1 width1",
        "reach damping longest farthest least gain largest",
        "rounds threads",
    ),
}


# The compiled sources for each generation of processors, by what torch calls it.
_GENERATIONS = {"AVX512": "_native_avx512", "AVX2": "_native_avx2", "DEFAULT": "_native"}


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled sources for this processor, where they were compiled."""
    name = _GENERATIONS.get(torch.backends.cpu.get_cpu_capability(), "_native")
    found = find_spec(f"dualrc.kernels.{name}") or find_spec("dualrc.kernels._native")
    return None if found is None or found.origin is None else _opened(found.origin)


def _opened(path: str) -> ctypes.CDLL | None:
    """Compiled sources, if they are those that this file belongs to."""
    try:
        library = ctypes.CDLL(path)
        for kernel, structure in _STRUCTURES.items():
            if getattr(library, f"dualrc_{kernel}_size")() != ctypes.sizeof(structure):
                raise OSError("it is older or newer than the package")
    except (OSError, AttributeError) as error:
        warnings.warn(f"{path} can't be used ({error}); matching is slower. Install dualrc again.", stacklevel=2)
        return None
    return library


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these."""
    fit = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    learning = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return fit and not learning and not interpreted() and _library() is not None


def call(name: str, **values: Any) -> None:
    """Run a kernel on tensors and numbers; what it writes to must be contiguous."""
    values = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in values.items()}
    pointers = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in values.items()}
    structure = _STRUCTURES[name](**pointers, threads=torch.get_num_threads())
    with torch.profiler.record_function(f"dualrc_{name}"):
        failed = getattr(_library(), f"dualrc_{name}")(ctypes.byref(structure))
    if failed:
        raise MemoryError("There is no memory left to match; match smaller pictures, or set max_memory.")
