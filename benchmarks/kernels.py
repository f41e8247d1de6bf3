"""The GPU kernels: whether they agree with the plain definitions, how long they take, and which tiles suit the GPU.

    python benchmarks/kernels.py

Needs a CUDA device and Triton; takes about a minute and a half, most of it compiling. `--small` runs every part on
tiny inputs, on a CPU too where TRITON_INTERPRET=1 is set.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from dualrc.config import ConsensusConfig
from dualrc.kernels import consensus as fast
from dualrc.kernels import search as fast_search
from dualrc.model import correlation
from dualrc.model.consensus import Consensus
from dualrc.model.fine import FineMap, cell_queries, search

VALUES = 2**27  # float32 values that may be held: 0.5 GiB
EXCESS = {torch.float16: 4e-3, torch.float32: 1e-5}
SECONDS = 95.0
Shape = tuple[int, int, int, int, int]


class Bench:
    """Runs measurements, prints each as a line of one table, and goes on after a failure."""

    def __init__(self, device: torch.device, small: bool) -> None:
        self.device, self.small = device, small
        self.started = time.perf_counter()
        self.best: dict[str, tuple[float, str]] = {}

    def attempt(self, what: str, case: str, measure: Callable[[], str]) -> None:
        """One line of the table."""
        if time.perf_counter() - self.started > SECONDS and not self.small:
            result = "left out: no time"
        else:
            try:
                result = measure()
            except Exception as error:  # the others still tell something
                result = f"FAILED {type(error).__name__}: {(str(error) or '?').strip().splitlines()[-1][:150]}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{time.perf_counter() - self.started:5.1f} s  {what:16} {case:50} {result}", flush=True)

    def milliseconds(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Median time after a warm-up; long work is repeated less often."""
        work()
        once = self._once(work)
        repeats = max(3, min(repeats, int(800 / max(once, 1e-3)))) if not self.small else 1
        return statistics.median(self._once(work) for _ in range(repeats))

    def _once(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return 1000 * (time.perf_counter() - start)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1])

    def timed(self, work: Callable[[], object]) -> str:
        """Median and the memory that the work took beside its inputs."""
        if self.device.type != "cuda":
            return f"{self.milliseconds(work):.2f} ms"
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        median = self.milliseconds(work)
        return f"{median:.3f} ms, {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"

    def tried(self, kind: str, name: str, work: Callable[[], object]) -> str:
        """A choice of tiles; the best of a kind is remembered."""
        median = self.milliseconds(work)
        if kind not in self.best or median < self.best[kind][0]:
            self.best[kind] = median, name
        return f"{median:.3f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny inputs, to see that everything runs")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # the plain definitions are in float32
    print(torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "torch", torch.__version__)
    bench = Bench(device, args.small)
    with torch.no_grad():
        check_consensus(bench)
        check_search(bench)
        time_consensus(bench)
        time_search(bench)
        profile(bench)
        try_consensus_tiles(bench)
        try_search_tiles(bench)
    for kind, (median, name) in bench.best.items():
        print(f"Best {kind}: {name}, {median:.3f} ms")


def make_consensus(channels: int, device: torch.device) -> Consensus:
    """A consensus whose biases bring ReLU and the border into play."""
    torch.manual_seed(channels)
    consensus = Consensus(ConsensusConfig(kernel_sizes=(3, 3), channels=(channels, 1)))
    for weight, bias in zip(consensus.weights, consensus.biases, strict=True):
        weight.data = torch.randn_like(weight) * (weight.shape[1] * 81) ** -0.5
        bias.data = 0.1 * torch.randn_like(bias).abs()
    return consensus.requires_grad_(False).to(device)


