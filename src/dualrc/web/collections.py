"""Collections: sets of images whose pairs are all matched, one after the other."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from dualrc.web.pairs import finite
from dualrc.web.uploads import Upload


@dataclass(kw_only=True, eq=False)
class Collection:
    """Images of a collection and the results of the pairs matched so far."""

    images: tuple[Upload, ...]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    # Score and id of the result of each matched pair.
    results: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the JSON of a collection; scores are symmetric, null on the diagonal and for unmatched pairs."""
        # A copy: the worker thread adds results.
        results = dict(self.results)
        matrix: list[list[float | None]] = [[None] * len(self.images) for _ in self.images]
        for (i, j), (score, _) in results.items():
            matrix[i][j] = matrix[j][i] = finite(score)
        return {
            "images": [image.describe() for image in self.images],
            "scores": matrix,
            "pairs": {f"{i},{j}": number for (i, j), (_, number) in results.items()},
        }
