"""Kernels that ran, and their times, measured with torch's profiler."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.profiler import ProfilerActivity, profile

from dualrc.measure import Run, synchronize

_KEPT = 5


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A GPU kernel, or a CPU operation, and its share of the run time."""

    name: str
    share: float


def kernel_seconds(run: Run, device: torch.device) -> dict[str, float]:
    """Return seconds by kernel (on a CPU by operation) in one run; empty if the profiler is unavailable."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    try:
        with _quiet(), profile(activities=activities, acc_events=True) as seen:
            run()
            synchronize(device)
    # Some machines do not permit access to the GPU's counters.
    except RuntimeError:
        return {}
    seconds: dict[str, float] = {}
    for event in seen.key_averages():
        # On a CPU an annotation is a kernel in C, which records its name; on a GPU it encloses other events.
        annotation = on_gpu and getattr(event, "is_user_annotation", False)
        if event.device_type.name == ("CUDA" if on_gpu else "CPU") and not annotation:
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            seconds[event.key] = seconds.get(event.key, 0.0) + spent / 1e6
    return seconds


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard standard error, to which the profiler's library logs its start and stop."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def top(seconds: Mapping[str, float], without: Mapping[str, float] = MappingProxyType({})) -> tuple[Kernel, ...]:
    """Return the kernels that took most time, except those in `without`, a run that is part of this one."""
    left = {name: max(0.0, spent - without.get(name, 0.0)) for name, spent in seconds.items()}
    ranked = sorted(left.items(), key=lambda item: -item[1])[:_KEPT]
    return tuple(Kernel(name=name, share=spent / sum(left.values())) for name, spent in ranked if spent > 0)
