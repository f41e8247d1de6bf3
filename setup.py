"""Compilation of the C kernels, which pyproject.toml cannot describe."""

import os
import platform
import runpy
import sys

from setuptools import Extension, setup

# Build a wheel without compiled code, for platforms without a binary wheel. It uses the torch engine.
pure = os.environ.get("DUALRC_PURE") == "1"
# Fail if the C engine cannot be compiled; used for wheels that are distributed.
strict = os.environ.get("DUALRC_STRICT") == "1"

FOLDER = "src/dualrc/ops/native"
# On Linux the kernels share the thread pool of torch, whose OpenMP is loaded first. Elsewhere they are single-threaded.
threads = "-fopenmp" if sys.platform == "linux" else "-fopenmp-simd"
flags = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", threads]
# Python compares this digest with the sources in the package.
digest = runpy.run_path(f"{FOLDER}/sources.py")["digest"]()
# One library per instruction set; ops/native/library.py selects one at run time.
variants = {"generic": []}
if platform.machine() in ("x86_64", "AMD64"):
    variants |= {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
setup(
    ext_modules=[]
    if pure
    else [
        Extension(
            f"dualrc.ops.native._{name}",
            sources=[f"{FOLDER}/{source}.c" for source in ("consensus", "search", "refine", "version")],
            depends=[f"{FOLDER}/native.h"],
            define_macros=[("DUALRC_SOURCES", f'"{digest}"')],
            extra_compile_args=[*flags, *processor],
            extra_link_args=[threads],
            # Without a C compiler, torch computes the same results more slowly.
            optional=not strict,
        )
        for name, processor in variants.items()
    ]
)
