"""PackedBatch: the plain arrays that one packed forward needs. Rows of all segments stand one behind the other.

Segments may be of different requests, different lengths and, in the core, at different loops: a row's loop only
decides which plane it writes and reads.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinyloop.config import Layout, ModelConfig, Section
from tinyloop.sequence import Segment


@dataclass(frozen=True)
class Read:
    """Segments of equal length whose histories take about as many blocks: one attention call.

    `rows` are their rows in the batch, `shape` is (segments, rows of each), `pages` [page rows, segments, blocks], and
    `mask` is 0 where a row may look and -inf elsewhere, shaped as `kernels.attention` takes it.
    """

    rows: Tensor | slice
    shape: tuple[int, int]
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """`positions`, `loops`: [rows]; `slots`: [page rows, rows], where each row keeps its KV; `reads`: how it looks."""

    positions: Tensor
    loops: Tensor
    slots: Tensor
    reads: tuple[Read, ...]

    @classmethod
    def build(
        cls, segments: Sequence[Segment], section: Section, config: ModelConfig, dtype: torch.dtype
    ) -> "PackedBatch":
        planes = [_planes(segment, section, config.layout) for segment in segments]
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        loops = np.repeat([s.loop for s in segments], [s.rows for s in segments])
        slots = np.concatenate([_slots(s, rows) for s, rows in zip(segments, planes, strict=True)], axis=1)
        shared = config.num_heads // config.num_kv_heads
        reads = tuple(_read(group, segments, planes, shared, dtype) for group in _groups(segments))
        return cls(torch.from_numpy(positions), torch.from_numpy(loops), torch.from_numpy(slots), reads)


def flat_slots(segment: Segment, rows: slice) -> NDArray[np.int64]:
    """Flat slots [page rows * tokens] of a segment's tokens in some rows of its page table."""
    return _slots(segment, rows).ravel()


def _planes(segment: Segment, section: Section, layout: Layout) -> slice:
    """The rows of the segment's page table that belong to the plane it is in."""
    first = layout.first_row(section, segment.loop if section == "core" else 0)
    return slice(first, first + layout.pages(section))


def _slots(segment: Segment, planes: slice) -> NDArray[np.int64]:
    table = segment.lease.pages
    block, offset = np.divmod(np.arange(segment.start, segment.end), table.page_size)
    slots: NDArray[np.int64] = table.ids[planes, block] * table.page_size + offset
    return slots


def _span(segment: Segment) -> tuple[int, int]:
    """The blocks `[first, last)` that the segment's rows may look at."""
    table, window = segment.lease.pages, segment.lease.plan.cache_window
    first = max(0, segment.start - window + 1) // table.page_size if window else 0
    return first, (segment.end - 1) // table.page_size + 1


def _groups(segments: Sequence[Segment]) -> list[list[int]]:
    """Indices of segments that share an attention call. Histories are padded to at most twice their length."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, segment in enumerate(segments):
        first, last = _span(segment)
        groups[segment.rows, (last - first - 1).bit_length()].append(index)
    return list(groups.values())


def _read(
    group: Sequence[int], segments: Sequence[Segment], planes: Sequence[slice], shared: int, dtype: torch.dtype
) -> Read:
    spans = [_span(segments[i]) for i in group]
    blocks = max(last - first for first, last in spans)
    pages = [_pages(segments[i], planes[i], span, blocks) for i, span in zip(group, spans, strict=True)]
    masks = [_mask(segments[i], span[0], blocks) for i, span in zip(group, spans, strict=True)]
    rows = slice(None) if len(group) == len(segments) else _rows(group, segments)
    shape = (len(group), segments[group[0]].rows)
    mask = torch.from_numpy(np.stack(masks)).to(dtype)[:, None]
    mask = mask.repeat(1, 1, shared, 1) if shape[1] > 1 else mask  # a single row is broadcast to its heads
    return Read(rows, shape, torch.from_numpy(np.stack(pages, axis=1)), mask)


def _rows(group: Sequence[int], segments: Sequence[Segment]) -> Tensor:
    starts = np.cumsum([0, *(s.rows for s in segments)])
    return torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i + 1]) for i in group]))


def _pages(segment: Segment, planes: slice, span: tuple[int, int], blocks: int) -> NDArray[np.int64]:
    """[page rows, blocks], padded with the last page: what it holds is masked, but it must be numbers."""
    pages = segment.lease.pages.ids[planes, span[0] : span[1]]
    return np.pad(pages, ((0, 0), (0, blocks - pages.shape[1])), mode="edge")


def _mask(segment: Segment, first_block: int, blocks: int) -> NDArray[np.float32]:
    page_size, window = segment.lease.pages.page_size, segment.lease.plan.cache_window
    keys = np.arange(first_block * page_size, (first_block + blocks) * page_size)
    back = np.arange(segment.start, segment.end)[:, None] - keys
    seen = (back >= 0) & (back < window) if window else back >= 0
    return np.where(seen, np.float32(0), np.float32(-np.inf))
