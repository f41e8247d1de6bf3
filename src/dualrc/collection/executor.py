"""Interface of executors: numbered workers, their events, and the loop that runs a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dualrc.collection.plan import Plan, Task
from dualrc.collection.worker import Failure, Result
from dualrc.errors import ConfigError

# Number of worker deaths in a row, without a result in between, after which the run is aborted.
_DEATHS = 12


@dataclass(frozen=True, kw_only=True)
class Event:
    """Event of a worker.

    ready: the worker waits for tasks; `value` is the number of images it read for the previous ones.
    result: `value` is (task, result).
    refused: the worker cannot start; `value` is the exception.
    died: `value` describes how; another worker takes its number.
    """

    worker: int
    kind: Literal["ready", "result", "refused", "died"]
    value: Any


class Executor(Protocol):
    """Workers on one or several machines."""

    # Number of workers.
    count: int
    # Number of tasks that a worker processes concurrently.
    at_once: int

    def give(self, worker: int, tasks: Sequence[Task]) -> None:
        """Assign tasks to a worker that is ready."""

    def next(self) -> Event:
        """Wait for the next event."""

    def close(self) -> None:
        """End all workers."""


def carry_out(executor: Executor, plan: Plan, idle: set[int], handle: Callable[[Task, Result], None]) -> int:
    """Run every task of a plan, pass results to `handle`, and return the number of images that were read.

    `idle`: numbers of the workers that are ready; updated in place.
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
                handle(task, Failure(reason=f"Its workers died repeatedly (the last one {event.value})."))
            if deaths >= _DEATHS:
                remedy = "use a smaller --size or fewer --workers if memory is short"
                raise ConfigError(f"Workers die right after their start (the last one {event.value}); {remedy}.")
    return extracted
