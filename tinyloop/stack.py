"""LoopedStack: the model itself. Embed, prelude, one loop of the core, coda, head; each over packed rows.

It knows layers and equations. Which rows go where, at which loop, with which pages, is in the batch and in `attend`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyloop.config import ModelConfig, Section
from tinyloop.layers import Rope

if TYPE_CHECKING:
    from tinyloop.kernels import Linear
    from tinyloop.models.family import Family, Weights


class AttendAt(Protocol):
    """Attention at a layer (absolute index): see `layers.Attend`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor: ...


class LoopedStack:
    """The weights of one model. Rows are tokens; `h` is [rows, hidden_size]; `positions` and `loops` are [rows]."""

    def __init__(self, family: Family, config: ModelConfig, weights: Weights) -> None:
        self.family, self.config, self.dtype = family, config, weights.dtype
        self.int8 = weights.int8
        embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding = embedding
        self.layers = [family.layer(config, weights, f"model.layers.{i}") for i in range(config.layout.layers)]
        self.norm = weights.norm("model.norm", config)
        self.exit_gate = family.exit_gate(config, weights)
        self._head = weights.matrix(embedding) if config.tie_embeddings else self._own_head(weights)
        self._frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)

    def _own_head(self, weights: Weights) -> Linear:
        return weights.linear(self.config.hidden_size, {"lm_head": self.config.vocab_size})

    def embed(self, tokens: Tensor) -> Tensor:
        """[rows] token ids -> [rows, hidden_size]."""
        return F.embedding(tokens, self.embedding)

    def prelude(self, h: Tensor, positions: Tensor, attend: AttendAt) -> Tensor:
        return self._section("prelude", h, positions, attend)

    def core(self, h: Tensor, positions: Tensor, loops: Tensor, attend: AttendAt) -> Tensor:
        """One loop. `loops` says which loop, from 0, each row is running."""
        after = self._section("core", h, positions, attend)
        return self.family.after_loop(self, h, after, loops)

    def coda(self, h: Tensor, positions: Tensor, attend: AttendAt) -> Tensor:
        return self._section("coda", h, positions, attend)

    def head(self, h: Tensor) -> Tensor:
        """Logits [rows, vocab_size] in float32."""
        return self._head(h if self.family.norm_each_loop else self.norm(h)).float()

    def exit_probability(self, h: Tensor) -> Tensor:
        """The probability [rows] of leaving after the loop whose state is `h`, given that it was reached."""
        assert self.exit_gate is not None, "this family has no exit signal"
        return torch.sigmoid(self.exit_gate(h).float()).squeeze(-1)

    def _section(self, section: Section, h: Tensor, positions: Tensor, attend: AttendAt) -> Tensor:
        span = self.config.layout.span(section)
        rope = self._rope(positions) if span else None
        for index in span:
            assert rope is not None
            h = self.layers[index](h, rope, partial(attend, index))
        return h

    def _rope(self, positions: Tensor) -> Rope:
        angles = positions.float()[:, None, None] * self._frequencies
        return Rope(angles.cos(), angles.sin())
