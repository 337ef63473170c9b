"""What a family declares, and the two helpers that family files are written with: `Facts` and `Weights`.

A family maps a config.json to a ModelConfig, builds layers from named tensors, and says what happens between loops. The
stack, the planes, packing and the API follow from that.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from tinyloop.arguments import shown
from tinyloop.config import ModelConfig, Rotary
from tinyloop.errors import CheckpointError
from tinyloop.kernels import Int8Linear, Linear
from tinyloop.layers import Attention, GatedMLP, Layer, PreNormLayer, RMSNorm
from tinyloop.recurrence import NormedRecurrence, Recurrence

LARGEST = 1 << 24  # of any whole number in a config: far above any size in use
MOST = 4096
BEYOND_TRAINED = 2  # quality falls slowly past the trained depth; up to twice of it may be asked for


class TensorSource(Protocol):
    """The part of a checkpoint that weights are read from."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class Stored(NamedTuple):
    """Where a tensor lies: all of one, or one of several equal parts of it, by rows."""

    name: str
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Renamed:
    """Tensors that are stored under other names than the family's, or several in one."""

    source: TensorSource
    stored: Callable[[str], Stored]

    def has(self, name: str) -> bool:
        return self.source.has(self.stored(name).name)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored, part, parts = self.stored(name)
        return self.source.take(stored, (parts * shape[0], *shape[1:])).chunk(parts)[part]


class Family(ABC):
    """The base: Llama layers under Llama's names, whose core output simply replaces its input."""

    model_types: ClassVar[tuple[str, ...]]
    ours: ClassVar[tuple[str, ...]] = ()  # what the section "tinyloop" of a config.json may say

    @abstractmethod
    def config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """The frozen facts of a checkpoint. Raises CheckpointError for what is missing or not supported."""

    def telling(self, config: ModelConfig) -> frozenset[str]:
        """Tensors that a checkpoint of this config has, if `Weights.has` is asked for some and what it says matters."""
        return frozenset()

    def embedding(self, config: ModelConfig, weights: "Weights") -> Tensor:
        """[vocab_size, hidden_size]."""
        return weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)

    def layers(self, config: ModelConfig, weights: "Weights") -> list[Layer]:
        """As many as the layout counts; one that is applied several times in a loop stands there as often."""
        return [self.layer(config, weights, f"model.layers.{index}") for index in range(config.layout.layers)]

    def layer(self, config: ModelConfig, weights: "Weights", prefix: str) -> Layer:
        """One layer out of the tensors below `prefix`."""
        return PreNormLayer(
            weights.norm(f"{prefix}.input_layernorm", config),
            weights.attention(config, f"{prefix}.self_attn"),
            weights.norm(f"{prefix}.post_attention_layernorm", config),
            weights.mlp(config, f"{prefix}.mlp"),
        )

    def norm(self, config: ModelConfig, weights: "Weights") -> RMSNorm:
        """The final norm."""
        return weights.norm("model.norm", config)

    def head(self, config: ModelConfig, weights: "Weights", embedding: Tensor) -> Callable[[Tensor], Tensor]:
        """From normed states to logits, [rows, hidden_size] -> [rows, vocab_size]."""
        if config.tie_embeddings:
            return weights.matrix(embedding)
        return weights.linear(config.hidden_size, {"lm_head": config.vocab_size})

    def recurrence(self, config: ModelConfig, weights: "Weights", norm: RMSNorm) -> Recurrence:
        """What is carried from loop to loop, and what happens around the core's layers."""
        return NormedRecurrence(norm) if config.norm_each_loop else Recurrence()

    def exit_gate(self, config: ModelConfig, weights: "Weights") -> Linear | None:
        """What reads the probability of leaving after a loop from the state, [rows, state_size] -> [rows, 1]."""
        return None


