"""What executors have in common: workers by number, events, and the loop that carries out a plan with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dualrc.collection.plan import Plan, Task
from dualrc.collection.worker import Failure, Result
from dualrc.errors import ConfigError

_DEATHS = 12  # of workers in a row, with nothing done in between


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a worker did.

    ready: it wants work, and `value` pictures were read for the last; result: (task, result); refused: it can't
    start, because of the exception; died: how it ended, and another will take its place and its number.
    """

    worker: int
    kind: Literal["ready", "result", "refused", "died"]
    value: Any


class Executor(Protocol):
    """Workers on this machine or on many."""

    count: int  # workers
    at_once: int  # tasks that a worker has in work

    def give(self, worker: int, tasks: Sequence[Task]) -> None:
        """Let a worker that is ready work on these."""

    def next(self) -> Event:
        """Wait until something happens."""

    def close(self) -> None:
        """End all workers."""


def carry_out(executor: Executor, plan: Plan, idle: set[int], handle: Callable[[Task, Result], None]) -> int:
    """Have every task of a plan worked on, and handle the results as they come; gives how many pictures were read.

    `idle` holds the workers that are ready, before and after.
    """
    extracted, deaths = 0, 0
    while not plan.finished:
        for worker in sorted(idle):
            if tasks := plan.next(worker):
                idle.remove(worker)
                executor.give(worker, tasks)
        event = executor.next()
        if event.kind == "ready":
            extracted += event.value
            plan.returned(event.worker)
            idle.add(event.worker)
        elif event.kind == "result":
            deaths = 0
            task, result = event.value
            plan.done(event.worker, task)
            handle(task, result)
        elif event.kind == "refused":
            raise event.value
        else:
            deaths += 1
            idle.discard(event.worker)
            for task in plan.died(event.worker):
                deaths = 0
                handle(task, Failure(reason=f"Its workers died again and again (the last one {event.value})."))
            if deaths >= _DEATHS:
                remedy = "give a smaller --size or fewer --workers if memory is short"
                raise ConfigError(f"Workers die as soon as they start (the last one {event.value}); {remedy}.")
    return extracted
