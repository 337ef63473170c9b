"""Norms, attention and MLPs. A layer knows its weights and the equation; not pages, not batches, not loops.

Where keys and values are kept and what a row may look at is the business of `attend`, which the caller passes in. The
packed step and the slow oracle run these same layers with different `attend`.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tinyloop import kernels
from tinyloop.kernels import Linear


class Attend(Protocol):
    """q: [rows, heads, head_dim], k and v: [rows, kv_heads, head_dim] -> [rows, heads * head_dim]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Rope:
    """Rotary angles of the rows: `cos` and `sin` are [rows, 1, head_dim / 2], float32."""

    cos: Tensor
    sin: Tensor


class Layer(Protocol):
    """One transformer layer: [rows, hidden_size] -> [rows, hidden_size]."""

    def __call__(self, h: Tensor, rope: Rope, attend: Attend) -> Tensor: ...


@dataclass(frozen=True)
class RMSNorm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023). `qkv` is the three projections in one."""

    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        keys = self.num_heads + self.num_kv_heads  # rope turns queries and keys in one go
        qk, v = kernels.rope(heads[:, :keys], rope.cos, rope.sin), heads[:, keys:]
        return self.out(attend(qk[:, : self.num_heads], qk[:, self.num_heads :], v))


@dataclass(frozen=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`; `gate_up` is both projections in one."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(kernels.silu_mul(self.gate_up(x)))


@dataclass(frozen=True)
class PreNormLayer:
    """The Llama layer: each half normalises what it reads."""

    attn_norm: RMSNorm
    attn: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, h: Tensor, rope: Rope, attend: Attend) -> Tensor:
        h = h + self.attn(self.attn_norm(h), rope, attend)
        return h + self.mlp(self.mlp_norm(h))


@dataclass(frozen=True)
class SandwichLayer:
    """The Ouro layer: each half normalises what it reads and what it adds."""

    attn_norm: RMSNorm
    attn: Attention
    attn_out_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    mlp_out_norm: RMSNorm

    def __call__(self, h: Tensor, rope: Rope, attend: Attend) -> Tensor:
        h = h + self.attn_out_norm(self.attn(self.attn_norm(h), rope, attend))
        return h + self.mlp_out_norm(self.mlp(self.mlp_norm(h)))
