"""The command that measures speed and memory."""

from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from dualrc.bench import BenchSettings
from dualrc.bench import bench as run
from dualrc.cli import common, running
from dualrc.machine import device_name

# Options by field of BenchSettings.
_OPTIONS = {
    "sizes": typer.Option(
        "--size",
        parser=common.parse_size,
        metavar="WxH",
        help="Size of both images and of the network input, rounded down to multiples of 16. Repeat the option to "
        "see how time and memory scale. Default: 320x240 and 640x480.",
    ),
    "devices": common.network_option(
        "--device",
        parser=device_name,
        metavar="NAME",
        help="Device: cuda (or gpu), mps or cpu; repeatable. Default: the fastest available.",
    ),
    "engines": common.network_option(
        "--engine",
        help="Engine for all stages after the backbone: native or torch on a CPU; triton+graphs, triton or torch "
        "on a GPU. Repeat the option to compare engines. Default: the fastest for the device.",
    ),
    "preset": common.SHARED["preset"],
    "weights": common.network_option(
        help="Weights file (.safetensors). Default: the bundled weights, or random weights for a preset without; "
        "its search is then timed on synthetic features."
    ),
    "precision": common.network_option(
        help="Precision of the backbone. Default: float16 on a GPU, int8 on a CPU with VNNI, else float32."
    ),
    "max_memory": common.SHARED["max_memory"],
    "pair": typer.Option(
        metavar="A B", help="Two images, scaled to each size. Default: rendered images of a synthetic town."
    ),
    "others": typer.Option(
        "--with",
        help="Method to compare with; repeatable. reference: the formulas, one entry at a time, for small sizes. "
        "loftr: kornia's LoFTR with random weights. sift: OpenCV's SIFT with brute-force matching.",
    ),
    "batch": typer.Option(help="Number of pairs in a batch. Default: 32 on a GPU, 4 on a CPU. 0: do not time batches."),
    "repeats": typer.Option(
        help="Number of timed runs of each stage, after warm-up. Default: 20 on a GPU, 5 on a CPU. 0: measure "
        "memory only."
    ),
    "out": common.out_option(help="File for all measurements, with machine and versions: FILE.json."),
}


@running.command()
def bench(settings: Annotated[BenchSettings, _OPTIONS]) -> dict[str, Any]:
    """Measure time and peak memory of matching, per stage and in total.

    Times are medians and interquartile ranges. Runs of all stages and methods are interleaved.

    "Whole pair" runs from decoded images to matches. "Further pair" starts from cached features.

    Peak memory on a GPU is the memory that torch allocated; on a CPU, the resident memory of a new process.

    "Of matrix rate" and "of bandwidth" compare a stage with a large matrix product and a large copy on the same device.

    Examples:
      dualrc bench --size 320x240 --size 640x480 --with sift --out bench.json
      dualrc bench --preset paper --device cuda --size 800x592 --size 1600x1200
      dualrc bench --engine native --engine torch
      dualrc bench --threads 2 --device cpu --size 640x480 --with loftr --with sift
    """
    # An option that is passed twice with the same value counts once.
    repeatable = ("sizes", "devices", "engines", "others")
    distinct: dict[str, Any] = {name: tuple(dict.fromkeys(getattr(settings, name))) for name in repeatable}
    settings = replace(settings, **distinct)
    messages = Console(stderr=True, quiet=True) if common.quiet else common.messages
    return run(settings, screen=common.screen, messages=messages)
