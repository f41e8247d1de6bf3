"""Run commands: messages, progress, threads, results as JSON, and what happens on Ctrl-C."""

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

QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print errors and warnings only.", rich_help_panel=common.RUNNING_PANEL)
]
VerboseOption = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Also print debug messages, with time stamps.", rich_help_panel=common.RUNNING_PANEL
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result as JSON to standard output; docs/running.md lists the keys.",
        rich_help_panel=common.RUNNING_PANEL,
    ),
]
# Native code has this much time to return to Python after a signal.
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all long-running commands."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False
    threads: int | None = None


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; the run ends as after Ctrl-C, with another exit status."""


Command = Callable[..., Mapping[str, Any] | None]
# Maps the options of a stopped command to a sentence about the results that it leaves.
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
    """Register a function as a command with --quiet, --verbose, --json and --threads; --json prints its result.

    `kept`: describes the results that a stopped run leaves.
    `status`: maps a result to an exit status.
    `log`: file in the folder --out that receives the output of native libraries.
    `waits`: end the process some seconds after a signal if native code does not return. Pass False for a command that
    handles the signal itself, as training does.
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

        # Typer reads parameters from the signature, and types from the signature and the annotations.
        positional = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()]
        run.__signature__ = own.replace(parameters=[*positional, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*positional, *added)}
        app.command(name)(run)
        return run

    return decorate


def _finite(value: Any) -> Any:
    """Convert a value to JSON types; infinities and NaN become null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {" ".join(key) if isinstance(key, tuple) else str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # NumPy arrays and scalars.
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    return value


class _Handler(logging.Handler):
    """Log handler that prints above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
        common.note(self.format(record), style=style)


@contextmanager
def _output(chosen: RunOptions) -> Iterator[None]:
    """Print log messages at the chosen level, and reserve standard output for JSON if that was chosen."""
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
    """Limit torch to `count` threads."""
    if count is None:
        yield
        return
    from dualrc.matcher.extract import use_threads

    with use_threads(count):
        yield


@contextmanager
def _stopping(kept: Kept | None, values: Mapping[str, Any], *, waits: bool) -> Iterator[None]:
    """Exit with status 130 on Ctrl-C and 143 on SIGTERM, and print what was saved and how to continue."""

    def tell() -> None:
        # The command line is printed even if the saved results cannot be read.
        with suppress(Exception):
            if kept is not None and (words := kept(values)):
                common.note(f"Stopped. {words} Continue with:\n{command_line()}", style=None)
                return
        common.note(f"Stopped. No results were saved; run it again with:\n{command_line()}", style=None)

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
    """Return the command line of this process, quoted for a shell."""
    program = Path(sys.argv[0])
    start = [sys.executable, "-m", "dualrc"] if program.name == "__main__.py" else [program.name]
    return shlex.join([*start, *sys.argv[1:]])


@contextmanager
def _watch(tell: Callable[[], None]) -> Iterator[None]:
    """End the process some seconds after a signal if native code does not return to Python."""
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
    """Redirect the standard error output of native libraries to a file, which keeps progress bars intact."""
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
    # Python's own messages still go to the terminal.
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
                # Fails, and is ignored, if the folder has other files.
                path.parent.rmdir()
