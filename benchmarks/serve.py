"""Load test of the service: concurrent clients with checked responses, and memory over many requests.

    python benchmarks/serve.py --clients 8 --seconds 60
    python benchmarks/serve.py --device cuda --clients 16 --seconds 20
    python benchmarks/serve.py --requests 500
    python benchmarks/serve.py --url http://127.0.0.1:8000   # a server that runs already, with --max-client-jobs 64
    python benchmarks/serve.py --in-process --device cuda --clients 16 --seconds 20

In the first two forms, each client matches its own pair repeatedly, by ids and by files in turn. Every response is
compared with the result of a matcher in this process, on the device of the server: bitwise on a CPU. On a GPU, the
results of a batch can differ from those of single pairs where two candidates are nearly equal; 99.9 % of all matches
must be the same. The sizes of the batches are those that the server reports. The third form sends requests one after
the other, each with new uploads, and prints the resident memory of the server.

The last form needs no HTTP and none of the packages of the extra `web`: the clients use the queue of the service in
this process. Rounds with batches and rounds with one pair at a time take turns, and their throughputs are printed. On a
CPU, where the service matches one pair at a time, `--in-process` batches too, so that the code can be tested there.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

import dualrc
from dualrc.matcher import Matcher
from dualrc.matches import Matches
from dualrc.types import ImageArray
from dualrc.web.service import Service
from dualrc.web.settings import ServerConfig

if TYPE_CHECKING:
    # Imported where they are used, since --in-process works without them.
    import httpx

# Width and height of the images.
SIZE = (320, 240)
# Distance in pixels below which two matches are the same on a GPU.
_NEAR_PX = 0.05
# Minimum fraction of equal matches on a GPU: in one response, and in all of them.
_LEAST_ONE, _LEAST_ALL = 0.99, 0.999
# Maximum time for the server to start, in seconds.
_START_S = 120.0


def texture(seed: int, width: int, height: int) -> ImageArray:
    """Return a smooth random texture with some detail, uint8 (height, width, 3)."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(1, 3, height, width)
    for cell in (24, 8, 3):
        coarse = torch.randn(1, 3, height // cell + 2, width // cell + 2, generator=generator)
        total += F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=False)
    return (128 + 35 * total[0]).clamp(0, 255).permute(1, 2, 0).byte().numpy()


def pair_of(seed: int) -> tuple[ImageArray, ImageArray]:
    """Return two overlapping parts of one texture."""
    width, height = SIZE
    whole = texture(seed, width + 40, height + 30)
    return whole[:height, :width].copy(), whole[30:, 40:].copy()


@contextmanager
def started(device: str | None) -> Iterator[str]:
    """Start `dualrc serve` on a free port, and yield its URL."""
    command = [sys.executable, "-m", "dualrc", "serve", "--port", "0", "--max-client-jobs", "64"]
    command += [] if device is None else ["--device", device]
    # A file, not a pipe: a full pipe would stop the server.
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end, text = time.monotonic() + _START_S, ""
            while not (found := re.search(r"http://[\d.]+:\d+", text)):
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"The server did not start:\n{text}")
                time.sleep(0.1)
                log.seek(0)
                text = log.read()
            yield found[0]
        finally:
            server.terminate()
            server.wait(30)


def metrics(client: "httpx.Client") -> str:
    """Return the metrics of the server."""
    return client.get("/metrics", timeout=60).text


def memory_mib(client: "httpx.Client") -> float:
    """Return the resident memory of the server, in MiB."""
    found = re.search(r"^process_resident_memory_bytes (\S+)$", metrics(client), re.MULTILINE)
    return float(found[1]) / 2**20 if found else float("nan")


def batch_sizes(client: "httpx.Client") -> dict[int, int]:
    """Return the number of batches of each size."""
    found = re.findall(r'^dualrc_batches_total\{pairs="(\d+)"\} (\d+)$', metrics(client), re.MULTILINE)
    return {int(size): int(count) for size, count in found}


