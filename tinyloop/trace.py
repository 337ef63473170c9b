"""Trace: what a model would say after each loop, token by token. The logit lens (nostalgebraist 2020) over depth.

Computed as slowly and plainly as the oracle does: the whole prompt at once, no pages. Row r is what the model run at r
loops answers, so a family's coda is run anew after each.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tinyloop.oracle import WholeAttention
from tinyloop.stack import LoopedStack
from tinyloop.tokenizer import Tokenizer


@dataclass(frozen=True)
class Guess:
    """One of the likeliest next tokens."""

    token: int
    text: str
    probability: float


@dataclass(frozen=True)
class LoopView:
    """One token after one loop.

    `top`: the likeliest next tokens, best first. `entropy`: of all next tokens, in nats. `distance`: how far the loop
    moved the state, `|h_r - h_(r-1)| / |h_r|`. `exited`: the probability of having left by then; None where the family
    has no gate. `exit_threshold` is compared with one of the last two.
    """

    top: tuple[Guess, ...]
    entropy: float
    distance: float
    exited: float | None


@dataclass(frozen=True)
class TokenTrace:
    """A token of the prompt; `loops[r]` is the view after loop r + 1."""

    token: int
    text: str
    loops: tuple[LoopView, ...]


@dataclass(frozen=True)
class Trace:
    """All tokens of one prompt, each with as many views as there were loops."""

    model: str
    loops: int
    tokens: tuple[TokenTrace, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)


class Tracing:
    """A trace of `tokens` under way, with the `top` likeliest tokens of each view: a loop at a time, for those who have
    other things to do in between."""

    def __init__(
        self, name: str, stack: LoopedStack, tokenizer: Tokenizer, tokens: Sequence[int], loops: int, top: int
    ) -> None:
        self.name, self.tokenizer, self.tokens, self.loops, self.top = name, tokenizer, tokens, loops, top
        self._passes = _passes(stack, tokens, loops)
        self._views: list[list[LoopView]] = []  # by loop, then by token

    @property
    def done(self) -> bool:
        return len(self._views) == self.loops

    def step(self) -> None:
        """One more loop of all tokens."""
        self._views.append(_views(self.tokenizer, next(self._passes), self.top))

    def result(self) -> Trace:
        """The trace, once it is done."""
        rows = zip(self.tokens, zip(*self._views, strict=True), strict=True)
        return Trace(self.name, self.loops, tuple(TokenTrace(t, _text(self.tokenizer, t), row) for t, row in rows))


@dataclass(frozen=True)
class _Pass:
    """A loop's end, [tokens] or [tokens, vocab_size]."""

    logits: Tensor
    distance: Tensor
    exited: Tensor | None


@torch.inference_mode()
def _passes(stack: LoopedStack, tokens: Sequence[int], loops: int) -> Iterator[_Pass]:
    positions = torch.arange(len(tokens))
    attend = WholeAttention(positions, 0, len(tokens) if stack.config.bidirectional_prompt else 0)
    state = stack.enter(stack.prelude(stack.embed(torch.tensor(list(tokens))), positions, attend), positions)
    stayed = torch.ones(len(tokens))
    for loop in range(loops):
        before, state = state, stack.core(state, positions, torch.full_like(positions, loop), attend)
        exited = None
        if stack.config.exit_gate:
            stayed = stayed * (1 - stack.exit_probability(state))
            exited = 1 - stayed
        logits = stack.head(stack.coda(stack.leave(state), positions, attend))
        yield _Pass(logits.float(), stack.distance(before, state), exited)


def _views(tokenizer: Tokenizer, passed: _Pass, top: int) -> list[LoopView]:
    """The view of each token."""
    logprobs = passed.logits.log_softmax(-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1).tolist()
    best = logprobs.topk(min(top, logprobs.shape[-1]))
    guesses = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    tops = [tuple(Guess(t, _text(tokenizer, t), p) for t, p in zip(*row, strict=True)) for row in guesses]
    exited = [None] * len(tops) if passed.exited is None else passed.exited.tolist()
    return [LoopView(*facts) for facts in zip(tops, entropy, passed.distance.tolist(), exited, strict=True)]


def _text(tokenizer: Tokenizer, token: int) -> str:
    """ "" for rows of the embedding that no token has."""
    return tokenizer.decode([token], skip_special=False) if token < tokenizer.vocab_size else ""
