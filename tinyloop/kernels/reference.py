"""The kernels in plain torch: what they compute, on any device and in any dtype."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyloop.kernels.reads import Reads

GROUP = 64  # inputs that share a scale in `linear_int8`
TINY = 1e-30  # keeps the step of an all-zero group a number


def rms_norm(x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), plus `added`."""
    normed = F.rms_norm(x, x.shape[-1:], weight, eps)
    return normed if added is None else added + normed


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


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """`sigmoid(gate) * x`, both [rows, size]."""
    return torch.sigmoid(gate) * x


def heads(product: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that lie side by side in rows: [rows, heads, head_dim], [rows, kv_heads, head_dim]."""
    parts = product.view(product.shape[0], -1, head_dim)
    keys, values = num_heads, num_heads + num_kv_heads  # where they begin
    return parts[:, :keys], parts[:, keys:values], parts[:, values:]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [out, in] in int8, and what a step is worth in each output: [out], float32."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min(TINY) / 127
    return (wide / scales[:, None]).round().to(torch.int8), scales


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, added: Tensor | None = None) -> Tensor:
    """`x @ (weight * scales).T + added` where both sides are whole numbers in int8.

    `x` [rows, in] is brought to int8 by row and group of 64 inputs, so what one input's size costs in precision stays
    in its group (as in the Q8 blocks of llama.cpp). Sums of a group are exact; groups are added in float32, in order.
    """
    pad = -x.shape[1] % GROUP
    groups = F.pad(x.float(), (0, pad)).view(x.shape[0], -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True).clamp_min(TINY)
    whole = (groups * (torch.tensor(127.0) / top)).round()  # 127 / top would be 127 times the reciprocal
    sides = F.pad(weight.float(), (0, pad)).view(weight.shape[0], -1, GROUP)
    total = x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    for group in range(groups.shape[1]):
        total += (whole[:, group] @ sides[:, group].T) * (top[:, group] / 127)
    total *= scales
    return (total if added is None else total + added).to(x.dtype)


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row and where it first stands, [rows] each; a NaN is larger than any number."""
    largest, places = logits.max(dim=-1)
    return largest, places


def rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Turn queries and keys; write keys and values to flat `slots` [rows] of the pages. Returns the turned queries.

    `q`: [rows, heads, head_dim]; `k`, `v`: [rows, kv_heads, head_dim]; `cos`, `sin` as in `rope`; `keys`, `values`:
    [pages, page_size, kv_heads, head_dim].
    """
    for cache, rows in ((keys, rope(k, cos, sin)), (values, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
    return rope(q, cos, sin)


def attention(q: Tensor, keys: Tensor, values: Tensor, reads: Reads, page_row: int) -> Tensor:
    """Causal grouped-query attention of a packed batch over pages; returns [rows, heads * head_dim].

    `q`: [rows, heads, head_dim]; `keys`, `values`: [pages, page_size, kv_heads, head_dim]. Which pages hold what is
    in `reads`, at `page_row` of its pages.
    """
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    for group in reads.groups:
        pages = group.pages[page_row]
        seen = _gathered(keys, pages), _gathered(values, pages)
        queries = q[group.rows].view(*group.shape, *q.shape[1:])
        out[group.rows] = _masked_attention(queries, *seen, group.mask).view(-1, out.shape[1])
    return out


def _gathered(cache: Tensor, pages: Tensor) -> Tensor:
    """Bring pages together: `pages` [segments, blocks] -> [segments, blocks * page_size, kv_heads, head_dim]."""
    gathered = cache.index_select(0, pages.reshape(-1))
    return gathered.view(pages.shape[0], -1, *cache.shape[2:])


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of equal-sized segments; returns [segments, rows, heads * head_dim].

    `q`: [segments, rows, heads, head_dim]; `k`, `v`: [segments, keys, kv_heads, head_dim]. Query heads that share a
    key head (`shared` of them) are laid side by side as further rows, so keys are never repeated in memory. `mask` is
    added to the scores, shaped as in `reads.Group`.
    """
    segments, rows, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    q = q.view(segments, rows, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(segments, kv_heads, shared * rows, head_dim)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
    return out.view(segments, kv_heads, shared, rows, head_dim).permute(0, 3, 1, 2, 4).reshape(segments, rows, -1)
