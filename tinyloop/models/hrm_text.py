"""HRM-Text (Sapient): a slow stack H over a fast stack L (hierarchical reasoning: Wang et al. 2025, arXiv 2506.21734).

One loop is one H cycle: the L stack runs `L_cycles` times on z_L + z_H, then the H stack once on z_H + z_L. Each of
these applications keeps keys and values of its own. With `prefix_lm` a prompt is read both ways.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tinyloop.config import Layout, ModelConfig
from tinyloop.layers import GatedAttention, Layer, PreNormLayer, RMSNorm
from tinyloop.models.family import BEYOND_TRAINED, Facts, Family, Renamed, Stored, Weights
from tinyloop.recurrence import Recurrence, Run

FUSED = {"gate_proj": 0, "q_proj": 1, "k_proj": 2, "v_proj": 3}  # the parts of a released gqkv_proj


class HrmText(Family):
    model_types = ("hrm_text",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        facts = Facts(raw)
        layers = facts.few("num_layers_per_stack", facts.few("num_hidden_layers"))
        trained, inner = facts.few("H_cycles", 2), facts.few("L_cycles", 3)
        decoder = Facts({"head_dim": 128, **raw}).decoder()
        facts.refuse("num_key_value_heads", None, decoder["num_heads"])
        scale = 1 / facts.positive("initializer_range", 0.02)
        given = raw.get("embedding_scale") is not None
        return ModelConfig(
            family="hrm_text",
            layout=Layout(0, (inner + 1) * layers, 0),
            carried=2,
            default_loops=trained,
            max_loops=BEYOND_TRAINED * trained,
            trained_loops=trained,
            embedding_scale=facts.positive("embedding_scale", scale) if given else scale,
            norm_each_loop=True,
            gated_attention=True,
            own_layers=2 * layers,
            bidirectional_prompt=facts.flag("prefix_lm", True),
            **decoder,
        )

    def layers(self, config: ModelConfig, weights: Weights) -> list[Layer]:
        each, of_a_loop = config.own_layers // 2, config.layout.core
        fast, slow = (
            [_layer(config, _as_stored(weights), f"model.{name}_module.layers.{i}") for i in range(each)]
            for name in "LH"
        )
        return [*(fast * (of_a_loop // each - 1)), *slow]

    def norm(self, config: ModelConfig, weights: Weights) -> RMSNorm:
        return weights.plain_norm(config.hidden_size, config.norm_eps)

    def recurrence(self, config: ModelConfig, weights: Weights, norm: RMSNorm) -> Recurrence:
        each = config.own_layers // 2
        start = weights.tensor("model.z_L_init", config.hidden_size)
        return TwoSpeeds(norm, start, each, config.layout.core // each - 1)


@dataclass(frozen=True)
class TwoSpeeds(Recurrence):
    """The state is z_H and z_L, side by side; a stack has `layers` layers and ends with the norm. `cycles` of L."""

    norm: RMSNorm
    start: Tensor
    layers: int
    cycles: int

    def enter(self, h: Tensor, positions: Tensor) -> Tensor:
        return torch.cat((h, self.start.expand_as(h)), dim=-1)

    def loop(self, state: Tensor, loops: Tensor, run: Run) -> Tensor:
        high, low = state.chunk(2, dim=-1)
        for cycle in range(self.cycles):
            low = self.norm(run(low + high, cycle * self.layers, (cycle + 1) * self.layers))
        high = self.norm(run(high + low, self.cycles * self.layers))
        return torch.cat((high, low), dim=-1)

    def leave(self, state: Tensor) -> Tensor:
        return state.chunk(2, dim=-1)[0].contiguous()


def _layer(config: ModelConfig, weights: Weights, prefix: str) -> PreNormLayer:
    norm, size = weights.plain_norm(config.hidden_size, config.norm_eps), config.num_heads * config.head_dim
    gate = weights.linear(config.hidden_size, {f"{prefix}.self_attn.gate_proj": size})
    attention = GatedAttention(**vars(weights.attention(config, f"{prefix}.self_attn")), gate=gate)
    return PreNormLayer(norm, attention, norm, weights.mlp(config, f"{prefix}.mlp"))


def _as_stored(weights: Weights) -> Weights:
    """Released files hold the projections of a layer in one tensor, those of its MLP in another."""
    if not weights.has("model.L_module.layers.0.attn.gqkv_proj.weight"):
        return weights
    return replace(weights, source=Renamed(weights.source, _released))


def _released(name: str) -> Stored:
    layer, part, projection, kind = name.rsplit(".", 3)
    if part == "self_attn":
        fused = projection in FUSED
        stored = f"{layer}.attn.{'gqkv_proj' if fused else projection}.{kind}"
        return Stored(stored, FUSED[projection], len(FUSED)) if fused else Stored(stored)
    if projection == "down_proj":
        return Stored(name)
    return Stored(f"{layer}.mlp.gate_up_proj.{kind}", int(projection == "up_proj"), 2)
