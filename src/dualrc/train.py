"""The training loop."""

import copy
import csv
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from dualrc.config import PRESETS, NetworkConfig, to_toml
from dualrc.data.pairs import PairBatch
from dualrc.data.photos import PhotoMotion, PhotoPairs, Photos, read_photos
from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.files import is_file, replacing
from dualrc.image import STRIDE
from dualrc.losses import matching_losses
from dualrc.model.checkpoint import load_weights, save_weights
from dualrc.model.correlation import normalize
from dualrc.model.dualrc import DualRCNet, Features, make_network

Precision = Literal["float32", "bfloat16"]
_LOG_EVERY = 100  # steps


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
    precision: Precision = "bfloat16"  # of the backbone
    validate_every: int = 1000  # steps, and so often the run is saved
    validation_batches: int = 8

    def __post_init__(self) -> None:
        if not self.photos:
            raise ConfigError("photos is empty; name at least one folder or tar file.")
        if self.size < 64 or self.size % STRIDE:
            raise ConfigError(f"size = {self.size} must be a multiple of {STRIDE} and at least 64.")
        for name in ("pairs", "points", "steps", "validate_every", "validation_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1.")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)} must be above 0.")
        for name in ("warm_up", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)} must be 0 or more.")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average = {self.average} must be at least 0 and below 1.")


