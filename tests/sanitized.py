"""The kernels' tests with the native build under AddressSanitizer: `make sanitize`.

Builds the kernels again, with the sanitizer, beside the installed ones, and runs pytest in a process that finds those
first. Not a test file: the sanitizer has to be there before Python is.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = """
import sys, tinyloop.kernels
tinyloop.kernels.__path__.insert(0, sys.argv.pop(1))
from tinyloop.kernels import native
assert native.library().__file__.startswith(tinyloop.kernels.__path__[0]), native.library()
import pytest
sys.exit(pytest.main(["-p", "no:cacheprovider", "--capture=sys", *sys.argv[1:]]))  # a report ends the process at once
"""


def main(arguments: list[str]) -> int:
    preloaded = " ".join(_library(name) for name in ("libasan.so", "libstdc++.so"))  # it must know how C++ throws
    with tempfile.TemporaryDirectory() as work:
        flags = "-fsanitize=address -fno-omit-frame-pointer -O1 -g"
        build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", work, "--build-temp", f"{work}/temp"]
        subprocess.run(build, cwd=ROOT, check=True, env=os.environ | {"TINYLOOP_CFLAGS": flags, "LDFLAGS": flags})
        env = {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
        kernels = Path(work) / "tinyloop" / "kernels"
        command = [
            sys.executable,
            "-c",
            RUN,
            str(kernels),
            *arguments,
            "tests/test_kernels.py",
            "tests/test_program.py",
        ]
        return subprocess.run(command, cwd=ROOT, env=os.environ | env).returncode


def _library(name: str) -> str:
    """Where the compiler has it."""
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
