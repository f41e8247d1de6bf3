"""The command line: parse and delegate."""

import sys
import warnings
from importlib import import_module

from dualrc.cli import common
from dualrc.cli.common import app
from dualrc.errors import DualRCError

__all__ = ["app", "main"]

# Each adds its commands, in the order in which the help lists them.
for _name in ("pair", "collections", "benchmarks", "bench", "training", "about"):
    import_module(f"dualrc.cli.{_name}")


def main() -> None:
    """Run the command line; a user's mistake prints one line and exits with 1."""
    warnings.showwarning = lambda message, *_, **__: common.note(f"Note: {message}")
    try:
        common.app()
    except DualRCError as error:
        common.note(f"Error: {error}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        common.messages.print("Stopped.")
        sys.exit(130)
