"""What is measured: this project's matcher stage by stage, its literal definition, and what others offer."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dualrc import config as configs
from dualrc.bench.clock import Run
from dualrc.bench.counts import cells
from dualrc.bench.planted import plant
from dualrc.errors import ConfigError
from dualrc.evaluation.baselines import has_opencv, opencv
from dualrc.image import network_size, read, to_input, to_tensor
from dualrc.machine import memory
from dualrc.matcher import Matcher, PictureFeatures, Precision, load
from dualrc.matches import Matches
from dualrc.model import literal
from dualrc.model.checkpoint import bundled
from dualrc.model.correlation import correlate
from dualrc.model.dualrc import NetworkMatches, make_network
from dualrc.types import Size

MethodName = Literal["dualrc", "literal", "loftr", "sift"]
Peak = Callable[[Run], int]  # a run's peak memory in bytes
Pixels = npt.NDArray[np.uint8]

DECODE = "decode + resize"
FEATURES = "features, one picture"
COARSE = "coarse tensor"
SEARCH = "search + refinement"
FURTHER = "further pair"  # with features of both pictures at hand
WHOLE = "whole pair"  # from uint8 pictures on the host to matches on the host
BATCH = "batch of pairs"
MATCH = "coarse tensor and search"  # of which the search is what the coarse tensor does not take

PICTURES = ("picture0.jpg", "picture1.jpg")
_LITERAL_ENTRIES = 30_000  # of the coarse tensor; it takes some 150 microseconds for each
_LOFTR_COPIES = 4  # of its coarse similarity, which it holds at a time


@dataclass(frozen=True, kw_only=True)
class Task:
    """A method, and the pair and device to measure it on."""

    method: MethodName
    preset: str
    weights: str | None
    device: str
    precision: Precision | None
    size: Size  # of the pictures, (width, height)
    batch: int  # pairs; 0: no batches
    folder: str  # with the PICTURES
    max_memory: float | None = None  # GiB; as in MatcherConfig

    def pictures(self) -> tuple[Pixels, Pixels]:
        """The pair, decoded."""
        return read(Path(self.folder) / PICTURES[0]), read(Path(self.folder) / PICTURES[1])

    @property
    def seen(self) -> Size:
        """The size that the network sees, if there is memory for it."""
        return network_size(self.size, long_side=max(self.size), max_size=max(self.size))

    @property
    def generated(self) -> bool:
        """Whether there are no trained weights, so that features have to be planted for the search."""
        return self.weights is None and bundled(self.preset) is None


class Method(ABC):
    """Something that matches a pair, in parts that are timed for themselves."""

    @abstractmethod
    def runs(self) -> dict[str, Run]:
        """What is timed, by stage."""

    def peaks(self, peak: Peak) -> Iterator[tuple[str, int]]:
        """Stages and their peak memory in bytes, as they are found."""
        yield WHOLE, peak(self.runs()[WHOLE])


class Dualrc(Method):
    """This project's matcher, called as its users call it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.matcher = make_matcher(task)
        self.images = task.pictures()

    @cached_property
    def pair(self) -> tuple[PictureFeatures, PictureFeatures]:
        """Features of both pictures, or planted ones of the same shapes."""
        pair = self.matcher.features(self.images[0]), self.matcher.features(self.images[1])
        if not self.task.generated:
            return pair
        network0, network1 = plant(pair[0].network, pair[1].network)
        return replace(pair[0], network=network0), replace(pair[1], network=network1)

    @property
    def seen(self) -> Size:
        """The size that the network really sees."""
        return self.pair[0].scale.network

    @property
    def _working(self) -> float:
        return self.matcher.budget.working((self.pair[0].scale, self.pair[1].scale))

    def decode(self) -> object:
        """A picture from its file to the network's input."""
        pixels = to_tensor(read(Path(self.task.folder) / PICTURES[0])).to(self.matcher.device)
        return to_input(pixels[None], self.seen)

    def features(self) -> object:
        """One picture on the host to its features on the device."""
        return self.matcher.features(self.images[0])

    @torch.inference_mode()
    def coarse(self) -> object:
        """Features to the refined coarse tensor."""
        features0, features1 = self.pair
        return self.matcher.network.coarse_tensor(features0.network, features1.network, max_memory=self._working)

    @torch.inference_mode()
    def match(self) -> NetworkMatches:
        """Features to matches, all on the device."""
        features0, features1 = self.pair
        return self.matcher.network.match(features0.network, features1.network, max_memory=self._working)

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

    def batched(self) -> object:
        """Many pairs at once: pictures, or with generated weights planted features, to matches on the host."""
        return list(self.matcher.match_many(self._many_pairs))

    @cached_property
    def _many_pairs(self) -> list[tuple[Any, Any]]:
        if self.task.generated:
            return [self.pair] * self.task.batch
        # Each pair is another, so that nothing can be kept from one to the next.
        return [
            (np.roll(self.images[0], 4 * number, axis=1), np.roll(self.images[1], 4 * number, axis=1))
            for number in range(self.task.batch)
        ]

    def runs(self) -> dict[str, Run]:
        """All stages; SEARCH is left to be found as MATCH less COARSE."""
        runs: dict[str, Run] = {
            DECODE: self.decode,
            FEATURES: self.features,
            COARSE: self.coarse,
            MATCH: self.match,
            FURTHER: self.further,
            WHOLE: self.whole,
        }
        return runs | ({BATCH: self.batched} if self.task.batch else {})

    def peaks(self, peak: Peak) -> Iterator[tuple[str, int]]:
        """Of the whole first, where nothing is left over from its parts."""
        if not self.task.generated:
            yield WHOLE, peak(self.whole)
        kept: list[PictureFeatures] = []
        features = peak(lambda: kept.extend(self.matcher.features(image) for image in self.images))
        yield FEATURES, features
        kept.clear()
        _ = self.pair
        yield COARSE, peak(self.coarse)
        yield SEARCH, peak(self.match)
        further = peak(self.further)
        yield FURTHER, further
        if self.task.generated:
            yield WHOLE, max(features, further)
        if self.task.batch:
            _ = self._many_pairs
            if not self.task.generated:
                del self.pair  # a batch of pictures needs no features of before
            yield BATCH, peak(self.batched)


