"""The training loop."""

import copy
import csv
import logging
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualrc.config import CompactConfig
from dualrc.data import FilePairs, Opened, PairBatch, PairMaker, PhotoPairs, open_pairs
from dualrc.errors import ConfigError, DataError
from dualrc.files import first_line, make_folder, only_run, replacing, write_json, write_text, writing
from dualrc.model.backbone import PaperBackbone, Trunk
from dualrc.model.checkpoint import load_imagenet_trunk, load_pickle, load_weights, save_weights
from dualrc.model.dualrc import DualRCNet, make_network
from dualrc.model.ncnet import SparseNCNet
from dualrc.model.network import Network
from dualrc.ops.training import TrainingEngine
from dualrc.provenance import provenance
from dualrc.toml import to_toml
from dualrc.train.batches import Batches
from dualrc.train.config import TrainConfig
from dualrc.train.images import draw_pairs
from dualrc.train.processes import share_batch_norm, stop_on_signals
from dualrc.train.step import CapturedUpdate, TrainingStep, Update
from dualrc.train.teacher import Teacher

logger = logging.getLogger(__name__)
# Interval of log entries, in steps.
_LOG_EVERY = 100
# Maximum time between messages, for slow steps.
_SAY_EVERY_S = 10.0
_LOCK = ".dualrc.lock"
# Scale of the initial weights of coarse channels that are added to a trained network.
_FAINT = 0.1


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    minutes: float | None = None,
    device: str | None = None,
    devices: int = 1,
    nodes: int = 1,
) -> dict[str, float]:
    """Train, or continue an unfinished run; write checkpoint.pt, log.csv and weights.safetensors to `out`.

    config.toml and versions.json in `out` describe the run, and `images/` shows matches of held-out pairs. The run
    saves a checkpoint and stops after `minutes`, or on Ctrl-C or SIGTERM (which is then raised). The same call
    continues as if it had never stopped. Progress goes to the log (`logging`, level INFO).

    With several `devices` or `nodes`, processes share the pairs of a step. Returns the metrics on held-out pairs.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    fabric = _fabric(device, devices, nodes)
    with _fast_math():
        fabric.launch()
        if config.parts % fabric.world_size:
            remedy = f"set parts to a multiple of {fabric.world_size}"
            raise ConfigError(f"{fabric.world_size} processes cannot share parts = {config.parts}; {remedy}.")
        # Only the first process writes files.
        with only_run(make_folder(out) / _LOCK) if fabric.global_rank == 0 else nullcontext():
            return _train(config, Path(out), fabric, deadline)


@contextmanager
def _fast_math() -> Iterator[None]:
    """Use TF32 and the fastest convolutions of cuDNN in the block; other work of the process keeps its settings."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    # All steps have the same shapes, so cuDNN measures its convolutions in the first one only.
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark


def _train(config: TrainConfig, out: Path, fabric: Any, deadline: float) -> dict[str, float]:
    run = _Run(config, out, fabric)
    open_data = partial(
        open_pairs, size=config.size, points=config.points, device=fabric.device, clean=config.teacher is not None
    )
    training = [open_data(d, hold_out=not config.validation) for d in config.data]
    validation = [open_data(d, hold_out=False) for d in config.validation]
    opened, held_out = training + validation, [each.held_out for each in validation or training]
    makers = [each.training for each in training]
    if config.compile and run.on_one_gpu:
        for maker in makers:
            if isinstance(maker, PhotoPairs):
                maker.compile()
    batches = Batches(config, makers, fabric.device)
    run.say_once(opened)
    parts = range(fabric.global_rank, config.parts, fabric.world_size)
    figures: dict[str, float] = {}
    with stop_on_signals() as stop:
        try:
            while run.step < config.steps:
                run.advance(batches.get(run.step, parts), len(parts))
                ending = stop.agreed(time.monotonic() > deadline, fabric.device) or run.step == config.steps
                if run.step % config.validate_every == 0 or ending:
                    if stop.asked:
                        run.say("Saving...")
                    else:
                        figures = run.validate(held_out)
                    run.save()
                    run.say_once(opened)
                if ending:
                    break
        finally:
            batches.close()
            for each in opened:
                each.close()
    if stop.asked:
        run.say(f"Saved a checkpoint at step {run.step}; run the same command again to continue.")
        signal.raise_signal(stop.asked)
    return figures


def _fabric(device: str | None, devices: int, nodes: int) -> Any:
    """Return Lightning Fabric on available devices."""
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise ConfigError(f"Training needs Lightning ({error}); run pip install 'dualrc[train]'.") from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
        several = devices > 1 or nodes > 1
        return Fabric(
            accelerator=chosen.type,
            devices=devices if chosen.index is None else [chosen.index],
            num_nodes=nodes,
            strategy="ddp" if several else "auto",
        )
    # Torch and Lightning raise many kinds of exceptions for unusable devices.
    except Exception as error:
        reason = first_line(error)
        raise ConfigError(f"The device {device!r} cannot be used ({reason}); choose cpu, cuda or mps.") from error


