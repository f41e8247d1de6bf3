"""The command line: parse and delegate."""

import logging
import sys
import warnings
from importlib import import_module

from dualrc.machine import block_idle_threads

block_idle_threads()  # before anything imports torch, whose OpenMP asks once

from dualrc.cli import common  # noqa: E402
from dualrc.cli.common import app  # noqa: E402
from dualrc.errors import DualRCError  # noqa: E402

__all__ = ["app", "main"]

# Each adds its commands, in the order in which the help lists them.
for _name in ("pair", "collections", "benchmarks", "bench", "training", "exporting", "about"):
    import_module(f"dualrc.cli.{_name}")


def main() -> None:
    """Run the command line; a user's mistake prints one line and exits with 1."""
    warnings.showwarning = lambda message, *_, **__: logging.getLogger("dualrc").warning("Note: %s", message)
    try:
        common.app()
    except DualRCError as error:
        common.note(f"Error: {error}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        common.messages.print("Stopped.")
        sys.exit(130)
