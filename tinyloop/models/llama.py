"""Llama-style decoders. One loop is the ordinary model; a declared retrofit makes its middle layers loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tinyloop.config import Layout, ModelConfig, Retrofit
from tinyloop.errors import CheckpointError
from tinyloop.layers import PreNormLayer
from tinyloop.models.family import Facts, Family, Weights
from tinyloop.stack import LoopedStack


class Llama(Family):
    model_types = ("llama",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        facts = Facts(raw)
        layers = facts.integer("num_hidden_layers")
        retrofit = _retrofit(raw)
        if retrofit is None:
            return ModelConfig(family="llama", layout=Layout(0, layers, 0), **facts.decoder())
        coda = layers - retrofit.prelude - retrofit.core
        return ModelConfig(
            family="llama",
            layout=Layout(retrofit.prelude, retrofit.core, coda),
            default_loops=retrofit.default_loops,
            max_loops=retrofit.max_loops,
            loop_decay=retrofit.decay,
            **facts.decoder(),
        )

    def layer(self, config: ModelConfig, weights: Weights, prefix: str) -> PreNormLayer:
        return PreNormLayer(
            weights.norm(f"{prefix}.input_layernorm", config),
            weights.attention(config, f"{prefix}.self_attn"),
            weights.norm(f"{prefix}.post_attention_layernorm", config),
            weights.mlp(config, f"{prefix}.mlp"),
        )

    def after_loop(self, stack: LoopedStack, before: Tensor, after: Tensor, loops: Tensor) -> Tensor:
        decay = stack.config.loop_decay
        if decay is None:
            return after
        step = torch.pow(decay, -loops.float()).to(before.dtype)
        return torch.lerp(before, after, step[:, None])  # at loop 0 the step is 1, and lerp returns `after` to the bit


def _retrofit(raw: Mapping[str, Any]) -> Retrofit | None:
    ours = Facts(raw).section("tinyloop")
    if ours.raw.get("retrofit") is None:
        return None
    try:
        return Retrofit(**ours.section("retrofit").raw)
    except TypeError as error:
        raise CheckpointError(f"config.json: tinyloop.retrofit: {error}") from None
