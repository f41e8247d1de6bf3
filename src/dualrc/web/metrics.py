"""Metrics of the service in the Prometheus text format."""

import os
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dualrc.web.job import ENDED

# Upper bounds of the histogram of request durations, in seconds.
_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
# Clients can send any method, but each label takes memory.
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Metrics:
    """Request counts by route, method and status, and request durations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._started = time.time()

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        method = method if method in _METHODS else "other"
        with self._lock:
            self._requests[route, method, status] += 1
            counts = self._buckets.setdefault(route, [0] * (len(_BUCKETS) + 1))
            counts[bisect_left(_BUCKETS, seconds)] += 1
            self._seconds[route] = self._seconds.get(route, 0.0) + seconds

    def text(self, gauges: Mapping[str, tuple[str, float]], jobs: Mapping[str, int], batches: Mapping[int, int]) -> str:
        """Return all metrics.

        `gauges` maps a name to a description and a value, `jobs` counts jobs by outcome and `batches` counts batches by
        their number of pairs.
        """
        with self._lock:
            requests, buckets = dict(self._requests), {route: list(counts) for route, counts in self._buckets.items()}
            seconds = dict(self._seconds)
        lines = ["# HELP dualrc_requests_total Answered requests.", "# TYPE dualrc_requests_total counter"]
        for (route, method, status), count in sorted(requests.items()):
            lines.append(f'dualrc_requests_total{{route="{route}",method="{method}",status="{status}"}} {count}')
        lines += ["# HELP dualrc_request_seconds Duration of requests.", "# TYPE dualrc_request_seconds histogram"]
        for route, counts in sorted(buckets.items()):
            total = 0
            for bound, count in zip([*map(str, _BUCKETS), "+Inf"], counts, strict=True):
                total += count
                lines.append(f'dualrc_request_seconds_bucket{{route="{route}",le="{bound}"}} {total}')
            lines.append(f'dualrc_request_seconds_sum{{route="{route}"}} {seconds[route]:.6f}')
            lines.append(f'dualrc_request_seconds_count{{route="{route}"}} {total}')
        lines += ["# HELP dualrc_jobs_total Jobs that ended.", "# TYPE dualrc_jobs_total counter"]
        lines += [f'dualrc_jobs_total{{outcome="{outcome}"}} {jobs.get(outcome, 0)}' for outcome in ENDED]
        lines += ["# HELP dualrc_batches_total Batches of pairs.", "# TYPE dualrc_batches_total counter"]
        lines += [f'dualrc_batches_total{{pairs="{pairs}"}} {count}' for pairs, count in sorted(batches.items())]
        own = {
            "process_resident_memory_bytes": ("Resident memory.", resident_bytes()),
            "process_start_time_seconds": ("Start of the process.", self._started),
        }
        for name, (words, value) in {**gauges, **own}.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge", f"{name} {value:.10g}"]
        return "\n".join(lines) + "\n"


def resident_bytes() -> float:
    """Return the resident memory of this process, or 0 if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, IndexError, ValueError, AttributeError):
        return 0.0
