"""Huginn (Geiping et al. 2025, arXiv 2502.05171) and the retrofits in its shape (McLeish et al. 2025).

The prelude's output is injected into every loop through an adapter. The core starts from zeros, where the authors draw
noise: an answer may not depend on a generator, and a prefix has to be the same for everybody. With `start_seed` in the
section "tinyloop" of config.json it starts from their distribution, as a function of that seed and the position.

Huginn turns adjacent channels and norms what each half leaves; a retrofit of Llama keeps Llama's layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyloop.checkpoint.translate import pairs_to_halves
from tinyloop.config import Layout, ModelConfig, Rotary
from tinyloop.layers import At, Attend, Attention, GatedMLP, Layer, PreNormLayer, RMSNorm
from tinyloop.models.family import BEYOND_TRAINED, Facts, Family, Weights
from tinyloop.models.start import SeededStart
from tinyloop.recurrence import Recurrence, Run

ONLY = {
    "architecture_class_name": "RecurrentGPT",
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "bias": False,
    "test_time_noise": 0,
    "quantization_config": None,
}
SANDWICHED = "transformer.core_block.0.norm_3.weight"  # a retrofit's layers have two norms


@dataclass(frozen=True, kw_only=True)
class HuginnConfig(ModelConfig):
    """`qk_bias`: queries and keys get a bias before they are turned. `start`: None is zeros."""

    qk_bias: bool
    start: SeededStart | None


class Huginn(Family):
    model_types = ("huginn_raven",)
    ours = ("start_seed", "start_scale")

    def config(self, raw: Mapping[str, Any]) -> HuginnConfig:
        facts = Facts(raw)
        for key, value in ONLY.items():
            facts.refuse(key, value)
        hidden, heads, qk_bias = facts.count("n_embd"), facts.count("n_heads"), facts.flag("qk_bias", True)
        if qk_bias:
            facts.refuse("num_key_value_heads", None, heads)
        prelude, coda = (facts.few(f"n_layers_in_{end}", 2, 0) for end in ("prelude", "coda"))
        trained = facts.few("mean_recurrence", 32)
        stretched = raw.get("rope_theta") is not None or raw.get("rope_scaling") is not None
        scale = facts.section("init_values").positive("embed_scale", hidden**0.5)
        return HuginnConfig(
            family="huginn",
            qk_bias=qk_bias,
            start=_start(facts, hidden, scale),
            vocab_size=facts.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=facts.count("intermediate_size"),
            num_heads=heads,
            num_kv_heads=facts.count("num_key_value_heads", heads),
            head_dim=facts.head_dim(hidden, heads),
            max_context=facts.count("max_position_embeddings", facts.count("block_size", 4096)),
            norm_eps=facts.positive("norm_eps", 1e-6),
            rotary=(facts.rotary() if stretched else Rotary(facts.positive("rope_base", 50000)),),
            tie_embeddings=facts.flag("tie_embeddings", True),
            embedding_scale=scale,
            layout=Layout(prelude, facts.few("n_layers_in_recurrent_block", 4), coda),
            carried=2,
            default_loops=trained,
            max_loops=BEYOND_TRAINED * trained,
            trained_loops=trained,
            other_parameters=2 * hidden * hidden,
        )

    def telling(self, config: ModelConfig) -> frozenset[str]:
        assert isinstance(config, HuginnConfig)
        return frozenset({SANDWICHED} if config.qk_bias else ())  # retrofits have neither

    def embedding(self, config: ModelConfig, weights: Weights) -> Tensor:
        return weights.tensor("transformer.wte.weight", config.vocab_size, config.hidden_size)

    def layers(self, config: ModelConfig, weights: Weights) -> list[Layer]:
        sections = {"prelude": config.layout.prelude, "core_block": config.layout.core, "coda": config.layout.coda}
        assert isinstance(config, HuginnConfig)
        names = [f"transformer.{section}.{i}" for section, count in sections.items() for i in range(count)]
        sandwich = weights.has(SANDWICHED)
        return [(_sandwich if sandwich else _llama)(config, weights, name) for name in names]

    def norm(self, config: ModelConfig, weights: Weights) -> RMSNorm:
        return weights.norm("transformer.ln_f", config)

    def recurrence(self, config: ModelConfig, weights: Weights, norm: RMSNorm) -> Recurrence:
        assert isinstance(config, HuginnConfig)
        hidden = config.hidden_size
        return InjectedRecurrence(norm, weights.linear(2 * hidden, {"transformer.adapter": hidden}), config.start)


@dataclass(frozen=True)
class InjectedRecurrence(Recurrence):
    """`h <- core(adapter(h, e))` from zeros or a drawn start, where e is the prelude's output. The state is h and e,
    side by side."""

    norm: RMSNorm
    adapter: Callable[[Tensor], Tensor]
    start: SeededStart | None = None

    def enter(self, h: Tensor, positions: Tensor) -> Tensor:
        first = torch.zeros_like(h) if self.start is None else self.start(positions, h)
        return torch.cat((first, h), dim=-1)

    def loop(self, state: Tensor, loops: Tensor, run: Run) -> Tensor:
        return torch.cat((run(self.adapter(state)), state.chunk(2, dim=-1)[1]), dim=-1)

    def leave(self, state: Tensor) -> Tensor:
        return self.norm(self.latent(state))

    def latent(self, state: Tensor) -> Tensor:
        return state.chunk(2, dim=-1)[0].contiguous()


@dataclass(frozen=True)
class SandwichBlock:
    """Each half norms what it reads, and the sum that it leaves."""

    attn_norm: RMSNorm
    attn: Attention
    attn_sum_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    mlp_sum_norm: RMSNorm

    def __call__(self, h: Tensor, at: At, attend: Attend) -> Tensor:
        h = self.attn_sum_norm(self.attn(self.attn_norm(h), at, attend, added=h))
        return self.mlp_sum_norm(self.mlp(self.mlp_norm(h), added=h))


def _start(facts: Facts, hidden: int, embedding_scale: float) -> SeededStart | None:
    """Where the core starts, as the config's section "tinyloop" says."""
    ours = facts.section("tinyloop")
    if ours.raw.get("start_seed") is None:
        return None
    std = facts.section("init_values").positive("std", (2 / (5 * hidden)) ** 0.5)
    return SeededStart(ours.count("start_seed", least=0), std * ours.positive("start_scale", 1.0) * embedding_scale)


