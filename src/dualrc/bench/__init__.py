"""Benchmark of time and memory: per stage and in total, for several engines, other methods, and image sizes."""

from dualrc.bench.benchmark import bench
from dualrc.bench.methods import BenchSettings

__all__ = ["BenchSettings", "bench"]
