"""The matcher: images in, `Matches` in their original pixels out."""

import copy
import itertools
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualrc import agreement
from dualrc.calibration import Calibration
from dualrc.config import MatcherConfig, Quality
from dualrc.errors import ConfigError, DataError
from dualrc.evidence import LOOKED_AT
from dualrc.image import ImageInput, Scale, mask_to_cells, network_size, read
from dualrc.matcher import interrupt
from dualrc.matcher.budget import Budget, NoMemoryError, enough_memory, release_memory
from dualrc.matcher.dense import match_points, warp
from dualrc.matcher.extract import Extractor, Precision, choose_device, use_threads
from dualrc.matcher.features import FeaturePair, ImageFeatures, Matchable, PendingImage, stack
from dualrc.matcher.many import MOST_PAIRS, ErrorHandling, ManyPairs
from dualrc.matcher.recover import recover, settled
from dualrc.matcher.uncertainty import with_covariance
from dualrc.matches import Matches, Warp
from dualrc.model.backbone import fold_batch_norm
from dualrc.model.network import Network
from dualrc.ops import choose, memory
from dualrc.pixels import FINE_STRIDE
from dualrc.provenance import provenance
from dualrc.types import UNSET, ImageArray, Unset

T = TypeVar("T")
# Shortest useful side of the network input, in pixels. Smaller inputs give few matches.
_USABLE = 64
# Aspect ratio of a strip. The size limits its long side, which leaves few pixels on the short side.
_STRIP = 4
# Long side in pixels up to which the higher qualities enlarge images, and the largest factor.
_DETAILED, _LARGER = 1024, 3


class Matcher:
    """Finds correspondences between images; `dualrc.load` creates one.

    Images are paths, PIL images, arrays, tensors, or the result of `features`. `device`, `precision` and `engine` are
    those in use.
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

    def pair_info(self, features0: ImageFeatures, features1: ImageFeatures) -> dict[str, Any]:
        """Return the info of a pair: that of the matcher, and the sizes of the network input."""
        sizes = {"network_size0": features0.scale.input_size, "network_size1": features1.scale.input_size}
        return {**self._info, **sizes}

    @torch.inference_mode()
    def features(
        self, image: ImageInput, *, mask: npt.ArrayLike | None = None, size: int | Unset | None = UNSET
    ) -> ImageFeatures:
        """Extract the features of one image; `mask` (height, width) selects the region to match."""
        item = self.pending(read(image), size)
        return self._in_memory([item], lambda features: self.masked(features, mask))

    def pending(self, image: Matchable, size: int | Unset | None) -> PendingImage:
        """Return an image that waits for its features, with the size of its network input."""
        # Features have a fixed size already.
        if isinstance(image, ImageFeatures):
            return PendingImage(scale=image.scale, features=image)
        pixels = read(image)
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
        interrupt.step()

        def together(scale: Scale) -> int:
            if self.device.type == "cuda":
                return min(MOST_PAIRS, self.budget.together((scale, scale)))
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
        errors: ErrorHandling = "raise",
    ) -> Iterator[Matches]:
        """Match pairs in order; an image that occurs in several pairs is usually read only once.

        With `errors="empty"`, a pair with an unusable image gives no matches, and `info["error"]` has the reason.
        """
        if errors not in get_args(ErrorHandling):
            raise ConfigError(f"Unknown value errors = {errors!r}; choose raise or empty.")
        settings = self._settings(top=top, min_score=min_score, quality=quality)
        yield from ManyPairs(matcher=self, settings=settings, size=size, errors=errors).match(pairs)

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
        least = self._settings(min_score=min_score).min_score
        find = partial(match_points, self, points=points, min_score=least)
        return self._with_pair(find, image0, image1, mask0, mask1, (size, size))

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
        locate = partial(warp, self, min_score=self._settings(min_score=min_score).min_score)
        return self._with_pair(locate, image0, image1, mask0, mask1, (size, size))

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
        items = [self.pending(image0, sizes[0]), self.pending(image1, sizes[1])]

        def with_masks(features0: ImageFeatures, features1: ImageFeatures) -> T:
            pair = self.masked(features0, mask0), self.masked(features1, mask1)
            self._check_features(pair)
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

    def _check_features(self, pair: FeaturePair) -> None:
        if any(features.made_by != self._extractor.made_by for features in pair):
            raise ConfigError("These features come from other weights; extract them with features() of this matcher.")
        for device in (features.maps.coarse.device for features in pair):
            # Kernels would read addresses of another device. A matcher on "cuda" has no index.
            if device.type != self.device.type or self.device.index not in (None, device.index):
                remedy = "extract them with features() of this matcher"
                raise ConfigError(f"These features are on {device}, and the matcher on {self.device}; {remedy}.")

    @contextmanager
    def working(self, features0: ImageFeatures, features1: ImageFeatures, count: int = 1) -> Iterator[None]:
        """Limit the workspace of the network to the memory that `count` such pairs leave."""
        limit = self.budget.working((features0.scale, features1.scale), count)
        with enough_memory(), memory.working_memory(limit), use_threads(self.threads):
            yield

    def _settings(self, **changes: Any) -> MatcherConfig:
        """Return the config with the options of a call, validated."""
        given = {name: value for name, value in changes.items() if value is not UNSET}
        return replace(self.config, **given) if given else self.config

    def match_uncalibrated(
        self, batch: list[FeaturePair], settings: MatcherConfig, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[Matches]:
        """Match pairs of the same shapes as one batch; pairs without agreement are matched again through other views.

        Scores are raw network scores. The result has the best `top` matches, and often more. `meanwhile` is called
        while a GPU computes.
        """
        for pair in batch:
            self._check_features(pair)
        top = settings.top
        if top is not None:
            # The votes on the scale and on the pair need the best matches, whatever the caller asked for.
            votes = agreement.TOP if settings.max_zoom > 1 else 0
            top = max(top, votes, LOOKED_AT if self.calibration is not None else 0)
        for matches, pair in zip(self.match_plain(batch, top, meanwhile), batch, strict=True):
            with use_threads(self.threads):
                found = recover(self, matches, pair, settings)
            yield found

    @torch.inference_mode()
    def match_plain(
        self, batch: list[FeaturePair], top: int | None = None, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[Matches]:
        """Match pairs of the same shapes as one batch, once, with raw network scores; the best `top` of each."""
        if not batch:
            return
        interrupt.step()
        sides = [stack([pair[side].maps for pair in batch]) for side in (0, 1)]
        # Masks may reject matches after the refinement, so the best are selected later.
        masked = any(features.mask is not None for pair in batch for features in pair)
        with self.working(*batch[0], count=len(batch)):
            found = self.network.match(sides[0], sides[1], top=None if masked else top)
        if meanwhile is not None:
            meanwhile()
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
            info = {**matches.info, "pair_model": asdict(self.calibration.pairs)}
            matches = settled(replace(matches, scores=self.calibration.matches(matches.scores), info=info))
        if settings.min_score > 0:
            matches = matches.above(settings.min_score)
        return matches if settings.top is None or settings.top >= len(matches) else matches[: settings.top]

    def _to_matches(
        self, columns: npt.NDArray[np.float32], features0: ImageFeatures, features1: ImageFeatures
    ) -> Matches:
        return Matches(
            points0=features0.scale.to_image(columns[:, :2]),
            points1=features1.scale.to_image(columns[:, 2:4]),
            scores=columns[:, 4],
            size0=features0.size,
            size1=features1.size,
            info=self.pair_info(features0, features1),
        )
