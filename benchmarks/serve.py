"""Load test of the service: concurrent clients with checked responses, and memory over many requests.

    python benchmarks/serve.py --clients 8 --seconds 60
    python benchmarks/serve.py --device cuda --clients 16 --seconds 20
    python benchmarks/serve.py --requests 500
    python benchmarks/serve.py --url http://127.0.0.1:8000   # a server that runs already, with --max-client-jobs 64

In the first two forms, each client matches its own pair repeatedly, by ids and by files in turn. Every response is
compared with the result of a matcher in this process, on the device of the server: bitwise on a CPU. On a GPU, the
results of a batch can differ from those of single pairs where two candidates are nearly equal; 99.9 % of all matches
must be the same. The sizes of the batches are those that the server reports. The third form sends requests one after
the other, each with new uploads, and prints the resident memory of the server.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np
import torch
from torch.nn import functional as F

import dualrc
from dualrc.client import Client
from dualrc.matches import Matches
from dualrc.types import ImageArray

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


def metrics(client: httpx.Client) -> str:
    """Return the metrics of the server."""
    return client.get("/metrics", timeout=60).text


def memory_mib(client: httpx.Client) -> float:
    """Return the resident memory of the server, in MiB."""
    found = re.search(r"^process_resident_memory_bytes (\S+)$", metrics(client), re.MULTILINE)
    return float(found[1]) / 2**20 if found else float("nan")


def batch_sizes(client: httpx.Client) -> dict[int, int]:
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


def run_clients(
    http: httpx.Client, url: str, token: str | None, clients: int, seconds: float, top: int
) -> dict[str, object]:
    """Match with several concurrent clients and compare every response."""
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
    wrong = sum(fraction < (1 if exact else _LEAST_ONE) for fraction in everything)
    return {
        "device": device,
        "clients": clients,
        "seconds": seconds,
        "answers": [len(fractions) for fractions in same],
        "total": len(everything),
        "wrong": wrong,
        "same_matches": round(float(np.mean(everything)), 6) if everything else None,
        "same_matches_worst": round(min(everything), 6) if everything else None,
        "passed": bool(everything) and not errors and not wrong and float(np.mean(everything)) >= _LEAST_ALL,
        "batches_by_size": {size: count for size, count in sorted(batches.items()) if count},
        "errors": errors,
        "median_s": round(float(np.median(times)), 3) if times else None,
        "worst_s": round(max(times), 3) if times else None,
    }


def run_requests(http: httpx.Client, url: str, token: str | None, count: int, top: int) -> dict[str, object]:
    """Send requests one after the other, each with new uploads, and measure the memory."""
    start, memory = memory_mib(http), dict[int, float]()
    with Client(url, token, retries=20) as client:
        for number in range(count):
            client.match(*pair_of(number % 50), top=top)
            if (number + 1) % 50 == 0 or number == 9:
                memory[number + 1] = round(memory_mib(http), 1)
    return {"requests": count, "before_mib": round(start, 1), "memory_mib_after": memory, "passed": True}


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
    given = parser.parse_args()
    headers = {} if given.token is None else {"Authorization": f"Bearer {given.token}"}
    with ExitStack() as stack:
        url = given.url.rstrip("/") if given.url else stack.enter_context(started(given.device))
        http = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False))
        if given.requests:
            result = run_requests(http, url, given.token, given.requests, given.top)
        else:
            result = run_clients(http, url, given.token, given.clients, given.seconds, given.top)
    print(json.dumps(result))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
