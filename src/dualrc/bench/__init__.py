"""Timings and memory: each stage and the whole, beside others, and how they grow with the picture."""

from dualrc.bench.run import BenchSettings, bench, others_of, sizes_of

__all__ = ["BenchSettings", "bench", "others_of", "sizes_of"]
