"""Compare exported models on ONNX Runtime with torch, pair by pair on HPatches sequences.

python benchmarks/onnx_parity.py data/hpatches data/oxford

All methods match the same images in a single pass, in float32 and on one thread. They take turns on each pair. Times
are CPU seconds per pair. Memory is the peak resident set of a process that matches the largest pair.
"""

import argparse
import json
import os
import re
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
from dualrc.types import FloatArray, ImageArray

TOP = 1000
# Maximum difference of coordinates, in pixels, of matches that count as equal.
SAME_PX = 0.1
THRESHOLDS_PX = (1, 3, 5)
METHODS = ("torch", "native", "onnx")

Match = Callable[[ImageArray, ImageArray], Matches]


def make_matcher(method: str, models: Path) -> Match:
    """Return a function that matches two images in a single pass, in float32 on one thread."""
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
    """Return the fraction of the reference matches that are also in `matches`, within 0.1 px."""
    here, there = (np.hstack([m.points0, m.points1]) for m in (matches, reference))
    if not len(there):
        return 1.0
    apart = np.abs(there[:, None] - here[None]).max(2, initial=0)
    return float((apart.min(1, initial=np.inf) <= SAME_PX).mean())


def show_memory(method: str, models: Path, paths: list[Path]) -> None:
    """Match one pair and print the peak resident set of this process, in MiB."""
    make_matcher(method, models)(read(paths[0]), read(paths[1]))
    # getrusage would include the memory of the parent at the start of this process.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    print(int(peak) // 1024)


def main() -> None:
    """Match all pairs with all methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", type=Path, nargs="+", help="folders of HPatches sequences, or sequences")
    parser.add_argument("--models", type=Path, help="folder of exported models; without it, they are exported first")
    parser.add_argument("--store", type=Path, help="file for the results of each pair; pairs in it are skipped")
    # Used internally, for the process that measures the memory of one method.
    parser.add_argument("--memory", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        show_memory(options.memory, options.models, options.roots)
        return
    with tempfile.TemporaryDirectory() as folder:
        models, store = options.models, options.store or Path(folder) / "results.jsonl"
        if models is None:
            from dualrc.onnx.export import export

            models = Path(folder)
            export(models)
        benchmark = HPatches(HPatchesSettings(roots=tuple(options.roots), out=Path(os.devnull)))
        compare(benchmark, models, store)
        results = read_results(store)
        show([results[pair.name1] for pair in benchmark.pairs], benchmark, models)


def read_results(store: Path) -> dict[str, Any]:
    """Return the results in a file by the name of the second image."""
    lines = store.read_text(encoding="utf-8").splitlines() if store.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def compare(benchmark: HPatches, models: Path, store: Path) -> None:
    """Match the pairs that are not in the store, with all methods in turn."""
    done = read_results(store)
    pairs = [pair for pair in benchmark.pairs if pair.name1 not in done]
    matchers = {method: make_matcher(method, models) for method in METHODS} if pairs else {}
    for pair in pairs:
        images = read(pair.path0), read(pair.path1)
        result: dict[str, Any] = {"name": pair.name1, "pixels": images[0].size + images[1].size}
        found = {}
        for method, match in matchers.items():
            begin = time.process_time()
            found[method] = match(*images)
            result[method] = {
                "seconds": time.process_time() - begin,
                "accuracy": share_within(
                    match_errors_px(found[method], benchmark.homographies[pair]), THRESHOLDS_PX
                ).tolist(),
                "same": share_same(found[method], found["torch"]),
                "pair_score": found[method].pair_score,
                "exact": found[method].info.get("exact", 1.0),
            }
        with store.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        line = ", ".join(f"{method} {result[method]['same']:.3f}" for method in METHODS)
        print(f"{pair.name1}: {line}, exact {result['onnx']['exact']:.3f}", flush=True)


def show(results: list[dict[str, Any]], benchmark: HPatches, models: Path) -> None:
    """Print a table of the results of all pairs."""
    columns = ["", f"best {TOP} equal", "worst pair", *(f"{px} px" for px in THRESHOLDS_PX)]
    table = Table(*columns, "pair_score differs by", "CPU time", "ratio", "memory", title=f"{len(results)} pairs")
    largest = benchmark.pairs[int(np.argmax([result["pixels"] for result in results]))]

    def column(method: str, name: str) -> FloatArray:
        return np.array([result[method][name] for result in results])

    for method in METHODS:
        command = [sys.executable, __file__, "--memory", method, "--models", str(models)]
        paths = [str(largest.path0), str(largest.path1)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        peak = subprocess.run([*command, *paths], capture_output=True, text=True, check=True, env=environment).stdout
        seconds = column(method, "seconds")
        table.add_row(
            method,
            f"{column(method, 'same').mean():.4f}",
            f"{column(method, 'same').min():.3f}",
            *(f"{value:.4f}" for value in column(method, "accuracy").mean(0)),
            f"{np.abs(column(method, 'pair_score') - column('torch', 'pair_score')).max():.4f}",
            f"{np.median(seconds):.2f} s",
            f"{np.median(seconds / column('torch', 'seconds')):.2f}",
            f"{int(peak)} MiB",
        )
    console, exact = Console(width=130), column("onnx", "exact")
    console.print(table)
    console.print(f"exact matches: {exact.mean():.4f} on average, {exact.min():.3f} on the worst pair")


if __name__ == "__main__":
    main()
