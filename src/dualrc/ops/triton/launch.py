"""Launching of kernels; Triton is imported only when a kernel is launched."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Alignment of pointers in bytes. Triton compiles a second kernel for pointers with less.
_ALIGNMENT = 16

Grid = tuple[int, int, int]


class Launcher:
    """Launches a kernel with fixed compile-time constants.

    From the second launch on, the entry point of the compiled kernel is called directly. Triton's own launcher examines
    all arguments and takes several times as long. This class compares only devices, types and alignment of tensors, and
    passes their addresses, because Triton would ask the driver about each tensor. Numbers need no check, because
    kernels are not specialized on them.
    """

    def __init__(self, kernel: str, *, warps: int = 4, stages: int = 3, **constants: Any) -> None:
        """Prepare launches of `kernel`, "module.function" of this package; `constants` are its last arguments."""
        self._module, self._name = kernel.split(".")
        self._constants = constants
        self._options = {"num_warps": warps, "num_stages": stages}
        # Values of the constants in the order of the arguments.
        self._last: tuple[Any, ...] = ()
        # Number of tensor arguments, which come first.
        self._tensors = 0
        # Entry point, function and metadata by device and types.
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        # Returns the current stream of a device; Triton has it from the first launch on.
        self._stream: Any = None
        self._direct = True

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        first: Tensor = arguments[0]
        if _several_gpus() and first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                self._launch(grid, first.device, arguments)
        else:
            self._launch(grid, first.device, arguments)

    def _launch(self, grid: Grid, device: torch.device, arguments: tuple[Any, ...]) -> None:
        tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
        compiled = self._compiled.get((device, *[tensor.dtype for tensor in tensors]))
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if compiled is not None and not bits % _ALIGNMENT:
            run, function, metadata = compiled
            try:
                stream = self._stream(device.index)
                # Triton's profiler alone uses launch metadata and hooks, so both are None.
                run(*grid, stream, function, metadata, None, None, None, *addresses, *numbers, *self._last)
                return
            except (AttributeError, TypeError):
                # Another version of Triton expects other arguments.
                self._direct = False
                self._compiled.clear()
        self._compile(grid, *arguments)

    def _compile(self, grid: Grid, *arguments: Any) -> None:
        """Launch through Triton, which compiles the kernel or loads it from its cache."""
        function = getattr(import_module(f"dualrc.ops.triton.{self._module}"), self._name)
        compiled = function[grid](*arguments, **self._constants, **self._options)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)
        # The interpreter returns None.
        if compiled is None or not self._direct or not aligned:
            return
        assert all(isinstance(argument, Tensor) for argument in arguments[: len(tensors)])
        try:
            entry = compiled.run, compiled.function, compiled.packed_metadata
            self._stream = import_module("triton.runtime").driver.active.get_current_stream
        except AttributeError:
            # Another version of Triton has no such attributes.
            self._direct = False
            return
        self._tensors = len(tensors)
        self._last = tuple(self._constants[name] for name in function.arg_names[len(arguments) :])
        self._compiled[(tensors[0].device, *[tensor.dtype for tensor in tensors])] = entry


# Returns the launcher that all callers with the same arguments share.
launcher = cache(Launcher)


@cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def readable(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return the tensor contiguous and aligned; usually this is the tensor itself."""
    if not x.is_contiguous(memory_format=memory_format):
        return x.contiguous(memory_format=memory_format)
    return x.clone(memory_format=memory_format) if x.data_ptr() % _ALIGNMENT else x


def power_above(number: int) -> int:
    """Return the smallest power of two that is at least `number`; Triton's blocks need such lengths."""
    return 1 << (number - 1).bit_length()


def parts(total: int, size: int) -> int:
    """Return the number of parts of at most `size` that cover `total`."""
    return -(-total // size)
