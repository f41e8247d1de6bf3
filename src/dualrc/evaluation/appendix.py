"""The comparisons of the paper's appendix on HPatches: fusion variants, channels, sizes, costs, and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dualrc.collection.pairs import from_file
from dualrc.collection.store import MatchStore
from dualrc.config import MIN_SIDE, ResNetConfig
from dualrc.draw import draw_dots, draw_matches
from dualrc.errors import ConfigError, DataError, ImageError, WeightsError
from dualrc.evaluation.benchmark import Result
from dualrc.evaluation.comparisons import (
    Comparison,
    Network,
    compare_channels,
    compare_costs,
    compare_fusion,
    compare_sizes,
    variant_label,
)
from dualrc.evaluation.costs import Measured, Task, measure_all
from dualrc.evaluation.export import Pair, make_folder
from dualrc.evaluation.hpatches import CORRECT_PX, DEFAULT_TOPS, HPatches
from dualrc.evaluation.matchers import DualRC, MatcherSettings, PairMatcher, make_matchers
from dualrc.evaluation.report import Shown, print_tables, write_figures, write_json, write_page
from dualrc.evaluation.run import EvaluationSettings, failure_notes, match_missing, score_stored, versions
from dualrc.files import check_writable
from dualrc.image import read
from dualrc.matches import Estimate, Matches
from dualrc.metrics import match_errors_px
from dualrc.model.checkpoint import bundled, file_hash, load_weights

DEFAULT_SIZES = (1600, 1200, 800)
LINES, DOTS = 500, 6000  # best matches of the pictures; so many are stored
_RESULTS, _PAGE, _FIGURES = "results.json", "report.html", "figures"


@dataclass(frozen=True, kw_only=True)
class AppendixSettings:
    """What is compared, on what, and where the results go."""

    roots: tuple[Path, ...]
    # Each file's own header says which variant it is; none: the weights inside the package.
    weights: tuple[Path, ...] = ()
    preset: str = "default"
    # Others beside the first network: sift, FILE.py:function.
    matchers: tuple[str, ...] = ()
    device: str | None = None
    # Long sides of the picture. All networks and matchers see the largest, the first network all of them.
    sizes: tuple[int, ...] = DEFAULT_SIZES
    # Score the best so many matches; None: 1000 for variants and 2000 for sizes, as the paper does.
    top: int | None = None
    # Pairs to draw, two names a line; None: 1-6 of the first sequence of each kind.
    pairs: Path | None = None
    out: Path
    json: Path | None = None


def evaluate_appendix(
    settings: AppendixSettings, *, screen: Console | None = None, messages: Console | None = None
) -> dict[str, Any]:
    """Run the comparisons and write results.json, figures and report.html to `out`; returns what is in the JSON.

    What an interrupted run has matched and measured is not done again.
    """
    screen, messages = screen or Console(), messages or Console(stderr=True)
    sizes = _checked_sizes(settings)
    benchmark = HPatches(settings.roots, tops=DEFAULT_TOPS if settings.top is None else (settings.top,))
    listed = _listed(benchmark, settings.pairs)
    if settings.json is not None:
        check_writable(settings.json)
    make_folder(settings.out / _FIGURES)
    for name in (_RESULTS, _PAGE):
        check_writable(settings.out / name)
    with messages.status("Reading the weights..."):
        networks = read_networks(settings.weights, settings.preset)
    matching = MatcherSettings(device=settings.device, size=sizes[0], top=max(DOTS, settings.top or 0))
    others = make_matchers(settings.matchers, matching)
    run = _Run(benchmark=benchmark, settings=settings, stored=matching.top, listed=listed, messages=messages)

    first = networks[0]
    by_size = {
        size: run.result(_matcher(first, matching, size), f"{first.label}, {size} px", drawn=size == sizes[0])
        for size in sizes
    }
    at_largest = {first: replace(by_size[sizes[0]], matcher=first.label)}
    for network in networks[1:]:
        at_largest[network] = run.result(_matcher(network, matching, sizes[0]), network.label)
    rivals = [run.result(matcher, matcher.name, drawn=True) for matcher in others]
    costs = run.costs(networks, sizes, by_size[sizes[0]])
    comparisons = [
        compare_fusion(benchmark, at_largest, sizes[0]),
        compare_channels(benchmark, at_largest, sizes[0]),
        compare_sizes(benchmark, by_size, rivals),
        compare_costs(costs),
    ]
    results = [*by_size.values(), *(at_largest[network] for network in networks[1:]), *rivals]
    notes = [*benchmark.notes, *failure_notes(benchmark, results), *run.notes]
    content = {
        "benchmark": "appendix",
        "protocol": benchmark.protocol,
        "settings": settings,
        "versions": versions(),
        "notes": notes + [note for comparison in comparisons for note in comparison.notes],
        "networks": networks,
        "results": results,
        "costs": [{"network": n.label, "size": size, "measured": cost} for (n, size), cost in costs.items()],
        "stores": run.stores,
    }
    # All matchers' pictures of a pair side by side.
    drawn = sorted(run.pictures, key=lambda picture: (picture.count, picture.number))
    _write(settings, content, comparisons, drawn, screen)
    return content


def read_networks(paths: Sequence[Path], preset: str = "default") -> list[Network]:
    """The networks of weights files, each read whole, so that a broken one is refused before anything is matched."""
    if not paths:
        own = bundled(preset)
        if own is None:
            raise WeightsError(f"The package carries no weights for the preset {preset!r}; give files with --weights.")
        paths = [own]
    found: list[Network] = []
    for path in paths:
        config = load_weights(path).config
        backbone = config.backbone
        label = config.preset
        if isinstance(backbone, ResNetConfig):
            label = variant_label(backbone.fusion, backbone.channels)
        network = Network(label=label, config=config, weights=path, weights_hash=file_hash(path))
        for other in found:
            if other.weights_hash == network.weights_hash:
                raise ConfigError(f"{other.weights} and {path} hold the same weights; give each once.")
        found.append(network)
    labels = [network.label for network in found]
    # Where several files hold the same variant, only their paths tell them apart.
    return [n if labels.count(n.label) == 1 else replace(n, label=f"{n.label}, {n.weights}") for n in found]


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A picture of a listed pair's best matches."""

    count: int
    number: int  # of the pair in the list
    name: str  # of its file
    shown: Shown


