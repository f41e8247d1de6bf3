"""Methods to measure: our matcher stage by stage with each engine, and other methods as a whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dualrc import config as configs
from dualrc.bench.baselines import make_loftr, make_sift
from dualrc.bench.planted import plant
from dualrc.errors import ConfigError
from dualrc.image import network_size, read, to_input, to_tensor
from dualrc.machine import memory as machine_memory
from dualrc.matcher import ImageFeatures, Matcher, Precision, load
from dualrc.matches import Matches
from dualrc.measure import Run
from dualrc.model.checkpoint import bundled
from dualrc.model.dualrc import Features, make_network
from dualrc.ops import memory
from dualrc.pixels import STRIDE
from dualrc.types import ImagePair, Size

T = TypeVar("T")


class Stage(StrEnum):
    """Measured stages; the values are their names in tables and JSON."""

    DECODE = "decode + resize"
    FEATURES = "features, one image"
    COARSE = "coarse tensor"
    SEARCH = "search + refinement"
    # Starts from the features of both images.
    FURTHER = "further pair"
    # From uint8 images on the host to matches on the host.
    WHOLE = "whole pair"
    BATCH = "batch of pairs"
    # SEARCH is the difference between this and COARSE.
    MATCH = "coarse tensor and search"


OTHERS = ("reference", "loftr", "sift")
IMAGES = ("image0.jpg", "image1.jpg")
# Largest image for which batches are measured by default.
_BATCH_PIXELS = 1024 * 768
# Largest coarse tensor for the reference engine, which takes half a minute for it.
_REFERENCE_ENTRIES = 6_400
# Number of copies that LoFTR keeps of its coarse similarity, and the definition of the fine scores.
_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of the benchmark."""

    # Image sizes, (width, height); empty: 320x240 and 640x480.
    sizes: tuple[Size, ...] = ()
    # Empty: the fastest available.
    devices: tuple[str, ...] = ()
    # Each engine is a separate method; empty: the fastest for the device.
    engines: tuple[str, ...] = ()
    preset: str = "default"
    weights: Path | None = None
    precision: Precision | None = None
    # Memory for a pair in GiB; None: most of the free memory.
    max_memory: float | None = None
    # None: a rendered scene.
    pair: tuple[Path, Path] | None = None
    # Pairs per batch; None: 32 on a GPU, 4 on a CPU, for images of moderate size; 0: no batches.
    batch: int | None = None
    # Members of OTHERS to compare with.
    others: tuple[str, ...] = ()
    # None: 20 on a GPU, 5 on a CPU; 0: measure memory only.
    repeats: int | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.others) - set(OTHERS):
            raise ConfigError(f"--with {unknown.pop()} is unknown; choose from {', '.join(OTHERS)}.")
        if self.batch is not None and self.batch < 0:
            raise ConfigError(f"--batch {self.batch} is negative; pass 0 to leave batches out.")
        if self.repeats is not None and self.repeats < 0:
            raise ConfigError(f"--repeats {self.repeats} is negative; pass 0 to measure memory only.")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A method, and the pair and device to measure it on."""

    settings: BenchSettings
    # "dualrc" or a member of OTHERS.
    method: str = "dualrc"
    # As in `load`.
    engine: str | None = None
    device: str
    # Image size, (width, height).
    size: Size
    # Folder with the files `IMAGES`.
    folder: Path

    @property
    def name(self) -> str:
        """Name of the method, with its engine if one was chosen."""
        return f"{self.method} {self.engine}" if self.engine else self.method

    @property
    def batch(self) -> int:
        """Number of pairs in a batch; 0 for no batches."""
        if self.settings.batch is not None:
            return self.settings.batch
        return (32 if self.device.startswith("cuda") else 4) if self.size[0] * self.size[1] <= _BATCH_PIXELS else 0

    def images(self) -> ImagePair:
        """Return the decoded pair."""
        return read(self.folder / IMAGES[0]), read(self.folder / IMAGES[1])

    @property
    def seen(self) -> Size:
        """Size of the network input, if memory permits."""
        return network_size(self.size, long_side=max(self.size), max_size=max(self.size))

    @property
    def generated(self) -> bool:
        """Whether there are no trained weights, so that the search needs synthetic features."""
        return self.settings.weights is None and bundled(self.settings.preset) is None

    def reason_to_skip(self) -> str | None:
        """Return why the method does not run at this size, or None."""
        entries, needed = coarse_cells(self.seen) ** 2, 0
        left_out = f"{self.name} is left out at {self.size[0]}x{self.size[1]}"
        if "reference" in (self.method, self.engine) and entries > _REFERENCE_ENTRIES:
            return f"{left_out}: {entries:,} entries, one at a time; up to 160x128 they take half a minute."
        if self.engine == "definition":
            needed = _COPIES * 4 * 16**2 * entries
        elif self.method == "loftr":
            needed = _COPIES * 4 * (self.size[0] // 8 * (self.size[1] // 8)) ** 2
        if self.device == "cpu" and needed > machine_memory() / 2:
            return f"{left_out}: it would need {needed / 2**30:.0f} GiB."
        return None


class Method:
    """A method that matches a pair in stages, which are measured separately."""

    def __init__(self, stages: dict[Stage, Run]) -> None:
        # Stages that are timed.
        self.stages = stages
        # Stages whose peak memory is measured, in this order.
        self.memory_stages = stages


class Dualrc(Method):
    """Our matcher, called as users call it."""

    def __init__(self, task: Task) -> None:
        self.task, self.matcher, self.images = task, make_matcher(task), task.images()
        coarse = partial(self.on_device, self.matcher.network.coarse_tensor)
        match = partial(self.on_device, self.matcher.network.match)
        batch: dict[Stage, Run] = {Stage.BATCH: self.batched} if task.batch else {}
        super().__init__(
            {
                Stage.DECODE: self.decode,
                Stage.FEATURES: partial(self.matcher.features, self.images[0]),
                Stage.COARSE: coarse,
                Stage.MATCH: match,
                Stage.FURTHER: self.further,
                Stage.WHOLE: self.whole,
                **batch,
            }
        )
        # The whole pair comes first, before features are kept for the stages that start from them.
        self.memory_stages = {
            Stage.WHOLE: self.whole,
            Stage.FEATURES: self.features_of_both,
            Stage.COARSE: coarse,
            Stage.SEARCH: match,
            Stage.FURTHER: self.further,
            **batch,
        }

    @cached_property
    def pair(self) -> tuple[ImageFeatures, ImageFeatures]:
        """Features of both images, or synthetic ones of the same shapes."""
        pair = self.matcher.features(self.images[0]), self.matcher.features(self.images[1])
        if not self.task.generated:
            return pair
        maps0, maps1 = plant(pair[0].maps, pair[1].maps)
        return replace(pair[0], maps=maps0), replace(pair[1], maps=maps1)

    def features_of_both(self) -> object:
        """Extract the features of both images."""
        self.__dict__.pop("pair", None)
        return self.pair

    @property
    def seen(self) -> Size:
        """Actual size of the network input."""
        return self.pair[0].scale.input_size

    def decode(self) -> object:
        """Read an image from its file and prepare it for the network."""
        pixels = to_tensor(read(self.task.folder / IMAGES[0])).to(self.matcher.device)
        return to_input(pixels[None], self.seen, antialias=self.matcher.network.config.backbone.antialias)

    def on_device(self, operation: Callable[[Features, Features], T]) -> T:
        """Run an operation of the network on the pair, in the working memory that the matcher would use."""
        features0, features1 = self.pair
        limit = self.matcher.budget.working((features0.scale, features1.scale))
        with torch.inference_mode(), memory.working_memory(limit):
            return operation(features0.maps, features1.maps)

    def further(self) -> Matches:
        """Match features on the device; matches end on the host."""
        return self.matcher.match_features(*self.pair)

    def whole(self) -> Matches:
        """Match images on the host; matches end on the host. Random weights use synthetic features for matching."""
        if not self.task.generated:
            return self.matcher.match(*self.images)
        for image in self.images:
            self.matcher.features(image)
        return self.further()

    def batched(self) -> list[Matches]:
        """Match many pairs at once: images, or with random weights synthetic features."""
        return list(self.matcher.match_many(self._many_pairs))

    @cached_property
    def _many_pairs(self) -> list[tuple[Any, Any]]:
        if self.task.generated:
            return [self.pair] * self.task.batch
        # All pairs differ, so that nothing can be cached between them.
        one, other = self.images
        return [(np.roll(one, 4 * turn, axis=1), np.roll(other, 4 * turn, axis=1)) for turn in range(self.task.batch)]


def make_method(task: Task) -> Method:
    """Make a method, ready to run on its pair."""
    if task.method == "loftr":
        return Method({Stage.WHOLE: make_loftr(task.images(), torch.device(task.device))})
    if task.method == "sift":
        return Method({Stage.WHOLE: make_sift(task.images())})
    if task.method == "dualrc":
        return Dualrc(task)
    # The reference engine runs on the CPU only, on features of the backbone on that device.
    settings = task.settings if task.device == "cpu" else replace(task.settings, precision="float32")
    reference = Dualrc(replace(task, settings=settings, device="cpu", engine="reference"))
    _ = reference.pair
    return Method({Stage.FURTHER: reference.further})


def make_matcher(task: Task) -> Matcher:
    """Make the matcher of the preset, with random weights if it has no others."""
    settings = task.settings
    how: dict[str, Any] = {"device": task.device, "precision": settings.precision, "engine": task.engine}
    # Without the scale search: rendered images and synthetic features have no other scale.
    changed: dict[str, Any] = {"size": max(task.size), "max_memory": settings.max_memory, "max_zoom": 1.0}
    if not task.generated:
        return load(settings.preset, weights=settings.weights, **how, **changed)
    network_config, matcher_config = configs.preset(settings.preset)
    # A consensus near the identity passes synthetic matches, as a trained consensus does.
    consensus = replace(network_config.consensus, initialization="identity")
    network_config = replace(network_config, consensus=consensus)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make_network(network_config)
    return Matcher(network, replace(matcher_config, **changed), **how)


def coarse_cells(size: Size) -> int:
    """Return the number of coarse cells of a network input of this (width, height)."""
    return (size[0] // STRIDE) * (size[1] // STRIDE)
