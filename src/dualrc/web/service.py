"""Operations of the service: matching, warps, points and estimates, run as jobs."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualrc import geometry
from dualrc.errors import DualRCError
from dualrc.image import Scale
from dualrc.matcher import Matcher
from dualrc.matcher.features import ImageFeatures
from dualrc.matcher.follow import follow
from dualrc.matches import Estimate, EstimateKind, Matches, Warp
from dualrc.pixels import STRIDE, pixel_grid, resize_points
from dualrc.types import UNSET, Size, Unset
from dualrc.web.cache import Cache
from dualrc.web.job import Job, Progress, Work
from dualrc.web.jobs import JobQueue
from dualrc.web.pairs import Collection, Pair
from dualrc.web.settings import ServerConfig
from dualrc.web.uploads import ImageStore, Upload
from dualrc.web.wire import pack_warp

if TYPE_CHECKING:
    # At run time, the queue and its batches work without the packages of the HTTP service.
    from dualrc.web.schemas import MatchOptions

# Minimum long side, in pixels, to which an image is scaled down to compensate for a zoom.
_LEAST_SIZE = 64
# Distance from the next match, in fine cells, up to which a warp follows matches.
_FOLLOWED_CELLS = 2
# Maximum number of stored collections.
_COLLECTIONS = 64
# Width and height of the warm-up image.
_WARM_UP = (320, 240)


@dataclass(kw_only=True, eq=False)
class PairWork:
    """Two images to match, and their matches once they are found."""

    images: tuple[Upload, Upload]
    settings: "MatchOptions"
    found: Matches | None = None
    # Largest foreshortening to search; the matcher's own if not set.
    max_tilt: float | Unset = UNSET


class Service:
    """Matcher with its images, results and caches; the matcher is called on the worker thread only."""

    def __init__(self, matcher: Matcher, folder: Path, config: ServerConfig, *, batches: bool | None = None) -> None:
        """Batch waiting pairs if `batches`; by default on a GPU only, since batches gain nothing on a CPU."""
        self.matcher, self.config = matcher, config
        self.images = ImageStore(folder, config)
        self.pairs: Cache[str, Pair] = Cache(config.result_bytes, lambda pair: pair.bytes, keep_s=config.keep_s, keep=1)
        self.collections: Cache[str, Collection] = Cache(
            _COLLECTIONS, lambda _: 1, keep_s=config.keep_s + config.collection_s
        )
        self.features: Cache[tuple[str, int | None], ImageFeatures] = Cache(
            config.feature_bytes, lambda features: features.bytes
        )
        self.warps: Cache[tuple[str, str, Size, float, float, str], bytes] = Cache(config.result_bytes // 4, len)
        self.images.removed = lambda number: self.features.discard(lambda key: key[0] == number)
        batches = matcher.device.type == "cuda" if batches is None else batches
        self.jobs = JobQueue(config, together=self._match_together if batches else None)

    def sweep(self) -> None:
        """Remove expired data."""
        self.images.expire()
        self.pairs.expire()
        self.features.discard(lambda key: key[0] not in self.images)

    def warm_up(self) -> None:
        """Match a noise image once, so that one-time initialization does not delay the first request."""
        noise = np.random.default_rng(0).integers(0, 255, (*_WARM_UP[::-1], 3), dtype=np.uint8)
        features = self.matcher.features(noise)
        self.matcher.match_features(features, features)

    def prefetch(self, upload: Upload) -> None:
        """Extract the features of a new image while the worker is idle, since it will be matched soon."""

        def run() -> None:
            # The client receives errors of the image when it matches it.
            with suppress(DualRCError):
                if upload.id in self.images:
                    self.extract(upload, self.matcher.config.size)

        self.jobs.when_idle(run)

    def extract(self, upload: Upload, size: int | None) -> ImageFeatures:
        """Return the features of an image; call this on the worker thread."""
        key = (upload.id, size)
        found = self.features.make(key, lambda: self.matcher.features(self.images.pixels(upload), size=size))
        if upload.id not in self.images:
            # The image was deleted in the meantime.
            self.features.discard(lambda kept: kept == key)
        return found

    def match(self, client: str, images: tuple[Upload, Upload], settings: "MatchOptions") -> Job:
        """Queue a match of two images; the result is {"pair": id}."""
        pair = PairWork(images=images, settings=settings)
        standard = settings.quality == "standard" and settings.size is None
        sizes = tuple(image.size for image in images)
        # A batch computes no covariances.
        key = (settings.top, settings.min_score, sizes) if standard and not settings.covariance else None
        return self._submit(client, images, self._match(pair), batch_key=key, pair=pair)

    def match_points(
        self, client: str, images: tuple[Upload, Upload], points: npt.NDArray[np.float32], min_score: float
    ) -> Job:
        """Queue the search for given points; the result contains `matches`, one row for each point."""

        def work() -> Work:
            yield Progress(stage="features", fraction=0.1)
            features = self._both(images, self.matcher.config.size)
            yield Progress(stage="matching", fraction=0.6)
            return {"matches": self.matcher.match_points(*features, points, min_score=min_score)}

        return self._submit(client, images, work(), listed=False)

    def warp(
        self,
        client: str,
        images: tuple[Upload, Upload],
        grid: Size,
        *,
        pair: Pair | None = None,
        min_score: float = 0.0,
    ) -> Job:
        """Queue a dense warp at the centers of `grid` cells; the result contains its `bytes` (see `pack_warp`).

        With `pair`, the result of these images in either order, the warp uses its scale and its views.
        """
        zoom, views, views_of = 1.0, None, ""
        if pair is not None:
            matches = pair.matches if images[0].id == pair.images[0].id else pair.matches.swapped()
            zoom = float(matches.info.get("zoom") or 1.0)
            if "tilted" in matches.info or pair.settings.quality != "standard":
                views, views_of = matches, pair.id
        key = (images[0].id, images[1].id, grid, zoom, min_score, views_of)

        def work() -> Work:
            if (kept := self.warps.get(key)) is not None:
                return {"bytes": kept}
            yield Progress(stage="features", fraction=0.1)
            features = self._leveled(images, zoom)
            yield Progress(stage="warp", fraction=0.6)
            # Treat image 0 as an image of the size of the grid that has the same network input.
            scale = Scale(image_size=grid, input_size=features[0].scale.input_size)
            found = self.matcher.warp(replace(features[0], scale=scale), features[1], min_score=min_score)
            if views is not None:
                found = _followed(found, views)
            packed = pack_warp(found, images[0].size)
            self.warps.put(key, packed)
            return {"bytes": packed}

        return self._submit(client, images, work(), listed=False)

    def collect(self, client: str, collection: Collection) -> Job:
        """Queue all pairs of a collection, which receives the result of each pair when it is matched."""
        from dualrc.web.schemas import MatchOptions

        images, numbers = collection.images, list(combinations(range(len(collection.images)), 2))
        settings = MatchOptions(top=1000)

        def work() -> Work:
            for done, (i, j) in enumerate(numbers):
                counts = {"done": done, "total": len(numbers)}
                yield Progress(stage="matching", fraction=done / len(numbers), extra=counts)
                # Most pairs have nothing in common, and a search over tilted views would find that again.
                pair = self._matched(PairWork(images=(images[i], images[j]), settings=settings, max_tilt=1))
                collection.results[i, j] = pair.matches.pair_score, pair.id
            return {"collection": collection.id}

        job = self._submit(client, images, work(), long=True, limit_s=self.config.collection_s)
        self.collections.put(collection.id, collection)
        return job

    def estimate(
        self, pair: Pair, kind: EstimateKind, threshold_px: float, *, min_score: float = 0.0, top: int | None = None
    ) -> Estimate:
        """Fit a model to the matches of a pair that reach `min_score` and belong to the best `top`."""
        chosen = np.flatnonzero(pair.matches.scores >= min_score)
        chosen = chosen[np.argsort(-pair.matches.scores[chosen], kind="stable")][:top]
        cameras: dict[str, Any] = {}
        if kind == "essential":
            cameras = {f"camera{n}": geometry.camera_from_exif(image.path) for n, image in enumerate(pair.images)}
        model = geometry.estimate(pair.matches[chosen], kind, threshold_px=threshold_px, **cameras)
        inliers = np.zeros(len(pair.matches), dtype=np.bool_)
        inliers[chosen] = model.inliers
        return replace(model, inliers=inliers)

    def _submit(self, client: str, images: tuple[Upload, ...], work: Work, **options: Any) -> Job:
        hold = ExitStack()
        hold.enter_context(self.images.hold(*images))
        limit_s = options.pop("limit_s", self.config.limit_s)
        job = Job(work=work, client=client, limit_s=limit_s, release=hold.close, **options)
        try:
            return self.jobs.submit(job)
        except BaseException:
            job.release()
            raise

    def _match(self, work: PairWork) -> Work:
        if work.found is None:
            yield Progress(stage="features", fraction=0.05)
            if work.settings.quality == "standard":
                self.extract(work.images[0], self._size(work.settings))
                yield Progress(stage="features", fraction=0.3)
                self.extract(work.images[1], self._size(work.settings))
        yield Progress(stage="matching", fraction=0.5)
        pair = self._matched(work)
        if work.settings.estimate is not None:
            yield Progress(stage="estimating", fraction=0.9)
            model = self.estimate(pair, work.settings.estimate, work.settings.threshold_px)
            pair.matches = pair.matches.with_estimate(model)
        return {"pair": pair.id}

    def _matched(self, work: PairWork) -> Pair:
        """Match two images and store the result."""
        settings, start = work.settings, time.perf_counter()
        found = work.found
        if found is None:
            options: dict[str, Any] = {name: getattr(settings, name) for name in ("top", "min_score", "covariance")}
            if settings.quality == "standard":
                features = self._both(work.images, self._size(settings))
                found = self.matcher.match_features(*features, max_tilt=work.max_tilt, **options)
            else:
                pixels = [self.images.pixels(image) for image in work.images]
                found = self.matcher.match(*pixels, size=self._size(settings), quality=settings.quality, **options)
        pair = Pair(
            images=work.images,
            matches=_with_score(found),
            settings=settings,
            seconds=time.perf_counter() - start,
            device=str(self.matcher.device),
        )
        self.pairs.put(pair.id, pair)
        return pair

    def _match_together(self, works: Sequence[PairWork]) -> list[Matches]:
        """Match pairs with the same settings and sizes in one batch."""
        settings = works[0].settings
        pairs = [self._both(work.images, self._size(settings)) for work in works]
        return list(self.matcher.match_many(pairs, top=settings.top, min_score=settings.min_score))

    def _size(self, settings: "MatchOptions") -> int | None:
        return self.matcher.config.size if settings.size is None else settings.size

    def _both(self, images: tuple[Upload, Upload], size: int | None) -> tuple[ImageFeatures, ImageFeatures]:
        return self.extract(images[0], size), self.extract(images[1], size)

    def _leveled(self, images: tuple[Upload, Upload], zoom: float) -> tuple[ImageFeatures, ImageFeatures]:
        """Return features at equal scale; objects are `zoom` times larger in image 1 than in image 0."""
        features = list(self._both(images, self.matcher.config.size))
        if zoom != 1:
            larger = int(zoom > 1)
            size = int(max(features[larger].scale.input_size) / max(zoom, 1 / zoom)) // STRIDE * STRIDE
            if size >= _LEAST_SIZE:
                features[larger] = self.extract(images[larger], size)
        return features[0], features[1]


def _followed(warp: Warp, matches: Matches) -> Warp:
    """Return a warp of a grid over image 0 that follows the matches of other views where these are more certain."""
    rows, columns = warp.certainty.shape
    places = resize_points(pixel_grid((columns, rows)).astype(np.float64), (columns, rows), matches.size0)
    moved = follow(matches, places.reshape(-1, 2), cells=_FOLLOWED_CELLS)
    scores = moved.scores.reshape(rows, columns)
    better = scores > warp.certainty
    points1 = np.where(better[..., None], moved.points1.reshape(rows, columns, 2), warp.points1)
    certainty = np.where(better, scores, warp.certainty)
    return replace(warp, points1=points1.astype(np.float32), certainty=certainty.astype(np.float32))


def _with_score(matches: Matches) -> Matches:
    """Return the matches without the full set that they were selected from; info keeps the pair score of that set.

    Arrays are copied: a selection is a view, which would keep the full set in memory.
    """
    names = ("points0", "points1", "scores", "covariance")
    arrays = {name: array.copy() for name in names if (array := getattr(matches, name)) is not None}
    return replace(matches, info=matches.stored_info(), whole=None, **arrays)
