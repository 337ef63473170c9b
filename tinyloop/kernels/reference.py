"""The kernels in plain torch: what they compute, on any device and in any dtype."""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), first half against second half.

    `x`: [rows, heads, head_dim]; `cos`, `sin`: [rows, 1, head_dim / 2] in float32.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [rows, 2 * intermediate_size] (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write `rows` [rows, kv_heads, head_dim] to flat `slots` [rows] of a cache.

    `cache`: [pages, page_size, kv_heads, head_dim].
    """
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def gather_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """Bring pages together: `pages` [segments, blocks] -> [segments, blocks * page_size, kv_heads, head_dim]."""
    gathered = cache.index_select(0, pages.view(-1))
    return gathered.view(pages.shape[0], -1, *cache.shape[2:])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention of equal-sized segments; returns [segments, rows, heads * head_dim].

    `q`: [segments, rows, heads, head_dim]; `k`, `v`: [segments, keys, kv_heads, head_dim]. Query heads that share a
    key head (`shared` of them) are laid side by side as further rows, so keys are never repeated in memory. `mask` is
    added to the scores: [segments, 1, shared * rows, keys], or [segments, 1, 1, keys] for single rows.
    """
    segments, rows, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    q = q.view(segments, rows, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(segments, kv_heads, shared * rows, head_dim)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    return out.view(segments, kv_heads, shared, rows, head_dim).permute(0, 3, 1, 2, 4).reshape(segments, rows, -1)
