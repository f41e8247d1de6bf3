"""A whole evaluation: find the data, match what is missing, score, and report."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console

from dualrc.collection.store import MatchStore
from dualrc.errors import ConfigError, ImageError
from dualrc.evaluation.benchmark import Benchmark, Result
from dualrc.evaluation.export import Exported, Pair, export, make_folder, progress_bar
from dualrc.evaluation.hpatches import DEFAULT_TOPS, HPatches
from dualrc.evaluation.matchers import MatcherSettings, PairMatcher, make_matchers
from dualrc.evaluation.pose import DEFAULT_TOP, Pose
from dualrc.evaluation.report import Shown, print_tables, write_figures, write_json, write_page
from dualrc.files import check_writable
from dualrc.matches import Matches

BenchmarkName = Literal["hpatches", "pose"]

# Stored for every pair, so that the usual limits on the number of matches can be scored from one export.
_STORED = 4000
_SIFT_FEATURES = {"hpatches": 2000, "pose": 4000}
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
    # Score the best so many matches; None: 1000 and 2000 for hpatches, 4000 for pose.
    top: int | None = None
    # Columns and rows that pictures 2 to 6 of a sequence lose on the left and at the top.
    crop: tuple[int, int] | None = None
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
        settings.matchers,
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
        exported = _exported(benchmark, matcher, settings, stored, messages)
        with MatchStore(exported.store) as store:
            result = _scored(benchmark, matcher, store, messages)
            shown += _best_and_worst(benchmark, result, store)
        results.append(result)
        exports.append(exported)
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
    if not settings.roots:
        raise ConfigError("Give the folder of the data set.")
    if settings.top is not None and settings.top < 1:
        raise ConfigError(f"top = {settings.top} leaves nothing to score; give 1 or more.")
    if settings.crop is not None and min(settings.crop) < 0:
        raise ConfigError(f"A crop of {settings.crop[0]},{settings.crop[1]} is not one; give two numbers from 0 on.")
    if settings.benchmark == "hpatches":
        tops = DEFAULT_TOPS if settings.top is None else (settings.top,)
        return HPatches(settings.roots, tops=tops, crop=settings.crop)
    if settings.crop is not None:
        raise ConfigError("--crop is for hpatches; leave it out.")
    return Pose(settings.roots, top=settings.top or DEFAULT_TOP)


def _exported(
    benchmark: Benchmark, matcher: PairMatcher, settings: EvaluationSettings, stored: int, messages: Console
) -> Exported:
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


def _scored(benchmark: Benchmark, matcher: PairMatcher, store: MatchStore, messages: Console) -> Result:
    with progress_bar(messages) as progress:
        task = progress.add_task(f"{matcher.name}, scoring", total=len(benchmark.pairs))

        def get(pair: Pair) -> Matches:
            progress.advance(task)
            return _get(store, pair)

        return replace(benchmark.score(matcher.name, get), config=matcher.config)


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
    tables, notes = benchmark.tables(results), [*benchmark.notes, *_failure_notes(benchmark, results)]
    figures = benchmark.curves(results)
    content = {
        "benchmark": benchmark.name,
        "protocol": benchmark.protocol,
        "settings": settings,
        "versions": _versions(),
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


def _failure_notes(benchmark: Benchmark, results: Sequence[Result]) -> list[str]:
    notes = []
    for result in results:
        if result.failures:
            pair, reason = next(iter(result.failures.items()))
            count = f"{len(result.failures)} of {len(benchmark.pairs)} pairs"
            notes.append(
                f"{result.matcher}: {count} could not be matched and count as failures, such as {pair}: {reason}"
            )
    return notes


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("dualrc", "torch", "numpy", "poselib", "opencv-python-headless"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
