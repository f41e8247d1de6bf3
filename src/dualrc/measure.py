"""Time and peak memory of functions, in this process or in a new one."""

import gc
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from dualrc.errors import DataError, DualRCError
from dualrc.files import first_line
from dualrc.machine import child_environment

Run = Callable[[], object]
# Sides of the matrices whose product is timed.
_GPU_SIDE, _SIDE = 8192, 1536
# Bytes of the timed copy.
_GPU_COPY, _COPY = 2**30, 2**28
# Runs on a GPU before the first timed one. `ops/graphs.py` captures a graph after fewer runs.
_GPU_WARM_UPS = 8
Key = TypeVar("Key")
Argument = TypeVar("Argument")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of several runs: median, quartiles and all samples."""

    median_s: float
    # First quartile.
    low_s: float
    # Third quartile.
    high_s: float
    samples_s: tuple[float, ...]

    @staticmethod
    def of(samples: list[float]) -> "Timing":
        """Summarize at least one run."""
        # The inclusive method keeps the quartiles of few samples between them.
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return Timing(median_s=middle, low_s=low, high_s=high, samples_s=tuple(samples))

    def minus(self, other: "Timing") -> "Timing":
        """Return the additional time over `other`, round by round."""
        pairs = zip(self.samples_s, other.samples_s, strict=False)
        return Timing.of([max(mine - yours, 0.0) for mine, yours in pairs])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured peak rates of a device."""

    # Additions and multiplications per second in a large matrix product.
    operations_per_s: float
    # Bytes read and written per second by a large copy.
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Peaks(Generic[Key]):
    """Memory in bytes: resident memory of a process, or memory allocated by torch on a GPU."""

    # Before the first run: libraries and networks, on a GPU the networks.
    loaded: int
    # Peak of each run, including memory held before it.
    bytes: dict[Key, int]
    # Reason why there are no more runs.
    failure: str | None = None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def time_once(run: Run, device: torch.device) -> float:
    """Return the seconds of one run, including work on the device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def warm_ups(device: torch.device) -> int:
    """Return the number of first runs that are not timed, because they compile kernels and capture CUDA graphs."""
    return _GPU_WARM_UPS if device.type == "cuda" else 1


def time_interleaved(
    runs: Mapping[Key, Run], device: torch.device, *, repeats: int, limit_s: float
) -> tuple[dict[Key, Timing], dict[Key, str]]:
    """Time runs in turn, round by round, so that other load affects all alike; also return reasons of failures.

    A run that has taken `limit_s` in total, or in its warm-up, is not repeated there.
    """
    samples: dict[Key, list[float]] = {name: [] for name in runs}
    failures: dict[Key, str] = {}
    warming: dict[Key, list[float]] = {name: [] for name in runs}
    for number in range(-warm_ups(device), repeats):
        for name, run in runs.items():
            taken = warming[name] if number < 0 else samples[name]
            if name in failures or sum(taken) > limit_s:
                continue
            try:
                seconds = time_once(run, device)
            except (DualRCError, RuntimeError, MemoryError) as error:
                failures[name] = first_line(error)
                continue
            taken.append(seconds)
    return {name: Timing.of(taken) for name, taken in samples.items() if name not in failures}, failures


def measure_rates(device: torch.device, dtype: torch.dtype, *, repeats: int = 20) -> Rates:
    """Return the best of several large products of this type and several large copies; a GPU needs time to clock up."""
    side, count = (_GPU_SIDE, _GPU_COPY) if device.type == "cuda" else (_SIDE, _COPY)
    one, other, product = (torch.rand(side, side, device=device).to(dtype) for _ in range(3))
    multiplying = min(time_once(lambda: torch.mm(one, other, out=product), device) for _ in range(repeats))
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    copying = min(time_once(lambda: target.copy_(source), device) for _ in range(repeats))
    return Rates(operations_per_s=2 * side**3 / multiplying, bytes_per_s=2 * count / copying)


def measure_peaks(runs: Mapping[Key, Run], device: torch.device) -> Peaks[Key]:
    """Measure the peak memory of runs one after the other, up to the first failure."""
    # Reading weights needs more memory than keeping them.
    reset_peak(device)
    loaded, found = held(device), dict[Key, int]()
    for name, run in runs.items():
        try:
            found[name] = peak_of(run, device)
        except (DualRCError, RuntimeError, MemoryError) as error:
            return Peaks(loaded=loaded, bytes=found, failure=first_line(error))
    return Peaks(loaded=loaded, bytes=found)


def peak_of(run: Run, device: torch.device) -> int:
    """Return the peak memory of one run in bytes, including memory held before it."""
    reset_peak(device)
    run()
    synchronize(device)
    return peak(device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory held now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        # Not on Linux, or not permitted. The peak may then include earlier work.
        return


def peak(device: torch.device) -> int:
    """Return the peak in bytes: memory allocated by torch on a GPU, else resident memory of this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def held(device: torch.device) -> int:
    """Return the bytes held now: memory allocated by torch on a GPU, else resident memory of this process."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def _resident(key: str) -> int:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        # Not on Linux.
        import resource

        # ru_maxrss includes the memory of the parent at the start of this process. On macOS it is in bytes.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(most if sys.platform == "darwin" else 1024 * most)
    found = re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def in_new_process(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """Call a module's function in a new process with as many threads; a DataError explains a failure."""
    call = pickle.dumps((sys.path, torch.get_num_threads(), pickle.dumps((function, argument))))
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import _run_child; _run_child()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment(),
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            # If the process died, its exit status explains why.
            with suppress(BrokenPipeError):
                # The pipe stays open. The child ends when it closes, which also happens if this process ends.
                process.stdin.write(call)
                process.stdin.flush()
            answer = process.stdout.read()
            status = process.wait()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if status < 0:
        raise DataError(f"the process was killed (signal {-status}), probably for lack of memory; give smaller sizes.")
    if status:
        raise DataError(f"the process failed ({(lines or ['no reason given'])[-1]}).")
    return pickle.loads(answer)


def _run_child() -> None:
    """Call the function that standard input describes, and write its result to standard output; for the child."""
    result: Any
    with os.fdopen(os.dup(1), "wb") as out:
        # Output of the function goes to standard error, not into its result.
        os.dup2(2, 1)
        sys.path[:], threads, call = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
        torch.set_num_threads(threads)
        # Unpickle after sys.path is set, because that is where the function is found.
        function, argument = pickle.loads(call)
        try:
            result = function(argument)
        except DualRCError as error:
            sys.exit(str(error))
        pickle.dump(result, out)


def _end_with(descriptor: int) -> None:
    """End this process when the other end of a pipe closes."""
    # Read the descriptor directly, because a thread must not hold the lock of a file object when Python ends.
    while os.read(descriptor, 1):
        pass
    os._exit(1)
