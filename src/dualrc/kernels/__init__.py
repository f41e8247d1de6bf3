"""Fast GPU twins of operations in `model/`, written in Triton, which is imported only where they are used."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, which they do on any device, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(tensor: Tensor) -> bool:
    """Whether kernels can work on this tensor's device."""
    return _installed() and (tensor.device.type == "cuda" or interpreted())


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on this tensor's device, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
