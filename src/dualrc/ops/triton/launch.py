"""What launches of all kernels need; Triton itself is imported only where a kernel is launched."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on this tensor's device, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def power_above(number: int) -> int:
    """The smallest power of two that is no smaller; Triton's blocks have such lengths."""
    return 1 << (number - 1).bit_length()
