"""Fast twins of operations in `model/`: for GPUs in Triton, which is imported only where used, and for CPUs in C."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _works(device: torch.device) -> bool:
    """Whether a kernel can be compiled and run there: Triton needs a C compiler, and not too old a GPU."""
    from dualrc.kernels.consensus import mutual_filter

    try:
        return bool(mutual_filter(torch.ones(1, 1, 1, 1, 1, device=device)).isfinite().all())
    except Exception as error:  # compilers fail in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        warnings.warn(f"Triton can't be used here ({reason}); matching is slower without it.", stacklevel=2)
        return False


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, which they do on any device, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(tensor: Tensor) -> bool:
    """Whether kernels can work on this tensor's device."""
    return _installed() and (interpreted() or (tensor.device.type == "cuda" and _works(tensor.device)))


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on this tensor's device, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def power_above(number: int) -> int:
    """The smallest power of two that is no smaller; Triton's blocks have such lengths."""
    return 1 << (number - 1).bit_length()
