"""Matching of the images of a folder to a store; a second run continues the first."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualrc.collection import pairs
from dualrc.collection.allocation import start_executor
from dualrc.collection.config import CollectionConfig
from dualrc.collection.executor import Executor, carry_out
from dualrc.collection.plan import Plan, Task, in_blocks, in_chunks
from dualrc.collection.progress import show_progress
from dualrc.collection.retrieval import read_descriptors, write_descriptors
from dualrc.collection.store import MatchStore, Names
from dualrc.collection.worker import Failure, Result
from dualrc.errors import DataError
from dualrc.files import check_writable, content_hashes, make_folder, only_run
from dualrc.image import find_images
from dualrc.matcher import Matcher, load
from dualrc.matches import Matches
from dualrc.types import FloatArray

logger = logging.getLogger(__name__)
# Lock file in the output folder of a run.
LOCK = ".dualrc.lock"
# Maximum number of pairs in a block.
_BLOCK = 256
# Minimum number of blocks per worker; with fewer, the last block would keep the other workers waiting.
_SHARE = 8
# Interval at which descriptors are saved.
_SAVE_EVERY_S = 30.0
# Number of images above which hashing shows progress.
_MANY = 500
# Interval at which the run time is saved.
_COUNT_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class CollectionResult:
    """Location of the matches, and statistics of the run."""

    # SQLite file of the matches; `MatchStore` reads it.
    store: Path
    # All images of the folder.
    names: tuple[str, ...]
    # All requested pairs.
    pairs: tuple[Names, ...]
    # The reason for each image that cannot be used.
    broken: dict[str, str]
    # The reason for each pair that failed although both images can be used.
    failed: dict[Names, str]
    # Number of pairs matched in this run.
    matched: int
    # Number of pairs matched in earlier runs.
    skipped: int
    # Number of feature extractions.
    extracted: int
    # Time of this run.
    seconds: float
    # Time of all runs that wrote to the store.
    seconds_all_runs: float


def match_collection(
    images: str | Path, out: str | Path, config: CollectionConfig | None = None, *, quiet: bool = False
) -> CollectionResult:
    """Match the images of a folder, except pairs that are already in `out`/matches.sqlite.

    An image whose content has changed is matched again. Unless `quiet`, progress is shown: a bar on a terminal, else
    lines in the log (`logging`, level INFO).
    """
    start = time.monotonic()
    images, out, config = Path(images), Path(out), config or CollectionConfig()
    names = find_images(images)
    if len(names) < 2:
        raise DataError(f"{images} has only one image; pass a folder with at least two.")
    # This matcher, on the CPU, only checks settings and describes them; each worker loads its own.
    settings: dict[str, Any] = {key: getattr(config, key) for key in ("size", "top", "min_score", "quality")}
    # Most pairs of a collection have nothing in common, and a search over tilted views would find that again.
    settings["max_tilt"] = 1.0
    matcher = load(config.preset, weights=config.weights, device="cpu", **settings)
    check_writable(make_folder(out) / "matches.sqlite")
    run = _Run(images, names, config, matcher, quiet=quiet)
    with only_run(out / LOCK), MatchStore(out / "matches.sqlite", run.depends_on) as store, closing(run):
        with _counting(store, start) as count:
            chosen = pairs.choose(names, config, lambda: run.describe(out / "descriptors.npz"))
            if not chosen:
                reason = next(iter(run.broken.values()), "none were chosen").rstrip(".")
                raise DataError(f"{images} has no two images to match ({reason}); repair or add images.")
            run.forget_changed(store, chosen)
            missing = store.missing(chosen)
            run.match(missing, store, count, total=len(chosen))
        seconds_all_runs = store.seconds
    failed = len(run.failed)
    return CollectionResult(
        store=store.path,
        names=tuple(names),
        pairs=tuple(chosen),
        broken=run.broken,
        failed={pair: reason for pair, reason in run.failed.items() if not run.broken.keys() & set(pair)},
        matched=len(missing) - failed,
        skipped=len(chosen) - len(missing),
        extracted=run.extracted,
        seconds=time.monotonic() - start,
        seconds_all_runs=seconds_all_runs,
    )


@contextmanager
def _counting(store: MatchStore, start: float) -> Iterator[Callable[[], None]]:
    """Yield a function that adds the time of a run to its store at intervals, so that a killed run counts too."""

    def count(every: float = _COUNT_EVERY_S) -> None:
        nonlocal start
        if (seconds := time.monotonic() - start) >= every:
            store.add_seconds(seconds)
            start += seconds

    try:
        yield count
    finally:
        count(0.0)


class _Run:
    """Workers, which start when the first task arrives, and a record of failures."""

    def __init__(
        self, images: Path, names: Sequence[str], config: CollectionConfig, matcher: Matcher, *, quiet: bool
    ) -> None:
        self.images, self.names = images, names
        self.config, self.matcher, self.quiet = config, matcher, quiet
        self._contents: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.failed: dict[Names, str] = {}
        self.extracted = 0
        self._executor: Executor | None = None
        self._idle: set[int] = set()

    @property
    def depends_on(self) -> dict[str, Any]:
        """Settings that matches depend on.

        The device and the memory limit are left out, so that a run can continue on another machine. The info of each
        pair names the device, and the size of images that were scaled down to fit into memory. The largest tilt is the
        same for all collections.
        """
        info = self.matcher.info
        fields = {key: value for key, value in info["matcher"].items() if key not in ("max_memory", "max_tilt")}
        # Another calibration gives the same matches other scores.
        made = {key: info[key] for key in ("weights", "calibration") if info[key] is not None or key == "weights"}
        return {**made, "network": info["network"], "matcher": fields}

    def close(self) -> None:
        """End the workers."""
        if self._executor is not None:
            self._executor.close()

    def describe(self, file: Path) -> dict[str, FloatArray]:
        """Return the descriptors of the readable images, cached in a file."""
        contents = self._hashes(self.names)
        known = read_descriptors(file, self.depends_on, contents)
        found = {name: known[name] for name in self.names if name in known}
        missing = [name for name in self.names if name not in found]
        saved = time.monotonic()

        def handle(task: Task, result: Result) -> None:
            nonlocal saved
            if isinstance(result, Failure):
                self._report(task, result)
            elif not isinstance(result, Matches):
                found[task[0]] = result
            if time.monotonic() - saved > _SAVE_EVERY_S:
                write_descriptors(file, self.depends_on, found, contents)
                saved = time.monotonic()

        self._carry_out("Describing", lambda size: in_chunks(missing, size), (len(found), len(self.names)), handle)
        if missing:
            write_descriptors(file, self.depends_on, found, contents)
        return {name: found[name] for name in self.names if name in found}

    def forget_changed(self, store: MatchStore, chosen: Sequence[Names]) -> None:
        """Remove stored pairs of images whose files have changed."""
        changed = store.forget_changed(self._hashes(dict.fromkeys(name for pair in chosen for name in pair)))
        if changed:
            some = ", ".join(changed[:5]) + (", ..." if changed[5:] else "")
            logger.warning("Matching again because images changed (%d): %s.", len(changed), some)

    def match(self, missing: Sequence[Names], store: MatchStore, count: Callable[[], None], *, total: int) -> None:
        """Match pairs and add them to the store."""

        def handle(task: Task, result: Result) -> None:
            pair = (task[0], task[1])
            if isinstance(result, Failure):
                self._report(task, result)
                self.failed[pair] = result.reason
                result = Matches.none({"error": result.reason})
            assert isinstance(result, Matches)
            store.put(*pair, result)
            count()

        self._carry_out("Matching", lambda size: in_blocks(missing, size), (total - len(missing), total), handle)

    def _carry_out(
        self,
        step: str,
        blocks: Callable[[int], list[list[Task]]],
        count: tuple[int, int],
        handle: Callable[[Task, Result], None],
    ) -> None:
        """Run tasks in blocks of a suitable size; `count` is the number of finished tasks and the total."""
        done, total = count
        with show_progress(self.quiet) as tell:
            tell(step, done, total)
            if done == total:
                return
            if self._executor is None:
                self._executor = start_executor(self.images, self.names, self.config, self.matcher)

            def each(task: Task, result: Result) -> None:
                nonlocal done
                handle(task, result)
                done += 1
                tell(step, done, total)

            size = min(_BLOCK, math.ceil((total - done) / (_SHARE * self._executor.count)))
            plan = Plan(blocks(size), at_once=self._executor.at_once)
            self.extracted += carry_out(self._executor, plan, self._idle, each)

    def _report(self, task: Task, failure: Failure) -> None:
        """Log a failure; failures of an image are logged once."""
        if failure.image is None:
            logger.warning("%s failed: %s", " and ".join(task), failure.reason)
        elif failure.image not in self.broken:
            self.broken[failure.image] = failure.reason
            logger.warning("Left out: %s", failure.reason)

    def _hashes(self, names: Iterable[str]) -> dict[str, str]:
        """Return the content hashes of these images; each file is read once."""
        missing = {name: self.images / name for name in names if name not in self._contents}
        with show_progress(self.quiet or len(missing) < _MANY) as tell:
            hashes = content_hashes(missing, lambda done: tell("Looking for changes", done, len(missing)))
        self._contents |= hashes
        return {name: self._contents[name] for name in names}
