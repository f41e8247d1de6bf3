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

_GIB = 2**30
_REACH_S = 10.0
_UNREAD = 16  # results of a worker that wait to be stored, before it waits too


class _Actor:
    """A worker, made in its actor's process; what it refuses comes back as a value rather than as Ray's exception."""

    def __init__(self, settings: WorkerSettings, sample: dict[str, int]) -> None:
        self._sees = False
        self._worker: Worker | DualRCError
        try:
            self._worker = Worker(settings)
            self._sees = self._worker.sees(sample)
        except DualRCError as error:
            self._worker = error

    def start(self) -> Any:
        """("ready", whether it sees the pictures) or ("refused", why)."""
        if isinstance(self._worker, DualRCError):
            return "refused", self._worker
        return "ready", self._sees

    def work(self, tasks: Sequence[Task], contents: dict[str, bytes] | None) -> Any:
        """Yield the worker's answers."""
        assert isinstance(self._worker, Worker)
        yield from self._worker.answers(tasks, contents)


class RayExecutor:
    """An actor per GPU of the cluster or, where it has none, per processor."""

    def __init__(
        self,
        settings: Callable[..., WorkerSettings],
        config: CollectionConfig,
        *,
        worker_bytes: float,
        sample: Sequence[str],
    ) -> None:
        """`settings` makes those of a device, a size of cache and `threads`; `sample` are names of some pictures."""
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
            self._arguments = (self._ray.put(here), sizes)  # weights travel to each machine once
            self._kind = self._ray.remote(_Actor).options(scheduling_strategy="SPREAD", **layout.resources)
            self._sees = [False] * self.count
            # Answers that are awaited, by worker: the start's one, or a stream of those to a block.
            self._awaited: dict[Any, int] = {}
            self._actors = [None] * self.count
            for worker in range(self.count):
                self._start(worker)
        except BaseException:
            self.close()
            raise

    def give(self, worker: int, tasks: Sequence[Task]) -> None:
        """Let a worker that is ready work on these."""
        contents = None if self._sees[worker] else self._contents(tasks)
        work = self._actors[worker].work.options(num_returns="streaming", _generator_backpressure_num_objects=_UNREAD)
        self._awaited[work.remote(tasks, contents)] = worker

    def next(self) -> Event:
        """Wait until something happens; a worker that died is replaced as soon as there is room for another."""
        ready, _ = self._ray.wait(list(self._awaited), num_returns=1)
        answers = ready[0]
        worker = self._awaited.pop(answers)
        streamed = not isinstance(answers, self._ray.ObjectRef)
        try:
            kind, value = self._ray.get(next(answers) if streamed else answers)
        except (self._ray.exceptions.RayError, StopIteration) as error:
            self._ray.kill(self._actors[worker])  # where only its answer is lost, or it has a bug
            self._start(worker)
            reason = (str(error) or "without a word").splitlines()[0]
            return Event(worker=worker, kind="died", value=f"ended: {reason}")
        if kind == "result":
            self._awaited[answers] = worker  # at the end of the line, so that others are heard too
        elif kind == "ready" and not streamed:
            self._sees[worker], value = value, 0
        return Event(worker=worker, kind=kind, value=value)

    def close(self) -> None:
        """End all workers, and the cluster if it was started or joined here."""
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
        """The files of these pictures, for a machine that does not see them."""
        contents = {}
        for name in dict.fromkeys(name for task in tasks for name in task):
            with suppress(OSError):  # the worker will not find it either, and say so
                contents[name] = (self._images / name).read_bytes()
        return contents


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How many workers there are, and what each asks of the cluster."""

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
    """Threads of each worker: the most with which machines of so many cores hold all the workers, at least one."""
    fitting = [count for count in range(1, max(cores) + 1) if sum(each // count for each in cores) >= workers]
    return max(fitting, default=1)


def _connect(ray: Any, address: str | None) -> None:
    """Join the cluster at the address, or start one on this machine that needs no network and tells nobody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # without it, a warning of what will change
    if address is not None:
        _check_address(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    local = {"address": "local", "num_cpus": machine.cores(), "include_dashboard": False}
    try:
        with machine.keep_signals():  # close() ends the cluster, which Ray would do for SIGTERM in its own way
            ray.init(**(local if address is None else {"address": address}), **quiet)
    except Exception as error:  # Ray fails in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        where = "can't be started" if address is None else f"at {address} can't be joined"
        raise ConfigError(
            f"The Ray cluster {where} ({reason}); check `ray status`, or choose --executor local."
        ) from error


def _check_address(address: str) -> None:
    """Refuse at once what Ray would try to reach for minutes."""
    if "://" in address:
        remedy = "run this on a machine of the cluster with --address auto, or give host:port"
        raise ConfigError(
            f"The address {address} is one of Ray's remote clients, which can't stream results; {remedy}."
        )
    host, _, port = address.rpartition(":")
    if not host:  # auto, local
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"Nothing answers at the address {address} ({error}); check `ray status` there.") from error
