"""A whole evaluation: find the data, match what is missing, score, and report."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console
from rich.progress import Progress

from dualrc.collection.store import MatchStore
from dualrc.errors import ConfigError, ImageError
from dualrc.evaluation import aachen
from dualrc.evaluation.benchmark import Benchmark, Result
from dualrc.evaluation.export import Exported, Pair, export, make_folder, progress_bar
from dualrc.evaluation.hpatches import DEFAULT_TOPS, HPatches
from dualrc.evaluation.inloc import InLoc, InLocSettings
from dualrc.evaluation.matchers import MatcherSettings, PairMatcher, make_matchers
from dualrc.evaluation.pose import DEFAULT_TOP, Pose
from dualrc.evaluation.report import Shown, print_tables, write_figures, write_json, write_page
from dualrc.files import check_writable
from dualrc.matches import Matches

BenchmarkName = Literal["hpatches", "pose", "inloc", "aachen"]

# Stored for every pair, so that the usual limits on the number of matches can be scored from one export.
_STORED = 4000
_SIFT_FEATURES = {"hpatches": 2000, "pose": 4000, "inloc": 8000, "aachen": 8000}
_BEST, _WORST = 2, 3
_RESULTS, _PAGE, _FIGURES = "results.json", "report.html", "figures"


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is evaluated, on what, and where the results go."""

    benchmark: BenchmarkName
    roots: tuple[Path, ...]
    # dualrc, sift, sift-mutual, sift-ratio, or FILE.py:function.
    matchers: tuple[str, ...] = ("dualrc",)
    preset: str = "default"
    weights: Path | None = None
    device: str | None = None
    # Long side that dualrc and SIFT see.
    size: int | None = None
    # Score the best so many matches; None: 1000 and 2000 for hpatches, 4000 for the others.
    top: int | None = None
    # Columns and rows that pictures 2 to 6 of a sequence lose on the left and at the top.
    crop: tuple[int, int] | None = None
    # True poses of Aachen's queries: name qw qx qy qz tx ty tz; InLoc's reference poses: .mat.
    truth: Path | None = None
    inloc: InLocSettings = field(default_factory=InLocSettings)
    out: Path
    json: Path | None = None


def evaluate(
    settings: EvaluationSettings, *, screen: Console | None = None, messages: Console | None = None
) -> dict[str, Any]:
    """Run a benchmark and write results.json, figures and report.html to `out`; returns what is in the JSON.

    Tables go to the screen, progress to the messages; what an interrupted run has matched is not matched again.
    """
    screen, messages = screen or Console(), messages or Console(stderr=True)
    benchmark = _benchmark(settings)
    if settings.json is not None:
        check_writable(settings.json)
    make_folder(settings.out / _FIGURES)
    for name in (_RESULTS, _PAGE):
        check_writable(settings.out / name)
    stored = max(_STORED, settings.top or 0)
    matchers = make_matchers(
        settings.matchers if settings.roots else (),
        MatcherSettings(
            preset=settings.preset,
            weights=settings.weights,
            device=settings.device,
            size=settings.size,
            top=stored,
            sift_features=_SIFT_FEATURES[settings.benchmark],
        ),
    )
    results, exports, shown = [], [], []
    for matcher in matchers:
        exported = match_missing(benchmark, matcher, settings, stored, messages)
        with MatchStore(exported.store) as store:
            result = score_stored(benchmark, matcher, store, messages)
            shown += _best_and_worst(benchmark, result, store)
        results.append(result)
        exports.append(exported)
    if isinstance(benchmark, InLoc):
        results += benchmark.score_lists()
    return _report(benchmark, settings, results, exports, shown, screen)


def parse_crop(text: str) -> tuple[int, int]:
    """Columns and rows, written as X,Y."""
    try:
        left, top = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"A crop of {text!r} is not one; write two whole numbers X,Y.") from error
    return left, top


def _benchmark(settings: EvaluationSettings) -> Benchmark:
    if settings.benchmark not in get_args(BenchmarkName):
        known = ", ".join(get_args(BenchmarkName))
        raise ConfigError(f"There is no benchmark {settings.benchmark!r}; choose one of {known}.")
    if not settings.roots and not settings.inloc.results:
        raise ConfigError("Give the folder of the data set.")
    if settings.top is not None and settings.top < 1:
        raise ConfigError(f"top = {settings.top} leaves nothing to score; give 1 or more.")
    if settings.truth is not None and settings.benchmark not in ("aachen", "inloc"):
        raise ConfigError("--truth is for aachen and inloc; leave it out.")
    if settings.inloc != InLocSettings() and settings.benchmark != "inloc":
        raise ConfigError("--shortlist, --candidates, --verify and --results are for inloc; leave them out.")
    if settings.crop is not None and min(settings.crop) < 0:
        raise ConfigError(f"A crop of {settings.crop[0]},{settings.crop[1]} is not one; give two numbers from 0 on.")
    if settings.benchmark == "hpatches":
        tops = DEFAULT_TOPS if settings.top is None else (settings.top,)
        return HPatches(settings.roots, tops=tops, crop=settings.crop)
    if settings.crop is not None:
        raise ConfigError("--crop is for hpatches; leave it out.")
    if settings.benchmark == "inloc":
        top = settings.top or DEFAULT_TOP
        return InLoc(settings.roots, settings.inloc, truth=settings.truth, top=top, out=settings.out)
    if settings.benchmark == "aachen":
        top = settings.top or aachen.DEFAULT_TOP
        return aachen.open_aachen(settings.roots, out=settings.out, truth=settings.truth, top=top)
    return Pose(settings.roots, top=settings.top or DEFAULT_TOP)


