"""The training loop."""

import copy
import csv
import logging
import math
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualrc.config import to_toml
from dualrc.data import Opened, PairBatch, PairMaker, open_pairs
from dualrc.errors import ConfigError, DataError, OutputError
from dualrc.files import make_folder, only_run, replacing, write_json, write_text
from dualrc.losses import (
    BatchKeypointLosses,
    MatchingLosses,
    WeakLosses,
    keypoint_losses,
    matching_losses,
    weak_losses,
)
from dualrc.model.backbone import PaperBackbone, Trunk
from dualrc.model.checkpoint import load_imagenet_trunk, load_pickle, load_weights, save_weights
from dualrc.model.dualrc import DualRCNet, make_network
from dualrc.model.network import Features, Network
from dualrc.provenance import provenance
from dualrc.train.batches import Batches
from dualrc.train.config import TrainConfig
from dualrc.train.pictures import draw_pairs
from dualrc.train.processes import share_batch_norm, stop_on_signals

logger = logging.getLogger(__name__)
_LOG_EVERY = 100  # steps
_SAY_EVERY_S = 10.0  # where steps are slow
_LOCK = ".dualrc.lock"


class TrainingStep(nn.Module):
    """Network and loss as one module, which is what gets distributed."""

    def __init__(self, network: Network, config: TrainConfig) -> None:
        super().__init__()
        self.network = network
        self.config = config

    def forward(self, parts: int, *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The fields of a PairBatch, which holds so many parts, to the loss and what is logged."""
        names = [f.name for f in fields(PairBatch)]
        batch = PairBatch(**dict(zip(names, tensors, strict=True)))
        images = torch.cat([batch.images0, batch.images1]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            features = self.network.extract(images)
        # Each part's loss is a mean over its own places, so that it does not matter which process has it.
        maps = *features.coarse.chunk(2), *features.fine.chunk(2)
        chunks = [t.chunk(parts) for t in (*maps, *tensors)]
        results = [self._loss(*chunk) for chunk in zip(*chunks, strict=True)]
        logged = {name: torch.stack([r[1][name] for r in results]).mean() for name in results[0][1]}
        return torch.stack([total for total, _ in results]).mean(), logged

    def _loss(
        self, coarse0: Tensor, coarse1: Tensor, fine0: Tensor, fine1: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        names = [f.name for f in fields(PairBatch)]
        batch = PairBatch(**dict(zip(names, tensors, strict=True)))
        features = Features(coarse=coarse0, fine=fine0), Features(coarse=coarse1, fine=fine1)
        losses: MatchingLosses | BatchKeypointLosses | WeakLosses
        if self.config.loss == "matching":
            assert isinstance(self.network, DualRCNet)
            losses = matching_losses(self.network, *features, batch)
        elif self.config.loss == "weak":
            losses = weak_losses(self.network, *features, batch)
        else:
            losses = keypoint_losses(self.network, *features, batch, self.config.loss)
        return losses.total(), {name: value.detach() for name, value in losses.logged().items()}


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    minutes: float | None = None,
    device: str | None = None,
    devices: int = 1,
    nodes: int = 1,
) -> dict[str, float]:
    """Train, or go on with an unfinished run in `out`; leaves checkpoint.pt, log.csv and weights.safetensors there.

    Beside them, config.toml and versions.json say what was run, and pictures/ shows matches of held-out pairs. Saves
    and stops after `minutes`, or on Ctrl-C or SIGTERM (which is then raised); the same call then continues as if it had
    never stopped. Progress goes to the log (`logging`, level INFO).

    With several `devices` or `nodes`, a step's pairs are divided among processes. Gives the figures on
    held-out pairs.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    fabric = _fabric(device, devices, nodes)
    torch.set_float32_matmul_precision("high")
    fabric.launch()
    if config.parts % fabric.world_size:
        remedy = f"set parts to a multiple of {fabric.world_size}"
        raise ConfigError(f"{fabric.world_size} processes can't share parts = {config.parts}; {remedy}.")
    # The first process writes, for all of them.
    with only_run(make_folder(out) / _LOCK) if fabric.global_rank == 0 else nullcontext():
        return _train(config, Path(out), fabric, deadline)


def _train(config: TrainConfig, out: Path, fabric: Any, deadline: float) -> dict[str, float]:
    run = _Run(config, out, fabric)
    opened = [open_pairs(d, size=config.size, points=config.points, device=fabric.device) for d in config.data]
    shares, count = [d.share for d in config.data], config.pairs // config.parts
    batches = Batches([each.training for each in opened], shares, seed=config.seed, count=count, device=fabric.device)
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
                        figures = run.validate([each.held_out for each in opened])
                    run.save()
                    run.say_once(opened)
                if ending:
                    break
        finally:
            batches.close()
            for each in opened:
                each.close()
    if stop.asked:
        run.say(f"Saved at step {run.step}; the same command goes on from there.")
        signal.raise_signal(stop.asked)
    return figures


def _fabric(device: str | None, devices: int, nodes: int) -> Any:
    """Lightning's Fabric on devices that are there."""
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise ConfigError(f"Training needs Lightning ({error}): pip install 'dualrc[train]'.") from error
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
    except Exception as error:  # torch and Lightning refuse devices in many ways
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"The device {device!r} can't be used ({reason}); choose cpu, cuda or mps.") from error


