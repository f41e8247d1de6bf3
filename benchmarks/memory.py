"""Compare the estimated memory of a pair with the measured one, for the bundled weights on a CPU in float32.

    python benchmarks/memory.py
    python benchmarks/memory.py --size 640x480 --engine native

Each measurement runs in a new process with one thread: the peak growth of its resident memory (Linux). An image is
matched with itself, where every cell has a match, and with a copy that is shifted by half of its width.
"""

import argparse
import ctypes
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

import dualrc
from dualrc.image import Scale
from dualrc.measure import held, in_new_process, peak, reset_peak

SIZES = ["640x480", "1024x256", "1024x768", "1312x976", "1600x1200"]
MIB = 2**20


class Task(NamedTuple):
    """A measurement; `shifted` moves the second image."""

    size: tuple[int, int]
    engine: str
    shifted: bool


class Memory(NamedTuple):
    """Bytes."""

    measured: int
    estimated: int


def measure(task: Task) -> Memory:
    """Match one pair with as little working memory as possible."""
    torch.set_num_threads(1)
    (width, height), cpu = task.size, torch.device("cpu")
    matcher = dualrc.load(device="cpu", precision="float32", engine=task.engine, size=max(task.size), max_zoom=1)
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width * 3 // 16, 3), np.uint8)
    wide = np.array(Image.fromarray(noise).resize((width * 3 // 2, height), Image.Resampling.BICUBIC))
    start = width // 2 if task.shifted else 0
    image0, image1 = (np.ascontiguousarray(wide[:, left : left + width]) for left in (0, start))
    scale = Scale(image_size=task.size, input_size=task.size)
    estimated = matcher.budget.least((scale, scale))
    matcher.budget.total = estimated
    # What is made once does not count.
    matcher.match(image0[:64, :64], image0[:64, :64], size=64)
    # Otherwise the match reuses memory that loading the weights left behind.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    reset_peak(cpu)
    before = held(cpu)
    matcher.match(image0, image1)
    return Memory(measured=peak(cpu) - before, estimated=estimated)


def main() -> None:
    """Print a table in Markdown, one row per size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", action="append", metavar="WxH", help=f"repeatable; default: {', '.join(SIZES)}")
    parser.add_argument("--engine", action="append", help="repeatable; default: native and torch")
    options = parser.parse_args()
    engines = options.engine or ["native", "torch"]
    columns = [part for engine in engines for part in (f"{engine}: measured", "shifted", "estimated")]
    print(f"| size | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for text in options.size or SIZES:
        width, height = map(int, text.split("x"))
        cells = [text]
        for engine in engines:
            same, shifted = (in_new_process(measure, Task((width, height), engine, flag)) for flag in (False, True))
            cells += [f"{value / MIB:,.0f} MiB" for value in (same.measured, shifted.measured, same.estimated)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    # New processes find functions by the name of their module.
    import memory

    memory.main()
