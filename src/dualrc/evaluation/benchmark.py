"""What every benchmark has: pairs, scores of matchers on them, tables, figures, and pictures of pairs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dualrc.draw import Picture
from dualrc.evaluation.export import Pair
from dualrc.matches import Matches

GetMatches = Callable[[Pair], Matches]

COST_COLUMNS = ("matches", "a pair", "size")  # in every table


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns, the same on the screen and on the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a matcher's matches cost, over the pairs that it could match."""

    seconds_per_pair: float | None
    resolution: str  # the size that it most often looked at

    @staticmethod
    def of(all_infos: Sequence[Mapping[str, Any]]) -> "Cost":
        """The mean time and the most frequent resolution, of the matches' infos."""
        infos = [info for info in all_infos if "error" not in info]
        seconds = [info["seconds"] for info in infos if "seconds" in info]
        seen = [tuple(info[key]) for info in infos for key in ("seen0", "seen1") if key in info]
        if not seen:
            return Cost(seconds_per_pair=None, resolution="")
        common = max(dict.fromkeys(seen), key=seen.count)
        more = " +" if len(set(seen)) > 1 else ""
        mean = float(np.mean(seconds)) if seconds else None
        return Cost(seconds_per_pair=mean, resolution=f"{common[0]}x{common[1]}{more}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A matcher's scores on a benchmark."""

    matcher: str
    cost: Cost
    failures: Mapping[str, str]  # pairs that could not be matched, and why; they count as failures
    figures: Any  # the benchmark's own dataclass
    config: Mapping[str, Any] = field(default_factory=dict)


class Benchmark(ABC):
    """A data set, found and checked, with the protocol that scores matches on it."""

    name: str
    pairs: list[Pair]
    notes: list[str]  # what a reader of the results must know: sequences left out, pairs without ground truth
    protocol: dict[str, Any]  # thresholds and settings of the score, as JSON values
    # Told of the steps of a long score: each one's name, how much of it is done, and of how much.
    tell: Callable[[str, int, int], None] = staticmethod(lambda step, done, total: None)

    @abstractmethod
    def score(self, matcher: str, get: GetMatches) -> Result:
        """Score a matcher by its stored matches, fetched pair by pair."""

    @abstractmethod
    def tables(self, results: Sequence[Result]) -> list[Table]:
        """Tables of several matchers' scores, the main one first."""

    @abstractmethod
    def curves(self, results: Sequence[Result]) -> dict[str, Picture]:
        """Diagrams by their file names, without ending."""

    @abstractmethod
    def ranking(self, result: Result) -> list[tuple[Pair, str]]:
        """The pairs from best to worst, each with its score in words."""

    @abstractmethod
    def draw(self, pair: Pair, matches: Matches) -> Picture:
        """A pair's pictures with right and wrong matches."""


def failures(pairs: Sequence[Pair], infos: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Which pairs could not be matched, and why."""
    return {
        f"{pair.name0} {pair.name1}": str(info["error"])
        for pair, info in zip(pairs, infos, strict=True)
        if "error" in info
    }


def share(value: float) -> str:
    """A share of 1 as tables show it: .456."""
    return "1.000" if value >= 0.9995 else f"{value:.3f}".removeprefix("0")


def seconds(value: float | None) -> str:
    """A time as tables show it."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.0f} ms"


def cost_cells(matches: float, cost: Cost) -> list[str]:
    """What stands under COST_COLUMNS."""
    return [f"{matches:.0f}", seconds(cost.seconds_per_pair), cost.resolution]
