"""Run commands: messages, progress, threads, results as JSON, and what happens on Ctrl-C."""

import functools
import inspect
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO, get_args, get_origin, get_type_hints

import typer

from dualrc.cli import common
from dualrc.files import check_writable, make_folder, to_json
from dualrc.matcher.extract import use_threads

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
# Native code has this much time to return to Python after a signal.
_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all long-running commands."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False
    threads: int | None = None


_RUN_OPTIONS = {
    "quiet": common.running_option("--quiet", "-q", help="Print errors and warnings only."),
    "verbose": common.running_option("--verbose", "-v", help="Also print debug messages, with time stamps."),
    "json": common.running_option(
        "--json", help="Print the result as JSON to standard output; docs/running.md lists the keys."
    ),
    "threads": common.ThreadsOption,
}


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

    A parameter of the type Annotated[Config, options] becomes one option per entry of `options`, a dictionary of
    options by field of that config, which has their types and defaults.
    `kept`: describes the results that a stopped run leaves.
    `status`: maps a result to an exit status.
    `log`: file in the folder --out that receives the output of native libraries.
    `waits`: end the process some seconds after a signal if native code does not return. Pass False for a command that
    handles the signal itself, as training does.
    """

    def decorate(function: Command) -> Command:
        own = inspect.signature(function)
        configs = _configs(own)
        parameters: list[inspect.Parameter] = []
        for key, own_parameter in own.parameters.items():
            parameters += _options(*configs[key]) if key in configs else [own_parameter.replace(kind=_KEYWORD)]
        names = {p.name for p in parameters}
        parameters += [p for p in _options(RunOptions, _RUN_OPTIONS) if p.name not in names]

        @functools.wraps(function)
        def run(**given: Any) -> None:
            chosen = RunOptions(**{key: given[key] for key in _RUN_OPTIONS})
            values = {key: value for key, value in given.items() if key in names}
            with (
                _stopping(kept, values, waits=waits),
                _output(chosen),
                use_threads(chosen.threads),
                ExitStack() as stack,
            ):
                if log is not None and values.get("out") is not None and not chosen.verbose:
                    stack.enter_context(_native_output_to(Path(values["out"]) / log))
                for key, (config, chosen_options) in configs.items():
                    values[key] = config(**{field: values.pop(field) for field in chosen_options})
                result = function(**values)
            if chosen.json and result is not None:
                sys.stdout.write(json.dumps(to_json(result), ensure_ascii=False, default=str) + "\n")
            if status is not None and result is not None and (code := status(result)):
                raise typer.Exit(code)

        # Typer reads parameters from the signature, and types from the signature and the annotations.
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name)(run)
        return run

    return decorate


def _configs(own: inspect.Signature) -> dict[str, tuple[type[Any], Mapping[str, Any]]]:
    """Return the parameters that are configs: their types, and options by field."""
    found = {}
    for name, parameter in own.parameters.items():
        for options in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(options, Mapping):
                found[name] = parameter.annotation.__origin__, options
    return found


def _options(config: type[Any], options: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Return a parameter for each option of a config, with the type and default of its field."""
    defaults, hints = {field.name: field.default for field in fields(config)}, get_type_hints(config)
    parameters = []
    for name, option in options.items():
        # Typer wants a list for an option that can be repeated.
        hint = list[str] if is_repeatable(hints[name]) else hints[name]
        # An option that several commands share has a type already.
        hint = option if get_origin(option) is Annotated else Annotated[hint, option]
        parameters.append(inspect.Parameter(name, _KEYWORD, annotation=hint, default=defaults[name]))
    return parameters


def is_repeatable(hint: Any) -> bool:
    """Return whether a setting is tuple[T, ...], which makes its option repeatable."""
    return get_args(hint)[1:] == (...,)


class _Handler(logging.Handler):
    """Log handler that prints above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else None
        common.note(self.format(record), style=style)


@contextmanager
def _output(chosen: RunOptions) -> Iterator[None]:
    """Print log messages at the chosen level, and reserve standard output for JSON if that was chosen."""
    log, handler = logging.getLogger("dualrc"), _Handler()
    before = log.level, common.screen.quiet, common.quiet
    log.addHandler(handler)
    log.setLevel(logging.WARNING if chosen.quiet else logging.DEBUG if chosen.verbose else logging.INFO)
    if chosen.verbose:
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    common.screen.quiet = chosen.quiet or chosen.json
    common.quiet = chosen.quiet
    try:
        yield
    finally:
        log.removeHandler(handler)
        level, common.screen.quiet, common.quiet = before
        log.setLevel(level)


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
