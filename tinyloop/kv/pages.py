"""PagePool and PageTable: which pages are free, who holds the others, and which could be taken back. Integers only.

A page is reference-counted: a prefix and the sequences that read it hold the same pages. What one holder has filled is
never written again while others hold it; whoever has to write there takes a copy first.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

NONE = -1  # a page that has not been taken yet


class OutOfPages(Exception):
    """There are not enough free pages. Callers make room first; reaching a user is a bug."""


class PagePool:
    """`num_pages` equal pages. `idle` counts those that only a cache holds: they can be had by evicting."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.idle = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._evictable = [0] * num_pages  # how many of the holders are caches that may be asked to let go

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that are free or can be made so."""
        return len(self._free) + self.idle

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages, or raise OutOfPages and change nothing."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are held already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self.idle -= self.is_idle(page)
            self._holders[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """Remove a holder; a page without holders is free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was given back twice"
            self.idle -= self.is_idle(page)
            self._holders[page] -= 1
            self.idle += self.is_idle(page)
            if not self._holders[page]:
                self._free.append(page)

    def offer(self, pages: Iterable[int], change: int = 1) -> None:
        """One of the holders is a cache that may be asked to let go (`change` 1), or no longer is (-1)."""
        for page in pages:
            self.idle -= self.is_idle(page)
            self._evictable[page] += change
            self.idle += self.is_idle(page)

    def is_idle(self, page: int) -> bool:
        """Whether nobody holds the page but caches that may be asked to let go."""
        return 0 < self._holders[page] == self._evictable[page]

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that the accounts balance: every page is free, or held exactly as often as `holders` say."""
        held = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                held[page] += 1
        assert held == self._holders, "pages are held by nobody, or more often than counted"
        assert sorted(self._free) == [page for page, count in enumerate(held) if not count], "the free list is wrong"
        assert self.idle == sum(map(self.is_idle, range(self.num_pages))), "the count of idle pages is wrong"


class PageTable:
    """The pages of one sequence: `ids[row, block]` holds `page_size` tokens of the plane that owns the row.

    A page that has not been taken yet is NONE. Blocks below `first` were given back (cache_window); those of `_full`
    have all of their pages, so that a token more in a block costs no look at them.
    """

    def __init__(self, pool: PagePool, rows: int, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.first = 0
        self._full = range(0)
        self.ids: NDArray[np.int64] = np.full((rows, 8), NONE)

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    def held(self) -> list[int]:
        """Every page the table holds."""
        pages: list[int] = self.ids[self.ids != NONE].tolist()
        return pages

    def missing(self, start: int, end: int) -> int:
        """How many pages must be taken before positions `[start, end)` can be written in every plane."""
        blocks = self._blocks(start, end)
        if self._has(blocks):
            return 0
        beyond: int = max(0, blocks.stop - max(blocks.start, self.ids.shape[1]))
        empty = np.count_nonzero(self.ids[:, blocks.start : blocks.stop] == NONE)
        return int(empty) + beyond * self.rows

    def fill(self, start: int, end: int) -> None:
        """Hold pages in every plane for positions `[start, end)`. Raises OutOfPages."""
        blocks = self._blocks(start, end)
        if self._has(blocks):
            return
        self._widen(blocks.stop)
        part = self.ids[:, blocks.start : blocks.stop]
        empty = part == NONE
        part[empty] = self.pool.take(int(empty.sum()))
        joined = self._full.stop >= blocks.start >= self._full.start
        self._full = range(self._full.start if joined else blocks.start, blocks.stop)

    def slots(self, start: int, end: int) -> NDArray[np.int64]:
        """Where positions `[start, end)` lie in the pages of each row, [rows, tokens]: page * page_size + offset."""
        block, offset = np.divmod(np.arange(start, end), self.page_size)
        found: NDArray[np.int64] = self.ids[:, block] * self.page_size + offset
        return found

    def adopt(self, block: int, rows: Iterable[int], pages: Iterable[int]) -> None:
        """Hold somebody's pages as well, in these rows of a block."""
        self._widen(block + 1)
        shared = list(pages)
        self.pool.share(shared)
        self.ids[list(rows), block] = shared

    def drop_before(self, position: int) -> None:
        """Give back blocks that lie wholly below `position`."""
        keep = max(position, 0) // self.page_size
        if keep > self.first:
            dropped = self.ids[:, self.first : keep]
            self.pool.give(dropped[dropped != NONE].tolist())
            dropped[:] = NONE
            self.first = keep
            self._full = range(max(self._full.start, keep), max(self._full.stop, keep))

    def release(self) -> None:
        """Give everything back."""
        self.pool.give(self.held())
        self.ids[:] = NONE
        self.first = 0
        self._full = range(0)

    def _has(self, blocks: range) -> bool:
        return self._full.start <= blocks.start and blocks.stop <= self._full.stop

    def _blocks(self, start: int, end: int) -> range:
        return range(start // self.page_size, -(-end // self.page_size))

    def _widen(self, blocks: int) -> None:
        if blocks > self.ids.shape[1]:
            more = np.full((self.rows, max(blocks, 2 * self.ids.shape[1])), NONE)
            more[:, : self.ids.shape[1]] = self.ids
            self.ids = more
