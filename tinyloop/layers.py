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
    """q: [rows, heads, head_dim], k and v: [rows, kv_heads, head_dim] -> [rows, heads * head_dim].

    Queries and keys come as projected; `rope` is still to be applied, on the way to where keys are kept.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rope: "Rope") -> Tensor: ...


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

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, added)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023), plus `added`. `qkv` is the three projections in one."""

    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(self, x: Tensor, rope: Rope, attend: Attend, added: Tensor | None = None) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        keys, values = self.num_heads, self.num_heads + self.num_kv_heads  # where they begin
        q, k, v = heads[:, :keys], heads[:, keys:values], heads[:, values:]
        return self.out(attend(q, k, v, rope), added)


@dataclass(frozen=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x)) + added`; `gate_up` is both projections in one."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return self.down(kernels.silu_mul(self.gate_up(x)), added)


@dataclass(frozen=True)
class PreNormLayer:
    """The Llama layer: each half normalises what it reads."""

    attn_norm: RMSNorm
    attn: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, h: Tensor, rope: Rope, attend: Attend) -> Tensor:
        h = self.attn(self.attn_norm(h), rope, attend, added=h)
        return self.mlp(self.mlp_norm(h), added=h)


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
        h = self.attn_out_norm(self.attn(self.attn_norm(h), rope, attend), added=h)
        return self.mlp_out_norm(self.mlp(self.mlp_norm(h)), added=h)
