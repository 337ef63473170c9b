"""Every family against its reference on tiny random weights: transformers, or an independent implementation."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests import agreement
from tests.agreement import Case, Reference

SHAPE = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
NINE_HEADS = {"hidden_size": 90, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def by_transformers(kind: str) -> Callable[[dict[str, Any], dict[str, Tensor]], Reference]:
    """A reference out of `transformers`: the config and model classes named after `kind`."""

    def make(raw: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
        config = getattr(transformers, f"{kind}Config")(**raw)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        missing, unknown = model.load_state_dict(tensors, strict=False)
        assert set(missing) <= tied
        assert not unknown

        @torch.no_grad()
        def logits(tokens: Sequence[int], prompt: int, loops: int) -> Tensor:
            assert loops == 1
            return model(torch.tensor([tokens])).logits[0]

        return logits

    return make


def llama(kind: str = "Llama", **changes: Any) -> Case:
    raw = {**SHAPE, "model_type": kind.lower(), **changes}
    return Case(raw, by_transformers(kind), (1,))


CASES: dict[str, Callable[[], Case]] = {
    "llama": llama,
    "llama 9/3 heads, tied": lambda: llama(**NINE_HEADS, tie_word_embeddings=True),
    "llama 3": lambda: llama(rope_parameters=LLAMA3),
    "qwen2": lambda: llama("Qwen2", vocab_size=261),
    "qwen3": lambda: llama("Qwen3"),
    "qwen3 9/3 heads, tied": lambda: llama("Qwen3", **NINE_HEADS, tie_word_embeddings=True),
}


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference(name: str) -> None:
    agreement.logits_agree(case_of(name))


@pytest.mark.parametrize("name", CASES)
def test_answers_equal_the_reference_however_the_prompt_is_cut(name: str) -> None:
    agreement.answers_agree(case_of(name))


@pytest.mark.parametrize("name", CASES)
def test_answers_packed_among_other_depths_equal_the_reference(name: str) -> None:
    agreement.packed_answers_agree(case_of(name))


@pytest.mark.parametrize("name", CASES)
def test_answers_from_a_prefix_equal_the_reference(name: str) -> None:
    case = case_of(name)
    if case.stack.config.whole_prompt:
        agreement.nothing_is_shared(case)
    else:
        agreement.answers_from_a_prefix_agree(case)
