"""Job queue with a limited length, one worker thread, progress events and cancellation."""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dualrc.errors import DualRCError
from dualrc.matcher.interrupt import interruptible
from dualrc.web.job import ENDED, Cancelled, Job, State
from dualrc.web.problems import Problem, from_error, known
from dualrc.web.settings import ServerConfig

logger = logging.getLogger(__name__)

# Maximum number of finished jobs that are remembered.
_FINISHED_KEPT = 1024
# Seconds without an event after which a stream sends a comment to keep the connection open.
_HEARTBEAT_S = 15.0

# Function that matches several pairs in one batch and returns one result for each.
Together = Callable[[Sequence[Any]], Sequence[Any]]


class JobQueue:
    """First-in, first-out queue with one worker thread."""

    def __init__(self, config: ServerConfig, *, together: Together | None = None) -> None:
        self.config, self._together = config, together
        self._waiting: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._working: list[Job] = []
        self._ready = threading.Condition()
        self._idle: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Whether the server is stopping.
        self.closing = False
        self._thread = threading.Thread(target=self._run, name="matching", daemon=True)
        # Number of jobs that ended, by outcome.
        self.outcomes: Counter[str] = Counter()
        # Number of batches, by the number of pairs that were matched together.
        self.batches: Counter[int] = Counter()

    def open(self) -> None:
        """Start the worker; call this from the event loop that follows the jobs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self, wait_s: float = 10.0) -> None:
        """Cancel all jobs and wait for the worker."""
        with self._ready:
            self.closing = True
            for job in [*self._jobs.values(), *self._waiting, *self._working]:
                self.cancel(job)
            self._ready.notify_all()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    @property
    def depth(self) -> int:
        """Number of jobs in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of running jobs; more than one for a batch."""
        return len(self._working)

    def when_idle(self, task: Callable[[], None]) -> None:
        """Run a task on the worker thread when no job is waiting."""
        with self._ready:
            self._idle.append(task)
            self._ready.notify_all()

    def submit(self, job: Job) -> Job:
        """Queue a job; raise a Problem if there are too many."""
        with self._ready:
            if self.closing:
                raise Problem(503, "closing", "The server is stopping; try again when it is back.", retry_s=10)
            mine = sum(one.client == job.client for one in [*self._waiting, *self._working])
            if mine >= self.config.max_client_jobs:
                message = f"You have {mine} jobs waiting; wait for some of them, or cancel them."
                raise Problem(429, "too_many_jobs", message, retry_s=self._retry_s(mine))
            if len(self._waiting) >= self.config.max_queue:
                message = f"{len(self._waiting)} jobs are waiting, which is the limit of the server; try again soon."
                raise Problem(503, "queue_full", message, retry_s=self._retry_s(len(self._waiting)))
            self._forget()
            if job.listed:
                self._jobs[job.id] = job
            self._waiting.append(job)
            self._ready.notify_all()
        return job

    def get(self, number: str) -> Job:
        """Return the job with this id."""
        return known(self._jobs.get(number), "job")

    def cancel(self, job: Job) -> None:
        """Cancel a job: at once if it is queued, at its next step if it is running."""
        with self._ready:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._end(job, "cancelled")
                self._tell_waiting()

    def snapshot(self, job: Job) -> tuple[str, dict[str, Any]]:
        """Return the name and the data of the event that describes the current state of a job."""
        if job.state == "done":
            return "done", dict(job.result)
        if job.state == "failed" and job.problem is not None:
            return "failed", job.problem.body()
        if job.state == "cancelled":
            return "cancelled", {}
        with self._ready:
            position = self._waiting.index(job) + 1 if job in self._waiting else 0
        told = {"state": job.state, "position": position, "stage": job.progress.stage, "step": job.progress.step}
        return "progress", {**told, "fraction": round(job.progress.fraction, 4), **job.progress.extra}

    async def follow(self, job: Job) -> AsyncIterator[tuple[str, dict[str, Any]] | None]:
        """Yield an event for every change of a job until it ends, and None when nothing has changed for a while."""
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
        """Return the result of a job, or raise the Problem with which it failed."""
        while job.state not in ENDED:
            changed = job.changed
            # The state can change before the event is read.
            if job.state not in ENDED:
                left = job.created + job.limit_s + 1 - time.monotonic()
                try:
                    await asyncio.wait_for(changed.wait(), max(0.01, left))
                except TimeoutError:
                    self.cancel(job)
                    raise job.too_late() from None
        if job.state == "done":
            return job.result
        if job.problem is not None:
            raise job.problem
        raise Problem(409, "cancelled", "The job was cancelled; start it again.")

    def _retry_s(self, waiting: int) -> int:
        return max(1, min(60, waiting))

    def _forget(self) -> None:
        """Remove the oldest finished jobs and expired ones."""
        ended = [job for job in self._jobs.values() if job.state in ENDED]
        oldest = time.monotonic() - self.config.keep_s - self.config.collection_s
        for number, job in enumerate(ended):
            if number < len(ended) - _FINISHED_KEPT or job.created < oldest:
                del self._jobs[job.id]

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._waiting or self._idle or self.closing)
                if self.closing:
                    return
                work = partial(self._work_on, self._take()) if self._waiting else self._idle.popleft()
            try:
                work()
            except Exception:
                logger.exception("A background task failed.")

    def _take(self) -> list[Job]:
        """Return the next job and the jobs that can be matched in one batch with it."""
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
            job.wake(self._loop)
        self._tell_waiting()
        return jobs

    def _work_on(self, jobs: list[Job]) -> None:
        try:
            if len(jobs) > 1:
                self._match_together(jobs)
            elif jobs[0].batch_key is not None:
                self.batches[1] += 1
            for job in jobs:
                self._run_one(job)
        finally:
            with self._ready:
                self._working = []

    def _match_together(self, jobs: list[Job]) -> None:
        """Match the pairs of several jobs in one batch. If that fails, each job matches its own pair."""
        assert self._together is not None
        try:
            for job, found in zip(jobs, self._together([job.pair for job in jobs]), strict=True):
                job.pair.found = found
            self.batches[len(jobs)] += 1
        except Exception:
            # Matching the pairs one by one finds the pair that fails.
            logger.info("Matching %d pairs together failed; they are matched one by one.", len(jobs), exc_info=True)
            self.batches[1] += len(jobs)

    def _run_one(self, job: Job) -> None:
        """Run a job to its end, or for one step if it is long and other jobs are waiting."""
        try:
            assert job.work is not None
            while True:
                job.check()
                with interruptible(partial(self._step, job)):
                    job.progress = next(job.work)
                job.wake(self._loop)
                if job.long and self._waiting:
                    with self._ready:
                        if not job.cancelled and not self.closing:
                            # The state remains `running`: the job continues after the others.
                            self._waiting.append(job)
                            return
        except StopIteration as end:
            job.result = end.value
            self._end(job, "cancelled" if job.cancelled else "done")
        except Cancelled:
            self._end(job, "cancelled")
        except (Problem, DualRCError) as error:
            self._end(job, "failed", from_error(error))
        except Exception:
            logger.exception("A job failed.")
            message = "The server failed; see its log. Try again, or use other images."
            self._end(job, "failed", Problem(500, "failed", message))

    def _step(self, job: Job) -> None:
        """Report a step of the network; raise if the job has to end."""
        job.check()
        job.progress = replace(job.progress, step=job.progress.step + 1)
        job.wake(self._loop)

    def _end(self, job: Job, state: State, problem: Problem | None = None) -> None:
        with self._ready:
            self.outcomes[state] += 1
            job.end(state, problem)
            job.wake(self._loop)

    def _tell_waiting(self) -> None:
        for job in self._waiting:
            job.wake(self._loop)
