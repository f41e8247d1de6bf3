"""Pairs of procedural scenes, with exact parallax and occlusion, rendered ahead by separate processes."""

import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator

from dualrc.config import check_bounds
from dualrc.data.pairs import LazyPair, PairBatch, PairSample
from dualrc.data.views import CutConfig, FilePairs
from dualrc.errors import ConfigError, DataError
from dualrc.machine import end_with_parent
from dualrc.scenes import Rendering, ScenePair, correspond, make_pair
from dualrc.types import FloatArray

# Number of points sampled in each image.
_POINTS = 2048
_MIN_OVERLAP = 0.25
_TRIES = 20
# Number of pairs to render before the first batch.
_FIRST = 16


@dataclass(frozen=True, kw_only=True)
class ScenesConfig(CutConfig):
    """Pairs of procedural scenes."""

    # Selects this source.
    kind: Literal["scenes"] = "scenes"
    # Side of a random square of the rendered image, at least, as a share of its shorter side; None: the whole image.
    crop: float | None = 0.6
    # Apply random lighting, noise and compression, as for single photos.
    light: bool = True
    # (width, height) of the rendered images, from which views are cut.
    image_size: tuple[int, int] = (512, 400)
    # Side of a texture in texels; a power of 2.
    texture: int = 256
    # Maximum angle between the cameras.
    angle_deg: float = 45.0
    # Maximum roll of the cameras.
    roll_deg: float = 20.0
    # Maximum zoom of one camera over the other.
    zoom: float = 2.0
    # Share of images at night.
    night: float = 0.1
    # Number of rendered pairs in the pool; they are reused with other crops and lighting.
    pool: int = 400
    # Processes that render and renew the pool, oldest pairs first. 0: render the pool once before training.
    workers: int = 4
    # Seed of the scenes.
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "image_size", at_least=64, unit="pixels")
        if self.texture < 32 or self.texture & (self.texture - 1):
            raise ConfigError(f"texture = {self.texture} is not valid; pass a power of 2 of at least 32.")
        check_bounds(self, "pool", "zoom", at_least=1)
        check_bounds(self, "workers", "angle_deg", at_least=0)
        check_bounds(self, "night", at_least=0, at_most=1)


def render_sample(config: ScenesConfig, number: int) -> PairSample:
    """Render pair `number` of the infinite sequence that a config defines."""
    rng = np.random.default_rng([config.seed, number])
    rendering0, rendering1 = _draw_pair(config, rng)
    points0, there0, hidden0 = _locate(rendering0, rendering1, rng)
    points1, there1, hidden1 = _locate(rendering1, rendering0, rng)
    return PairSample(
        image0=rendering0.image.cpu().numpy(),
        image1=rendering1.image.cpu().numpy(),
        points0=np.concatenate([points0, there1]),
        points1=np.concatenate([there0, points1]),
        hidden0=hidden0,
        hidden1=hidden1,
    )


def _draw_pair(config: ScenesConfig, rng: np.random.Generator) -> ScenePair:
    for _ in range(_TRIES):
        try:
            return make_pair(
                int(rng.integers(1 << 31)),
                size=config.image_size,
                angle_deg=config.angle_deg * rng.uniform(),
                roll_deg=config.roll_deg,
                zoom=config.zoom ** rng.uniform(),
                light_change=rng.uniform(),
                night=bool(rng.uniform() < config.night),
                min_overlap=_MIN_OVERLAP,
                texture_size=config.texture,
            )
        except ConfigError:
            # This scene has no two such views; the next attempt is easier.
            continue
    raise ConfigError("No two views of a scene overlap; lower angle_deg or zoom.")


def _locate(
    rendering: Rendering, other: Rendering, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Sample points that the other image shows, with their positions there, and points that are occluded there."""
    points = rng.uniform(0, np.array(rendering.view.size) - 1, (_POINTS, 2))
    found = correspond(rendering, other, points)
    visible, there = found.visible.cpu().numpy(), found.points1.cpu().numpy()
    # The sky has no depth and is left out.
    shows = rendering.depth.cpu().numpy()[*np.round(points).astype(int).T[::-1]] > 0
    return points[visible], there[visible], points[shows & ~visible]


class ScenePairs(FilePairs):
    """Makes batches from a pool of rendered pairs.

    Without workers the pool is complete and fixed, and the same generator state makes the same batch. With workers the
    pool and the batches change over time.
    """

    def __init__(self, config: ScenesConfig, *, helper: "ScenePairs | None" = None, **settings: Any) -> None:
        """`helper`: another maker whose workers render this pool. `settings`: those of `FilePairs`."""
        self.pool: _Pool = _Pool(config, None if helper is None else helper.pool)
        super().__init__(self.pool.pairs, config, **settings)

    def make(self, count: int, random: Generator) -> PairBatch:
        """Make a batch of `count` pairs."""
        self.pool.renew()
        return super().make(count, random)

    def report(self) -> str:
        """Return one line about errors so far; empty if there are none."""
        return self.pool.failure or super().report()

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()
        super().close()


class _Pool:
    """Rendered pairs, renewed by processes."""

    def __init__(self, config: ScenesConfig, helper: "_Pool | None" = None) -> None:
        self.config, self.failure = config, ""
        self.pairs: list[LazyPair] = []
        # Numbers of pairs that were ordered, and that are finished.
        self._ordered = self._finished = 0
        self._pending: set[Future[PairSample]] = set()
        self._executor: ProcessPoolExecutor | None = None
        if not config.workers:
            run = map if helper is None or helper._executor is None else helper._executor.map
            for sample in run(render_sample, [config] * config.pool, range(config.pool)):
                self._put(sample)
            return
        # Forked processes could hang on locks that threads of this process hold.
        context = get_context("spawn")
        self._executor = ProcessPoolExecutor(config.workers, mp_context=context, initializer=_settle)
        while len(self.pairs) < min(config.pool, _FIRST):
            self.renew(patient=True)

    def renew(self, *, patient: bool = False) -> None:
        """Collect finished pairs and order more; `patient` waits for at least one pair."""
        if self._executor is None:
            return
        while len(self._pending) < 2 * self.config.workers:
            self._pending.add(self._executor.submit(render_sample, self.config, self._ordered))
            self._ordered += 1
        done, self._pending = wait(self._pending, None if patient else 0, FIRST_COMPLETED)
        try:
            for future in done:
                self._put(future.result())
        except BrokenProcessPool as error:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
            self.failure = "The processes that render scenes were killed; training continues with their earlier pairs."
            if not self.pairs:
                raise DataError("The processes that render scenes were killed; use fewer workers.") from error

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _put(self, sample: PairSample) -> None:
        """Add a pair, or replace the oldest one if the pool is full."""
        place = self._finished % self.config.pool
        self.pairs[place : place + 1] = [LazyPair(name=f"rendered pair {place}", load=lambda: sample)]
        self._finished += 1


def _settle() -> None:
    """Set up a worker: one thread, no handling of Ctrl-C, and end with the parent process."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
