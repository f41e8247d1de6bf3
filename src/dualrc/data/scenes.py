"""Pairs of procedural scenes: real parallax and occlusion, exactly known, rendered ahead in processes of their own."""

import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Literal

import numpy as np
import torch
from torch import Generator

from dualrc.config import check_bounds
from dualrc.data.pairs import PairBatch, PairSample
from dualrc.data.views import CutConfig, FilePairs
from dualrc.errors import ConfigError, DataError
from dualrc.machine import end_with_parent
from dualrc.scenes import Rendering, ScenePair, correspond, make_pair
from dualrc.types import FloatArray

# Asked in each picture.
_POINTS = 2048
_MIN_OVERLAP = 0.25
_TRIES = 20
# Pairs before the first batch is made.
_FIRST = 16


@dataclass(frozen=True, kw_only=True)
class ScenesConfig(CutConfig):
    """Pairs of procedural scenes."""

    kind: Literal["scenes"] = "scenes"
    crop: float | None = 0.6
    light: bool = True
    # (width, height) of what is rendered and then cut.
    picture: tuple[int, int] = (512, 400)
    # Texels along the side of a texture; a power of 2.
    texture: int = 256
    # The most of the angle between the cameras, of the camera's turn, of the zoom, and the share of pictures at night.
    angle_deg: float = 45.0
    roll_deg: float = 20.0
    zoom: float = 2.0
    night: float = 0.1
    # Rendered pairs that are kept, and used again and again with other cuts and lights.
    pool: int = 400
    # Processes that render; they renew the pool, oldest first. 0: the pool is rendered once, here, before training.
    workers: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.picture) < 64:
            raise ConfigError(f"picture = {self.picture} must have 64 pixels or more a side.")
        if self.texture < 32 or self.texture & (self.texture - 1):
            raise ConfigError(f"texture = {self.texture} must be a power of 2 from 32 on.")
        check_bounds(self, "pool", "zoom", at_least=1)
        check_bounds(self, "workers", "angle_deg", at_least=0)
        check_bounds(self, "night", at_least=0, at_most=1)


def render_sample(config: ScenesConfig, number: int) -> PairSample:
    """Pair `number` of the endless row of pairs that a config stands for."""
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
                size=config.picture,
                angle_deg=config.angle_deg * rng.uniform(),
                roll_deg=config.roll_deg,
                zoom=config.zoom ** rng.uniform(),
                light_change=rng.uniform(),
                night=bool(rng.uniform() < config.night),
                min_overlap=_MIN_OVERLAP,
                texture_size=config.texture,
            )
        except ConfigError:
            # This scene has no two such views; an easier draw comes.
            continue
    raise ConfigError("No two views of a scene overlap; lower angle_deg or zoom.")


def _locate(
    rendering: Rendering, other: Rendering, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Random points that the other picture sees, where it does, and random points that are hidden from it."""
    points = rng.uniform(0, np.array(rendering.view.size) - 1, (_POINTS, 2))
    found = correspond(rendering, other, points)
    visible, there = found.visible.cpu().numpy(), found.points1.cpu().numpy()
    # Sky is nowhere for sure.
    shows = rendering.depth.cpu().numpy()[*np.round(points).astype(int).T[::-1]] > 0
    return points[visible], there[visible], points[shows & ~visible]


class ScenePairs(FilePairs):
    """Makes batches from a pool of rendered pairs.

    Without workers the pool is complete and fixed, and the same generator state makes the same batch. With workers the
    pool changes with time, and so do the batches.
    """

    def __init__(
        self,
        config: ScenesConfig,
        *,
        size: int,
        points: int,
        device: torch.device | str = "cpu",
        helper: "ScenePairs | None" = None,
    ) -> None:
        """Without workers of its own, those of the `helper` render the pool."""
        self.pool: _Pool = _Pool(config, None if helper is None else helper.pool)
        super().__init__(self.pool, config, size=size, points=points, device=device)

    def make(self, count: int, random: Generator) -> PairBatch:
        """A batch of `count` pairs."""
        self.pool.renew()
        return super().make(count, random)

    def report(self) -> str:
        """One line about what went wrong so far; empty if nothing did."""
        return self.pool.failure or super().report()

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()
        super().close()


class _Pool:
    """Rendered pairs, renewed by processes."""

    def __init__(self, config: ScenesConfig, helper: "_Pool | None" = None) -> None:
        self.config, self.failure = config, ""
        self._samples: list[PairSample] = []
        # The next pair to render.
        self._next = 0
        self._oldest = 0
        self._pending: set[Future[PairSample]] = set()
        self._executor: ProcessPoolExecutor | None = None
        if not config.workers:
            run = map if helper is None or helper._executor is None else helper._executor.map
            self._samples = list(run(render_sample, [config] * config.pool, range(config.pool)))
            return
        # Forked processes could hang on locks that threads of this one hold.
        context = get_context("spawn")
        self._executor = ProcessPoolExecutor(config.workers, mp_context=context, initializer=_settle)
        while len(self._samples) < min(config.pool, _FIRST):
            self.renew(patient=True)

    def __len__(self) -> int:
        return len(self._samples)

    def name(self, number: int) -> str:
        """The pair's place in the pool."""
        return f"rendered pair {number}"

    def load(self, number: int) -> PairSample:
        """The pair that is there now."""
        return self._samples[number]

    def renew(self, *, patient: bool = False) -> None:
        """Take in what is finished and order more; `patient` waits for at least one pair."""
        if self._executor is None:
            return
        while len(self._pending) < 2 * self.config.workers:
            self._pending.add(self._executor.submit(render_sample, self.config, self._next))
            self._next += 1
        done, self._pending = wait(self._pending, None if patient else 0, FIRST_COMPLETED)
        try:
            for future in done:
                self._put(future.result())
        except BrokenProcessPool as error:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
            self.failure = "The processes that render scenes were killed; the pairs that they made are used on."
            if not self._samples:
                raise DataError("The processes that render scenes were killed; use fewer workers.") from error

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _put(self, sample: PairSample) -> None:
        if len(self._samples) < self.config.pool:
            self._samples.append(sample)
        else:
            self._samples[self._oldest] = sample
            self._oldest = (self._oldest + 1) % self.config.pool


def _settle() -> None:
    """In a worker: one thread each, Ctrl-C is the parent's to handle, and the end of the parent ends it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
