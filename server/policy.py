"""Who may run together, whom age promotes, and which segments step. Pure: no asyncio, no engine, no torch, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakKeyDictionary

from tinyloop.sequence import Lease, Segment

if TYPE_CHECKING:
    from server.request import PreparedRequest
    from server.types import GenerationRequest

PROMOTED = 1 << 62  # the level of those whom age has put ahead of every priority


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


class Waiter(Protocol):
    level: int
    queued_at: float


Aged = TypeVar("Aged", bound=Waiter)


@dataclass
class Policy:
    """The rules of one server.

    `row_budget` bounds the rows of a step at which prompt chunks may still enter; what has started always goes on, so
    running streams keep their cadence. `min_boundary_rows`: what has finished its loops waits for so many rows to
    share the coda and head with, as long as more are on their way; None: as long as the waiting costs less than the
    weights that are read once instead of twice. `max_running` None: as many as the engine has room for.

    `aging`: a waiter is promoted when its response ratio, (waited + service) / service, reaches this, and at most every
    `promotion_every`th admission. A waiter of a higher priority than somebody who runs gets that one's place after
    `yield_after_s` seconds. Others pass a waiter that does not fit at most `most_passes` times.
    """

    mode: DispatchMode = DispatchMode.CONTINUOUS
    row_budget: int = 512
    min_boundary_rows: int | None = None
    max_running: int | None = None
    aging: float = 10.0
    promotion_every: int = 4
    yield_after_s: float = 0.5
    most_passes: int = 16
    boundary_in_steps: float = field(default=0.0, init=False)  # measured: core steps that a boundary costs
    _turns: WeakKeyDictionary[Lease, int] = field(default_factory=WeakKeyDictionary, init=False, repr=False)
    _ticks: Iterator[int] = field(default_factory=count, init=False, repr=False)
    _held: dict[Segment, int] = field(default_factory=dict, init=False, repr=False)  # steps waited at the boundary
    _since_promotion: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.mode = DispatchMode(self.mode)
        for name, least in (("row_budget", 1), ("min_boundary_rows", 1), ("max_running", 1), ("aging", 1),
                            ("promotion_every", 1), ("yield_after_s", 0), ("most_passes", 0)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    # Who enters

    @property
    def limit(self) -> float:
        """How many may run at once."""
        return 1 if self.mode is DispatchMode.SEQUENTIAL else self.max_running or math.inf

    def has_place(self, running: int, backlog: int) -> bool:
        """Whether one more may run beside so many, with so many prompt rows still to enter the core.

        A prompt that could not step yet is better off in the queue, where priority, fairness and age decide.
        """
        return not running or (running < self.limit and backlog < self.row_budget)

    def may_join(self, candidate: Candidate, running: Collection[Candidate]) -> bool:
        """Whether the candidate goes with those that run. An empty server takes anyone."""
        return not running or self.mode is not DispatchMode.HOMOGENEOUS or _may_share(candidate, next(iter(running)))

    @property
    def may_interrupt(self) -> bool:
        """Whether a higher priority may take a running request's place."""
        return self.mode in (DispatchMode.CONTINUOUS, DispatchMode.INTERLEAVED)

    def aged(self, heads: Iterable[Aged], now: float, service_s: Callable[[Aged], float | None]) -> Aged | None:
        """The waiter to promote: of those at the head of a level below the first, whose ratio is highest and enough."""
        first, *others = heads
        if first.level == PROMOTED or self._since_promotion < self.promotion_every - 1:
            return None
        ratios = [(_response_ratio(now - waiter.queued_at, service_s(waiter)), waiter) for waiter in others]
        ratio, oldest = max(ratios, key=lambda pair: pair[0], default=(0.0, None))
        return oldest if ratio >= self.aging else None

    def admitted(self, waiter: Waiter) -> None:
        """Somebody has entered."""
        self._since_promotion = 0 if waiter.level == PROMOTED else self._since_promotion + 1

    # What steps

    def choose_segments(self, ready: Sequence[Segment]) -> list[Segment]:
        """The segments of the next step, answers first; at least one if any is ready. May trim fresh prompt chunks.

        `ready`: oldest lease first, and by position inside a lease.
        """
        if self.mode is DispatchMode.INTERLEAVED:
            ready = self._one_lease(ready)
        held = self._held_at_boundary(ready)
        self._held = {s: self._held.get(s, 0) for s in held}
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
        self._held = {s: steps + 1 for s, steps in self._held.items()}
        if self.mode is DispatchMode.INTERLEAVED:
            for segment in segments:
                self._turns[segment.lease] = next(self._ticks)

    def _held_at_boundary(self, ready: Sequence[Segment]) -> set[Segment]:
        """Those that have finished their loops and wait for company. Only what is already in the core counts as on its
        way, and all of that arrives within one token's loops: nobody waits for a prompt that has not begun."""
        finished = [s for s in ready if _finished(s)]
        if not finished or not any(map(_makes_token, ready)):
            return set()
        return set() if self._enough(finished, len({s.lease for s in ready if not s.fresh})) else set(finished)

    def _enough(self, finished: Sequence[Segment], streams: int) -> bool:
        """Whether those who wait should go. Whoever waits wastes a share of each step's fixed cost; a boundary has its
        own fixed cost. To go once the first adds up to the second is never more than twice as bad as knowing the future
        (the ski rental rule: Karlin et al. 1988)."""
        if self.min_boundary_rows is not None:
            return sum(s.rows for s in finished) >= self.min_boundary_rows
        return sum(self._held.get(s, 0) + 1 for s in finished) >= self.boundary_in_steps * streams


def _response_ratio(waited_s: float, service_s: float | None) -> float:
    """1 for a newcomer; 0 while nothing is known of the service."""
    return (waited_s + service_s) / service_s if service_s else 0.0


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