class LiteralDefinition(Method):
    """The paper's formulas as they are written, on the features of the fast path; always on the CPU."""

    def __init__(self, task: Task) -> None:
        fast = Dualrc(task)
        network = fast.matcher.network
        self._fine_config = network.config.fine
        self._weights = [weight.detach().float().cpu() for weight in network.consensus.weights]
        self._biases = [bias.detach().float().cpu() for bias in network.consensus.biases]
        coarse = [features.network.coarse.float().cpu() for features in fast.pair]
        self._fine = [features.network.fine[0].float().cpu() for features in fast.pair]
        self._correlation = correlate(coarse[0], coarse[1])[0]

    def coarse(self) -> torch.Tensor:
        """The refined coarse tensor of the pair, (h0 w0 h1 w1)."""
        refined = literal.consensus(literal.mutual_filter(self._correlation), self._weights, self._biases)
        return literal.mutual_filter(refined)

    @torch.inference_mode()
    def match(self) -> dict[tuple[int, int], float]:
        """All matches of the pair, with their scores."""
        config = self._fine_config
        return literal.match(
            self.coarse(),
            self._fine[0],
            self._fine[1],
            reading=config.reading,
            temperature=config.temperature,
            query_share=config.query_share,
        )

    def runs(self) -> dict[str, Run]:
        """A pair by its features: it has no backbone of its own."""
        return {FURTHER: self.match}

    def peaks(self, peak: Peak) -> Iterator[tuple[str, int]]:
        """Of the match; the network that made the features is gone."""
        yield FURTHER, peak(self.match)


