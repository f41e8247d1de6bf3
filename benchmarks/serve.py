"""Load test of a running service: concurrent clients with checked responses, and memory over many requests.

    dualrc serve --port 8000 --max-client-jobs 64 &
    python benchmarks/serve.py http://127.0.0.1:8000 --clients 8 --seconds 60
    python benchmarks/serve.py http://127.0.0.1:8000 --requests 500

In the first form, each client matches its own pair repeatedly, by ids and by files in turn. Every response is compared
with the result of a matcher in this process. The second form sends requests one after the other, each with new uploads,
and prints the resident memory of the server.
"""

import argparse
import json
import re
import threading
import time

import httpx
import numpy as np
import torch
from torch.nn import functional as F

import dualrc
from dualrc.client import Client
from dualrc.types import ImageArray

# Width and height of the images.
SIZE = (320, 240)


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


def memory_mib(url: str, headers: dict[str, str]) -> float:
    """Return the resident memory of the server, in MiB."""
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=60).text
    found = re.search(r"^process_resident_memory_bytes (\S+)$", text, re.MULTILINE)
    return float(found[1]) / 2**20 if found else float("nan")


def run_clients(url: str, token: str | None, clients: int, seconds: float, top: int) -> dict[str, object]:
    """Match with several concurrent clients and compare every response."""
    matcher = dualrc.load(device="cpu")
    truth = [matcher.match(*pair_of(seed), top=top) for seed in range(clients)]
    answers, wrong, errors, times = [0] * clients, [0] * clients, list[str](), list[float]()
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        try:
            with Client(url, token, retries=20) as client:
                images = [client.upload(image) for image in pair_of(number)]
                while time.monotonic() < end:
                    start = time.perf_counter()
                    given = pair_of(number) if answers[number] % 4 == 3 else images
                    found = client.match(*given, top=top)
                    times.append(time.perf_counter() - start)
                    own = truth[number]
                    same = np.array_equal(found.points0, own.points0) and np.array_equal(found.points1, own.points1)
                    wrong[number] += not (same and np.array_equal(found.scores, own.scores))
                    answers[number] += 1
        except Exception as error:
            errors.append(f"client {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "clients": clients,
        "seconds": seconds,
        "answers": answers,
        "total": sum(answers),
        "wrong": sum(wrong),
        "errors": errors,
        "median_s": round(float(np.median(times)), 3) if times else None,
        "worst_s": round(max(times), 3) if times else None,
    }


def run_requests(url: str, token: str | None, count: int, top: int) -> dict[str, object]:
    """Send requests one after the other, each with new uploads, and measure the memory."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    start, memory = memory_mib(url, headers), dict[int, float]()
    with Client(url, token, retries=20) as client:
        for number in range(count):
            client.match(*pair_of(number % 50), top=top)
            if (number + 1) % 50 == 0 or number == 9:
                memory[number + 1] = round(memory_mib(url, headers), 1)
    return {"requests": count, "before_mib": round(start, 1), "memory_mib_after": memory}


def main() -> None:
    """Parse the arguments and run the test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--token")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, help="measure the memory over this number of requests instead")
    parser.add_argument("--top", type=int, default=500)
    given = parser.parse_args()
    url = given.url.rstrip("/")
    if given.requests:
        result = run_requests(url, given.token, given.requests, given.top)
    else:
        result = run_clients(url, given.token, given.clients, given.seconds, given.top)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
