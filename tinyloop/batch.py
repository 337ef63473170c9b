"""PackedBatch: the plain arrays that one packed forward needs. Rows of all segments stand one behind the other.

Segments may be of different requests, different lengths and, in the core, at different loops: a row's loop only
decides which plane it writes and reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyloop.config import Layout, ModelConfig, Section
from tinyloop.kernels import Reads
from tinyloop.sequence import Segment


@dataclass(frozen=True)
class PackedBatch:
    """`positions`, `loops`: [rows]; `slots`: [page rows, rows], where each row keeps its KV; `reads`: how it looks.

    `first` is how it looks at the plane of the first loop, for a model that does.
    """

    positions: Tensor
    loops: Tensor
    slots: Tensor
    reads: Reads
    first: Reads | None = None

    @classmethod
    def build(
        cls, segments: Sequence[Segment], section: Section, config: ModelConfig, dtype: torch.dtype
    ) -> "PackedBatch":
        planes = [_plane(section, s.loop if section == "core" else 0, config.layout) for s in segments]
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        loops = np.repeat([s.loop for s in segments], [s.rows for s in segments])
        slots = np.concatenate([_slots(s, rows) for s, rows in zip(segments, planes, strict=True)], axis=1)
        reads = _reads(segments, planes, config, dtype)
        first = None
        if config.loop_window and section == "core":
            planes = [_plane(section, 0, config.layout)] * len(segments)
            first = _reads(segments, planes, config, dtype) if loops.any() else reads
        slots = np.ascontiguousarray(slots)
        return cls(torch.from_numpy(positions), torch.from_numpy(loops), torch.from_numpy(slots), reads, first)


def flat_slots(segment: Segment, rows: slice) -> NDArray[np.int64]:
    """Flat slots [page rows * tokens] of a segment's tokens in some rows of its page table."""
    return _slots(segment, rows).ravel()


def _plane(section: Section, loop: int, layout: Layout) -> slice:
    """The rows of a page table that belong to a plane."""
    first = layout.first_row(section, loop)
    return slice(first, first + layout.pages(section))


def _slots(segment: Segment, planes: slice) -> NDArray[np.int64]:
    table = segment.lease.pages
    block, offset = np.divmod(np.arange(segment.start, segment.end), table.page_size)
    slots: NDArray[np.int64] = table.ids[planes, block] * table.page_size + offset
    return slots


def _blocks(segment: Segment) -> tuple[int, int]:
    """The blocks `[first, last)` that the segment's rows may look at."""
    table, window = segment.lease.pages, segment.lease.plan.cache_window
    first = max(0, segment.start - window + 1) // table.page_size if window else 0
    return first, (segment.end - 1) // table.page_size + 1


def _reads(segments: Sequence[Segment], planes: Sequence[slice], config: ModelConfig, dtype: torch.dtype) -> Reads:
    page_size = segments[0].lease.pages.page_size
    spans, pages = [], []
    row = offset = 0
    for segment, rows in zip(segments, planes, strict=True):
        first, last = _blocks(segment)
        spans.append((row, segment.rows, segment.start, segment.lease.plan.cache_window, first * page_size, offset))
        pages.append(segment.lease.pages.ids[rows, first:last])
        row, offset = row + segment.rows, offset + last - first
    ids = np.ascontiguousarray(np.concatenate(pages, axis=1), dtype=np.int64)
    shared = config.num_heads // config.num_kv_heads
    return Reads(torch.tensor(spans), torch.from_numpy(ids), page_size, shared, dtype, _ahead(segments, config))


def _ahead(segments: Sequence[Segment], config: ModelConfig) -> Tensor | None:
    """Which segments are prompts that are read both ways, if any."""
    if not config.bidirectional_prompt:
        return None
    ahead = [s.rows > 1 and s.start < s.lease.prompt_tokens for s in segments]
    return torch.tensor(ahead) if any(ahead) else None
