"""Collections: sets of images whose pairs are all matched, one after the other."""

import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from dualrc.web.pairs import Pair, finite
from dualrc.web.problems import unknown
from dualrc.web.settings import ServerConfig
from dualrc.web.uploads import Upload

# Maximum number of stored collections.
_MOST = 64


@dataclass(kw_only=True, eq=False)
class Collection:
    """Images of a collection and the results of the pairs matched so far."""

    images: list[Upload]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    used: float = field(default_factory=time.monotonic)
    scores: dict[tuple[int, int], float] = field(default_factory=dict)
    pairs: dict[tuple[int, int], str] = field(default_factory=dict)

    def tell(self, i: int, j: int, pair: Pair) -> None:
        """Store the result of a matched pair."""
        self.scores[i, j], self.pairs[i, j] = pair.matches.pair_score, pair.id

    def finished(self) -> dict[str, Any]:
        """Return the result of the job."""
        return {"collection": self.id}

    def describe(self) -> dict[str, Any]:
        """Return the JSON of a collection; scores are symmetric, null on the diagonal and for unmatched pairs."""
        count, scores, pairs = len(self.images), dict(self.scores), dict(self.pairs)
        matrix: list[list[float | None]] = [[None] * count for _ in range(count)]
        for (i, j), score in scores.items():
            matrix[i][j] = matrix[j][i] = finite(score)
        return {
            "images": [
                {"id": one.id, "name": one.name, "width": one.size[0], "height": one.size[1]} for one in self.images
            ],
            "scores": matrix,
            "pairs": {f"{i},{j}": number for (i, j), number in pairs.items()},
        }


class CollectionStore:
    """Collections by id; unused ones expire."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._kept: dict[str, Collection] = {}
        self._lock = threading.Lock()

    def add(self, collection: Collection) -> None:
        """Store a collection."""
        with self._lock:
            oldest = time.monotonic() - self._config.keep_s - self._config.collection_s
            for number in [number for number, one in self._kept.items() if one.used < oldest]:
                del self._kept[number]
            while len(self._kept) >= _MOST:
                del self._kept[min(self._kept.values(), key=lambda one: one.used).id]
            self._kept[collection.id] = collection

    def get(self, number: str) -> Collection:
        """Return the collection with this id and mark it as used."""
        with self._lock:
            found = self._kept.get(number)
            if found is None:
                raise unknown("collection")
            found.used = time.monotonic()
            return found
