"""What a checkpoint is and what it will take, from its config.json alone: no weight is read.

Weights are counted by building the model out of tensors that have a shape and no memory, so whatever a family keeps,
and how, is counted as it will be.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyloop.config import ModelConfig, prefix_serves_every_depth
from tinyloop.kernels import Linear
from tinyloop.kv.cache import PagedKV
from tinyloop.model import default_kv_memory
from tinyloop.models.family import Family, Weights
from tinyloop.models.registry import family_of
from tinyloop.runner import PAGE_SIZE
from tinyloop.stack import LoopedStack

BLOCK = 64  # a matrix whose sides are multiples of it is kept as any other of its kind


@dataclass(frozen=True)
class Inspection:
    """`dtype` is what is computed in; with `int8` matrices are kept in 8 bits. Memory in bytes."""

    config: ModelConfig
    dtype: torch.dtype
    int8: bool
    weight_bytes: int
    kv_memory: int

    def kv_bytes(self, loops: int) -> int:
        """What one token keeps at `loops`: keys, values, and the states that a prefix can be deepened from."""
        return self.config.layout.rows(loops) * PagedKV.page_bytes(self.config, 1, self.dtype)

    @property
    def kv_pool_bytes(self) -> int:
        """The budget, in whole pages."""
        page = PagedKV.page_bytes(self.config, PAGE_SIZE, self.dtype)
        return max(1, self.kv_memory // page) * page

    @property
    def memory(self) -> int:
        """Weights and the whole KV budget. An idle process with torch comes on top of it, and what a step computes."""
        return self.weight_bytes + self.kv_pool_bytes


def inspect(raw: dict[str, Any], dtype: torch.dtype, *, int8: bool = False, kv_memory: int | None = None) -> Inspection:
    """Read a config.json. Raises CheckpointError where loading would."""
    family = family_of(raw)
    config = family.config(raw)
    budget = default_kv_memory(config, dtype) if kv_memory is None else kv_memory
    return Inspection(config, dtype, int8, weight_bytes(family, config, dtype, int8), budget)


def weight_bytes(family: Family, config: ModelConfig, dtype: torch.dtype, int8: bool) -> int:
    """Bytes that the weights take once they are loaded."""
    shapes = _Shapes(family.telling(config))
    stack = LoopedStack(family, config, Weights(shapes, dtype, torch.device("meta"), int8))
    total = stack_bytes(stack)
    if config.tie_embeddings and not int8 and _is_reordered(dtype):
        total += stack.embedding.nbytes  # rows to look up, and the same reordered to multiply with
    return total


def stack_bytes(stack: LoopedStack) -> int:
    """Bytes of all tensors of a stack; one that several hold counts once."""
    parts = (stack.embedding, stack.layers, stack.norm, stack.recurrence, stack.exit_gate, stack._head)
    found = {id(tensor): tensor.numel() * tensor.element_size() for tensor in _tensors(parts, set())}
    return sum(found.values())


def prefix_rule(config: ModelConfig) -> str:
    """Which depths a kept prefix serves, in words."""
    if config.bidirectional_prompt:
        return "none is kept: prompt tokens look ahead, so a prompt runs as a whole"
    if config.layout.one_plane:
        return "none is kept: all loops share one plane, so a prompt runs as a whole"
    if not prefix_serves_every_depth(config):
        return "serves requests of its own loops only"
    if config.max_loops == 1:
        return "serves every request"
    rule = "one held to R loops serves every request of at most R, and is deepened for more"
    return rule + ("; the coda is rebuilt for each depth" if config.layout.coda else "")


@dataclass(frozen=True)
class _Shapes:
    """A checkpoint of tensors without memory. Who asks is told only of those in `telling`."""

    telling: frozenset[str]

    def has(self, name: str) -> bool:
        return name in self.telling

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device="meta")


def _is_reordered(dtype: torch.dtype) -> bool:
    """Whether torch reorders a matrix of this type, which it does not do without memory."""
    return Linear(torch.zeros(BLOCK, BLOCK, dtype=dtype)).reordered


def _tensors(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that is reached from `thing` through containers, fields and bound arguments."""
    if isinstance(thing, Tensor):
        yield thing
        return
    if thing is None or isinstance(thing, str | int | float | type) or id(thing) in seen:
        return
    seen.add(id(thing))
    for part in _parts(thing):
        yield from _tensors(part, seen)


def _parts(thing: object) -> list[object]:
    if isinstance(thing, list | tuple):
        return list(thing)
    if isinstance(thing, partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    return list(vars(thing).values()) if hasattr(thing, "__dict__") else []