class Loftr(Method):
    """kornia's LoFTR in single precision, with generated weights: they are not to be downloaded, and time is the same.

    With trained ones it finds more matches, and takes somewhat longer to refine them.
    """

    def __init__(self, task: Task) -> None:
        from kornia.feature import LoFTR

        self._device = torch.device(task.device)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._network = LoFTR(pretrained=None).eval().to(self._device)
        self._images = task.pictures()

    @torch.inference_mode()
    def whole(self) -> npt.NDArray[Any]:
        """Pictures on the host to corresponding points on the host, (n, 4)."""
        inputs = {f"image{number}": self._input(image) for number, image in enumerate(self._images)}
        found = self._network(inputs)
        points: npt.NDArray[Any] = torch.cat([found["keypoints0"], found["keypoints1"]], dim=1).cpu().numpy()
        return points

    def _input(self, image: Pixels) -> torch.Tensor:
        """Grey values in 0 to 1, (1, 1, h, w), sides multiples of 8."""
        height, width = (side // 8 * 8 for side in image.shape[:2])
        pixels = torch.from_numpy(image[:height, :width].copy()).to(self._device)
        return pixels.float().mean(2)[None, None] / 255

    def runs(self) -> dict[str, Run]:
        """The whole alone."""
        return {WHOLE: self.whole}


class Sift(Method):
    """OpenCV's SIFT with its own settings, and brute-force mutual nearest neighbours; always on the CPU."""

    def __init__(self, task: Task) -> None:
        self._cv2 = opencv()
        self._cv2.setNumThreads(torch.get_num_threads())  # as many as the others have
        self._images = task.pictures()
        self._sift, self._matcher = self._cv2.SIFT_create(), self._cv2.BFMatcher(self._cv2.NORM_L2, crossCheck=True)

    def whole(self) -> list[Any]:
        """Pictures to matches."""
        grey = [self._cv2.cvtColor(image, self._cv2.COLOR_RGB2GRAY) for image in self._images]
        described = [self._sift.detectAndCompute(image, None)[1] for image in grey]
        if any(descriptors is None for descriptors in described):
            return []
        return list(self._matcher.match(*described))

    def runs(self) -> dict[str, Run]:
        """The whole alone."""
        return {WHOLE: self.whole}


_METHODS: Mapping[str, Callable[[Task], Method]] = {
    "dualrc": Dualrc,
    "literal": LiteralDefinition,
    "loftr": Loftr,
    "sift": Sift,
}


def make_method(task: Task) -> Method:
    """The method, ready to be run on its pair."""
    return _METHODS[task.method](task)


def make_matcher(task: Task) -> Matcher:
    """The preset's matcher, with generated weights where it has no others."""
    settings: dict[str, Any] = {"size": max(task.size), "max_memory": task.max_memory}
    if not task.generated:
        return load(task.preset, weights=task.weights, device=task.device, precision=task.precision, **settings)
    network_config, matcher_config = configs.preset(task.preset)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make_network(network_config)
    return Matcher(network, replace(matcher_config, **settings), device=task.device, precision=task.precision)


def check_installed(method: MethodName) -> None:
    """Raise ConfigError if a method can't be run on this machine at all."""
    missing = {
        "loftr": None if importlib.util.find_spec("kornia") else "kornia",
        "sift": None if has_opencv() else "OpenCV",
    }.get(method)
    if missing:
        raise ConfigError(f"--with {method} needs {missing}, which is not installed; pip install 'dualrc[baselines]'.")


def why_not(task: Task) -> str | None:
    """Why a method is not run at this size, if there is a reason."""
    entries = cells(task.seen) ** 2
    if task.method == "literal" and entries > _LITERAL_ENTRIES:
        limit = "it takes every entry for itself; up to 240x176 it is done in seconds"
        return f"literal is left out at {task.size[0]}x{task.size[1]}: {entries:,} entries, and {limit}."
    similarity = _LOFTR_COPIES * 4 * (task.size[0] // 8 * (task.size[1] // 8)) ** 2
    if task.method == "loftr" and task.device == "cpu" and similarity > memory() / 2:
        return f"loftr is left out at {task.size[0]}x{task.size[1]}: it would need {similarity / 2**30:.0f} GiB."
    return None
