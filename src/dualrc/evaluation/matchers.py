"""Matchers to evaluate: ours with any weights, baselines, stored results, and user functions of two paths."""

import hashlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dualrc.config import Fusion, NetworkConfig, Quality, ResNetConfig
from dualrc.errors import ConfigError, DataError
from dualrc.evaluation.baselines import RootSift
from dualrc.evaluation.stored import Stored
from dualrc.image import read
from dualrc.matcher import ImageFeatures, Matcher, load
from dualrc.matches import Matches
from dualrc.model.checkpoint import file_hash, load_weights, read_config, weights_file

_SIFT_RATIO = 0.8
# Number of images.
_CACHED_FEATURES = 4
# Our matcher in each quality.
_QUALITIES: dict[str, Quality] = {"dualrc": "standard", "dualrc-high": "high", "dualrc-search": "search"}
_KNOWN = f"{', '.join(_QUALITIES)}, FILE.safetensors, sift, sift-mutual, sift-ratio, stored:FOLDER or FILE.py:function"
# Names of presets in tables, where they differ.
_NAMES = {"default": "dualrc", "paper": "dualrc-paper"}


@dataclass(frozen=True, kw_only=True)
class MatcherSettings:
    """Settings of matchers."""

    preset: str = "default"
    weights: Path | None = None
    device: str | None = None
    # Long side of the input of dualrc and SIFT; user functions choose their own.
    size: int | None = None
    # Maximum number of matches per pair, best first.
    top: int = 4000
    # Largest foreshortening that dualrc searches; None for the default.
    max_tilt: float | None = None
    # Maximum number of SIFT features per image.
    sift_features: int = 2000


class PairMatcher(Protocol):
    """Matches two image files; `info` of the matches has `seconds` and the input sizes `seen0`, `seen1`."""

    name: str
    # Everything that the matches depend on, as JSON values.
    config: dict[str, Any]

    def match(self, path0: Path, path1: Path) -> Matches:
        """Return the matches of a pair in original pixels."""


def make_matchers(specs: Sequence[str], settings: MatcherSettings) -> list[PairMatcher]:
    """Make the matchers with these names; "sift" means both of its variants."""
    matchers: list[PairMatcher] = []
    for spec in specs:
        if spec in _QUALITIES:
            matchers.append(DualRC(settings, quality=_QUALITIES[spec]))
        elif spec.endswith(".safetensors"):
            path = Path(spec)
            own = replace(settings, preset=read_config(path).preset, weights=path)
            matchers.append(DualRC(own, name=path.stem))
        elif spec in ("sift", "sift-mutual", "sift-ratio"):
            ratios = {"sift": (_SIFT_RATIO, None), "sift-ratio": (_SIFT_RATIO,), "sift-mutual": (None,)}[spec]
            matchers += [RootSift(features=settings.sift_features, ratio=ratio, size=settings.size) for ratio in ratios]
        elif spec.startswith("stored:"):
            matchers.append(Stored(spec.removeprefix("stored:")))
        elif ":" in spec:
            matchers.append(UserFunction(spec))
        else:
            raise ConfigError(f"There is no matcher {spec!r}; choose {_KNOWN}.")
    names = [matcher.name for matcher in matchers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"The matcher {name} was passed twice; pass each once, and name functions differently.")
    return matchers


class DualRC:
    """Our matcher; it caches features of the last few images, because successive pairs share images."""

    def __init__(
        self,
        settings: MatcherSettings,
        *,
        quality: Quality = "standard",
        name: str | None = None,
    ) -> None:
        chosen: dict[str, Any] = {"top": settings.top, "quality": quality}
        chosen |= {name: value for name in ("size", "max_tilt") if (value := getattr(settings, name)) is not None}
        self._matcher: Matcher = load(settings.preset, weights=settings.weights, device=settings.device, **chosen)
        # A partial, not a method: a bound method in the cache would keep the network in memory.
        self._features = lru_cache(_CACHED_FEATURES)(partial(_timed_features, self._matcher))
        self.name = name or _NAMES.get(settings.preset, settings.preset)
        self.name += "" if quality == "standard" else f"-{quality}"
        self.config: dict[str, Any] = dict(self._matcher.info)

    def match(self, path0: Path, path1: Path) -> Matches:
        """Match two images; the time is that of the pair without cached features."""
        if self._matcher.config.quality != "standard":
            start = time.perf_counter()
            found = self._matcher.match(path0, path1)
            seen = {f"seen{n}": found.info[f"network_size{n}"] for n in (0, 1)}
            return replace(found, info={"seconds": time.perf_counter() - start, **seen})
        (features0, seconds0), (features1, seconds1) = self._features(path0), self._features(path1)
        start = time.perf_counter()
        found = self._matcher.match_features(features0, features1)
        seconds = time.perf_counter() - start + seconds0 + seconds1
        seen = {"seen0": features0.scale.input_size, "seen1": features1.scale.input_size}
        return replace(found, info={"seconds": seconds, **seen})


