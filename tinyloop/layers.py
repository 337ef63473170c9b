"""Norms, attention and MLPs. A layer knows its weights and the equation; not pages, not batches.

Where keys and values are kept and what a row may look at is the business of `attend`, which the caller passes in. The
packed step and the slow oracle run these same layers with different `attend`.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tinyloop import kernels
from tinyloop.kernels import Linear


@dataclass(frozen=True)
class Rope:
    """Rotary angles of the rows: `cos` and `sin` are [rows, 1, head_dim / 2], float32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class At:
    """Where rows stand: their angles by each of the model's rotary tables, and which loop, from 0, they run [rows]."""

    ropes: tuple[Rope, ...]
    loops: Tensor


class Attend(Protocol):
    """q: [rows, heads, head_dim], k and v: [rows, kv_heads, head_dim] -> [rows, heads * head_dim].

    Queries and keys come as projected; `rope` is still to be applied, on the way to where keys are kept. `window`: a
    row sees so many of the most recent tokens, itself included; 0 means all. `scale` [heads, head_dim] multiplies the
    turned queries. With `first` nothing is kept, and what is read is the first loop's plane instead of the row's own.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope,
        *,
        window: int = 0,
        scale: Tensor | None = None,
        first: bool = False,
    ) -> Tensor: ...


class Layer(Protocol):
    """One transformer layer: [rows, hidden_size] -> [rows, hidden_size]."""

    def __call__(self, h: Tensor, at: At, attend: Attend) -> Tensor: ...


@dataclass(frozen=True)
class RMSNorm:
    """Over the last dimension: of a state, or of each head."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, added)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023), plus `added`. `qkv` is the three projections in one.

    `rope` is which rotary table it turns by, `window` how many tokens it sees (0: all).
    """

    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: Tensor | None = None  # of `qkv`
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    rope: int = 0
    window: int = 0

    def __call__(self, x: Tensor, at: At, attend: Attend, added: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        return self.out(attend(q, k, v, at.ropes[self.rope], window=self.window), added)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values: parts of one product, which is normed where it lies."""
        product = self.qkv(x) if self.bias is None else self.qkv(x) + self.bias
        q, k, v = kernels.heads(product, self.num_heads, self.num_kv_heads, self.head_dim)
        for part, norm in ((q, self.q_norm), (k, self.k_norm)):
            if norm is not None:
                part.copy_(norm(part.contiguous()))
        return q, k, v


@dataclass(frozen=True, kw_only=True)
class GatedAttention(Attention):
    """Attention whose outcome is weighed by `sigmoid(gate(x))` before the last projection (Qiu et al. 2025)."""

    gate: Linear

    def __call__(self, x: Tensor, at: At, attend: Attend, added: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        found = attend(q, k, v, at.ropes[self.rope], window=self.window)
        return self.out(kernels.sigmoid_mul(self.gate(x), found), added)


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

    def __call__(self, h: Tensor, at: At, attend: Attend) -> Tensor:
        h = self.attn(self.attn_norm(h), at, attend, added=h)
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

    def __call__(self, h: Tensor, at: At, attend: Attend) -> Tensor:
        h = self.attn_out_norm(self.attn(self.attn_norm(h), at, attend), added=h)
        return self.mlp_out_norm(self.mlp(self.mlp_norm(h)), added=h)
