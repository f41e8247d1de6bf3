"""Workers as actors of a Ray cluster, on one machine or many."""

import logging
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualrc import machine
from dualrc.collection.config import CollectionConfig
from dualrc.collection.executor import Event
from dualrc.collection.plan import Task
from dualrc.collection.worker import Worker, WorkerSettings, at_once
from dualrc.errors import ConfigError, DualRCError
from dualrc.extras import require
from dualrc.files import first_line

_GIB = 2**30
_REACH_S = 10.0
# Number of unread results after which a worker waits.
_UNREAD = 16


class _Actor:
    """A worker in the process of a Ray actor; it returns refusals as values instead of raising them through Ray."""

    def __init__(self, settings: WorkerSettings, sample: dict[str, int]) -> None:
        self._sees = False
        self._worker: Worker | DualRCError
        try:
            self._worker = Worker(settings)
            self._sees = self._worker.sees(sample)
        except DualRCError as error:
            self._worker = error

    def start(self) -> Any:
        """Return ("ready", whether it can read the images) or ("refused", the reason)."""
        if isinstance(self._worker, DualRCError):
            return "refused", self._worker
        return "ready", self._sees

    def work(self, tasks: Sequence[Task], contents: dict[str, bytes] | None) -> Any:
        """Yield the answers of the worker."""
        assert isinstance(self._worker, Worker)
        yield from self._worker.answers(tasks, contents)