def _sandwich(config: HuginnConfig, weights: Weights, prefix: str) -> SandwichBlock:
    norms = [weights.norm(f"{prefix}.norm_{number}", config) for number in (1, 2, 3, 4)]
    attention = _attention(config, weights, f"{prefix}.attn", pairs=True)
    return SandwichBlock(norms[0], attention, norms[1], norms[2], _mlp(config, weights, f"{prefix}.mlp"), norms[3])


def _llama(config: HuginnConfig, weights: Weights, prefix: str) -> PreNormLayer:
    norms = [weights.norm(f"{prefix}.norm_{number}", config) for number in (1, 2)]
    attention = _attention(config, weights, f"{prefix}.attn", pairs=False)
    return PreNormLayer(norms[0], attention, norms[1], _mlp(config, weights, f"{prefix}.mlp"))


def _attention(config: HuginnConfig, weights: Weights, prefix: str, *, pairs: bool) -> Attention:
    """One projection for queries, keys and values. Adjacent channels that turn together are brought to halves."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    rows = weights.tensor(f"{prefix}.Wqkv.weight", (heads + 2 * kv_heads) * size, config.hidden_size)
    turned = (heads + kv_heads) * size
    bias = None
    if config.qk_bias:
        biases = weights.tensor(f"{prefix}.qk_bias", 2, 1, heads, size).flatten()
        bias = torch.cat((biases, biases.new_zeros(kv_heads * size)))
    if pairs:
        rows = torch.cat((pairs_to_halves(rows[:turned], heads + kv_heads), rows[turned:]))
        bias = bias if bias is None else torch.cat((pairs_to_halves(bias[:turned], heads + kv_heads), bias[turned:]))
    out = weights.linear(heads * size, {f"{prefix}.proj": config.hidden_size})
    return Attention(weights.matrix(rows), out, heads, kv_heads, size, bias)


def _mlp(config: ModelConfig, weights: Weights, prefix: str) -> GatedMLP:
    inner = config.intermediate_size
    gate_up = weights.linear(config.hidden_size, {f"{prefix}.fc": 2 * inner})
    return GatedMLP(gate_up, weights.linear(inner, {f"{prefix}.proj": config.hidden_size}))
