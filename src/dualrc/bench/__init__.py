"""Time and memory of each stage and of the whole, by several engines, beside others, for several picture sizes."""

from dualrc.bench.benchmark import bench
from dualrc.bench.settings import BenchSettings, parse_others, parse_sizes

__all__ = ["BenchSettings", "bench", "parse_others", "parse_sizes"]
