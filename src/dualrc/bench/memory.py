"""Peak memory: on a CPU in a fresh process for each method and size, so that no peak hides another."""

import gc
import json
import sys
from dataclasses import asdict, dataclass, field

import torch

from dualrc.bench.clock import Run, synchronize
from dualrc.bench.methods import Task, make_method
from dualrc.errors import DualRCError
from dualrc.evaluation.fresh import forget_peak, in_a_process, peak

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
    return Peaks(**json.loads(in_a_process(_START, {**asdict(task), "threads": torch.get_num_threads()})))


def _peaks_here(task: Task) -> Peaks:
    device = torch.device(task.device)
    method = make_method(task)
    gc.collect()
    forget_peak(device)  # reading the weights takes more than keeping them, and is not matching
    loaded = peak(device)

    def peak_of(run: Run) -> int:
        gc.collect()
        forget_peak(device)
        run()
        synchronize(device)
        return peak(device)

    stages: dict[str, int] = {}
    failure = None
    try:
        stages.update(method.peaks(peak_of))
    except (DualRCError, RuntimeError, MemoryError) as error:  # what was found before is kept
        failure = (str(error) or type(error).__name__).splitlines()[0]
    return Peaks(loaded=loaded, stages=stages, failure=failure)