class _Run:
    """State of a training run, with its steps, validation, log and checkpoints."""

    def __init__(self, config: TrainConfig, out: Path, fabric: Any) -> None:
        self.config, self.out, self.fabric = config, out, fabric
        self._is_first = fabric.global_rank == 0
        if self._is_first:
            make_folder(out / "images")
        fabric.barrier()
        torch.manual_seed(config.seed)
        self.network = _network(config).to(fabric.device)
        if fabric.device.type == "cuda" and config.precision == "bfloat16":
            self.network.engine = TrainingEngine()
            self.network.backbone = self.network.engine.prepare(self.network.backbone)
        self.average = copy.deepcopy(self.network).eval()
        self.on_one_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
        self._teacher = Teacher(config.teacher, fabric.device) if config.teacher else None
        module = TrainingStep(self.network, config, self._teacher)
        if config.compile and self.on_one_gpu:
            module.compile_parts()
        self.optimizer = make_optimizer(self.network, config, fabric.device)
        if fabric.world_size > 1:
            share_batch_norm(self.network)
            module, self.optimizer = fabric.setup(module, self.optimizer)
        self.step = 0
        # The lowest validation loss so far, and whether the current weights have it.
        self._best, self._is_best = math.inf, False
        self._resume()
        if self._is_first:
            self._describe()
        self._update: Update | CapturedUpdate = Update(
            module, self.optimizer, self.average, self.network, config, fabric
        )
        self._skipped = self._update.skipped
        # A sparse tensor reads the number of its entries from the GPU, which a CUDA graph cannot do.
        if self.on_one_gpu and not isinstance(self.network, SparseNCNet):
            self._update = CapturedUpdate(self._update)
        self._said: set[str] = set()
        self._since, self._last_step = time.monotonic(), self.step

    def advance(self, batch: PairBatch, parts: int) -> None:
        """Run one step of the optimizer."""
        decay = min(self.config.average, (2 + self.step) / (11 + self.step))
        loss, logged = self._update(parts, batch.tensors(), rate=self.config.rate(self.step), decay=decay)
        self.step += 1
        if self.step % min(_LOG_EVERY, self.config.validate_every) == 0:
            self._report({"loss": loss, **logged}, log=True)
        elif time.monotonic() - self._since > _SAY_EVERY_S:
            self._report({"loss": loss, **logged}, log=False)

    def validate(self, makers: Sequence[PairMaker]) -> dict[str, float]:
        """Compute metrics on a fixed set of held-out pairs, and draw some of them."""
        figures: dict[str, float] = {}
        if self._is_first:
            step = TrainingStep(self.average, self.config, self._teacher)
            batches = self.config.validation_batches
            with torch.no_grad():
                for number in range(batches):
                    batch = self._validation_batch(makers, number)
                    loss, logged = step(1, *batch.tensors())
                    for name, value in {"loss": loss, **logged}.items():
                        figures[name] = figures.get(name, 0.0) + float(value) / batches
                    if number == 0:
                        draw_pairs(self.average, batch, self.out / "images" / f"{self.step:07}.jpg")
            self._log({f"held_out_{name}": value for name, value in figures.items()})
            self.say("validation: " + "  ".join(f"{n} {v:.4f}" for n, v in figures.items()))
            # A NaN is never the best.
            self._is_best = figures["loss"] < self._best
            if self._is_best:
                self._best = figures["loss"]
        self.fabric.barrier()
        return figures

    def _validation_batch(self, makers: Sequence[PairMaker], number: int) -> PairBatch:
        """Return a fixed batch; with a list of pairs, successive batches take successive pairs."""
        count, maker = self.config.pairs // self.config.parts, makers[number % len(makers)]
        if isinstance(maker, FilePairs):
            return maker.make_in_order(number // len(makers) * count, count, seed=1)
        return maker.make(count, torch.Generator(device=self.fabric.device).manual_seed(1 + number))

    def save(self) -> None:
        """Write the checkpoint and the averaged weights atomically."""
        if self._is_first:
            state = {
                "config": to_toml(self.config),
                "step": self.step,
                "best": self._best,
                "network": self.network.state_dict(),
                "average": self.average.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            with replacing(self.out / "checkpoint.pt") as temporary:
                torch.save(state, temporary)
            weights = self.out / "weights.safetensors"
            if self.config.keep == "last" or self._is_best or not weights.exists():
                save_weights(self.average, weights, dtype=torch.float16)
            # Further steps change the weights.
            self._is_best = False
        self.fabric.barrier()

    def say(self, line: str, level: int = logging.INFO) -> None:
        """Log a message, once for all processes."""
        if self._is_first:
            logger.log(level, line)

    def say_once(self, opened: Sequence[Opened]) -> None:
        """Log data that could not be used, if that was not logged yet."""
        for line in (line for each in opened for line in each.report()):
            if line not in self._said:
                self.say(line, logging.WARNING)
                self._said.add(line)

    def _report(self, logged: dict[str, Tensor], *, log: bool) -> None:
        """Log losses, speed and remaining time."""
        values = {name: float(value) for name, value in logged.items()}
        steps = self.step - self._last_step
        speed = steps / (time.monotonic() - self._since)
        skipped = int(self._skipped)
        self._skipped.zero_()
        self._since, self._last_step = time.monotonic(), self.step
        if log and self._is_first:
            self._log({"steps_per_second": speed, "learning_rate": self.config.rate(self.step - 1), **values})
        text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        left = (self.config.steps - self.step) / max(speed, 1e-6) / 60
        self.say(f"{self.step}/{self.config.steps}  {text}  {speed:.1f} steps/s  {left:.1f} min left")
        if skipped:
            words = f"The gradient was not finite in {skipped} of {steps} steps, which were skipped."
            self.say(words, logging.WARNING)
        if skipped > steps / 2:
            remedy = f"lower learning_rate and start from {self.out / 'weights.safetensors'}"
            raise DataError(f"The loss is not finite in most steps up to {self.step}; {remedy}.")

    def _resume(self) -> None:
        """Continue from a checkpoint of the same config, if there is one."""
        path = self.out / "checkpoint.pt"
        try:
            if not path.exists():
                return
            state = load_pickle(path)
            if state["config"] == to_toml(self.config):
                self.network.load_state_dict(state["network"])
                self.average.load_state_dict(state["average"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.step = int(state["step"])
                # Checkpoints of earlier versions have none.
                self._best = float(state.get("best", math.inf))
                return
        # A damaged file can raise any exception.
        except Exception as error:
            raise DataError(f"{path} is damaged or unreadable; delete it, or choose another folder.") from error
        raise ConfigError(f"{path} belongs to another config; choose another folder, or delete it to start over.")

    def _describe(self) -> None:
        """Write the configuration and versions to the folder."""
        write_text(self.out / "config.toml", to_toml(self.config).rstrip() + "\n")
        made = provenance("lightning", device=self.fabric.device, processes=self.fabric.world_size)
        write_json(self.out / "versions.json", made)

    def _log(self, values: dict[str, float]) -> None:
        path = self.out / "log.csv"
        with writing(path), path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.step, name, f"{value:.6g}"] for name, value in values.items())


def _started(config: TrainConfig) -> Network:
    """Load the network of the weights file to continue from, enlarged where the config has more parts.

    A context, residual blocks and coarse channels can be added. Contexts and blocks start as the identity, and channels
    close to zero, so the enlarged network begins with nearly the same output.
    """
    assert config.start_from is not None
    network = load_weights(config.start_from)
    old, wanted = network.config, config.network
    new = replace(old, context=old.context or wanted.context)
    if isinstance(old.backbone, CompactConfig) and isinstance(wanted.backbone, CompactConfig):
        d4, d8, d16, d32 = map(max, old.backbone.depths, wanted.backbone.depths)
        channels = max(old.backbone.coarse_channels, wanted.backbone.coarse_channels)
        new = replace(new, backbone=replace(old.backbone, depths=(d4, d8, d16, d32), coarse_channels=channels))
    if new == old:
        return network
    larger = make_network(new)
    state = larger.state_dict()
    for name, tensor in network.state_dict().items():
        # Rows are added to the last layer of the coarse map only.
        state[name] = torch.cat([tensor, _FAINT * state[name][len(tensor) :]]) if tensor.ndim else tensor
    larger.load_state_dict(state)
    return larger


def _network(config: TrainConfig) -> Network:
    """Make the network to train, in training mode; a ResNet backbone stays frozen."""
    network = _started(config) if config.start_from else make_network(config.network)
    source = config.start_from or "The config's network"
    if config.loss == "matching" and not (isinstance(network, DualRCNet) and network.subpixel is not None):
        remedy = 'use another network, or loss = "paper"'
        raise ConfigError(f"{source} has no sub-pixel refinement, which the loss trains; {remedy}.")
    if config.loss == "weak" and isinstance(network, DualRCNet):
        raise ConfigError(
            f'{source} is a DualRC-Net, whose fine features loss = "weak" cannot train; use another loss.'
        )
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if isinstance(network.backbone, (PaperBackbone, Trunk)):
        trunk = network.backbone.trunk
        conv5 = trunk.layer4
        if config.trunk is not None:
            if config.train_conv5:
                trunk.layer4 = None
            load_imagenet_trunk(trunk, config.trunk)
            trunk.layer4 = conv5
        trunk.eval().requires_grad_(False)
        if config.train_conv5 and conv5 is not None:
            conv5.requires_grad_(True)
    return network


def make_optimizer(network: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of a config; on a GPU a captured step can use it."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    fused = device.type == "cuda"
    # On a GPU the learning rate is a tensor, so that a captured step reads the current value.
    rate = torch.tensor(config.learning_rate, device=device) if fused else config.learning_rate
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate, fused=fused, capturable=fused)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=fused, capturable=fused)
