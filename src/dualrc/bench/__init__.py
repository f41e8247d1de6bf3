"""Time and memory of each stage and of the whole, by several engines, beside others, for several picture sizes."""

from dualrc.bench.benchmark import bench
from dualrc.bench.methods import BenchSettings

__all__ = ["BenchSettings", "bench"]
