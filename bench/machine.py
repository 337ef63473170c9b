"""What a measurement was made on: for the JSON beside its figures."""

import datetime
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

TOLD = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16")


def machine() -> dict[str, Any]:
    """Processor, cores, what decides kernels, and our versions."""
    info = Path("/proc/cpuinfo")
    told = info.read_text() if info.exists() else ""
    name = re.search(r"model name\s*: (.*)", told)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)", told, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": name[1] if name else platform.processor(),
        "cores": os.cpu_count(),
        "has": [flag for flag in TOLD if flag in has],
        "versions": {package: version(package) for package in ("tinyloop", "torch")},
    }
