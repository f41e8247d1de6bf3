"""What the commands share: the program, its two consoles, options and tables."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.table import Table

import dualrc
from dualrc.collection import progress
from dualrc.config import PRESETS
from dualrc.machine import device_name

T = TypeVar("T")

app = typer.Typer(
    name="dualrc",
    help="Dense correspondences between photographs, by Dual-Resolution Correspondence Networks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
screen = Console()
messages = progress.console  # one for both, so that messages stand above the bars


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the command that runs shows."""

    quiet: bool = False


current = Shown()


def _show_version(wanted: bool) -> None:
    if wanted:
        screen.print(f"dualrc {dualrc.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    pass


PresetOption = Annotated[
    str, typer.Option(autocompletion=lambda: list(PRESETS), help=f"Network: {' or '.join(PRESETS)}.")
]
WeightsOption = Annotated[
    Path | None, typer.Option(help="Weights file (.safetensors); without it, those inside the package.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        parser=device_name,
        metavar="NAME",
        autocompletion=lambda: ["cpu", "cuda", "mps"],
        help="cuda (or gpu), mps or cpu; without it, the best there is.",
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        help="Long side that the network sees, in multiples of 16, scaling up or down. More finds more, for more time."
    ),
]

MinScoreOption = Annotated[float, typer.Option(help="Keep only matches with at least this probability.")]
QualityOption = Annotated[
    Literal["standard", "high"],
    typer.Option(help="high looks again: better if pictures are turned, zoomed or seen from the side, and slower."),
]
MaxMemoryOption = Annotated[
    float | None,
    typer.Option(
        metavar="GIB",
        help="Memory that matching a pair may take on the device beside the network; without it, most of what is free. "
        "Pictures that don't fit are seen smaller, and a note says so.",
    ),
]

ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, metavar="N", help="CPU threads; without it, one per core.", rich_help_panel="Running"
    ),
]


def settings(kind: type[T], options: Mapping[str, Any]) -> T:
    """A config of those of a command's options that have the names of its fields."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: options[name] for name in names if name in options})


def note(text: str, *, style: str | None = "yellow") -> None:
    """Tell something beside the result, as it is: names of files are no markup."""
    messages.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def status(text: str) -> AbstractContextManager[None]:
    """Show what is done while a block runs."""
    return progress.show_status(text, current.quiet)


def written(*what: object) -> None:
    """Tell what files there are now."""
    screen.print(f"Written: {', '.join(map(str, what))}", highlight=False, markup=False, soft_wrap=True)


def table(title: str) -> Table:
    """A table of two columns under its title, to be filled and printed."""
    # Above the table rather than as its title, which would be wrapped to the table's width.
    screen.print(title, style="bold", highlight=False)
    result = Table(show_header=False)
    result.add_column(style="cyan", no_wrap=True)
    result.add_column(overflow="fold")
    return result
