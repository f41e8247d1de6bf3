"""The command that measures speed and memory."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from dualrc.cli import common, running
from dualrc.config import MIN_SIDE
from dualrc.errors import ConfigError
from dualrc.machine import device_name
from dualrc.types import Size

_SIZES = ((320, 240), (640, 480))  # a laptop does these in a minute


@running.command()
def bench(
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WxH",
            help="Size of both pictures, which is also what the network sees (in multiples of 16). Give it several "
            "times, such as 400x304, 800x608 and 1600x1216, to see how time and memory grow; without it, 320x240 and "
            "640x480.",
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            parser=device_name,
            metavar="NAME",
            help="cuda (or gpu), mps or cpu, also several times; without it, the best there is.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="What carries out everything after the backbone: native or torch on a CPU, triton+graphs, triton or "
            "torch on a GPU. Several times: all stages by each of them, in turn. Without it, the best for the device."
        ),
    ] = None,
    preset: common.PresetOption = "default",
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights file (.safetensors); without it, those inside the package. A preset that has none there is "
            "timed with generated weights, and its search on planted features."
        ),
    ] = None,
    precision: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"] | None,
        typer.Option(help="Of the backbone; without it, float16 on a GPU, int8 on a CPU that has VNNI, else float32."),
    ] = None,
    max_memory: common.MaxMemoryOption = None,
    pair: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Two pictures, scaled to each size; without them, a made-up town."),
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="Beside it, in turn with it: reference (the formulas an entry at a time, small sizes only), loftr "
            "(kornia's, weights generated), sift (OpenCV's, brute-force matching). Several times.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Pairs that are matched as one batch; without it, 32 on a GPU, else 4; 0: no batches."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Runs of each stage after warming up; without it, 20 on a GPU, else 5; 0: memory alone."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all figures, machine and versions here: FILE.json.")
    ] = None,
) -> dict[str, Any]:
    """Time each stage of matching and the whole, with peak memory, and how both grow with the picture.

    dualrc bench --size 320x240 --size 640x480 --with sift --out bench.json

    Times are medians, with the middle half of the runs beside them; all stages and methods take turns.

    A whole pair goes from decoded pictures to matches; a further pair has the features of its pictures already.

    Peak memory is what torch allocated on a GPU; on a CPU, the resident memory of a fresh process.

    Shares compare a stage with a large product of matrices, and a large copy, on this device: the larger one counts.

    The paper's network on a GPU, without trained weights:

    dualrc bench --preset paper --device cuda --size 800x592 --size 1600x1200

    The kernels in C beside plain PyTorch:

    dualrc bench --engine native --engine torch

    Beside others on two cores, compared in one run:

    dualrc bench --threads 2 --device cpu --size 640x480 --with loftr --with sift
    """
    from dualrc.bench import BenchSettings
    from dualrc.bench import bench as run

    settings = BenchSettings(
        sizes=tuple(dict.fromkeys(map(_parse_size, size or ()))) or _SIZES,
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
    messages = Console(stderr=True, quiet=True) if common.current.quiet else common.messages
    return run(settings, screen=common.screen, messages=messages)


def _parse_size(text: str) -> Size:
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip().lower())
    if found is None:
        raise ConfigError(f"--size {text} is no size; give WIDTHxHEIGHT in pixels, such as 640x480.")
    size = int(found[1]), int(found[2])
    if min(size) < MIN_SIDE:
        raise ConfigError(f"--size {text} is too small; give at least {MIN_SIDE} pixels a side.")
    return size
