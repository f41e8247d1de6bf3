"""Batches of every step: sampled from the sources by their shares, and prepared ahead if that is slow."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Generator

from dualrc.data import FilePairs, PairBatch, PairMaker, PhotoPairs
from dualrc.train.config import TrainConfig

# Number of steps to prepare ahead.
_AHEAD = 2


class Batches:
    """Batches by step, reproducible in any process.

    A batch consists of parts, each made from its own seed. One process that makes all parts and several processes that
    make some parts each therefore train on the same pairs.
    """

    def __init__(self, config: TrainConfig, makers: Sequence[PairMaker], device: torch.device) -> None:
        """`makers`: one for each source of the config."""
        self._config, self._makers, self._count = config, makers, config.pairs // config.parts
        self._make = [captured(maker, self._count, device) for maker in makers]
        # A GPU makes pairs from photos in milliseconds, on a separate stream; other pairs are made in a thread.
        self._on_gpu = [isinstance(maker, PhotoPairs) and device.type == "cuda" for maker in makers]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        # Functions that wait for a part of a step, by both.
        self._started: dict[tuple[int, int], Callable[[], PairBatch]] = {}

    def get(self, step: int, parts: Sequence[int]) -> PairBatch:
        """Return these parts of a step's batch."""
        for later in range(step, step + 1 + _AHEAD):
            for part in parts:
                if (later, part) not in self._started:
                    self._started[later, part] = self._start(later, part)
        batches = [self._started.pop((step, part))() for part in parts]
        if len(batches) == 1:
            return batches[0]
        return PairBatch.of([torch.cat(same) for same in zip(*(batch.tensors() for batch in batches), strict=True)])

    def close(self) -> None:
        """Stop preparing batches."""
        self._pool.shutdown(cancel_futures=True)

    def _start(self, step: int, part: int) -> Callable[[], PairBatch]:
        """Start to make a part, and return a function that waits for it."""
        (source, _), stream = self._draw(step, part), self._stream
        if stream is None or not self._on_gpu[source]:
            return self._pool.submit(self._part, step, part).result
        with torch.cuda.stream(stream):
            batch, event = self._part(step, part), torch.cuda.Event()
            event.record()

        def wait() -> PairBatch:
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(event)
            for tensor in batch.tensors():
                tensor.record_stream(current)
            return batch

        return wait

    def _draw(self, step: int, part: int) -> tuple[int, int]:
        """Return the source and the seed of a part."""
        rng = random.Random(f"{self._config.seed} {step} {part}")
        shares = [source.share for source in self._config.data]
        return rng.choices(range(len(shares)), shares)[0], rng.getrandbits(62)

    @torch.no_grad()
    def _part(self, step: int, part: int) -> PairBatch:
        if self._config.draw == "epochs":
            (maker,) = self._makers
            assert isinstance(maker, FilePairs)
            first = (step * self._config.parts + part) * self._count
            return maker.make_in_order(first, self._count, seed=self._config.seed)
        source, seed = self._draw(step, part)
        return self._make[source](seed)


def captured(maker: PairMaker, count: int, device: torch.device) -> Callable[[int], PairBatch]:
    """Return a function that makes batches from seeds; on a GPU, photo pairs use a CUDA graph to save launches."""
    if not (isinstance(maker, PhotoPairs) and device.type == "cuda"):
        return lambda seed: maker.make(count, Generator(device=device).manual_seed(seed))
    generator = Generator(device=device)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            maker.make(count, generator)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
        batch = maker.make(count, generator)

    def replay(seed: int) -> PairBatch:
        generator.manual_seed(seed)
        graph.replay()
        # Copied, because the next replay overwrites the batch.
        return PairBatch.of([tensor.clone() for tensor in batch.tensors()])

    return replay
