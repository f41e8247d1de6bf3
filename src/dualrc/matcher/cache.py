"""A cache of image features, limited by memory."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from dualrc.errors import ImageError
from dualrc.matcher.features import ImageFeatures, PendingImage

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=ImageFeatures | PendingImage)


class LruCache(Generic[Key, Value]):
    """Cache that evicts the least recently used values if all together need more than `max_bytes`.

    It also caches ImageErrors, so that an unusable image is read once only.
    """

    def __init__(self, max_bytes: float = math.inf, *, keep: int = 2) -> None:
        """Create an empty cache. The latest `keep` values stay regardless of size: the pair in progress."""
        self.max_bytes, self.keep = max_bytes, keep
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._errors: dict[Key, str] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._values or key in self._errors

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the cached value of a key, or call `make`; a cached ImageError is raised again every time."""
        if key in self._errors:
            raise ImageError(self._errors[key])
        if key not in self._values:
            try:
                self._values[key] = make()
            except ImageError as error:
                # Keep the message only, because the error references frames, which reference images.
                self._errors[key] = str(error)
                raise
        self._values.move_to_end(key)
        found = self._values[key]
        self.shrink(self.max_bytes)
        return found

    def shrink(self, max_bytes: float) -> None:
        """Evict values until the others need at most `max_bytes`, or only `keep` are left."""
        while len(self._values) > self.keep and sum(value.bytes for value in self._values.values()) > max_bytes:
            self._values.popitem(last=False)
