"""The layers of a normalised transformer (nGPT: Loshchilov et al. 2024, arXiv 2410.01131), as Dory has them.

States lie on the unit sphere, and a residual is a step towards the update at a learned rate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinyloop import kernels
from tinyloop.layers import At, Attend, GatedAttention, GatedMLP, RMSNorm
from tinyloop.models.family import Weights

EPS = 1e-6


def unit_norm(weights: Weights, size: int) -> RMSNorm:
    """`x / sqrt(sum(x * x) + EPS)` over the last dimension."""
    return weights.plain_norm(size, EPS / size, size**-0.5)


@dataclass(frozen=True, kw_only=True)
class UnitAttention(GatedAttention):
    """Queries and keys of norm 1; queries are scaled by channel once they are turned."""

    scale: Tensor
    gate_scale: Tensor
    found_norm: RMSNorm

    def __call__(self, x: Tensor, at: At, attend: Attend, added: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        found = attend(q, k, v, at.ropes[self.rope], window=self.window, scale=self.scale)
        return self.out(self.found_norm(found * torch.sigmoid(self.gate(x) * self.gate_scale)), added)


@dataclass(frozen=True)
class UnitMLP(GatedMLP):
    """Both projections are scaled by channel, and what they make is brought to norm 1."""

    scale: Tensor
    inner_norm: RMSNorm

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return self.down(self.inner_norm(kernels.silu_mul(self.gate_up(x) * self.scale)), added)


@dataclass(frozen=True)
class UnitLayer:
    """On the unit sphere: `h <- h + rate * (update - h)`, both of norm 1, for each half."""

    norm: RMSNorm
    attn: UnitAttention
    attn_rate: Tensor
    mlp: UnitMLP
    mlp_rate: Tensor

    def __call__(self, h: Tensor, at: At, attend: Attend) -> Tensor:
        h = self.norm(h)
        h = torch.lerp(h, self.norm(self.attn(h, at, attend)), self.attn_rate)
        h = self.norm(h)
        return torch.lerp(h, self.norm(self.mlp(h)), self.mlp_rate)
