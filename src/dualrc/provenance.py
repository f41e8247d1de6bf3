"""Provenance of a result, stored with it: versions, device, weights and configs."""

import platform
from dataclasses import is_dataclass
from importlib import metadata
from typing import Any

import torch

from dualrc.toml import to_dict

_PACKAGES = ("dualrc", "torch", "numpy")


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, of dualrc and its core packages, and of the named packages if installed."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # Package metadata may omit the build, such as +cu130.
    return found | {"torch": str(torch.__version__)}


def provenance(
    *packages: str, device: torch.device | str | None = None, weights: str | None = None, **configs: Any
) -> dict[str, Any]:
    """Return versions, platform, device, hash of the weights, and configs as plain JSON values.

    `packages` are further packages that contributed. Configs are dataclasses or JSON values, by their names in the
    result.
    """
    made = {**versions(*packages), "platform": platform.platform()}
    if device is not None:
        made["device"] = str(device)
        if torch.device(device).type == "cuda":
            made["gpu"] = torch.cuda.get_device_name(device)
    if weights is not None:
        made["weights"] = weights
    plain = {name: to_dict(config) if is_dataclass(config) else config for name, config in configs.items()}
    return {**made, **plain}
