"""Time a training step and its parts, with torch.compile and without.

    python benchmarks/train_step.py --photos photos --teacher teacher.safetensors
    python benchmarks/train_step.py --device cpu --size 64 --pairs 2 --compile off

Motion and light of the pairs are those of a training config. On a GPU every part is a CUDA graph, as in training. The
versions are timed in turns. Without photos, random textures are used, which take as long.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import dualrc
from dualrc.data import PairBatch, PhotoPairs, PhotosConfig, read_photos
from dualrc.data.photos import Photos
from dualrc.measure import time_interleaved
from dualrc.model.checkpoint import load_weights
from dualrc.ops.training import TrainingEngine
from dualrc.toml import read_toml
from dualrc.train import TrainConfig
from dualrc.train.batches import Batches, captured
from dualrc.train.config import TeacherConfig
from dualrc.train.loop import make_optimizer
from dualrc.train.step import CapturedUpdate, TrainingStep, Update
from dualrc.train.teacher import Teacher

CONFIG = Path(__file__).parents[1] / "configs" / "default-4.toml"
WEIGHTS = Path(dualrc.__file__).parent / "weights" / "default.safetensors"
# Number of random textures.
TEXTURES = 64
PARTS = ("making pairs", "backbone", "losses", "teacher", "step without pairs", "training")

Run = Callable[[], object]


def textures(canvas: int) -> Photos:
    """Return photos of smooth random noise."""
    noise = torch.rand(TEXTURES, 3, canvas // 8, canvas // 8, generator=torch.Generator().manual_seed(0))
    canvases = functional.interpolate(noise, size=(canvas, canvas), mode="bilinear")
    return Photos(canvases=(255 * canvases).byte(), sizes=torch.full((TEXTURES, 2), canvas), broken=())


def graphed(run: Run, device: torch.device) -> Run:
    """Return the function as a CUDA graph, with everything it reads; on other devices, return it as it is."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()

    def replay() -> Run:
        graph.replay()
        # A graph does not keep the tensors that it reads, but the function does.
        return run

    return replay


def with_gradients(loss: Callable[[], Tensor], wanted: list[Tensor]) -> None:
    """Compute the gradients of a loss, and drop them."""
    torch.autograd.grad(loss(), wanted, allow_unused=True)


def parts(config: TrainConfig, maker: PhotoPairs, weights: Path, device: torch.device) -> dict[str, Run]:
    """Return functions that run a training step and its parts."""
    network = load_weights(weights).train().to(device=device, memory_format=torch.channels_last)
    network.engine = TrainingEngine()
    network.backbone = network.engine.prepare(network.backbone)
    teacher = Teacher(config.teacher, device) if config.teacher else None
    step = TrainingStep(network, config, teacher)
    if config.compile:
        maker.compile()
        step.compile_parts()
    seeds = count()
    make = captured(maker, config.pairs, device)
    with torch.no_grad():
        tensors = [tensor.clone() for tensor in make(next(seeds)).tensors()]
        batch = PairBatch.of(tensors)
        features = step.extract(batch.images0, batch.images1)
    parameters = [p for p in network.parameters() if p.requires_grad]
    maps = [t.clone().requires_grad_() for m in (features.coarse, features.fine) for t in m.detach().chunk(2)]

    def backbone() -> Tensor:
        found = step.extract(batch.images0, batch.images1)
        return found.coarse.square().mean() + found.fine.sum()

    def losses() -> Tensor:
        return step.loss(*maps, *tensors)[0]

    optimizer = make_optimizer(network, config, device)
    fabric = SimpleNamespace(device=device, world_size=1)
    update: Update | CapturedUpdate = Update(step, optimizer, copy.deepcopy(network).eval(), network, config, fabric)
    if device.type == "cuda":
        update = CapturedUpdate(update)
    one = partial(update, 1, rate=1e-6, decay=0.999)
    batches, numbers = Batches(config, [maker], device), count()
    runs: dict[str, Run] = {
        "making pairs": torch.no_grad()(lambda: make(next(seeds))),
        "backbone": graphed(lambda: with_gradients(backbone, parameters), device),
        "losses": graphed(lambda: with_gradients(losses, maps + parameters), device),
        "step without pairs": lambda: one(tensors),
        "training": lambda: one(batches.get(next(numbers), [0]).tensors()),
    }
    if batch.clean0 is not None:
        teach = partial(step.teach, features.coarse.detach(), batch.clean0, batch.clean1)
        runs["teacher"] = graphed(torch.no_grad()(teach), device)
    return runs


def main() -> None:
    """Time all parts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", nargs="+", metavar="PATH", help="folders and tar files; default: random textures")
    parser.add_argument("--config", type=Path, default=CONFIG, help="training config; default: %(default)s")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="weights file; default: the bundled one")
    parser.add_argument("--teacher", metavar="FILE", help="teacher, as in the config; default: none")
    parser.add_argument("--device", default="cuda", help="cuda or cpu; default: %(default)s")
    parser.add_argument("--size", type=int, help="side of the images; default: that of the config")
    parser.add_argument("--pairs", type=int, help="pairs per step; default: those of the config")
    parser.add_argument("--canvas", type=int, help="side of the photos; default: that of the config")
    parser.add_argument("--compile", nargs="+", choices=["off", "on"], default=["off", "on"], help="default: both")
    parser.add_argument("--heuristics", action="store_true", help="convolutions that cuDNN guesses, not the fastest")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds; default: %(default)s")
    parser.add_argument("--repeat", type=int, default=10, help="runs of each part in a round; default: %(default)s")
    options = parser.parse_args()
    device, config = torch.device(options.device), read_toml(TrainConfig, options.config)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = not options.heuristics
    source = next(source for source in config.data if isinstance(source, PhotosConfig))
    teacher = None
    if options.teacher:
        teacher = replace(config.teacher or TeacherConfig(file=""), file=options.teacher)
    config = replace(
        config,
        data=(source,),
        start_from=None,
        teacher=teacher,
        size=options.size or config.size,
        pairs=options.pairs or config.pairs,
    )
    canvas = options.canvas or source.canvas
    photos = read_photos(options.photos, canvas=canvas) if options.photos else textures(canvas)
    runs: dict[tuple[str, str], Run] = {}
    for name in options.compile:
        begin = time.perf_counter()
        maker = PhotoPairs(
            photos,
            size=config.size,
            points=config.points,
            motion=source.motion,
            device=device,
            sensors=source.sensors,
            clean=teacher is not None,
        )
        for part, run in parts(replace(config, compile=name == "on"), maker, options.weights, device).items():
            runs[part, name] = lambda run=run: [run() for _ in range(options.repeat)]
        print(f"compile {name}: prepared in {time.perf_counter() - begin:.0f} s", flush=True)
    timings, failures = time_interleaved(runs, device, repeats=options.rounds, limit_s=math.inf)
    title = f"{config.pairs} pairs of {config.size} px on {device}: median ms (interquartile range)"
    table = Table("", *(f"compile {name}" for name in options.compile), title=title)
    scale = 1e3 / options.repeat
    for part in PARTS:
        found = [timings.get((part, name)) for name in options.compile]
        if any(found):
            table.add_row(
                part,
                *(
                    "" if t is None else f"{scale * t.median_s:.2f} ({scale * t.low_s:.2f} to {scale * t.high_s:.2f})"
                    for t in found
                ),
            )
    rates = [config.pairs * options.repeat / t.median_s for (part, _), t in timings.items() if part == "training"]
    table.add_row("training, pairs a second", *(f"{rate:.1f}" for rate in rates))
    for (part, name), reason in failures.items():
        print(f"{part}, compile {name}: {reason}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
