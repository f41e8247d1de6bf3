"""The training loop."""

import copy
import csv
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from dualrc.config import PRESETS, NetworkConfig, to_toml
from dualrc.data.pairs import PairBatch
from dualrc.data.photos import PhotoMotion, PhotoPairs, Photos, read_photos
from dualrc.errors import ConfigError, DataError
from dualrc.files import replacing
from dualrc.losses import matching_losses
from dualrc.model.checkpoint import load_weights, save_weights
from dualrc.model.correlation import normalize
from dualrc.model.dualrc import DualRCNet, Features, make_network


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    # Folders and tar files of photographs; every tenth photograph is held out for validation.
    photos: tuple[str, ...]
    network: NetworkConfig = field(default_factory=lambda: PRESETS["default"][0])
    motion: PhotoMotion = field(default_factory=PhotoMotion)
    start_from: str | None = None  # weights file to go on from
    seed: int = 0
    size: int = 320  # side of the pictures
    pairs: int = 32  # a step
    points: int = 256  # places a pair
    steps: int = 10_000
    learning_rate: float = 1e-3
    warm_up: int = 500  # steps
    weight_decay: float = 0.01
    clip: float = 1.0  # norm of the gradient
    average: float = 0.999  # decay of the averaged weights
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # of the backbone
    compile: bool = False
    validate_every: int = 1000
    validation_batches: int = 8


