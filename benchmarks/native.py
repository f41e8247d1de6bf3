"""The kernels in C beside the plain torch code that they stand for, on one pair of pictures, in turns.

    OMP_NUM_THREADS=2 python benchmarks/native.py A.jpg B.jpg --size 640x480

Prints medians in milliseconds, and what the two disagree by.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import dualrc
from dualrc.image import read
from dualrc.kernels import native
from dualrc.model.align import align
from dualrc.model.correlation import correlate, mutual_filter
from dualrc.model.dualrc import FINE_STRIDE, _cells, _meet
from dualrc.model.fine import FineMap, both_ways, cell_queries, search
from dualrc.model.support import support


def in_turns(run: Callable[[], Any], repeats: int) -> tuple[float, float, Any, Any]:
    """Milliseconds by torch and by C, medians, and what they give."""
    kernels = native._library
    times: dict[bool, list[float]] = {True: [], False: []}
    results = {}
    for turn in range(repeats + 1):
        for by_c in (False, True):
            native._library = kernels if by_c else lambda: None  # type: ignore[assignment]
            start = time.perf_counter()
            results[by_c] = run()
            if turn:  # the first is a warm-up
                times[by_c].append(1e3 * (time.perf_counter() - start))
    native._library = kernels
    return statistics.median(times[False]), statistics.median(times[True]), results[False], results[True]


def main() -> None:
    """Time every kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, nargs=2, metavar="PICTURE", help="two pictures of the same thing")
    parser.add_argument("--size", default="640x480", help="that both pictures are brought to; default %(default)s")
    parser.add_argument("--repeats", type=int, default=15, help="of each, in turns; default %(default)s")
    options = parser.parse_args()
    if not native.usable():
        raise SystemExit("The kernels in C were not compiled; install dualrc with a C compiler at hand.")
    width, height = map(int, options.size.split("x"))
    images = [np.asarray(Image.fromarray(read(path)).resize((width, height))) for path in options.pictures]
    matcher = dualrc.load(device="cpu", size=max(width, height))
    network = matcher.network
    features = [matcher.features(image).network for image in images]
    maps = [FineMap.of(one.fine) for one in features]
    with torch.inference_mode():
        scores = mutual_filter(correlate(features[0].coarse, features[1].coarse))
        tensor = network.coarse_tensor(*features).flatten(3).flatten(1, 2)
        queries = cell_queries(maps[0], torch.arange(maps[0].cells), "center")
        settings: dict[str, Any] = {"temperature": 0.0, "max_values": 2**27}
        found = both_ways(tensor, *maps, reading="center", query_share=1.0, **settings)
        found = found.of(found.back == found.index0)
        here, there = _cells(found.index0, maps[0]), _cells(found.index1, maps[1])
        shape = (1, maps[0].height * 4, maps[0].width * 4)
        known = found.index0, here, there, found.scores.mean(0).clamp(max=1), found.pair, shape
        around = support(*known)
        lights = [one.light for one in features]
        points = [FINE_STRIDE * cells + (FINE_STRIDE - 1) / 2 for cells in (here, there)]
        runs: dict[str, Callable[[], Any]] = {
            "consensus": lambda: network.consensus(scores),
            "search, one direction": lambda: search(tensor, queries, maps[1], **settings).index,
            "cosines around matches": lambda: _meet(*maps, found.pair, found.index0, found.index1).cosine,
            "support of neighbours": lambda: support(*known).share,
            "alignment by brightness": lambda: align(*lights, found.pair, *points, around.motion),
            "whole pair": lambda: matcher.match(*images).points1[:0],
        }
        table = Table("", "torch, ms", "C, ms", "times as fast", "most that they differ by", "differ by over 0.01")
        for name, run in runs.items():
            plain, fast, expected, result = in_turns(run, options.repeats)
            error = np.abs(np.asarray(result) - np.asarray(expected))
            differ = (f"{error.max():.2g}", f"{(error > 0.01).mean():.2%}") if error.size else ("", "")
            table.add_row(name, f"{plain:.1f}", f"{fast:.1f}", f"{plain / fast:.1f}", *differ)
    console = Console(width=120)
    console.print(f"{width}x{height}, {len(found.pair):,} mutual matches, {torch.get_num_threads()} threads")
    console.print(table)


if __name__ == "__main__":
    main()
