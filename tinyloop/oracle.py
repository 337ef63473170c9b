"""The slow oracle: what a looped model computes, with no packing, no pages and no cache. Tests compare with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinyloop import kernels
from tinyloop.kernels.program import Program
from tinyloop.layers import Rope
from tinyloop.stack import LoopedStack


@torch.inference_mode()
def logits(
    stack: LoopedStack,
    tokens: Sequence[int],
    loops: int | Sequence[int],
    cache_window: int = 0,
    prompt_tokens: int | None = None,
) -> Tensor:
    """Logits [tokens, vocab_size] of one whole sequence. `loops`: one depth, or one for each token.

    A token that has run out of loops keeps its last keys and values, and deeper loops of later tokens read those. Where
    all loops share a plane, a sequence has to be run as it was made: the prompt, then token by token.
    """
    depth = torch.tensor([loops] * len(tokens) if isinstance(loops, int) else list(loops))
    prompt = len(tokens) if prompt_tokens is None else prompt_tokens
    ahead = prompt if stack.config.bidirectional_prompt else 0
    attend = WholeAttention(torch.arange(len(tokens)), cache_window, ahead)
    edges = [prompt, *range(prompt + 1, len(tokens) + 1)] if stack.config.layout.one_plane else [len(tokens)]
    parts = zip([0, *edges], edges, strict=False)
    return torch.cat([_run(stack, tokens[start:end], start, depth[start:end], attend) for start, end in parts])


def _run(stack: LoopedStack, tokens: Sequence[int], start: int, depth: Tensor, attend: "WholeAttention") -> Tensor:
    positions = torch.arange(start, start + len(tokens))
    everyone = torch.ones(1, 1, 1, dtype=torch.bool)
    attend.start, attend.active = start, everyone
    state = stack.enter(stack.prelude(stack.embed(torch.tensor(list(tokens))), positions, attend), positions)
    for loop in range(int(depth.max())):
        attend.active = (loop < depth)[:, None, None]
        after = stack.core(state, positions, torch.full_like(positions, loop), attend)
        state = torch.where(attend.active[:, 0], after, state)
    attend.active = everyone
    return stack.head(stack.coda(stack.leave(state), positions, attend)).float()


class WholeAttention:
    """Attention over the whole sequence: causal, but for the first `ahead` tokens, which see each other.

    Keys and values change only where a token is still looping. Tokens before `start` are as they were left.
    """

    def __init__(self, positions: Tensor, window: int, ahead: int = 0) -> None:
        self.back = positions[:, None] - positions
        self.mask = (self.back >= 0) | ((positions[:, None] < ahead) & (positions < ahead))
        if window:
            self.mask = self.mask & (self.back < window)
        self.active = torch.ones(1, 1, 1, dtype=torch.bool)
        self.start = 0
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.first: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope,
        *,
        window: int = 0,
        scale: Tensor | None = None,
        first: bool = False,
    ) -> Tensor:
        q, k = kernels.rope(q, rope.cos, rope.sin), kernels.rope(k, rope.cos, rope.sin)
        q = q if scale is None else q * scale
        if not first:
            self._keep(layer, k, v)
        k, v = (self.first if first else self.kept)[layer]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        weights = scores.masked_fill(~self._seen(len(q), len(k), window), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    def run(self, program: Program, h: Tensor, rope: Rope) -> Tensor | None:
        """Always layer by layer."""
        return None

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The layer's keys and values of all tokens so far; of its first time, for those who read them later."""
        if layer in self.kept:
            old_k, old_v = self.kept[layer]
            end = self.start + len(k)
            if len(old_k) == end:
                k = torch.where(self.active, k, old_k[self.start :])
                v = torch.where(self.active, v, old_v[self.start :])
            k, v = torch.cat([old_k[: self.start], k]), torch.cat([old_v[: self.start], v])
        self.kept[layer] = k, v
        self.first.setdefault(layer, (k, v))

    def _seen(self, rows: int, keys: int, window: int) -> Tensor:
        part = slice(self.start, self.start + rows), slice(keys)
        seen = self.mask[part]
        return seen & (self.back[part] < window) if window else seen
