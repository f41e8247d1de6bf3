"""Features of pictures, kept for the next time as far as memory allows."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from dualrc.errors import ImageError


class HasBytes(Protocol):
    """Something that knows how much memory it takes, now."""

    @property
    def bytes(self) -> int:
        """Memory that it takes."""


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=HasBytes)


class LruCache(Generic[Key, Value]):
    """The least recently used values go first when all together take more than `max_bytes`.

    An ImageError is remembered too: a picture that can't be used is looked at once.
    """

    def __init__(self, max_bytes: float = math.inf, *, keep: int = 2) -> None:
        """`keep` values stay whatever they take: those of the pair in work."""
        self.max_bytes, self.keep = max_bytes, keep
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._errors: dict[Key, str] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._values or key in self._errors

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """What `make` gives for a key, called if it is not kept; an ImageError that it raised is raised every time."""
        if key in self._errors:
            raise ImageError(self._errors[key])
        if key not in self._values:
            try:
                self._values[key] = make()
            except ImageError as error:
                # Its words alone: the error itself holds on to the frames that it came through, and they to pictures.
                self._errors[key] = str(error)
                raise
        self._values.move_to_end(key)
        found = self._values[key]
        self.shrink(self.max_bytes)
        return found

    def shrink(self, max_bytes: float) -> None:
        """Let values go until the others take no more than this, or only `keep` are left."""
        while len(self._values) > self.keep and sum(value.bytes for value in self._values.values()) > max_bytes:
            self._values.popitem(last=False)
