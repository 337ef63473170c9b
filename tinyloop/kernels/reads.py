"""What the segments of a packed batch may read: their pages, and which of the keys there each row may look at.

Plain integers for a kernel that walks pages. For one that cannot, `groups` pads and masks segments into few calls.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Segments of equal length whose histories take about as many blocks: one attention call.

    `rows` are their rows in the batch, `shape` is (segments, rows of each), `pages` [page rows, segments, blocks], and
    `mask` is 0 where a row may look and -inf elsewhere: [segments, 1, shared * rows, keys], or [segments, 1, 1, keys]
    for single rows.
    """

    rows: Tensor | slice
    shape: tuple[int, int]
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Reads:
    """`spans` [segments, 6] and `pages` [page rows, blocks], both int64.

    A span is: its first row in the batch, its rows, the position of its first row, its window (0: all), the position of
    the first key in its first page, and where its pages begin among `pages`. A row at position p looks at the keys from
    p - window + 1, or from the first, to p; where `ahead` [segments] is set, also at those behind it in its segment.
    `shared` is how many query heads share a key head.
    """

    spans: Tensor
    pages: Tensor
    page_size: int
    shared: int
    dtype: torch.dtype
    ahead: Tensor | None = None
    _narrower: dict[int, "Reads"] = field(default_factory=dict, repr=False, compare=False)

    def within(self, window: int) -> "Reads":
        """The same for a layer whose rows see at most `window` keys back; 0 for all."""
        if not window:
            return self
        if window not in self._narrower:
            self._narrower[window] = self._narrow(window)
        return self._narrower[window]

    def _narrow(self, window: int) -> "Reads":
        spans = self.spans.clone()
        own, first = spans[:, 3], spans[:, 4].clone()
        spans[:, 3] = torch.where((own == 0) | (own > window), window, own)
        spans[:, 4] = torch.maximum(first, (spans[:, 2] - window + 1).clamp(min=0) // self.page_size * self.page_size)
        spans[:, 5] += (spans[:, 4] - first) // self.page_size
        return replace(self, spans=spans, _narrower={})

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Histories are padded to at most twice their length."""
        spans = self.spans.numpy()
        blocks = -(-(spans[:, 1] + spans[:, 2] - spans[:, 4]) // self.page_size)
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, (rows, count) in enumerate(zip(spans[:, 1].tolist(), blocks.tolist(), strict=True)):
            found[rows, (count - 1).bit_length()].append(index)
        ahead = np.zeros(len(spans), np.bool_) if self.ahead is None else self.ahead.numpy()
        return tuple(self._group(spans[group], blocks[group], ahead[group], len(spans)) for group in found.values())

    def _group(self, spans: NDArray[np.int64], blocks: NDArray[np.int64], ahead: NDArray[np.bool_], of: int) -> Group:
        most, count = int(blocks.max()), int(spans[0, 1])
        # Padded with the last page: what it holds is masked, but it must be numbers.
        which = spans[:, 5, None] + np.minimum(np.arange(most), blocks[:, None] - 1)
        rows = torch.from_numpy((spans[:, 0, None] + np.arange(count)).ravel())
        mask = torch.from_numpy(_mask(spans, most * self.page_size, ahead)).to(self.dtype)[:, None]
        mask = mask.repeat(1, 1, self.shared, 1) if count > 1 else mask  # a single row is broadcast to its heads
        pages = self.pages[:, torch.from_numpy(which)]
        return Group(slice(None) if len(spans) == of else rows, (len(spans), count), pages, mask)


def _mask(spans: NDArray[np.int64], keys: int, ahead: NDArray[np.bool_]) -> NDArray[np.float32]:
    """[segments, rows, keys] of segments with equally many rows."""
    positions = spans[:, 2, None] + np.arange(spans[0, 1])
    places = (spans[:, 4, None] + np.arange(keys))[:, None]
    back = positions[:, :, None] - places
    window = spans[:, 3, None, None]
    known = (back >= 0) | (ahead[:, None, None] & (places <= positions[:, -1:, None]))
    return np.where(known & ((window == 0) | (back < window)), np.float32(0), np.float32(-np.inf))
