"""Many pairs: images are read in advance and kept, and pairs of the same shapes form batches."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from dualrc.config import MatcherConfig
from dualrc.errors import ImageError
from dualrc.image import Scale
from dualrc.matcher.budget import NoMemoryError, release_memory
from dualrc.matcher.cache import LruCache
from dualrc.matcher.features import Matchable, PendingImage, shapes
from dualrc.matcher.prefetch import ReadAhead, look_ahead
from dualrc.matches import Matches
from dualrc.pixels import STRIDE
from dualrc.types import Unset

if TYPE_CHECKING:
    from dualrc.matcher.matcher import Matcher

ErrorHandling = Literal["raise", "empty"]
# Largest batch on a GPU, in pairs and in entries of the coarse tensor. On a CPU, one pair at a time is as fast.
MOST_PAIRS, _MOST_ENTRIES = 32, 50_000_000
# Largest number of image pixels that wait for a batch.
_MOST_PIXELS = 100_000_000
# With a GPU: threads that read images in advance, and number of pairs that they read ahead.
_READERS, _AHEAD = 4, 8


class _Pair(NamedTuple):
    """A pair as the caller gave it, and its images."""

    given: tuple[Matchable, Matchable]
    items: tuple[PendingImage, PendingImage]


def batch_size(matcher: "Matcher", pair: tuple[Scale, Scale]) -> int:
    """Return the batch size for pairs of images of these sizes."""
    if matcher.device.type != "cuda":
        return 1
    cells = [math.prod(side // STRIDE for side in scale.input_size) for scale in pair]
    pixels = sum(math.prod(scale.image_size) for scale in pair)
    most = matcher.budget.together(pair)
    return max(1, min(MOST_PAIRS, most, _MOST_ENTRIES // math.prod(cells), _MOST_PIXELS // pixels))


def pairs_ahead(matcher: "Matcher") -> int:
    """Return the number of pairs whose images are read in advance."""
    return _AHEAD if matcher.device.type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class ManyPairs:
    """Matches pairs in order, in batches where that is faster."""

    matcher: "Matcher"
    settings: MatcherConfig
    size: int | Unset | None
    errors: ErrorHandling

    def match(self, pairs: Iterable[tuple[Matchable, Matchable]]) -> Iterator[Matches]:
        """Yield the matches of each pair; see `Matcher.match_many`."""
        if self.settings.quality != "standard":
            yield from map(self._match_alone, pairs)
            return
        matcher, ahead = self.matcher, pairs_ahead(self.matcher)
        with ReadAhead(_READERS) as reader:
            kept = LruCache[Path, PendingImage]()
            batch: list[_Pair] = []
            for given, coming in look_ahead(pairs, ahead):
                for image in itertools.chain.from_iterable(coming if ahead else ()):
                    if isinstance(image, (str, Path)) and Path(image) not in kept:
                        reader.ask(Path(image))
                try:
                    items = (self._pending(given[0], kept, reader), self._pending(given[1], kept, reader))
                    scales = (items[0].scale, items[1].scale)
                    kept.shrink(matcher.budget.spare(scales))
                    fits = matcher.budget.fits(scales)
                except ImageError as error:
                    # Results of earlier pairs are not lost.
                    yield from self._match_batch(batch)
                    batch = []
                    if self.errors == "raise":
                        raise
                    yield self._nothing(error)
                    continue
                if batch and (not fits or shapes(items) != shapes(batch[0].items)):
                    yield from self._match_batch(batch, ahead=items if fits else ())
                    batch = []
                if not fits:
                    yield self._match_alone(given)
                    continue
                batch.append(_Pair(given, items))
                if len(batch) >= batch_size(matcher, scales):
                    yield from self._match_batch(batch)
                    batch = []
            yield from self._match_batch(batch)

    def _pending(self, image: Matchable, kept: LruCache[Path, PendingImage], reader: ReadAhead) -> PendingImage:
        """Return the image, read now if necessary; its features follow later."""
        if not isinstance(image, (str, Path)):
            return self.matcher.pending(image, self.size)
        path = Path(image)
        if path in kept:
            reader.drop(path)
        return kept.get(path, lambda: self.matcher.pending(reader.take(path), self.size))

    def _match_batch(self, batch: list[_Pair], ahead: Sequence[PendingImage] = ()) -> Iterator[Matches]:
        """Match pairs as one batch, or one by one if there is not enough memory.

        While a GPU matches a single pair, the extraction of the images `ahead` is launched.
        """
        matcher, found = self.matcher, list[Matches]()

        def meanwhile() -> None:
            if len(batch) == 1 and len(ahead) == 2 and batch_size(matcher, (ahead[0].scale, ahead[1].scale)) > 1:
                # Without enough memory they wait for their turn.
                with suppress(NoMemoryError):
                    matcher.extract(ahead)

        with suppress(NoMemoryError):
            matcher.extract(item for pair in batch for item in pair.items)
            pairs = [(pair.items[0].known(), pair.items[1].known()) for pair in batch]
            uncalibrated = matcher.match_uncalibrated(pairs, self.settings, meanwhile)
            found = [matcher.selected(matches, self.settings) for matches in uncalibrated]
        if batch and not found:
            release_memory()
        yield from found or (self._match_alone(pair.given) for pair in batch)

    def _match_alone(self, pair: tuple[Matchable, Matchable]) -> Matches:
        """Match one pair alone, at a smaller size if necessary."""
        top, min_score, quality = self.settings.top, self.settings.min_score, self.settings.quality
        try:
            return self.matcher.match(*pair, size=self.size, top=top, min_score=min_score, quality=quality)
        except ImageError as error:
            if self.errors == "raise":
                raise
            return self._nothing(error)

    def _nothing(self, error: ImageError) -> Matches:
        return Matches.none({**self.matcher.info, "error": str(error)})