class Facts:
    """Reads a config.json: names the key that is missing or wrong, and refuses flags that would change the result."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be a whole number, got {shown(value)}")
        if abs(value) > LARGEST:
            raise CheckpointError(f"config.json: {key} must be at most {LARGEST}, got {shown(value)}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0."""
        value = self.raw.get(key, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:  # also refuses NaN
            raise CheckpointError(f"config.json: {key} must be a finite number above 0, got {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be true or false, got {shown(value)}")
        return value

    def section(self, key: str) -> "Facts":
        """The object under `key`, empty if there is none."""
        value = self.raw.get(key, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {key} must be an object, got {shown(value)}")
        return Facts(value)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.integer(key, default)
        if value < least:
            raise CheckpointError(f"config.json: {key} must be at least {least}, got {shown(value)}")
        return value

    def few(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A number of layers, loops or cycles: lists are made of these, so there is a most."""
        value = self.count(key, default, least)
        if value > MOST:
            raise CheckpointError(f"config.json: {key} must be at most {MOST}, got {shown(value)}")
        return value

    def full_attention(self) -> None:
        """Refuse layers that do not see everything."""
        kinds = self.raw.get("layer_types") or []
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise CheckpointError(f"config.json: layer_types = {shown(kinds)} is not supported")

    def rotary(self, default: float = 10000.0) -> Rotary:
        """The table of rotary angles; Llama 3's stretched one is known, other and partial variants are refused."""
        keys = [key for key in ("rope_parameters", "rope_scaling") if self.raw.get(key) is not None]
        sections = [section for section in map(self.section, keys) if section.raw]
        rope = sections[0] if sections else Facts({})
        kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
        if kind not in ("default", "llama3", "stretch"):
            raise CheckpointError(f"config.json: rope type {shown(kind)} is not supported")
        for facts in (self, rope):
            facts.refuse("partial_rotary_factor", None, 1)
        theta = rope.positive("rope_theta", self.positive("rope_theta", default))
        if kind == "stretch":  # what a GGUF file says
            stretch = tuple(rope.raw["stretch"])
            if not all(0 < one <= sys.float_info.max for one in stretch):
                raise CheckpointError("config.json: rope stretch must hold finite numbers above 0")
            return Rotary(theta, stretch=stretch)
        return Rotary(theta) if kind == "default" else rope.stretched(theta)

    def stretched(self, theta: float) -> Rotary:
        """Llama 3's table, out of the facts of a rope section."""
        low, high = self.positive("low_freq_factor", 1.0), self.positive("high_freq_factor", 4.0)
        if high <= low:
            raise CheckpointError(f"config.json: high_freq_factor {high} must be above low_freq_factor {low}")
        return Rotary(theta, self.positive("factor", 8.0), low, high, self.count("original_max_position_embeddings"))

    def refuse(self, key: str, *allowed: Any) -> None:
        """A key that may be absent, but if present must hold one of the allowed values."""
        if key in self.raw and self.raw[key] not in allowed:
            raise CheckpointError(f"config.json: {key} = {shown(self.raw[key])} is not supported")

    def head_dim(self, hidden: int, heads: int) -> int:
        """Elements of one head: stated, or an equal share of the state."""
        if self.raw.get("head_dim") is None and hidden % max(heads, 1):
            raise CheckpointError(
                f"config.json: hidden_size {hidden} is not a multiple of {heads} heads, and no head_dim"
            )
        return self.integer("head_dim", hidden // max(heads, 1))

    def decoder(self) -> dict[str, Any]:
        """The ModelConfig fields that all Llama-shaped families spell the same."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        self.refuse("hidden_act", "silu")
        self.refuse("attention_bias", False)
        self.refuse("mlp_bias", False)
        self.refuse("quantization_config", None)
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.head_dim(hidden, heads),
            "max_context": self.integer("max_position_embeddings"),
            "norm_eps": self.positive("rms_norm_eps", 1e-6),
            "rotary": (self.rotary(),),
            "tie_embeddings": self.flag("tie_word_embeddings", False),
        }


@dataclass(frozen=True)
class Weights:
    """Named tensors of a checkpoint, checked for shape and brought to one dtype and device.

    With `int8`, the matrices of layers and head are kept in 8 bits; all else stays in `dtype`.
    """

    source: TensorSource
    dtype: torch.dtype
    device: torch.device
    int8: bool = False

    def has(self, name: str) -> bool:
        """Whether there is such a tensor: some checkpoints say only so which of two layouts they have."""
        return self.source.has(name)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.source.take(name, shape).to(device=self.device, dtype=self.dtype)

    def linear(self, in_features: int, outputs: Mapping[str, int]) -> Linear:
        """Projections of one input as one matrix: names and output sizes, in order."""
        parts = [self.tensor(f"{name}.weight", out, in_features) for name, out in outputs.items()]
        return self.matrix(torch.cat(parts) if len(parts) > 1 else parts[0])

    def matrix(self, weight: Tensor) -> Linear:
        """`weight` [out, in] as it will be multiplied with."""
        return (Int8Linear if self.int8 else Linear)(weight)

    def norm(self, name: str, config: ModelConfig, size: int | None = None) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight", size or config.hidden_size), config.norm_eps)

    def plain_norm(self, size: int, eps: float, weight: float = 1.0) -> RMSNorm:
        """A norm without parameters."""
        return RMSNorm(torch.full((size,), weight, dtype=self.dtype, device=self.device), eps)

    def attention(self, config: ModelConfig, prefix: str, **more: Any) -> Attention:
        """`more` are the further fields of `Attention`."""
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        sizes = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        qkv = self.linear(config.hidden_size, sizes)
        out = self.linear(q_size, {f"{prefix}.o_proj": config.hidden_size})
        return Attention(qkv, out, config.num_heads, config.num_kv_heads, config.head_dim, **more)

    def mlp(self, config: ModelConfig, prefix: str) -> GatedMLP:
        inner = config.intermediate_size
        gate_up = self.linear(config.hidden_size, {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner})
        return GatedMLP(gate_up, self.linear(inner, {f"{prefix}.down_proj": config.hidden_size}))
