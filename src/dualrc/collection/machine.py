"""What this machine has to offer, inside a container too."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Processors that this process may use."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        count = os.cpu_count() or 1
    limits = _limit("cpu.max")  # microseconds, and out of how many; the first is missing where there is no limit
    return max(1, min(count, limits[0] // limits[1])) if len(limits) == 2 else count


def memory() -> int:
    """Bytes of memory that this process could use if nothing else ran."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        physical = 8 * 2**30
    return min([physical, *_limit("memory.max")])


def _limit(name: str) -> list[int]:
    """The numbers in a control group's file; none where there is no limit."""
    try:
        return [int(word) for word in (_CGROUP / name).read_text(encoding="ascii").split() if word != "max"]
    except (OSError, ValueError):
        return []
