"""LangChain, LiteLLM, instructor, llm, lm-eval and OpenAI's npm package get what they ask from a running server."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.support import LONGEST_S, PROGRAMS, answer, program, python_client, served_model
from tinyloop.model import Model

QUESTIONS: list[Any] = [
    {"question": "The sky is", "choices": ["blue", "a green door"], "gold": 0},
    {"question": "Two and two are", "choices": ["three", "four", "4"], "gold": 1},
    {"question": "Ünïcode 🙂", "choices": ["é", "x"], "gold": 0},
]
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: gold
target_delimiter: " "
metric_list:
  - metric: acc
"""
EXTRA_MODELS = """
- model_id: looped
  model_name: tiny
  api_base: {url}
  can_stream: true
  supports_schema: true
  supports_tools: true
"""


def check_chat(facts: dict[str, Any]) -> None:
    """What every client offers: streamed is as whole, counted, and forms are kept."""
    assert facts["whole"]
    assert facts["streamed"] == facts["whole"]
    assert facts["tokens"] == [12, 12]
    check_typed(facts["typed"])
    ((name, arguments),) = facts["calls"]
    assert name == "weather"
    assert arguments["city"] in ("Oslo", "Rome")


def check_typed(typed: dict[str, Any]) -> None:
    assert typed["sky"] in ("clear", "rain")
    assert typed["windy"] in (True, False)


def test_langchain(url: str) -> None:
    facts = python_client("langchain_openai", url)
    check_chat(facts)
    check_typed(facts["typed_by_a_tool"])
    whole, streamed = facts["responses"]
    assert whole == streamed != ""


def test_litellm(url: str) -> None:
    facts = python_client("litellm", url)
    check_chat(facts)
    assert (facts["loops"], facts["plain"]) == (3, 5)


def test_instructor(url: str) -> None:
    for answers in python_client("instructor", url).values():
        for typed in answers:
            check_typed(typed)


def test_llm_with_a_model_of_its_configuration(url: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(EXTRA_MODELS.format(url=url))
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "rain"]}, "windy": {"type": "boolean"}},
        "required": ["sky", "windy"],
        "additionalProperties": False,
    }

    def llm(*arguments: str) -> str:
        done = subprocess.run(
            [program("llm"), "-m", "looped", "--key", "none", "-o", "seed", "7", *arguments, "Weather in Oslo?"],
            env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    streamed = llm("-o", "max_tokens", "12")
    assert streamed.strip()
    assert llm("-o", "max_tokens", "12", "--no-stream") == streamed
    check_typed(json.loads(llm("--schema", json.dumps(schema))))


def test_lm_eval_finds_the_log_likelihoods_of_model_score(url: str, tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    (tmp_path / "local_choices.yaml").write_text(TASK.format(data=data))
    found = python_client("lm_eval", url, str(tmp_path), HF_HOME=str(tmp_path / "cache"))
    model = served_model()
    for question, likelihoods in zip(QUESTIONS, found, strict=True):
        expected = [likelihood(model, question["question"], f" {choice}") for choice in question["choices"]]
        torch.testing.assert_close(torch.tensor(likelihoods), torch.tensor(expected), rtol=0, atol=1e-4)


def likelihood(model: Model, context: str, text: str) -> float:
    return sum(model.score(context + text)[-len(model.encode(text)) :])


@pytest.fixture(scope="session")
def node_packages() -> Path:
    """A folder of the user's cache with the npm package in it, fetched once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tinyloop" / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    command = [program("npm"), "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--prefer-offline"]
    try:
        done = subprocess.run([*command, "openai@6"], capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not fetch the package within {LONGEST_S} s")
    if done.returncode:
        pytest.skip(f"npm could not fetch the package: {done.stderr[-300:]}")
    return folder


def test_the_npm_package_of_openai(url: str, node_packages: Path) -> None:
    script = node_packages / "openai_client.mjs"  # imports are looked for beside the script
    script.write_text((PROGRAMS / script.name).read_text())
    facts = answer([program("node"), str(script), url])
    check_chat(facts)
    assert (facts["models"], facts["loops"], facts["plain"], facts["refused"]) == (["tiny"], 3, 5, "loops")
    whole, streamed = facts["responses"]
    assert whole == streamed != ""
