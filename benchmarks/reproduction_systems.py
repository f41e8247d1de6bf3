"""The systems that the paper compares, their training on the same pairs, and systems made from trained ones.

The first part of benchmarks/reproduction.py, which has the commands.
"""

import argparse
import csv
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dualrc.config import (
    PRESETS,
    ConsensusConfig,
    FineConfig,
    Fusion,
    NetworkConfig,
    ResNetConfig,
    TrunkConfig,
)
from dualrc.data import PhotoMotion, PhotosConfig
from dualrc.errors import DualRCError
from dualrc.files import write_json
from dualrc.model.checkpoint import load_weights, save_weights
from dualrc.model.dualrc import DualRCNet, make_network
from dualrc.model.network import Network
from dualrc.toml import to_toml
from dualrc.train import TrainConfig, train
from dualrc.train.config import Loss

# File with the settings of the training of all systems.
TRAINING_FILE = "training.json"
# Moderate viewpoint changes without large rotations, because the frozen features are not invariant to them.
_MOTION = PhotoMotion(rotation_deg=15.0, any_rotation=0.0, octaves=0.5)
# Learning rates to try if only the consensus is trained, and if features are trained too.
_CONSENSUS_RATES, _FEATURE_RATES = (1e-2, 1e-3), (1e-3, 3e-4, 1e-4)

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class System:
    """A network and its loss."""

    name: str
    label: str
    network: NetworkConfig
    # None: not trained.
    loss: Loss | None = "paper"


def _dualrc(fusion: Fusion, channels: Literal[256, 1024], **fine: Any) -> NetworkConfig:
    backbone = ResNetConfig(kind="resnet50", stride_on="1x1", fusion=fusion, channels=channels)
    # All systems start from a consensus close to the identity: in a short run, the luck of random weights would decide.
    return replace(
        PRESETS["paper"][0],
        backbone=backbone,
        consensus=ConsensusConfig(),
        fine=FineConfig(reading="corner", query_share=0.5, **{"subpixel": False, **fine}),
    )


def _rival(preset: str) -> NetworkConfig:
    network = PRESETS[preset][0]
    return replace(network, backbone=TrunkConfig(network="resnet50", stride_on="1x1"), consensus=ConsensusConfig())


SYSTEMS = (
    System(name="a-1024", label="DualRC-Net (a), 1024", network=_dualrc("a", 1024)),
    System(name="ncnet", label="NCNet", network=_rival("ncnet")),
    System(name="sparse-ncnet", label="Sparse-NCNet", network=_rival("sparse-ncnet")),
    System(name="a-256", label="DualRC-Net (a), 256", network=_dualrc("a", 256)),
    *(
        System(name=f"{fusion}-1024", label=f"DualRC-Net ({fusion}), 1024", network=_dualrc(fusion, 1024))
        for fusion in get_args(Fusion)[1:]
    ),
    System(
        name="a-1024-matching",
        label="DualRC-Net (a), 1024, refined",
        network=_dualrc("a", 1024, subpixel=True, subpixel_hidden=192),
        loss="matching",
    ),
    System(name="ncnet-weak", label="NCNet", network=_rival("ncnet"), loss="weak"),
)
# Systems made from trained ones: before their training, without refinement, and with the cost of a ResNet-101.
_UNTRAINED = tuple(
    replace(system, name=f"{system.name}-untrained", loss=None)
    for system in SYSTEMS
    if system.name in ("a-1024", "ncnet", "sparse-ncnet")
)
_CELLS = System(name="a-1024-matching-cells", label="DualRC-Net (a), 1024", network=_dualrc("a", 1024), loss="matching")
RESNET101 = System(
    name="a-1024-resnet101",
    label="DualRC-Net (a), 1024, ResNet-101",
    network=replace(
        _dualrc("a", 1024), backbone=ResNetConfig(kind="resnet101", stride_on="1x1", fusion="a", channels=1024)
    ),
)
ALL = {system.name: system for system in (*SYSTEMS, *_UNTRAINED, _CELLS, RESNET101)}
# The trained systems that the last two are made from.
_SOURCES = {_CELLS.name: "a-1024-matching", RESNET101.name: "a-1024"}


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the training of all systems."""

    photos: tuple[str, ...]
    trunk: str
    steps: int
    size: int
    pairs: int
    points: int
    device: str | None

    def config(self, system: System, rate: float) -> TrainConfig:
        """Return the config of a system; only network, loss and learning rate differ between systems."""
        backbone = system.network.backbone
        return TrainConfig(
            data=(PhotosConfig(paths=self.photos, motion=_MOTION),),
            network=system.network,
            trunk=self.trunk,
            # The trunk ends with conv4.
            train_conv5=isinstance(backbone, ResNetConfig) and backbone.fusion == "e",
            loss=system.loss or "paper",
            size=self.size,
            pairs=self.pairs,
            points=self.points,
            steps=self.steps,
            optimizer="adam",
            learning_rate=rate,
            warm_up=self.steps // 10,
            average=0.0,
            validate_every=max(1, self.steps // 4),
            validation_batches=4,
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run of a system."""

    system: System
    rate: float
    # Name of its folder.
    name: str