class TrainingStep(nn.Module):
    """Network and loss as one module, which is what gets distributed."""

    def __init__(self, network: DualRCNet, precision: Precision) -> None:
        super().__init__()
        self.network = network
        self.precision = precision

    def forward(self, *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The fields of a PairBatch to the loss and what is logged."""
        names = [f.name for f in fields(PairBatch)]
        batch = PairBatch(**dict(zip(names, tensors, strict=True)))
        images = torch.cat([batch.images0, batch.images1]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            coarse, fine = self.network.backbone(images)
        coarse, fine = coarse.float(), normalize(fine.float())  # cosines deserve their digits
        pictures = zip(coarse.chunk(2), fine.chunk(2), strict=True)
        features0, features1 = (Features(coarse=c, fine=f) for c, f in pictures)
        losses = matching_losses(self.network, features0, features1, batch)
        parts = {f.name: getattr(losses, f.name).detach() for f in fields(losses) if f.name != "accuracy"}
        return losses.total(), {**parts, **{name: value.detach() for name, value in losses.accuracy.items()}}


def train(
    config: TrainConfig, out: str | Path, *, minutes: float | None = None, device: str | None = None
) -> dict[str, float]:
    """Train, or go on with an unfinished run in `out`; leaves checkpoint.pt, log.csv and weights.safetensors there.

    Beside them, config.toml and versions.json say what was run. Stops after `minutes`, saving; the same call then
    continues as if it had never stopped. Gives the figures on held-out photographs.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    fabric = _fabric(device)
    torch.set_float32_matmul_precision("high")
    fabric.launch()
    run = _Run(config, Path(out), fabric)
    photos = read_photos(config.photos)
    run.report_broken(photos)
    training, held_out = _split(photos)
    next_batch = _batches(_maker(training, config, fabric.device), config.pairs, run.random)
    checker = _maker(held_out, config, fabric.device)
    figures: dict[str, float] = {}
    while run.step < config.steps:
        loss, parts = run.advance(next_batch())
        if run.step % _LOG_EVERY == 0:
            run.report(float(loss.detach()), parts)
        late = time.monotonic() > deadline
        if run.step % config.validate_every == 0 or run.step == config.steps or late:
            figures = _validate(run.average, checker, config)
            run.save(figures)
        if late:
            break
    return figures


def _fabric(device: str | None) -> Any:
    """Lightning's Fabric on a device that is there."""
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise ConfigError(f"Training needs Lightning ({error}): pip install 'dualrc[train]'.") from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
        return Fabric(accelerator=chosen.type, devices=1 if chosen.index is None else [chosen.index])
    except Exception as error:  # torch and Lightning refuse devices in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"The device {device!r} can't be used ({reason}); choose cpu, cuda or mps.") from error


class _Run:
    """The state of a training run, and how it is advanced, reported and saved."""

    def __init__(self, config: TrainConfig, out: Path, fabric: Any) -> None:
        _make_folder(out)
        self.config, self.out, self.fabric = config, out, fabric
        torch.manual_seed(config.seed)
        self.network = load_weights(config.start_from) if config.start_from else make_network(config.network)
        if self.network.subpixel is None:
            source = config.start_from or "The config's network"
            raise ConfigError(f"{source} has no sub-pixel refinement, which training needs; take another network.")
        self.network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = copy.deepcopy(self.network).eval().to(fabric.device)
        parameters = list(self.network.parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.99),
            fused=fabric.device.type == "cuda",
        )
        self.module, self.optimizer = fabric.setup(TrainingStep(self.network, config.precision), optimizer)
        self.random = torch.Generator(device=fabric.device).manual_seed(config.seed)
        self.step = 0
        self._resume()
        self._describe()
        self._averaged = _floating(self.average), _floating(self.network)
        self._console = Console(stderr=True)
        self._since, self._last_step = time.monotonic(), self.step

    def advance(self, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of the optimizer; gives the loss and its parts."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * _schedule(self.step, self.config)
        loss, parts = self.module(*(getattr(batch, f.name) for f in fields(batch)))
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.module, self.optimizer, max_norm=self.config.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        decay = min(self.config.average, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(*self._averaged, 1 - decay)
        return loss, parts

    def report_broken(self, photos: Photos) -> None:
        """Say which photographs are left out."""
        if photos.broken:
            names = ", ".join(photos.broken[:3]) + (", ..." if len(photos.broken) > 3 else "")
            line = f"Photographs left out as unreadable or too small: {len(photos.broken)} ({names})"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def report(self, loss: float, parts: dict[str, Tensor]) -> None:
        """Say how it goes and how long it will take."""
        if not math.isfinite(loss):
            raise DataError(
                f"The loss is not finite at step {self.step}; lower learning_rate and go on from {self.out}."
            )
        values = {name: float(value) for name, value in parts.items()}
        speed = (self.step - self._last_step) / (time.monotonic() - self._since)
        self._since, self._last_step = time.monotonic(), self.step
        self._log({"steps_per_second": speed, "loss": loss, **values})
        text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        left = (self.config.steps - self.step) / max(speed, 1e-6) / 60
        line = f"{self.step}/{self.config.steps}  {text}  {speed:.1f} steps/s  {left:.1f} min left"
        self._console.print(line, highlight=False, soft_wrap=True)

    def save(self, figures: dict[str, float]) -> None:
        """Write the checkpoint and the averaged weights; the old ones stay until the new ones are whole."""
        self._log({f"held_out_{name}": value for name, value in figures.items()})
        line = "held out: " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self._console.print(line, style="bold", highlight=False, soft_wrap=True)
        state = {
            "config": to_toml(self.config),
            "step": self.step,
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.get_state(),
        }
        with replacing(self.out / "checkpoint.pt") as temporary:
            torch.save(state, temporary)
        save_weights(self.average, self.out / "weights.safetensors", dtype=torch.float16)

    def _resume(self) -> None:
        """Go on from a checkpoint of the same config, if there is one."""
        path = self.out / "checkpoint.pt"
        try:
            if not path.exists():
                return
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["config"] == to_toml(self.config):
                self.network.load_state_dict(state["network"])
                self.average.load_state_dict(state["average"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.random.set_state(state["random"])
                self.step = int(state["step"])
                return
        except Exception as error:  # a broken file can fail in any way
            raise DataError(f"{path} is broken or can't be read; delete it, or choose another folder.") from error
        raise ConfigError(f"{path} belongs to another config; choose another folder, or delete it to start over.")

    def _describe(self) -> None:
        """Leave what is run, in words, in the folder."""
        device = self.fabric.device
        versions = {
            "dualrc": metadata.version("dualrc"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        }
        for name, text in (("config.toml", to_toml(self.config)), ("versions.json", json.dumps(versions, indent=2))):
            with replacing(self.out / name) as temporary:
                temporary.write_text(text.rstrip() + "\n", encoding="utf-8")

    def _log(self, values: dict[str, float]) -> None:
        path = self.out / "log.csv"
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([self.step, name, f"{value:.6g}"] for name, value in values.items())
        except OSError as error:
            raise OutputError(f"{path} can't be written ({error.strerror}); make room or write elsewhere.") from error


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = "it is a file" if is_file(path) else str(error)
        raise OutputError(f"The folder {path} can't be made ({reason}); choose another one.") from error


def _maker(photos: Photos, config: TrainConfig, device: torch.device) -> PhotoPairs:
    return PhotoPairs(photos, size=config.size, points=config.points, motion=config.motion, device=device)


def _split(photos: Photos) -> tuple[Photos, Photos]:
    """Nine tenths to train on, one to check with."""
    held_out = torch.arange(len(photos.sizes)) % 10 == 9
    if not held_out.any():
        return photos, photos

    def part(chosen: Tensor) -> Photos:
        return Photos(canvases=photos.canvases[chosen], sizes=photos.sizes[chosen], broken=photos.broken)

    return part(~held_out), part(held_out)


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
    """Make batches; on a GPU as one recorded graph, because its many small steps take longer to launch than to run."""

    @torch.no_grad()
    def make() -> PairBatch:
        return maker.make(pairs, random)

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
