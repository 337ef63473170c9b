"""`tinyloop inspect`: what is said before a model is loaded holds once it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from server.cli import cli
from tests.test_families import CASES, case_of
from tests.test_family_configs import PUBLISHED
from tests.test_model import saved_checkpoint
from tests.tiny_models import RETROFIT, RandomTensors, raw_config, tiny_model
from tinyloop.checkpoint import hub, open_checkpoint, read_config
from tinyloop.config import ModelConfig
from tinyloop.errors import CheckpointError
from tinyloop.inspection import inspect, prefix_rule, stack_bytes
from tinyloop.kernels import Int8Linear, Linear, native
from tinyloop.model import Model
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.plan import make_plan
from tinyloop.stack import LoopedStack

ALIGNED = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32, "vocab_size": 512}  # as large models are
MIB = 1 << 20


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["inspect", *arguments])
    assert result.exit_code == 0, result.output
    return str(result.output)


def loaded(raw: dict[str, Any], dtype: torch.dtype, int8: bool) -> Model:
    family = family_of(raw)
    weights = Weights(RandomTensors(), dtype, torch.device("cpu"), int8)
    stack = LoopedStack(family, family.config(raw), weights)
    return Model("x", stack, tiny_model("ouro").tokenizer, kv_memory=MIB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "ouro", "nanbeige", "iquestloopcoder"])
def test_memory_is_what_a_loaded_model_takes(dtype: torch.dtype, int8: bool, tied: bool, model_type: str) -> None:
    more = {"num_loops": 2, "loop_num": 2}
    raw = raw_config(model_type, **ALIGNED, **more, tie_word_embeddings=tied)
    found = inspect(raw, dtype, int8=int8, kv_memory=MIB)
    model = loaded(raw, dtype, int8)
    assert stack_bytes(model.stack) == found.weight_bytes
    kv = model.runner.kv
    assert found.kv_pool_bytes == kv.k.nbytes + kv.v.nbytes + kv.states.nbytes
    assert found.memory == found.weight_bytes + found.kv_pool_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_counted_to_the_byte_for_every_family(name: str, dtype: torch.dtype, int8: bool) -> None:
    """Sizes here are odd, so matrices are kept with zeros at their ends where kernels want whole blocks."""
    case = case_of(name)
    family = family_of(case.raw)
    weights = Weights(RandomTensors(has=case.has), dtype, torch.device("cpu"), int8)
    stack = LoopedStack(family, family.config(case.raw), weights)
    assert inspect(case.raw, dtype, int8=int8).weight_bytes == stack_bytes(stack)


@pytest.mark.skipif(native.library() is None, reason="torch tells nothing of what it reorders")
@pytest.mark.parametrize("size", [(1, 48), (33, 31), (259, 90), (64, 64)])
def test_what_a_matrix_is_packed_to_is_counted(size: tuple[int, int]) -> None:
    """In blocks of 32 outputs, and of 32 inputs in bfloat16, of 64 in int8."""
    rows, columns = (-(-side // 32) * 32 for side in size)
    plain, int8 = (kind(torch.zeros(size, dtype=torch.bfloat16)) for kind in (Linear, Int8Linear))
    assert plain.weight.nbytes == 2 * rows * columns
    assert int8.weight.nbytes == rows * -(-size[1] // native.GROUP) * native.GROUP
    for kind, kept in ((Linear, plain), (Int8Linear, int8)):
        counted = kind(torch.zeros(size, dtype=torch.bfloat16, device="meta"))
        assert counted.weight.nbytes == kept.weight.nbytes


@pytest.mark.parametrize("name", ["ouro", "dory", "dory last_loop", "huginn", "hrm_text"])
def test_kv_bytes_are_those_of_the_pages_that_a_token_takes(name: str) -> None:
    case = case_of(name)
    found, runner = inspect(case.raw, torch.float32), case.model(page_size=1).runner
    for loops in case.depths:
        pages = runner.pages_needed(make_plan(runner.config, loops=loops), 1)
        assert found.kv_bytes(loops) == pages * runner.stats()["page_bytes"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_inspected_without_memory(name: str) -> None:
    """The largest has 40 billion weights."""
    found = inspect(PUBLISHED[name].raw, torch.bfloat16)
    assert found.weight_bytes / 2e9 >= 0.99 * PUBLISHED[name].billions
    assert inspect(PUBLISHED[name].raw, torch.bfloat16, int8=True).weight_bytes < found.weight_bytes


def test_ouro_takes_768_kib_per_token_and_its_states() -> None:
    found = inspect(PUBLISHED["Ouro-1.4B"].raw, torch.bfloat16)
    assert found.kv_bytes(4) == 1024 * (768 + 4 * 4)


def config_of(raw: dict[str, Any]) -> ModelConfig:
    return family_of(raw).config(raw)


def test_the_prefix_rule_is_said_in_words() -> None:
    assert prefix_rule(config_of(raw_config("ouro"))).startswith("one held to R loops serves")
    assert "coda" not in prefix_rule(config_of(raw_config("ouro")))
    assert prefix_rule(config_of(raw_config("llama", tinyloop=RETROFIT))).endswith("the coda is rebuilt for each depth")
    assert prefix_rule(config_of(raw_config("llama"))) == "serves every request"
    assert "share one plane" in prefix_rule(case_of("dory last_loop").stack.config)
    assert "look ahead" in prefix_rule(case_of("hrm_text prefix_lm").stack.config)
    own = ModelConfig(**vars(config_of(raw_config("ouro"))) | {"loop_reads_total": True})
    assert prefix_rule(own) == "serves requests of its own loops only"


def test_the_command_says_what_matters_of_a_folder_and_reads_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Ouro-1.4B"].raw))
    lines = run(str(tmp_path), "--dtype", "bfloat16", "--kv-memory", "1GiB").splitlines()
    told = {line[:12].strip(): line[12:] for line in lines}
    assert told["family"] == "ouro"
    assert told["layers"] == "0 prelude, 24 core, 0 coda"
    assert told["loops"] == "1 to 8, default 4, trained 4, exit by gate or distance"
    assert [line for line in lines if line.startswith("KV ")][2] == "KV          784.0 KiB per token at 4"
    assert told["weights"] in ("2,736 MiB in bfloat16", "2,737 MiB in bfloat16")  # the gate is packed with zeros
    assert told["KV budget"] == "1,023 MiB"  # whole pages of 3.06 MiB
    assert told["memory"].startswith("3,759 MiB")
    assert told["prefix"].startswith("one held to R loops")


def test_a_checkpoint_that_holds_its_config_inside_is_opened(smollm2_path: Path) -> None:
    lines = run(str(smollm2_path))
    assert "1 to 1, default 1, no early exit" in lines
    assert "1 to 8, default 2, trained 1, exit by distance" in run("smollm2")


def test_of_a_hub_name_only_the_config_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, asked = saved_checkpoint(tmp_path / "x"), {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **more: asked.update(more) or directory)
    assert read_config("owner/model") == open_checkpoint(directory).config
    assert asked["allow_patterns"] == ["config.json"]
    hub.download("owner/model")
    assert "*.safetensors" in asked["allow_patterns"]


def test_what_cannot_be_loaded_cannot_be_inspected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "inkling2_loop"}')
    result = CliRunner().invoke(cli, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, CheckpointError)
    assert "inkling2_loop is not supported" in str(result.exception)
