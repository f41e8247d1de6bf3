"""The command that measures speed and memory."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from dualrc.cli import common, running
from dualrc.machine import device_name

# A laptop takes about a minute for these.
_SIZES = ((320, 240), (640, 480))


@running.command()
def bench(
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WxH",
            help="Size of both images and of the network input, rounded down to multiples of 16. Repeat the option to "
            "see how time and memory scale. Default: 320x240 and 640x480.",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        common.network_option(
            parser=device_name,
            metavar="NAME",
            help="Device: cuda (or gpu), mps or cpu; repeatable. Default: the fastest available.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        common.network_option(
            help="Engine for all stages after the backbone: native or torch on a CPU; triton+graphs, triton or torch "
            "on a GPU. Repeat the option to compare engines. Default: the fastest for the device."
        ),
    ] = None,
    preset: common.PresetOption = "default",
    weights: Annotated[
        Path | None,
        common.network_option(
            help="Weights file (.safetensors). Default: the bundled weights, or random weights for a preset without; "
            "its search is then timed on synthetic features."
        ),
    ] = None,
    precision: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"] | None,
        common.network_option(
            help="Precision of the backbone. Default: float16 on a GPU, int8 on a CPU with VNNI, else float32."
        ),
    ] = None,
    max_memory: common.MaxMemoryOption = None,
    pair: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Two images, scaled to each size. Default: rendered images of a synthetic town."
        ),
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="Method to compare with; repeatable. reference: the formulas, one entry at a time, for small sizes. "
            "loftr: kornia's LoFTR with random weights. sift: OpenCV's SIFT with brute-force matching.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Number of pairs in a batch. Default: 32 on a GPU, 4 on a CPU. 0: do not time batches."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Number of timed runs of each stage, after warm-up. Default: 20 on a GPU, 5 on a CPU. 0: measure "
            "memory only."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File for all measurements, with machine and versions: FILE.json."),
    ] = None,
) -> dict[str, Any]:
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
    from dualrc.bench import BenchSettings
    from dualrc.bench import bench as run

    settings = BenchSettings(
        sizes=tuple(dict.fromkeys(map(common.parse_size, size or ()))) or _SIZES,
        devices=tuple(dict.fromkeys(device or ())),
        engines=tuple(dict.fromkeys(engine or ())),
        preset=preset,
        weights=weights,
        precision=precision,
        max_memory=max_memory,
        pair=pair,
        batch=batch,
        others=tuple(dict.fromkeys(others or ())),
        repeats=repeats,
        out=out,
    )
    messages = Console(stderr=True, quiet=True) if common.quiet else common.messages
    return run(settings, screen=common.screen, messages=messages)
