"""Schedule of the pairs: blocks of pairs that share images, and retries after a worker dies."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from dualrc.collection.store import Names

# Task of a worker: a pair to match, or a single image to describe.
Task = tuple[str, ...]

# A task fails after this number of workers died with it.
_DEATHS = 3
# Number of waiting blocks from which the next block of a worker is chosen.
_AHEAD = 32


def in_blocks(pairs: Collection[Names], size: int) -> list[list[Task]]:
    """Divide pairs into blocks of at most `size`, ordered so that pairs close to each other share images.

    The order follows a Hilbert curve through the matrix of all pairs. For any cache size, the curve stays for long in a
    square with as many rows as the cache has images.
    """
    rank = _breadth_first(pairs)
    side = 1 << (len(rank) - 1).bit_length()

    def place(pair: Names) -> int:
        row, column = sorted((rank[pair[0]], rank[pair[1]]))
        return _along_curve(row, column, side)

    ordered = sorted(pairs, key=place)
    return [list(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def _along_curve(row: int, column: int, side: int) -> int:
    """Return the position of a cell on the Hilbert curve through a square; `side` is a power of two."""
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
    """Divide single images into blocks of at most `size`."""
    return [[(name,) for name in names[start : start + size]] for start in range(0, len(names), size)]


def _breadth_first(pairs: Iterable[Names]) -> dict[str, int]:
    """Return a rank for every image; images with common partners get ranks close to each other."""
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


class _Block:
    def __init__(self, tasks: Iterable[Task], deaths: int = 0) -> None:
        # Unfinished tasks, in order.
        self.tasks = dict.fromkeys(tasks)
        self.images = {name for task in self.tasks for name in task}
        # Number of workers that died with this block.
        self.deaths = deaths


class Plan:
    """Assigns blocks to numbered workers until every task is done or has failed."""

    def __init__(self, blocks: Iterable[Iterable[Task]], *, at_once: int) -> None:
        """`at_once`: number of concurrent tasks of a worker; if it dies, one of its first `at_once` tasks caused it."""
        self._waiting = deque(_Block(block) for block in blocks)
        self._given: dict[int, _Block] = {}
        # Images that a worker has probably cached.
        self._latest: dict[int, set[str]] = {}
        self._at_once = at_once

    @property
    def finished(self) -> bool:
        """Whether no task is waiting or running."""
        return not self._waiting and not self._given

    def next(self, worker: int) -> list[Task]:
        """Return a block for this worker, preferably with images that it has cached; empty if no block waits."""
        if not self._waiting:
            return []
        known = self._latest.get(worker, set())
        near = [len(block.images & known) for block, _ in zip(self._waiting, range(_AHEAD), strict=False)]
        index = near.index(max(near))
        block = self._waiting[index]
        del self._waiting[index]
        self._given[worker] = block
        self._latest[worker] = block.images
        return list(block.tasks)

    def done(self, worker: int, task: Task) -> None:
        """Record that the result of a task has arrived."""
        self._given[worker].tasks.pop(task, None)

    def returned(self, worker: int) -> None:
        """Record that a worker is idle; unfinished tasks of its block wait again."""
        block = self._given.pop(worker, None)
        if block is not None and block.tasks:
            self._waiting.appendleft(block)

    def died(self, worker: int) -> list[Task]:
        """Take back the block of a dead worker; return tasks that failed because too many workers died with them."""
        self._latest.pop(worker, None)
        block = self._given.pop(worker, None)
        if block is None or not block.tasks:
            return []
        tasks, deaths = list(block.tasks), block.deaths + 1
        if len(tasks) == 1 and deaths >= _DEATHS:
            return tasks
        suspects, others = tasks[: self._at_once], tasks[self._at_once :]
        if others:
            self._waiting.appendleft(_Block(others, block.deaths))
        # Suspects are retried at once, and the second time each on its own, so that only the task to blame fails.
        # Two deaths of a group therefore count as one death of each task.
        parts = [suspects]
        if len(suspects) > 1 and deaths >= _DEATHS - 1:
            parts, deaths = [[task] for task in suspects], deaths - 1
        self._waiting.extendleft(_Block(part, deaths) for part in reversed(parts))
        return []
