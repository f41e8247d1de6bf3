"""Workers in processes of this machine."""

import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dualrc import machine
from dualrc.collection.executor import Event
from dualrc.collection.plan import Task
from dualrc.collection.worker import WorkerSettings, at_once

logger = logging.getLogger(__name__)
_START = "from dualrc.collection.worker import main; main()"


class LocalExecutor:
    """A process per worker, with its own interpreter: nothing of this process is copied, and its main file not run."""

    def __init__(self, settings: Sequence[WorkerSettings]) -> None:
        """One worker for each of the settings."""
        self.count = len(settings)
        self.at_once = max(at_once(each.device) for each in settings)
        self._settings = settings
        # Few, so that workers wait when results can't be stored as fast as they come.
        self._events: queue.Queue[Event] = queue.Queue(maxsize=2 * self.count)
        self._listeners: list[threading.Thread] = []
        self._reported: set[str] = set()
        self._processes = [self._start(number) for number in range(self.count)]

    def give(self, worker: int, tasks: Sequence[Task]) -> None:
        """Let a worker that is ready work on these."""
        _tell(self._processes[worker], tasks)

    def next(self) -> Event:
        """Wait until something happens; a worker that died is replaced at once."""
        event = self._events.get()
        if event.kind == "died":
            status = _end(self._processes[event.worker])
            self._processes[event.worker] = self._start(event.worker)
            return Event(worker=event.worker, kind="died", value=f"ended with status {status}")
        return event

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            process.kill()
        for listener in self._listeners:
            while listener.is_alive():  # it may wait for room to say that its worker is gone
                with suppress(queue.Empty):
                    self._events.get(timeout=0.05)
        for process in self._processes:
            _end(process)

    def _start(self, worker: int) -> "subprocess.Popen[bytes]":
        # The child finds this very package, wherever it was imported from.
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**machine.PASSIVE_THREADS, **os.environ, "PYTHONPATH": path},
        )
        listener = threading.Thread(target=self._listen, args=(worker, process.stdout), daemon=True)
        reporter = threading.Thread(target=self._report, args=(process.stderr,), daemon=True)
        self._listeners = [*filter(threading.Thread.is_alive, self._listeners), listener]
        listener.start()
        reporter.start()
        _tell(process, self._settings[worker])
        return process

    def _listen(self, worker: int, answers: BinaryIO) -> None:
        """Turn a worker's answers into events."""
        try:
            while True:
                kind, value = pickle.load(answers)
                self._events.put(Event(worker=worker, kind=kind, value=value))
        except (EOFError, OSError, pickle.UnpicklingError):  # it died, perhaps in the middle of an answer
            self._events.put(Event(worker=worker, kind="died", value=None))

    def _report(self, lines: BinaryIO) -> None:
        """Pass on what workers say, each line once: several of them may have the same to say."""
        with lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                if text and text not in self._reported:
                    self._reported.add(text)
                    logger.warning("%s", text)


def _tell(process: "subprocess.Popen[bytes]", message: Any) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it is dead; its listener will say so
        pickle.dump(message, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Release a dead process; gives its exit status, negative for a signal."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(OSError):
            stream.close()
    return process.wait()
