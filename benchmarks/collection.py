"""Measure whether the cost of a pair and the memory stay constant over thousands of pairs of tiny images.

python benchmarks/collection.py [IMAGES] [local|ray] [WORKERS]
"""

import argparse
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from dualrc.collection.config import CollectionConfig
from dualrc.collection.matching import match_collection
from dualrc.collection.store import MatchStore
from dualrc.errors import DataError

ROWS = 10
SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """State at one point in time."""

    seconds: float
    pairs: int
    driver_mib: float
    workers_mib: float


def make_images(folder: Path, count: int) -> None:
    """Write crops of one large image of smooth noise; neighbors overlap."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (60, 20 + 4 * count, 3), dtype=np.uint8))
    scene = coarse.resize((coarse.width * 4, coarse.height * 4), Image.Resampling.BICUBIC)
    for number in range(count):
        left = 16 * number % (scene.width - SIZE)
        scene.crop((left, 40, left + SIZE, 40 + SIZE)).save(folder / f"{number:04d}.png")


def resident_mib(process: str) -> float:
    """Return the memory of a process, from /proc."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096 / 2**20
    except (OSError, IndexError):
        return 0.0


def workers_mib() -> float:
    """Return the memory of all workers: children of this process, or Ray's actors."""
    total = 0.0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"dualrc.collection.worker" in command or command.startswith(b"ray::_Actor"):
            total += resident_mib(folder.name)
    return total


def watch(store: Path, samples: list[Sample], stop: threading.Event) -> None:
    """Record samples at intervals."""
    start = time.monotonic()
    while not stop.wait(0.5):
        try:
            with MatchStore(store) as opened:
                pairs = len(opened)
        # The store does not exist yet.
        except DataError:
            pairs = 0
        samples.append(
            Sample(
                seconds=time.monotonic() - start,
                pairs=pairs,
                driver_mib=resident_mib("self"),
                workers_mib=workers_mib(),
            )
        )


def report(samples: list[Sample], total: int) -> None:
    """Print a row for every tenth of the pairs."""
    print("| pairs | ms per pair | driver MiB | workers MiB |\n|---|---|---|---|")
    working = [sample for sample in samples if sample.pairs > 0]
    last = working[0]
    for row in range(1, ROWS + 1):
        sample = next((sample for sample in working if sample.pairs >= total * row / ROWS), working[-1])
        if sample.pairs > last.pairs:
            each = (sample.seconds - last.seconds) / (sample.pairs - last.pairs) * 1000
            print(f"| {sample.pairs} | {each:.1f} | {sample.driver_mib:.0f} | {sample.workers_mib:.0f} |")
        last = sample


def main() -> None:
    """Match all pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=101, help="number of images; default %(default)s")
    parser.add_argument("executor", choices=("local", "ray"), nargs="?", default="local", help="default %(default)s")
    parser.add_argument("workers", type=int, nargs="?", default=2, help="default %(default)s")
    options = parser.parse_args()
    count, executor, workers = options.count, options.executor, options.workers
    with tempfile.TemporaryDirectory() as folder:
        images, out = Path(folder) / "images", Path(folder) / "out"
        images.mkdir()
        make_images(images, count)
        # The cache holds only a part of the images: 16 for each of two workers.
        config = CollectionConfig(
            pairs="exhaustive",
            size=SIZE,
            executor=executor,
            workers=workers,
            cache=0.004,
            device="cpu",
        )
        samples: list[Sample] = []
        stop = threading.Event()
        watcher = threading.Thread(target=watch, args=(out / "matches.sqlite", samples, stop))
        watcher.start()
        try:
            result = match_collection(images, out, config)
        finally:
            stop.set()
            watcher.join()
        report(samples, len(result.pairs))
        print(
            f"\n{result.matched} pairs of {len(result.names)} images of {SIZE} px in {result.seconds:.0f} s, "
            f"{executor}, {workers} workers; each image was read {result.extracted / len(result.names):.1f} times"
        )


if __name__ == "__main__":
    main()
