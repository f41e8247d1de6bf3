"""Base class of benchmarks: name, options, search for pairs, scores, and report."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
from rich.console import Console

from dualrc.config import PRESETS
from dualrc.errors import ConfigError, ImageError
from dualrc.evaluation.export import Pair
from dualrc.evaluation.matchers import MatcherSettings, PairMatcher, make_matchers
from dualrc.evaluation.report import PairImage, Report, seconds
from dualrc.matches import Matches
from dualrc.types import ImageArray

T = TypeVar("T")
GetMatches = Callable[[Pair], Matches]

# Last columns of every table.
COST_COLUMNS = ("matches", "a pair", "size")
# Number of pairs that are drawn.
_BEST, _WORST = 2, 3


@dataclass(frozen=True)
class Option:
    """Declares a setting as an option of the command line."""

    help: str
    _: KW_ONLY
    # Empty: --NAME.
    flags: tuple[str, ...] = ()
    # Placeholder of the value in the help.
    metavar: str | None = None
    # Converts text to the value.
    parse: Callable[[str], Any] | None = None


SIZE_OPTION = Option("Long side of the network input, in pixels. Default: the image's own size.")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every benchmark; subclasses add their own."""

    roots: tuple[Path, ...] = ()
    matchers: Annotated[
        tuple[str, ...],
        Option(
            "Matcher to evaluate; repeatable, to compare matchers in one table. dualrc (default), dualrc-high and "
            "dualrc-search (with that quality), FILE.safetensors (a weights file of any preset), sift (RootSIFT of "
            "OpenCV: sift-ratio and sift-mutual), stored:FOLDER (matches, or keypoints with descriptors, that another "
            "method wrote), or FILE.py:function, a function of two paths that returns points0, points1, scores.",
            flags=("--matcher",),
        ),
    ] = ("dualrc",)
    preset: Annotated[str, Option(f"Network architecture: {', '.join(PRESETS)}. Default: default.")] = "default"
    device: Annotated[str | None, Option("Device: cuda (or gpu), mps or cpu. Default: the fastest available.")] = None
    top: Annotated[int | None, Option("Number of best matches per pair to score. Default: 4000.")] = None
    protocol: Annotated[
        str,
        Option(
            "Evaluation protocol: own (default), or paper, which sets size, number of matches and verification as "
            "in the published evaluation unless other options set them."
        ),
    ] = "own"
    out: Annotated[
        Path,
        Option(
            "Folder for matches, figures, results.json and report.html; a second run continues there. Default: "
            "evaluation-BENCHMARK.",
            flags=("--out", "-o"),
        ),
    ]

    # Settings of the published evaluation; empty if there is none.
    paper: ClassVar[Mapping[str, Any]] = {}
    # How the evaluation with these settings differs from the published one.
    differences: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.protocol not in ("own", "paper"):
            raise ConfigError(f"There is no protocol {self.protocol!r}; choose own or paper.")
        if self.protocol == "paper" and not self.paper:
            raise ConfigError("The paper has no protocol for this benchmark; omit --protocol.")
        if not self.roots and self.needs_roots:
            raise ConfigError("No dataset was passed; pass its folder.")
        if self.top is not None and self.top < 1:
            raise ConfigError(f"top = {self.top} leaves no matches to score; pass 1 or more.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make settings from options; the paper's protocol sets the options that are not given."""
        paper = cls.paper if options.get("protocol") == "paper" else {}
        return cls(**{**paper, **options})

    @property
    def needs_roots(self) -> bool:
        """Whether the benchmark needs the folder of a dataset."""
        return True


@dataclass(frozen=True, kw_only=True)
class OneNetworkSettings(Settings):
    """Settings of a benchmark that evaluates one network, at one size."""

    weights: Annotated[Path | None, Option("Weights file (.safetensors). Default: the bundled weights.")] = None
    size: Annotated[int | None, SIZE_OPTION] = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the matches of a matcher, over the pairs that it could match."""

    seconds_per_pair: float | None = None
    # Most frequent size of the network input.
    resolution: str = ""

    @staticmethod
    def of(all_infos: Sequence[Mapping[str, Any]]) -> "Cost":
        """Compute the mean time and the most frequent resolution from the `info` of matches."""
        infos = [info for info in all_infos if "error" not in info]
        times = [info["seconds"] for info in infos if "seconds" in info]
        seen = [tuple(info[key]) for info in infos for key in ("seen0", "seen1") if key in info]
        if not seen:
            return Cost()
        width, height = max(dict.fromkeys(seen), key=seen.count)
        others = " +" if len(set(seen)) > 1 else ""
        return Cost(seconds_per_pair=float(np.mean(times)) if times else None, resolution=f"{width}x{height}{others}")

    def cells(self, matches: float) -> list[str]:
        """Return the cells below COST_COLUMNS, with the mean number of matches of a pair."""
        return [f"{matches:.0f}", seconds(self.seconds_per_pair), self.resolution]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Scores of a matcher on a benchmark."""

    matcher: str
    cost: Cost = Cost()
    # The reason for each pair that could not be matched.
    failures: Mapping[str, str] = field(default_factory=dict)
    # Scores of the benchmark.
    figures: Any
    config: Mapping[str, Any] = field(default_factory=dict)


class Benchmark(ABC):
    """A dataset that was found and checked, and the protocol that scores matches on it."""

    name: ClassVar[str]
    # One sentence for the help of the command line.
    summary: ClassVar[str]
    # Example of a command line, without `dualrc evaluate NAME`.
    example: ClassVar[str]
    settings_class: ClassVar[type[Settings]] = OneNetworkSettings
    # File patterns that identify the dataset.
    recognized_by: ClassVar[tuple[str, ...]] = ()
    # Number of matches stored per pair, so that smaller limits can be scored without matching again.
    stored_matches: ClassVar[int] = 4000
    sift_features: ClassVar[int] = 4000
    # Whether the benchmark accepts only one folder.
    one_root: ClassVar[bool] = False
    # Number of matches scored per pair.
    default_top: ClassVar[int] = 4000

    settings: Settings
    pairs: list[Pair]
    # Remarks for readers of the results, such as excluded sequences and pairs without ground truth.
    notes: list[str]
    # Thresholds and settings of the score, as JSON values.
    protocol: dict[str, Any]
    messages: Console
    # Called with the name of a step, the number of finished items and the total.
    progress: Callable[[str, int, int], None] = staticmethod(lambda step, done, total: None)

    def __init__(self, settings: Any, messages: Console | None = None) -> None:
        """Find the data (in subclasses); raise DataError if there is none."""
        self.settings, self.messages = settings, messages or Console(stderr=True)
        self.pairs, self.notes, self.protocol = [], [], {}

    @property
    def top(self) -> int:
        """Number of best matches scored per pair."""
        return self.settings.top or self.default_top

    @property
    def stored(self) -> int:
        """Number of matches stored per pair."""
        return max(self.stored_matches, self.settings.top or 0)

    def store_config(self) -> dict[str, Any]:
        """Return what stored matches depend on in addition to the matcher."""
        roots = [str(root.resolve()) for root in self.settings.roots]
        return {"benchmark": self.name, "roots": roots, "crop": None}

    def matcher_settings(self) -> MatcherSettings:
        """Return the settings of matchers."""
        given = self.settings
        made = MatcherSettings(
            preset=given.preset, device=given.device, top=self.stored, sift_features=self.sift_features
        )
        return replace(made, weights=given.weights, size=given.size) if isinstance(given, OneNetworkSettings) else made

    def matchers(self) -> Iterator[tuple[str, PairMatcher]]:
        """Yield the matchers to evaluate, with their names in tables."""
        wanted = self.settings.matchers if self.settings.roots else ()
        return ((matcher.name, matcher) for matcher in make_matchers(wanted, self.matcher_settings()))

    @abstractmethod
    def score(self, matcher: str, get: GetMatches) -> Any:
        """Score a matcher by the stored matches of every pair; return plain dataclasses."""

    def stored_results(self) -> list[Result]:
        """Return results of other methods to score along with the matchers."""
        return []

    @abstractmethod
    def report(self, results: Sequence[Result]) -> Report:
        """Return tables and figures of the scores of several matchers."""

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """Rank the pairs from best to worst, with a description of their scores."""
        return []

    def draw(self, pair: Pair, matches: Matches) -> ImageArray:
        """Draw the images of a pair with correct and wrong matches."""
        raise NotImplementedError

    def images(self, result: Result, get: GetMatches) -> list[PairImage]:
        """Draw the best and the worst pairs, except pairs that cannot be read."""
        ranking = self.ranking(result)
        best = ranking[:_BEST]
        worst = [entry for entry in ranking[-_WORST:] if entry not in best]
        drawn = []
        for label, entries in (("best", best), ("worst", worst)):
            for pair, words in entries:
                heading, caption = f"{result.matcher}: {label} pairs", f"{pair.name0} and {pair.name1}: {words}"
                with suppress(ImageError):
                    image = self.draw(pair, get(pair))
                    drawn.append(PairImage(heading=heading, caption=caption, image=image, file=heading))
        return drawn


def grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Group items by key, in the order in which keys first appear."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# Benchmarks by name, in the order of the help.
BENCHMARKS: dict[str, type[Benchmark]] = {}


def register(*benchmarks: type[Benchmark]) -> None:
    """Register benchmarks for `evaluate` and the command line."""
    for benchmark in benchmarks:
        BENCHMARKS[benchmark.name] = benchmark


def recognize(root: Path, name: str) -> str | None:
    """Return the benchmark, other than `name`, whose dataset a folder resembles."""
    for other in BENCHMARKS.values():
        if other.name != name and any(True for pattern in other.recognized_by for _ in root.glob(pattern)):
            return other.name
    return None


def folder_hint(root: Path, name: str) -> str:
    """Return a hint for a folder that is not a dataset of the benchmark `name`."""
    other = recognize(root, name)
    return f"it looks like {other}: run `dualrc evaluate {other}` on it" if other else "pass another folder"


def open_benchmark(name: str, options: Mapping[str, Any], messages: Console | None = None) -> Benchmark:
    """Open a benchmark with its data; raise ConfigError for an option that it does not have."""
    if name not in BENCHMARKS:
        raise ConfigError(f"There is no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}.")
    settings_class = BENCHMARKS[name].settings_class
    for key in options:
        takers = [other.name for other in BENCHMARKS.values() if key in other.settings_class.__dataclass_fields__]
        if name not in takers:
            refusal = f"is an option of {' and '.join(takers)} only" if takers else "is an option of no benchmark"
            raise ConfigError(f"--{key.replace('_', '-')} {refusal}; omit it.")
    settings = settings_class.of(options)
    if BENCHMARKS[name].one_root and len(settings.roots) > 1:
        raise ConfigError(f"{name} has one folder; pass one ROOT.")
    return BENCHMARKS[name](settings, messages)
