"""Llama-style models against transformers: tiny random weights, and the real default model."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.tiny import write_checkpoint
from tests.tiny_models import GREEDY
from tinyloop.model import Model
from tinyloop.sampling import SamplingParams

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "1, 2, 3, 4,",
    "Dear Sir or Madam,", "The quick brown fox", "In 1969,", "To make bread, you need", "Q: What is 2 + 2?\nA:",
    "import numpy as np\n", "She opened the door and", "The largest planet is", "Breaking news:", "E = mc",
    "<html>\n<head>", "Roses are red,", "Il était une fois", "SELECT name FROM", "The meaning of life is",
]  # fmt: skip


@pytest.mark.parametrize("changes", [
    {}, {"tie_word_embeddings": True}, {"hidden_size": 90, "num_attention_heads": 9, "num_key_value_heads": 3},
    {"vocab_size": 261, "rope_theta": 5e5, "num_hidden_layers": 1},
])  # fmt: skip
def test_logits_equal_transformers_on_random_weights(changes: dict[str, object], tmp_path: Path) -> None:
    shape = {"vocab_size": 259, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
    config = transformers.LlamaConfig(**shape | changes)
    reference = transformers.LlamaForCausalLM(config).eval()
    tensors = {
        k: v for k, v in reference.state_dict().items() if k != "lm_head.weight" or not config.tie_word_embeddings
    }
    model = Model.load(write_checkpoint(tmp_path / "tiny", config.to_dict(), tensors), dtype="float32")
    tokens = [3, 141, 59, 26, 53, 58, 97, 93, 238]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert torch.allclose(model.oracle(tokens), expected, atol=1e-4)
    answer = model.generate(tokens, max_new_tokens=32, sampling=GREEDY).token_ids
    assert answer == _greedy(reference, tokens, answer)


def _greedy(reference: torch.nn.Module, prompt: list[int], answer: tuple[int, ...]) -> tuple[int, ...]:
    """What the reference would say at each position of the answer, given the answer so far.

    Equal to the answer exactly when greedy generation gives the answer.
    """
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *answer]])).logits[0]
    return tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist())


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Model:
    return Model.load("smollm2", dtype="float32")


def test_greedy_tokens_of_smollm2_equal_transformers(smollm2: Model, smollm2_path: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    answers = smollm2.generate_batch(PROMPTS, max_new_tokens=64, loops=1, sampling=GREEDY)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.token_ids == _greedy(reference, smollm2.encode(prompt), answer.token_ids), prompt


@pytest.mark.parametrize("loops", [1, 2, 4])
def test_the_default_model_knows_the_capital_of_france(smollm2: Model, loops: int) -> None:
    question = "What is the capital of France? Answer briefly."
    prompt = smollm2.chat([{"role": "user", "content": question}])
    answer = smollm2.generate(prompt, max_new_tokens=32, loops=loops, sampling=SamplingParams(temperature=0))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert set(answer.loops) == {loops}


def test_the_default_model_declares_its_dial(smollm2: Model) -> None:
    config = smollm2.config
    assert (config.layout.prelude, config.layout.core, config.layout.coda) == (8, 4, 18)
    assert (config.default_loops, config.max_loops, config.trained_loops) == (2, 8, 1)


def test_a_damped_loop_stays_within_two_percent_of_the_original_loss(smollm2: Model) -> None:
    prose = (
        "A cache keeps the results of earlier work so that the same question need not be answered twice. It helps only "
        "when questions repeat, and it must be emptied when the answers change. Choosing what to keep is hard: the "
        "simplest rule throws away whatever has not been used for the longest time."
    )
    one, two, eight = (sum(smollm2.score(prose, loops=loops)) for loops in (1, 2, 8))
    assert two == pytest.approx(one, rel=0.02)
    assert eight == pytest.approx(one, rel=0.02)
    assert len({one, two, eight}) == 3
