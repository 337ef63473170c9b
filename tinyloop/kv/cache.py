"""PagedKV: the tensors behind the pages. Knows no sequences and no plans; a batch tells it which pages and slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinyloop import kernels
from tinyloop.config import ModelConfig

if TYPE_CHECKING:
    from tinyloop.batch import PackedBatch
    from tinyloop.kernels.program import Program
    from tinyloop.layers import Rope


@dataclass(frozen=True)
class PagedAttention:
    """Attention of a batch over the pages: `stack.AttendAt`, one layer at a time or for a whole program."""

    kv: PagedKV
    batch: PackedBatch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope, **more: Any) -> Tensor:
        return self.kv.attend(self.batch, layer, q, k, v, rope, **more)

    def run(self, program: Program, h: Tensor, rope: Rope) -> Tensor | None:
        """[rows, hidden_size] through the layers of a program, or None if this batch needs more than it knows."""
        kernel = kernels.program_kernel(h.dtype)
        if kernel is None or self.batch.reads.ahead is not None:
            return None
        return program.run(kernel, h, rope.cos, rope.sin, self.batch.slots, self.batch.reads, self.kv.k, self.kv.v)


class PagedKV:
    """Keys and values: `k[layer]`, `v[layer]` are [num_pages, page_size, kv_heads, head_dim].

    `layer` counts the layers inside a page. `states` [num_pages, page_size, state_size] lies beside the first page of
    each core plane: what the tokens' states were after that loop, from where a prefix can be deepened. Memory is
    zeroed: a masked key weighs nothing only if it is a number. Writing the zeros takes all of it from the system at
    once, so what is used does not grow with what is served.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device):
        self.config = config
        self.page_size = page_size
        shape = (config.layout.layers_per_page, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.states = torch.zeros((num_pages, page_size, config.state_size), dtype=dtype, device=device)

    @staticmethod
    def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page: keys, values and states."""
        elements = config.layout.layers_per_page * config.kv_elements + config.state_size
        return page_size * elements * dtype.itemsize

    def attend(
        self,
        batch: PackedBatch,
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
        """Keep the rows' keys and values, then attend over what their segments have in this plane.

        `layer` is the absolute index; all else is as in `layers.Attend`.
        """
        row, inner = self.config.layout.place(layer)
        keys, values = self.k[inner], self.v[inner]
        if first:
            assert batch.first is not None, "the model does not say that it reads the first plane"
            q, reads = kernels.rope(q, rope.cos, rope.sin), batch.first
        else:
            q, reads = kernels.rope_write(q, k, v, rope.cos, rope.sin, keys, values, batch.slots[row]), batch.reads
        return kernels.attention(q if scale is None else q * scale, keys, values, reads.within(window), row)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, for a writer that must not touch a shared one."""
        self.k[:, targets] = self.k[:, sources]
        self.v[:, targets] = self.v[:, sources]
        self.states[targets] = self.states[sources]

    def keep_states(self, slots: Tensor, h: Tensor) -> None:
        """`h` [rows, state_size] as the states after the loop whose plane has these flat slots."""
        self.states.view(-1, h.shape[1]).index_copy_(0, slots, h)

    def read_states(self, slots: Tensor) -> Tensor:
        """States [rows, state_size] at flat slots."""
        return self.states.view(-1, self.states.shape[2]).index_select(0, slots)

    def copy_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy single tokens between planes, all layers of a page at once. Flat slots, [tokens] each."""
        for cache in (self.k, self.v):
            flat = cache.view(cache.shape[0], -1, *cache.shape[3:])
            flat[:, targets] = flat[:, sources]
