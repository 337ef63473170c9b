"""The public library: what `import tinyloop as tl` promises."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinyloop as tl
from tests.tiny import byte_tokenizer, write_checkpoint
from tests.tiny_models import GREEDY, RandomTensors, greedy_by_oracle, raw_config, tiny_model
from tinyloop.kernels import Linear
from tinyloop.model import check_vocabulary
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.stack import LoopedStack
from tinyloop.tokenizer import Tokenizer


def saved_checkpoint(directory: Path, model_type: str = "ouro", **changes: object) -> Path:
    raw, source = raw_config(model_type, **changes), RandomTensors()
    family = family_of(raw)
    LoopedStack(family, family.config(raw), Weights(source, torch.float32, torch.device("cpu")))
    return write_checkpoint(directory, raw, source.taken)


def test_the_public_names_are_chosen() -> None:
    assert tl.__all__ == [
        "CheckpointError", "ContextOverflow", "Generation", "Logprobs", "LoopPlan", "Model", "ModelConfig", "NeverFits",
        "PrefixPool", "RequestError", "Retrofit", "SamplingParams", "TinyLoopError", "Trace",
    ]  # fmt: skip
    for name in tl.__all__:
        assert getattr(tl, name).__module__.startswith("tinyloop.")
    assert set(tl.__all__) <= set(dir(tl))
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        tl.Engine  # noqa: B018


def test_importing_the_library_does_not_load_torch() -> None:
    code = "import sys, tinyloop; tinyloop.PrefixPool(), tinyloop.SamplingParams(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model_type", ["ouro", "llama"])
def test_a_loaded_directory_answers_like_the_weights_it_was_written_from(model_type: str, tmp_path: Path) -> None:
    loaded = tl.Model.load(saved_checkpoint(tmp_path / "my-model", model_type), dtype="float32", kv_memory=2**22)
    assert loaded.name == "my-model"
    answer = loaded.generate([1, 2, 3], max_new_tokens=6, sampling=GREEDY)
    built = tiny_model(model_type)
    assert list(answer.token_ids) == greedy_by_oracle(built, [1, 2, 3], 6, built.config.default_loops)


def test_a_checkpoint_with_tensors_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    raw, source = raw_config("llama"), RandomTensors()
    family = family_of(raw)
    LoopedStack(family, family.config(raw), Weights(source, torch.float32, torch.device("cpu")))
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}
    write_checkpoint(tmp_path / "odd", raw, source.taken | extra)
    with pytest.raises(tl.CheckpointError, match=r"model\.layers\.0\.self_attn\.q_norm\.weight"):
        tl.Model.load(tmp_path / "odd")


def test_text_goes_in_and_text_comes_out(tmp_path: Path) -> None:
    model = tiny_model("ouro")
    answer = model.generate("héllo", max_new_tokens=20, sampling=GREEDY)
    assert answer.prompt_tokens == len("héllo".encode())
    assert answer.text == model.tokenizer.decode(answer.token_ids)
    streamed = list(model.stream("héllo", max_new_tokens=20, sampling=GREEDY))
    assert "".join(event.text for event in streamed) == answer.text
    assert streamed[-1].finish_reason == "length"
    assert [event.finish_reason for event in streamed[:-1]] == [None] * 19


def test_a_stop_string_ends_the_answer_before_it() -> None:
    model = tiny_model("ouro")
    whole = model.generate([1, 2], max_new_tokens=30, sampling=GREEDY).text
    stop = whole[6:9]
    cut = model.generate(
        [1, 2], max_new_tokens=30, sampling=tl.SamplingParams(temperature=0, ignore_eos=True, stop=stop)
    )
    assert cut.text == whole[: whole.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_a_stop_token_ends_the_answer_and_is_not_in_the_text() -> None:
    model = tiny_model("ouro")
    tokens = model.generate([1, 2], max_new_tokens=9, sampling=GREEDY).token_ids
    sampling = tl.SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(tokens[4],))
    cut = model.generate([1, 2], max_new_tokens=9, sampling=sampling)
    first = tokens.index(tokens[4])
    assert cut.token_ids == tokens[: first + 1]
    assert cut.text == model.tokenizer.decode(tokens[:first])
    assert (cut.finish_reason, cut.stop_reason) == ("stop", tokens[4])


def test_logprobs_come_with_every_token() -> None:
    model = tiny_model("ouro")
    sampling = tl.SamplingParams(temperature=0, ignore_eos=True, logprobs=2)
    answer = model.generate([1, 2], max_new_tokens=3, sampling=sampling)
    expected = model.oracle([1, 2, *answer.token_ids]).log_softmax(-1)
    for i, (token, got) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        assert got.chosen == pytest.approx(float(expected[1 + i, token]), abs=1e-4)
        assert got.top[0][0] == token
        assert len(got.top) == 2


def test_dtypes_and_devices_that_do_not_exist_name_the_field(tmp_path: Path) -> None:
    path = saved_checkpoint(tmp_path / "m")
    with pytest.raises(tl.RequestError, match="dtype must be auto or one of"):
        tl.Model.load(path, dtype="int3")
    with pytest.raises(tl.RequestError, match="device must be auto or cpu"):
        tl.Model.load(path, device="tpu")


@pytest.mark.parametrize("prompt", [None, 5, ["a"], [1.5], [True], b"ab", [None], [], "", [-1], [259]])
def test_a_prompt_that_is_no_text_and_no_ids_is_refused_everywhere(prompt: Any) -> None:
    model = tiny_model("ouro")
    runs = (model.generate, model.stream, model.score, model.oracle, lambda given: model.generate_batch([[1], given]),
            lambda given: model.register_prefix(tl.PrefixPool(), given))  # fmt: skip
    for run in runs:
        with pytest.raises(tl.RequestError) as caught:
            run(prompt)
        assert caught.value.field == "prompt"


def test_ids_of_numpy_and_torch_are_ids() -> None:
    model = tiny_model("ouro")
    assert model.encode(np.array([1, 2])) == model.encode(torch.tensor([1, 2])) == model.encode((1, 2)) == [1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", ["abc", b"abc", None, 5])
def test_a_batch_is_a_list_of_prompts(prompts: Any) -> None:
    with pytest.raises(tl.RequestError) as caught:
        tiny_model("ouro").generate_batch(prompts)
    assert caught.value.field == "prompts"


def test_a_batch_with_one_wrong_prompt_does_not_start() -> None:
    model = tiny_model("ouro")
    model.runner.step = lambda segments: pytest.fail("a step was run")  # type: ignore[method-assign]
    for prompts, options in (([[1], [999]], {}), ([[1], [1] * 300], {}), ([[1], [2]], {"loops": [1, 99]})):
        with pytest.raises(tl.RequestError):
            model.generate_batch(prompts, **options)
    assert not model.runner.leases


@pytest.mark.parametrize("loops", ["2", 2.0, True, 0, 10**4000, [1, 2, 3]])
def test_depths_that_are_none_name_their_field(loops: Any) -> None:
    model = tiny_model("ouro")
    for run in (model.generate, model.oracle):
        with pytest.raises(tl.RequestError) as caught:
            run([1, 2], loops=loops)
        assert caught.value.field == "loops"
    with pytest.raises(tl.RequestError, match="loops"):
        model.generate_batch([[1], [2]], loops=loops)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 10**4000), ("max_new_tokens", True), ("max_new_tokens", -1), ("sampling", {"temperature": 0})],
)
def test_other_arguments_of_another_type_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(tl.RequestError) as caught:
        tiny_model("ouro").generate([1], **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("kv_memory", [0, -1, 1.5, "1g", True, 1 << 60])
def test_memory_that_no_machine_has_names_the_field(kv_memory: Any, tmp_path: Path) -> None:
    with pytest.raises(tl.RequestError) as caught:
        tl.Model.load(saved_checkpoint(tmp_path / "m"), kv_memory=kv_memory)
    assert caught.value.field == "kv_memory"
    like = tiny_model("ouro")
    with pytest.raises(tl.RequestError, match="kv_memory"):
        tl.Model("tiny", like.stack, like.tokenizer, kv_memory=kv_memory)


@pytest.mark.parametrize("token", [259, -1, 10**4000])
def test_an_end_token_outside_of_the_vocabulary_is_refused_at_load(token: int) -> None:
    model = tiny_model("ouro")
    tokenizer = Tokenizer(byte_tokenizer(), eos_ids=[token])
    with pytest.raises(tl.CheckpointError, match=r"eos_token_id .* is outside of vocab_size 259"):
        check_vocabulary(tokenizer, model.config)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused_at_load(tmp_path: Path) -> None:
    path = saved_checkpoint(tmp_path / "m")
    larger = byte_tokenizer()
    larger.add_special_tokens(["<|one_more|>"])
    larger.save(str(path / "tokenizer.json"))
    with pytest.raises(tl.CheckpointError, match="the tokenizer has 260 tokens, vocab_size is 259"):
        tl.Model.load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_reordered_weights_multiply_like_plain_ones(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, 80, generator=generator), torch.randn(rows, 80, generator=generator)
    expected = x.to(dtype).float() @ weight.to(dtype).float().T
    got = Linear(weight.to(dtype))(x.to(dtype))
    tolerance = 1e-4 if dtype == torch.float32 else 0.02 * float(expected.abs().max())
    assert torch.allclose(got.float(), expected, atol=tolerance)
