"""The matcher: images in, `Matches` in their original pixels out."""

import copy
import itertools
import math
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualrc import agreement
from dualrc.calibration import Calibration
from dualrc.config import MatcherConfig, Quality
from dualrc.errors import ConfigError, DataError, ImageError
from dualrc.evidence import LOOKED_AT
from dualrc.image import ImageInput, Scale, mask_to_cells, network_size, read, spread
from dualrc.matcher.budget import Budget, NoMemoryError, enough_memory, release_memory
from dualrc.matcher.extract import Extractor, Precision, choose_device, use_threads
from dualrc.matcher.features import FeatureCache, FeaturePair, ImageFeatures, Matchable, PendingImage, shapes, stack
from dualrc.matcher.prefetch import ReadAhead, look_ahead
from dualrc.matcher.recover import recover, settled
from dualrc.matcher.uncertainty import with_covariance
from dualrc.matches import Matches, Warp, inside_mask
from dualrc.model.backbone import fold_batch_norm
from dualrc.model.network import Network
from dualrc.ops import choose, memory
from dualrc.pixels import FINE_STRIDE, STRIDE, pixel_grid
from dualrc.provenance import provenance
from dualrc.types import UNSET, FloatArray, ImageArray, Size, Unset

T = TypeVar("T")
# Shortest useful side of the network input, in pixels. Smaller inputs give few matches.
_USABLE = 64
# Aspect ratio of a strip. The size limits its long side, which leaves few pixels on the short side.
_STRIP = 4
# Largest batch on a GPU, in pairs and in entries of the coarse tensor. On a CPU, one pair at a time is as fast.
_BATCH, _ENTRIES = 32, 50_000_000
# Largest number of image pixels that wait for a batch.
_PIXELS = 100_000_000
# With a GPU: threads that read images in advance, and number of pairs that they read ahead.
_READERS, _AHEAD = 4, 8
# Long side in pixels up to which the higher qualities enlarge images, and the largest factor.
_DETAILED, _LARGER = 1024, 3


