"""Shared parts of the tests: tiny inputs, and an oracle network that knows the position of every pixel."""

import importlib.util
import math
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.nn import functional as F

from dualrc.config import CompactConfig, ConsensusConfig, FineConfig, MatcherConfig, NetworkConfig
from dualrc.data import PairBatch
from dualrc.image import _DEVIATION, _MEAN
from dualrc.matcher import Matcher
from dualrc.model.checkpoint import save_weights
from dualrc.model.consensus import Consensus
from dualrc.model.dualrc import DualRCNet, make_network
from dualrc.model.engine import Engine
from dualrc.model.subpixel import Subpixel
from dualrc.ops import choose
from dualrc.ops.native import library

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
GOLDEN = SHARED / "golden"

settings.register_profile("dualrc", deadline=None, derandomize=True, database=None)
settings.load_profile("dualrc")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    # A shell that runs the tests in the background ignores Ctrl-C, which child processes inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On tiny inputs, threads mostly wait for each other, especially on a busy machine.
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # Without a GPU, Triton's kernels run in its interpreter, which must be selected before the first import.
        os.environ["TRITON_INTERPRET"] = "1"
    config.addinivalue_line("markers", "slow: takes minutes or gigabytes; run with --slow")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: give --slow to run it"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the global generators, so that a test draws the same values in every run and in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of Triton's kernels; on a CPU they are interpreted
# Every engine that this machine can run, with each instruction set of the C kernels.
ENGINES = ["definition", "torch", *(f"native-{name}" for name in library.available())]
if importlib.util.find_spec("triton") is not None:
    ENGINES += ["triton", *(["triton+graphs"] if DEVICE == "cuda" else [])]


def make_engine(name: str) -> Engine:
    """Return an engine by name, for its device."""
    return choose(torch.device(DEVICE if name.startswith("triton") else "cpu"), name)


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    """Write the weights of a tiny network."""
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_weights(tiny_network(), path)
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line as a shell would; return exit status, output and error output."""

    from rich.console import Console

    from dualrc import cli

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dualrc", *map(str, arguments)])
        monkeypatch.setattr(cli.common, "screen", Console(width=100))
        monkeypatch.setattr(cli.common, "messages", Console(stderr=True, width=100))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        output = capsys.readouterr()
        return int(stopped.value.code or 0), output.out, output.err

    return call


@pytest.fixture(params=ENGINES)
def engine(request) -> Engine:
    """Return every engine that this machine can run, on its device."""
    return make_engine(request.param)


@pytest.fixture(scope="module", params=["torch", *[name for name in ENGINES if name.startswith("native-")][:1]])
def cpu_engine(request) -> str:
    """Return the engines for CPUs in turn: torch, and the best of the compiled C kernels."""
    return request.param


def rand(seed: int, *shape: int) -> Tensor:
    """Return standard normal values that depend only on the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def point_batch(points0: Tensor, points1: Tensor) -> PairBatch:
    """Return a batch of corresponding points, (n 2) or (b n 2), with empty images."""
    points0, points1 = (points.view(-1, *points.shape[-2:]) for points in (points0, points1))
    image, yes = torch.zeros(len(points0), 3, 0, 0), torch.ones(points0.shape[:2], dtype=torch.bool)
    return PairBatch.of([image, image, points0, points1, yes, ~yes, ~yes])


def texture(seed: int, width: int, height: int) -> np.ndarray:
    """Return an image of smooth blobs, uint8 (height, width, 3)."""
    coarse = rand(seed, 1, 3, height // 6 + 2, width // 6 + 2)
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)[0]
    return (128 + 60 * smooth).clamp(0, 255).permute(1, 2, 0).byte().numpy()


def tiny_config(preset: str = "default", **fine) -> NetworkConfig:
    return NetworkConfig(
        preset=preset,
        backbone=CompactConfig(widths=(4, 8, 8, 12, 12), depths=(1, 1, 1, 1), coarse_channels=12, fine_channels=16),
        fine=FineConfig(**fine),
    )


