"""WaitingQueue: who waits, in which order. Higher level first; inside a level the tenant that has been served least,
and for each tenant first come first served. With one tenant that is plain FIFO.

Fairness is by work and not by requests (virtual counters: Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). Knows no clock, no engine and no admission rules.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar

MOST_IDLE_TENANTS = 1024  # counters kept for tenants that have nothing in a level


class Waits(Protocol):
    """`level` orders the queue and is the request's priority until it is promoted."""

    level: int

    @property
    def tenant(self) -> str: ...


Waiter = TypeVar("Waiter", bound=Waits)


class _Level(Generic[Waiter]):
    """Waiters of one level in one line per tenant, and the work that each tenant has been served.

    A tenant that comes back goes on where it was, but no lower than the least served of those present: having been
    away is no credit.
    """

    def __init__(self, turns: Iterator[int]) -> None:
        # Plain dicts would be quadratic: finding a first key skips every hole that popping left behind.
        self.lines: dict[str, OrderedDict[Waiter, None]] = {}
        self.served: OrderedDict[str, float] = OrderedDict()
        self.present: Counter[str] = Counter()  # requests that wait or run
        self._order: list[tuple[float, int, str]] = []  # heap; a counter in here may be out of date, but never too high
        self._ordered: set[str] = set()  # tenants in that heap; some may have no line by now
        self._turns = turns

    def enter(self, tenant: str) -> None:
        if not self.present[tenant]:
            least = min((self.served[one] for one in self.present if one != tenant), default=0.0)
            self.served[tenant] = max(self.served.get(tenant, 0.0), least)
        self.present[tenant] += 1

    def leave(self, tenant: str) -> None:
        self.present[tenant] -= 1
        if not self.present[tenant]:
            del self.present[tenant]
            self.served.move_to_end(tenant)
            if len(self.served) > len(self.present) + MOST_IDLE_TENANTS:
                del self.served[next(one for one in self.served if one not in self.present)]
            if len(self._order) > 2 * len(self.lines) + MOST_IDLE_TENANTS:
                self._tidy()

    def _tidy(self) -> None:
        """Take out of the heap whoever left without ever having been first."""
        self._order = [entry for entry in self._order if entry[2] in self.lines]
        heapq.heapify(self._order)
        self._ordered = {tenant for _, _, tenant in self._order}

    def add(self, waiter: Waiter) -> None:
        tenant = waiter.tenant
        self.lines.setdefault(tenant, OrderedDict())[waiter] = None
        if tenant not in self._ordered:
            self._ordered.add(tenant)
            heapq.heappush(self._order, (self.served[tenant], next(self._turns), tenant))

    def remove(self, waiter: Waiter) -> bool:
        line = self.lines.get(waiter.tenant)
        if line is None or waiter not in line:
            return False
        del line[waiter]
        if not line:
            del self.lines[waiter.tenant]
        return True

    def first(self) -> Waiter | None:
        while self._order:
            counter, turn, tenant = self._order[0]
            line = self.lines.get(tenant)
            if line is None:
                heapq.heappop(self._order)
                self._ordered.remove(tenant)
            elif counter < self.served[tenant]:
                heapq.heapreplace(self._order, (self.served[tenant], turn, tenant))
            else:
                return next(iter(line))
        return None

    def __iter__(self) -> Iterator[Waiter]:
        """In turn, one of each tenant, those first who have been served least."""
        order = {tenant: turn for _, turn, tenant in self._order}
        tenants = sorted(self.lines, key=lambda tenant: (self.served[tenant], order[tenant]))
        lines = [iter(self.lines[tenant]) for tenant in tenants]
        while lines:
            going = []
            for line in lines:
                for waiter in line:
                    yield waiter
                    going.append(line)
                    break
            lines = going


class WaitingQueue(Generic[Waiter]):
    """Usage: `push`, `remove` when it starts or its caller goes, `serve` as work is done, `leave` at its end."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level[Waiter]] = {}
        self._order: list[int] = []  # levels in use, ascending
        self._size = 0
        self._turns = count()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiter]:
        for level in reversed(self._order):
            yield from self._levels[level]

    def push(self, waiter: Waiter) -> None:
        """A newcomer."""
        level = self._levels.get(waiter.level)
        if level is None:
            level = self._levels[waiter.level] = _Level(self._turns)
            insort(self._order, waiter.level)
        level.enter(waiter.tenant)
        level.add(waiter)
        self._size += 1

    def peek(self) -> Waiter | None:
        """The first of all, in constant time but for levels whose requests all run."""
        return next(filter(None, (self._levels[level].first() for level in reversed(self._order))), None)

    def heads(self) -> Iterator[Waiter]:
        """The first of each level, highest level first."""
        return filter(None, (self._levels[level].first() for level in reversed(self._order)))

    def remove(self, waiter: Waiter) -> bool:
        """Take a waiter out wherever it stands; False if it is not waiting. It is still present until it leaves."""
        level = self._levels.get(waiter.level)
        if level is None or not level.remove(waiter):
            return False
        self._size -= 1
        return True

    def promote(self, waiter: Waiter, level: int) -> None:
        """Move a waiter to another level."""
        self.remove(waiter)
        self.leave(waiter)
        waiter.level = level
        self.push(waiter)

    def serve(self, waiter: Waits, work: float) -> None:
        """So much work was done for a waiter's tenant."""
        level = self._levels.get(waiter.level)
        if level is not None and waiter.tenant in level.present:
            level.served[waiter.tenant] += work

    def leave(self, waiter: Waiter) -> None:
        """The request has ended, or moves to another level. To be called once for each `push`."""
        level = self._levels[waiter.level]
        level.leave(waiter.tenant)
        if not level.present:
            del self._levels[waiter.level]
            del self._order[bisect_left(self._order, waiter.level)]