class TrainingStep(nn.Module):
    """Network and loss as one module, which is what gets distributed."""

    def __init__(self, network: DualRCNet, precision: Literal["float32", "bfloat16"]) -> None:
        super().__init__()
        self.network = network
        self.precision = precision

    def forward(self, *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The fields of a PairBatch to the loss and what is logged."""
        names = [f.name for f in fields(PairBatch)]
        batch = PairBatch(**dict(zip(names, tensors, strict=True)))
        images = torch.cat([batch.images0, batch.images1]).contiguous(memory_format=torch.channels_last)
        coarse, fine = self.network.backbone(images)
        count = len(batch.images0)
        # The rest is cheap, and cosines deserve their digits.
        with torch.autocast(images.device.type, enabled=False):
            fine = nn.functional.normalize(fine.float(), dim=1, eps=1e-3)
            features = [
                Features(coarse=c.float(), fine=f) for c, f in zip(coarse.split(count), fine.split(count), strict=True)
            ]
            losses = matching_losses(self.network, features[0], features[1], batch)
            parts = {f.name: getattr(losses, f.name).detach() for f in fields(losses) if f.name != "accuracy"}
            return losses.total(), {**parts, **{name: value.detach() for name, value in losses.accuracy.items()}}


def train(
    config: TrainConfig, out: str | Path, *, minutes: float | None = None, device: str | None = None
) -> dict[str, float]:
    """Train, or go on with an unfinished run in `out`; leaves checkpoint.pt, log.csv and weights.safetensors there.

    Stops after `minutes`, saving; the same call then continues as if it had never stopped.
    """
    from lightning.fabric import Fabric

    started = time.monotonic()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    accelerator = device or ("cuda" if torch.cuda.is_available() else "cpu")
    fabric = Fabric(accelerator=accelerator, devices=1, precision="32-true")
    fabric.launch()
    console = Console(stderr=True)
    torch.manual_seed(config.seed)
    network = load_weights(config.start_from) if config.start_from else make_network(config.network)
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = copy.deepcopy(network).eval().to(fabric.device)
    if config.compile:
        network.backbone.compile()
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(0.9, 0.99),
        fused=fabric.device.type == "cuda",
    )
    step_module, optimizer = fabric.setup(TrainingStep(network, config.precision), optimizer)
    training, held_out = _split(read_photos(config.photos))
    maker = _maker(training, config, fabric.device)
    checker = _maker(held_out, config, fabric.device)
    random = torch.Generator(device=fabric.device).manual_seed(config.seed)
    step = _resume(out, config, network, average, optimizer, random)
    next_batch = _batches(maker, config.pairs, random)
    averaged = _floating(average), _floating(network)
    log = _Log(out / "log.csv")
    figures: dict[str, float] = {}
    since, last_step = time.monotonic(), step
    while step < config.steps:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _schedule(step, config)
        batch = next_batch()
        loss, parts = step_module(*(getattr(batch, f.name) for f in fields(batch)))
        fabric.backward(loss)
        fabric.clip_gradients(step_module, optimizer, max_norm=config.clip, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        torch._foreach_lerp_(*averaged, 1 - min(config.average, (1 + step) / (10 + step)))
        if step % 100 == 0:
            values = {name: float(value) for name, value in parts.items()}
            if not math.isfinite(float(loss)):
                raise DataError(f"The loss is not finite at step {step}; lower learning_rate and resume from {out}.")
            speed = (step - last_step) / (time.monotonic() - since)
            since, last_step = time.monotonic(), step
            log.write({"step": step, "steps_per_second": speed, **values})
            text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
            left = (config.steps - step) / max(speed, 1e-6) / 60
            console.print(f"{step}/{config.steps}  {text}  {speed:.1f} steps/s  {left:.1f} min left", highlight=False)
        timed_out = minutes is not None and time.monotonic() - started > minutes * 60
        if step % config.validate_every == 0 or step == config.steps or timed_out:
            figures = _validate(average, checker, config)
            log.write({"step": step, **{f"held_out_{name}": value for name, value in figures.items()}})
            console.print("held out: " + "  ".join(f"{k} {v:.4f}" for k, v in figures.items()), style="bold")
            _save(out, config, network, average, optimizer, random, step)
        if timed_out:
            break
    return figures


def _maker(photos: Photos, config: TrainConfig, device: torch.device) -> PhotoPairs:
    return PhotoPairs(photos, size=config.size, points=config.points, motion=config.motion, device=device)


def _split(photos: Photos) -> tuple[Photos, Photos]:
    """Nine tenths to train on, one to check with."""
    held_out = torch.arange(len(photos.sizes)) % 10 == 9
    if not held_out.any():
        return photos, photos
    return tuple(  # type: ignore[return-value]
        Photos(canvases=photos.canvases[chosen], sizes=photos.sizes[chosen], broken=photos.broken)
        for chosen in (~held_out, held_out)
    )


def _schedule(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    if step < config.warm_up:
        return (step + 1) / config.warm_up
    progress = (step - config.warm_up) / max(1, config.steps - config.warm_up)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _floating(network: nn.Module) -> list[Tensor]:
    """Parameters and statistics, without gradients."""
    return [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]


def _batches(maker: PhotoPairs, pairs: int, random: torch.Generator) -> Callable[[], PairBatch]:
    """Make batches; on a GPU as one recorded graph, because launching its many small steps takes longer than they do."""
    make = torch.no_grad()(lambda: maker.make(pairs, random))
    if maker.device.type != "cuda":
        return make
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(random)
    state = random.get_state()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            make()
    torch.cuda.current_stream().wait_stream(side)
    random.set_state(state)
    with torch.cuda.graph(graph):
        batch = make()

    def replay() -> PairBatch:
        graph.replay()
        return batch

    return replay


@torch.no_grad()
def _validate(network: DualRCNet, maker: PhotoPairs, config: TrainConfig) -> dict[str, float]:
    """Figures on held-out photographs, the same pairs every time."""
    random = torch.Generator(device=maker.device).manual_seed(1)
    step = TrainingStep(network, config.precision)
    totals: dict[str, float] = {}
    for _ in range(config.validation_batches):
        batch = maker.make(config.pairs, random)
        _, parts = step(*(getattr(batch, f.name) for f in fields(batch)))
        for name, value in parts.items():
            totals[name] = totals.get(name, 0.0) + float(value) / config.validation_batches
    return totals


def _save(
    out: Path,
    config: TrainConfig,
    network: DualRCNet,
    average: DualRCNet,
    optimizer: Any,
    random: torch.Generator,
    step: int,
) -> None:
    """Write the checkpoint and the averaged weights; the old ones stay until the new ones are whole."""
    state = {
        "config": to_toml(config),
        "step": step,
        "network": network.state_dict(),
        "average": average.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": random.get_state(),
        "torch_random": torch.get_rng_state(),
    }
    with replacing(out / "checkpoint.pt") as temporary:
        torch.save(state, temporary)
    save_weights(average, out / "weights.safetensors", dtype=torch.float16)


def _resume(
    out: Path, config: TrainConfig, network: DualRCNet, average: DualRCNet, optimizer: Any, random: torch.Generator
) -> int:
    """Go on from a checkpoint of the same config, if there is one; the step to go on with."""
    path = out / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["config"] != to_toml(config):
        raise ConfigError(f"{path} belongs to another config; choose another folder, or delete it to start over.")
    network.load_state_dict(state["network"])
    average.load_state_dict(state["average"])
    optimizer.load_state_dict(state["optimizer"])
    random.set_state(state["random"])
    torch.set_rng_state(state["torch_random"])
    return int(state["step"])


class _Log:
    """Rows of named figures, appended to a CSV file; columns are fixed by the first row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: dict[str, float]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for name, value in row.items():
                if name != "step":
                    writer.writerow([int(row["step"]), name, f"{value:.6g}"])
