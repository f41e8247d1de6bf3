"""The evaluation pipeline: open the benchmark, match missing pairs, score, and report."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from dualrc.collection.matching import LOCK
from dualrc.collection.progress import show_progress
from dualrc.collection.store import MatchStore
from dualrc.evaluation.benchmark import Benchmark, Cost, Result, open_benchmark
from dualrc.evaluation.export import Pair, export
from dualrc.evaluation.matchers import PairMatcher
from dualrc.evaluation.report import PairImage, print_tables, write_figures, write_page
from dualrc.files import check_writable, make_folder, only_run, to_json, write_json
from dualrc.matches import Matches
from dualrc.provenance import versions

_RESULTS, _PAGE, _FIGURES = "results.json", "report.html", "figures"


def evaluate(
    name: str, *, screen: Console | None = None, messages: Console | None = None, **options: Any
) -> dict[str, Any]:
    """Run a benchmark, write results.json, figures and report.html to `out`, and return the content of the JSON file.

    `options`: fields of the benchmark's settings. Tables go to `screen`, progress goes to `messages`. Pairs that an
    interrupted run has matched are not matched again.
    """
    screen, messages = screen or Console(), messages or Console(stderr=True)
    benchmark = open_benchmark(name, options, messages)
    settings = benchmark.settings
    # Report an output that cannot be written before the slow steps.
    make_folder(settings.out / _FIGURES)
    for file in (_RESULTS, _PAGE):
        check_writable(settings.out / file)
    with only_run(settings.out / LOCK):
        return _evaluate(benchmark, screen, messages)


def _evaluate(benchmark: Benchmark, screen: Console, messages: Console) -> dict[str, Any]:
    settings = benchmark.settings
    results, images, stores = list[Result](), list[PairImage](), list[str]()
    for label, matcher in benchmark.matchers():
        config = benchmark.store_config()
        path = export(benchmark.pairs, matcher, settings.out, config=config, top=benchmark.stored, console=messages)
        with MatchStore(path) as store:
            results.append(_score(benchmark, label, matcher, store))
            images += benchmark.images(results[-1], partial(_get, store))
        stores.append(path.name)
    results += benchmark.stored_results()
    report, images = benchmark.report(results), sorted(images, key=lambda item: item.order)
    differences = [settings.differences] if settings.protocol == "paper" and settings.differences else []
    notes = [*differences, *benchmark.notes, *_failure_notes(benchmark, results), *report.notes]
    config = {
        "protocol": benchmark.protocol,
        "settings": settings,
        "versions": versions("poselib", "opencv-python-headless"),
    }
    content = {
        "benchmark": benchmark.name,
        **config,
        "notes": notes,
        "results": results,
        **report.content,
        "stores": stores,
    }
    write_json(settings.out / _RESULTS, to_json(content))
    numbered = {f"{number:02d} {item.file}": item.image for number, item in enumerate(images, start=1)}
    write_figures(settings.out / _FIGURES, {**report.figures, **numbered})
    write_page(
        settings.out / _PAGE,
        title=f"dualrc evaluate {benchmark.name}",
        report=report,
        images=images,
        notes=notes,
        config={**config, **report.content, "matchers": {result.matcher: result.config for result in results}},
    )
    print_tables(report.tables, notes, screen)
    screen.print(f"Written: {settings.out / _PAGE}, {_RESULTS}, {_FIGURES}/", highlight=False, soft_wrap=True)
    return content


def _score(benchmark: Benchmark, label: str, matcher: PairMatcher, store: MatchStore) -> Result:
    """Score a matcher from its store."""
    infos: dict[str, Any] = {}
    with show_progress(benchmark.messages.quiet) as tell:
        total, done = len(benchmark.pairs), 0

        def get(pair: Pair) -> Matches:
            nonlocal done
            done += 1
            tell(f"{matcher.name}, scoring", min(done, total), total)
            matches = _get(store, pair)
            infos[pair.names] = matches.info
            return matches

        benchmark.progress = tell
        figures = benchmark.score(label, get)
    failures = {names: str(info["error"]) for names, info in infos.items() if "error" in info}
    cost = Cost.of(list(infos.values()))
    return Result(matcher=label, cost=cost, failures=failures, figures=figures, config=matcher.config)


def _get(store: MatchStore, pair: Pair) -> Matches:
    found = store.get(pair.name0, pair.name1)
    # The store has every pair, including failed ones.
    assert found is not None
    return found


def _failure_notes(benchmark: Benchmark, results: Sequence[Result]) -> list[str]:
    """Return how many pairs each matcher could not match, with an example."""
    notes = []
    for result in results:
        if result.failures:
            pair, reason = next(iter(result.failures.items()))
            count = f"{len(result.failures)} of {len(benchmark.pairs)} pairs could not be matched and count as failures"
            notes.append(f"{result.matcher}: {count}, such as {pair}: {reason}")
    return notes
