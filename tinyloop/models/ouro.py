"""Ouro (Zhu et al. 2025, arXiv 2510.25741): the whole stack loops, and the final norm runs after every loop."""

from collections.abc import Mapping
from typing import Any

from tinyloop.config import Layout, ModelConfig
from tinyloop.kernels import Linear
from tinyloop.layers import SandwichLayer
from tinyloop.models.family import BEYOND_TRAINED, Facts, Family, Weights


class Ouro(Family):
    model_types = ("ouro",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        facts = Facts(raw)
        facts.refuse("use_sliding_window", False)
        facts.full_attention()
        trained = facts.few("total_ut_steps", 4)
        return ModelConfig(
            family="ouro",
            layout=Layout(0, facts.integer("num_hidden_layers"), 0),
            default_loops=trained,
            max_loops=BEYOND_TRAINED * trained,
            trained_loops=trained,
            exit_gate=True,
            norm_each_loop=True,
            **facts.decoder(),
        )

    def layer(self, config: ModelConfig, weights: Weights, prefix: str) -> SandwichLayer:
        return SandwichLayer(
            weights.norm(f"{prefix}.input_layernorm", config),
            weights.attention(config, f"{prefix}.self_attn"),
            weights.norm(f"{prefix}.input_layernorm_2", config),
            weights.norm(f"{prefix}.post_attention_layernorm", config),
            weights.mlp(config, f"{prefix}.mlp"),
            weights.norm(f"{prefix}.post_attention_layernorm_2", config),
        )

    def exit_gate(self, config: ModelConfig, weights: Weights) -> Linear:
        gate = "model.early_exit_gate"
        return Linear(weights.tensor(f"{gate}.weight", 1, config.hidden_size), weights.tensor(f"{gate}.bias", 1))
