"""The command line, which parses options and calls the library."""

import logging
import sys
import warnings
from importlib import import_module

from dualrc.machine import block_idle_threads

# OpenMP reads its settings once, when torch is imported.
block_idle_threads()

from dualrc.cli import common  # noqa: E402
from dualrc.cli.common import app  # noqa: E402
from dualrc.errors import DualRCError  # noqa: E402

__all__ = ["app", "main"]

# Each module registers its commands. The help lists them in this order.
try:
    for _name in ("pair", "serve", "collections", "colmap", "benchmarks", "bench", "training", "exporting", "about"):
        import_module(f"dualrc.cli.{_name}")
except KeyboardInterrupt:
    # Importing PyTorch can take seconds. Nothing has been done yet.
    sys.exit(130)


def main() -> None:
    """Run the command line; errors of the package print one line and exit with status 1."""
    warnings.showwarning = lambda message, *_, **__: logging.getLogger("dualrc").warning("Note: %s", message)
    # Pillow's own messages about damaged files have no file name, and would break the progress bar.
    logging.getLogger("PIL").addHandler(logging.NullHandler())
    try:
        common.app()
    except DualRCError as error:
        common.note(f"Error: {error}", style="red")
        sys.exit(1)
    except KeyboardInterrupt:
        common.messages.print("Stopped.")
        sys.exit(130)