@dataclass(kw_only=True)
class _Run:
    """Matches, scores, measures and draws, and gathers what the report shows."""

    benchmark: HPatches
    settings: AppendixSettings
    stored: int  # matches of a pair
    listed: Sequence[Pair]
    messages: Console
    stores: list[str] = field(default_factory=list)
    pictures: list[_Drawn] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def result(self, matcher: PairMatcher, label: str, *, drawn: bool = False) -> Result:
        """A matcher's scores on all pairs, with pictures of the listed ones where asked for."""
        # The same stores as those of `evaluate hpatches`.
        same = EvaluationSettings(benchmark="hpatches", roots=self.settings.roots, out=self.settings.out)
        done = match_missing(self.benchmark, matcher, same, self.stored, self.messages)
        self.stores.append(done.store.name)
        with MatchStore(done.store) as store:
            result = score_stored(self.benchmark, matcher, store, self.messages)
            for number, pair in enumerate(self.listed if drawn else ()):
                matches = store.get(pair.name0, pair.name1)
                assert matches is not None  # every pair was exported, failed ones too
                self._draw(number, matches, label)
        return replace(result, matcher=label)

    def costs(
        self, networks: Sequence[Network], sizes: Sequence[int], result: Result
    ) -> dict[tuple[Network, int], Measured | None]:
        """Time and memory of every network at every size, on the first pair that can be matched."""
        usable = [pair for pair in self.benchmark.pairs if f"{pair.name0} {pair.name1}" not in result.failures]
        if not usable:
            self.notes.append("Time and memory are not measured: no pair could be matched.")
            return {}
        pair, device = usable[0], str(result.config["device"])
        chosen = [(network, size) for network in networks for size in sizes]
        tasks = [
            Task(
                preset=network.config.preset,
                weights=str(network.weights),
                device=device,
                size=size,
                top=self.stored,
                path0=str(pair.path0),
                path1=str(pair.path1),
            )
            for network, size in chosen
        ]
        measured, notes = measure_all(tasks, self.settings.out, self.messages)
        self.notes += notes
        return dict(zip(chosen, measured, strict=True))

    def _draw(self, number: int, matches: Matches, label: str) -> None:
        pair = self.listed[number]
        names = f"{pair.name0} and {pair.name1}"
        try:
            image0, image1 = read(pair.path0), read(pair.path1)
        except ImageError as error:
            self.notes.append(f"{names} are not drawn: {error}")
            return
        H = self.benchmark.homographies[pair]
        for count in (LINES, DOTS):
            best = matches.top(count)
            correct = match_errors_px(best, H) <= CORRECT_PX
            if count == LINES:
                truth = Estimate(kind="homography", matrix=H, inliers=correct)
                picture = draw_matches(image0, image1, best.with_estimate(truth), limit=None, colors="inliers")
            else:
                picture = draw_dots(image0, image1, best, correct)
            words = f"{label}, {names}: {correct.sum()}/{len(best)} correct within {CORRECT_PX} px"
            shown = Shown(heading=f"Best {count} matches", caption=words, picture=picture)
            name = f"best{count} {pair.group} {pair.path0.stem}-{pair.path1.stem} {label}"
            self.pictures.append(_Drawn(count=count, number=number, name=name, shown=shown))


