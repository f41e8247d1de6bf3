"""What the figures were measured on and with: machine and versions."""

import os
import platform
from importlib import metadata
from typing import Any

import torch

from dualrc import machine

_PACKAGES = ("dualrc", "torch", "triton", "numpy", "kornia", "opencv-python-headless")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The processor with its cores and threads, and a GPU with its memory."""
    found = {"system": platform.platform(), "processor": machine.processor(), "cores": machine.cores()}
    found |= {"threads": torch.get_num_threads(), "load": machine.load_average()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"cpu": found["processor"], "processor": properties.name, "gpu_memory": properties.total_memory}
    return found


def busy_warning(load: float | None, cores: int) -> str | None:
    """A warning if others use this machine's cores, by its load average."""
    if load is None or load < cores / 2:
        return None
    return (
        f"the machine was busy when this began (load {load:.1f}, {cores} cores): times are too long, and with "
        "several threads far too long; trust ratios at most."
    )


def versions() -> dict[str, str | None]:
    """Versions of all that takes part in the measurements; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        installed = list(metadata.distributions(name=package))
        found[package] = installed[0].version if installed else None
    return {**found, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
