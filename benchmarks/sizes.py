"""Time images of new sizes: the first matches of each size, and many sizes in one run.

    python benchmarks/sizes.py
    python benchmarks/sizes.py A.jpg B.jpg --device cpu --sizes 5 --pairs 20

Each pair is two images cropped to random sizes, with sides of 300 to 700 pixels. Preparation for a size, such as
compiled kernels and CUDA graphs, shows in the first matches of that size. `match_many` is timed over pairs of different
sizes, and over the same number of pairs of one size.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import dualrc
from dualrc.image import read
from dualrc.measure import Timing, time_once
from dualrc.pixels import STRIDE
from dualrc.scenes import make_pair

# Minimum and maximum side in pixels.
LEAST, MOST = 300, 700
# On a GPU the seventh call captures CUDA graphs.
CALLS = {"first": 0, "second": 1, "seventh": 6, "tenth": 9}
# Seed of the scene of `dualrc demo`.
TOWN = 1

Pixels = npt.NDArray[np.uint8]
Pair = tuple[Pixels, Pixels]


def read_images(paths: list[Path]) -> Pair:
    """Return the image files, or the rendered town, large enough for all crops."""
    if paths:
        image0, image1 = (read(path) for path in paths)
    else:
        # Interleaved colors, as in images from files. Copying planar ones takes longer than the backbone.
        image0, image1 = (np.ascontiguousarray(scene.image.numpy()) for scene in make_pair(TOWN, size=(800, 720)))
    if min(*image0.shape[:2], *image1.shape[:2]) < MOST:
        raise SystemExit(f"Images need at least {MOST} pixels per side; pass larger ones.")
    return image0, image1


def new_sizes(images: Pair, seed: int) -> Iterator[Pair]:
    """Yield crops of the pair with sizes that the network has not seen in a pair before."""
    random, seen = np.random.default_rng(seed), set()
    while True:
        sides = random.integers(LEAST, MOST + 1, (2, 2))
        # These sizes give the same network input.
        if (key := tuple((sides // STRIDE).ravel().tolist())) in seen:
            continue
        seen.add(key)
        (height0, width0), (height1, width1) = sides.tolist()
        yield images[0][:height0, :width0], images[1][:height1, :width1]


def main() -> None:
    """Time the calls and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", metavar="IMAGE", help="two images of a scene; default: a town")
    parser.add_argument("--device", help="cuda, mps or cpu; default: the fastest available")
    parser.add_argument("--engine", help="engine, as in dualrc.load; default: the fastest for the device")
    parser.add_argument("--sizes", type=int, default=20, help="number of sizes for single calls; default %(default)s")
    parser.add_argument("--pairs", type=int, default=200, help="number of pairs for match_many; default %(default)s")
    options = parser.parse_args()
    if len(options.paths) not in (0, 2):
        parser.error("pass two images or none")
    matcher = dualrc.load(device=options.device, engine=options.engine)
    images = read_images(options.paths)
    cut = new_sizes(images, seed=0)

    begin = time.perf_counter()
    # Prepares everything that does not depend on the size.
    matcher.match(*next(cut))
    table = Table("", "median", "interquartile range", "longest", title=f"{matcher}, very first match excluded")
    table.caption = f"the very first match of this process took {time.perf_counter() - begin:.2f} s"
    times = [
        [time_once(lambda pair=pair: matcher.match(*pair), matcher.device) for _ in range(max(CALLS.values()) + 1)]
        for pair in itertools.islice(cut, options.sizes)
    ]
    for name, number in CALLS.items():
        timing = Timing.of([1e3 * calls[number] for calls in times])
        row = (
            f"{timing.median_s:.1f} ms",
            f"{timing.low_s:.1f} to {timing.high_s:.1f} ms",
            f"{max(timing.samples_s):.1f} ms",
        )
        table.add_row(f"{name} match of a size", *row)
    table.add_section()
    different = list(itertools.islice(cut, options.pairs))
    same = [(images[0][:480, :640], images[1][:480, :640])] * options.pairs
    for name, pairs in ((f"{options.pairs} sizes", different), ("one size, 640x480", same)):
        seconds = time_once(lambda pairs=pairs: list(matcher.match_many(pairs)), matcher.device)
        table.add_row(f"match_many, {options.pairs} pairs of {name}", f"{len(pairs) / seconds:.1f} pairs/s")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
