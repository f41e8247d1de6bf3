"""What a benchmark declares: its name, its options, how it finds pairs, scores matches, and reports."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from rich.console import Console

from dualrc.config import PRESETS
from dualrc.draw import Picture
from dualrc.errors import ConfigError, ImageError
from dualrc.evaluation.export import Pair
from dualrc.evaluation.matchers import MatcherSettings, PairMatcher, make_matchers
from dualrc.evaluation.report import PairPicture, Report, seconds
from dualrc.matches import Matches

T = TypeVar("T")
GetMatches = Callable[[Pair], Matches]

# In every table.
COST_COLUMNS = ("matches", "a pair", "size")
# Pairs that are drawn.
_BEST, _WORST = 2, 3


@dataclass(frozen=True)
class Option:
    """Makes a setting an option of the command line."""

    help: str
    _: KW_ONLY
    # None: --NAME.
    flags: tuple[str, ...] = ()
    # What the help calls its value.
    metavar: str | None = None
    # Makes the value from text.
    parse: Callable[[str], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every benchmark; a benchmark adds its own in a subclass."""

    roots: tuple[Path, ...] = ()
    matchers: Annotated[
        tuple[str, ...],
        Option(
            "dualrc (if nothing is given), dualrc-high (a second look), FILE.safetensors (the network of a weights "
            "file, whatever its preset), sift (RootSIFT by OpenCV: sift-ratio and sift-mutual), stored:FOLDER (matches "
            "or keypoints with descriptors that another method wrote), or "
            "FILE.py:function, a function of two paths that returns points0, points1, scores. Give it several times to "
            "compare in one table.",
            flags=("--matcher",),
        ),
    ] = ("dualrc",)
    preset: Annotated[str, Option(f"Network: {' or '.join(PRESETS)}; without it, default.")] = "default"
    device: Annotated[str | None, Option("cuda (or gpu), mps or cpu; without it, the best there is.")] = None
    top: Annotated[int | None, Option("Score the best so many matches; without it, 4000.")] = None
    protocol: Annotated[
        str,
        Option(
            "own (if nothing is given), or paper: size, number of matches and verification as in the published "
            "evaluation, where no other option says otherwise."
        ),
    ] = "own"
    out: Annotated[
        Path,
        Option(
            "Folder for matches, figures, results.json and report.html; a second run goes on where the first "
            "stopped. Without it, evaluation-BENCHMARK.",
            flags=("--out", "-o"),
        ),
    ]

    # What the published evaluation sets; none: there is no such evaluation.
    paper: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        if self.protocol not in ("own", "paper"):
            raise ConfigError(f"There is no protocol {self.protocol!r}; choose own or paper.")
        if self.protocol == "paper":
            if not self.paper:
                raise ConfigError("The paper has no protocol for this benchmark; leave --protocol out.")
            defaults = {field.name: field.default for field in fields(self)}
            for name, value in self.paper.items():
                if getattr(self, name) == defaults[name]:
                    object.__setattr__(self, name, value)
        if not self.roots and self.needs_roots:
            raise ConfigError("Give the folder of the data set.")
        if self.top is not None and self.top < 1:
            raise ConfigError(f"top = {self.top} leaves nothing to score; give 1 or more.")

    @property
    def needs_roots(self) -> bool:
        """Whether there is nothing to evaluate without the folder of a data set."""
        return True

    def for_matchers(self) -> MatcherSettings:
        """The settings of matchers."""
        return MatcherSettings(preset=self.preset, device=self.device)


@dataclass(frozen=True, kw_only=True)
class OneNetworkSettings(Settings):
    """Settings of a benchmark that evaluates one network, at one size."""

    weights: Annotated[Path | None, Option("Weights file (.safetensors); without it, those inside the package.")] = None
    size: Annotated[int | None, Option("Long side that the network sees, scaling up or down.")] = None

    def for_matchers(self) -> MatcherSettings:
        """The settings of matchers."""
        return replace(super().for_matchers(), weights=self.weights, size=self.size)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a matcher's matches cost, over the pairs that it could match."""

    seconds_per_pair: float | None = None
    # The most frequent size of the pictures that it looked at.
    resolution: str = ""

    @staticmethod
    def of(all_infos: Sequence[Mapping[str, Any]]) -> "Cost":
        """The mean time and the most frequent resolution, from the `info` of matches."""
        infos = [info for info in all_infos if "error" not in info]
        times = [info["seconds"] for info in infos if "seconds" in info]
        seen = [tuple(info[key]) for info in infos for key in ("seen0", "seen1") if key in info]
        if not seen:
            return Cost()
        width, height = max(dict.fromkeys(seen), key=seen.count)
        others = " +" if len(set(seen)) > 1 else ""
        return Cost(seconds_per_pair=float(np.mean(times)) if times else None, resolution=f"{width}x{height}{others}")

    def cells(self, matches: float) -> list[str]:
        """The cells below COST_COLUMNS, with the number of matches of a pair."""
        return [f"{matches:.0f}", seconds(self.seconds_per_pair), self.resolution]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A matcher's scores on a benchmark."""

    matcher: str
    cost: Cost = Cost()
    # Pairs that could not be matched, and why.
    failures: Mapping[str, str] = field(default_factory=dict)
    # The benchmark's own scores.
    figures: Any
    config: Mapping[str, Any] = field(default_factory=dict)


