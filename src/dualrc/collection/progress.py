"""Progress of long work, a line a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as rich_progress
from rich.console import Console
from rich.text import Text

# Told of each step's name, how much of it is done, and of how much.
Progress = Callable[[str, int, int], None]


def no_progress(step: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A line for each step with what is done, how fast, and how long the rest will take."""
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        _Speed(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console, speed_estimate_period=300) as shown:
        lines: dict[str, rich_progress.TaskID] = {}

        def tell(step: str, done: int, total: int) -> None:
            if step not in lines:
                lines[step] = shown.add_task(step, total=total, completed=done)
            shown.update(lines[step], completed=done, total=total)

        yield tell


class _Speed(rich_progress.ProgressColumn):
    """Pairs or pictures a second."""

    def render(self, task: rich_progress.Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.3g}/s")
