"""Time and peak memory of functions, here or in a new process that nothing else has filled with memory."""

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
from dualrc.machine import PASSIVE_THREADS

Run = Callable[[], object]
_GPU_SIDE, _SIDE = 8192, 1536  # of the matrices whose product is timed
_GPU_COPY, _COPY = 2**30, 2**28  # bytes of the copy that is timed
Key = TypeVar("Key")
Argument = TypeVar("Argument")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of several runs: the median, the quartiles around it, and all of them."""

    median_s: float
    low_s: float  # a quarter of the runs took less
    high_s: float  # a quarter took more
    samples_s: tuple[float, ...]

    @staticmethod
    def of(samples: list[float]) -> "Timing":
        """The summary of at least one run."""
        # Inclusive, so that the quartiles of few samples lie among them.
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return Timing(median_s=middle, low_s=low, high_s=high, samples_s=tuple(samples))

    def minus(self, other: "Timing") -> "Timing":
        """What this takes beyond the other, round by round."""
        pairs = zip(self.samples_s, other.samples_s, strict=False)
        return Timing.of([max(mine - yours, 0.0) for mine, yours in pairs])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device was measured to reach."""

    operations_per_s: float  # additions and multiplications of a large matrix product
    bytes_per_s: float  # read and written by a large copy


@dataclass(frozen=True, kw_only=True)
class Peaks(Generic[Key]):
    """Memory in bytes: resident in a process, or on a GPU allocated by torch."""

    loaded: int  # before the first run: libraries and networks, on a GPU the networks
    bytes: dict[Key, int]  # the peak of each run, with what was held before it
    failure: str | None = None  # why there are no more runs


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def time_once(run: Run, device: torch.device) -> float:
    """Seconds of one run, until the device has finished it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def time_interleaved(
    runs: Mapping[Key, Run], device: torch.device, *, repeats: int, limit_s: float
) -> tuple[dict[Key, Timing], dict[Key, str]]:
    """Time runs in turn, round by round, so that other load on the machine slows all alike; with reasons of failures.

    A run that has taken `limit_s` in all is not repeated further.
    """
    samples: dict[Key, list[float]] = {name: [] for name in runs}
    failures: dict[Key, str] = {}
    warmups = 3 if device.type == "cuda" else 1  # kernels are compiled and graphs captured in the first ones
    for number in range(-warmups, repeats):
        for name, run in runs.items():
            taken = samples[name]
            if name in failures or sum(taken) > limit_s:
                continue
            try:
                seconds = time_once(run, device)
            except (DualRCError, RuntimeError, MemoryError) as error:
                failures[name] = reason(error)
                continue
            if number >= 0:
                taken.append(seconds)
    return {name: Timing.of(taken) for name, taken in samples.items() if name not in failures}, failures


def measure_rates(device: torch.device, dtype: torch.dtype, *, repeats: int = 20) -> Rates:
    """The best of several large products of this type and of several large copies, so that a GPU reaches its clock."""
    side, count = (_GPU_SIDE, _GPU_COPY) if device.type == "cuda" else (_SIDE, _COPY)
    one, other, product = (torch.rand(side, side, device=device).to(dtype) for _ in range(3))
    multiplying = min(time_once(lambda: torch.mm(one, other, out=product), device) for _ in range(repeats))
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))
    copying = min(time_once(lambda: target.copy_(source), device) for _ in range(repeats))
    return Rates(operations_per_s=2 * side**3 / multiplying, bytes_per_s=2 * count / copying)


def reason(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def measure_peaks(runs: Mapping[Key, Run], device: torch.device) -> Peaks[Key]:
    """The peak memory of runs, one after the other, up to the first that fails."""
    reset_peak(device)  # reading weights takes more than keeping them
    loaded, found = held(device), dict[Key, int]()
    for name, run in runs.items():
        try:
            found[name] = peak_of(run, device)
        except (DualRCError, RuntimeError, MemoryError) as error:
            return Peaks(loaded=loaded, bytes=found, failure=reason(error))
    return Peaks(loaded=loaded, bytes=found)


def peak_of(run: Run, device: torch.device) -> int:
    """The peak memory of one run in bytes, with what was held before it."""
    reset_peak(device)
    run()
    synchronize(device)
    return peak(device)


def reset_peak(device: torch.device) -> None:
    """Let the peak start again from what is held now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # not Linux, or not allowed: then the peak may be that of something before
        return


def peak(device: torch.device) -> int:
    """Bytes: the most that torch had allocated on a GPU, else the most resident memory of this process."""
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


def in_new_process(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """What a module's function returns in a new process with as many threads; DataError says why it failed."""
    package = str(Path(__file__).parents[1])  # the child imports this very package, wherever this one came from
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    call = pickle.dumps((sys.path, torch.get_num_threads(), pickle.dumps((function, argument))))
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import _run_child; _run_child()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**PASSIVE_THREADS, **os.environ, "PYTHONPATH": path},
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it died; its status says how
                # It stays open: the child ends when it is closed, as it is when this process ends in whatever way.
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
        raise DataError(f"the process was killed (signal {-status}), perhaps for memory; give smaller sizes.")
    if status:
        raise DataError(f"the process failed ({(lines or ['no reason given'])[-1]}).")
    result: Result = pickle.loads(answer)
    return result


def _run_child() -> None:
    """In the new process: call the function that standard input names, and write its result to standard output."""
    result: Any
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever the function prints is not its result
        sys.path[:], threads, call = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
        torch.set_num_threads(threads)
        function, argument = pickle.loads(call)  # only now, as the path says where it is found
        try:
            result = function(argument)
        except DualRCError as error:
            sys.exit(str(error))
        pickle.dump(result, out)


def _end_with(descriptor: int) -> None:
    """End this process when the other end of a pipe is closed."""
    # Not by way of a file object, whose lock a thread must not hold when Python ends.
    while os.read(descriptor, 1):
        pass
    os._exit(1)
