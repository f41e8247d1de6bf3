"""What the figures were measured on and with."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dualrc.machine import cores


def machine_of(device: torch.device) -> dict[str, Any]:
    """The processor, and its cores and threads or memory."""
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load": load(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {"cpu": machine["processor"], "processor": properties.name, "gpu_memory": properties.total_memory}
    return machine


def load() -> float | None:
    """Processes that wanted a core over the last minute; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return None


def busy() -> str | None:
    """A warning if others use this machine's cores now."""
    wanted = load()
    if wanted is None or wanted < cores() / 2:
        return None
    return (
        f"the machine was busy when this began (load {wanted:.1f}, {cores()} cores): times are too long, and with "
        "several threads far too long; trust ratios at most."
    )


def versions() -> dict[str, str | None]:
    """Versions of all that takes part in the measurements; None: not installed."""
    packages = ("dualrc", "torch", "triton", "numpy", "kornia", "opencv-python-headless")
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    versions["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
    return versions


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
