"""Engines without a model, and a clock that only moves when told. No torch, no threads, no real time."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

from server.engine import KVUsage
from server.types import GenerationChunk, GenerationRequest, GenerationResult
from tinyloop.errors import NeverFits, RequestError
from tinyloop.sequence import Lease, Segment, Span, StepReport, TokenEvent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


async def settle() -> None:
    """Let everything happen that can happen without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)


class GeneratingEngine:
    """The seed's engine. A call waits for `gate`, takes `seconds`, then gives `tokens` or the next of `errors`."""

    def __init__(self, clock: Clock | None = None, tokens: int = 3, seconds: float = 1.0) -> None:
        self.clock, self.tokens, self.seconds = clock or Clock(), tokens, seconds
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[GenerationRequest] = []
        self.pooled: list[GenerationRequest] = []
        self.errors: deque[BaseException] = deque()

    async def generate(self, req: GenerationRequest) -> GenerationResult:
        self.calls.append(req)
        await self.gate.wait()
        self.clock.advance(self.seconds)
        if self.errors:
            raise self.errors.popleft()
        return GenerationResult(tuple(range(self.tokens)), "x" * self.tokens, prompt_tokens=len(req.prompt))

    async def generate_stream(self, req: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self.calls.append(req)
        for token in range(self.tokens):
            await asyncio.sleep(0)
            await self.gate.wait()
            self.clock.advance(self.seconds)
            yield GenerationChunk(token, "x")
        if self.errors:
            raise self.errors.popleft()

    async def generate_with_pool(self, pool: object, req: GenerationRequest) -> GenerationResult:
        self.pooled.append(req)
        return await self.generate(req)


@dataclass(frozen=True)
class Plan:
    loops: int
    prefill_loops: int
    cache_window: int = 0
    exit_threshold: float | None = None


@dataclass(frozen=True)
class Prepared:
    req: GenerationRequest
    prompt: tuple[int, ...]
    plan: Plan
    pages: int
    boundary: float = 0.0

    @property
    def prompt_work(self) -> int:
        return len(self.prompt) * self.plan.prefill_loops

    @property
    def answer_work(self) -> int:
        return self.req.max_new_tokens * self.plan.loops


class SteppingEngine:
    """Counts instead of computing: the answer to a prompt is its last token + 1, + 2, ... Checks what it is asked."""

    info = SimpleNamespace(default_loops=2, max_loops=8)

    def __init__(self, clock: Clock | None = None, num_pages: int = 64, page_size: int = 4, chunk: int = 8) -> None:
        self.clock, self.num_pages, self.page_size, self.chunk = clock or Clock(), num_pages, page_size, chunk
        self.gate = asyncio.Event()  # a step waits for it, so that tests can act in the middle of one
        self.gate.set()
        self.entered = asyncio.Event()  # set while a step runs
        self.leases: dict[Lease, int] = {}  # pages held
        self.steps: list[list[Segment]] = []
        self.errors: deque[BaseException | None] = deque()  # one per step, None for success
        self.stepping: set[Lease] = set()
        self.shortages: deque[int] = deque()  # one per choice of segments, 0 when empty
        self.suspended: dict[Lease, int] = {}
        self.awaited: set[tuple[int, ...]] = set()  # prompts that had better wait

    def prepare(self, req: GenerationRequest) -> Prepared:
        prompt = tuple(map(ord, req.prompt)) if isinstance(req.prompt, str) else tuple(req.prompt)
        if not prompt:
            raise RequestError("prompt", "prompt must hold at least one token")
        loops = req.loops or 2
        plan = Plan(loops, req.prefill_loops or loops, req.cache_window, req.exit_threshold)
        pages = -(-(len(prompt) + req.max_new_tokens) // self.page_size)
        if pages > self.num_pages:
            raise NeverFits("max_new_tokens", f"{pages} pages")
        return Prepared(req, prompt, plan, pages)

    def at_depth(self, prepared: Prepared, loops: int) -> Prepared:
        return replace(prepared, plan=replace(prepared.plan, loops=loops, prefill_loops=loops))

    def cached_tokens(self, prepared: Prepared, pool: object) -> int:
        return 0

    def usage(self) -> KVUsage:
        return KVUsage(self.num_pages, self.num_pages - sum(self.leases.values()), self.page_size)

    def admit(self, prepared: Prepared, pool: object) -> Lease | None:
        assert not self.stepping, "admit during a step"
        if prepared.pages > self.usage().available:
            return None
        prompt, text = list(prepared.prompt), SimpleNamespace(text="")
        lease = Lease(prepared.plan, prompt, len(prompt), prepared.req.max_new_tokens, None, text, None)
        lease.known, lease.todo = len(prompt), [Span(0, len(prompt))]
        self.leases[lease] = prepared.pages
        return lease

    def release(self, lease: Lease) -> None:
        assert lease not in self.stepping, "release during a step that holds the lease"
        self.leases.pop(lease, None)

    def must_wait(self, prepared: Prepared, pool: object) -> bool:
        return prepared.prompt in self.awaited

    def shortage(self, segments: list[Segment]) -> int:
        return self.shortages.popleft() if self.shortages else 0

    def suspend(self, lease: Lease) -> None:
        self.suspended[lease] = self.leases[lease]
        self.release(lease)

    def resume(self, lease: Lease) -> bool:
        if self.suspended[lease] > self.usage().available:
            return False
        self.leases[lease] = self.suspended.pop(lease)
        lease.segments.clear()
        lease.known, lease.todo = len(lease.tokens), [Span(0, len(lease.tokens))]
        return True

    def unpin_shortest(self) -> bool:
        return False

    def ready(self) -> list[Segment]:
        return [segment for lease in self.leases for segment in self._offers(lease)]

    def _offers(self, lease: Lease) -> list[Segment]:
        fresh = [
            Segment(lease, span.start, min(span.end - span.start, self.chunk), lease.plan.prefill_loops)
            for span in lease.todo
        ]
        return lease.segments + fresh

    async def step(self, segments: list[Segment]) -> StepReport:
        self.stepping = {s.lease for s in segments}
        assert self.stepping <= self.leases.keys(), "a step without a lease"
        self.steps.append(list(segments))
        self.entered.set()
        try:
            await self.gate.wait()
            self.clock.advance(0.01)
            if self.errors and (error := self.errors.popleft()):
                raise error
            return self._run(segments)
        finally:
            self.stepping = set()
            self.entered.clear()

    def _run(self, segments: list[Segment]) -> StepReport:
        leaving = [s for s in segments if s.at_boundary and not s.fresh]
        events = [event for segment in leaving for event in self._leave(segment)]
        following = [e.lease.segments[-1] for e in events if not e.finish_reason]
        for segment in [s for s in segments if s.fresh and s not in following]:
            segment.state = "hidden"
            segment.lease.segments.append(segment)
            span = segment.lease.todo[0]
            assert segment.start == span.start, "a gap in the prompt"
            span.start = segment.end
            segment.lease.todo = [span] if span.start < span.end else []
        core = [s for s in segments if s not in leaving] + following
        for segment in core:
            segment.loop += 1
        for segment in core:
            others = segment.lease.segments
            assert all(o.loop >= min(segment.loop, o.loops) for o in others if o.start < segment.start), "ran ahead"
        done = [lease for lease in dict.fromkeys(s.lease for s in segments) if lease.finish_reason]
        return StepReport(events, done, sum(s.rows for s in core), 0.01)

    def _leave(self, segment: Segment) -> list[TokenEvent]:
        lease = segment.lease
        lease.segments.remove(segment)
        if segment.end != len(lease.tokens):
            return []
        if lease.answer_tokens < lease.max_new_tokens:
            lease.tokens.append(lease.tokens[-1] + 1)
            lease.text.text += "x"
        lease.finish_reason = "length" if lease.answer_tokens >= lease.max_new_tokens else None
        if not lease.max_new_tokens:
            return []
        if not lease.finish_reason:
            lease.segments.append(Segment(lease, segment.end, 1, lease.plan.loops, state="hidden"))
        return [TokenEvent(lease, lease.tokens[-1], "x", segment.loop, finish_reason=lease.finish_reason)]

    def keep_prefix(self, lease: Lease, pool: object) -> int:
        assert lease.finish_reason, "kept before it was read"
        return pool.register_tokens(lease.tokens, lease.plan.loops, lease.plan.cache_window, lease.salt)

    def register_prefix(self, pool: object, tokens: list[int], loops: int, cache_window: int, salt: str) -> int:
        assert not self.stepping, "registering during a step"
        return pool.register_tokens(tokens, loops, cache_window)

    def check(self) -> None:
        """Nothing is held."""
        assert not self.leases
        assert not self.stepping
