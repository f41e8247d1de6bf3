"""What is measured: this project's matcher stage by stage, by one engine or another, and other methods as a whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dualrc import config as configs
from dualrc.bench.baselines import Pictures, make_loftr, make_sift
from dualrc.bench.planted import plant
from dualrc.errors import ConfigError
from dualrc.image import network_size, read, to_input, to_tensor
from dualrc.machine import memory as machine_memory
from dualrc.matcher import Matcher, PictureFeatures, Precision, load
from dualrc.matches import Matches
from dualrc.measure import Run
from dualrc.model.checkpoint import bundled
from dualrc.model.dualrc import Features, make_network
from dualrc.ops import memory
from dualrc.pixels import STRIDE
from dualrc.types import Size

T = TypeVar("T")


class Stage(StrEnum):
    """What is measured, by the names that tables and JSON have for it."""

    DECODE = "decode + resize"
    FEATURES = "features, one picture"
    COARSE = "coarse tensor"
    SEARCH = "search + refinement"
    # With features of both pictures at hand.
    FURTHER = "further pair"
    # From uint8 pictures on the host to matches on the host.
    WHOLE = "whole pair"
    BATCH = "batch of pairs"
    # SEARCH is what this takes beyond COARSE.
    MATCH = "coarse tensor and search"


OTHERS = ("reference", "loftr", "sift")
PICTURES = ("picture0.jpg", "picture1.jpg")
# Of larger pictures, batches are measured only where asked for.
_BATCH_PIXELS = 1024 * 768
# Of the coarse tensor, which the reference engine takes half a minute for.
_REFERENCE_ENTRIES = 6_400
# That LoFTR holds of its coarse similarity, and the definition of the fine scores.
_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure."""

    # Of the pictures, (width, height).
    sizes: tuple[Size, ...]
    # None: the best there is.
    devices: tuple[str, ...] = ()
    # Each is a method of its own; none: the best for the device.
    engines: tuple[str, ...] = ()
    preset: str = "default"
    weights: Path | None = None
    precision: Precision | None = None
    # GiB for a pair; None: most of what is free.
    max_memory: float | None = None
    # None: a rendered scene.
    pair: tuple[Path, Path] | None = None
    # Pairs; None: 32 on a GPU, 4 elsewhere, of pictures that are not large; 0: no batches.
    batch: int | None = None
    # Of OTHERS, measured beside this project's matcher.
    others: tuple[str, ...] = ()
    # None: 20 on a GPU, 5 elsewhere; 0: memory alone.
    repeats: int | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.others) - set(OTHERS):
            raise ConfigError(f"--with {unknown.pop()} is not known; choose from {', '.join(OTHERS)}.")
        if self.batch is not None and self.batch < 0:
            raise ConfigError(f"--batch {self.batch} must not be negative; 0 leaves batches out.")
        if self.repeats is not None and self.repeats < 0:
            raise ConfigError(f"--repeats {self.repeats} must not be negative; 0 measures memory alone.")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A method, and the pair and device to measure it on."""

    settings: BenchSettings
    # Or one of OTHERS.
    method: str = "dualrc"
    # As in `load`.
    engine: str | None = None
    device: str
    # Of the pictures, (width, height).
    size: Size
    # With the PICTURES.
    folder: Path

    @property
    def name(self) -> str:
        """The method, with its engine where one was asked for."""
        return f"{self.method} {self.engine}" if self.engine else self.method

    @property
    def batch(self) -> int:
        """Pairs in a batch; 0: no batches."""
        if self.settings.batch is not None:
            return self.settings.batch
        return (32 if self.device.startswith("cuda") else 4) if self.size[0] * self.size[1] <= _BATCH_PIXELS else 0

    def pictures(self) -> Pictures:
        """The pair, decoded."""
        return read(self.folder / PICTURES[0]), read(self.folder / PICTURES[1])

    @property
    def seen(self) -> Size:
        """The size that the network sees, if there is memory for it."""
        return network_size(self.size, long_side=max(self.size), max_size=max(self.size))

    @property
    def generated(self) -> bool:
        """Whether there are no trained weights, so that features have to be planted for the search."""
        return self.settings.weights is None and bundled(self.settings.preset) is None

    def reason_to_skip(self) -> str | None:
        """Why the method is not run at this size, if there is a reason."""
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
    """Something that matches a pair, in stages that are measured for themselves."""

    def __init__(self, stages: dict[Stage, Run]) -> None:
        # What is timed.
        self.stages = stages
        # Whose peak memory is measured, in this order.
        self.memory_stages = stages


class Dualrc(Method):
    """This project's matcher, called as its users call it."""

    def __init__(self, task: Task) -> None:
        self.task, self.matcher, self.images = task, make_matcher(task), task.pictures()
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
        # The whole comes first, before features are kept for the stages that begin with them.
        self.memory_stages = {
            Stage.WHOLE: self.whole,
            Stage.FEATURES: self.features_of_both,
            Stage.COARSE: coarse,
            Stage.SEARCH: match,
            Stage.FURTHER: self.further,
            **batch,
        }

    @cached_property
    def pair(self) -> tuple[PictureFeatures, PictureFeatures]:
        """Features of both pictures, or planted ones of the same shapes."""
        pair = self.matcher.features(self.images[0]), self.matcher.features(self.images[1])
        if not self.task.generated:
            return pair
        maps0, maps1 = plant(pair[0].maps, pair[1].maps)
        return replace(pair[0], maps=maps0), replace(pair[1], maps=maps1)

    def features_of_both(self) -> object:
        """Make the features again."""
        self.__dict__.pop("pair", None)
        return self.pair

    @property
    def seen(self) -> Size:
        """The size that the network really sees."""
        return self.pair[0].scale.input_size

    def decode(self) -> object:
        """A picture from its file to the network's input."""
        pixels = to_tensor(read(self.task.folder / PICTURES[0])).to(self.matcher.device)
        return to_input(pixels[None], self.seen, antialias=self.matcher.network.config.backbone.antialias)

    def on_device(self, operation: Callable[[Features, Features], T]) -> T:
        """What an operation of the network gives for the pair, in the working memory that the matcher would give it."""
        features0, features1 = self.pair
        limit = self.matcher.budget.working((features0.scale, features1.scale))
        with torch.inference_mode(), memory.working_memory(limit):
            return operation(features0.maps, features1.maps)

    def further(self) -> Matches:
        """Features on the device to matches on the host."""
        return self.matcher.match_features(*self.pair)

    def whole(self) -> Matches:
        """Pictures on the host to matches on the host; with generated weights the matches are of planted features."""
        if not self.task.generated:
            return self.matcher.match(*self.images)
        for image in self.images:
            self.matcher.features(image)
        return self.further()

    def batched(self) -> list[Matches]:
        """Many pairs at once: pictures, or with generated weights planted features, to matches on the host."""
        return list(self.matcher.match_many(self._many_pairs))

    @cached_property
    def _many_pairs(self) -> list[tuple[Any, Any]]:
        if self.task.generated:
            return [self.pair] * self.task.batch
        # Each pair is another, so that nothing can be kept from one to the next.
        one, other = self.images
        return [(np.roll(one, 4 * turn, axis=1), np.roll(other, 4 * turn, axis=1)) for turn in range(self.task.batch)]


