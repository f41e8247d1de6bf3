"""Optional dependencies, installed by the extras of the package."""

import sys
from importlib import import_module
from typing import Any

from dualrc.errors import ConfigError


def require(module: str, extra: str, purpose: str) -> Any:
    """Import an optional module; if it is missing, raise a ConfigError that names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{purpose} need {module} ({error}): pip install 'dualrc[{extra}]'.") from error


def png_is_broken() -> bool:
    """Return whether pycolmap was imported before Pillow; its bundled zlib then makes PNG writing abort."""
    # sys.modules is in order of import.
    order = list(sys.modules)
    loaded = "pycolmap" in sys.modules and "PIL._imaging" in sys.modules
    return loaded and order.index("pycolmap") < order.index("PIL._imaging")
