"""Progress of long tasks: a bar on a terminal, else lines in the log."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from rich import progress as rich_progress
from rich.console import Console
from rich.text import Text

# Called with the name of a step, the number of finished items and the total.
Progress = Callable[[str, int, int], None]

logger = logging.getLogger(__name__)
# Console of the bars; text printed to it appears above them.
console = Console(stderr=True)
# Interval between lines: at first, and at most.
_EVERY_S, _AT_MOST_S = 5.0, 60.0
# The interval grows to this fraction of the time that the step has taken: one twentieth.
_SLOWER = 20


def no_progress(step: str, done: int, total: int) -> None:
    """Show nothing."""


@contextmanager
def show_progress(quiet: bool = False) -> Iterator[Progress]:
    """Show progress, speed and remaining time of each step: a bar, or a line every few seconds."""
    if quiet:
        yield no_progress
    else:
        with _bars() if _is_interactive() else _lines() as tell:
            yield tell


@contextmanager
def show_status(text: str, quiet: bool = False) -> Iterator[None]:
    """Show a status while the block runs; without a terminal, only if it takes more than a few seconds."""
    if not quiet and _is_interactive():
        with console.status(text):
            yield
    else:
        with show_progress(quiet) as tell:
            tell(text, 0, 0)
            yield


def _is_interactive() -> bool:
    return console.is_terminal or console.is_jupyter


@contextmanager
def _bars() -> Iterator[Progress]:
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
    """Items per second."""

    def render(self, task: rich_progress.Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else _rate(speed))


def _rate(speed: float) -> str:
    return f"{speed:.3g}/s" if speed < 999.5 else f"{speed:,.0f}/s"


@dataclass
class _Step:
    name: str
    # Number of items finished at the start.
    first: int
    done: int
    # 0: unknown.
    total: int
    began: float
    told: float

    def line(self, now: float) -> str:
        elapsed = now - self.began
        if self.total == 0:
            return f"{self.name} {_clock(elapsed)}"
        text = f"{self.name}: {self.done:,}/{self.total:,}"
        new = self.done - self.first
        if new > 0 and elapsed > 0:
            text += f", {_rate(new / elapsed)}"
        if self.done >= self.total:
            return f"{text}, took {_clock(elapsed)}" if new else text
        if new > 0 and elapsed > 0:
            return f"{text}, {_clock((self.total - self.done) * elapsed / new)} left"
        return text if elapsed < 1 else f"{text}, {_clock(elapsed)} so far"

    def is_due(self, now: float) -> bool:
        is_finished = self.done >= self.total > 0
        return not is_finished and now - self.told >= min(_AT_MOST_S, max(_EVERY_S, (now - self.began) / _SLOWER))


@contextmanager
def _lines() -> Iterator[Progress]:
    """Log a line when a step starts, every few seconds, and when it ends."""
    lock, ended = threading.Lock(), threading.Event()
    steps: dict[str, _Step] = {}
    latest: _Step | None = None

    def tell(name: str, done: int, total: int) -> None:
        nonlocal latest
        now = time.monotonic()
        with lock:
            starts = name not in steps
            latest = step = steps.setdefault(name, _Step(name, first=done, done=done, total=total, began=now, told=now))
            ends = step.done < step.total <= done
            step.done, step.total = done, total
            line = step.line(now) if ends or (starts and total) else ""
        if line:
            logger.info(line)

    def watch() -> None:
        while not ended.wait(_EVERY_S / 5):
            now, line = time.monotonic(), ""
            with lock:
                if latest is not None and latest.is_due(now):
                    latest.told, line = now, latest.line(now)
            if line:
                logger.info(line)

    # A separate thread, so that a step without progress for minutes is logged too.
    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


def _clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
