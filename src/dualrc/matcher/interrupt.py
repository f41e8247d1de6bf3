"""Interruption of long matches: a function that is called before each step of the network."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_check: ContextVar[Callable[[], None]] = ContextVar("interruption", default=lambda: None)


@contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before each step of the network in this block; an exception that it raises ends the match."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def step() -> None:
    """Begin a step of the network: the features of some images, or a match of two."""
    _check.get()()