def match_missing(
    benchmark: Benchmark, matcher: PairMatcher, settings: EvaluationSettings, stored: int, messages: Console
) -> Exported:
    """Match what a matcher's store lacks, and say what was there."""
    config = {
        "benchmark": benchmark.name,
        "roots": [str(root.resolve()) for root in settings.roots],
        "crop": None if settings.crop is None else list(settings.crop),
    }
    exported = export(benchmark.pairs, matcher, settings.out, config=config, top=stored, console=messages)
    if exported.resumed:
        messages.print(
            f"{matcher.name}: {exported.resumed} pairs were in {exported.store.name}, {exported.matched} new."
        )
    for other in exported.others:
        messages.print(f"{matcher.name}: {other} was made with another config or data; it is not used.", style="yellow")
    return exported


def score_stored(benchmark: Benchmark, matcher: PairMatcher, store: MatchStore, messages: Console) -> Result:
    """A matcher's scores by its store."""
    with progress_bar(messages) as progress:
        task = progress.add_task(f"{matcher.name}, scoring", total=len(benchmark.pairs))

        def get(pair: Pair) -> Matches:
            progress.advance(task)
            return _get(store, pair)

        benchmark.tell = _steps(progress)
        return replace(benchmark.score(matcher.name, get), config=matcher.config)


def _steps(progress: Progress) -> Callable[[str, int, int], None]:
    """Shows the steps of a long score, each in a line."""
    tasks: dict[str, Any] = {}

    def tell(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = progress.add_task(step, total=total)
        progress.update(tasks[step], completed=done, total=total)

    return tell


def _get(store: MatchStore, pair: Pair) -> Matches:
    found = store.get(pair.name0, pair.name1)
    assert found is not None  # every pair was exported, failed ones too
    return found


def _best_and_worst(benchmark: Benchmark, result: Result, store: MatchStore) -> list[Shown]:
    """Pictures of a few pairs; one that can't be read is told by its score only."""
    ranking = benchmark.ranking(result)
    best = ranking[:_BEST]
    worst = [entry for entry in ranking[-_WORST:] if entry not in best]
    shown = []
    for label, entries in (("best", best), ("worst", worst)):
        for pair, words in entries:
            try:
                picture = benchmark.draw(pair, _get(store, pair))
            except ImageError:
                continue
            caption = f"{pair.name0} and {pair.name1}: {words}"
            shown.append(Shown(heading=f"{result.matcher}: {label} pairs", caption=caption, picture=picture))
    return shown


def _report(
    benchmark: Benchmark,
    settings: EvaluationSettings,
    results: Sequence[Result],
    exports: Sequence[Exported],
    shown: Sequence[Shown],
    screen: Console,
) -> dict[str, Any]:
    tables, notes = benchmark.tables(results), [*benchmark.notes, *failure_notes(benchmark, results)]
    figures = benchmark.curves(results)
    content = {
        "benchmark": benchmark.name,
        "protocol": benchmark.protocol,
        "settings": settings,
        "versions": versions(),
        "notes": notes,
        "results": results,
        "stores": [exported.store.name for exported in exports],
    }
    write_json(settings.out / _RESULTS, content)
    if settings.json is not None:
        write_json(settings.json, content)
    pictures = {f"{index:02d} {item.heading}": item.picture for index, item in enumerate(shown, start=1)}
    write_figures(settings.out / _FIGURES, {**figures, **pictures})
    config = {key: content[key] for key in ("protocol", "settings", "versions")}
    config["matchers"] = {result.matcher: result.config for result in results}
    write_page(
        settings.out / _PAGE,
        title=f"dualrc evaluate {benchmark.name}",
        tables=tables,
        figures=figures,
        shown=shown,
        notes=notes,
        config=config,
    )
    print_tables(tables, notes, screen)
    screen.print(f"Written: {settings.out / _PAGE}, {_RESULTS}, {_FIGURES}/", highlight=False, soft_wrap=True)
    return content


def failure_notes(benchmark: Benchmark, results: Sequence[Result]) -> list[str]:
    """How many pairs each matcher could not match, with an example."""
    notes = []
    for result in results:
        if result.failures:
            pair, reason = next(iter(result.failures.items()))
            count = f"{len(result.failures)} of {len(benchmark.pairs)} pairs"
            notes.append(
                f"{result.matcher}: {count} could not be matched and count as failures, such as {pair}: {reason}"
            )
    return notes


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in ("dualrc", "torch", "numpy", "poselib", "opencv-python-headless"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
