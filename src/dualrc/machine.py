"""What this machine has to offer, inside a container too."""

import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path

# Threads of OpenMP that wait for others block at once. By default they spin for milliseconds first, which takes time
# from the very threads they wait for where other programs use the cores too. libgomp reads the first one when it is
# loaded, the OpenMP of LLVM and Intel both.
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")


def device_name(device: str) -> str:
    """A device by torch's name: gpu is cuda, and gpu:1 is cuda:1."""
    kind, *number = device.split(":")
    return ":".join(["cuda" if kind == "gpu" else kind, *number])


def cores() -> int:
    """Processors that this process may use."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        count = os.cpu_count() or 1
    limits = _limit("cpu.max")  # microseconds, and out of how many; the first is missing where there is no limit
    return max(1, min(count, limits[0] // limits[1])) if len(limits) == 2 else count


def block_idle_threads() -> None:
    """Let waiting OpenMP threads of this process block; too late, and without effect, once torch is imported.

    Settings that are in the environment already are kept.
    """
    if "torch" not in sys.modules:
        for name, value in PASSIVE_THREADS.items():
            os.environ.setdefault(name, value)


@contextmanager
def keep_signals() -> Iterator[None]:
    """Undo what libraries do in the block to Ctrl-C and SIGTERM; pycolmap prints a stack trace for the second."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set them
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python
                signal.signal(number, handler)


def end_with_parent() -> None:
    """In a process of `multiprocessing`: let it end when the process that started it ends, in whatever way."""
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def processor() -> str:
    """The name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Processes that wanted a core over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def memory() -> int:
    """Bytes of memory that this process could use if nothing else ran."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        physical = 8 * 2**30
    return min([physical, *_limit("memory.max")])


def free_memory() -> int:
    """Bytes of memory that this process can still take, as far as the system tells."""
    free = [memory()] + [1024 * size for size in _amounts(_MEMORY, "MemAvailable:")]
    # Files that were read lately count as used there, but make room when it is needed.
    files = sum(_amounts(_CGROUP / "memory.stat", "(?:in)?active_file"))
    free += [limit - used + files for limit in _limit("memory.max") for used in _limit("memory.current")]
    return max(0, min(free))


def _amounts(file: Path, key: str) -> list[int]:
    """The numbers of this key in a file of keys and numbers; none where there is no such file."""
    try:
        return [int(found) for found in re.findall(rf"^{key}\s+(\d+)", file.read_text(encoding="ascii"), re.MULTILINE)]
    except OSError:
        return []


def _limit(name: str) -> list[int]:
    """The numbers in a control group's file; none where there is no limit."""
    try:
        return [int(word) for word in (_CGROUP / name).read_text(encoding="ascii").split() if word != "max"]
    except (OSError, ValueError):
        return []
