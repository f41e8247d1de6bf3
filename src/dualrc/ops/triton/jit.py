"""Entry point to Triton's compiler; only modules with kernels import this."""

from collections.abc import Callable
from typing import Any

import triton


def kernel(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """Mark a function in Triton's language, which is compiled at its first launch.

    `numbers` are the names of numeric arguments that vary. Triton does not specialize the kernel on their values.
    """

    def mark(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(numbers), do_not_specialize_on_alignment=list(numbers))

    return mark
