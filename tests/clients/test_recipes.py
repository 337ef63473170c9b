"""The blocks of docs/recipes.md do what they say, with the tiny model in the place of the named one."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.clients.support import LONGEST_S, QUIET, program
from tests.http_support import ROOT

BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE | re.DOTALL)
SHELL = [body for language, body in BLOCKS if language == "sh" and body.startswith("curl")]
PYTHON = [body for language, body in BLOCKS if language == "python"]


def run(command: list[str], recipe: str, url: str) -> str:
    pointed = recipe.replace("http://127.0.0.1:8000", url.removesuffix("/v1")).replace("smollm2", "tiny")
    done = subprocess.run([*command, pointed], env=QUIET, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("recipe", SHELL, ids=range(len(SHELL)))
def test_curl(recipe: str, url: str) -> None:
    program("curl")
    said = run(["bash", "-ec"], recipe.replace("curl ", "curl --fail-with-body --silent --show-error "), url)
    assert '"tiny' in said
    assert '"error":{' not in said


@pytest.mark.parametrize("recipe", PYTHON, ids=range(len(PYTHON)))
def test_python(recipe: str, url: str) -> None:
    for package in re.findall(r"^(?:import|from) (\w+)", recipe, re.MULTILINE):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make clients")
    assert run([sys.executable, "-c"], recipe, url).strip()


def test_the_page_has_recipes() -> None:
    assert len(SHELL) >= 4
    assert len(PYTHON) >= 4
