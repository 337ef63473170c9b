"""The native kernels, compiled once for each level of instruction set; the rest of the package is in pyproject.toml.

All of them are optional: where a compiler is missing, or does not know a level, the kernels in torch serve. Which
module is loaded is decided at run time by what the processor has (tinyloop/kernels/native.py).
"""

import os
import platform
from glob import glob

from setuptools import Extension, setup

AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
LEVELS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": AVX512,
    "bf16": BF16,
    "amx": [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}


def module(level: str, flags: list[str]) -> Extension:
    return Extension(
        f"tinyloop.kernels._{level}",
        ["tinyloop/kernels/cpp/native.cpp"],
        depends=glob("tinyloop/kernels/cpp/*.h"),
        define_macros=[("TINYLOOP_MODULE", f"_{level}")],
        extra_compile_args=[
            "-std=c++17",
            "-pthread",
            "-O3",
            "-g0",
            "-fvisibility=hidden",
            "-fno-math-errno",
            "-Wno-psabi",
            "-Wno-maybe-uninitialized",  # of the compiler's own headers
            *flags,
            *os.environ.get("TINYLOOP_CFLAGS", "").split(),  # a sanitizer, say
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )


x86 = LEVELS if platform.machine() in ("x86_64", "AMD64") else {}
setup(ext_modules=[module(level, flags) for level, flags in {"plain": [], **x86}.items()])
