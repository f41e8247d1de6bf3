"""What pyproject.toml can't say: how the kernels for the CPU are compiled."""

import platform
import sys

from setuptools import Extension, setup

FOLDER = "src/dualrc/kernels"
# On Linux they share the threads of torch, whose OpenMP is loaded first; elsewhere they work on one.
threads = "-fopenmp" if sys.platform == "linux" else "-fopenmp-simd"
flags = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", threads]
# For each generation of processors their own; kernels/native.py chooses. "" is for all.
generations = {"": []}
if platform.machine() in ("x86_64", "AMD64"):
    generations |= {"_avx2": ["-march=x86-64-v3"], "_avx512": ["-march=x86-64-v4"]}
setup(
    ext_modules=[
        Extension(
            f"dualrc.kernels._native{name}",
            sources=[f"{FOLDER}/{source}.c" for source in ("consensus", "search", "refine")],
            depends=[f"{FOLDER}/native.h"],
            extra_compile_args=[*flags, *processor],
            extra_link_args=[threads],
            optional=True,  # where there is no compiler for them, torch does the same more slowly
        )
        for name, processor in generations.items()
    ]
)
