"""The door to Triton's compiler; only modules of kernels import this."""

from collections.abc import Callable
from typing import Any

import triton


def kernel(function: Callable[..., Any]) -> Any:
    """A function in Triton's language, compiled at its first launch; typed, as Triton's own decorator is not."""
    return triton.jit(function)
