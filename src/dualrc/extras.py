"""Optional dependencies, which the package's extras install."""

import sys
from importlib import import_module
from typing import Any

from dualrc.errors import ConfigError


def require(module: str, extra: str, purpose: str) -> Any:
    """An optional module; an error says which extra has it where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{purpose} need {module} ({error}): pip install 'dualrc[{extra}]'.") from error


def png_is_broken() -> bool:
    """Whether pycolmap was imported before Pillow: then its own zlib is found first, and writing a PNG aborts."""
    order = list(sys.modules)  # in the order of their import
    loaded = "pycolmap" in sys.modules and "PIL._imaging" in sys.modules
    return loaded and order.index("pycolmap") < order.index("PIL._imaging")
