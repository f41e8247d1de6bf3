"""Optional dependencies, which the package's extras install."""

from importlib import import_module
from typing import Any

from dualrc.errors import ConfigError


def require(module: str, extra: str, purpose: str) -> Any:
    """An optional module; an error says which extra has it where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{purpose} need {module} ({error}): pip install 'dualrc[{extra}]'.") from error
