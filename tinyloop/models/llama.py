"""Llama-style decoders: Llama, SmolLM2, Qwen2, Qwen3. One loop is the ordinary model; a declared retrofit makes its
middle layers loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tinyloop.config import Layout, ModelConfig, Retrofit
from tinyloop.errors import CheckpointError
from tinyloop.layers import PreNormLayer, RMSNorm
from tinyloop.models.family import Facts, Family, Weights
from tinyloop.recurrence import Recurrence, Run


class Llama(Family):
    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    ours = ("retrofit",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        facts = Facts(raw)
        layers = facts.integer("num_hidden_layers")
        decoder = {"family": self.model_types[0], **facts.decoder()}
        retrofit = _retrofit(raw)
        if retrofit is None:
            return ModelConfig(layout=Layout(0, layers, 0), **decoder)
        coda = layers - retrofit.prelude - retrofit.core
        return ModelConfig(
            layout=Layout(retrofit.prelude, retrofit.core, coda),
            default_loops=retrofit.default_loops,
            max_loops=retrofit.max_loops,
            loop_decay=retrofit.decay,
            **decoder,
        )

    def recurrence(self, config: ModelConfig, weights: Weights, norm: RMSNorm) -> Recurrence:
        return Recurrence() if config.loop_decay is None else DampedRecurrence(config.loop_decay)


class Qwen2(Llama):
    """Llama with a bias on queries, keys and values."""

    model_types = ("qwen2",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        _refuse_windows(raw)
        return super().config(raw)

    def layer(self, config: ModelConfig, weights: Weights, prefix: str) -> PreNormLayer:
        return PreNormLayer(
            weights.norm(f"{prefix}.input_layernorm", config),
            weights.attention(config, f"{prefix}.self_attn", bias=self._bias(config, weights, f"{prefix}.self_attn")),
            weights.norm(f"{prefix}.post_attention_layernorm", config),
            weights.mlp(config, f"{prefix}.mlp"),
        )

    def _bias(self, config: ModelConfig, weights: Weights, prefix: str) -> Tensor:
        sizes = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        return torch.cat(
            [weights.tensor(f"{prefix}.{part}_proj.bias", heads * config.head_dim) for part, heads in sizes.items()]
        )


class Qwen3(Llama):
    """Llama with a norm over each head of queries and keys."""

    model_types = ("qwen3",)

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        _refuse_windows(raw)
        return super().config({"head_dim": 128, **raw})

    def layer(self, config: ModelConfig, weights: Weights, prefix: str) -> PreNormLayer:
        q_norm, k_norm = (weights.norm(f"{prefix}.self_attn.{q}_norm", config, config.head_dim) for q in "qk")
        return PreNormLayer(
            weights.norm(f"{prefix}.input_layernorm", config),
            weights.attention(config, f"{prefix}.self_attn", q_norm=q_norm, k_norm=k_norm),
            weights.norm(f"{prefix}.post_attention_layernorm", config),
            weights.mlp(config, f"{prefix}.mlp"),
        )


@dataclass(frozen=True)
class DampedRecurrence(Recurrence):
    """`h <- h + decay**-r * (core(h) - h)`; at loop 0 the step is 1, and lerp returns `core(h)` to the bit."""

    decay: float

    def loop(self, state: Tensor, loops: Tensor, run: Run) -> Tensor:
        step = torch.pow(self.decay, -loops.float()).to(state.dtype)
        return torch.lerp(state, run(state), step[:, None])


def _refuse_windows(raw: Mapping[str, Any]) -> None:
    facts = Facts(raw)
    facts.refuse("use_sliding_window", False)
    facts.full_attention()


def _retrofit(raw: Mapping[str, Any]) -> Retrofit | None:
    ours = Facts(raw).section("tinyloop")
    if ours.raw.get("retrofit") is None:
        return None
    try:
        return Retrofit(**ours.section("retrofit").raw)
    except TypeError as error:
        raise CheckpointError(f"config.json: tinyloop.retrofit: {error}") from None
