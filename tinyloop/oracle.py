"""The slow oracle: what a looped model computes, with no packing, no pages and no cache. Tests compare with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyloop import kernels
from tinyloop.layers import Rope
from tinyloop.stack import LoopedStack


@torch.inference_mode()
def logits(stack: LoopedStack, tokens: Sequence[int], loops: int | Sequence[int], cache_window: int = 0) -> Tensor:
    """Logits [tokens, vocab_size] of one whole sequence. `loops`: one depth, or one for each token.

    A token that has run out of loops keeps its last keys and values, and deeper loops of later tokens read those.
    """
    depth = torch.tensor([loops] * len(tokens) if isinstance(loops, int) else list(loops))
    positions = torch.arange(len(tokens))
    attend = _Attention(positions, cache_window)
    h = stack.prelude(stack.embed(torch.tensor(list(tokens))), positions, attend)
    for loop in range(int(depth.max())):
        attend.active = (loop < depth)[:, None, None]
        after = stack.core(h, positions, torch.full_like(positions, loop), attend)
        h = torch.where(attend.active[:, 0], after, h)
    attend.active = torch.ones(1, 1, 1, dtype=torch.bool)
    return stack.head(stack.coda(h, positions, attend))


class _Attention:
    """Causal attention over the whole sequence. Keys and values change only where a token is still looping."""

    def __init__(self, positions: Tensor, window: int) -> None:
        back = positions[:, None] - positions
        self.mask = (back >= 0) & (back < window) if window else back >= 0
        self.active = torch.ones(1, 1, 1, dtype=torch.bool)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
        q, k = kernels.rope(q, rope.cos, rope.sin), kernels.rope(k, rope.cos, rope.sin)
        old_k, old_v = self.kept.get(layer, (k, v))
        k, v = torch.where(self.active, k, old_k), torch.where(self.active, v, old_v)
        self.kept[layer] = k, v
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        weights = scores.masked_fill(~self.mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
