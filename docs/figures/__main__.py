"""Make all figures of the documents, or those that are named: python docs/figures [NAME...]"""

import importlib
import importlib.util
import sys
from pathlib import Path

import charts
import images
import method


def main() -> None:
    """Make the figures."""
    all_figures = {figure.__name__: figure for room in (charts, method, images) for figure in room.FIGURES}
    # The screenshot of the web page needs a browser, and a package that drives it.
    if (Path(__file__).parent / "page.py").exists() and importlib.util.find_spec("playwright"):
        all_figures["page"] = lambda: importlib.import_module("page").main()
    names = sys.argv[1:] or list(all_figures)
    unknown = [name for name in names if name not in all_figures]
    if unknown:
        raise SystemExit(f"Unknown figures: {', '.join(unknown)}. There are: {', '.join(all_figures)}.")
    for name in names:
        all_figures[name]()


if __name__ == "__main__":
    main()
