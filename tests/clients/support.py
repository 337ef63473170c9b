"""A server process with a tiny model, and other people's packages in processes of their own: their warnings are theirs,
not errors here."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import tiny_model
from tinyloop.model import Model

PROGRAMS = Path(__file__).parent / "programs"
LONGEST_S = 120
# None of them reaches for the network.
QUIET = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
SERVER = """
from server.cli import bind, run_server
from server.engine import Engine
from server.scheduler import Scheduler
from server.settings import Settings
from tests.clients.support import served_model
run_server(Scheduler(Engine(served_model())), Settings(drain_timeout_s=1.0), bind("127.0.0.1", 0))
"""


def served_model() -> Model:
    """What the server has, for a process of its own too. The small scale keeps log-probabilities comparable."""
    return tiny_model("ouro", pages=4000, max_position_embeddings=2048, scale=0.5)


def python_client(package: str, *arguments: str, **environment: str) -> Any:
    """What `programs/PACKAGE_client.py` prints last, a JSON value. Skips the test where the package is not there."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make clients")
    return answer([sys.executable, str(PROGRAMS / f"{package}_client.py"), *arguments], **environment)


def answer(command: list[str], **environment: str) -> Any:
    """The JSON value on the last line of a program that ends well."""
    done = subprocess.run(command, env=QUIET | environment, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def program(name: str) -> str:
    """Where a program lies. Skips the test where it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found
