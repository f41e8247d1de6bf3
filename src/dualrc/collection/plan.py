"""What is matched when, and by whom: blocks of pairs that share pictures, and what to do when a worker dies."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dualrc.collection.store import Names

# What a worker is asked for: a pair to match, or a single picture to describe.
Task = tuple[str, ...]

_DEATHS = 3  # workers that one task may cost
_AHEAD = 32  # waiting blocks among which a worker's next one is chosen


def in_blocks(pairs: Collection[Names], size: int) -> list[list[Task]]:
    """The pairs in blocks of at most `size`, in an order in which those near each other share pictures.

    They follow Hilbert's curve through the matrix of all pairs: whatever number of pictures is kept, the curve stays
    for long in a square of that side.
    """
    rank = _breadth_first(pairs)
    side = 1 << (len(rank) - 1).bit_length()

    def place(pair: Names) -> int:
        row, column = sorted((rank[pair[0]], rank[pair[1]]))
        return _along_curve(row, column, side)

    ordered = sorted(pairs, key=place)
    return [list(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def _along_curve(row: int, column: int, side: int) -> int:
    """How far along Hilbert's curve a place of a square is, whose side is a power of two."""
    distance = 0
    while side > 1:
        side //= 2
        low, right = row >= side, column >= side
        distance = 4 * distance + (3 * low ^ right)
        row, column = row % side, column % side
        if not right:
            row, column = (side - 1 - column, side - 1 - row) if low else (column, row)
    return distance


def in_chunks(names: Sequence[str], size: int) -> list[list[Task]]:
    """Single pictures in blocks of at most `size`."""
    return [[(name,) for name in names[start : start + size]] for start in range(0, len(names), size)]


def _breadth_first(pairs: Iterable[Names]) -> dict[str, int]:
    """A place for every picture, such that those with common partners stand near each other."""
    partners: dict[str, list[str]] = {}
    for name0, name1 in sorted(pairs):
        partners.setdefault(name0, []).append(name1)
        partners.setdefault(name1, []).append(name0)
    rank: dict[str, int] = {}
    for first in sorted(partners):
        if first in rank:
            continue
        rank[first] = len(rank)
        queue = deque([first])
        while queue:
            for partner in partners[queue.popleft()]:
                if partner not in rank:
                    rank[partner] = len(rank)
                    queue.append(partner)
    return rank


@dataclass(kw_only=True, eq=False)
class _Block:
    tasks: dict[Task, None]  # those still to do, in order
    pictures: set[str]
    deaths: int  # of workers that had it

    @staticmethod
    def of(tasks: Iterable[Task], deaths: int = 0) -> "_Block":
        ordered = dict.fromkeys(tasks)
        return _Block(tasks=ordered, pictures={name for task in ordered for name in task}, deaths=deaths)


class Plan:
    """Gives blocks to workers, by number, until every task is done or has failed."""

    def __init__(self, blocks: Iterable[Iterable[Task]], *, at_once: int) -> None:
        """`at_once` says how many tasks a worker has in work: when it dies, one of the first so many is to blame."""
        self._waiting = deque(_Block.of(block) for block in blocks)
        self._given: dict[int, _Block] = {}
        self._latest: dict[int, set[str]] = {}  # pictures that a worker probably still has
        self._at_once = at_once

    @property
    def finished(self) -> bool:
        """Whether nothing waits and nothing is in work."""
        return not self._waiting and not self._given

    def next(self, worker: int) -> list[Task]:
        """A block for this worker, with pictures that it has if possible; empty if nothing waits."""
        if not self._waiting:
            return []
        known = self._latest.get(worker, set())
        near = [len(block.pictures & known) for block, _ in zip(self._waiting, range(_AHEAD), strict=False)]
        index = near.index(max(near))
        block = self._waiting[index]
        del self._waiting[index]
        self._given[worker] = block
        self._latest[worker] = block.pictures
        return list(block.tasks)

    def done(self, worker: int, task: Task) -> None:
        """A task's result has come."""
        self._given[worker].tasks.pop(task, None)

    def returned(self, worker: int) -> None:
        """A worker has nothing in work, or no more."""
        block = self._given.pop(worker, None)
        if block is not None and block.tasks:
            self._waiting.appendleft(block)

    def died(self, worker: int) -> list[Task]:
        """Take a dead worker's block back; gives the tasks that are given up because they killed too many."""
        self._latest.pop(worker, None)
        block = self._given.pop(worker, None)
        if block is None or not block.tasks:
            return []
        tasks, deaths = list(block.tasks), block.deaths + 1
        if len(tasks) == 1 and deaths >= _DEATHS:
            return tasks
        suspects, others = tasks[: self._at_once], tasks[self._at_once :]
        if others:
            self._waiting.appendleft(_Block.of(others, block.deaths))
        # Suspects are tried again at once and, the second time, each alone, so that only the guilty is given up: for
        # that, two deaths in company count as one.
        parts = [suspects]
        if len(suspects) > 1 and deaths >= _DEATHS - 1:
            parts, deaths = [[task] for task in suspects], deaths - 1
        self._waiting.extendleft(_Block.of(part, deaths) for part in reversed(parts))
        return []
