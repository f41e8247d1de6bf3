"""Workers as processes on this machine."""

import logging
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from dualrc import machine
from dualrc.collection.executor import Event
from dualrc.collection.plan import Task
from dualrc.collection.worker import WorkerSettings, at_once

logger = logging.getLogger(__name__)
# Ctrl-C reaches the whole process group, also while a worker starts; the parent decides when to stop.
_START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from dualrc.collection.worker import main
main()
"""


class LocalExecutor:
    """One process per worker, with a fresh interpreter that neither copies this process nor runs its main file."""

    def __init__(self, settings: Sequence[WorkerSettings]) -> None:
        """Start one worker per element of `settings`."""
        self.count = len(settings)
        self.at_once = max(at_once(each.device) for each in settings)
        self._settings = settings
        # A short queue: workers wait if results cannot be stored as fast as they arrive.
        self._events: queue.Queue[Event] = queue.Queue(maxsize=2 * self.count)
        self._listeners: list[threading.Thread] = []
        self._reported: set[str] = set()
        self._processes = [self._start(number) for number in range(self.count)]

    def give(self, worker: int, tasks: Sequence[Task]) -> None:
        """Assign tasks to a worker that is ready."""
        _tell(self._processes[worker], tasks)

    def next(self) -> Event:
        """Wait for the next event, and replace a worker that died."""
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
            # The listener may be blocked on the full queue.
            while listener.is_alive():
                with suppress(queue.Empty):
                    self._events.get(timeout=0.05)
        for process in self._processes:
            _end(process)

    def _start(self, worker: int) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=machine.child_environment(),
        )
        listener = threading.Thread(target=self._listen, args=(worker, process.stdout), daemon=True)
        reporter = threading.Thread(target=self._report, args=(process.stderr,), daemon=True)
        self._listeners = [*filter(threading.Thread.is_alive, self._listeners), listener]
        listener.start()
        reporter.start()
        _tell(process, self._settings[worker])
        return process

    def _listen(self, worker: int, answers: BinaryIO) -> None:
        """Convert the answers of a worker to events."""
        try:
            while True:
                kind, value = pickle.load(answers)
                self._events.put(Event(worker=worker, kind=kind, value=value))
        # The worker died, perhaps in the middle of an answer.
        except (EOFError, OSError, pickle.UnpicklingError):
            self._events.put(Event(worker=worker, kind="died", value=None))

    def _report(self, lines: BinaryIO) -> None:
        """Log the messages of workers, each line once, because several workers may print the same line."""
        with lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                if text and text not in self._reported:
                    self._reported.add(text)
                    logger.warning("%s", text)


def _tell(process: "subprocess.Popen[bytes]", message: Any) -> None:
    assert process.stdin is not None
    # The worker is dead; its listener reports it.
    with suppress(OSError):
        pickle.dump(message, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Release a dead process and return its exit status, which is negative after a signal."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(OSError):
            stream.close()
    return process.wait()
