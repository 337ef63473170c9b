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
        rows, starts = np.array([s.rows for s in segments]), np.array([s.start for s in segments])
        positions = np.repeat(starts - _before(rows), rows) + np.arange(rows.sum())
        loops = np.repeat([s.loop for s in segments], rows)
        slots = np.concatenate([_slots(s, plane) for s, plane in zip(segments, planes, strict=True)], axis=1)
        reads = _reads(segments, planes, config, dtype)
        first = None
        if config.loop_window and section == "core":
            planes = [_plane(section, 0, config.layout)] * len(segments)
            first = _reads(segments, planes, config, dtype) if loops.any() else reads
        at, loop, kept = (torch.from_numpy(array) for array in (positions, loops, slots))
        return cls(at, loop, kept, reads, first)


def flat_slots(segment: Segment, rows: slice) -> NDArray[np.int64]:
    """Flat slots [page rows * tokens] of a segment's tokens in some rows of its page table."""
    return _slots(segment, rows).ravel()


def _plane(section: Section, loop: int, layout: Layout) -> slice:
    """The rows of a page table that belong to a plane."""
    first = layout.first_row(section, loop)
    return slice(first, first + layout.pages(section))


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many there are of all before each."""
    return np.cumsum(counts) - counts


def _slots(segment: Segment, rows: slice) -> NDArray[np.int64]:
    """[rows, tokens]. Where a segment's tokens lie stays, so it is found once for all planes and loops."""
    if segment.slots is None:
        segment.slots = segment.lease.pages.slots(segment.start, segment.end)
    slots: NDArray[np.int64] = segment.slots[rows]
    return slots


def _reads(segments: Sequence[Segment], planes: Sequence[slice], config: ModelConfig, dtype: torch.dtype) -> Reads:
    page_size = segments[0].lease.pages.page_size
    seen = [(s.rows, s.start, s.lease.plan.cache_window) for s in segments]
    rows, starts, windows = np.array(seen).T
    first = np.where(windows > 0, np.maximum(starts - windows + 1, 0) // page_size, 0)  # blocks that they may look at
    last = (starts + rows - 1) // page_size + 1
    spans = np.stack([_before(rows), rows, starts, windows, first * page_size, _before(last - first)], axis=1)
    blocks = zip(segments, planes, first.tolist(), last.tolist(), strict=True)
    pages = np.concatenate([s.lease.pages.ids[plane, begin:end] for s, plane, begin, end in blocks], axis=1)
    shared = config.num_heads // config.num_kv_heads
    return Reads(torch.from_numpy(spans), torch.from_numpy(pages), page_size, shared, dtype, _ahead(segments, config))


def _ahead(segments: Sequence[Segment], config: ModelConfig) -> Tensor | None:
    """Which segments are prompts that are read both ways, if any."""
    if not config.bidirectional_prompt:
        return None
    ahead = [s.rows > 1 and s.start < s.lease.prompt_tokens for s in segments]
    return torch.tensor(ahead) if any(ahead) else None
