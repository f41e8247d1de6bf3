"""Engines that execute the operations of `model.engine.Engine`, and the choice of one for a device.

- `definition`: plain torch on whole tensors; the engine of training.
- `torch`: torch in chunks that fit into memory; any device, any floating-point type.
- `native`: C kernels for float32 on a CPU; `native-avx512`, `native-avx2`, `native-generic` force an instruction set.
- `triton`: Triton kernels for a GPU; `triton+graphs` captures them in CUDA graphs.
- `reference`: the formulas of the paper, one entry at a time; all other engines are tested against it.
"""

import os

import torch

from dualrc.errors import ConfigError
from dualrc.model.engine import Engine

# Environment variable that selects the engine if the caller does not; for debugging.
VARIABLE = "DUALRC_ENGINE"


def choose(device: torch.device, name: str | None = None) -> Engine:
    """Return the engine with this name, or the best one for a device. A matcher calls this once."""
    from dualrc.ops import native, triton
    from dualrc.ops.graphs import GraphEngine
    from dualrc.ops.native import library
    from dualrc.ops.reference import ReferenceEngine
    from dualrc.ops.torch import TorchEngine

    remedy = "leave the engine out" if name or not os.environ.get(VARIABLE) else f"unset {VARIABLE}"
    name = name or os.environ.get(VARIABLE) or _best(device)
    kind, _, variant = name.partition("-")
    if (kind == "native" or name == "reference") and device.type != "cpu":
        raise ConfigError(f"The engine {name!r} runs on a CPU, not on {device.type}; {remedy}.")
    plain: dict[str, type[Engine]] = {"definition": Engine, "torch": TorchEngine, "reference": ReferenceEngine}
    if name in plain:
        return plain[name]()
    if kind == "native" and variant in ("", *library.VARIANTS):
        return native.NativeEngine(variant or None)
    if name in ("triton", "triton+graphs"):
        if not triton.usable(device) or (name == "triton+graphs" and device.type != "cuda"):
            raise ConfigError(f"The engine {name!r} needs Triton and a supported GPU; {remedy}.")
        return GraphEngine(triton.TritonEngine()) if name == "triton+graphs" else triton.TritonEngine()
    raise ConfigError(f"There is no engine {name!r}; choose one of {', '.join(names())}, or {remedy}.")


def names() -> list[str]:
    """Return the names of all engines, including those that this machine cannot run."""
    from dualrc.ops.native import library

    variants = [f"native-{variant}" for variant in library.VARIANTS]
    return ["definition", "torch", "native", *variants, "triton", "triton+graphs", "reference"]


def _best(device: torch.device) -> str:
    from dualrc.ops import triton
    from dualrc.ops.native import library

    if device.type == "cuda" and triton.usable(device):
        return "triton+graphs"
    return "native" if device.type == "cpu" and any(map(library.opened, library.available())) else "torch"
