"""Make all figures of the documents, or those that are named: python docs/figures [NAME...]"""

import sys

import charts
import images
import method


def main() -> None:
    """Make the figures."""
    all_figures = {figure.__name__: figure for room in (charts, method, images) for figure in room.FIGURES}
    names = sys.argv[1:] or list(all_figures)
    unknown = [name for name in names if name not in all_figures]
    if unknown:
        raise SystemExit(f"Unknown figures: {', '.join(unknown)}. There are: {', '.join(all_figures)}.")
    for name in names:
        all_figures[name]()


if __name__ == "__main__":
    main()