def run_training(run: Run, runs: Path, training: Training, deadline: float) -> float:
    """Train a system, or continue its training, until the deadline in seconds since the epoch; return the seconds."""
    logging.basicConfig(level=logging.INFO, format=f"{run.name}: %(message)s", stream=sys.stdout, force=True)
    # The sizes of a training run are constant, so that trying several algorithms once pays.
    torch.backends.cudnn.benchmark = True
    start = time.monotonic()
    if time.time() < deadline:
        minutes = None if math.isinf(deadline) else (deadline - time.time()) / 60
        train(training.config(run.system, run.rate), runs / run.name, device=training.device, minutes=minutes)
    return time.monotonic() - start


def _is_finished(run: Run, runs: Path, training: Training) -> bool:
    """Return whether a run has ended."""
    config, folder = training.config(run.system, run.rate), runs / run.name
    known = folder / "config.toml"
    return _last_step(folder) == config.steps and known.read_text(encoding="utf-8") == to_toml(config).rstrip() + "\n"


def _last_step(folder: Path) -> int:
    """Return the number of steps after which a run was last validated, as it is when it ends or is stopped."""
    return read_log(folder / "log.csv").get("held_out_loss", [(0, 0.0)])[-1][0]


def unfinished(runs: Path) -> dict[str, int]:
    """Return the steps made by each system whose training has not ended, or not begun, by name."""
    training = read_json(runs / TRAINING_FILE)
    if training is None:
        raise SystemExit(f"{runs / TRAINING_FILE} is missing; train first.")
    trained = [system.name for system in ALL.values() if system.loss is not None]
    steps = {name: _last_step(runs / _SOURCES.get(name, name)) for name in trained}
    return {name: steps[name] for name in trained if steps[name] < training["steps"]}