def _timed_features(matcher: Matcher, path: Path) -> tuple[ImageFeatures, float]:
    start = time.perf_counter()
    return matcher.features(path), time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """A weights file and the content of its header."""

    label: str
    config: NetworkConfig
    weights: Path
    weights_hash: str

    @property
    def variant(self) -> tuple[Fusion, int] | None:
        """Fusion variant and channels, if it is a variant of the paper."""
        backbone = self.config.backbone
        return (backbone.fusion, backbone.channels) if isinstance(backbone, ResNetConfig) else None


def variant_label(fusion: str, channels: int) -> str:
    """Return the label of a variant in tables."""
    return f"({fusion}) {channels}"


def read_networks(paths: Sequence[Path], preset: str = "default") -> list[WeightsFile]:
    """Read weights files completely, so that a damaged file is reported before matching."""
    networks: list[WeightsFile] = []
    for path in paths or [weights_file(preset)]:
        config = load_weights(path).config
        network = WeightsFile(label=config.preset, config=config, weights=path, weights_hash=file_hash(path))
        if network.variant is not None:
            network = replace(network, label=variant_label(*network.variant))
        for other in networks:
            if other.weights_hash == network.weights_hash:
                raise ConfigError(f"{other.weights} and {path} have the same weights; pass each once.")
        networks.append(network)
    labels = [network.label for network in networks]
    # Files of the same variant are distinguished by their paths.
    return [n if labels.count(n.label) == 1 else replace(n, label=f"{n.label}, {n.weights}") for n in networks]


def network_matcher(network: WeightsFile, settings: MatcherSettings, size: int | None) -> PairMatcher:
    """Make a matcher from a network, at this size."""
    matcher = DualRC(replace(settings, preset=network.config.preset, weights=network.weights, size=size))
    # Each network and size has its own name, so that their stores are not reported as outdated.
    variant = network.config.preset if network.variant is None else "{}{}".format(*network.variant)
    matcher.name = "-".join(["dualrc", variant, *([str(size)] if size else []), network.weights_hash[:6]])
    return matcher


class UserFunction:
    """A function of two paths that returns points0 (n, 2), points1 (n, 2) and scores (n,)."""

    def __init__(self, spec: str) -> None:
        file, _, name = spec.rpartition(":")
        path = Path(file)
        self._function, self._folder = _load_function(path, name), path.resolve().parent
        self.name = f"{path.stem}:{name}"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        self.config: dict[str, Any] = {"matcher": "function", "file": path.name, "name": name, "sha256": digest}

    def match(self, path0: Path, path1: Path) -> Matches:
        """Call the function for two images, and check its result."""
        # Read the images first: a broken image is not an error of the function.
        sizes = [read(path).shape[1::-1] for path in (path0, path1)]
        start = time.perf_counter()
        try:
            # The function itself may import files from its folder.
            with _importable(self._folder):
                returned = self._function(path0, path1)
        except (Exception, SystemExit) as error:
            raise DataError(f"{self.name} failed ({_one_line(error)}); correct the function.") from error
        seconds = time.perf_counter() - start
        try:
            points0, points1, scores = (_to_array(part) for part in returned)
            return Matches(
                points0=points0 if points0.size else points0.reshape(-1, 2),
                points1=points1 if points1.size else points1.reshape(-1, 2),
                scores=scores if scores.size else scores.reshape(-1),
                size0=sizes[0],
                size1=sizes[1],
                info={"seconds": seconds, "seen0": sizes[0], "seen1": sizes[1]},
            )
        # The other pairs must be evaluated whatever the function returned.
        except Exception as error:
            shapes = "points0 (n, 2), points1 (n, 2) and scores (n,)"
            raise DataError(
                f"{self.name} did not return {shapes} ({_one_line(error)}); correct the function."
            ) from error


def _load_function(path: Path, name: str) -> Callable[[Path, Path], Any]:
    if not path.is_file():
        raise ConfigError(f"The matcher file {path} does not exist; pass FILE.py:function.")
    # The name includes the folder, because several folders may have files of the same name.
    folder = hashlib.sha256(str(path.resolve().parent).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"dualrc_matcher_{path.stem}_{folder}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; pass FILE.py:function.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module there.
    sys.modules[spec.name] = module
    try:
        with _importable(path.resolve().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(spec.name, None)
        raise DataError(f"{path} cannot be imported ({_one_line(error)}); correct the file.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}; pass FILE.py:function.")
    return function


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make files in the folder importable, as for a script that runs there."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # The user's file may have changed sys.path.
        if entry in sys.path:
            sys.path.remove(entry)


def _one_line(error: BaseException) -> str:
    """Format an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _to_array(values: Any) -> Any:
    if values is None:
        raise ValueError("one of them is None")
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values, dtype=np.float32)
