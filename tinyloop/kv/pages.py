"""PagePool and PageTable: which pages are free, promised or held, and by whom. Integers only; no tensors.

A page is reference-counted: a prefix and the sequences that read it hold the same pages. A page that somebody else
also holds is never written; the writer takes a copy first.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """`num_pages` equal pages. `reserved` pages are promised to admitted sequences but not yet taken."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reserved = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that can still be promised."""
        return len(self._free) - self.reserved

    def reserve(self, count: int) -> bool:
        """Promise `count` pages, or change nothing and say no."""
        if count > self.available:
            return False
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Take a promise back."""
        assert 0 <= count <= self.reserved, f"{count} pages of {self.reserved} reserved"
        self.reserved -= count

    def take(self, count: int) -> list[int]:
        """Turn `count` promised pages into held ones."""
        self.unreserve(count)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to pages that are held already."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """Remove one holder; a page without holders is free again."""
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was given back twice"
            if self._references[page] == 0:
                self._free.append(page)

    def check(self, tables: Iterable["PageTable"]) -> None:
        """Assert that the accounts balance: every page is free, or held exactly as often as `tables` say."""
        held = [0] * self.num_pages
        promised = 0
        for table in tables:
            promised += table.reserved
            for page in table.held():
                held[page] += 1
        assert held == self._references, "pages are held by nobody, or more often than counted"
        assert sorted(self._free) == [page for page, count in enumerate(held) if count == 0], "the free list is wrong"
        assert promised == self.reserved, f"{self.reserved} pages are reserved, {promised} of them for somebody"
        assert 0 <= self.reserved <= self.free, "more pages are promised than there are"


class PageTable:
    """The pages of one sequence: `ids[row, block]` holds `page_size` tokens of the plane that owns the row.

    `reserved` pages of the pool are promised to it. Blocks below `first` were given back (cache_window), blocks below
    `adopted` came from a prefix, and `total` is how many blocks the sequence may reach.
    """

    def __init__(self, pool: PagePool, rows: int, page_size: int, *, total: int = 0, reserved: int = 0) -> None:
        self.pool = pool
        self.page_size = page_size
        self.total = total
        self.reserved = reserved
        self.first = self.blocks = self.adopted = 0
        self.ids: NDArray[np.int64] = np.zeros((rows, 8), np.int64)

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    def held(self) -> list[int]:
        """Every page the table holds."""
        pages: list[int] = self.ids[:, self.first : self.blocks].ravel().tolist()
        return pages

    def grow(self, tokens: int) -> None:
        """Hold pages for positions `[0, tokens)`, out of the reserve."""
        while self.blocks * self.page_size < tokens:
            self._append(np.asarray(self._take()))

    def adopt(self, pages: NDArray[np.int64], first: int = 0) -> None:
        """Start with the shared pages of a prefix: `pages` is [rows, blocks], blocks below `first` are gone."""
        assert self.blocks == 0, "only an empty table can adopt a prefix"
        self.pool.share(pages[:, first:].ravel().tolist())
        for block in range(pages.shape[1]):
            self._append(pages[:, block])
        self.first, self.adopted = first, self.blocks

    def copy_block(self, source: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Take a private block in place of `source` ([rows] pages of a prefix); returns pages to copy: from, to."""
        mine = self._take()
        self._append(np.asarray(mine))
        return source.tolist(), mine

    def drop_before(self, position: int) -> None:
        """Give back blocks that lie wholly below `position`, and be promised as many for what is still to come."""
        keep = min(max(position, 0) // self.page_size, self.blocks)
        if keep <= self.first:
            return
        self.pool.give(self.ids[:, self.first : keep].ravel().tolist())
        freed = max(0, keep - max(self.first, self.adopted)) * self.rows
        again = min(freed, (self.total - self.blocks) * self.rows - self.reserved)
        if again > 0 and self.pool.reserve(again):
            self.reserved += again
        self.first = keep

    def fork(self) -> "PageTable":
        """A second holder of the same pages, with nothing reserved."""
        twin = PageTable(self.pool, self.rows, self.page_size)
        twin.adopt(self.ids[:, : self.blocks], self.first)
        return twin

    def release(self) -> None:
        """Give everything back: pages and promises."""
        self.pool.give(self.held())
        self.pool.unreserve(self.reserved)
        self.reserved = self.first = self.blocks = 0

    def _take(self) -> list[int]:
        assert self.reserved >= self.rows, "a sequence outgrew its reserve"
        self.reserved -= self.rows
        return self.pool.take(self.rows)

    def _append(self, pages: NDArray[np.int64]) -> None:
        if self.blocks == self.ids.shape[1]:
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)], axis=1)
        self.ids[:, self.blocks] = pages
        self.blocks += 1
