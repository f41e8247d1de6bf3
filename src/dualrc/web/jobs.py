"""Jobs: a bounded queue, one worker thread, progress for those who listen, and cancellation.

A job's work is a generator. It yields its progress at points where it may stop, and returns its result.
"""

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dualrc.errors import DualRCError
from dualrc.web.problems import Problem, from_error, unknown
from dualrc.web.settings import ServerConfig

logger = logging.getLogger(__name__)

State = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")
_FINISHED_KEPT = 1024
_HEARTBEAT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a job is."""

    stage: str = ""
    fraction: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


Work = Generator[Progress, None, Any]


@dataclass(kw_only=True, eq=False)
class Job:
    """A piece of work for the worker thread."""

    start: Callable[[], Work]
    client: str
    limit_s: float
    # Jobs of many steps let others go first between two steps.
    long: bool = False
    # Jobs with the same key may be given to `together` at once; None: this one runs alone.
    batch_key: tuple[Any, ...] | None = None
    pair: Any = None
    # Whether clients can ask for it by its id. One that is not listed goes when its result is taken.
    listed: bool = True
    # Called when the job has ended, in whatever way.
    release: Callable[[], None] = lambda: None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    state: State = "queued"
    progress: Progress = Progress()
    result: Any = None
    problem: Problem | None = None
    created: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    work: Work | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.created + self.limit_s


# Matches several pairs at once: one result, or one error, for each.
Together = Callable[[Sequence[Any]], Sequence[Any]]


class JobQueue:
    """First come, first served, on one thread."""

    def __init__(self, config: ServerConfig, *, together: Together | None = None) -> None:
        self.config, self._together = config, together
        self._waiting: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._working: list[Job] = []
        self._ready = threading.Condition()
        self._idle: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="matching", daemon=True)
        self.outcomes: Counter[str] = Counter()

    def open(self) -> None:
        """Start the worker; called from the event loop that listens."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self, wait_s: float = 10.0) -> None:
        """Cancel everything and wait for the worker."""
        with self._ready:
            self._closing = True
            for job in [*self._jobs.values(), *self._waiting, *self._working]:
                self._cancel(job)
            self._ready.notify_all()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    @property
    def closing(self) -> bool:
        """Whether the server stops."""
        return self._closing

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Jobs that run: one, or those of a batch."""
        return len(self._working)

    def when_idle(self, task: Callable[[], None]) -> None:
        """Do something on the worker thread when no job waits."""
        self._idle.put(task)
        with self._ready:
            self._ready.notify_all()

    def submit(self, job: Job) -> Job:
        """Queue a job, or say that there are too many."""
        with self._ready:
            if self._closing:
                raise Problem(503, "closing", "The server is stopping; try again when it is back.", retry_s=10)
            mine = sum(one.client == job.client for one in [*self._waiting, *self._working])
            if mine >= self.config.max_client_jobs:
                message = f"You have {mine} jobs waiting; wait for some of them, or cancel them."
                raise Problem(429, "too_many_jobs", message, retry_s=self._retry_s(mine))
            if len(self._waiting) >= self.config.max_queue:
                message = f"{len(self._waiting)} jobs are waiting, as many as the server accepts; try again soon."
                raise Problem(503, "queue_full", message, retry_s=self._retry_s(len(self._waiting)))
            self._forget()
            if job.listed:
                self._jobs[job.id] = job
            self._waiting.append(job)
            self._ready.notify_all()
        return job

    def get(self, number: str) -> Job:
        """The job of this id."""
        job = self._jobs.get(number)
        if job is None:
            raise unknown("job")
        return job

    def cancel(self, job: Job) -> None:
        """A queued job ends at once, a running one when its work comes to a point where it may stop."""
        with self._ready:
            self._cancel(job)

    def snapshot(self, job: Job) -> tuple[str, dict[str, Any]]:
        """The name and the data of the event that tells how a job stands."""
        if job.state == "done":
            return "done", dict(job.result)
        if job.state == "failed" and job.problem is not None:
            return "failed", job.problem.body()
        if job.state == "cancelled":
            return "cancelled", {}
        with self._ready:
            position = self._waiting.index(job) + 1 if job in self._waiting else 0
        told = {"state": job.state, "position": position, "stage": job.progress.stage}
        return "progress", {**told, "fraction": round(job.progress.fraction, 4), **job.progress.extra}

    async def follow(self, job: Job) -> AsyncIterator[tuple[str, dict[str, Any]] | None]:
        """How a job stands, whenever that changes, until it has ended; None where nothing changed for long."""
        told = None
        while True:
            changed = job.changed
            event = self.snapshot(job)
            if event != told:
                yield event
                told = event
            if event[0] in ENDED:
                return
            try:
                await asyncio.wait_for(changed.wait(), _HEARTBEAT_S)
            except TimeoutError:
                yield None

    async def result(self, job: Job) -> Any:
        """What the job returned; raises the Problem of one that failed."""
        while job.state not in ENDED:
            changed = job.changed
            # The state may have changed before the event was taken.
            if job.state not in ENDED:
                left = job.created + job.limit_s + 1 - time.monotonic()
                try:
                    await asyncio.wait_for(changed.wait(), max(0.01, left))
                except TimeoutError:
                    self.cancel(job)
                    raise _too_late(job) from None
        if job.state == "done":
            return job.result
        if job.problem is not None:
            raise job.problem
        raise Problem(409, "cancelled", "The job was cancelled; start it again.")

    def _retry_s(self, waiting: int) -> int:
        return max(1, min(60, waiting))

    def _forget(self) -> None:
        """Forget the oldest finished jobs, and those that ended long ago."""
        ended = [job for job in self._jobs.values() if job.state in ENDED]
        oldest = time.monotonic() - self.config.keep_s - self.config.collection_s
        for number, job in enumerate(ended):
            if number < len(ended) - _FINISHED_KEPT or job.created < oldest:
                del self._jobs[job.id]

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
            self._end(job, "cancelled")
            self._tell_waiting()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._waiting and not self._closing and self._idle.empty():
                    self._ready.wait()
                if self._closing:
                    return
                jobs = self._take()
            if jobs:
                self._work_on(jobs)
            else:
                self._do_idle()

    def _do_idle(self) -> None:
        try:
            self._idle.get_nowait()()
        except queue.Empty:
            pass
        except Exception:
            logger.exception("A background task failed.")

    def _take(self) -> list[Job]:
        """The next job, with those that can be matched together with it."""
        if not self._waiting:
            return []
        jobs = [self._waiting.pop(0)]
        key = jobs[0].batch_key
        if self._together is not None and key is not None:
            others = [job for job in self._waiting if job.batch_key == key][: self.config.batch - 1]
            for job in others:
                self._waiting.remove(job)
            jobs += others
        self._working = jobs
        for job in jobs:
            job.state = "running"
            self._wake(job)
        self._tell_waiting()
        return jobs

    def _work_on(self, jobs: list[Job]) -> None:
        try:
            if len(jobs) > 1 and self._together is not None:
                self._run_together(jobs)
            else:
                self._run_one(jobs[0])
        finally:
            with self._ready:
                self._working = []

    def _run_together(self, jobs: list[Job]) -> None:
        assert self._together is not None
        try:
            prepared = self._together([job.pair for job in jobs])
        except Exception:
            # Each alone says which of them fails.
            logger.info("Matching %d pairs together failed; they are matched one by one.", len(jobs), exc_info=True)
            prepared = []
        for job, found in zip(jobs, prepared, strict=False):
            job.pair.found = found
        for job in jobs:
            self._run_one(job)

    def _run_one(self, job: Job) -> None:
        """Run a job to its end, or, if it is a long one and others wait, for one step."""
        try:
            job.work = job.work or job.start()
            while True:
                if job.cancelled:
                    job.work.close()
                    self._finish(job, "cancelled")
                    return
                if job.late:
                    job.work.close()
                    raise _too_late(job)
                job.progress = next(job.work)
                self._wake(job)
                if job.long and self._waiting:
                    with self._ready:
                        if not job.cancelled and not self._closing:
                            # `running` stays its state: it has begun, and goes on after the others.
                            self._waiting.append(job)
                            return
        except StopIteration as end:
            job.result = end.value
            self._finish(job, "cancelled" if job.cancelled else "done")
        except Problem as problem:
            self._finish(job, "failed", problem)
        except DualRCError as error:
            self._finish(job, "failed", from_error(error))
        except Exception:
            logger.exception("A job failed.")
            message = "The server failed to do this; its log says why. Try again, or with other images."
            self._finish(job, "failed", Problem(500, "failed", message))

    def _finish(self, job: Job, state: State, problem: Problem | None = None) -> None:
        with self._ready:
            self._end(job, state, problem)

    def _end(self, job: Job, state: State, problem: Problem | None = None) -> None:
        # The problem first: who sees the state looks for it.
        job.problem, job.work, job.pair, job.start = problem, None, None, _ended
        job.state = state
        self.outcomes[state] += 1
        job.release()
        self._wake(job)

    def _tell_waiting(self) -> None:
        for job in self._waiting:
            self._wake(job)

    def _wake(self, job: Job) -> None:
        """Wake those who listen, on their event loop."""

        def wake() -> None:
            changed, job.changed = job.changed, asyncio.Event()
            changed.set()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(wake)


def _ended() -> Work:
    """The work of a job that has ended; what it worked on is let go."""
    raise AssertionError("A job is run once.")


def _too_late(job: Job) -> Problem:
    message = f"The job took longer than {job.limit_s:g} s; give a smaller size, or try again when less is going on."
    return Problem(504, "too_late", message)
