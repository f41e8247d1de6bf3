"""Work in a fresh process, which nothing else has filled with memory, and the peak of its memory."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dualrc.errors import DataError


def in_a_process(start: str, values: Mapping[str, Any]) -> str:
    """Run Python code that reads `values` as JSON from standard input; the last line that it prints."""
    package = str(Path(__file__).parents[2])  # the child finds this very package, wherever it was imported from
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", start],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    if done.returncode < 0:
        raise DataError(f"the process was killed (signal {-done.returncode}), perhaps for memory; give smaller sizes.")
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(f"the process failed ({words}).")
    return (done.stdout.splitlines() or [""])[-1]


def forget_peak(device: torch.device) -> None:
    """Let the peak start again from what is held now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # not Linux, or not allowed: then the peak may be that of something before
        return


def peak(device: torch.device) -> int:
    """Bytes: what torch had allocated at most on a GPU, else this process' resident memory at most."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def held(device: torch.device) -> int:
    """The same now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def _resident(key: str) -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # not Linux
        import resource

        # There it counts what the parent held when it started this process, and on a Mac in bytes.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(most if sys.platform == "darwin" else 1024 * most)
    found = re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
