"""IQuest-Coder Loop: a Llama stack run twice. In loop 2 each head weighs two views: all tokens as loop 1 left them, and
the most recent ones as loop 2 did."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyloop import kernels
from tinyloop.config import Layout, ModelConfig
from tinyloop.layers import At, Attend, Attention, Layer, PreNormLayer
from tinyloop.models.family import Facts, Family, Weights

LOOPS = 2  # the gate is trained for one further loop


class IQuestLoop(Family):
    model_types = ("iquestloopcoder",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        facts = Facts(raw)
        facts.refuse("loop_num", LOOPS)
        facts.refuse("use_sliding_window", None, False)
        facts.refuse("sliding_window", None)
        return ModelConfig(
            family="iquestloop",
            layout=Layout(0, facts.few("num_hidden_layers"), 0),
            default_loops=LOOPS,
            max_loops=LOOPS,
            trained_loops=LOOPS,
            loop_window=facts.count("loop_window_size", 64),
            **facts.decoder() | {"rotary": (facts.rotary(500000.0),)},
        )

    def layers(self, config: ModelConfig, weights: Weights) -> list[Layer]:
        return [_layer(config, weights, index) for index in range(config.layout.layers)]


@dataclass(frozen=True, kw_only=True)
class TwoViews(Attention):
    """`g * attention(q, first plane) + (1 - g) * attention(q, own plane, window)` with g = sigmoid(gate . q + bias) for
    each head; in loop 1 g is 1. `gate`: [heads, head_dim], `gate_bias`: [heads]."""

    gate: Tensor
    gate_bias: Tensor

    def __call__(self, x: Tensor, at: At, attend: Attend, added: Tensor | None = None) -> Tensor:
        if not at.loops.any():
            return self.out(attend(*self.heads(x), at.ropes[self.rope]), added)
        q, k, v = self.heads(x)
        rope = at.ropes[self.rope]
        near = attend(q, k, v, rope, window=self.window)  # first, since rows in loop 1 keep their keys with it
        far = attend(q, k, v, rope, first=True)
        near, far = (view.view_as(q) for view in (near, far))
        turned = kernels.rope(q, rope.cos, rope.sin)
        gate = torch.sigmoid((turned * self.gate).sum(-1) + self.gate_bias)
        gate = torch.where(at.loops[:, None] > 0, gate, 1)[:, :, None]
        return self.out((gate * far + (1 - gate) * near).flatten(1), added)


def _layer(config: ModelConfig, weights: Weights, index: int) -> PreNormLayer:
    prefix, gate = f"model.layers.{index}", f"model.gate_projections.{index}"
    plain = weights.attention(config, f"{prefix}.self_attn")
    attention = TwoViews(
        **vars(plain) | {"window": config.loop_window},
        gate=weights.tensor(f"{gate}.weight", config.num_heads, config.head_dim),
        gate_bias=weights.tensor(f"{gate}.bias", config.num_heads),
    )
    return PreNormLayer(
        weights.norm(f"{prefix}.input_layernorm", config),
        attention,
        weights.norm(f"{prefix}.post_attention_layernorm", config),
        weights.mlp(config, f"{prefix}.mlp"),
    )