def make_method(task: Task) -> Method:
    """The method, ready to be run on its pair."""
    if task.method == "loftr":
        return Method({Stage.WHOLE: make_loftr(task.pictures(), torch.device(task.device))})
    if task.method == "sift":
        return Method({Stage.WHOLE: make_sift(task.pictures())})
    if task.method == "dualrc":
        return Dualrc(task)
    # The reference engine works on the CPU alone, on the features that the backbone gives there.
    settings = task.settings if task.device == "cpu" else replace(task.settings, precision="float32")
    reference = Dualrc(replace(task, settings=settings, device="cpu", engine="reference"))
    _ = reference.pair
    return Method({Stage.FURTHER: reference.further})


def make_matcher(task: Task) -> Matcher:
    """The preset's matcher, with generated weights where it has no others."""
    settings = task.settings
    how: dict[str, Any] = {"device": task.device, "precision": settings.precision, "engine": task.engine}
    # One look: generated pictures and planted features have nothing to find at another scale.
    changed: dict[str, Any] = {"size": max(task.size), "max_memory": settings.max_memory, "max_zoom": 1.0}
    if not task.generated:
        return load(settings.preset, weights=settings.weights, **how, **changed)
    network_config, matcher_config = configs.preset(settings.preset)
    # Consensus that is near the identity lets planted matches through, as trained consensus does.
    consensus = replace(network_config.consensus, initialization="identity")
    network_config = replace(network_config, consensus=consensus)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make_network(network_config)
    return Matcher(network, replace(matcher_config, **changed), **how)


def coarse_cells(size: Size) -> int:
    """Coarse cells of a network input of this (width, height)."""
    return (size[0] // STRIDE) * (size[1] // STRIDE)
