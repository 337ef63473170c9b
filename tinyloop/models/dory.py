"""Dory (Nemotron-Labs Dory 1.0): a looped normalised transformer (nGPT: Loshchilov et al. 2024, arXiv 2410.01131).

Every loop starts from the state it got plus the prelude's output. With `recurrent_kv_cache_mode` `last_loop` all loops
share one plane, and a loop reads there what the last loop left of the tokens before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyloop.arguments import shown
from tinyloop.config import Layout, ModelConfig, Rotary
from tinyloop.errors import CheckpointError
from tinyloop.layers import Layer, RMSNorm
from tinyloop.models.family import Facts, Family, Renamed, Stored, Weights
from tinyloop.models.ngpt import UnitAttention, UnitLayer, UnitMLP, unit_norm
from tinyloop.recurrence import Recurrence, Run

KINDS = {"sliding_attention": 1e4, "full_attention": 1e7}  # of layers, with the rotary base that each has by default
MOST_LOOPS = 8  # trained at 2; more loops trade compute for accuracy


@dataclass(frozen=True, kw_only=True)
class DoryConfig(ModelConfig):
    """`windows`: what each layer sees, 0 for all. Learned scales are stored relative to `initializer_range`."""

    windows: tuple[int, ...]
    initializer_range: float
    alpha: float


class Dory(Family):
    model_types = ("dory",)

    def config(self, raw: Mapping[str, Any]) -> DoryConfig:
        facts = Facts(raw)
        listed = _listed(raw)
        blocks = 2 if "mlp" in listed else 1  # released: attention and MLP count apart
        layers = facts.few("num_hidden_layers", 36) // blocks
        prelude, coda = (facts.few(f"n_{end}_layers", 8, 0) // blocks for end in ("input", "output"))
        core = facts.few("n_recurrent_layers", blocks * (layers - prelude - coda)) // blocks
        if prelude + core + coda != layers:
            raise CheckpointError(f"config.json: num_hidden_layers {layers} is not {prelude} + {core} + {coda} layers")
        facts.refuse("recurrent_kv_cache_mode", "per_loop", "last_loop")
        window, trained = facts.count("sliding_window", 1024), facts.few("n_recurrent_loops", 2)
        kinds = _kinds(listed[::blocks], layers)
        decoder = facts.decoder() | {"rotary": tuple(_rotary(facts, kind) for kind in KINDS)}
        return DoryConfig(
            family="dory",
            layout=Layout(prelude, core, coda, one_plane=raw.get("recurrent_kv_cache_mode") == "last_loop"),
            carried=2,
            default_loops=trained,
            max_loops=max(MOST_LOOPS, trained),
            trained_loops=trained,
            gated_attention=True,
            windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
            initializer_range=facts.positive("initializer_range", 0.0177),
            alpha=facts.positive("ngpt_alpha_init", 0.05),
            **decoder,
        )

    def embedding(self, config: ModelConfig, weights: Weights) -> Tensor:
        return super().embedding(config, _as_stored(weights))

    def layers(self, config: ModelConfig, weights: Weights) -> list[Layer]:
        assert isinstance(config, DoryConfig)
        stored = _as_stored(weights)
        return [_layer(config, stored, f"model.layers.{i}", window) for i, window in enumerate(config.windows)]

    def norm(self, config: ModelConfig, weights: Weights) -> RMSNorm:
        return unit_norm(weights, config.hidden_size)

    def head(self, config: ModelConfig, weights: Weights, embedding: Tensor) -> Callable[[Tensor], Tensor]:
        assert isinstance(config, DoryConfig)
        scale = weights.tensor("lm_head.logit_scale", config.vocab_size).float() / config.initializer_range
        return partial(_scaled, super().head(config, weights, embedding), scale)

    def recurrence(self, config: ModelConfig, weights: Weights, norm: RMSNorm) -> Recurrence:
        return RestartedRecurrence(norm)


@dataclass(frozen=True)
class RestartedRecurrence(Recurrence):
    """`h <- core(norm(h) + e)`, where e is the normed output of the prelude. The state is h and e, side by side."""

    norm: RMSNorm

    def enter(self, h: Tensor, positions: Tensor) -> Tensor:
        return torch.cat((h, self.norm(h)), dim=-1)

    def loop(self, state: Tensor, loops: Tensor, run: Run) -> Tensor:
        h, e = state.chunk(2, dim=-1)
        return torch.cat((run(self.norm(h.contiguous(), added=e.contiguous())), e), dim=-1)

    def leave(self, state: Tensor) -> Tensor:
        return state.chunk(2, dim=-1)[0].contiguous()


def _layer(config: DoryConfig, weights: Weights, prefix: str, window: int) -> UnitLayer:
    hidden, inner, unit = config.hidden_size, config.intermediate_size, config.initializer_range
    attn, size = f"{prefix}.self_attn", config.num_heads * config.head_dim
    head_norm = unit_norm(weights, config.head_dim)
    scale, gate_scale = (weights.tensor(f"{attn}.{name}", size) / unit for name in ("sqk", "s_gate"))
    rates = [weights.tensor(f"{prefix}.lambda_{half}", hidden) * (config.alpha / unit) for half in (1, 2)]
    suv = torch.cat([weights.tensor(f"{prefix}.mlp.suv_{name}", inner) for name in ("gate", "up")])
    plain, mlp = weights.attention(config, attn), weights.mlp(config, f"{prefix}.mlp")
    attention = UnitAttention(
        **vars(plain) | {"q_norm": head_norm, "k_norm": head_norm, "rope": int(not window), "window": window},
        gate=weights.linear(hidden, {f"{attn}.gate_proj": size}),
        scale=(scale * config.head_dim**0.5).square().view(config.num_heads, config.head_dim),
        gate_scale=(gate_scale * hidden**0.25).square(),
        found_norm=unit_norm(weights, size),
    )
    mlp = UnitMLP(mlp.gate_up, mlp.down, suv * hidden**0.5, unit_norm(weights, inner))
    return UnitLayer(unit_norm(weights, hidden), attention, rates[0].abs(), mlp, rates[1].abs())


def _scaled(head: Callable[[Tensor], Tensor], scale: Tensor, h: Tensor) -> Tensor:
    return head(h).float() * scale


def _listed(raw: Mapping[str, Any]) -> list[Any]:
    listed = raw.get("layer_types") or []
    if not isinstance(listed, list):
        raise CheckpointError(f"config.json: layer_types must be a list, got {shown(listed)}")
    return listed


def _kinds(listed: list[Any], layers: int) -> list[str]:
    """The kind of each layer; by default every fourth sees everything."""
    kinds = listed or ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers or any(kind not in tuple(KINDS) for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must name {layers} layers of {', '.join(KINDS)}")
    return kinds


def _rotary(facts: Facts, kind: str) -> Rotary:
    return facts.section("rope_parameters").section(kind).rotary(KINDS[kind])


def _as_stored(weights: Weights) -> Weights:
    """Files have names of their own: released ones number the halves of a layer apart, transformers' do not."""
    if not weights.has("backbone.embeddings.weight"):
        return weights
    halves = weights.has("backbone.layers.0.mixer.q_proj.weight")
    return replace(weights, source=Renamed(weights.source, partial(_stored_name, halves)))


def _stored_name(halves: bool, name: str) -> Stored:
    if name == "model.embed_tokens.weight":
        return Stored("backbone.embeddings.weight")
    _, _, layer, part, *rest = name.replace("self_attn.gate_proj", "self_attn.g_proj").split(".")
    if halves:
        layer = str(2 * int(layer) + (part in ("mlp", "lambda_2")))
        part = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}.get(part, "mixer")
    return Stored(".".join(("backbone.layers", layer, part, *rest)))
