"""SimEngine: the stepping engine's verbs over integers. It counts tokens, loops and pages; `StepCosts` says how long.

Pages are counted as in `tinyloop.leases`: blocks of tokens times the rows of the plan, taken as a sequence grows. What
is left out: prefixes (`cached_tokens` is always 0, and who yields reads everything again), cache windows, adaptive
exits, and answers that end before their full length. Knows no clock and no requests' callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from server.simulation.costs import Shape, StepCosts, shape_of
from server.types import GenerationRequest
from tinyloop.errors import ContextOverflow, NeverFits, RequestError
from tinyloop.plan import LoopPlan
from tinyloop.sequence import Lease, Segment, Span, StepReport, TokenEvent

SLACK = 16  # as in tinyloop.leases
MOST_KEPT = 1 << 16  # prepared requests; those of one shape are the same
_TEXT: Any = SimpleNamespace(text="")


@dataclass(frozen=True)
class SimInfo:
    default_loops: int
    max_loops: int
    min_loops: int = 1


@dataclass(frozen=True)
class SimUsage:
    num_pages: int
    available: int
    page_size: int


@dataclass(frozen=True)
class SimPrepared:
    req: GenerationRequest
    prompt: Sequence[int]
    plan: LoopPlan
    boundary: float

    @property
    def prompt_work(self) -> float:
        return len(self.prompt) * self.plan.prefill_loops

    @property
    def answer_work(self) -> float:
        return self.req.max_new_tokens * self.plan.loops


@dataclass(eq=False)
class SimLease(Lease):
    """`blocks`: held in every plane. `waited`: steps in a row that its answer token could have been in and was not."""

    plan_rows: int = 1
    blocks: int = 0
    waited: int = 0
    token: TokenEvent | None = None  # every token but the last; None while it holds nothing


class SimEngine:
    """One server's engine. `changes` counts comings and goings; `shape` is that of the last step."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs, self.model = costs, costs.model
        self.layout = costs.model.layout
        self.info = SimInfo(self.model.default_loops, self.model.max_loops)
        self.free = self.model.num_pages
        self.leases: dict[SimLease, None] = {}  # in order of admission
        self.changes = 0
        self.shape: Shape = shape_of([], self.layout, self.model.page_size)
        self._plans: dict[int, LoopPlan] = {}
        self._plan_rows: dict[int, int] = {}  # of each number of loops
        self._prepared: dict[tuple[int, int, int, int | None], SimPrepared] = {}
        self._boundary = (self.layout.prelude + self.layout.coda) / self.layout.core

    def usage(self) -> SimUsage:
        return SimUsage(self.model.num_pages, self.free, self.model.page_size)

    # Admission

    def prepare(self, req: GenerationRequest) -> SimPrepared:
        """Raises RequestError like the engine. A request that never fits gets the most loops that do, if it may."""
        key = len(req.prompt), req.max_new_tokens, req.loops or self.model.default_loops, req.min_loops
        known = self._prepared.get(key)
        if known is None:
            if len(self._prepared) >= MOST_KEPT:
                self._prepared.clear()
            known = self._prepared[key] = self._prepare(req, key[0] + key[1], key[2])
        return known

    def _prepare(self, req: GenerationRequest, tokens: int, loops: int) -> SimPrepared:
        if not 1 <= loops <= self.model.max_loops:
            raise RequestError("loops", f"loops must be between 1 and {self.model.max_loops}, got {loops}")
        if not req.prompt:
            raise RequestError("prompt", "prompt must hold at least one token")
        if tokens > self.model.max_context:
            raise ContextOverflow("max_new_tokens", f"{tokens} tokens exceed the context of {self.model.max_context}")
        while self._blocks(tokens) * self._rows(loops) > self.model.num_pages:
            if loops <= (req.min_loops or loops):
                raise NeverFits("max_new_tokens", f"{tokens} tokens at {loops} loops exceed all pages there are")
            loops -= 1
        return SimPrepared(req, cast("Sequence[int]", req.prompt), self._plan(loops), self._boundary)

    def at_depth(self, prepared: SimPrepared, loops: int) -> SimPrepared:
        return replace(prepared, plan=self._plan(loops))

    def cached_tokens(self, prepared: SimPrepared, pool: object) -> int:
        return 0

    def must_wait(self, prepared: SimPrepared, pool: object) -> bool:
        return False

    def admit(self, prepared: SimPrepared, pool: object) -> SimLease | None:
        tokens, answer = len(prepared.prompt), prepared.req.max_new_tokens
        if self.leases and not self._has_room(prepared.plan, tokens, answer):
            return None
        nothing: Any = None  # sampler and pages are the real engine's
        lease = SimLease(prepared.plan, [0] * tokens, tokens, answer, nothing, _TEXT, nothing)
        lease.plan_rows = self._rows(prepared.plan.loops)
        self._start(lease)
        return lease

    def resume(self, lease: SimLease) -> bool:
        left = lease.max_new_tokens - lease.answer_tokens
        if self.leases and not self._has_room(lease.plan, len(lease.tokens), left):
            return False
        self._start(lease)
        return True

    def _start(self, lease: SimLease) -> None:
        """All that is known is to be read; the last token of an answer goes on as it was."""
        tokens = len(lease.tokens)
        lease.known = tokens - (lease.answer_tokens > 0)
        lease.todo = [
            Span(start, end) for start, end in pairwise((0, lease.prompt_tokens, lease.known, tokens)) if start < end
        ]
        lease.token = TokenEvent(lease, 0, "", lease.plan.loops)
        self.leases[lease] = None
        self.changes += 1

    def suspend(self, lease: SimLease) -> None:
        self.release(lease)

    def release(self, lease: SimLease) -> None:
        if lease in self.leases:
            lease.segments.clear()
            lease.todo.clear()
            self.free += lease.blocks * lease.plan_rows
            lease.blocks, lease.token = 0, None
            del self.leases[lease]
            self.changes += 1

    def unpin_shortest(self) -> bool:
        return False

    def _plan(self, loops: int) -> LoopPlan:
        if loops not in self._plans:
            self._plans[loops] = LoopPlan(layout=self.layout, loops=loops, prefill_loops=loops)
            self._plan_rows[loops] = self._plans[loops].rows
        return self._plans[loops]

    def _rows(self, loops: int) -> int:
        return self._plan_rows[self._plan(loops).loops]

    # Room

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.model.page_size)

    def _has_room(self, plan: LoopPlan, tokens: int, answer: int) -> bool:
        rows = self._rows(plan.loops)
        slack = self._blocks(min(SLACK, answer)) * rows
        for one in self.leases:
            slack += self._blocks(min(SLACK, one.max_new_tokens - one.answer_tokens)) * one.plan_rows
        return self._blocks(tokens) * rows + slack <= self.free

    def shortage(self, segments: Sequence[Segment]) -> int:
        return max(0, self._growth(segments) - self.free)

    def _growth(self, segments: Sequence[Segment]) -> int:
        page_size, growth = self.model.page_size, 0
        for segment in segments:
            if segment.state is not None and segment.loop < segment.loops:
                continue
            lease = cast(SimLease, segment.lease)
            end = segment.start + segment.rows
            if segment.state is not None:
                if end != len(lease.tokens):
                    continue
                end += 1
            if end > lease.blocks * page_size:
                growth += (-(-end // page_size) - lease.blocks) * lease.plan_rows
        return growth

    def grow(self, lease: SimLease, end: int) -> None:
        """Hold pages for all positions before `end`."""
        if end > lease.blocks * self.model.page_size:
            blocks = self._blocks(end)
            self.free -= (blocks - lease.blocks) * lease.plan_rows
            lease.blocks = blocks
            assert self.free >= 0, "more pages were taken than there are"

    # Steps

    def ready(self) -> list[Segment]:
        offers: list[Segment] = []
        for lease in self.leases:
            offers += lease.segments
            if lease.todo:
                self._offer(lease, offers)
        return offers

    def _offer(self, lease: SimLease, offers: list[Segment]) -> None:
        """What may enter: the next chunk, and beside the last of a span the beginning of the span behind it. In a plane
        that all loops share one segment goes at a time, and after the prompt one token."""
        model, first, alone = self.model, not lease.segments, self.layout.one_plane
        if alone and not first:
            return
        for span in lease.todo:
            if not first and span.start >= lease.known:
                return
            whole = model.whole_prompt and span.start < lease.prompt_tokens
            most = span.end if whole else 1 if alone else model.max_chunk
            rows = min(span.end - span.start, most)
            offers.append(Segment(lease, span.start, rows, lease.loops_at(span.start), whole=whole))
            first = False
            if alone or rows < span.end - span.start:
                return

    async def step(self, segments: list[Segment]) -> StepReport:
        """For whoever drives it like a real engine, without its time."""
        return self.advance(segments)[0]

    def advance(self, segments: Sequence[Segment]) -> tuple[StepReport, float]:
        """What `step` does, and the seconds of the turn."""
        shape = self.shape = shape_of(segments, self.layout, self.model.page_size)
        events: list[TokenEvent] = []
        finished: list[Lease] = []
        without_coda = not self.layout.coda
        for segment in segments:
            if segment.state is None:
                self._enter(segment)
            elif segment.loop >= segment.loops and not self._leave(segment, events, finished):
                continue
            segment.loop += 1
            if without_coda and segment.loop >= segment.loops and segment.end < len(segment.lease.tokens):
                segment.lease.segments.remove(segment)  # nothing of the boundary is needed
        self._count_waits(segments)
        return self._report(shape, events, finished)

    def _report(self, shape: Shape, events: list[TokenEvent], finished: list[Lease]) -> tuple[StepReport, float]:
        layout, costs = self.layout, self.costs
        boundary_s = costs.boundary_seconds(shape)
        step_s = costs.core.seconds(shape.core) + boundary_s
        outside = shape.coda.rows * layout.coda + shape.prelude.rows * layout.prelude
        boundary_rows = outside / layout.core + shape.heads * self.model.head_loops
        leaving = shape.coda.rows or shape.heads
        report = StepReport(events, finished, shape.core.rows, step_s, boundary_rows, boundary_s, leaving)
        return report, step_s + costs.turn.seconds(shape)

    def _enter(self, segment: Segment) -> None:
        lease = cast(SimLease, segment.lease)
        span = lease.todo[0]
        assert span.start == segment.start, "a gap in the prompt"
        span.start = segment.end
        if span.start == span.end:
            lease.todo.pop(0)
        segment.state = self
        lease.segments.append(segment)
        self.grow(lease, segment.end)

    def _leave(self, segment: Segment, events: list[TokenEvent], finished: list[Lease]) -> bool:
        """Coda and head. Whether the segment goes on, as the token that it made."""
        lease = cast(SimLease, segment.lease)
        end, tokens = segment.start + segment.rows, lease.tokens
        if end < len(tokens):
            lease.segments.remove(segment)
            return False
        left = lease.max_new_tokens + lease.prompt_tokens - len(tokens)
        if left > 0:
            tokens.append(0)
        if left > 1:
            assert lease.token is not None
            events.append(lease.token)
            segment.start, segment.rows, segment.loop, segment.loops = end, 1, 0, lease.plan.loops
            segment.whole = False
            self.grow(lease, end + 1)
            return True
        if left == 1:
            events.append(TokenEvent(lease, 0, "", segment.loop, finish_reason="length"))
        lease.finish_reason = "length"
        lease.segments.remove(segment)
        finished.append(lease)
        return False

    def _count_waits(self, chosen: Sequence[Segment]) -> None:
        if len(chosen) < len(self.leases):
            for lease in self.leases:
                lease.waited += 1
        for segment in chosen:
            cast(SimLease, segment.lease).waited = 0