def read_log(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the curves of a log; after an interruption a step may occur twice, and the last value counts."""
    curves: dict[str, dict[int, float]] = {}
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for step, name, value in csv.reader(file):
                curves.setdefault(name, {})[int(step)] = float(value)
    return {name: sorted(values.items()) for name, values in curves.items()}


@dataclass
class Tasks:
    """Runs functions of systems in new processes, some at a time, and reports each."""

    runs: Path
    failed: list[str] = field(default_factory=list)

    def run(
        self,
        what: str,
        function: Callable[..., float],
        items: Sequence[System | Run],
        *args: Any,
        jobs: int,
        reuse: bool = False,
    ) -> None:
        """Call the function for every item, in a new process each or in processes that are reused."""
        start = time.monotonic()
        self.runs.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=None if reuse else 1) as pool:
            futures = {pool.submit(function, item, self.runs, *args): item for item in items}
            for future in as_completed(futures):
                name = futures[future].name
                try:
                    print(f"{name}: {what} took {future.result():.0f} s", flush=True)
                # One system that fails must not stop the others.
                except Exception as error:
                    reason = error if isinstance(error, DualRCError) else f"{type(error).__name__}: {error}"
                    self.failed.append(f"{name}: {what} failed ({reason})")
                    print(self.failed[-1], flush=True)
        print(f"{what}, {len(items)} in all, took {time.monotonic() - start:.0f} s", flush=True)

    def end(self) -> None:
        """Exit with an error if a task failed."""
        if self.failed:
            raise SystemExit("\n".join(self.failed))


def train_all(options: argparse.Namespace) -> None:
    """Choose the learning rates and train the systems, or continue their training."""
    deadline = time.time() + 60 * options.minutes if options.minutes else math.inf
    training = Training(
        photos=tuple(map(str, options.photos)),
        trunk=str(options.trunk),
        steps=options.steps,
        size=options.size,
        pairs=options.pairs,
        points=options.points,
        device=options.device,
    )
    tasks, systems = Tasks(options.runs), choose(options, SYSTEMS)
    rates = _choose_rates(tasks, systems, replace(training, steps=options.probe), options, deadline)
    known = asdict(training) | {"photos": [Path(path).name for path in training.photos]}
    del known["trunk"], known["device"]
    write_json(options.runs / TRAINING_FILE, known | {"probe_steps": options.probe, "rates": rates})
    runs = [Run(system=system, rate=rates[_kind(system)], name=system.name) for system in systems]
    unfinished = [run for run in runs if not _is_finished(run, options.runs, training)]
    tasks.run("training", run_training, unfinished, training, deadline, jobs=options.jobs)
    tasks.end()


def _kind(system: System) -> str:
    """Return what systems with the same learning rate have in common: whether features are trained, and the loss."""
    return f"{'consensus' if system.network.ncnet else 'features'}, {system.loss}"


def _choose_rates(
    tasks: Tasks, systems: Sequence[System], short: Training, options: argparse.Namespace, deadline: float
) -> dict[str, float]:
    """Choose the learning rate of each kind of system: the one with the lowest held-out loss after short runs."""
    # The first system of each kind stands for all.
    first = {_kind(system): system for system in reversed(systems)}
    runs = {
        kind: [
            Run(system=system, rate=rate, name=f"{system.name}-{rate:g}")
            for rate in options.rates or (_CONSENSUS_RATES if system.network.ncnet else _FEATURE_RATES)
        ]
        for kind, system in first.items()
    }
    folder = options.runs / "probes"
    tried = [run for own in runs.values() for run in own if len(own) > 1 and not _is_finished(run, folder, short)]
    Tasks(folder, tasks.failed).run("probe", run_training, tried, short, deadline, jobs=options.jobs)
    if time.time() > deadline:
        raise SystemExit("The time is over before all rates were tried; the same command continues.")
    return {kind: best_rate(own, folder) for kind, own in runs.items()}


def best_rate(tried: Sequence[Run], folder: Path) -> float:
    """Return the learning rate of the run with the lowest held-out loss."""
    losses = {run.rate: _held_out_loss(folder / run.name) for run in tried}
    best = min(losses, key=lambda rate: losses[rate])
    print(f"{tried[0].system.name}: held-out loss by learning rate {losses}; chosen: {best:g}", flush=True)
    return best


def _held_out_loss(folder: Path) -> float:
    """Return the last held-out loss of a run; infinite if there is none, or if it is not finite."""
    curve = read_log(folder / "log.csv").get("held_out_loss", [])
    return curve[-1][1] if curve and math.isfinite(curve[-1][1]) else math.inf


def choose(options: argparse.Namespace, systems: Iterable[System]) -> list[System]:
    """Return the systems that the command line asks for."""
    return [system for system in systems if not options.only or system.name in options.only]


def derive(runs: Path) -> None:
    """Write the weights of the systems that are made from trained ones."""
    made: list[tuple[str, System, Callable[[Network], Network]]] = [
        ("a-1024-matching", _CELLS, without_refinement),
        ("a-1024", RESNET101, with_resnet101),
        *((system.name.removesuffix("-untrained"), system, untrained) for system in _UNTRAINED),
    ]
    for name, system, make in made:
        source, target = (runs / each / "weights.safetensors" for each in (name, system.name))
        # Written once, because results belong to a file, and the order of its header is random.
        if source.exists() and not (target.exists() and target.stat().st_mtime > source.stat().st_mtime):
            target.parent.mkdir(exist_ok=True)
            save_weights(make(load_weights(source)), target, dtype=torch.float16)


def untrained(network: Network) -> Network:
    """Return the network before its training, which starts from the same seed; the trunk is not trained."""
    torch.manual_seed(0)
    fresh = make_network(network.config)
    trunk = {name: tensor for name, tensor in network.state_dict().items() if name.startswith("backbone.trunk.")}
    fresh.load_state_dict(fresh.state_dict() | trunk)
    return fresh


def without_refinement(network: Network) -> Network:
    """Return a network with the same features, whose matches are centers of fine cells."""
    plain = make_network(_CELLS.network)
    plain.load_state_dict({k: v for k, v in network.state_dict().items() if not k.startswith("subpixel.")})
    return plain


def with_resnet101(network: Network) -> DualRCNet:
    """Return a network with the features of a ResNet-50 and the cost of a ResNet-101.

    Conv4 gets 17 more blocks. The last batch norm of each multiplies by zero, which leaves the shortcut: no result
    changes, but all convolutions are computed.
    """
    torch.manual_seed(0)
    larger = make_network(RESNET101.network)
    assert isinstance(larger, DualRCNet)
    missing = larger.load_state_dict(network.state_dict(), strict=False).missing_keys
    for name, parameter in larger.named_parameters():
        if name in missing and ".bn3." in name:
            torch.nn.init.zeros_(parameter)
    return larger


def read_json(path: Path) -> Json | None:
    """Read a JSON file; None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
