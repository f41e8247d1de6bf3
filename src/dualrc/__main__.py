"""Entry point of `python -m dualrc`, the command line."""

from dualrc.cli import main

main()
