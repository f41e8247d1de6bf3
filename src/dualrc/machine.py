"""Resources of this machine, with the limits of a container."""

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

# Makes waiting OpenMP threads block at once. By default they spin for milliseconds.
# Spinning takes time from the threads they wait for if other programs use the cores too.
# libgomp reads the first variable when it is loaded; the OpenMP of LLVM and Intel reads both.
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
_CGROUP = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")


def device_name(device: str) -> str:
    """Convert a device name to torch's: gpu is cuda, and gpu:1 is cuda:1."""
    kind, *number = device.split(":")
    return ":".join(["cuda" if kind == "gpu" else kind, *number])


def cores() -> int:
    """Return the number of processors that this process may use."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        # sched_getaffinity does not exist on every system.
        count = os.cpu_count() or 1
    # Quota and period in microseconds; the quota is missing if there is no limit.
    limits = _limit("cpu.max")
    return max(1, min(count, limits[0] // limits[1])) if len(limits) == 2 else count


def block_idle_threads() -> None:
    """Make waiting OpenMP threads of this process block. This has no effect after torch is imported.

    Existing environment variables are kept.
    """
    if "torch" not in sys.modules:
        for name, value in PASSIVE_THREADS.items():
            os.environ.setdefault(name, value)


def child_environment() -> dict[str, str]:
    """Return the environment of a child process that imports this package, wherever it was imported from."""
    package = str(Path(__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**PASSIVE_THREADS, **os.environ, "PYTHONPATH": path}


@contextmanager
def keep_signals() -> Iterator[None]:
    """Restore the handlers of Ctrl-C and SIGTERM after the block; pycolmap, for example, replaces them."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers.
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None means that the handler was not set from Python.
            if handler is not None:
                signal.signal(number, handler)


def end_with_parent() -> None:
    """Make a process of `multiprocessing` end when its parent ends, for any reason."""
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def processor() -> str:
    """Return the name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Return the load average of the last minute; None if the system does not provide it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def memory() -> int:
    """Return the bytes of memory that this process could use if nothing else ran."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        physical = 8 * 2**30
    return min([physical, *_limit("memory.max")])


def free_memory() -> int:
    """Return the bytes of memory that this process can still allocate, as far as the system reports."""
    free = [memory()] + [1024 * size for size in _amounts(_MEMORY, "MemAvailable:")]
    # The file cache counts as used in a control group, but is freed when needed.
    files = sum(_amounts(_CGROUP / "memory.stat", "(?:in)?active_file"))
    free += [limit - used + files for limit in _limit("memory.max") for used in _limit("memory.current")]
    return max(0, min(free))


def _amounts(file: Path, key: str) -> list[int]:
    """Return the numbers of this key in a file of keys and numbers; empty if there is no such file."""
    try:
        return [int(found) for found in re.findall(rf"^{key}\s+(\d+)", file.read_text(encoding="ascii"), re.MULTILINE)]
    except OSError:
        return []


def _limit(name: str) -> list[int]:
    """Return the numbers in a file of the control group; empty if there is no limit."""
    try:
        return [int(word) for word in (_CGROUP / name).read_text(encoding="ascii").split() if word != "max"]
    except (OSError, ValueError):
        return []