def make_scores(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.rand(shape, dtype=dtype, device=device)


def plainly(consensus: Consensus, scores: Tensor) -> Tensor:
    """The consensus in PyTorch, where it would take the kernels."""
    with patch.object(fast, "supported", return_value=False):
        return consensus(scores, VALUES)


def prepared(consensus: Consensus, dtype: torch.dtype) -> fast.Prepared:
    return fast.prepare(list(consensus.weights), list(consensus.biases), dtype)


def name_of(shape: Shape) -> str:
    batch, *sides = shape
    return f"{batch} x " + "x".join(map(str, sides))


def check_consensus(bench: Bench) -> None:
    """Both precisions, all widths, slabs and the mutual filter, against the plain definitions in float32."""
    shapes: list[Shape] = [(2, 7, 9, 5, 11), (1, 30, 40, 30, 40), (1, 37, 50, 37, 50), (1, 75, 100, 75, 100)]
    if bench.small:
        shapes = [(2, 2, 3, 2, 4)]
    cases = [(shapes[0], 8, torch.float16), (shapes[0], 32, torch.float16), (shapes[0], 16, torch.float32)]
    cases += [(shape, 16, torch.float16) for shape in shapes]
    for shape, channels, dtype in cases:

        def measure(shape: Shape = shape, channels: int = channels, dtype: torch.dtype = dtype) -> str:
            consensus, scores = make_consensus(channels, bench.device), make_scores(shape, dtype, bench.device)
            weights = prepared(consensus, dtype)
            expected = plainly(consensus, scores.float())
            errors = [error_of(fast.apply(scores, weights, VALUES), expected)]
            # In thinner slabs too.
            errors.append(error_of(fast.apply(scores, weights, scores[0].numel() * 4), expected))
            expected = correlation.mutual_filter(scores.float())
            errors.append(error_of(fast.mutual_filter(scores), expected))
            filtered = fast.apply(scores, weights, VALUES, maxima=fast.maxima_of(scores))
            errors.append(error_of(filtered, plainly(consensus, expected)))
            limit = 3e-3 if dtype == torch.float16 else 2e-5
            verdict = "agrees" if max(errors) < limit else "DIFFERS"
            return f"{verdict}, errors / maximum {', '.join(f'{error:.1e}' for error in errors)}"

        bench.attempt("check consensus", f"{name_of(shape)}, {channels} channels, {kind_of(dtype)}", measure)


def kind_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest error as a share of the largest value."""
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


def planted(
    side: tuple[int, int], batch: int, channels: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, FineMap, FineMap]:
    """Pictures that show the same with noise, and a coarse tensor that is peaked there, as real ones are."""
    torch.manual_seed(side[0])
    height, width = side
    count = height * width
    tensor = torch.rand(batch, count, count, dtype=dtype, device=device).pow_(4).mul_(0.02)
    diagonal = tensor.diagonal(dim1=1, dim2=2)
    diagonal.copy_(0.5 + 0.5 * torch.rand(batch, count, device=device))
    features = torch.randn(batch, 16 * count, channels, dtype=torch.float16, device=device).to(dtype)
    maps = []
    for noise in (0.0, 0.4):
        unit = features + noise * torch.randn_like(features)
        unit /= unit.norm(dim=2, keepdim=True)
        maps.append(FineMap(features=unit, height=height, width=width, valid=None))
    return tensor, maps[1], maps[0]


def find(
    tensor: Tensor, fine0: FineMap, fine1: FineMap, reading: fast_search.Reading, **options: object
) -> fast_search.Answers:
    settings = {"temperature": 0.0, "k": 8, "excess": EXCESS[fine0.features.dtype], **options}
    cells = torch.arange(tensor.shape[0] * tensor.shape[1], device=tensor.device)
    return fast_search.search_cells(tensor, cells, fine0, fine1, reading, **settings)  # type: ignore[arg-type]


def find_plainly(
    tensor: Tensor, fine0: FineMap, fine1: FineMap, reading: fast_search.Reading, temperature: float = 0.0
) -> tuple[Tensor, Tensor]:
    cells = torch.arange(tensor.shape[0] * tensor.shape[1], device=tensor.device)
    queries = cell_queries(fine0, cells, reading)
    found = search(tensor, queries, fine1, temperature=temperature, max_values=VALUES)
    return found.index, found.score


def check_search(bench: Bench) -> None:
    """Index and score, in both readings, with a mask and a sharp score."""
    settings: list[tuple[fast_search.Reading, float, bool, torch.dtype]] = [
        ("center", 0.0, False, torch.float16),
        ("corner", 0.0, False, torch.float16),
        ("center", 0.1, True, torch.float32),
    ]
    for side in [(2, 3)] if bench.small else [(5, 7), (30, 40), (37, 50)]:
        for setting in settings:

            def measure(
                side: tuple[int, int] = side,
                setting: tuple[fast_search.Reading, float, bool, torch.dtype] = setting,
            ) -> str:
                reading, temperature, masked, dtype = setting
                tensor, fine0, fine1 = planted(side, 2, 96, dtype, bench.device)
                if masked:
                    fine1 = replace(fine1, valid=torch.rand(fine1.features.shape[:2], device=bench.device) > 0.3)
                found = find(tensor, fine0, fine1, reading, temperature=temperature)
                exact0, exact1 = (replace(fine, features=fine.features.float()) for fine in (fine0, fine1))
                index, score = find_plainly(tensor.float(), exact0, exact1, reading, temperature)
                same = (found.index == index).float().mean().item()
                error = (found.score - score).abs().max().item()
                verdict = "agrees" if same > 0.9999 and error < 1e-4 else "DIFFERS"
                visited = found.visited.float().mean().item()
                return f"{verdict}, {same:.3%} the same, scores to {error:.1e}, {visited:.1f} cells visited"

            reading, temperature, masked, dtype = setting
            name = f"{side[0]}x{side[1]}, {reading}, temperature {temperature}, {kind_of(dtype)}"
            bench.attempt("check search", name + (", masked" if masked else ""), measure)


def sizes(bench: Bench) -> Iterator[Shape]:
    """Coarse sizes of 640x480 alone and in a batch, 800x592, 1600x1200 and 3200x2400."""
    if bench.small:
        yield (1, 1, 3, 2, 4)
        return
    for batch, height, width in ((1, 30, 40), (32, 30, 40), (1, 37, 50), (1, 75, 100), (1, 150, 200)):
        yield (batch, height, width, height, width)


def time_consensus(bench: Bench) -> None:
    """The whole consensus and the mutual filter, beside PyTorch's in half precision."""
    for shape in sizes(bench):
        huge = shape[1] >= 150
        for channels in (16,) if huge else (16, 8):
            consensus = make_consensus(channels, bench.device)
            weights = prepared(consensus, torch.float16)

            def kernels(shape: Shape = shape, weights: fast.Prepared = weights) -> str:
                scores = make_scores(shape, torch.float16, bench.device)
                return bench.timed(lambda: fast.apply(scores, weights, VALUES))

            bench.attempt("time consensus", f"{name_of(shape)}, {channels} channels, float16, Triton", kernels)
        if huge:
            continue

        def plain(shape: Shape = shape) -> str:
            module = make_consensus(16, bench.device).half()
            scores = make_scores(shape, torch.float16, bench.device)
            return bench.timed(lambda: plainly(module, scores))

        def whole(shape: Shape = shape) -> str:
            weights = prepared(make_consensus(16, bench.device), torch.float32)
            scores = make_scores(shape, torch.float32, bench.device)
            return bench.timed(lambda: fast.apply(scores, weights, VALUES))

        if bench.device.type == "cuda":
            bench.attempt("time consensus", f"{name_of(shape)}, 16 channels, float16, PyTorch", plain)
        if shape[0] == 1:
            bench.attempt("time consensus", f"{name_of(shape)}, 16 channels, float32, Triton", whole)

    for shape in sizes(bench):

        def filters(shape: Shape = shape) -> str:
            scores = make_scores(shape, torch.float16, bench.device)
            both = bench.milliseconds(lambda: fast.mutual_filter(scores))
            maxima = bench.milliseconds(lambda: fast.maxima_of(scores))
            plain = bench.milliseconds(lambda: correlation.mutual_filter(scores))
            return f"{both:.3f} ms, of these maxima {maxima:.3f} ms; PyTorch {plain:.3f} ms"

        bench.attempt("time mutual filter", f"{name_of(shape)}, float16", filters)


def time_search(bench: Bench) -> None:
    """The search from all cells of picture 0, and the copy of the transpose that the way back needs."""
    for batch, height, width, *_ in sizes(bench):
        for channels, reading in ((96, "center"), (1024, "corner")):
            if channels == 1024 and (batch > 1 or height >= 150):  # features of many GiB
                continue

            def measure(
                batch: int = batch,
                side: tuple[int, int] = (height, width),
                channels: int = channels,
                reading: fast_search.Reading = reading,  # type: ignore[assignment]
            ) -> str:
                tensor, fine0, fine1 = planted(side, batch, channels, torch.float16, bench.device)
                share = (find(tensor, fine0, fine1, reading).visited > 8).float().mean().item()
                text = f"{bench.timed(lambda: find(tensor, fine0, fine1, reading))}, {share:.1%} of groups go further"
                turned = bench.milliseconds(lambda: tensor.transpose(1, 2).contiguous())
                if side[0] < 150 and batch == 1:
                    exact = tensor.float()
                    plain = bench.milliseconds(lambda: find_plainly(exact, fine0, fine1, reading), repeats=5)
                    text += f"; PyTorch {plain:.3f} ms"
                return f"{text}; transposing {turned:.3f} ms"

            bench.attempt("time search", f"{batch} x {height}x{width}, {channels} channels, {reading}", measure)


def try_consensus_tiles(bench: Bench) -> None:
    """Tiles, unrolling, walks and slabs at 75x100."""
    shape: Shape = (1, 1, 2, 2, 2) if bench.small else (1, 75, 100, 75, 100)
    weights = prepared(make_consensus(16, bench.device), torch.float16)
    scores = make_scores(shape, torch.float16, bench.device)
    base = fast.Tiles()
    for tiles in (
        base,
        replace(base, unroll=1),
        replace(base, positions=128, warps=8, unroll=1),
        replace(base, positions=128, warps=8),
        replace(base, positions=128, warps=4, unroll=1),
        replace(base, collected=512),
        replace(base, collected=1024, collect_warps=8),
        replace(base, collected=128),
        replace(base, steps=13),
        replace(base, steps=25),
        replace(base, steps=75),
    ):
        changed = ", ".join(f"{k} {v}" for k, v in vars(tiles).items() if v != getattr(base, k)) or "as they are"
        bench.attempt(
            "try consensus tiles",
            changed,
            lambda tiles=tiles, changed=changed: bench.tried(  # type: ignore[misc]
                "consensus tiles at 75x100", changed, lambda: fast.apply(scores, weights, VALUES, tiles=tiles)
            ),
        )
    for values in (2**25, 2**26, 2**27, 2**28, 2**29, 2**30):
        bench.attempt(
            "try consensus slabs",
            f"{values * 4 / 2**20:.0f} MiB",
            lambda values=values: bench.tried(  # type: ignore[misc]
                "consensus slabs at 75x100",
                f"{values * 4 / 2**20:.0f} MiB",
                lambda: fast.apply(scores, weights, values),
            ),
        )


def try_search_tiles(bench: Bench) -> None:
    """Tiles and numbers of visits at 75x100."""
    side = (2, 3) if bench.small else (75, 100)
    base = fast_search.Tiles()
    choices = [
        base,
        replace(base, at_once=512),
        replace(base, at_once=2048, bound_warps=8),
        replace(base, bound_warps=2),
        replace(base, choose_warps=2),
        replace(base, choose_warps=8),
        replace(base, score_warps=8),
        replace(base, channels=32),
        replace(base, channels=128),
        replace(base, abreast=2),
        replace(base, abreast=4, further_warps=4),
        replace(base, parts=1),
        replace(base, parts=2),
        replace(base, parts=8),
    ]
    try:
        tensor, fine0, fine1 = planted(side, 1, 1024 if not bench.small else 20, torch.float16, bench.device)
    except torch.OutOfMemoryError:
        return
    for tiles in choices:
        changed = ", ".join(f"{k} {v}" for k, v in vars(tiles).items() if v != getattr(base, k)) or "as they are"
        bench.attempt(
            "try search tiles",
            changed,
            lambda tiles=tiles, changed=changed: bench.tried(  # type: ignore[misc]
                "search tiles at 75x100", changed, lambda: find(tensor, fine0, fine1, "center", tiles=tiles)
            ),
        )
    for k in (4, 16, 32):
        bench.attempt(
            "try search visits",
            f"{k} cells",
            lambda k=k: f"{bench.milliseconds(lambda: find(tensor, fine0, fine1, 'center', k=k)):.3f} ms",  # type: ignore[misc]
        )


def profile(bench: Bench) -> None:
    """Where the time goes, by kernel, at 75x100."""
    if bench.device.type != "cuda":
        return
    shape: Shape = (1, 75, 100, 75, 100)
    weights = prepared(make_consensus(16, bench.device), torch.float16)

    def by_kernel(work: Callable[[], object]) -> str:
        from torch.profiler import ProfilerActivity

        work()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
            work()
            torch.cuda.synchronize()
        events = sorted(record.key_averages(), key=lambda event: -event.device_time_total)
        return "; ".join(f"{e.key[:30]} {e.device_time_total / 1000:.3f} ms ({e.count})" for e in events[:8])

    def consensus() -> str:
        scores = make_scores(shape, torch.float16, bench.device)
        return by_kernel(lambda: fast.apply(scores, weights, VALUES))

    def searching() -> str:
        tensor, fine0, fine1 = planted((75, 100), 1, 1024, torch.float16, bench.device)
        return by_kernel(lambda: find(tensor, fine0, fine1, "corner"))

    bench.attempt("profile", "consensus 75x100, 16 channels, float16", consensus)
    bench.attempt("profile", "search 75x100, 1024 channels, corner", searching)


if __name__ == "__main__":
    main()
