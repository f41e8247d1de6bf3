"""`python -m dualrc` is the command line."""

from dualrc.cli import main

main()
