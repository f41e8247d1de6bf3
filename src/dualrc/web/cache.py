"""Thread-safe LRU cache with a limit of size and age."""

import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """Cache that drops the least recently used values when their total size exceeds `limit`, and unused ones."""

    def __init__(self, limit: int, size_of: Callable[[Value], int], *, keep_s: float = math.inf, keep: int = 0) -> None:
        """Create an empty cache. Values expire after `keep_s` without use; the latest `keep` can exceed the limit."""
        self.limit, self._size_of, self._keep_s, self._keep = limit, size_of, keep_s, keep
        # Value, size and time of the last use, the least recently used first.
        self._values: dict[Key, tuple[Value, int, float]] = {}
        self._lock = threading.RLock()
        # Total size of the values.
        self.size = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return the value of a key and mark it as used, or return None."""
        with self._lock:
            self.expire()
            if key not in self._values:
                return None
            value, size, _ = self._values.pop(key)
            self._values[key] = value, size, time.monotonic()
            return value

    def put(self, key: Key, value: Value) -> None:
        """Store a value, unless it alone exceeds the limit."""
        size = self._size_of(value)
        with self._lock:
            self._drop(key)
            if size > self.limit and not self._keep:
                return
            self._values[key] = value, size, time.monotonic()
            self.size += size
            self.expire()
            while self.size > self.limit and len(self._values) > self._keep:
                self._drop(next(iter(self._values)))

    def make(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key; `make` creates it if it is not cached."""
        found = self.get(key)
        if found is None:
            found = make()
            self.put(key, found)
        return found

    def discard(self, which: Callable[[Key], bool]) -> None:
        """Drop the values whose keys satisfy `which`."""
        with self._lock:
            for key in [key for key in self._values if which(key)]:
                self._drop(key)

    def expire(self) -> None:
        """Drop expired values."""
        oldest = time.monotonic() - self._keep_s
        with self._lock:
            while self._values and next(iter(self._values.values()))[2] < oldest:
                self._drop(next(iter(self._values)))

    def _drop(self, key: Key) -> None:
        if key in self._values:
            self.size -= self._values.pop(key)[1]