def tiny_network(preset: str = "default", seed: int = 0, **fine) -> DualRCNet:
    """Return an untrained network of the preset `default`, at a thousandth of its size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make_network(tiny_config(preset, **fine))


def tiny_matcher(seed: int = 0, engine: str | None = None, **matcher) -> Matcher:
    return Matcher(tiny_network(seed=seed), MatcherConfig(**matcher), device="cpu", engine=engine)


def features_of(network: DualRCNet, image: np.ndarray):
    """Return the features of an image, uint8 (height, width, 3), on the CPU."""
    with torch.inference_mode():
        return network.extract(torch.from_numpy(image).permute(2, 0, 1)[None] / 255)


# The oracle. A scene is a plane with coordinates (X, Y) in 0 to SCENE; red encodes X, and green encodes Y.
# A color ramp stays a ramp under any resizing, so the mean color of a cell gives the exact position of its center.

SCENE = 400.0
_LOW, _HIGH = 8.0, 248.0  # away from where colours are clipped


@dataclass(frozen=True)
class View:
    """A view of the scene: pixel (x, y) shows the scene at origin + step * (x, y)."""

    width: int
    height: int
    origin: tuple[float, float] = (0.0, 0.0)
    step: tuple[float, float] = (1.0, 1.0)

    def image(self, seed: int = 0) -> np.ndarray:
        """Render uint8 (height, width, 3); noise before rounding makes the mean of many pixels finer than one level."""
        x, y = np.meshgrid(np.arange(self.width), np.arange(self.height))
        scene = self.to_scene(np.stack([x, y], axis=-1))
        assert scene.min() >= 0 and scene.max() <= SCENE
        colors = np.full((self.height, self.width, 3), 128.0)
        colors[:, :, :2] = _LOW + (_HIGH - _LOW) * scene / SCENE
        noise = np.random.default_rng(seed).uniform(-0.5, 0.5, colors.shape)
        return np.round(colors + noise).astype(np.uint8)

    def to_scene(self, points: np.ndarray) -> np.ndarray:
        return np.asarray(points, dtype=np.float64) * self.step + self.origin

    def from_scene(self, points: np.ndarray) -> np.ndarray:
        return (np.asarray(points) - self.origin) / self.step


class OracleBackbone(nn.Module):
    """Features whose cosine is a Gaussian of the distance in the scene: random Fourier features of the position."""

    def __init__(self, fine_length: float = 10.0, coarse_length: float = 20.0, count: int = 128) -> None:
        super().__init__()
        self.register_buffer("fine_waves", rand(1, count, 2) / fine_length)
        self.register_buffer("coarse_waves", rand(2, count, 2) / coarse_length)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = torch.tensor(_MEAN[:2]), torch.tensor(_DEVIATION[:2])
        colors = (images[:, :2] * deviation.view(1, 2, 1, 1) + mean.view(1, 2, 1, 1)) * 255
        places = (colors - _LOW) / (_HIGH - _LOW) * SCENE
        maps = []
        for waves, stride in ((self.coarse_waves, 16), (self.fine_waves, 4)):
            phase = torch.einsum("kc,bchw->bkhw", waves, F.avg_pool2d(places, stride))
            maps.append(torch.cat([phase.cos(), phase.sin()], dim=1) / math.sqrt(len(waves)))
        return maps[0], maps[1]


def plain_consensus() -> Consensus:
    """Return a consensus that only multiplies by 2."""
    consensus = Consensus(ConsensusConfig(kernel_sizes=(1,), channels=(1,)))
    nn.init.ones_(consensus.weights[0])
    return consensus


def oracle_matcher(*, subpixel: bool = True, engine: str | None = None, **matcher) -> Matcher:
    """Return a matcher that finds the correspondences of `View`; its sharp fine score limits the coarse bias."""
    config = tiny_config(temperature=0.05, subpixel=subpixel)
    network = DualRCNet(
        config,
        backbone=OracleBackbone(),
        consensus=plain_consensus(),
        subpixel=Subpixel(256, 0) if subpixel else None,
    )
    return Matcher(network, MatcherConfig(**matcher), device="cpu", engine=engine)


@pytest.fixture(scope="session")
def oracle() -> Matcher:
    return oracle_matcher()


def same_matches(a, b) -> bool:
    """Return whether two results are bit-identical."""
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("points0", "points1", "scores"))


def match_set(matches, decimals: int = 3) -> set[tuple[float, ...]]:
    rows = np.concatenate([matches.points0, matches.points1], axis=1)
    return set(map(tuple, np.round(rows.astype(np.float64), decimals).tolist()))
