"""A worker with one matcher and a feature cache; it runs in a local process or in a Ray actor."""

import itertools
import os
import pickle
import queue
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dualrc.collection.plan import Task
from dualrc.collection.retrieval import global_descriptor
from dualrc.errors import DualRCError, ImageError, WeightsError
from dualrc.matcher import ImageFeatures, Matcher, load
from dualrc.matcher.cache import LruCache
from dualrc.matcher.prefetch import ReadAhead
from dualrc.matches import Matches
from dualrc.types import FloatArray

# Info stored per pair; all other info is the same for all pairs and part of the store's config.
_INFO = ("device", "precision", "network_size0", "network_size1", "zoom", "warning")
# Threads that read images ahead of a GPU.
_READERS = 4


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker, independent of the machine it runs on."""

    # Folder of the images.
    images: str
    preset: str
    # Content of a weights file; None: the bundled weights.
    weights: bytes | None
    weights_hash: str
    device: str
    # Fields of MatcherConfig.
    matcher: Mapping[str, Any]
    # Size of the feature cache.
    cache_bytes: int
    # CPU threads.
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason why a task has no result."""

    reason: str
    # Name of the image that caused it, if any.
    image: str | None = None


Result = Matches | FloatArray | Failure


def at_once(device: str) -> int:
    """Return the number of pairs that a worker on this device matches in a batch."""
    return 8 if device.startswith("cuda") else 1


class Worker:
    """Matches pairs and computes image descriptors."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.images = Path(settings.images)
        self.matcher = _load(settings)
        # The workers of a machine share its cores.
        torch.set_num_threads(settings.threads)
        self.at_once = at_once(settings.device)
        # Images are decoded while the GPU works.
        self.prefetches = self.matcher.device.type == "cuda"
        self.extracted = 0
        limit = settings.cache_bytes
        if self.matcher.device.type == "cuda":
            limit = min(limit, torch.cuda.mem_get_info(self.matcher.device)[0] // 2)
        self._kept: LruCache[str, ImageFeatures] = LruCache(limit)

    def sees(self, sizes: Mapping[str, int]) -> bool:
        """Return whether this machine can read these images, with the given sizes in bytes."""
        try:
            return all((self.images / name).stat().st_size == size for name, size in sizes.items())
        except OSError:
            return False

    def answers(self, tasks: Sequence[Task], contents: Mapping[str, bytes] | None = None) -> Iterator[tuple[str, Any]]:
        """Yield ("result", (task, result)) for each task, then ("ready", number of images that were read)."""
        before = self.extracted
        for answer in self.work(tasks, contents):
            yield "result", answer
        yield "ready", self.extracted - before

    def work(self, tasks: Sequence[Task], contents: Mapping[str, bytes] | None = None) -> Iterator[tuple[Task, Result]]:
        """Yield the results of tasks in order; `contents` are the image files if this machine cannot read them."""
        with tempfile.TemporaryDirectory(prefix="dualrc-") as folder:
            paths = {name: self.images / name for task in tasks for name in task}
            for number, (name, content) in enumerate((contents or {}).items()):
                paths[name] = Path(folder) / str(number)
                paths[name].write_bytes(content)
            with ReadAhead(_READERS) as reader:
                for start in range(0, len(tasks), self.at_once):
                    if self.prefetches:
                        for name in itertools.chain.from_iterable(tasks[start : start + 2 * self.at_once]):
                            if name not in self._kept:
                                reader.ask(paths[name])
                    yield from self._batch(tasks[start : start + self.at_once], paths, reader)

    def _batch(
        self, tasks: Sequence[Task], paths: Mapping[str, Path], reader: ReadAhead
    ) -> Iterator[tuple[Task, Result]]:
        ready: dict[Task, list[ImageFeatures]] = {}
        for task in tasks:
            features: list[ImageFeatures] = []
            for name in task:
                try:
                    features.append(self._features(name, paths[name], reader))
                except ImageError as error:
                    yield task, Failure(reason=str(error), image=name)
                    break
            else:
                ready[task] = features
        for task in [task for task in ready if len(task) == 1]:
            yield task, global_descriptor(ready.pop(task)[0])
        if self.matcher.config.quality != "standard":
            # The higher qualities read the images again; their features only prove that they are readable.
            for task in ready:
                yield task, self._alone(self.matcher.match, *(paths[name] for name in task))
            return
        pairs = [(features[0], features[1]) for features in ready.values()]
        try:
            results: list[Result] = [_slim(matches) for matches in self.matcher.match_many(pairs)]
        # The batch does not fit into memory.
        except ImageError:
            results = [self._alone(self.matcher.match_features, *pair) for pair in pairs]
        yield from zip(ready, results, strict=True)

    def _alone(self, match: Callable[..., Matches], *pair: Path | ImageFeatures) -> Result:
        try:
            return _slim(match(*pair))
        except ImageError as error:
            return Failure(reason=str(error))

    def _features(self, name: str, path: Path, reader: ReadAhead) -> ImageFeatures:
        """Return the features of an image, from the cache if possible."""

        def make() -> ImageFeatures:
            self.extracted += 1
            try:
                return self.matcher.features(reader.take(path))
            except ImageError as error:
                # Name the user's file, wherever its content came from.
                raise ImageError(str(error).replace(str(path), str(self.images / name))) from error

        return self._kept.get(name, make)


def _slim(matches: Matches) -> Matches:
    """Return matches to store: the score of the pair replaces its calibration, which is the same for all pairs."""
    info = {key: matches.info[key] for key in _INFO if key in matches.info}
    return replace(matches, info={**info, "pair_score": matches.pair_score}, whole=None)


def _load(settings: WorkerSettings) -> Matcher:
    with tempfile.TemporaryDirectory(prefix="dualrc-") as folder:
        path = None
        if settings.weights is not None:
            path = Path(folder) / "weights.safetensors"
            path.write_bytes(settings.weights)
        matcher = load(settings.preset, weights=path, device=settings.device, **settings.matcher)
    if matcher.weights_hash != settings.weights_hash:
        raise WeightsError(
            f"The package of a worker has other weights ({matcher.weights_hash}) than this one "
            f"({settings.weights_hash}); install the same version of dualrc on all machines."
        )
    return matcher


# Worker process: the parent, which is this program too, sends pickled messages to standard input and reads answers
# from standard output.


def main() -> None:
    """Serve the parent process, and end with it."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Output of libraries must not mix with the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # The parent process shows warnings.
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr, flush=True)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, messages), daemon=True).start()
    try:
        worker = Worker(messages.get())
    except DualRCError as error:
        _answer(answers, "refused", error)
        return
    _answer(answers, "ready", 0)
    while True:
        for kind, value in worker.answers(messages.get()):
            _answer(answers, kind, value)


def _listen(stream: BinaryIO, messages: "queue.SimpleQueue[Any]") -> None:
    """Put messages into the queue until the parent process is gone."""
    try:
        while True:
            messages.put(pickle.load(stream))
    except (EOFError, OSError, pickle.UnpicklingError):
        os._exit(0)


def _answer(stream: BinaryIO, kind: str, value: Any) -> None:
    try:
        pickle.dump((kind, value), stream, protocol=pickle.HIGHEST_PROTOCOL)
        stream.flush()
    except OSError:
        os._exit(0)