class Matcher:
    """Finds correspondences between images; `dualrc.load` creates one.

    Images are paths, PIL images, arrays, tensors, or the result of `features`.
    """

    def __init__(
        self,
        network: Network,
        config: MatcherConfig,
        *,
        device: str | torch.device | None = None,
        precision: Precision | None = None,
        engine: str | None = None,
        threads: int | None = None,
        weights_hash: str | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """Create a matcher with a copy of the network; `engine` is one of `dualrc.ops`, None for the best one.

        Without a calibration, scores are raw network scores. They rank matches and are not probabilities. `threads`
        limits the CPU threads of each call; None keeps the setting of torch.
        """
        if threads is not None and not (isinstance(threads, int) and threads >= 1):
            raise ConfigError(f"threads = {threads!r} must be a whole number of at least 1; omit it to use all cores.")
        self.config, self.weights_hash, self.calibration = config, weights_hash, calibration
        self.threads = threads
        self.network = copy.deepcopy(network).eval()
        fold_batch_norm(self.network)
        chosen = choose_device(device)
        self.network.engine = choose(chosen, engine)
        self.engine = self.network.engine.name
        made_by = weights_hash or f"network {uuid.uuid4().hex}"
        self._extractor = Extractor(self.network, chosen, precision, made_by=made_by)
        self.device, self.precision = self._extractor.device, self._extractor.precision
        self.dtype = self._extractor.dtype
        kept = self.dtype if self.device.type == "cuda" else torch.float32
        self.budget = Budget(network.config, self.device, kept, config.max_memory, engine=self.engine)
        self._info = {"weights": weights_hash} | provenance(
            device=self.device,
            network=network.config,
            matcher=config,
            precision=self.precision,
            engine=self.engine,
        )
        self._info["calibration"] = None if calibration is None else calibration.hash

    def __repr__(self) -> str:
        return f"Matcher({self.network.config.preset!r} on {self.device}, {self.precision}, {self.engine})"

    @property
    def info(self) -> dict[str, Any]:
        """Versions, configs, device and weights, as stored with every result."""
        return dict(self._info)

    @torch.inference_mode()
    def features(
        self, image: ImageInput, *, mask: npt.ArrayLike | None = None, size: int | Unset | None = UNSET
    ) -> ImageFeatures:
        """Extract the features of one image; `mask` (height, width) selects the region to match."""
        item = self._item(read(image), size)
        return self._in_memory([item], lambda features: self.masked(features, mask))

    def _item(self, pixels: npt.NDArray[np.uint8], size: int | Unset | None) -> PendingImage:
        own = (pixels.shape[1], pixels.shape[0])
        settings = self._settings(size=size)
        network = network_size(own, long_side=settings.size, max_size=settings.max_size)
        if min(network) < _USABLE and min(own) >= 2 * min(network) and max(own) >= _STRIP * min(own):
            warnings.warn(
                "An image of {}x{} pixels is resized to {}x{}, where few matches can be found; give a larger size, or "
                "split the image.".format(*own, *network),
                stacklevel=2,
            )
        return PendingImage(scale=Scale(image_size=own, input_size=network), pixels=pixels)

    def extract(self, items: Iterable[PendingImage]) -> None:
        """Extract the features of those items that have none yet."""

        def together(scale: Scale) -> int:
            if self.device.type == "cuda":
                return min(_BATCH, self.budget.together((scale, scale)))
            return 2 if self.device.type == "cpu" and self.budget.side_by_side((scale, scale)) else 1

        with use_threads(self.threads):
            self._extractor(items, together)

    def match(
        self,
        image0: Matchable,
        image1: Matchable,
        *,
        mask0: npt.ArrayLike | None = None,
        mask1: npt.ArrayLike | None = None,
        size: int | Unset | None = UNSET,
        top: int | Unset | None = UNSET,
        min_score: float | Unset = UNSET,
        quality: Quality | Unset = UNSET,
        covariance: bool = False,
    ) -> Matches:
        """Match two images, best matches first; the higher qualities need images, not features.

        `covariance` also computes the uncertainty of each point of image 1.
        """
        settings = self._settings(top=top, min_score=min_score, quality=quality)
        if settings.quality == "standard":
            match = partial(self.match_features, top=top, min_score=min_score, covariance=covariance)
            return self._with_pair(match, image0, image1, mask0, mask1, (size, size))
        # This imports the estimators, which no other call needs.
        from dualrc.matcher.rematch import match_again

        if isinstance(image0, ImageFeatures) or isinstance(image1, ImageFeatures):
            message = f'quality = "{settings.quality}" warps the images; pass images instead of features.'
            raise ConfigError(message)
        images = read(image0), read(image1)
        again = partial(match_again, self, images, rotated_views=settings.quality == "search")
        sizes = self._detailed(images[0], size), self._detailed(images[1], size)

        def found(features0: ImageFeatures, features1: ImageFeatures) -> Matches:
            matches = self.selected(again(features0, features1), settings)
            return self.with_covariance(matches, features0, features1) if covariance else matches

        return self._with_pair(found, *images, mask0, mask1, sizes)

    def _detailed(self, image: ImageArray, size: int | Unset | None) -> int | Unset | None:
        """Return the size at which the higher qualities see an image: they enlarge small ones, up to a factor."""
        settings, longest = self._settings(size=size), max(image.shape[:2])
        wanted = min(_DETAILED, settings.max_size, _LARGER * longest)
        return wanted if settings.size is None and longest < wanted else size

    def match_features(
        self,
        features0: ImageFeatures,
        features1: ImageFeatures,
        *,
        mask0: npt.ArrayLike | None = None,
        mask1: npt.ArrayLike | None = None,
        top: int | Unset | None = UNSET,
        min_score: float | Unset = UNSET,
        max_tilt: float | Unset = UNSET,
        covariance: bool = False,
    ) -> Matches:
        """Match two images by features extracted before, always in standard quality.

        `max_tilt=1` skips the search over tilted views, which takes most of the time of unrelated images.
        """
        pair = (self.masked(features0, mask0), self.masked(features1, mask1))
        settings = self._settings(top=top, min_score=min_score, max_tilt=max_tilt)
        matches = self.selected(next(self.match_uncalibrated([pair], settings)), settings)
        return self.with_covariance(matches, *pair) if covariance else matches

    def with_covariance(self, matches: Matches, features0: ImageFeatures, features1: ImageFeatures) -> Matches:
        """Return the matches of two images with the covariance of each point of image 1, in its original pixels.

        The local motion is estimated from the matches, so pass all of them rather than a few.
        """
        with enough_memory(), use_threads(self.threads):
            return with_covariance(matches, features0, features1, self.device)

    def match_many(
        self,
        pairs: Iterable[tuple[Matchable, Matchable]],
        *,
        size: int | Unset | None = UNSET,
        top: int | Unset | None = UNSET,
        min_score: float | Unset = UNSET,
        quality: Quality | Unset = UNSET,
        errors: Literal["raise", "empty"] = "raise",
    ) -> Iterator[Matches]:
        """Match pairs in order; an image that occurs in several pairs is usually read only once.

        With errors="empty", a pair with an unusable image gives no matches, and info["error"] has the reason.
        """
        if errors not in ("raise", "empty"):
            raise ConfigError(f"Unknown value errors = {errors!r}; choose raise or empty.")
        settings = self._settings(top=top, min_score=min_score, quality=quality)
        alone = partial(self._match_alone, size=size, settings=settings, errors=errors)
        if settings.quality != "standard":
            for pair in pairs:
                yield alone(pair)
            return
        ahead = self._pairs_ahead
        with ReadAhead(_READERS) as reader:
            cache = FeatureCache(lambda pixels: self._item(pixels, size), reader)
            batch: list[tuple[tuple[Matchable, Matchable], tuple[PendingImage, PendingImage]]] = []
            for pair, coming in look_ahead(pairs, ahead):
                for image in itertools.chain.from_iterable(coming if ahead else ()):
                    cache.ask(image)
                try:
                    items = (cache.get(pair[0]), cache.get(pair[1]))
                    cache.shrink(self.budget.spare((items[0].scale, items[1].scale)))
                    fits = self.budget.fits((items[0].scale, items[1].scale))
                except ImageError as error:
                    # Results of earlier pairs are not lost.
                    yield from self._match_items(batch, settings, alone)
                    batch = []
                    if errors == "raise":
                        raise
                    yield self._nothing(error)
                    continue
                if batch and (not fits or shapes(items) != shapes(batch[0][1])):
                    yield from self._match_items(batch, settings, alone)
                    batch = []
                if not fits:
                    yield alone(pair)
                    continue
                batch.append((pair, items))
                if len(batch) >= self._batch_size(items):
                    yield from self._match_items(batch, settings, alone)
                    batch = []
            yield from self._match_items(batch, settings, alone)

    def _match_items(
        self,
        batch: list[tuple[tuple[Matchable, Matchable], tuple[PendingImage, PendingImage]]],
        settings: MatcherConfig,
        alone: Callable[[tuple[Matchable, Matchable]], Matches],
    ) -> Iterator[Matches]:
        """Match pairs as one batch, or one by one if there is not enough memory."""
        found: list[Matches] = []
        with suppress(NoMemoryError):
            self.extract(item for _, items in batch for item in items)
            pairs = [(one.known(), other.known()) for _, (one, other) in batch]
            found = [self.selected(matches, settings) for matches in self.match_uncalibrated(pairs, settings)]
        if batch and not found:
            release_memory()
        yield from found or (alone(pair) for pair, _ in batch)

    def _match_alone(
        self,
        pair: tuple[Matchable, Matchable],
        *,
        size: int | Unset | None,
        settings: MatcherConfig,
        errors: Literal["raise", "empty"],
    ) -> Matches:
        """Match one pair alone, at a smaller size if necessary."""
        options: dict[str, Any] = {"top": settings.top, "min_score": settings.min_score, "quality": settings.quality}
        try:
            return self.match(*pair, size=size, **options)
        except ImageError as error:
            if errors == "raise":
                raise
            return self._nothing(error)

    def _nothing(self, error: ImageError) -> Matches:
        return Matches.none({**self.info, "error": str(error)})

    @torch.inference_mode()
    def match_points(
        self,
        image0: Matchable,
        image1: Matchable,
        points0: npt.ArrayLike,
        *,
        mask0: npt.ArrayLike | None = None,
        mask1: npt.ArrayLike | None = None,
        size: int | Unset | None = UNSET,
        min_score: float | Unset = UNSET,
    ) -> Matches:
        """Locate points of image 0 in image 1: one row per point, in order.

        A point gets NaN and score 0 if it has no counterpart with at least `min_score`, or lies outside the image or
        its mask.
        """
        points = np.asarray(points0, dtype=np.float32)
        points = points.reshape(0, 2) if points.size == 0 else points
        if points.ndim != 2 or points.shape[1] != 2:
            raise DataError(f"Points must have shape (n, 2), one (x, y) per row, not {points.shape}.")
        find = partial(self._match_points, points=points, min_score=min_score)
        return self._with_pair(find, image0, image1, mask0, mask1, (size, size))

    def _match_points(
        self, features0: ImageFeatures, features1: ImageFeatures, points: FloatArray, min_score: float | Unset
    ) -> Matches:
        where = np.ones((features0.size[1], features0.size[0]), bool) if features0.mask is None else features0.mask
        asked = inside_mask(points, where)
        result, scores = np.full_like(points, np.nan), np.zeros(len(points), np.float32)
        if asked.any():
            inputs = torch.from_numpy(features0.scale.to_network(points[asked]).astype(np.float32)).to(self.device)
            with self._working(features0, features1):
                there, score = self.network.match_points(features0.maps, features1.maps, inputs)
            result[asked] = features1.scale.to_image(there.cpu().numpy())
            scores[asked] = self._calibrated(score.cpu().numpy())
            if features1.mask is not None:
                scores[~inside_mask(result, features1.mask)] = 0
            scores[scores < self._settings(min_score=min_score).min_score] = 0
            result[scores == 0] = np.nan
        return Matches(
            points0=points,
            points1=result,
            scores=scores,
            size0=features0.size,
            size1=features1.size,
            info={**self._info, **_seen(features0, features1)},
        )

    @torch.inference_mode()
    def warp(
        self,
        image0: Matchable,
        image1: Matchable,
        *,
        mask0: npt.ArrayLike | None = None,
        mask1: npt.ArrayLike | None = None,
        size: int | Unset | None = UNSET,
        min_score: float | Unset = UNSET,
    ) -> Warp:
        """Locate every pixel of image 0 in image 1, with a certainty from 0 to 1 on the scale of the scores.

        A pixel gets NaN and certainty 0 if it has no counterpart with at least `min_score`, or lies outside the mask.
        """
        warp = partial(self._warp, min_score=min_score)
        return self._with_pair(warp, image0, image1, mask0, mask1, (size, size))

    def _warp(self, features0: ImageFeatures, features1: ImageFeatures, min_score: float | Unset) -> Warp:
        with self._working(features0, features1):
            points, certainty = self.network.warp(features0.maps, features1.maps)
        known = torch.from_numpy(self._calibrated(certainty.cpu().numpy()))
        places, sure = spread(points.cpu(), known, features0.scale, FINE_STRIDE)
        dense = features1.scale.to_image(places.reshape(-1, 2)).reshape(places.shape)
        width, height = features1.size
        sure = sure * ((dense > -0.5) & (dense < (width - 0.5, height - 0.5))).all(2)
        for features, points_there in ((features0, pixel_grid(features0.size)), (features1, dense)):
            if features.mask is not None:
                sure = sure * inside_mask(points_there.reshape(-1, 2), features.mask).reshape(sure.shape)
        sure = np.where(sure < self._settings(min_score=min_score).min_score, 0, sure).astype(np.float32)
        dense = np.where(sure[:, :, None] > 0, dense, np.nan).astype(np.float32)
        return Warp(points1=dense, certainty=sure, size1=features1.size)

    @property
    def _pairs_ahead(self) -> int:
        return _AHEAD if self.device.type == "cuda" else 0

    def _batch_size(self, pair: tuple[PendingImage, PendingImage]) -> int:
        """Return the batch size for pairs like this one."""
        if self.device.type != "cuda":
            return 1
        cells = [math.prod(side // STRIDE for side in item.scale.input_size) for item in pair]
        pixels = sum(math.prod(item.scale.image_size) for item in pair)
        most = self.budget.together((pair[0].scale, pair[1].scale))
        return max(1, min(_BATCH, most, _ENTRIES // math.prod(cells), _PIXELS // pixels))

    def _with_pair(
        self,
        use: Callable[[ImageFeatures, ImageFeatures], T],
        image0: Matchable,
        image1: Matchable,
        mask0: npt.ArrayLike | None,
        mask1: npt.ArrayLike | None,
        sizes: tuple[int | Unset | None, int | Unset | None],
    ) -> T:
        """Call `use` with the features of two images, at the largest sizes that fit into memory."""
        items = [
            # Features have a fixed size already.
            PendingImage(scale=image.scale, features=image)
            if isinstance(image, ImageFeatures)
            else self._item(read(image), size)
            for image, size in zip((image0, image1), sizes, strict=True)
        ]

        def with_masks(features0: ImageFeatures, features1: ImageFeatures) -> T:
            pair = self.masked(features0, mask0), self.masked(features1, mask1)
            self._check_makers(pair)
            return use(*pair)

        return self._in_memory(items, with_masks)

    def _in_memory(self, items: list[PendingImage], use: Callable[..., T]) -> T:
        """Call `use` with the features of one or two items; the budget treats a single item as a pair with itself."""
        wanted = items[0].scale, items[-1].scale
        fixed = items[0].features is not None, items[-1].features is not None
        for sizes in self.budget.sizes(wanted, fixed):
            tried = [replace(item, scale=scale) for item, scale in zip(items, sizes, strict=False)]
            with suppress(NoMemoryError), use_threads(self.threads):
                self.extract(tried)
                result = use(*(item.known() for item in tried))
                self.budget.warn(wanted, sizes)
                return result
            release_memory()
        raise NoMemoryError

    def masked(self, features: ImageFeatures, mask: npt.ArrayLike | None) -> ImageFeatures:
        """Restrict features to a mask (height, width) of the image; None keeps them unchanged."""
        if mask is None:
            return features
        array = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask) != 0
        cells = mask_to_cells(array, features.scale.image_size, features.scale.input_size, FINE_STRIDE)
        valid = torch.from_numpy(cells)[None].to(self.device)
        return replace(features, maps=replace(features.maps, valid=valid), mask=array)

    def _check_makers(self, pair: FeaturePair) -> None:
        if any(features.made_by != self._extractor.made_by for features in pair):
            raise ConfigError("These features come from other weights; extract them with features() of this matcher.")

    @contextmanager
    def _working(self, features0: ImageFeatures, features1: ImageFeatures, count: int = 1) -> Iterator[None]:
        """Limit the workspace of the network to the memory that `count` such pairs leave."""
        limit = self.budget.working((features0.scale, features1.scale), count)
        with enough_memory(), memory.working_memory(limit), use_threads(self.threads):
            yield

    def _settings(self, **changes: Any) -> MatcherConfig:
        """Return the config with the options of a call, validated."""
        return replace(self.config, **{name: value for name, value in changes.items() if value is not UNSET})

    def match_uncalibrated(self, batch: list[FeaturePair], settings: MatcherConfig) -> Iterator[Matches]:
        """Match pairs of the same shapes as one batch; pairs without agreement are matched again through other views.

        Scores are raw network scores. The result has the best `top` matches, and often more.
        """
        for pair in batch:
            self._check_makers(pair)
        top = settings.top
        if top is not None:
            # The votes on the scale and on the pair need the best matches, whatever the caller asked for.
            votes = agreement.TOP if settings.max_zoom > 1 else 0
            top = max(top, votes, LOOKED_AT if self.calibration is not None else 0)
        for matches, pair in zip(self.match_plain(batch, top=top), batch, strict=True):
            with use_threads(self.threads):
                found = recover(self, matches, pair, settings)
            yield found

    @torch.inference_mode()
    def match_plain(self, batch: list[FeaturePair], top: int | None = None) -> Iterator[Matches]:
        """Match pairs of the same shapes as one batch, once, with raw network scores; the best `top` of each."""
        if not batch:
            return
        sides = [stack([pair[side].maps for pair in batch]) for side in (0, 1)]
        # Masks may reject matches after the refinement, so the best are selected later.
        masked = any(features.mask is not None for pair in batch for features in pair)
        with self._working(*batch[0], count=len(batch)):
            found = self.network.match(sides[0], sides[1], top=None if masked else top)
        # One transfer to the host for all results.
        columns = torch.cat([found.points0, found.points1, found.scores[:, None]], dim=1).cpu().numpy()
        counts = found.pair.bincount(minlength=len(batch)).tolist() if len(batch) > 1 else [len(columns)]
        ends = list(itertools.accumulate(counts))
        for start, end, pair in zip([0, *ends], ends, batch, strict=False):
            matches = self._to_matches(columns[start:end], *pair)
            # Matches outside the masks must not influence the pair score.
            if masked:
                matches = replace(matches.inside(pair[0].mask, pair[1].mask), whole=None)
            yield matches if top is None or top >= len(matches) else matches[:top]

    def selected(self, matches: Matches, settings: MatcherConfig) -> Matches:
        """Select the best matches and convert raw network scores to probabilities."""
        matches = replace(matches, whole=None)
        if self.calibration is not None:
            info = {**matches.info, "pair_model": self.calibration.pair_info()}
            matches = settled(replace(matches, scores=self.calibration.matches(matches.scores), info=info))
        if settings.min_score > 0:
            matches = matches.above(settings.min_score)
        return matches if settings.top is None or settings.top >= len(matches) else matches[: settings.top]

    def _calibrated(self, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Convert scores of requested points to probabilities; 0, for points without a counterpart, stays 0."""
        return scores if self.calibration is None else np.where(scores > 0, self.calibration.points(scores), 0)

    def _to_matches(
        self, columns: npt.NDArray[np.float32], features0: ImageFeatures, features1: ImageFeatures
    ) -> Matches:
        return Matches(
            points0=features0.scale.to_image(columns[:, :2]),
            points1=features1.scale.to_image(columns[:, 2:4]),
            scores=columns[:, 4],
            size0=features0.size,
            size1=features1.size,
            info={**self._info, **_seen(features0, features1)},
        )


def _seen(features0: ImageFeatures, features1: ImageFeatures) -> dict[str, Size]:
    return {"network_size0": features0.scale.input_size, "network_size1": features1.scale.input_size}
