"""What a family declares, and the two helpers that family files are written with: `Facts` and `Weights`.

A family maps a config.json to a ModelConfig, builds one layer from named tensors, and says what happens between loops.
The stack, the planes, packing and the API follow from that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from tinyloop.config import ModelConfig
from tinyloop.errors import CheckpointError
from tinyloop.kernels import Linear
from tinyloop.layers import Attention, GatedMLP, Layer, RMSNorm

if TYPE_CHECKING:
    from tinyloop.stack import LoopedStack


class TensorSource(Protocol):
    """The part of a checkpoint that weights are read from."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class Family:
    """The base: an ordinary decoder whose core output simply replaces its input."""

    model_types: ClassVar[tuple[str, ...]]
    norm_each_loop: ClassVar[bool] = False  # the final norm runs after every loop, and its output feeds the next

    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The frozen facts of a checkpoint. Raises CheckpointError for what is missing or not supported."""
        raise NotImplementedError

    def layer(self, config: ModelConfig, weights: "Weights", prefix: str) -> Layer:
        """One layer out of the tensors below `prefix`."""
        raise NotImplementedError

    def exit_gate(self, config: ModelConfig, weights: "Weights") -> Linear | None:
        """What reads the probability of leaving after a loop from the state, [rows, hidden_size] -> [rows, 1]."""
        return None

    def after_loop(self, stack: "LoopedStack", before: Tensor, after: Tensor, loops: Tensor) -> Tensor:
        """The state that the next loop (or the coda) gets. `loops` [rows]: the index of the loop each row just ran."""
        return after


class Facts:
    """Reads a config.json: names the key that is missing or wrong, and refuses flags that would change the result."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be a whole number, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be a number, got {value!r}")
        return float(value)

    def rope_theta(self, default: float = 10000.0) -> float:
        """The rotary base; scaled variants are refused."""
        rope = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"config.json: rope type {kind!r} is not supported")
        return Facts(rope).number("rope_theta", self.number("rope_theta", default))

    def refuse(self, key: str, *allowed: Any) -> None:
        """A key that may be absent, but if present must hold one of the allowed values."""
        if key in self.raw and self.raw[key] not in allowed:
            raise CheckpointError(f"config.json: {key} = {self.raw[key]!r} is not supported")

    def decoder(self) -> dict[str, Any]:
        """The ModelConfig fields that all Llama-shaped families spell the same."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        self.refuse("hidden_act", "silu")
        self.refuse("attention_bias", False)
        self.refuse("mlp_bias", False)
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.integer("head_dim", hidden // max(heads, 1)),
            "max_context": self.integer("max_position_embeddings"),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "rope_theta": self.rope_theta(),
            "tie_embeddings": bool(self.raw.get("tie_word_embeddings", False)),
        }


@dataclass(frozen=True)
class Weights:
    """Named tensors of a checkpoint, checked for shape and brought to one dtype and device."""

    source: TensorSource
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.source.take(name, shape).to(device=self.device, dtype=self.dtype)

    def linear(self, in_features: int, outputs: Mapping[str, int]) -> Linear:
        """Projections of one input as one matrix: names and output sizes, in order."""
        parts = [self.tensor(f"{name}.weight", out, in_features) for name, out in outputs.items()]
        return Linear(torch.cat(parts) if len(parts) > 1 else parts[0])

    def norm(self, name: str, config: ModelConfig) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", config.hidden_size), config.norm_eps)

    def attention(self, config: ModelConfig, prefix: str) -> Attention:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        qkv = self.linear(config.hidden_size, sizes)
        out = self.linear(q_size, {f"{prefix}.o_proj": config.hidden_size})
        return Attention(qkv, out, config.num_heads, config.num_kv_heads, config.head_dim)

    def mlp(self, config: ModelConfig, prefix: str) -> GatedMLP:
        inner = config.intermediate_size
        gate_up = self.linear(config.hidden_size, {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner})
        return GatedMLP(gate_up, self.linear(inner, {f"{prefix}.down_proj": config.hidden_size}))