class _Run:
    """The state of a training run, and how it is advanced, checked, reported and saved."""

    def __init__(self, config: TrainConfig, out: Path, fabric: Any) -> None:
        self.config, self.out, self.fabric = config, out, fabric
        self._is_first = fabric.global_rank == 0
        if self._is_first:
            make_folder(out / "pictures")
        fabric.barrier()
        torch.manual_seed(config.seed)
        self.network = _network(config)
        self.average = copy.deepcopy(self.network).eval().to(fabric.device)
        if fabric.world_size > 1:
            share_batch_norm(self.network)
        self.module, self.optimizer = fabric.setup(
            TrainingStep(self.network, config), _optimizer(self.network, config, fabric.device.type == "cuda")
        )
        self.step = 0
        self._resume()
        if self._is_first:
            self._describe()
        self._averaged = _floating(self.average), _floating(self.network)
        self._skipped = torch.zeros((), device=fabric.device)
        self._said: set[str] = set()
        self._since, self._last_step = time.monotonic(), self.step

    def advance(self, batch: PairBatch, parts: int) -> None:
        """One step of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(self.step)
        loss, logged = self.module(parts, *(getattr(batch, f.name) for f in fields(batch)))
        self.fabric.backward(loss)
        self._drop_if_not_finite()
        if clip := self.config.clip:
            self.fabric.clip_gradients(self.module, self.optimizer, max_norm=clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        decay = min(self.config.average, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(*self._averaged, 1 - decay)
        if self.step % min(_LOG_EVERY, self.config.validate_every) == 0:
            self._report({"loss": loss.detach(), **logged}, log=True)
        elif time.monotonic() - self._since > _SAY_EVERY_S:
            self._report({"loss": loss.detach(), **logged}, log=False)

    def validate(self, makers: Sequence[PairMaker]) -> dict[str, float]:
        """Figures on held-out pairs, the same every time, and pictures of some."""
        figures: dict[str, float] = {}
        if self._is_first:
            step = TrainingStep(self.average, self.config)
            batches = self.config.validation_batches
            with torch.no_grad():
                for number in range(batches):
                    random = torch.Generator(device=self.fabric.device).manual_seed(1 + number)
                    batch = makers[number % len(makers)].make(self.config.pairs // self.config.parts, random)
                    _, logged = step(1, *(getattr(batch, f.name) for f in fields(batch)))
                    for name, value in logged.items():
                        figures[name] = figures.get(name, 0.0) + float(value) / batches
                    if number == 0:
                        draw_pairs(self.average, batch, self.out / "pictures" / f"{self.step:07}.jpg")
            self._log({f"held_out_{name}": value for name, value in figures.items()})
            self.say("held out: " + "  ".join(f"{n} {v:.4f}" for n, v in figures.items()))
        self.fabric.barrier()
        return figures

    def save(self) -> None:
        """Write the checkpoint and the averaged weights; the old ones stay until the new ones are whole."""
        if self._is_first:
            state = {
                "config": to_toml(self.config),
                "step": self.step,
                "network": self.network.state_dict(),
                "average": self.average.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            with replacing(self.out / "checkpoint.pt") as temporary:
                torch.save(state, temporary)
            save_weights(self.average, self.out / "weights.safetensors", dtype=torch.float16)
        self.fabric.barrier()

    def say(self, line: str, level: int = logging.INFO) -> None:
        """Tell the user, once for all processes."""
        if self._is_first:
            logger.log(level, line)

    def say_once(self, opened: Sequence[Opened]) -> None:
        """Tell what data could not be used, if that was not told yet."""
        for line in (line for each in opened for line in each.report()):
            if line not in self._said:
                self.say(line, logging.WARNING)
                self._said.add(line)

    def _drop_if_not_finite(self) -> None:
        """Take no step on a gradient that is not finite; without waiting for the GPU to tell."""
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        finite = torch.stack([g.sum() for g in gradients]).sum().isfinite()
        for gradient in gradients:
            gradient.copy_(torch.where(finite, gradient, 0))
        self._skipped += ~finite

    def _report(self, logged: dict[str, Tensor], *, log: bool) -> None:
        """Say how it goes and how long it will take."""
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
            words = f"The gradient was not finite in {skipped} of {steps} steps, which were left out."
            self.say(words, logging.WARNING)
        if skipped > steps / 2:
            remedy = f"lower learning_rate and start from {self.out / 'weights.safetensors'}"
            raise DataError(f"The loss is not finite in most steps up to {self.step}; {remedy}.")

    def _resume(self) -> None:
        """Go on from a checkpoint of the same config, if there is one."""
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
                return
        except Exception as error:  # a broken file can fail in any way
            raise DataError(f"{path} is broken or can't be read; delete it, or choose another folder.") from error
        raise ConfigError(f"{path} belongs to another config; choose another folder, or delete it to start over.")

    def _describe(self) -> None:
        """Leave what is run, in words, in the folder."""
        write_text(self.out / "config.toml", to_toml(self.config).rstrip() + "\n")
        made = provenance("lightning", device=self.fabric.device, processes=self.fabric.world_size)
        write_json(self.out / "versions.json", made)

    def _log(self, values: dict[str, float]) -> None:
        path = self.out / "log.csv"
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([self.step, name, f"{value:.6g}"] for name, value in values.items())
        except OSError as error:
            raise OutputError(f"{path} can't be written ({error.strerror}); make room or write elsewhere.") from error


def _network(config: TrainConfig) -> Network:
    """The network to train, in training mode; a ResNet trunk stays as it is."""
    network = load_weights(config.start_from) if config.start_from else make_network(config.network)
    source = config.start_from or "The config's network"
    if config.loss == "matching" and not (isinstance(network, DualRCNet) and network.subpixel is not None):
        remedy = 'take another network, or loss = "paper"'
        raise ConfigError(f"{source} has no sub-pixel refinement, which the loss trains; {remedy}.")
    if config.loss == "weak" and isinstance(network, DualRCNet):
        raise ConfigError(f'{source} is a DualRC-Net, whose fine features loss = "weak" does not train; take another.')
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if isinstance(network.backbone, (PaperBackbone, Trunk)):
        if config.trunk is not None:
            load_imagenet_trunk(network.backbone.trunk, config.trunk)
        network.backbone.trunk.eval().requires_grad_(False)
    return network


def _optimizer(network: nn.Module, config: TrainConfig, fused: bool) -> torch.optim.Optimizer:
    parameters = [p for p in network.parameters() if p.requires_grad]
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=config.learning_rate, fused=fused)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.99), fused=fused)


def _floating(network: nn.Module) -> list[Tensor]:
    """Parameters and statistics, without gradients."""
    return [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]
