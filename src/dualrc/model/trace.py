"""What a pass through the network tells of itself, for benchmarks and debugging; nothing is kept unless asked for.

with trace.recording() as seen:
    network.match(features0, features1)
seen.notes["search.visited"]

Keys in use, each a list with an entry for every time it was noted:

- kernel.STAGE: the name of what ran for backbone, consensus or search, such as "triton" or "slabs of 8 rows".
- search.groups: groups of queries searched for together (the 16 fine cells of a coarse cell).
- search.candidates: coarse cells that each group could have visited.
- search.visited: coarse cells visited by all groups together, a number or a tensor of one.
- search.widened: groups for which the bound did not hold at first, so that they had to look further.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Trace:
    """Notes by key, in the order in which they were made."""

    notes: dict[str, list[Any]] = field(default_factory=dict)


_current: ContextVar[Trace | None] = ContextVar("dualrc trace", default=None)


@contextmanager
def recording() -> Iterator[Trace]:
    """Collect what is noted in this block, by this thread."""
    trace = Trace()
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def is_recording() -> bool:
    """Whether notes are kept; ask before computing what only a note needs."""
    return _current.get() is not None


def note(key: str, value: Any) -> None:
    """Add a note if someone is recording."""
    trace = _current.get()
    if trace is not None:
        trace.notes.setdefault(key, []).append(value)