def _checked_sizes(settings: AppendixSettings) -> list[int]:
    """The sizes, largest first."""
    if not settings.roots:
        raise ConfigError("Give the folder of the data set.")
    if settings.top is not None and settings.top < 1:
        raise ConfigError(f"top = {settings.top} leaves nothing to score; give 1 or more.")
    if "dualrc" in settings.matchers:
        raise ConfigError("dualrc is what the appendix compares; leave that --matcher out, and give --weights.")
    sizes = sorted(set(settings.sizes), reverse=True)
    if not sizes or sizes[-1] < MIN_SIDE:
        raise ConfigError(f"Sizes {sizes} won't do; give one or several of at least {MIN_SIDE} pixels.")
    return sizes


def _listed(benchmark: HPatches, path: Path | None) -> list[Pair]:
    """The pairs to draw."""
    by_names = {(pair.name0, pair.name1): pair for pair in benchmark.pairs}
    if path is None:
        last = {pair.group: pair for pair in benchmark.pairs}  # of each sequence, usually 1-6: the hardest
        kinds = {name[:2]: pair for name, pair in reversed(last.items())}
        return [kinds[kind] for kind in sorted(kinds)]
    known = [name for names in by_names for name in names]
    chosen = []
    for names in from_file(known, path):
        if names not in by_names:
            raise DataError(f"{path}: {names[0]} and {names[1]} have no homography; pair picture 1 with another.")
        chosen.append(by_names[names])
    return chosen


def _matcher(network: Network, common: MatcherSettings, size: int) -> PairMatcher:
    matcher = DualRC(replace(common, preset=network.config.preset, weights=network.weights, size=size))
    # Stores of other networks and sizes are no older ones of this.
    variant = network.config.preset if network.variant is None else "{}{}".format(*network.variant)
    matcher.name = f"dualrc-{variant}-{size}-{network.weights_hash[:6]}"
    return matcher


def _write(
    settings: AppendixSettings,
    content: dict[str, Any],
    comparisons: Sequence[Comparison],
    drawn: Sequence[_Drawn],
    screen: Console,
) -> None:
    tables = [comparison.table for comparison in comparisons]
    figures = {name: figure for comparison in comparisons for name, figure in comparison.figures.items()}
    for path in (settings.out / _RESULTS, *filter(None, [settings.json])):
        write_json(path, content)
    pictures = {f"{index:02d} {item.name}": item.shown.picture for index, item in enumerate(drawn, start=1)}
    write_figures(settings.out / _FIGURES, {**figures, **pictures})
    write_page(
        settings.out / _PAGE,
        title="dualrc evaluate appendix",
        tables=tables,
        figures=figures,
        shown=[item.shown for item in drawn],
        notes=content["notes"],
        config={key: content[key] for key in ("protocol", "settings", "versions", "networks")},
    )
    print_tables(tables, content["notes"], screen)
    screen.print(f"Written: {settings.out / _PAGE}, {_RESULTS}, {_FIGURES}/", highlight=False, soft_wrap=True)
