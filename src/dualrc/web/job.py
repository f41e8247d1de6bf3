"""Job of the service: its work, state, progress and result.

The work of a job is a generator. It yields its progress at points where it can be stopped, and returns its result.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

from dualrc.web.problems import Problem

State = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a job."""

    stage: str = ""
    fraction: float = 0.0
    # Number of steps of the network in this stage. Their total is not known: it depends on what the first ones find.
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


Work = Generator[Progress, None, Any]


class Cancelled(Exception):  # noqa: N818
    """Ends the work of a job that was cancelled."""


@dataclass(kw_only=True, eq=False)
class Job:
    """Task for the worker thread."""

    # None when the job has ended, so that its data can be freed.
    work: Work | None
    client: str
    limit_s: float
    # Whether other jobs may run between two steps of this one.
    long: bool = False
    # Jobs with the same key can be matched in one batch; None runs the job alone.
    batch_key: tuple[Any, ...] | None = None
    pair: Any = None
    # Whether clients can query the job by its id. A job that is not listed is dropped with its result.
    listed: bool = True
    # Called when the job ends, whether it succeeded or not.
    release: Callable[[], None] = lambda: None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    state: State = "queued"
    progress: Progress = Progress()
    result: Any = None
    problem: Problem | None = None
    created: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self) -> None:
        """Raise if the job was cancelled or has exceeded its time limit."""
        if self.cancelled:
            raise Cancelled
        if time.monotonic() > self.created + self.limit_s:
            raise self.too_late()

    def end(self, state: State, problem: Problem | None = None) -> None:
        """Set the outcome, and release what the job used."""
        # Set the problem before the state, because readers of the state use it.
        self.problem, self.work, self.pair = problem, None, None
        self.state = state
        self.release()

    def too_late(self) -> Problem:
        """Return the problem of a job that has exceeded its time limit."""
        message = f"The job took longer than {self.limit_s:g} s; use a smaller size, or try again later."
        return Problem(504, "too_late", message)

    def wake(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Notify the listeners on their event loop; any thread may call this."""

        def wake() -> None:
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(wake)