class RayExecutor:
    """One actor per GPU of the cluster or, on a cluster without GPUs, per CPU."""

    def __init__(
        self,
        settings: Callable[..., WorkerSettings],
        config: CollectionConfig,
        *,
        worker_bytes: float,
        sample: Sequence[str],
    ) -> None:
        """`settings`: makes worker settings for a device, a cache size and `threads`; `sample`: some image names."""
        self._ray = require("ray", "ray", "Collections on a Ray cluster")
        self._own = not self._ray.is_initialized()
        if self._own:
            _connect(self._ray, config.address)
        self._actors: list[Any] = []
        try:
            layout = _Layout.of(self._ray.nodes(), config, worker_bytes)
            here = settings(layout.device, layout.cache_bytes, threads=layout.threads)
            self.count, self.at_once = layout.count, at_once(layout.device)
            self._images = Path(here.images)
            sizes = {name: (self._images / name).stat().st_size for name in sample}
            # The object store copies weights to each machine once.
            self._arguments = (self._ray.put(here), sizes)
            self._kind = self._ray.remote(_Actor).options(scheduling_strategy="SPREAD", **layout.resources)
            self._sees = [False] * self.count
            # Pending answers by worker: the answer to the start, or a stream of answers to a block.
            self._awaited: dict[Any, int] = {}
            self._actors = [None] * self.count
            for worker in range(self.count):
                self._start(worker)
        except BaseException:
            self.close()
            raise

    def give(self, worker: int, tasks: Sequence[Task]) -> None:
        """Assign tasks to a worker that is ready."""
        contents = None if self._sees[worker] else self._contents(tasks)
        work = self._actors[worker].work.options(num_returns="streaming", _generator_backpressure_num_objects=_UNREAD)
        self._awaited[work.remote(tasks, contents)] = worker

    def next(self) -> Event:
        """Wait for the next event, and replace a worker that died as soon as the cluster has room."""
        ready, _ = self._ray.wait(list(self._awaited), num_returns=1)
        answers = ready[0]
        worker = self._awaited.pop(answers)
        streamed = not isinstance(answers, self._ray.ObjectRef)
        try:
            kind, value = self._ray.get(next(answers) if streamed else answers)
        except (self._ray.exceptions.RayError, StopIteration) as error:
            # The actor may still be alive if only its answer was lost, or if it has a bug.
            self._ray.kill(self._actors[worker])
            self._start(worker)
            reason = (str(error) or "no reason given").splitlines()[0]
            return Event(worker=worker, kind="died", value=f"ended: {reason}")
        if kind == "result":
            # Appended at the end, so that the other workers get their turn.
            self._awaited[answers] = worker
        elif kind == "ready" and not streamed:
            self._sees[worker], value = value, 0
        return Event(worker=worker, kind=kind, value=value)

    def close(self) -> None:
        """End all workers, and leave the cluster if it was started or joined here."""
        for actor in self._actors:
            if actor is not None:
                with suppress(self._ray.exceptions.RayError):
                    self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()

    def _start(self, worker: int) -> None:
        self._actors[worker] = self._kind.remote(*self._arguments)
        self._awaited[self._actors[worker].start.remote()] = worker

    def _contents(self, tasks: Sequence[Task]) -> dict[str, bytes]:
        """Return the content of these image files, for a machine that cannot read them."""
        contents = {}
        for name in dict.fromkeys(name for task in tasks for name in task):
            # The worker will report the missing file.
            with suppress(OSError):
                contents[name] = (self._images / name).read_bytes()
        return contents


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Number of workers and the resources of each."""

    count: int
    device: str
    resources: dict[str, float]
    cache_bytes: float
    threads: int = 1

    @staticmethod
    def of(nodes: Sequence[Any], config: CollectionConfig, worker_bytes: float) -> "_Layout":
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        gpus = [int(node.get("GPU", 0)) for node in alive]
        if sum(gpus) and config.device in (None, "cuda"):
            count = config.workers or sum(gpus)
            resources = {"num_cpus": 1.0, "num_gpus": sum(gpus) / max(count, sum(gpus))}
            return _Layout(count=count, device="cuda", resources=resources, cache_bytes=config.cache * _GIB)
        limit = math.inf if config.max_memory is None else config.max_memory * _GIB
        cores = [int(min(node.get("CPU", 0), config.threads or math.inf)) for node in alive]
        fitting = [
            int(min(count, max(1, min(limit, node.get("memory", math.inf)) // worker_bytes)))
            for count, node in zip(cores, alive, strict=True)
        ]
        count = min(config.workers or sum(fitting), sum(fitting))
        if count == 0:
            raise ConfigError("The Ray cluster has no free processors; add machines to it, or choose --executor local.")
        cache = config.cache * _GIB / min(count, max(fitting))
        threads = _threads(cores, count)
        resources = {"num_cpus": float(threads)}
        return _Layout(count=count, device="cpu", resources=resources, cache_bytes=cache, threads=threads)


def _threads(cores: Sequence[int], workers: int) -> int:
    """Return the largest number of threads per worker with which all workers fit on machines with these cores."""
    fitting = [count for count in range(1, max(cores) + 1) if sum(each // count for each in cores) >= workers]
    return max(fitting, default=1)


def _connect(ray: Any, address: str | None) -> None:
    """Join the cluster at the address, or start a local cluster without dashboard and usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this setting, Ray prints a deprecation warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is not None:
        _check_address(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    local = {"address": "local", "num_cpus": machine.cores(), "include_dashboard": False}
    try:
        # close() ends the cluster; Ray's own handler for SIGTERM would interfere.
        with machine.keep_signals():
            ray.init(**(local if address is None else {"address": address}), **quiet)
    # Ray raises many kinds of exceptions.
    except Exception as error:
        where = "could not be started" if address is None else f"at {address} could not be joined"
        raise ConfigError(
            f"The Ray cluster {where} ({first_line(error)}); check `ray status`, or choose --executor local."
        ) from error


def _check_address(address: str) -> None:
    """Raise ConfigError at once for an address that Ray would try to reach for minutes."""
    if "://" in address:
        remedy = "run the command on a machine of the cluster with --address auto, or pass host:port"
        raise ConfigError(f"The address {address} is a Ray client address, which cannot stream results; {remedy}.")
    host, _, port = address.rpartition(":")
    # Names such as auto and local have no port.
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"Nothing answers at the address {address} ({error}); check `ray status` there.") from error