def same_fraction(found: Matches, own: Matches, *, exact: bool) -> float:
    """Return the fraction of `own` that is in `found`; if `exact`, 1 only for bitwise equality, and else 0."""
    if exact:
        return float(all(np.array_equal(getattr(found, n), getattr(own, n)) for n in ("points0", "points1", "scores")))
    if len(found) != len(own):
        return 0.0
    places = [np.hstack([matches.points0, matches.points1]) for matches in (own, found)]
    return float((np.abs(places[0][:, None] - places[1][None]).max(2).min(1) < _NEAR_PX).mean())


def compared(fractions: list[float], errors: list[str], *, exact: bool) -> dict[str, object]:
    """Return the summary of the fractions of equal matches of all responses."""
    wrong = sum(fraction < (1 if exact else _LEAST_ONE) for fraction in fractions)
    mean = float(np.mean(fractions)) if fractions else 0.0
    return {
        "total": len(fractions),
        "wrong": wrong,
        "same_matches": round(mean, 6),
        "same_matches_worst": round(min(fractions, default=0.0), 6),
        "passed": bool(fractions) and not errors and not wrong and mean >= _LEAST_ALL,
    }


def run_clients(
    http: "httpx.Client", url: str, token: str | None, clients: int, seconds: float, top: int
) -> dict[str, object]:
    """Match with several concurrent clients and compare every response."""
    from dualrc.client import Client

    device = http.get("/v1/info").json()["device"]
    matcher, exact = dualrc.load(device=device), device == "cpu"
    truth = [matcher.match(*pair_of(seed), top=top) for seed in range(clients)]
    same, errors, times = [list[float]() for _ in range(clients)], list[str](), list[float]()
    before, end = batch_sizes(http), time.monotonic() + seconds

    def work(number: int) -> None:
        try:
            with Client(url, token, retries=20) as client:
                images = [client.upload(image) for image in pair_of(number)]
                while time.monotonic() < end:
                    start = time.perf_counter()
                    given = pair_of(number) if len(same[number]) % 4 == 3 else images
                    found = client.match(*given, top=top)
                    times.append(time.perf_counter() - start)
                    same[number].append(same_fraction(found, truth[number], exact=exact))
        except Exception as error:
            errors.append(f"client {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [fraction for fractions in same for fraction in fractions]
    batches = {size: count - before.get(size, 0) for size, count in batch_sizes(http).items()}
    return {
        "device": device,
        "clients": clients,
        "seconds": seconds,
        "answers": [len(fractions) for fractions in same],
        **compared(everything, errors, exact=exact),
        "batches_by_size": {size: count for size, count in sorted(batches.items()) if count},
        "errors": errors,
        "median_s": round(float(np.median(times)), 3) if times else None,
        "worst_s": round(max(times), 3) if times else None,
    }


def run_requests(http: "httpx.Client", url: str, token: str | None, count: int, top: int) -> dict[str, object]:
    """Send requests one after the other, each with new uploads, and measure the memory."""
    from dualrc.client import Client

    start, memory = memory_mib(http), dict[int, float]()
    with Client(url, token, retries=20) as client:
        for number in range(count):
            client.match(*pair_of(number % 50), top=top)
            if (number + 1) % 50 == 0 or number == 9:
                memory[number + 1] = round(memory_mib(http), 1)
    return {"requests": count, "before_mib": round(start, 1), "memory_mib_after": memory, "passed": True}


@dataclass
class Round:
    """Result of a round of `run_in_process`."""

    same: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    batches: Counter[int] = field(default_factory=Counter)


async def run_round(
    matcher: Matcher, folder: Path, truth: list[Matches], seconds: float, top: int, batch: int
) -> Round:
    """Match with one client for each of `truth`, at least once each, in batches of at most `batch` pairs."""
    config = ServerConfig(
        max_client_jobs=2 * len(truth), max_queue=2 * len(truth), max_images=8 * len(truth), batch=batch
    )
    service, found, exact = Service(matcher, folder, config, batches=True), Round(), matcher.device.type == "cpu"
    # The fields of the options of a request, whose class needs pydantic.
    options: Any = SimpleNamespace(
        quality="standard", top=top, min_score=0.0, size=None, covariance=False, estimate=None, threshold_px=2.0
    )

    files = [[png(image) for image in pair_of(number)] for number in range(len(truth))]
    # Compared after the round, so that the comparison takes no time of the worker thread.
    answers: list[tuple[int, Matches]] = []

    def add(number: int) -> Any:
        return tuple(service.images.add(BytesIO(file), f"{number}.png", f"client {number}") for file in files[number])

    async def work(number: int, images: Any) -> None:
        count = 0
        while not count or time.perf_counter() < end:
            count += 1
            given = await asyncio.to_thread(add, number) if count % 4 == 0 else images
            result = await service.jobs.result(service.match(f"client {number}", given, options))
            answers.append((number, service.pairs.get(result["pair"]).matches))
            if given is not images:
                for image in given:
                    service.images.delete(image.id)

    service.jobs.open()
    try:
        images = [add(number) for number in range(len(truth))]
        start = time.perf_counter()
        end = start + seconds
        works = [work(number, given) for number, given in enumerate(images)]
        for number, error in enumerate(await asyncio.gather(*works, return_exceptions=True)):
            found.errors += [] if error is None else [f"client {number}: {error!r}"]
        found.seconds, found.batches = time.perf_counter() - start, Counter(service.jobs.batches)
    finally:
        service.jobs.close()
    found.same = [same_fraction(matches, truth[number], exact=exact) for number, matches in answers]
    return found


def png(image: ImageArray) -> bytes:
    """Return an image as a PNG file."""
    target = BytesIO()
    Image.fromarray(image).save(target, "PNG")
    return target.getvalue()


def run_in_process(
    matcher: Matcher, clients: int, seconds: float, top: int, *, batch: int = 8, rounds: int = 3
) -> dict[str, object]:
    """Match with concurrent clients of the queue; rounds with one pair at a time and with batches take turns."""
    truth = [matcher.match(*pair_of(seed), top=top) for seed in range(clients)]
    done: dict[int, list[Round]] = {1: [], batch: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for most, earlier in done.items():
                # The first round makes CUDA graphs and fills caches; its answers are checked, but not timed.
                share_s = seconds / (rounds * len(done)) if number else 0.0
                earlier.append(asyncio.run(run_round(matcher, Path(folder), truth, share_s, top, most)))
    everything = [one for rounds_of in done.values() for one in rounds_of]
    errors = [error for one in everything for error in one.errors]
    per_second = {
        most: [round(len(one.same) / one.seconds, 2) for one in rounds_of[1:]] for most, rounds_of in done.items()
    }
    batches = sum((one.batches for one in done[batch]), Counter[int]())
    return {
        "device": str(matcher.device),
        "clients": clients,
        "batch": batch,
        **compared(
            [fraction for one in everything for fraction in one.same], errors, exact=matcher.device.type == "cpu"
        ),
        "batches_by_size": dict(sorted(batches.items())),
        "pairs_per_second_one_at_a_time": per_second[1],
        "pairs_per_second_in_batches": per_second[batch],
        "ratio": round(float(np.median(per_second[batch]) / np.median(per_second[1])), 2),
        "errors": errors,
    }


def main() -> None:
    """Parse the arguments and run the test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="running server; by default, one is started")
    parser.add_argument("--device", help="device of the server that is started")
    parser.add_argument("--token")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, help="measure the memory over this number of requests instead")
    parser.add_argument("--top", type=int, default=500)
    parser.add_argument("--in-process", action="store_true", help="use the queue of the service without HTTP")
    parser.add_argument("--batch", type=int, default=8, help="maximum number of pairs in a batch, with --in-process")
    given = parser.parse_args()
    if given.in_process:
        matcher = dualrc.load(device=given.device)
        finish(run_in_process(matcher, given.clients, given.seconds, given.top, batch=given.batch))
    import httpx

    headers = {} if given.token is None else {"Authorization": f"Bearer {given.token}"}
    with ExitStack() as stack:
        url = given.url.rstrip("/") if given.url else stack.enter_context(started(given.device))
        http = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False))
        if given.requests:
            result = run_requests(http, url, given.token, given.requests, given.top)
        else:
            result = run_clients(http, url, given.token, given.clients, given.seconds, given.top)
    finish(result)


def finish(result: dict[str, object]) -> NoReturn:
    """Print the result and exit."""
    print(json.dumps(result))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
