"""LoopedStack: the model itself. Embed, prelude, one loop of the core, coda, head; each over packed rows.

It knows layers and equations. Which rows go where, at which loop, with which pages, is in the batch and in `attend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyloop.config import ExitSignal, ModelConfig, Rotary
from tinyloop.kernels.program import Program, Recorder, Symbol, record
from tinyloop.layers import At, Rope

if TYPE_CHECKING:
    from tinyloop.models.family import Family, Weights

TINY = 1e-30  # a state may be all zeros


class AttendAt(Protocol):
    """Attention at a layer (absolute index): see `layers.Attend`."""

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
    ) -> Tensor: ...

    def run(self, program: Program, h: Tensor, rope: Rope) -> Tensor | None:
        """All layers of a program at once; None if it has to be one by one."""


class LoopedStack:
    """The weights of one model. Rows are tokens; `h` is [rows, hidden_size], `state` what the core carries, [rows,
    state_size]; `positions` and `loops` are [rows]."""

    def __init__(self, family: Family, config: ModelConfig, weights: Weights) -> None:
        self.family, self.config, self.dtype = family, config, weights.dtype
        self.int8 = weights.int8
        self.embedding = family.embedding(config, weights)
        self.layers = family.layers(config, weights)
        self.norm = family.norm(config, weights)
        self.recurrence = family.recurrence(config, weights, self.norm)
        self.exit_gate = family.exit_gate(config, weights)
        self._head = family.head(config, weights, self.embedding)
        self._frequencies = [frequencies(rotary, config.head_dim) for rotary in config.rotary]
        assert len(self.layers) == config.layout.layers
        self._programs: dict[Sequence[int], Program | None] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """[rows] token ids -> [rows, hidden_size]."""
        h = F.embedding(tokens, self.embedding)
        return h if self.config.embedding_scale == 1 else h * self.config.embedding_scale

    def prelude(self, h: Tensor, positions: Tensor, attend: AttendAt) -> Tensor:
        return self._run(h, self.config.layout.span("prelude"), self._at(positions), attend)

    def enter(self, h: Tensor, positions: Tensor) -> Tensor:
        """The state that the first loop gets."""
        return self.recurrence.enter(h, positions)

    def core(self, state: Tensor, positions: Tensor, loops: Tensor, attend: AttendAt) -> Tensor:
        """One loop. `loops` says which loop, from 0, each row is running."""
        at, span = self._at(positions, loops), self.config.layout.span("core")

        def run(h: Tensor, first: int = 0, last: int | None = None) -> Tensor:
            return self._run(h, span[first:last], at, attend)

        return self.recurrence.loop(state, loops, run)

    def leave(self, state: Tensor) -> Tensor:
        """What coda and head get."""
        return self.recurrence.leave(state)

    def coda(self, h: Tensor, positions: Tensor, attend: AttendAt) -> Tensor:
        return self._run(h, self.config.layout.span("coda"), self._at(positions), attend)

    def head(self, h: Tensor) -> Tensor:
        """Logits [rows, vocab_size]."""
        return self._head(h if self.config.norm_each_loop else self.norm(h))

    def exit_probability(self, state: Tensor) -> Tensor:
        """The probability [rows] of leaving after the loop that left `state`, given that it was reached."""
        assert self.exit_gate is not None, "this family has no exit gate"
        return torch.sigmoid(self.exit_gate(state).float()).squeeze(-1)

    def distance(self, before: Tensor, after: Tensor) -> Tensor:
        """How far [rows] a loop moved the state: `|h_r - h_(r-1)| / |h_r|` (Geiping et al. 2025)."""
        old, new = (self.recurrence.latent(state).float() for state in (before, after))
        moved, size = ((x * x).sum(-1).sqrt() for x in (new - old, new))
        return moved / size.clamp_min(TINY)

    def exit_signal(self, signal: ExitSignal, before: Tensor, after: Tensor) -> Tensor:
        """The signal [rows] after a loop that made `after` of `before`."""
        return self.exit_probability(after) if signal == "gate" else self.distance(before, after)

    def _run(self, h: Tensor, layers: Sequence[int], at: At, attend: AttendAt) -> Tensor:
        if layers and (program := self._program(layers)):
            done = attend.run(program, h, at.ropes[0])
            if done is not None:
                return done
        for index in layers:
            h = self.layers[index](h, at, partial(attend, index))
        return h

    def _program(self, layers: Sequence[int]) -> Program | None:
        """These layers in one native call, if they are nothing but kernels."""
        if layers not in self._programs:
            self._programs[layers] = self._record(layers)
        return self._programs[layers]

    def _record(self, layers: Sequence[int]) -> Program | None:
        nothing = torch.empty(0)
        ropes = tuple(Rope(nothing, nothing) for _ in self._frequencies)
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads

        def run(h: Tensor, recorder: Recorder) -> Tensor:
            loops = cast(Tensor, Symbol(recorder, 1))  # a layer that asks for the loop is not the same in each
            for index in layers:
                attend = partial(recorder.attend, ropes[0], *self.config.layout.place(index), heads, kv_heads)
                h = self.layers[index](h, At(ropes, loops), attend)
            return h

        return record(self.config.hidden_size, run)

    def _at(self, positions: Tensor, loops: Tensor | None = None) -> At:
        angles = [positions.float()[:, None, None] * table for table in self._frequencies]
        ropes = tuple(Rope(angle.cos(), angle.sin()) for angle in angles)
        return At(ropes, torch.zeros_like(positions) if loops is None else loops)


def frequencies(rotary: Rotary, head_dim: int) -> Tensor:
    """Radians per token of each pair of channels, [head_dim / 2] (Su et al. 2021; stretched: Llama 3)."""
    plain = rotary.theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    if rotary.stretch:
        return plain / torch.tensor(rotary.stretch)
    if rotary.factor == 1:
        return plain
    waves = rotary.context * plain / (2 * math.pi)  # how many fit into the original context
    kept = ((waves - rotary.low) / (rotary.high - rotary.low)).clamp(0, 1)
    return plain * ((1 - kept) / rotary.factor + kept)
