"""Peak memory: on a CPU in a fresh process for each method and size, so that no peak hides another."""

import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from dualrc.bench.clock import Run, synchronize
from dualrc.bench.methods import Task, make_method
from dualrc.errors import DataError, DualRCError

_START = "from dualrc.bench.memory import main; main()"


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Bytes: resident memory of a process, or on a GPU what torch had allocated there."""

    loaded: int  # before the first pair: libraries and network, on a GPU the network
    stages: dict[str, int] = field(default_factory=dict)
    failure: str | None = None  # why there are no more stages


def measure_peaks(task: Task) -> Peaks | None:
    """The peaks of a task's stages; None on devices that don't tell."""
    device = torch.device(task.device)
    if device.type == "cuda":
        return _peaks_here(task)
    return _peaks_in_a_process(task) if device.type == "cpu" else None


def main() -> None:
    """In the new process: read the task from standard input, and print its peaks."""
    values = json.load(sys.stdin)
    torch.set_num_threads(values.pop("threads"))
    try:
        print(json.dumps(asdict(_peaks_here(Task(**{**values, "size": tuple(values["size"])})))))
    except DualRCError as error:
        sys.exit(str(error))


def _peaks_in_a_process(task: Task) -> Peaks:
    package = str(Path(__file__).parents[2])  # the child finds this very package, wherever it was imported from
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _START],
        input=json.dumps({**asdict(task), "threads": torch.get_num_threads()}),
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
    return Peaks(**json.loads(done.stdout.splitlines()[-1]))


def _peaks_here(task: Task) -> Peaks:
    device = torch.device(task.device)
    method = make_method(task)
    gc.collect()
    _forget_peak(device)  # reading the weights takes more than keeping them, and is not matching
    loaded = _peak(device)

    def peak(run: Run) -> int:
        gc.collect()
        _forget_peak(device)
        run()
        synchronize(device)
        return _peak(device)

    stages: dict[str, int] = {}
    failure = None
    try:
        stages.update(method.peaks(peak))
    except (DualRCError, RuntimeError, MemoryError) as error:  # what was found before is kept
        failure = (str(error) or type(error).__name__).splitlines()[0]
    return Peaks(loaded=loaded, stages=stages, failure=failure)


def _forget_peak(device: torch.device) -> None:
    """Let the peak start again from what is held now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # not Linux, or not allowed: then a stage's peak may be that of one before
        return


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak if sys.platform == "darwin" else 1024 * peak)  # a Mac counts in bytes
    # Not ru_maxrss: that starts with what the parent held.
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
