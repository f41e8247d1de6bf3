"""How commands run: their messages, progress and threads, results as JSON, and what happens when they are stopped."""

import functools
import inspect
import json
import logging
import math
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from dualrc.cli import common
from dualrc.files import check_writable, make_folder

_PANEL = "Running"
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print errors and warnings only.", rich_help_panel=_PANEL)
]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print what is done in detail.", rich_help_panel=_PANEL)
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result as JSON to standard output; docs/running.md has the keys.",
        rich_help_panel=_PANEL,
    ),
]
_GRACE_S = 10.0  # for native code to come back to Python after a signal


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that all long commands have."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False
    threads: int | None = None


class Terminated(KeyboardInterrupt):
    """SIGTERM was received: the run ends as for Ctrl-C, with another status."""


Command = Callable[..., Mapping[str, Any] | None]
# What is kept when a command is stopped, told from its options.
Kept = Callable[[Mapping[str, Any]], str]


def command(
    name: str | None = None,
    *,
    app: typer.Typer = common.app,
    kept: Kept | None = None,
    status: Callable[[Mapping[str, Any]], int] | None = None,
    log: str | None = None,
    waits: bool = True,
) -> Callable[[Command], Command]:
    """Make a function a command with --quiet, --verbose, --json and --threads; it returns what --json prints.

    `kept` says what a stopped run leaves. `status` gives the exit status that belongs to a result. `log` is the file in
    the folder --out that gets what native libraries print.
    `waits`: native code gets some seconds to end after a signal; else the command ends by itself, as training does.
    """

    def decorate(function: Command) -> Command:
        own = inspect.signature(function)
        options = {"quiet": QuietOption, "verbose": VerboseOption, "json": JsonOption, "threads": common.ThreadsOption}
        added = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for (key, annotation), default in zip(options.items(), (False, False, False, None), strict=True)
            if key not in own.parameters
        ]

        @functools.wraps(function)
        def run(**given: Any) -> None:
            chosen = RunOptions(**{key: given[key] for key in options})
            values = {key: value for key, value in given.items() if key in own.parameters}
            with _stopping(kept, values, waits=waits), _output(chosen), _threads(chosen.threads), ExitStack() as stack:
                if log is not None and values.get("out") is not None and not chosen.verbose:
                    stack.enter_context(_native_output_to(Path(values["out"]) / log))
                result = function(**values)
            if chosen.json and result is not None:
                sys.stdout.write(json.dumps(_finite(result), ensure_ascii=False, default=str) + "\n")
            if status is not None and result is not None and (code := status(result)):
                raise typer.Exit(code)

        # Typer reads parameters from the signature, and their types from both.
        positional = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()]
        run.__signature__ = own.replace(parameters=[*positional, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*positional, *added)}
        app.command(name)(run)
        return run

    return decorate


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {" ".join(key) if isinstance(key, tuple) else str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return _finite(value.tolist())
    return value


class _Handler(logging.Handler):
    """Prints the log above the bars."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
        common.note(self.format(record), style=style)


@contextmanager
def _output(chosen: RunOptions) -> Iterator[None]:
    """Show what the library logs, as far as it is asked for, and leave standard output to JSON."""
    log, handler = logging.getLogger("dualrc"), _Handler()
    before = log.level, common.screen.quiet, common.current
    log.addHandler(handler)
    log.setLevel(logging.WARNING if chosen.quiet else logging.DEBUG if chosen.verbose else logging.INFO)
    if chosen.verbose:
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    common.screen.quiet = chosen.quiet or chosen.json
    common.current = common.Shown(quiet=chosen.quiet)
    try:
        yield
    finally:
        log.removeHandler(handler)
        level, common.screen.quiet, common.current = before
        log.setLevel(level)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads."""
    if count is None:
        yield
        return
    from dualrc.matcher.extract import use_threads

    with use_threads(count):
        yield


@contextmanager
def _stopping(kept: Kept | None, values: Mapping[str, Any], *, waits: bool) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with a word on what is kept and how to go on, and status 130 or 143."""

    def tell() -> None:
        with suppress(Exception):  # whatever is wrong with what is kept, the command is told
            if kept is not None and (words := kept(values)):
                common.note(f"Stopped. {words} Go on with:\n{command_line()}", style=None)
                return
        common.note(f"Stopped. Nothing is kept; run it again with:\n{command_line()}", style=None)

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if in_main else None
    try:
        with _watch(tell) if in_main and waits else ExitStack():
            yield
    except KeyboardInterrupt as stopped:
        tell()
        number = signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT
        raise typer.Exit(128 + number) from stopped
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def command_line() -> str:
    """What was typed, to be typed again."""
    program = Path(sys.argv[0])
    start = [sys.executable, "-m", "dualrc"] if program.name == "__main__.py" else [program.name]
    return shlex.join([*start, *sys.argv[1:]])


@contextmanager
def _watch(tell: Callable[[], None]) -> Iterator[None]:
    """End the process some seconds after a signal if native code does not come back to Python, which could."""
    ended = threading.Event()
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def wait() -> None:
        for number in iter(lambda: reading.recv(1), b""):
            if number[0] in (signal.SIGINT, signal.SIGTERM) and not ended.wait(_GRACE_S):
                tell()
                os._exit(128 + number[0])
        reading.close()

    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        writing.close()
        thread.join()


@contextmanager
def _native_output_to(path: Path) -> Iterator[None]:
    """Let what native libraries write to standard error go to a file, so that it does not break the bars."""
    try:
        usable = sys.stderr.fileno() == 2
    except (OSError, ValueError):
        usable = False
    if not usable:
        yield
        return
    check_writable(make_folder(path.parent) / path.name)
    shown: TextIO = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace")
    sys.stderr.flush()
    with path.open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 2)
    # What we print ourselves goes where it went before.
    stderr, sys.stderr = sys.stderr, shown
    try:
        yield
    finally:
        sys.stderr = stderr
        os.dup2(shown.fileno(), 2)
        shown.close()
        with suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # where nothing else was written either
