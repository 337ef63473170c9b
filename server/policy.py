"""Who goes first, who may run together, and which segments step. Pure: no asyncio, no engine, no torch, no clock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from tinyloop.sequence import Lease, Segment

if TYPE_CHECKING:
    from server.request import PreparedRequest
    from server.types import GenerationRequest


class Prioritised(Protocol):
    priority: int


Waiter = TypeVar("Waiter", bound=Prioritised)


class WaitingQueue(Generic[Waiter]):
    """Higher priority first, first come first served inside a level. Removal from the middle is O(1)."""

    def __init__(self) -> None:
        # A plain dict would be quadratic here: finding its first key skips every hole that popping left behind.
        self._levels: dict[int, OrderedDict[Waiter, None]] = {}
        self._order: list[int] = []  # the priorities in use, ascending
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiter]:
        for priority in reversed(self._order):
            yield from self._levels[priority]

    def push(self, waiter: Waiter) -> None:
        level = self._levels.get(waiter.priority)
        if level is None:
            level = self._levels[waiter.priority] = OrderedDict()
            insort(self._order, waiter.priority)
        level[waiter] = None
        self._size += 1

    def push_front(self, waiter: Waiter) -> None:
        """Ahead of everybody in its level."""
        self.push(waiter)
        self._levels[waiter.priority].move_to_end(waiter, last=False)

    def peek(self) -> Waiter | None:
        return next(iter(self), None)

    def remove(self, waiter: Waiter) -> bool:
        """Take a waiter out wherever it stands; False if it is not waiting."""
        level = self._levels.get(waiter.priority)
        if level is None or waiter not in level:
            return False
        del level[waiter]
        self._size -= 1
        if not level:
            del self._levels[waiter.priority]
            del self._order[bisect_left(self._order, waiter.priority)]
        return True


class DispatchMode(StrEnum):
    """The seed's ladder. Every mode can be measured against the others."""

    SEQUENTIAL = "sequential"  # one request at a time
    HOMOGENEOUS = "homogeneous"  # several requests of one plan
    INTERLEAVED = "interleaved"  # several requests, one loop of one of them per step
    CONTINUOUS = "continuous"  # everything packed, mixed depths


class Candidate(Protocol):
    """What admission looks at in a request."""

    req: GenerationRequest
    prepared: PreparedRequest | None


@dataclass
class Policy:
    """The rules of one server.

    `row_budget` bounds the rows of a step at which prompt chunks may still enter; what has started always goes on, so
    running streams keep their cadence. `min_boundary_rows`: an answer token that has finished its loops waits for so
    many rows to share the coda and head with, as long as more are on their way. `max_running` None: as many as the
    engine has room for.
    """

    mode: DispatchMode = DispatchMode.CONTINUOUS
    row_budget: int = 512
    min_boundary_rows: int = 1
    max_running: int | None = None
    _turns: WeakKeyDictionary[Lease, int] = field(default_factory=WeakKeyDictionary, init=False, repr=False)
    _ticks: Iterator[int] = field(default_factory=count, init=False, repr=False)

    def __post_init__(self) -> None:
        self.mode = DispatchMode(self.mode)
        for name in ("row_budget", "min_boundary_rows", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def may_admit(self, candidate: Candidate, running: Collection[Candidate]) -> bool:
        """Whether the candidate may join those that run. An empty server takes anyone."""
        if not running:
            return True
        if self.mode is DispatchMode.SEQUENTIAL or len(running) >= (self.max_running or len(running) + 1):
            return False
        return self.mode is not DispatchMode.HOMOGENEOUS or _may_share(candidate, next(iter(running)))

    def choose_segments(self, ready: Sequence[Segment]) -> list[Segment]:
        """The segments of the next step, answers first; at least one if any is ready. May trim fresh prompt chunks.

        `ready`: oldest lease first, and by position inside a lease.
        """
        if self.mode is DispatchMode.INTERLEAVED:
            ready = self._one_lease(ready)
        held = self._held_at_boundary(ready)
        chosen = _pack([s for s in ready if s not in held], self.row_budget)
        assert chosen or not ready, "a step must not be empty while something is ready"
        return chosen

    def _one_lease(self, ready: Sequence[Segment]) -> list[Segment]:
        """Round robin: whose turn is longest ago. A newcomer joins at the end, or newcomers could starve others."""
        leases = dict.fromkeys(s.lease for s in ready)
        for lease in leases:
            self._turns.setdefault(lease, next(self._ticks))
        turn = min(leases, key=self._turns.__getitem__, default=None)
        return [s for s in ready if s.lease is turn]

    def stepped(self, segments: Sequence[Segment]) -> None:
        """These were stepped. Choosing alone does not count as a turn: the choice may be made again."""
        for segment in segments:
            self._turns[segment.lease] = next(self._ticks)

    def _held_at_boundary(self, ready: Sequence[Segment]) -> set[Segment]:
        """Answer tokens that wait for company. Only what is already in the core counts as on its way, and all of that
        arrives within one token's loops: no stream waits for a prompt that has not begun."""
        finished = [s for s in ready if _finished(s)]
        if sum(s.rows for s in finished) >= self.min_boundary_rows or not any(map(_makes_token, ready)):
            return set()
        return {s for s in finished if not s.is_prompt}


def _may_share(candidate: Candidate, other: Candidate) -> bool:
    assert candidate.prepared is not None
    assert other.prepared is not None
    modes = {candidate.req.mode, other.req.mode}
    return modes == {"generate"} and candidate.prepared.plan == other.prepared.plan


def _finished(segment: Segment) -> bool:
    return not segment.fresh and segment.at_boundary


def _makes_token(segment: Segment) -> bool:
    """In the core, and due to bring a row to the head when it leaves."""
    return not segment.at_boundary and segment.end >= segment.lease.known


def core_rows(segment: Segment) -> int:
    """Rows that a segment puts into the core of a step. One that has finished leaves; the token after it takes 1."""
    return 1 if _finished(segment) else segment.rows


def _pack(ready: Sequence[Segment], budget: int) -> list[Segment]:
    """Everything that has started, then fresh prompt chunks while the budget lasts.

    Trimming uses the budget up, so nothing can follow a trimmed chunk and leave a gap in its sequence.
    """
    chosen: dict[Segment, None] = {}
    rows = 0
    for segment in sorted(ready, key=_rank):
        entering, room = segment.fresh and segment.is_prompt, budget - rows
        if (entering and room <= 0) or not _may_follow(segment, chosen):
            continue
        if entering:
            segment.trim(room)
        chosen[segment] = None
        rows += core_rows(segment)
    return list(chosen)


def _rank(segment: Segment) -> int:
    """Answers, then prompts under way, then prompts that could enter. Sorting is stable: age decides the rest."""
    return 0 if not segment.is_prompt else 1 if not segment.fresh else 2


def _may_follow(segment: Segment, chosen: Collection[Segment]) -> bool:
    """Plane r of a token reads plane r of every token before it, so those must have run loop r, or run it with it."""
    earlier = (s for s in segment.lease.segments if s.start < segment.start)
    return all(s.loop > segment.loop or _finished(s) or (s in chosen and s.loop == segment.loop) for s in earlier)
