"""Thread-safe LRU cache with a memory limit."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Cache that drops the least recently used values when their total size exceeds `max_bytes`."""

    def __init__(self, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        self.max_bytes, self._size_of = max_bytes, size_of
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def bytes(self) -> int:
        """Total size of the values, in bytes."""
        return self._bytes

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, or None."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Key, value: Value) -> None:
        """Store a value, unless it alone exceeds the limit."""
        size = self._size_of(value)
        with self._lock:
            self._drop(key)
            if size > self.max_bytes:
                return
            self._values[key] = value, size
            self._bytes += size
            while self._bytes > self.max_bytes:
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

    def _drop(self, key: Key) -> None:
        _, size = self._values.pop(key, (None, 0))
        self._bytes -= size
