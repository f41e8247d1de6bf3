"""Parts that all commands share: the program, its two consoles, options and tables."""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import dualrc
from dualrc.collection import progress
from dualrc.config import MIN_SIDE, PRESETS, Quality
from dualrc.errors import ConfigError
from dualrc.machine import device_name
from dualrc.types import Size

if TYPE_CHECKING:
    from dualrc.matcher import Matcher

# Options by their group in the help.
pairs_option = partial(typer.Option, rich_help_panel="Choice of pairs")
matches_option = partial(typer.Option, rich_help_panel="Matches")
network_option = partial(typer.Option, rich_help_panel="Network")
workers_option = partial(typer.Option, rich_help_panel="Workers and memory")
running_option = partial(typer.Option, rich_help_panel="Running")
out_option = partial(typer.Option, "--out", "-o")

app = typer.Typer(
    name="dualrc",
    help="Find dense correspondences between images with Dual-Resolution Correspondence Networks.\n\n"
    "Examples:\n"
    "  dualrc demo\n"
    "  dualrc match a.jpg b.jpg --draw matches.png\n"
    "  dualrc reconstruct photos --out town\n\n"
    "Run `dualrc COMMAND --help` for the options of a command.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
screen = Console()
# Messages and progress bars share a console, so that messages appear above the bars.
messages = progress.console


# Whether the running command prints errors and warnings only.
quiet = False


def _show_version(wanted: bool) -> None:
    if wanted:
        screen.print(f"dualrc {dualrc.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


DeviceOption = Annotated[
    str | None,
    network_option(
        parser=device_name,
        metavar="NAME",
        autocompletion=lambda: ["cpu", "cuda", "mps"],
        help="Device: cuda (or gpu), mps or cpu. Default: the fastest available.",
    ),
]
ThreadsOption = Annotated[
    int | None, running_option("--threads", min=1, metavar="N", help="Number of CPU threads. Default: one per core.")
]
# Options that several commands share, by field of their configs, which have their types and defaults.
SHARED: dict[str, Any] = {
    "min_score": matches_option(
        help="Lowest score of a match to keep, between 0 and 1; a score is the probability that the match is correct."
    ),
    "size": network_option(
        help="Long side of the network input, in pixels; images are scaled up or down to it. Larger sizes find more "
        "matches and take more time. Default: the image's own size, up to the limit of the preset."
    ),
    "quality": network_option(
        help="Matching quality. high enlarges small images to 1024 px, and matches again after compensating for "
        "rotation, zoom and tilt, in three to five times the time; if matches agree too little, it also tries tilted "
        "views, in about nine times the time. search also rotates the views."
    ),
    "preset": network_option(autocompletion=lambda: list(PRESETS), help=f"Network architecture: {', '.join(PRESETS)}."),
    "weights": network_option(help="Weights file (.safetensors). Default: the weights bundled with the package."),
    "device": DeviceOption,
    "max_memory": network_option(
        metavar="GIB",
        help="Memory to match one pair, in GiB, in addition to the network. Images that need more are scaled down, "
        "with a warning. Default: most of the free memory of the device.",
    ),
}


def shared(*names: str) -> dict[str, Any]:
    """Return the shared options of these names."""
    return {name: SHARED[name] for name in names}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of the commands that load a matcher; each command lists those that it has."""

    top: int | None = None
    min_score: float = 0.0
    size: int | None = None
    quality: Quality = "standard"
    preset: str = "default"
    weights: Path | None = None
    device: str | None = None
    max_memory: float | None = None

    def load(self, threads: int | None = None) -> "Matcher":
        """Load the matcher."""
        # This file must not import PyTorch: `cli/__init__.py` handles Ctrl-C only in the imports that follow.
        from dualrc.matcher import load

        return load(**vars(self), threads=threads)


def parse_size(text: str) -> Size:
    """Return the width and the height of a text such as 640x480."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip().lower())
    if found is None:
        raise ConfigError(f"--size {text} is not a valid size; pass WIDTHxHEIGHT in pixels, such as 640x480.")
    size = int(found[1]), int(found[2])
    if min(size) < MIN_SIDE:
        raise ConfigError(f"--size {text} is too small; pass at least {MIN_SIDE} pixels per side.")
    return size


def note(text: str, *, style: str | None = "yellow") -> None:
    """Print a message to standard error; brackets in file names are not treated as markup."""
    messages.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def status(text: str) -> AbstractContextManager[None]:
    """Show a status text while a block runs."""
    return progress.show_status(text, quiet)


def written(*what: object) -> None:
    """Print the names of the files that were written."""
    screen.print(f"Written: {', '.join(map(str, what))}", highlight=False, markup=False, soft_wrap=True)


def table(title: str) -> Table:
    """Print a title and return an empty two-column table."""
    # Rich would wrap a title of the table to the width of the table.
    screen.print(title, style="bold", highlight=False)
    result = Table(show_header=False)
    result.add_column(style="cyan", no_wrap=True)
    result.add_column(overflow="fold")
    return result
