"""Compares exported models on ONNX Runtime with torch, pair by pair on HPatches sequences.

python benchmarks/onnx_parity.py data/hpatches data/oxford

All look once, in float32 and on one thread, at the same images; the pairs are interleaved. Times are CPU seconds per
pair. The memory is the largest resident set of a process that matches the largest pair alone, libraries included.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dualrc.evaluation.hpatches import HPatches, HPatchesSettings
from dualrc.image import read
from dualrc.matches import Matches
from dualrc.metrics import match_errors_px, share_within
from dualrc.types import ImageArray

TOP = 1000
SAME_PX = 0.1
THRESHOLDS_PX = (1, 3, 5)
METHODS = ("torch", "native", "onnx")

Match = Callable[[ImageArray, ImageArray], Matches]


def make_matcher(method: str, models: Path) -> Match:
    """A function that matches two images once, in float32 on one thread."""
    if method == "onnx":
        from dualrc.onnx import Matcher

        runtime = Matcher(models, ["CPUExecutionProvider"], threads=1)
        return lambda image0, image1: runtime.match(image0, image1, top=TOP)
    import torch

    import dualrc

    torch.set_num_threads(1)
    matcher = dualrc.load(device="cpu", precision="float32", engine=method, threads=1, max_zoom=1.0)
    return lambda image0, image1: matcher.match(image0, image1, top=TOP)


def share_same(matches: Matches, reference: Matches) -> float:
    """The share of the reference's matches that are here too, both points within 0.1 px."""
    here, there = (np.hstack([m.points0, m.points1]) for m in (matches, reference))
    if not len(there):
        return 1.0
    apart = np.abs(there[:, None] - here[None]).max(2, initial=0)
    return float((apart.min(1, initial=np.inf) <= SAME_PX).mean())


def show_memory(method: str, models: Path, paths: list[Path]) -> None:
    """Match one pair and print the largest resident set of this process, in MiB."""
    import resource

    make_matcher(method, models)(read(paths[0]), read(paths[1]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    """Match all pairs by all methods and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", type=Path, nargs="+", help="folders of HPatches sequences")
    parser.add_argument("--models", type=Path, help="folder of exported models; without it, they are exported first")
    parser.add_argument("--pairs", type=int, help="only the first so many pairs")
    parser.add_argument("--memory", choices=METHODS, help=argparse.SUPPRESS)  # what a process of its own does
    options = parser.parse_args()
    if options.memory:
        show_memory(options.memory, options.models, options.roots)
        return
    with tempfile.TemporaryDirectory() as folder:
        models = options.models
        if models is None:
            from dualrc.onnx.export import export

            models = Path(folder)
            export(models)
        compare(options, models)


def compare(options: argparse.Namespace, models: Path) -> None:
    """Match all pairs in turn and print the table."""
    benchmark = HPatches(HPatchesSettings(roots=tuple(options.roots), out=Path(os.devnull)))
    pairs = benchmark.pairs[: options.pairs]
    matchers = {method: make_matcher(method, models) for method in METHODS}
    accuracy: dict[str, list[Any]] = {method: [] for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    same: dict[str, list[float]] = {method: [] for method in METHODS}
    pair_scores: dict[str, list[float]] = {method: [] for method in METHODS}
    exact, console, largest = [], Console(width=130), (0, pairs[0])
    for pair in pairs:
        images = read(pair.path0), read(pair.path1)
        largest = max(largest, (images[0].size + images[1].size, pair), key=lambda item: item[0])
        found = {}
        for method, match in matchers.items():
            begin = time.process_time()
            found[method] = match(*images)
            seconds[method].append(time.process_time() - begin)
            errors = match_errors_px(found[method], benchmark.homographies[pair])
            accuracy[method].append(share_within(errors, THRESHOLDS_PX))
            same[method].append(share_same(found[method], found["torch"]))
            pair_scores[method].append(found[method].pair_score)
        exact.append(found["onnx"].info["exact"])
        line = ", ".join(f"{method} {same[method][-1]:.3f} {seconds[method][-1]:.2f} s" for method in METHODS)
        console.print(f"{pair.name1}: {line}, exact {exact[-1]:.3f}", highlight=False)
    table = Table(
        "",
        f"best {TOP} the same",
        "worst pair",
        *(f"{px} px" for px in THRESHOLDS_PX),
        "pair_score differs by",
        "CPU time",
        "ratio",
        "memory",
        title=f"{len(pairs)} pairs",
    )
    reference = np.array(seconds["torch"])
    for method in METHODS:
        values = np.mean(accuracy[method], axis=0)
        apart = np.abs(np.subtract(pair_scores[method], pair_scores["torch"])).max()
        command = [sys.executable, __file__, "--memory", method, "--models", str(models)]
        paths = [str(largest[1].path0), str(largest[1].path1)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        peak = subprocess.run([*command, *paths], capture_output=True, text=True, check=True, env=environment).stdout
        table.add_row(
            method,
            f"{np.mean(same[method]):.4f}",
            f"{np.min(same[method]):.3f}",
            *(f"{value:.4f}" for value in values),
            f"{apart:.4f}",
            f"{np.median(seconds[method]):.2f} s",
            f"{np.median(np.array(seconds[method]) / reference):.2f}",
            f"{int(peak)} MiB",
        )
    console.print(table)
    console.print(f"exact matches: {np.mean(exact):.4f} on average, {np.min(exact):.3f} on the worst pair")


if __name__ == "__main__":
    main()
