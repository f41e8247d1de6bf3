"""Comparisons of the paper's appendix on HPatches: fusion variants, channels, sizes, costs, and drawings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from dualrc.collection.pairs import from_file
from dualrc.collection.progress import show_status
from dualrc.config import MIN_SIDE
from dualrc.draw import draw_dots, draw_matches
from dualrc.errors import ConfigError, DataError, ImageError
from dualrc.evaluation.appendix_tables import compare_channels, compare_costs, compare_fusion, compare_sizes
from dualrc.evaluation.benchmark import Benchmark, GetMatches, Option, Result, Settings
from dualrc.evaluation.costs import Measured, Task, measure_all
from dualrc.evaluation.export import Pair
from dualrc.evaluation.hpatches import CORRECT_PX, TOP_OPTION, HPatches, HPatchesSettings
from dualrc.evaluation.matchers import PairMatcher, WeightsFile, make_matchers, network_matcher, read_networks
from dualrc.evaluation.report import PairImage, Report
from dualrc.image import read
from dualrc.matches import Estimate
from dualrc.metrics import match_errors_px

# Number of best matches that are drawn, as in the paper: lines, and dots in its text and in its appendix.
LINES, DOTS = 500, (2000, 6000)


@dataclass(frozen=True, kw_only=True)
class AppendixSettings(Settings):
    """Settings of the comparisons."""

    matchers: Annotated[
        tuple[str, ...], Option("Matchers to compare with the first network. Default: none.", flags=("--matcher",))
    ] = ()
    # The header of each file names its variant; empty: the bundled weights.
    weights: Annotated[tuple[Path, ...], Option("Repeatable, one file per fusion variant and number of channels.")] = ()
    # All networks and matchers run at the largest size, the first network at all sizes.
    sizes: Annotated[tuple[int, ...], Option("Repeatable. Default: 1600, 1200, 800.", flags=("--size",))] = (
        1600,
        1200,
        800,
    )
    top: Annotated[int | None, TOP_OPTION] = None
    pairs: Annotated[
        Path | None,
        Option("Text file of pairs to draw, two names per line, such as v_wall/1.ppm v_wall/6.ppm."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "dualrc" in self.matchers:
            raise ConfigError("The appendix compares dualrc itself; omit that --matcher, and pass --weights.")
        if not self.sizes or min(self.sizes) < MIN_SIDE:
            sizes = sorted(set(self.sizes), reverse=True)
            raise ConfigError(f"Sizes {sizes} are not valid; pass one or more sizes of at least {MIN_SIDE} pixels.")


class Appendix(Benchmark):
    """Networks at several sizes, scored like HPatches, with the same stores."""

    name = "appendix"
    summary = (
        "appendix compares networks on HPatches as in the paper's appendix: fusion variants, channels, sizes, and "
        "costs."
    )
    example = "data/hpatches --weights a.safetensors --weights b.safetensors"
    settings_class = AppendixSettings
    stored_matches = max(DOTS)
    sift_features = 2000
    settings: AppendixSettings

    def __init__(self, settings: AppendixSettings, messages: Console | None = None) -> None:
        super().__init__(settings, messages)
        self.hpatches = HPatches(HPatchesSettings(roots=settings.roots, top=settings.top, out=settings.out))
        self.pairs, self.notes, self.protocol = self.hpatches.pairs, self.hpatches.notes, self.hpatches.protocol
        self.sizes = sorted(set(settings.sizes), reverse=True)
        self.drawn_pairs = _drawn_pairs(self.pairs, settings.pairs)
        # Notes that arise while pairs are drawn and costs are measured.
        self.later_notes: list[str] = []
        with show_status("Reading the weights...", self.messages.quiet):
            self.networks = read_networks(settings.weights, settings.preset)

    def matchers(self) -> Iterator[tuple[str, PairMatcher]]:
        """Yield the first network at every size, and the other networks and matchers at the largest size."""
        chosen = replace(self.matcher_settings(), size=self.sizes[0])
        others = make_matchers(self.settings.matchers, chosen)
        self.drawn = {_sized(self.networks[0], self.sizes[0]), *(matcher.name for matcher in others)}
        # Networks are loaded one at a time, because all of them together may not fit into memory.
        for size in self.sizes:
            yield _sized(self.networks[0], size), network_matcher(self.networks[0], chosen, size)
        for network in self.networks[1:]:
            yield network.label, network_matcher(network, chosen, self.sizes[0])
        for matcher in others:
            yield matcher.name, matcher

    def store_config(self) -> dict[str, Any]:
        """Return the config of `evaluate hpatches`, whose stores are used here too."""
        return self.hpatches.store_config()

    def score(self, matcher: str, get: GetMatches) -> Any:
        """Compute the scores of HPatches."""
        return self.hpatches.score(matcher, get)

    def report(self, results: Sequence[Result]) -> Report:
        """Return the four comparisons."""
        count, largest = len(self.sizes), self.sizes[0]
        by_size = dict(zip(self.sizes, results, strict=False))
        first = replace(by_size[largest], matcher=self.networks[0].label)
        last = count + len(self.networks) - 1
        at_largest = dict(zip(self.networks, [first, *results[count:last]], strict=True))
        costs = self._measure(by_size[largest])
        compared = [
            compare_fusion(self.hpatches, at_largest, largest),
            compare_channels(self.hpatches, at_largest, largest),
            compare_sizes(self.hpatches, by_size, results[last:]),
            compare_costs(costs),
        ]
        measured = [{"network": n.label, "size": size, "measured": cost} for (n, size), cost in costs.items()]
        return Report(
            tables=[table for report in compared for table in report.tables],
            figures={name: figure for report in compared for name, figure in report.figures.items()},
            notes=[*self.later_notes, *(note for report in compared for note in report.notes)],
            content={"networks": self.networks, "costs": measured},
        )

    def _measure(self, result: Result) -> dict[tuple[WeightsFile, int], Measured | None]:
        """Measure time and memory of every network at every size, on the first pair that can be matched."""
        usable = [pair for pair in self.pairs if pair.names not in result.failures]
        if not usable:
            self.later_notes.append("Time and memory were not measured: no pair could be matched.")
            return {}
        top, device = self.stored, str(result.config["device"])
        chosen = [(network, size) for network in self.networks for size in self.sizes]
        tasks = [Task(network=network, size=size, pair=usable[0], device=device, top=top) for network, size in chosen]
        measured, notes = measure_all(tasks, self.settings.out, self.messages)
        self.later_notes += notes
        return dict(zip(chosen, measured, strict=True))

    def images(self, result: Result, get: GetMatches) -> list[PairImage]:
        """Draw the best matches of the chosen pairs as lines and as dots, correct ones in green."""
        drawn = []
        for number, pair in enumerate(self.drawn_pairs if result.matcher in self.drawn else ()):
            names = f"{pair.name0} and {pair.name1}"
            try:
                image0, image1 = read(pair.path0), read(pair.path1)
            except ImageError as error:
                self.later_notes.append(f"{names} are not drawn: {error}")
                continue
            H, matches = self.hpatches.homographies[pair], get(pair)
            for count in (LINES, *DOTS):
                best = matches.top(count)
                correct = match_errors_px(best, H) <= CORRECT_PX
                if count == LINES:
                    truth = Estimate(kind="homography", matrix=H, inliers=correct)
                    image = draw_matches(image0, image1, best.with_estimate(truth), limit=None, colors="inliers")
                else:
                    image = draw_dots(image0, image1, best, correct)
                score = f"{correct.sum()}/{len(best)} correct within {CORRECT_PX} px"
                drawn.append(
                    PairImage(
                        heading=f"Best {count} matches",
                        caption=f"{result.matcher}, {names}: {score}",
                        image=image,
                        file=f"best{count} {pair.group} {pair.path0.stem}-{pair.path1.stem} {result.matcher}",
                        # Keeps the drawings of a pair by all matchers together.
                        order=(count, number),
                    )
                )
        return drawn


def _drawn_pairs(pairs: Sequence[Pair], path: Path | None) -> list[Pair]:
    """Return the pairs to draw: those of a text file, else the last one of the first sequence of each kind."""
    if path is None:
        last = {pair.group: pair for pair in pairs}
        kinds = {name[:2]: pair for name, pair in reversed(last.items())}
        return [kinds[kind] for kind in sorted(kinds)]
    by_names = {(pair.name0, pair.name1): pair for pair in pairs}
    chosen = from_file([name for names in by_names for name in names], path)
    for names in chosen:
        if names not in by_names:
            raise DataError(f"{path}: {names[0]} and {names[1]} have no homography; pair image 1 with another image.")
    return [by_names[names] for names in chosen]


def _sized(network: WeightsFile, size: int) -> str:
    return f"{network.label}, {size} px"