class Benchmark(ABC):
    """A data set that was found and checked, with the protocol that scores matches on it."""

    name: ClassVar[str]
    # A sentence for the help of the command line.
    summary: ClassVar[str]
    # A command line, without `dualrc evaluate NAME`.
    example: ClassVar[str]
    settings_class: ClassVar[type[Settings]] = OneNetworkSettings
    # File patterns by which the data set is recognized.
    recognized_by: ClassVar[tuple[str, ...]] = ()
    # Matches that are stored for a pair, so that smaller limits can be scored without matching again.
    stored_matches: ClassVar[int] = 4000
    sift_features: ClassVar[int] = 4000
    # Whether several folders are refused.
    one_root: ClassVar[bool] = False
    # Matches of a pair that are scored.
    default_top: ClassVar[int] = 4000

    settings: Settings
    pairs: list[Pair]
    # What a reader of the results must know: excluded sequences, pairs without ground truth.
    notes: list[str]
    # Thresholds and settings of the score, as JSON values.
    protocol: dict[str, Any]
    messages: Console
    # Called with the name of a step, how much of it is done, and of how much.
    progress: Callable[[str, int, int], None] = staticmethod(lambda step, done, total: None)

    def __init__(self, settings: Any, messages: Console | None = None) -> None:
        """Subclasses find the data, and raise DataError where there is none."""
        self.settings, self.messages = settings, messages or Console(stderr=True)
        self.pairs, self.notes, self.protocol = [], [], {}

    @property
    def top(self) -> int:
        """How many of a pair's best matches are scored."""
        return self.settings.top or self.default_top

    @property
    def stored(self) -> int:
        """How many matches of a pair are stored."""
        return max(self.stored_matches, self.settings.top or 0)

    def store_config(self) -> dict[str, Any]:
        """What stored matches depend on beside the matcher."""
        roots = [str(root.resolve()) for root in self.settings.roots]
        return {"benchmark": self.name, "roots": roots, "crop": None}

    def matchers(self) -> Iterator[tuple[str, PairMatcher]]:
        """The matchers to evaluate, each with the name that tables give it."""
        wanted = self.settings.matchers if self.settings.roots else ()
        chosen = replace(self.settings.for_matchers(), top=self.stored, sift_features=self.sift_features)
        return ((matcher.name, matcher) for matcher in make_matchers(wanted, chosen))

    @abstractmethod
    def score(self, matcher: str, get: GetMatches) -> Any:
        """Score a matcher by its stored matches of every pair; returns plain dataclasses."""

    def stored_results(self) -> list[Result]:
        """Results of other methods that are scored beside the matchers."""
        return []

    @abstractmethod
    def report(self, results: Sequence[Result]) -> Report:
        """Tables and diagrams of several matchers' scores."""

    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """The pairs from best to worst, each with its score in words."""
        return []

    def draw(self, pair: Pair, matches: Matches) -> Picture:
        """A pair's pictures with right and wrong matches."""
        raise NotImplementedError

    def pictures(self, result: Result, get: GetMatches) -> list[PairPicture]:
        """Drawings of the best and the worst pairs; a pair that can't be read has none."""
        ranking = self.ranking(result)
        best = ranking[:_BEST]
        worst = [entry for entry in ranking[-_WORST:] if entry not in best]
        drawn = []
        for label, entries in (("best", best), ("worst", worst)):
            for pair, words in entries:
                try:
                    picture = self.draw(pair, get(pair))
                except ImageError:
                    continue
                heading, caption = f"{result.matcher}: {label} pairs", f"{pair.name0} and {pair.name1}: {words}"
                drawn.append(PairPicture(heading=heading, caption=caption, picture=picture, file=heading))
        return drawn


def grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Items by their key, in the order in which keys first appear."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# Every benchmark by its name, in the order in which the help lists them.
BENCHMARKS: dict[str, type[Benchmark]] = {}


def register(*benchmarks: type[Benchmark]) -> None:
    """Make benchmarks known to `evaluate` and to the command line."""
    for benchmark in benchmarks:
        BENCHMARKS[benchmark.name] = benchmark


def recognize(root: Path, name: str) -> str | None:
    """Another benchmark than `name` whose data set a folder looks like."""
    for other in BENCHMARKS.values():
        if other.name != name and any(True for pattern in other.recognized_by for _ in root.glob(pattern)):
            return other.name
    return None


def folder_hint(root: Path, name: str) -> str:
    """What to do with a folder that has not the data set of the benchmark `name`."""
    other = recognize(root, name)
    return f"it looks like {other}: run `dualrc evaluate {other}` on it" if other else "give another folder"


def open_benchmark(name: str, options: Mapping[str, Any], messages: Console | None = None) -> Benchmark:
    """The benchmark of that name with its data; an option that it does not take is refused."""
    if name not in BENCHMARKS:
        raise ConfigError(f"There is no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}.")
    settings_class = BENCHMARKS[name].settings_class
    for key in options:
        takers = [other.name for other in BENCHMARKS.values() if key in other.settings_class.__dataclass_fields__]
        if name not in takers:
            refusal = f"is an option of {' and '.join(takers)} only" if takers else "is an option of no benchmark"
            raise ConfigError(f"--{key.replace('_', '-')} {refusal}; omit it.")
    settings = settings_class(**options)
    if BENCHMARKS[name].one_root and len(settings.roots) > 1:
        raise ConfigError(f"{name} has one folder; give one ROOT.")
    return BENCHMARKS[name](settings, messages)
