"""What pyproject.toml can't say: how the C engine is compiled."""

import os
import platform
import runpy
import sys

from setuptools import Extension, setup

# A wheel without compiled code, for machines that no other wheel is for; torch does the work of the C engine there.
pure = os.environ.get("DUALRC_PURE") == "1"
# Wheels for others must not lack the C engine without anybody noticing.
strict = os.environ.get("DUALRC_STRICT") == "1"

FOLDER = "src/dualrc/ops/native"
# On Linux they share the threads of torch, whose OpenMP is loaded first; elsewhere they work on one.
threads = "-fopenmp" if sys.platform == "linux" else "-fopenmp-simd"
flags = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", threads]
# Python compares this with the sources that it finds beside it.
digest = runpy.run_path(f"{FOLDER}/sources.py")["digest"]()
# One library for each instruction set; ops/native/library.py chooses.
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
            optional=not strict,  # without a C compiler, torch does the same more slowly
        )
        for name, processor in variants.items()
    ]
)
