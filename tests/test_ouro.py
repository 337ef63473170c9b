"""Ouro against an independent implementation of its description."""

import pytest
import torch

from tests import ouro_reference
from tests.tiny_models import RandomTensors, greedy_by_oracle, raw_config, tiny_model
from tinyloop import oracle
from tinyloop.errors import CheckpointError
from tinyloop.models.family import Weights
from tinyloop.models.registry import family_of
from tinyloop.stack import LoopedStack

TOKENS = [11, 200, 7, 7, 93, 250, 0, 31]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6},
        {"rope_theta": 1e6, "vocab_size": 301},
    ],
)
@pytest.mark.parametrize("loops", [1, 2, 4, 5])
def test_logits_equal_a_straightforward_implementation(changes: dict[str, int], loops: int) -> None:
    raw, source = raw_config("ouro", **changes), RandomTensors()
    family = family_of(raw)
    stack = LoopedStack(family, family.config(raw), Weights(source, torch.float32, torch.device("cpu")))
    expected, _ = ouro_reference.forward(source.taken, raw, TOKENS, loops)
    assert torch.allclose(oracle.logits(stack, TOKENS, loops), expected, atol=1e-4)


def test_the_exit_gate_is_read_from_the_normed_state() -> None:
    raw, source = raw_config("ouro"), RandomTensors()
    family = family_of(raw)
    stack = LoopedStack(family, family.config(raw), Weights(source, torch.float32, torch.device("cpu")))
    _, gates = ouro_reference.forward(source.taken, raw, TOKENS, 1)
    positions = torch.arange(len(TOKENS))
    attend = oracle.WholeAttention(positions, 0)
    h = stack.core(stack.embed(torch.tensor(TOKENS)), positions, torch.zeros_like(positions), attend)
    assert torch.allclose(stack.exit_probability(h), gates[0], atol=1e-5)


def test_the_dial_goes_to_twice_the_trained_depth() -> None:
    model = tiny_model("ouro", total_ut_steps=3)
    assert (model.config.default_loops, model.config.trained_loops, model.config.max_loops) == (3, 3, 6)
    assert len(greedy_by_oracle(model, [1], 2, 6)) == 2


def test_flags_that_change_the_computation_are_refused_by_name() -> None:
    for flag in ({"use_sliding_window": True}, {"attention_bias": True}, {"hidden_act": "gelu"}):
        with pytest.raises(CheckpointError, match=next(iter(flag))):
            tiny_model("ouro", **flag)
    with pytest.raises(CheckpointError, match="rope type 'yarn'"):
        tiny_model("ouro", rope_scaling={"rope_type": "yarn"})
    with pytest.raises(CheckpointError, match="unknown architecture: model_type 'mamba'"):
        tiny_model("mamba")
