"""What pyproject.toml can't say: how the kernels for the CPU are compiled."""

import sys

from setuptools import Extension, setup

# On Linux they share the threads of torch, whose OpenMP is loaded first; elsewhere they work on one.
threads = "-fopenmp" if sys.platform == "linux" else "-fopenmp-simd"
flags = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wno-psabi", threads]
native = Extension(
    "dualrc.kernels._native",
    sources=["src/dualrc/kernels/search.c", "src/dualrc/kernels/refine.c"],
    depends=["src/dualrc/kernels/native.h"],
    extra_compile_args=flags,
    extra_link_args=[threads],
    optional=True,  # where there is no compiler for them, torch does the same more slowly
)
setup(ext_modules=[native])
